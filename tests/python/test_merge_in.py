"""flash_attention with prior_out and prior_lse on the CPU: float64, the same in two calls, and rows
that no sequence has."""

from __future__ import annotations

from typing import Any

import capi
import flashmoe_science as fm
import numpy as np
import pytest
from flashmoe_science import _core

torch = pytest.importorskip("torch")

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
          "fp64": torch.float64}  # fmt: skip
POISON = 7e4
Sum = tuple[Any, Any]  # of tensors


def normal(*shape: int, seed: int = 0, dtype: str = "fp32") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[dtype])


def qkv(dtype: str, layout: str = "bshd", seq_q: int = 11, seq_k: int = 60) -> list[torch.Tensor]:
    shapes = ((2, seq_q, 4, 32), (2, seq_k, 2, 32), (2, seq_k, 2, 40))
    made = [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    return [x.transpose(1, 2).contiguous() if layout == "bhsd" else x for x in made]


def float64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Sum:
    made = fm.flash_attention(q.double(), k.double(), v.double(), return_lse=True, **options)
    return made[0], made[1]


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def same(a: Sum, b: Sum) -> bool:
    return bits(a[0]) == bits(b[0]) and bits(a[1]) == bits(b[1])


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("of_prior", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_two_parts_of_keys(dtype: str, of_prior: str, layout: str) -> None:
    q, k, v = qkv(dtype, layout)
    axis = 2 if layout == "bhsd" else 1
    (k1, k2), (v1, v2) = (x.split((23, 37), axis) for x in (k, v))
    first, first_lse = fm.flash_attention(q, k1, v1, layout=layout, return_lse=True)
    prior = first.to(DTYPES[of_prior])
    given = {"prior_out": prior, "prior_lse": first_lse}
    out, lse = fm.flash_attention(q, k2, v2, layout=layout, return_lse=True, **given)
    assert out.dtype == prior.dtype and lse.dtype == torch.float32
    own = fm.flash_attention(q, k2, v2, layout=layout, return_lse=True)
    pair = (prior, own[0]), (first_lse, own[1])
    assert same((out, lse), fm.merge_states(*pair, layout=layout, return_lse=True))
    assert bits(fm.flash_attention(q, k2, v2, layout=layout, **given)) == bits(out)
    want, want_lse = float64(q, k, v, layout=layout)
    # Roundings of the parts, of what is merged in, and of the result.
    unit = sum(torch.finfo(DTYPES[x]).eps for x in (dtype, of_prior, of_prior))
    torch.testing.assert_close(out.double(), want, rtol=unit, atol=unit)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    plan = fm.attention_plan(q, k2, v2, layout=layout, return_lse=True, **given)
    fm.flash_attention(q, k2, v2, layout=layout, return_lse=True, **given)
    assert fm.last_launches() == plan.launches
    assert plan.launches[-1].kernel.startswith("merge_states_cpu_")
    size = out.numel() * q.element_size() + lse.numel() * 4
    assert plan.workspace_bytes >= size
    tensors = (q, k2, v2, prior, first_lse, out, lse)
    assert plan.bytes == sum(x.numel() * x.element_size() for x in tensors)


def test_fp64() -> None:
    q, k, v = qkv("fp64")
    first = fm.flash_attention(q, k[:, :9], v[:, :9], return_lse=True)
    given = {"prior_out": first[0], "prior_lse": first[1]}
    got = fm.flash_attention(q, k[:, 9:], v[:, 9:], return_lse=True, **given)
    want = fm.flash_attention(q, k, v, return_lse=True)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    with pytest.raises(TypeError, match="prior_out: got dtype fp32, accepted is fp64 as q's"):
        fm.flash_attention(
            q, k, v, prior_out=first[0].float(), prior_lse=first[1], out=torch.empty_like(got[0])
        )
    out = torch.empty_like(first[0], dtype=torch.float32)
    with pytest.raises(TypeError, match="out: got dtype fp32, accepted is fp64 as q's"):
        fm.flash_attention(q, k, v, out=out, **given)


@pytest.mark.parametrize("of_out", ["fp32", "fp16", "bf16"])
def test_out_is_of_any_dtype(of_out: str) -> None:
    q, k, v = qkv("bf16")
    first, first_lse = fm.flash_attention(q, k[:, :20], v[:, :20], return_lse=True)
    out = torch.full(first.shape, POISON).to(DTYPES[of_out])
    lse = torch.full(first_lse.shape, POISON)
    given = {"prior_out": first.float(), "prior_lse": first_lse}
    own = fm.flash_attention(q, k[:, 20:], v[:, 20:], return_lse=True)
    got = fm.flash_attention(q, k[:, 20:], v[:, 20:], return_lse=True, out=out, lse=lse, **given)
    assert got[0] is out and got[1] is lse
    pair = (given["prior_out"], own[0]), (first_lse, own[1])
    assert same(got, fm.merge_states(*pair, return_lse=True, dtype=of_out))


def test_a_ring_in_place() -> None:
    """A state of fp32, to which each step adds its keys; one without a key adds nothing."""
    q, k, v = qkv("fp16")
    state = torch.full((2, 11, 4, 40), float("nan"))
    sums = torch.full((2, 4, 11), float("-inf"))
    for part in (slice(0, 7), slice(7, 7), slice(7, 40), slice(40, 60)):
        before = state.clone(), sums.clone()
        got = fm.flash_attention(
            q, k[:, part], v[:, part], prior_out=state, prior_lse=sums, out=state, lse=sums,
            return_lse=True,
        )  # fmt: skip
        assert got[0] is state and got[1] is sums
        if part.start == part.stop:
            assert same((state, sums), before)
    want, want_lse = float64(q, k, v)
    torch.testing.assert_close(state.double(), want, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(sums.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_the_gradients_of_a_part() -> None:
    """By the sums of all parts, as a ring's backward has them."""
    q, k, v = qkv("fp32")
    dout = normal(2, 11, 4, 40, seed=9)
    first = fm.flash_attention(q, k[:, :25], v[:, :25], return_lse=True)
    given = {"prior_out": first[0], "prior_lse": first[1]}
    out, lse = fm.flash_attention(q, k[:, 25:], v[:, 25:], return_lse=True, **given)
    whole = fm.flash_attention(q, k, v, return_lse=True)
    want = fm.flash_attention_backward(dout, q, k, v, *whole)
    parts = [
        fm.flash_attention_backward(dout, q, k[:, part], v[:, part], out, lse)
        for part in (slice(0, 25), slice(25, 60))
    ]
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(parts[0].dq + parts[1].dq, want.dq, **close)
    torch.testing.assert_close(torch.cat([x.dk for x in parts], 1), want.dk, **close)
    torch.testing.assert_close(torch.cat([x.dv for x in parts], 1), want.dv, **close)


def test_options_are_those_of_the_calls_own_part() -> None:
    q, k, v = qkv("fp32")
    prior = {"prior_out": normal(2, 11, 4, 40, seed=5), "prior_lse": normal(2, 4, 11, seed=6)}
    options: Any = {"causal": True, "window": (20, 0), "softcap": 4.0, "scale": 0.3,
                    "sinks": normal(4, seed=7), "return_lse": True}  # fmt: skip
    own = fm.flash_attention(q, k, v, **options)
    got = fm.flash_attention(q, k, v, **options, **prior)
    pair = (prior["prior_out"], own[0]), (prior["prior_lse"], own[1])
    assert same(got, fm.merge_states(*pair, return_lse=True))


# ---- sequences ----------------------------------------------------------------------------------


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


RAGGED: dict[str, tuple[dict[str, Any], int]] = {
    # Two rows of no sequence in front, and some behind; lengths that are used, cut, or absent.
    "packed": ({"cu_seqlens_q": int32(2, 5, 5, 9, 20)}, 1),
    "used": ({"cu_seqlens_q": int32(0, 5, 9, 14, 22), "seqused_q": int32(5, 2, -3, 99)}, 1),
    "cut": ({"cu_seqlens_q": int32(0, 5, 9, 14, 22), "max_seqlen_q": 3}, 1),
    "hostile": ({"cu_seqlens_q": int32(15, 3, -9, 7, 2**31 - 1), "seqused_q": int32(
        -(2**31), 4, 2, 2**31 - 1)}, 1),
    "padded": ({"seqused_q": int32(3, 0, 22, 7)}, 4),
    "padded and cut": ({"seqused_q": int32(3, 0, 99, -7), "max_seqlen_q": 5}, 4),
    "bounded": ({"max_seqlen_q": 5, "seqused_k": int32(9, 0, 22, 7)}, 4),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("way", RAGGED)
def test_rows_that_no_sequence_has(way: str, layout: str, dtype: str) -> None:
    """Are neither read nor written."""
    tables, batch = RAGGED[way]
    if "cu_seqlens_q" in tables:
        tables = tables | {"seqused_k": int32(40, 9, 0, 17)}
    shapes = ((batch, 22, 4, 32), (4, 40, 2, 32), (4, 40, 2, 40), (batch, 22, 4, 40))
    q, k, v, prior = (normal(*x, seed=i, dtype=dtype) for i, x in enumerate(shapes))
    sums = normal(batch, 4, 22, seed=9)
    turned = (lambda x: x.transpose(1, 2).contiguous()) if layout == "bhsd" else lambda x: x
    q, k, v, prior = map(turned, (q, k, v, prior))
    before = torch.full_like(prior, POISON), torch.full_like(sums, POISON)
    own = [x.clone() for x in before]
    fm.flash_attention(q, k, v, layout=layout, out=own[0], lse=own[1], return_lse=True, **tables)
    there = own[1][:, :1] != POISON  # [batch, 1, rows]
    rows = there[..., None] if layout == "bhsd" else there.transpose(1, 2)[..., None]
    assert there.any() and not there.all()
    pair = (prior, own[0]), (sums, own[1])
    merged = fm.merge_states(*pair, layout=layout, return_lse=True)
    want = torch.where(rows, merged[0], before[0]), torch.where(there, merged[1], before[1])
    prior = torch.where(rows, prior, float("nan"))  # not read
    sums = torch.where(there, sums, float("nan"))
    out, lse = (x.clone() for x in before)
    fm.flash_attention(
        q, k, v, layout=layout, prior_out=prior, prior_lse=sums, out=out, lse=lse,
        return_lse=True, **tables,
    )  # fmt: skip
    assert same((out, lse), want)
    state, state_lse = prior.clone(), sums.clone()
    fm.flash_attention(
        q, k, v, layout=layout, prior_out=state, prior_lse=state_lse, out=state, lse=state_lse,
        return_lse=True, **tables,
    )  # fmt: skip
    assert same(
        (state, state_lse),
        (torch.where(rows, merged[0], prior), torch.where(there, merged[1], sums)),
    )


def test_many_sequences() -> None:
    """Sequences of a few rows or none, some behind others in memory: the search for a row's
    sequence restarts."""
    rng = np.random.default_rng(0)
    starts = np.concatenate([np.sort(rng.integers(low, low + 200, 150)) for low in (200, 0)])
    tables = {"cu_seqlens_q": torch.from_numpy(starts).int(),
              "seqused_k": torch.from_numpy(rng.integers(0, 6, 299)).int()}  # fmt: skip
    q, k, v = normal(1, 400, 2, 16), normal(299, 5, 1, 16, seed=1), normal(299, 5, 1, 16, seed=2)
    prior, sums = normal(1, 400, 2, 16, seed=3), normal(1, 2, 400, seed=4)
    own = torch.full_like(prior, POISON), torch.full_like(sums, POISON)
    fm.flash_attention(q, k, v, out=own[0], lse=own[1], return_lse=True, **tables)
    there = own[1][:, :1] != POISON
    merged = fm.merge_states((prior, own[0]), (sums, own[1]), return_lse=True)
    out, lse = prior.clone(), sums.clone()
    fm.flash_attention(
        q, k, v, prior_out=out, prior_lse=lse, out=out, lse=lse, return_lse=True, **tables
    )
    rows = there.transpose(1, 2)[..., None]
    want = torch.where(rows, merged[0], prior), torch.where(there, merged[1], sums)
    assert same((out, lse), want)


def test_a_shared_prefix_and_pages() -> None:
    """A cascade: all sequences over the prefix as one, then each over its own pages."""
    q = normal(4, 1, 4, 32, dtype="bf16")
    prefix, pages = (
        [normal(*shape, seed=i + 10 * n, dtype="bf16") for i in range(2)]
        for n, shape in enumerate(((1, 30, 2, 32), (9, 4, 2, 32)))
    )
    table = int32(3, 1, 8, 2, 0, 0, 5, 7, 6, 4, 1, 2).view(4, 3)
    used = int32(11, 1, 0, 7)
    state, sums = fm.flash_attention(q.view(1, 4, 4, 32), *prefix, return_lse=True)
    state, sums = state.view(4, 1, 4, 32).float(), sums[0].t().reshape(4, 4, 1).contiguous()
    out, lse = fm.flash_attention(
        q, *pages, page_table=table, seqused_k=used, prior_out=state, prior_lse=sums,
        return_lse=True,
    )  # fmt: skip
    for b in range(4):
        own = [x[table[b]].flatten(0, 1)[: used[b]] for x in pages]
        keys = [torch.cat([p[0], o])[None] for p, o in zip(prefix, own, strict=True)]
        want, want_lse = float64(q[b : b + 1], *keys)
        torch.testing.assert_close(out[b].double(), want[0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse[b].double(), want_lse[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_bits(threads: int) -> None:
    q, k, v = qkv("bf16", seq_q=200, seq_k=333)
    prior = {"prior_out": normal(2, 200, 4, 40, seed=5), "prior_lse": normal(2, 4, 200, seed=6)}
    want = fm.flash_attention(q, k, v, return_lse=True, **prior)
    before = fm.get_num_threads()
    fm.set_num_threads(threads)
    try:
        assert same(fm.flash_attention(q, k, v, return_lse=True, **prior), want)
    finally:
        fm.set_num_threads(before)


# ---- words --------------------------------------------------------------------------------------


def described(*shape: int, dtype: tuple[int, int] = (2, 16)) -> Any:
    return shape, dtype, (capi.CPU, 0), None


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"prior_out": None}, "prior_lse: got a tensor, accepted is none without prior_out"),
    ({"prior_lse": None}, "prior_lse: got a null tensor, it is required"),
    ({"prior_out": described(2, 5, 4, 8)}, "prior_out: its head dimension is 8, but out has 16"),
    ({"prior_out": described(2, 6, 4, 16)}, "prior_out: its sequence length is 6, but out has 5"),
    ({"prior_out": described(1, 5, 4, 16)}, "prior_out: its batch is 1, but out has 2"),
    ({"prior_out": described(2, 5, 2, 16)}, "prior_out: its number of heads is 2, but out has 4"),
    ({"prior_out": described(2, 5, 16)}, "prior_out: got 3 dimensions, accepted are 4"),
    ({"prior_out": described(2, 5, 4, 16, dtype=(0, 32))}, "prior_out: got dtype int32"),
    ({"prior_lse": described(2, 5, 4, dtype=(2, 32))}, "prior_lse: its number of heads is 5"),
    ({"prior_lse": described(2, 4, 5)}, "prior_lse: got dtype fp16, accepted is fp32"),
    (
        {"out": described(2, 5, 4, 16, dtype=(0, 16))},
        "out: got dtype int16",
    ),
    ({"out": described(2, 5, 4, 24)}, "out: its head dimension is 24, but v has 16"),
]


@pytest.mark.parametrize(("change", "sentence"), ERRORS, ids=[x[1][:50] for x in ERRORS])
def test_errors(change: dict[str, Any], sentence: str) -> None:
    tensors = {
        "q": described(2, 5, 4, 16), "k": described(2, 9, 2, 16), "v": described(2, 9, 2, 16),
        "prior_out": described(2, 5, 4, 16, dtype=(2, 32)),
        "prior_lse": described(2, 4, 5, dtype=(2, 32)),
    }  # fmt: skip
    assert _core.plan("attention_forward", tensors, {})["launches"]
    given = {name: x for name, x in (tensors | change).items() if x is not None}
    with pytest.raises((ValueError, TypeError), match=f"^{sentence}".replace("(", r"\(")):
        _core.plan("attention_forward", given, {})


def test_memory_that_may_and_may_not_be_shared() -> None:
    q, k, v = qkv("fp32")
    prior, sums = normal(2, 11, 4, 40), normal(2, 4, 11)
    given = {"prior_out": prior, "prior_lse": sums}
    turned = prior.as_strided(prior.shape, (160, 320, 40, 1))
    with pytest.raises(ValueError, match="out: it shares memory with prior_out"):
        fm.flash_attention(q, k, v, out=turned, **given)
    lse = prior.view(-1)[: sums.numel()].view(sums.shape)
    with pytest.raises(ValueError, match="lse: it shares memory with prior_out"):
        fm.flash_attention(q, k, v, lse=lse, return_lse=True, **given)


def test_log() -> None:
    lines: list[str] = []
    q, k, v = qkv("bf16")
    prior = {"prior_out": normal(2, 11, 4, 40, seed=5), "prior_lse": normal(2, 4, 11, seed=6)}
    fm.set_log("info", lambda level, line: lines.append(line))
    try:
        fm.flash_attention(q, k, v, **prior)
    finally:
        fm.set_log("off")
    (line,) = lines
    assert " lse=no prior=fp32 -> fp32 device=" in line
    assert line.index("attention_forward_cpu_") < line.index("merge_states_cpu_")


# ---- frameworks ---------------------------------------------------------------------------------


def test_numpy() -> None:
    q, k, v = (x.numpy() for x in qkv("fp16"))
    prior, sums = normal(2, 11, 4, 40).numpy(), normal(2, 4, 11, seed=1).numpy()
    out = fm.flash_attention(q, k, v, prior_out=prior, prior_lse=sums)
    assert isinstance(out, np.ndarray) and out.dtype == np.float32
    ours = fm.flash_attention(*map(torch.from_numpy, (q, k, v)), prior_out=torch.from_numpy(prior),
                              prior_lse=torch.from_numpy(sums))  # fmt: skip
    np.testing.assert_array_equal(out, ours.numpy())


def test_autograd_is_refused_and_autocast_casts() -> None:
    q, k, v = qkv("fp32")
    prior = {"prior_out": normal(2, 11, 4, 40, seed=5), "prior_lse": normal(2, 4, 11, seed=6)}
    sentence = "prior_out: got one in a call that gradients are recorded of, accepted is None"
    for name in ("q", "prior_out", "prior_lse"):
        tensors = {"q": q, "k": k, "v": v, **prior}
        tensors[name] = tensors[name].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=sentence):
            fm.flash_attention(**tensors)
        with torch.no_grad():
            fm.flash_attention(**tensors)
    with torch.autocast("cpu", torch.bfloat16):
        got = fm.flash_attention(q, k, v, **prior)
    cast = [x.bfloat16() for x in (q, k, v)]
    assert bits(got) == bits(fm.flash_attention(*cast, **prior))


@pytest.mark.parametrize("ragged", [False, True])
def test_compiled(ragged: bool) -> None:
    q, k, v = qkv("fp32")
    prior = {"prior_out": normal(2, 11, 4, 40, seed=5), "prior_lse": normal(2, 4, 11, seed=6)}
    tables = {"seqused_k": int32(7, 50)} if ragged else {}
    call = lambda *x: fm.flash_attention(*x, return_lse=True, **prior, **tables)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert same(compiled(q, k, v), call(q, k, v))


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    q, k, v = (jnp.asarray(x.numpy()) for x in qkv("fp32"))
    prior, sums = (jnp.asarray(normal(*x, seed=5).numpy()) for x in ((2, 11, 4, 40), (2, 4, 11)))

    def call(q: Any, k: Any, v: Any, prior: Any, sums: Any) -> Any:
        return fm.flash_attention(q, k, v, prior_out=prior, prior_lse=sums, return_lse=True)

    want = fm.flash_attention(
        *(torch.from_numpy(np.array(x)) for x in (q, k, v)),
        prior_out=torch.from_numpy(np.array(prior)), prior_lse=torch.from_numpy(np.array(sums)),
        return_lse=True,
    )  # fmt: skip
    for made in (call(q, k, v, prior, sums), jax.jit(call)(q, k, v, prior, sums)):
        np.testing.assert_array_equal(np.asarray(made[0]), want[0].numpy())
        np.testing.assert_array_equal(np.asarray(made[1]), want[1].numpy())
    with pytest.raises(ValueError, match="a derivative of the merge of attention states is asked"):
        jax.grad(lambda q: call(q, k, v, prior, sums)[0].sum())(q)
    with pytest.raises(ValueError, match="prior_lse: got a null tensor, it is required"):
        fm.flash_attention(q, k, v, prior_out=prior)
    plan = fm.attention_plan(q, k, v, prior_out=prior, prior_lse=sums)
    assert plan.launches[-1].kernel.startswith("merge_states_cpu_")
