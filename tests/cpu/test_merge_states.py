"""The merge of partial attention results on the CPU: float64, and attention over all keys."""

from __future__ import annotations

import ctypes
import itertools

import capi
import capi_moe
import numpy as np
import pytest
from capi_merge import (
    MergeParams,
    assert_special,
    make_params,
    merged,
    partials,
    special_partials,
)
from guarded import between_guards

FP32, FP64 = np.dtype(np.float32), np.dtype(np.float64)
DTYPES = {**capi.DTYPES, "fp64": FP64}
UNITS = {"fp32": 1e-6, "fp16": 2.0**-10, "bf16": 2.0**-7, "fp64": 1e-15}
LAYOUT = {"bshd": 0, "bhsd": 1}
POISON = 7e7


def poisoned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    made = capi.aligned_empty(shape, dtype)
    made[...] = np.float32(POISON if dtype != np.float16 else 6e4)
    return made


def merge(
    outs: np.ndarray,
    lses: np.ndarray,
    *,
    layout: str = "bshd",
    prior: tuple[np.ndarray, np.ndarray] | None = None,
    dtype: np.dtype | None = None,
    lib: ctypes.CDLL | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    out = poisoned(outs.shape[-4:], dtype or outs.dtype)
    batch, seq, heads = outs.shape[-4:-1]
    seq, heads = (seq, heads) if layout == "bshd" else (heads, seq)
    lse = poisoned((batch, heads, seq), capi.sums_dtype(outs.dtype))
    prior_out, prior_lse = prior or (None, None)
    params = make_params(
        outs=outs, lses=lses, prior_out=prior_out, prior_lse=prior_lse, out=out, lse=lse,
        layout=LAYOUT[layout],
    )  # fmt: skip
    capi_moe.run(params, lib)
    return out, lse


def assert_merged(
    got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray], unit: float
) -> None:
    # Outputs are averages of numbers of magnitude 1 or so: what they round to counts.
    np.testing.assert_allclose(got[0].astype(np.float64), want[0], rtol=unit, atol=unit)
    np.testing.assert_allclose(
        got[1].astype(np.float64), want[1], rtol=2e-7, atol=1e-15 if unit < 1e-12 else 2e-6
    )


def bits(*arrays: np.ndarray) -> list[bytes]:
    return [np.ascontiguousarray(array).tobytes() for array in arrays]


# 31 to 65: as many as go through the registers at once, and those around.
@pytest.mark.parametrize("count", [0, 1, 2, 3, 31, 32, 33, 65])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUT)
def test_stacked(isa_library: ctypes.CDLL, dtype: str, layout: str, count: int) -> None:
    rng = np.random.default_rng(count)
    outs, lses = partials(rng, (count, 2, 7, 3, 40), DTYPES[dtype], layout)
    got = merge(outs, lses, layout=layout, lib=isa_library)
    assert_merged(got, merged(outs, lses, layout), UNITS[dtype])


@pytest.mark.parametrize(
    ("of_prior", "of_outs", "of_out"), list(itertools.product(capi.DTYPES, repeat=3))
)
@pytest.mark.parametrize("count", [0, 1, 2, 40])
def test_prior(
    isa_library: ctypes.CDLL, of_prior: str, of_outs: str, of_out: str, count: int
) -> None:
    """Each tensor is of a dtype of its own, and the prior partial comes first."""
    rng = np.random.default_rng(count)
    shape = (2, 5, 3, 24)
    outs, lses = partials(rng, (count, *shape), DTYPES[of_outs])
    first, first_lse = partials(rng, (1, *shape), DTYPES[of_prior])
    got = merge(outs, lses, prior=(first[0], first_lse[0]), dtype=DTYPES[of_out], lib=isa_library)
    every = np.concatenate([first.astype(np.float64), outs.astype(np.float64)])
    want = merged(every, np.concatenate([first_lse, lses]))
    assert_merged(got, want, UNITS[of_out])


def test_one_partial_without_an_axis(isa_library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(3)
    outs, lses = partials(rng, (2, 2, 5, 3, 16), FP32)
    got = merge(outs[1], lses[1], prior=(outs[0], lses[0]), lib=isa_library)
    assert bits(*got) == bits(*merge(outs, lses, lib=isa_library))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_partial_beside_empty_ones_is_the_result(isa_library: ctypes.CDLL, dtype: str) -> None:
    """All of its bits, those of -0 among them; and nothing of theirs is read."""
    rng = np.random.default_rng(5)
    outs, lses = partials(rng, (3, 1, 6, 2, 24), DTYPES[dtype])
    outs[1, 0, 0, 0, :] = np.float32(-0.0)
    lses[[0, 2]] = -np.inf
    outs[[0, 2]] = np.nan
    got = merge(outs, lses, lib=isa_library)
    assert bits(*got) == bits(outs[1], lses[1])
    got = merge(outs[1:2], lses[1:2], prior=(outs[0], lses[0]), lib=isa_library)
    assert bits(*got) == bits(outs[1], lses[1])
    got = merge(outs[2:], lses[2:], prior=(outs[1], lses[1]), lib=isa_library)
    assert bits(*got) == bits(outs[1], lses[1])


@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize("prior", [False, True])
def test_rows_that_saw_no_key(isa_library: ctypes.CDLL, count: int, prior: bool) -> None:
    outs = capi.aligned_empty((count, 1, 3, 2, 16), FP32)
    outs[...] = np.nan
    lses = np.full((count, 1, 2, 3), -np.inf, np.float32)
    first = (outs[0], lses[0]) if prior else None
    out, lse = merge(outs, lses, prior=first, lib=isa_library)
    assert (out == 0).all() and np.isneginf(lse).all()


@pytest.mark.parametrize("at", [0, 1, 2, 37])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_special_numbers(isa_library: ctypes.CDLL, dtype: str, at: int) -> None:
    """In the one row that has them, as flashmoe.h says; other rows are as they were."""
    outs, lses = special_partials(DTYPES[dtype], at)
    got = merge(outs, lses, lib=isa_library)
    out, lse = (x.astype(np.float64) for x in got)
    assert_special(out, lse, outs, at, rtol=UNITS[dtype], atol=UNITS[dtype])
    want = merged(outs[:, :, 7:], lses[..., 7:])
    assert_merged((got[0][:, 7:], got[1][..., 7:]), want, UNITS[dtype])


def test_a_nan_reaches_its_row_however_small_its_weight(isa_library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(7)
    outs, lses = partials(rng, (2, 1, 2, 1, 8), FP32)
    lses[0], lses[1] = -1e30, 1.0
    outs[0, 0, 0, 0, 5] = np.nan
    out, _ = merge(outs, lses, lib=isa_library)
    assert np.flatnonzero(np.isnan(out)).tolist() == [5]


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4, 1e30, -1e30, 3e38, -3e38])
def test_far_from_zero(isa_library: ctypes.CDLL, shift: float) -> None:
    rng = np.random.default_rng(11)
    outs, lses = partials(rng, (5, 1, 4, 3, 16), FP32)
    lses = (lses + np.float32(shift)).astype(np.float32)
    lses[4] = np.finfo(np.float32).min  # weighs nothing, if not all are so
    assert_merged(merge(outs, lses, lib=isa_library), merged(outs, lses), UNITS["fp32"])


@pytest.mark.parametrize("layout", LAYOUT)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_strides(isa_library: ctypes.CDLL, dtype: str, layout: str) -> None:
    """Partials in any order in memory, with gaps, reversed and repeated; lse with any strides."""
    rng = np.random.default_rng(13)
    kind = DTYPES[dtype]
    n, batch, seq, heads, dim = 3, 2, 5, 4, 24
    want_outs, want_lses = partials(rng, (n, batch, seq, heads, dim), kind, layout)

    def apart(array: np.ndarray, order: tuple[int, ...], width: int) -> np.ndarray:
        shape = [array.shape[axis] for axis in order]
        memory = poisoned((*shape[:-1], width), array.dtype)
        view = memory[..., : shape[-1]].transpose(np.argsort(order))
        view[...] = array
        return view

    wide = dim + 16
    outs = apart(want_outs, (1, 3, 0, 2, 4), wide)[:, :, ::-1]
    want_outs = want_outs[:, :, ::-1]
    lses = apart(want_lses, (3, 0, 2, 1), batch + 1)
    out_memory = poisoned((3, batch, want_outs.shape[3], want_outs.shape[2], wide), kind)
    out = out_memory[1, ..., :dim].transpose(0, 2, 1, 3)
    lse_memory = poisoned((seq, 2, heads, batch), FP32)
    lse = lse_memory[:, 1].transpose(2, 1, 0)
    before = out_memory.copy(), lse_memory.copy()
    params = make_params(outs=outs, lses=lses, out=out, lse=lse, layout=LAYOUT[layout])
    capi_moe.run(params, isa_library)
    want = merged(want_outs, want_lses, layout)
    assert_merged((out, lse), want, UNITS[dtype])
    out[...] = before[0][1, ..., :dim].transpose(0, 2, 1, 3)
    lse[...] = before[1][:, 1].transpose(2, 1, 0)
    assert bits(out_memory, lse_memory) == bits(*before), "wrote between its elements"

    same = np.broadcast_to(outs[1:2], outs.shape)  # one partial, n times
    got = merge(same, np.broadcast_to(lses[1:2], lses.shape), layout=layout, lib=isa_library)
    times = want_lses[1].astype(np.float64) + np.log(n)
    np.testing.assert_allclose(got[1], times, rtol=1e-6, atol=1e-6)
    unit = UNITS[dtype]
    np.testing.assert_allclose(
        got[0].astype(float), want_outs[1].astype(float), rtol=unit, atol=unit
    )


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stays_within_its_memory(isa_library: ctypes.CDLL, dtype: str, at_end: bool) -> None:
    rng = np.random.default_rng(17)
    kind = DTYPES[dtype]
    outs, lses = partials(rng, (3, 1, 3, 2, 8), kind)
    want = merge(outs[1:], lses[1:], prior=(outs[0], lses[0]), lib=isa_library)
    given = [between_guards(x, at_end) for x in (outs[1:], lses[1:], outs[0], lses[0])]
    made = [between_guards(np.empty_like(x), at_end) for x in (outs[0], lses[0])]
    names = ("outs", "lses", "prior_out", "prior_lse", "out", "lse")
    params = make_params(**dict(zip(names, given + made, strict=True)))
    capi_moe.run(params, isa_library)
    assert bits(*made) == bits(*want)


@pytest.mark.parametrize("dim", [8, 16, 136, 512, 1024, 1032, 2056])
@pytest.mark.parametrize("count", [2, 70])
def test_dims(isa_library: ctypes.CDLL, dim: int, count: int) -> None:
    """Also more columns than sums on the stack."""
    rng = np.random.default_rng(dim)
    outs, lses = partials(rng, (count, 1, 2, 2, dim), FP32)
    first = outs[0] * np.float32(2), lses[0] + np.float32(1)
    got = merge(outs, lses, prior=first, lib=isa_library)
    every = np.concatenate([first[0][None], outs])
    assert_merged(got, merged(every, np.concatenate([first[1][None], lses])), UNITS["fp32"])


@pytest.mark.parametrize("empty", ["batch", "seq", "heads"])
def test_nothing_to_do(isa_library: ctypes.CDLL, empty: str) -> None:
    shape = {"batch": 2, "seq": 3, "heads": 2} | {empty: 0}
    outs, lses = partials(np.random.default_rng(0), (2, *shape.values(), 8), FP32)
    out, lse = merge(outs, lses, lib=isa_library)
    assert out.size == lse.size == 0


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("count", [1, 40])
def test_in_place(isa_library: ctypes.CDLL, dtype: str, count: int) -> None:
    """out may be prior_out, and lse prior_lse, each alone or both."""
    rng = np.random.default_rng(19)
    kind = DTYPES[dtype]
    shape = (2, 300, 4, 40)
    outs, lses = partials(rng, (count, *shape), kind)
    first, first_lse = (x[0] for x in partials(rng, (1, *shape), kind))
    want = merge(outs, lses, prior=(first, first_lse), lib=isa_library)
    for both in (True, False):
        out, prior_lse = first.copy(), first_lse.copy()
        out = capi.aligned_empty(first.shape, kind)
        out[...] = first
        lse = prior_lse if both else np.empty_like(first_lse)
        given = {"prior_out": out, "prior_lse": prior_lse, "out": out, "lse": lse}
        capi_moe.run(make_params(outs=outs, lses=lses, **given), isa_library)
        assert bits(out, lse) == bits(*want)


def refused(status: int, *words: str, **values: object) -> None:
    """The call is refused, in words, and nothing is written."""
    lib = capi.load()
    params = make_params(**values)
    run = capi_moe.functions(params, lib)[0]
    outputs = [x for x in (values.get("out"), values.get("lse")) if isinstance(x, np.ndarray)]
    before = bits(*outputs)
    assert run(params, None, 0, None) == status
    sentence = lib.flashmoe_last_error().decode()
    for word in words:
        assert word in sentence, sentence
    assert bits(*outputs) == before


def valid(dtype: np.dtype = FP32) -> dict[str, object]:
    outs, lses = partials(np.random.default_rng(0), (2, 2, 3, 4, 16), dtype)
    sums = capi.sums_dtype(dtype)
    return {
        "outs": outs,
        "lses": lses,
        "prior_out": capi.normal(np.random.default_rng(1), (2, 3, 4, 16), dtype),
        "prior_lse": np.zeros((2, 4, 3), sums),
        "out": poisoned((2, 3, 4, 16), dtype),
        "lse": poisoned((2, 4, 3), sums),
    }


def rows(*shape: int, dtype: np.dtype = FP32) -> np.ndarray:
    return poisoned(shape, dtype)


def off(array: np.ndarray, elements: int) -> np.ndarray:
    """The same shape, that many elements further in memory that begins on a boundary."""
    memory = capi.aligned_empty((array.size + elements,), array.dtype)
    memory[...] = 0
    return memory[elements:].reshape(array.shape)


ERRORS = [
    ({"outs": None}, "outs: got a null tensor, it is required"),
    ({"outs": rows(2, 2, 3)}, "outs: got 3 dimensions, accepted are 4 (one partial) and 5"),
    ({"outs": rows(2, 2, 3, 4, 16).astype(np.int32)}, "outs: got dtype"),
    ({"outs": rows(2, 2, 3, 4, 12)}, "outs: its head dimension is 12, accepted are multiples of 8"),
    ({"outs": rows(2, 2, 3, 4, 0)}, "outs: its head dimension is 0"),
    ({"outs": rows(2, 2, 3, 4, 32)[..., ::2]}, "outs: its last dimension has stride 2"),
    ({"outs": off(rows(2, 2, 3, 4, 16), 1)}, "outs: its data begins at address"),
    ({"lses": None}, "lses: got a null tensor, it is required"),
    ({"lses": rows(2, 4, 3)}, "lses: got 3 dimensions, accepted are 4"),
    ({"lses": rows(3, 2, 4, 3)}, "lses: its number of partials is 3, but outs has 2"),
    ({"lses": rows(2, 1, 4, 3)}, "lses: its batch is 1, but outs has 2"),
    ({"lses": rows(2, 2, 3, 3)}, "lses: its number of heads is 3, but outs has 4"),
    ({"lses": rows(2, 2, 4, 4)}, "lses: its sequence length is 4, but outs has 3"),
    ({"lses": rows(2, 2, 4, 3, dtype=FP64)}, "lses: got dtype fp64, accepted is fp32"),
    ({"lses": rows(2, 2, 4, 3, dtype=np.dtype(np.float16))}, "lses: got dtype fp16"),
    ({"prior_out": None}, "prior_lse: got a tensor, accepted is none without prior_out"),
    ({"prior_lse": None}, "prior_lse: got a null tensor, it is required"),
    ({"prior_out": rows(2, 3, 4, 8)}, "prior_out: its head dimension is 8, but outs has 16"),
    ({"prior_out": rows(1, 2, 3, 4, 16)}, "prior_out: got 5 dimensions, accepted are 4"),
    ({"prior_out": rows(2, 3, 4, 16, dtype=FP64)}, "prior_out: got dtype fp64"),
    ({"prior_out": off(rows(2, 3, 4, 16), 2)}, "prior_out: its data begins"),
    ({"prior_lse": rows(2, 3, 4)}, "prior_lse: its number of heads is 3"),
    ({"out": None}, "out: got a null tensor, it is required"),
    ({"out": rows(3, 3, 4, 16)}, "out: its batch is 3, but outs has 2"),
    ({"out": rows(2, 4, 4, 16)}, "out: its sequence length is 4, but outs has 3"),
    ({"out": rows(2, 3, 5, 16)}, "out: its number of heads is 5, but outs has 4"),
    ({"out": rows(2, 3, 4, 16, dtype=FP64)}, "out: got dtype fp64, accepted are fp16, bf16"),
    ({"out": rows(2, 3, 4, 20)[..., :16], "prior_out": None, "prior_lse": None, "lse": None}, None),
    ({"out": rows(2, 3, 4, 18)[..., :16]}, "out: dimension"),
    ({"out": np.broadcast_to(rows(1, 3, 4, 16), (2, 3, 4, 16))}, "out: its strides"),
    ({"lse": rows(2, 4, 4)}, "lse: its sequence length is 4, but outs has 3"),
    ({"lse": np.broadcast_to(rows(1, 4, 3), (2, 4, 3))}, "lse: its strides"),
    ({"layout": 2}, "layout: got 2, accepted are 0 (bshd) and 1 (bhsd)"),
    ({"layout": 1}, "lses: its number of heads is 4, but outs has 3"),
    ({"reserved": 1}, "reserved: got 1, accepted is 0"),
    ({"kernel": b"sm90"}, 'kernel: got "sm90", built in are'),
    ({"kernel": b"merge_states_cpu_none"}, "kernel: cannot be served"),
]  # fmt: skip


@pytest.mark.parametrize("change", ERRORS, ids=lambda each: each[1] or "valid")
def test_errors(change: tuple[dict[str, object], str | None]) -> None:
    values, sentence = change
    if sentence is None:
        capi_moe.run(make_params(**(valid() | values)))
    else:
        status = capi.UNSUPPORTED if "cannot be served" in sentence else capi.INVALID_ARGUMENT
        refused(status, sentence, **(valid() | values))


def test_fp64_is_fp64_throughout() -> None:
    for name, accepted in (("prior_out", "fp64"), ("out", "fp64"), ("lses", "fp64")):
        given = valid(FP64)
        of = given[name]
        assert isinstance(of, np.ndarray)
        refused(
            capi.INVALID_ARGUMENT,
            f"{name}: got dtype fp32, accepted is {accepted} as outs's",
            **(given | {name: rows(*of.shape)}),
        )


def test_memory() -> None:
    """Outputs share none with what they are not, nor with the same memory in another order."""
    given = valid()
    prior, out, outs = given["prior_out"], given["out"], given["outs"]
    assert isinstance(prior, np.ndarray) and isinstance(outs, np.ndarray)
    assert isinstance(out, np.ndarray)
    refused(1, "out: it shares memory with outs", **(given | {"out": outs[0]}))
    square = capi.normal(np.random.default_rng(2), (2, 4, 4, 16), FP32)
    turned = {
        "outs": rows(1, 2, 4, 4, 16), "lses": rows(1, 2, 4, 4), "prior_out": square,
        "prior_lse": rows(2, 4, 4), "out": square.transpose(0, 2, 1, 3), "lse": None,
    }  # fmt: skip
    refused(1, "out: it shares memory with prior_out", **turned)
    behind = np.concatenate([square.ravel(), np.zeros(16, np.float32)])
    begin = capi.aligned_empty((behind.size,), FP32)
    one = begin[:512].reshape(2, 4, 4, 16)
    other = begin[16:528].reshape(2, 4, 4, 16)
    refused(
        1, "out: it shares memory with prior_out", **(turned | {"prior_out": one, "out": other})
    )
    half = begin[:256].view(np.float16).reshape(2, 4, 4, 16)
    refused(1, "out: it shares memory with prior_out", **(turned | {"prior_out": one, "out": half}))
    lses = given["lses"]
    assert isinstance(lses, np.ndarray)
    refused(1, "lse: it shares memory with lses", **(given | {"lse": lses[1]}))
    numbers = out[:, 0, 0, :12].reshape(-1)[:24]
    assert numbers.size == 24
    overlapping = out.reshape(-1)[:24].reshape(2, 4, 3)
    refused(1, "lse: it shares memory with out", **(given | {"lse": overlapping}))
    refused(
        1, "lse: it shares memory with out",
        **(given | {"prior_lse": overlapping, "lse": overlapping}),
    )  # fmt: skip


def test_tensors_on_two_devices_are_refused() -> None:
    only = {n: capi.tensor(x) for n, x in valid().items() if isinstance(x, np.ndarray)}
    only["prior_lse"].device = capi.Device(capi.CUDA, 1)
    refused(1, "prior_lse: it is on cuda:1 but outs is on cpu", **only)


def test_plan_is_the_launch(isa_library: ctypes.CDLL) -> None:
    outs, lses = partials(np.random.default_rng(0), (3, 2, 500, 8, 64), capi.BF16)
    out = rows(2, 500, 8, 64)
    params = make_params(outs=outs, lses=lses, out=out)
    plan = capi_moe.plan_of(params, isa_library)
    assert plan.operation == b"merge_states" and plan.family == b"cpu"
    assert plan.workspace_bytes == 0 and len(plan.launches) == 1
    launch = plan.launches[0]
    isa = plan.isa.decode()
    assert launch.kernel.decode() == f"merge_states_cpu_{isa}_bf16_dv64"
    assert launch.dim_v == 64
    tile = launch.tile_m
    assert launch.grid[0] == -(-2 * 500 * 8 // tile) > 1
    assert plan.bytes == outs.nbytes + lses.nbytes + out.nbytes
    assert plan.flops == 2 * outs.size
    capi_moe.run(params, isa_library)
    assert capi.is_planned(plan, capi.last_launches(isa_library))
    named = make_params(outs=outs, lses=lses, out=out, kernel=launch.kernel)
    capi_moe.run(named, isa_library)


def test_bits_do_not_depend_on_threads(isa_library: ctypes.CDLL) -> None:
    outs, lses = partials(np.random.default_rng(23), (5, 3, 700, 4, 64), capi.BF16)
    results = []
    try:
        for threads in (1, 2, 3, 7):
            assert isa_library.flashmoe_set_num_threads(threads) == capi.OK
            results.append(bits(*merge(outs, lses, dtype=FP32, lib=isa_library)))
            assert capi.last_launches(isa_library)[0].block[0] == threads
    finally:
        isa_library.flashmoe_set_num_threads(0)
    assert results.count(results[0]) == len(results)


@pytest.mark.parametrize("layout", LAYOUT)
def test_rows_are_on_their_own(isa_library: ctypes.CDLL, layout: str) -> None:
    """The bits of a row do not depend on what else is in the batch, nor on the layout."""
    outs, lses = partials(np.random.default_rng(29), (4, 2, 9, 5, 48), FP32)
    want = merge(outs, lses, lib=isa_library)
    part = merge(
        np.ascontiguousarray(outs[:, 1:, 4:6]), np.ascontiguousarray(lses[:, 1:, :, 4:6]),
        lib=isa_library,
    )  # fmt: skip
    assert bits(*part) == bits(want[0][1:, 4:6], want[1][1:, :, 4:6])
    if layout == "bhsd":
        turned = merge(outs.transpose(0, 1, 3, 2, 4), lses, layout="bhsd", lib=isa_library)
        assert bits(*turned) == bits(want[0].transpose(0, 2, 1, 3), want[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_any_order_and_grouping(isa_library: ctypes.CDLL, dtype: str) -> None:
    """Associative and commutative to rounding, by partial sums in fp32."""
    outs, lses = partials(np.random.default_rng(31), (6, 1, 5, 3, 32), DTYPES[dtype])
    wide = FP64 if dtype == "fp64" else FP32
    want = merged(outs, lses)
    by_twos = [
        merge(outs[i : i + 2], lses[i : i + 2], dtype=wide, lib=isa_library) for i in (0, 2, 4)
    ]
    stacked = capi.aligned_empty((3, *outs.shape[1:]), wide)
    stacked[...] = [out for out, _ in by_twos]
    together = merge(stacked, np.stack([lse for _, lse in by_twos]), lib=isa_library)
    assert_merged(together, want, 2 * UNITS["fp64" if dtype == "fp64" else "fp32"])
    out, lse = merge(outs[:1], lses[:1], dtype=wide, lib=isa_library)
    for i in range(1, 6):
        out, lse = merge(outs[i], lses[i], prior=(out, lse), dtype=wide, lib=isa_library)
    assert_merged((out, lse), want, 3 * UNITS["fp64" if dtype == "fp64" else "fp32"])
    back = merge(outs[::-1], lses[::-1], dtype=wide, lib=isa_library)
    assert_merged(back, want, 2 * UNITS["fp64" if dtype == "fp64" else "fp32"])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("layout", LAYOUT)
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_over_all_keys(dtype: str, layout: str, sinks: bool) -> None:
    """Partials are attention over parts of the keys, written in place; only one of them gets
    sinks."""
    rng = np.random.default_rng(37)
    kind = DTYPES[dtype]
    batch, seq_q, seq_k, heads, kv, dim = 2, 5, 37, 4, 2, 32
    axis = 1 if layout == "bshd" else 2

    def tensor(seq: int, count: int) -> np.ndarray:
        shape = (batch, seq, count, dim) if layout == "bshd" else (batch, count, seq, dim)
        return capi.normal(rng, shape, kind)

    q, k, v = tensor(seq_q, heads), tensor(seq_k, kv), tensor(seq_k, kv)
    logits = rng.standard_normal(heads).astype(np.float32) if sinks else None
    cuts = [0, 0, 16, 17, 37]  # of one part without a key
    outs = poisoned((4, *q.shape), kind)
    lses = poisoned((4, batch, heads, seq_q), capi.sums_dtype(kind))
    for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
        part = [slice(None)] * 4
        part[axis] = slice(begin, end)
        params = capi.attention_params(
            q, k[tuple(part)], v[tuple(part)], outs[i], lses[i], layout=layout,
            sinks=logits if i == 2 else None,
        )  # fmt: skip
        capi.run_attention(params)
    got = merge(outs, lses, layout=layout)
    out, lse = poisoned(q.shape, kind), np.empty_like(lses[0])
    capi.run_attention(capi.attention_params(q, k, v, out, lse, layout=layout, sinks=logits))
    assert_merged(got, (out.astype(np.float64), lse.astype(np.float64)), 3 * UNITS[dtype])
    if sinks:  # as a partial of its own
        assert logits is not None
        sink_lse = np.broadcast_to(logits.astype(lses.dtype)[None, :, None], lses[0].shape)
        none, none_lse = poisoned(q.shape, kind), np.empty_like(lses[0])
        capi.run_attention(capi.attention_params(q, k, v, none, none_lse, layout=layout))
        alone = merge(none, none_lse, layout=layout, prior=(np.zeros_like(none), sink_lse))
        assert_merged(alone, (out.astype(np.float64), lse.astype(np.float64)), 3 * UNITS[dtype])


# ---- any call ----------------------------------------------------------------------------------

FAULTS = {
    "struct_size": ("flashmoe_merge_states_params", [0, 8, 71, 73, 4096]),
    "layout": ("layout", [-1, 2, 2**31 - 1]),
    "reserved": ("reserved", [1, 2**32 - 1]),
    "kernel": ("kernel", [b"sm89", b"CPU", b"x" * 5000]),
}
TENSORS = ("outs", "lses", "prior_out", "prior_lse", "out", "lse")


@pytest.mark.parametrize("seed", range(60))
def test_any_call(seed: int) -> None:
    """Valid calls of random extents, dtypes and tensors agree with float64; with one field spoiled,
    whichever, a call is refused by a sentence that names it, and nothing is written."""
    rng = np.random.default_rng(seed)
    lib = capi.load()
    dtype, other, of_out = (list(capi.DTYPES)[i] for i in rng.integers(0, 3, 3))
    if rng.random() < 0.2:
        dtype = other = of_out = "fp64"
    layout = "bhsd" if rng.random() < 0.5 else "bshd"
    shape = (*rng.integers(0, 5, 4), 8 * rng.integers(1, 9))
    outs, lses = partials(rng, shape, DTYPES[dtype], layout)
    lses[rng.random(lses.shape) < 0.2] = -np.inf
    values = {"outs": outs, "lses": lses, "layout": LAYOUT[layout]}
    every, every_lse = outs.astype(np.float64), lses.astype(np.float64)
    if rng.random() < 0.5:
        first, first_lse = partials(rng, (1, *shape[1:]), DTYPES[other], layout)
        values |= {"prior_out": first[0], "prior_lse": first_lse[0]}
        every = np.concatenate([first.astype(np.float64), every])
        every_lse = np.concatenate([first_lse, every_lse])
    values["out"] = poisoned(outs.shape[1:], DTYPES[of_out])
    values["lse"] = poisoned(lses.shape[1:], lses.dtype)
    capi_moe.run(make_params(**values))
    assert_merged((values["out"], values["lse"]), merged(every, every_lse, layout), UNITS[of_out])

    for name, (named, wrong) in FAULTS.items():
        for value in wrong:
            params = make_params(**values)
            setattr(params, name, value)
            expect_refusal(lib, params, values, named)
    for name in TENSORS:
        if name not in values:
            continue
        for field, value in (
            ("ndim", 7), ("ndim", 0), ("shape", None), ("dtype", capi.DType(0, 32, 1)),
            ("dtype", capi.DType(2, 32, 2)), ("device", capi.Device(4, 0)),
            ("device", capi.Device(capi.CUDA, 3)), ("byte_offset", 2**64 - 8), ("data", None),
            ("extent", -1), ("extent", 2**62), ("stride", 2**61),
        ):  # fmt: skip
            tensor = capi.tensor(values[name])
            empty = values[name].size == 0
            if field in ("extent", "stride"):
                axis = int(rng.integers(0, tensor.ndim - 1))
                if field == "stride" and (empty or tensor.shape[axis] < 2):
                    continue
                (tensor.shape if field == "extent" else tensor.strides)[axis] = value
            elif field == "shape":
                tensor.shape = ctypes.POINTER(ctypes.c_int64)()
            elif field == "data" and empty:
                continue
            else:
                setattr(tensor, field, value)
            params = make_params(**(values | {name: tensor}))
            # An extent of outs is what the others are held against.
            others = TENSORS if name == "outs" else (name,)
            expect_refusal(lib, params, values, *others)


def expect_refusal(
    lib: ctypes.CDLL, params: MergeParams, values: dict[str, object], *named: str
) -> None:
    outputs = [values["out"], values["lse"]]
    before = bits(*outputs)  # type: ignore[arg-type]
    run, plan, size = capi_moe.functions(params, lib)
    made = capi.Plan(struct_size=ctypes.sizeof(capi.Plan))
    count = ctypes.c_size_t(77)
    for status in (plan(params, made), size(params, count), run(params, None, 0, None)):
        assert status in (capi.INVALID_ARGUMENT, capi.UNSUPPORTED)
        sentence = lib.flashmoe_last_error().decode()
        assert sentence.partition(":")[0].partition(".")[0] in named, sentence
    assert made.launch_count == 0 and count.value == 77
    assert bits(*outputs) == before  # type: ignore[arg-type]
