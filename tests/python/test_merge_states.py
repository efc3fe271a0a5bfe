"""merge_states from Python: every framework, its own outputs, traces, and what is refused."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import capi
import flashmoe_science as fm
import numpy as np
import producers
import pytest
from capi_merge import merged
from flashmoe_science import _core
from producers import ON_CPU, Producer
from reference import dtype_of, to_numpy

UNITS = {"fp32": 1e-6, "fp16": 2.0**-10, "bf16": 2.0**-7}
SHAPE = (3, 2, 7, 4, 16)


def values(layout: str = "bshd", seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """outs and lses, of which some rows saw no key."""
    rng = np.random.default_rng(seed)
    n, batch, seq, heads, dim = SHAPE
    rows = (seq, heads) if layout == "bshd" else (heads, seq)
    outs = capi.normal(rng, (n, batch, *rows, dim), np.dtype(np.float32))
    lses = rng.normal(0, 3, (n, batch, heads, seq)).astype(np.float32)
    lses[1, 0, 1] = -np.inf
    lses[:, 1, 2, 3] = -np.inf
    return outs, lses


def made(producer: Producer, outs: np.ndarray, lses: np.ndarray, dtype: str) -> tuple[Any, Any]:
    return producer.make(outs, dtype), producer.make(lses, "fp32")


def host(result: Any) -> np.ndarray:
    root = type(result).__module__.partition(".")[0]
    return np.asarray(result) if root in ("producers", "array_api_strict") else to_numpy(result)


def assert_merged(
    got: tuple[Any, Any], outs: Any, lses: Any, unit: float, layout: str = "bshd"
) -> None:
    want = merged(outs, lses, layout)
    np.testing.assert_allclose(host(got[0]).astype(float), want[0], rtol=unit, atol=unit)
    np.testing.assert_allclose(host(got[1]).astype(float), want[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("producer", "dtype"), [(p, dtype) for p in ON_CPU for dtype in p.dtypes], ids=str
)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_every_framework(producer: Producer, dtype: str, layout: str) -> None:
    outs, lses = values(layout)
    x, sums = made(producer, outs, lses, dtype)
    rounded = producers.cast(outs, dtype)
    out, lse = fm.merge_states(x, sums, layout=layout, return_lse=True)
    assert isinstance(out, producer.kind) and isinstance(lse, producer.kind)
    assert_merged((out, lse), rounded, lses, UNITS[dtype], layout)
    np.testing.assert_array_equal(host(fm.merge_states(x, sums, layout=layout)), host(out))

    parts = [made(producer, outs[i], lses[i], dtype) for i in range(2)]
    pair = fm.merge_states(
        [part[0] for part in parts], tuple(part[1] for part in parts), layout=layout,
        return_lse=True,
    )  # fmt: skip
    assert_merged(pair, rounded[:2], lses[:2], UNITS[dtype], layout)
    one = fm.merge_states(*parts[0], layout=layout)
    rows = lses[0] if layout == "bhsd" else lses[0].swapaxes(1, 2)
    np.testing.assert_array_equal(host(one), np.where(np.isneginf(rows)[..., None], 0, rounded[0]))
    if dtype != "fp32":
        wide, _ = fm.merge_states(x, sums, layout=layout, return_lse=True, dtype="fp32")
        assert dtype_of(wide) == np.float32
        assert_merged((wide, lse), rounded, lses, UNITS["fp32"], layout)


@pytest.mark.parametrize("producer", [p for p in ON_CPU if p.takes_out], ids=str)
def test_outputs_of_ones_own(producer: Producer) -> None:
    outs, lses = values()
    dtype = "fp16" if "fp16" in producer.dtypes else "fp32"
    x, sums = made(producer, outs, lses, dtype)
    out = producer.poisoned(outs.shape[1:], "fp32")
    lse = producer.poisoned(lses.shape[1:], "fp32")
    got = fm.merge_states(x, sums, out=out, lse=lse, return_lse=True)
    assert got[0] is out and got[1] is lse
    assert_merged(got, producers.cast(outs, dtype), lses, 1e-6)
    assert fm.merge_states(x, sums, out=out) is out


@pytest.mark.parametrize("producer", [p for p in ON_CPU if p.takes_out], ids=str)
def test_a_ring_adds_in_place(producer: Producer) -> None:
    """A state of fp32, to which partials of 16 bits come one by one."""
    dtype = "fp16" if "fp16" in producer.dtypes else "fp32"
    outs, lses = values()
    state, sums = made(producer, np.zeros_like(outs[0]), np.full_like(lses[0], -np.inf), "fp32")
    for i in range(len(outs)):
        out, lse = made(producer, outs[i], lses[i], dtype)
        got = fm.merge_states((state, out), (sums, lse), out=state, lse=sums, return_lse=True)
        assert got[0] is state and got[1] is sums
    assert_merged((state, sums), producers.cast(outs, dtype), lses, 2e-6)


def by_pairs(outs: Any, lses: Any, dtype: str, **options: Any) -> tuple[Any, Any]:
    """What merging one partial after another gives, with a state of fp32 in between."""
    state = outs[0], lses[0]
    for i in range(1, len(outs)):
        of_state = dtype if i + 1 == len(outs) else "fp32"
        state = fm.merge_states(
            (state[0], outs[i]), (state[1], lses[i]), dtype=of_state, return_lse=True, **options
        )
    return state


@pytest.mark.parametrize(
    ("producer", "dtype"), [(p, dtype) for p in ON_CPU for dtype in p.dtypes], ids=str
)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_more_than_two_tensors(producer: Producer, dtype: str, layout: str) -> None:
    """The bits are those of one after another, and of any first ones that were merged before."""
    outs, lses = (
        np.concatenate([x, y]) for x, y in zip(values(layout), values(layout, 1), strict=True)
    )
    parts = [made(producer, *part, dtype) for part in zip(outs, lses, strict=True)]
    x, sums = [part[0] for part in parts], tuple(part[1] for part in parts)
    asked = {"layout": layout, "return_lse": True, "dtype": dtype}
    out, lse = fm.merge_states(x, sums, **asked)
    assert isinstance(out, producer.kind) and isinstance(lse, producer.kind)
    if hasattr(x[0], "dtype"):
        assert dtype_of(out) == dtype_of(x[0]) == dtype_of(fm.merge_states(x, sums, layout=layout))
    else:
        with pytest.raises(
            TypeError, match=r"^dtype: got None, but outs\[0\] does not say its own"
        ):
            fm.merge_states(x, sums, layout=layout)
    assert_merged((out, lse), producers.cast(outs, dtype), lses, UNITS[dtype], layout)
    for got in (
        by_pairs(x, sums, dtype, layout=layout),
        fm.merge_states(  # the first four are a state of fp32 and are merged no other way
            [(state := fm.merge_states(x[:4], sums[:4], **asked | {"dtype": "fp32"}))[0], *x[4:]],
            [state[1], *sums[4:]],
            **asked,
        ),
    ):
        np.testing.assert_array_equal(host(got[0]), host(out))
        np.testing.assert_array_equal(host(got[1]), host(lse))
    one = fm.merge_states(x[:1], sums[:1], layout=layout)
    np.testing.assert_array_equal(host(one), host(fm.merge_states(x[0], sums[0], layout=layout)))


def test_more_than_two_tensors_of_any_strides() -> None:
    """With different dtypes, and with numbers that are not read: NaN in the out of parts without a
    key."""
    outs, lses = values()
    lses[2, 0, 0, 0] = np.nan
    empty = np.isneginf(lses).swapaxes(2, 3)
    poisoned = np.where(empty[..., None], np.nan, outs).astype(np.float32)
    backwards = [x[::-1].copy()[::-1] for x in poisoned]
    backwards[1] = backwards[1].astype(np.float16)
    turned = [np.ascontiguousarray(x.T).T for x in lses]
    out, lse = fm.merge_states(backwards, turned, return_lse=True)
    assert out.dtype == np.float32
    held = outs.copy()
    held[1] = held[1].astype(np.float16)
    assert_merged((out, lse), held, lses, 1e-6)
    assert np.isnan(out[0, 0, 0]).all() and np.isneginf(lse[1, 2, 3]) and (out[1, 3, 2] == 0).all()


def test_more_than_two_tensors_in_place() -> None:
    outs, lses = values()
    want = fm.merge_states(list(outs), list(lses), return_lse=True)
    kept = outs[1:].copy()
    got = fm.merge_states(list(outs), list(lses), out=outs[0], lse=lses[0], return_lse=True)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(outs[0], want[0])
    np.testing.assert_array_equal(outs[1:], kept)


def test_more_than_two_tensors_of_fp64() -> None:
    rng = np.random.default_rng(2)
    outs, lses = rng.standard_normal((4, 1, 3, 2, 8)), rng.standard_normal((4, 1, 2, 3))
    out, lse = fm.merge_states(list(outs), list(lses), return_lse=True)
    assert out.dtype == lse.dtype == np.float64
    want = merged(outs, lses, "bshd")
    np.testing.assert_allclose(out, want[0], rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(lse, want[1], rtol=1e-14, atol=1e-14)


def test_new_outputs_are_of_the_first_partials_dtype() -> None:
    outs, lses = values()
    half = outs.astype(np.float16)
    two = (lses[0], lses[1])
    assert fm.merge_states((outs[0], half[1]), two).dtype == np.float32
    assert fm.merge_states((half[0], outs[1]), two).dtype == np.float16
    for dtype in ("fp16", "float16", np.dtype(np.float16), np.float16):
        assert fm.merge_states(outs, lses, dtype=dtype).dtype == np.float16
    with pytest.raises(fm.FlashMoEError, match=r"^out: .*(fp64|float64)"):
        fm.merge_states(outs, lses, dtype="fp64")
    wide = outs.astype(np.float64)
    out, lse = fm.merge_states(wide, lses.astype(np.float64), return_lse=True)
    assert out.dtype == lse.dtype == np.float64


def test_parts_of_attention() -> None:
    """Slices of one array are the outs of attention, and its partials."""
    rng = np.random.default_rng(1)
    q, k, v = (
        capi.normal(rng, (2, seq, heads, 32), np.dtype(np.float32))
        for seq, heads in ((9, 4), (50, 2), (50, 2))
    )
    outs = np.empty((3, *q.shape), np.float32)
    lses = np.empty((3, 2, 4, 9), np.float32)
    for i, part in enumerate((slice(0, 20), slice(20, 21), slice(21, 50))):
        fm.flash_attention(q, k[:, part], v[:, part], return_lse=True, out=outs[i], lse=lses[i])
    out, lse = fm.merge_states(outs, lses, return_lse=True)
    want, want_lse = fm.flash_attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(out, want, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-6)


def test_plan() -> None:
    outs, lses = values()
    plan = fm.merge_states_plan(outs, lses, return_lse=True)
    assert plan.operation == "merge_states" and plan.family == "cpu"
    fm.merge_states(outs, lses, return_lse=True)
    assert fm.last_launches() == plan.launches
    pair = fm.merge_states_plan((outs[0], outs[1]), (lses[0], lses[1]), dtype="bf16")
    assert pair.bytes == 2 * (outs[0].nbytes + lses[0].nbytes) + outs[0].nbytes / 2
    with pytest.raises(ValueError, match=r"lses: its number of partials is 2, but outs has 3"):
        fm.merge_states_plan(outs, lses[:2])


ERRORS: list[tuple[type, str, Any]] = [
    (TypeError, r"outs: got int, accepted is a tensor", lambda o, s: fm.merge_states(3, s)),
    (TypeError, r"lses: got ndarray, accepted are as many tensors as outs has where outs is a seq",
     lambda o, s: fm.merge_states((o[0], o[1]), s)),
    (TypeError, r"lses: got tuple", lambda o, s: fm.merge_states(o, (s[0], s[1]))),
    (ValueError, r"outs: got a sequence of no tensors, accepted are one and more, or one tensor",
     lambda o, s: fm.merge_states([], [])),
    (ValueError, r"lses: got a sequence of 1 tensors, accepted are as many as outs has, 2",
     lambda o, s: fm.merge_states(list(o[:2]), [s])),
    (TypeError, r"outs\[1\]: got None, accepted is a tensor",
     lambda o, s: fm.merge_states([o[0], None], list(s[:2]))),
    (TypeError, r"lses\[0\]: got None", lambda o, s: fm.merge_states(list(o[:2]), [None, s[0]])),
    (ValueError, r"outs: got 3 dimensions, accepted are 4",
     lambda o, s: fm.merge_states(o[0, 0], s)),
    (ValueError, r"prior_out: its head dimension is 8, but outs has 16",
     lambda o, s: fm.merge_states((o[0][..., :8].copy(), o[1]), (s[0], s[1]))),
    (ValueError, r"prior_out: got 5 dimensions, accepted are 4",
     lambda o, s: fm.merge_states((o, o), (s, s))),
    (ValueError, r"prior_lse: its number of heads is 3, but outs has 4",
     lambda o, s: fm.merge_states((o[0], o[1]), (s[0][:, :3], s[1]))),
    (ValueError, r"lses: its number of heads is 3, but outs has 4",
     lambda o, s: fm.merge_states((o[0], o[1]), (s[0], s[1][:, :3]))),
    (TypeError, r"lses: got dtype fp16, accepted is fp32",
     lambda o, s: fm.merge_states(o, s.astype(np.float16))),
    (TypeError, r"dtype: got dtype int8, accepted are fp16, bf16, fp32 and fp64",
     lambda o, s: fm.merge_states(o, s, dtype="int8")),
    (ValueError, r"layout: got 'sbhd'", lambda o, s: fm.merge_states(o, s, layout="sbhd")),
    (TypeError, r"return_lse: got 1 of type int", lambda o, s: fm.merge_states(o, s, return_lse=1)),
    (ValueError, r'kernel: got "sm90", built in are',
     lambda o, s: fm.merge_states(o, s, kernel="sm90")),
    (ValueError, r"out: it shares memory with outs", lambda o, s: fm.merge_states(o, s, out=o[1])),
    (ValueError, r"out: it shares memory with outs",
     lambda o, s: fm.merge_states((o[0], o[1]), (s[0], s[1]), out=o[1])),
    (ValueError, r"out: it shares memory with prior_out",
     lambda o, s: fm.merge_states((o[0], o[1]), (s[0], s[1]), out=o[0][::-1])),
    (ValueError, r"outs\[0\]: its sequence length is 7, but outs\[2\] has 6",
     lambda o, s: fm.merge_states([o[0], o[1], o[2][:, :6]], [s[0], s[1], s[2][..., :6]])),
    (ValueError, r"outs\[0\]: its head dimension is 8, but outs\[1\] has 16",
     lambda o, s: fm.merge_states([o[0][..., :8].copy(), o[1], o[2]], list(s))),
    (ValueError, r"lses\[0\]: its number of heads is 3, but outs\[1\] has 4",
     lambda o, s: fm.merge_states(list(o), [s[0][:, :3], s[1], s[2]])),
    (TypeError, r"lses\[2\]: got dtype fp16, accepted is fp32",
     lambda o, s: fm.merge_states(list(o), [s[0], s[1], s[2].astype(np.float16)])),
    (ValueError, r"out: it shares memory with outs\[2\]",
     lambda o, s: fm.merge_states(list(o), list(s), out=o[2])),
    (ValueError, r"outs: got a sequence of 3 tensors, accepted in a plan are at most two",
     lambda o, s: fm.merge_states_plan(list(o), list(s))),
    (ValueError, r"out: its sequence length is 6, but outs has 7",
     lambda o, s: fm.merge_states(o, s, out=np.empty_like(o[0][:, :6]))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sentence", "call"), ERRORS, ids=[sentence[:60] for _, sentence, _ in ERRORS]
)
def test_errors(kind: type, sentence: str, call: Any) -> None:
    outs, lses = values()
    before = outs.copy()
    with pytest.raises(kind, match=sentence) as raised:
        call(outs, lses)
    assert isinstance(raised.value, fm.FlashMoEError)
    np.testing.assert_array_equal(outs, before)


def test_numpy_makes_bfloat16_beside_others_alone() -> None:
    outs, lses = values()
    with pytest.raises(TypeError, match="dtype: got bfloat16, which NumPy has in the arrays of"):
        fm.merge_states(outs, lses, dtype="bf16")
    brain = outs.astype(capi.BF16)
    out = fm.merge_states((outs[0], brain[1]), (lses[0], lses[1]), dtype="bf16")
    assert out.dtype == capi.BF16
    both = np.stack([outs[0], brain[1].astype(np.float32)])
    want = merged(both, lses[:2])
    assert_merged((out, want[1]), both, lses[:2], UNITS["bf16"])


def test_fp64_on_a_gpu_is_refused() -> None:
    def described(*shape: int) -> Any:
        return shape, (2, 64), (capi.CUDA, 0), None

    sentence = r"^outs: got dtype fp64, accepted are fp16, bf16 and fp32"
    tensors = {"outs": described(2, 1, 3, 4, 16), "lses": described(2, 1, 4, 3)}
    with pytest.raises(TypeError, match=sentence):
        _core.plan("merge_states", tensors, {})


def test_log() -> None:
    lines: list[str] = []
    outs, lses = values("bhsd")
    fm.set_log("info", lambda level, line: lines.append(line.partition(" device=")[0]))
    try:
        fm.merge_states(outs, lses, layout="bhsd")
        fm.merge_states(
            (outs[0], outs[1].astype(np.float16)), (lses[0], lses[1]), layout="bhsd",
            return_lse=True,
        )  # fmt: skip
    finally:
        fm.set_log("off")
    assert lines == [
        "merge_states partials=3 prior=no batch=2 seq=7 heads=4 dim=16 fp32 -> fp32 layout=bhsd "
        "lse=no",
        "merge_states partials=1 prior=fp32 batch=2 seq=7 heads=4 dim=16 fp16 -> fp32 layout=bhsd "
        "lse=yes",
    ]


@pytest.mark.parametrize("module", ["flashmoe_science", "flashmoe_science.torch"])
def test_more_than_two_tensors_in_one_graph(module: str) -> None:
    torch = pytest.importorskip("torch")
    merge = importlib.import_module(module).merge_states
    outs, lses = (torch.from_numpy(x) for x in values())

    def program(outs: Any, lses: Any) -> Any:
        return merge(outs.bfloat16().unbind(), lses.unbind(), return_lse=True)

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(outs, lses), program(outs, lses), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


# ---- JAX ----------------------------------------------------------------------------------------


def test_jax_compiled_and_mapped() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    outs, lses = values()
    x, sums = jnp.asarray(outs, jnp.bfloat16), jnp.asarray(lses)

    def program(x: Any, sums: Any) -> Any:
        return fm.merge_states(x, sums, dtype=jnp.float32, return_lse=True)

    rounded = np.asarray(x.astype(jnp.float32))
    got = jax.jit(program)(x, sums)
    assert got[0].dtype == jnp.float32
    assert_merged(got, rounded, lses, 1e-6)
    pair = jax.jit(lambda a, b, s, t: fm.merge_states((a, b), (s, t), layout="bhsd"))
    turned = x.swapaxes(2, 3)
    np.testing.assert_array_equal(
        np.asarray(pair(turned[0].astype(jnp.float32), turned[1], sums[0], sums[1])),
        np.asarray(fm.merge_states(x[:2], sums[:2], dtype="fp32").swapaxes(1, 2)),
    )
    several = jax.jit(lambda x, sums: fm.merge_states(list(x), list(sums), return_lse=True))
    eager = fm.merge_states(list(x), list(sums), return_lse=True)
    for ours, theirs in zip(several(x, sums), eager, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    mapped = jax.vmap(program, in_axes=(None, 0))(x, jnp.stack([sums, sums[::-1]]))
    assert_merged([y[0] for y in mapped], rounded, lses, 1e-6)
    assert_merged([y[1] for y in mapped], rounded, lses[::-1], 1e-6)


def test_jax_refuses_derivatives_and_outputs() -> None:
    jax = pytest.importorskip("jax")
    outs, lses = map(jax.numpy.asarray, values())
    gradient = jax.grad(lambda x: fm.merge_states(x, lses).sum())
    for program in (gradient, jax.jit(gradient)):
        with pytest.raises(ValueError, match="a derivative of the merge of attention states is"):
            program(outs)
    stopped = jax.grad(lambda x: x.sum() + fm.merge_states(jax.lax.stop_gradient(x), lses).sum())(
        outs
    )
    assert (np.asarray(stopped) == 1).all()
    with pytest.raises(ValueError, match="out: JAX arrays cannot be written to; leave it None"):
        fm.merge_states(outs, lses, out=outs[0])
    with pytest.raises(ValueError, match="stream: XLA chooses the stream of JAX arrays"):
        fm.merge_states(outs, lses, stream=1)
    with pytest.raises(ValueError, match="lses: its number of partials is 2, but outs has 3"):
        jax.jit(fm.merge_states)(outs, lses[:2])
    assert fm.merge_states_plan(outs, lses).launches[0].kernel.startswith("merge_states_cpu")


def test_the_native_call_by_name() -> None:
    """What JAX and other frameworks go by: outputs that are not there are made."""
    outs, lses = values()
    kept: dict[str, np.ndarray] = {}

    def allocate(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        kept[name] = np.full(shape, np.nan, dtype)
        return kept[name]

    options = {"return_lse": True, "dtype": "float16", "layout": "bshd"}
    _core.call("merge_states", {"outs": outs, "lses": lses}, options, allocate, None)
    assert kept["out"].dtype == np.float16
    assert_merged((kept["out"], kept["lse"]), outs, lses, UNITS["fp16"])
