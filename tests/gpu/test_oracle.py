"""The GPU suite's own machinery, tried without a GPU: its oracle and its calls, on the CPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import reference
import reference_backward
import torch
from gpu import backward, cases, memory, oracle
from gpu.cases import Case


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", cases.CAUSAL)
@pytest.mark.parametrize(("seq_q", "seq_k"), [(40, 40), (9, 70), (70, 9)])
@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), ((5, None), 0.6), ((None, 0), None), ((0, 0), 20.0)]
)
def test_agrees_with_the_reference(
    layout: str,
    causal: str,
    seq_q: int,
    seq_k: int,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
) -> None:
    case = Case(batch=2, seq_q=seq_q, seq_k=seq_k, heads_q=4, heads_kv=2, dim=16, dim_v=24,
                layout=layout)  # fmt: skip
    for dtype in cases.DTYPES:
        q, k, v = cases.make_values(dataclasses.replace(case, dtype=dtype), "cpu")
        v.view(torch.int16).flatten()[-3] = 0x7FC0  # NaN of either dtype
        options = {"causal": causal, "layout": layout, "scale": 0.3}
        options |= {"window": window, "softcap": softcap}
        if seq_q != seq_k:
            options["sinks"] = torch.tensor([0.5, torch.inf, -torch.inf, -3.0])
        want = reference.attention_float64(q, k, v, **options)
        got = oracle.attention_float64(q, k, v, **options)
        out = oracle.heads_first(got.out, layout).numpy()  # and back
        np.testing.assert_allclose(out, want.out, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(got.lse.numpy(), want.lse, rtol=1e-12)
        usual = reference.plain(q, k, v, dtype=reference.DTYPES[dtype], **options)
        got = oracle.plain(q, k, v, **options)
        out = oracle.heads_first(got.out, layout).numpy()
        ulp = reference.ulp(reference.DTYPES[dtype], 1.0)
        np.testing.assert_allclose(out, usual.out, atol=2 * ulp)
        for size in (1e-3, 0.99, 1.0, 1.01, 37.0):
            assert oracle.ulp(cases.DTYPES[dtype], size) == reference.ulp(
                reference.DTYPES[dtype], size
            )


def test_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(batch=2, seq_q=33, seq_k=50, heads_q=4, heads_kv=2, causal="bottom_right")
    q, k, v = cases.make_values(case, "cpu")
    whole = oracle.attention_float64(q, k, v, case.causal)
    monkeypatch.setattr(oracle, "_BLOCK_SCORES", 150)
    parts = oracle.attention_float64(q, k, v, case.causal)
    torch.testing.assert_close(parts.out, whole.out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(parts.lse, whole.lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("seed", range(40))
def test_random_calls_on_the_cpu(seed: int) -> None:
    case = cases.random_case(seed, kernels=(None, "cpu"))
    shorter = {"seq_q": min(case.seq_q, 300), "seq_k": min(case.seq_k, 300)}
    cases.check_case(dataclasses.replace(case, **shorter), "cpu")


@pytest.mark.parametrize("values", sorted(set(cases.VALUES)))
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_kind_of_values(values: str, dtype: str) -> None:
    cases.check_case(Case(dtype=dtype, seq_q=70, seq_k=130, values=values), "cpu")


def _result(case: Case) -> tuple[tuple[torch.Tensor, ...], memory.Placed, memory.Placed]:
    inputs = cases.place_case(case, "cpu")
    out, lse = cases.place_outputs(case, "cpu")
    cases.run_case(case, *inputs, out, lse)
    return tuple(placed.logical for placed in inputs), out, lse


def test_notices_what_is_wrong() -> None:
    case = Case(seq_q=20, seq_k=40, heads_q=2, heads_kv=2)
    inputs, out, lse = _result(case)
    oracle.assert_accurate(out.logical, lse.logical, *inputs)

    good = out.view[0, 3, 1, 5].clone()
    for bad in (good + 0.02, float("nan"), float("inf")):
        out.view[0, 3, 1, 5] = bad
        with pytest.raises(AssertionError, match=r"out\[0, 1, 3, 5\] is .* wrong in 1 of"):
            oracle.assert_accurate(out.logical, lse.logical, *inputs)
    out.view[0, 3, 1, 5] = good

    lse.view[0, 1, 7] += 0.01
    with pytest.raises(AssertionError, match=r"lse\[0, 1, 7\] is"):
        oracle.assert_accurate(out.logical, lse.logical, *inputs)

    assert out.intact()
    out.buffer[3] = 1.0
    assert not out.intact()


def test_notices_a_nan_that_is_lost() -> None:
    case = Case(seq_q=20, seq_k=40)
    inputs, out, lse = _result(case)
    inputs[2][0, 11, 0, 9] = float("nan")
    with pytest.raises(AssertionError, match=r"out\[0, 0, 0, 9\] is .*, the reference nan"):
        oracle.assert_accurate(out.logical, lse.logical, *inputs)


def _sees_walkable_strides(case: Case) -> bool:
    placed = [*cases.place_case(case, "cpu"), cases.place_outputs(case, "cpu")[0]]
    return all(
        raw.strides[axis] > 0 or (raw.strides[axis] == 0 and axis != case.seq_axis)
        for raw in (x.raw() for x in placed)
        for axis in (0, 1, 2)
        if raw.shape[axis] > 1
    )


def test_walkable_strides_are_what_the_callee_sees() -> None:
    found = set()
    repeats = 0  # that walkable() leaves in place
    for seed in range(200):
        case = cases.random_case(seed)
        assert cases.is_walkable(case) == _sees_walkable_strides(case)
        found.add(cases.is_walkable(case))
        walkable = cases.for_family(case, "sm90_whole_tiles")
        assert cases.is_walkable(walkable)
        assert _sees_walkable_strides(walkable)
        for before, after in zip(case.placements, walkable.placements, strict=True):
            assert set(after.broadcast) == set(before.broadcast) - {case.seq_axis}
            repeats += len(after.broadcast)
    assert found == {True, False}
    assert repeats > 20


def test_placements_are_what_they_say() -> None:
    where = memory.Placement((1, 0, 2, 3), (0, 8, 0, 16), 24, broadcast=(2,), flipped=(0,))
    values = torch.arange(2 * 3 * 4 * 8, dtype=torch.float16).reshape(2, 3, 4, 8)
    placed = memory.place_values(values, where)
    assert torch.equal(placed.logical, values[:, :, :1].expand(values.shape))
    assert placed.view.stride() == (24, 56, 0, 1)
    raw = placed.raw()
    assert list(raw.strides[:4]) == [-24, 56, 0, 1]
    assert raw.data == placed.view[1].data_ptr()
    outside = placed.buffer.isnan().sum()
    assert outside == placed.buffer.numel() - 2 * 3 * 8


# ---- attention backward ------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", cases.CAUSAL)
@pytest.mark.parametrize(("seq_q", "seq_k"), [(40, 40), (9, 70), (70, 9), (5, 0)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), ((5, None), 0.6), ((0, 0), 20.0)])
def test_gradients_agree_with_the_reference(
    layout: str,
    causal: str,
    seq_q: int,
    seq_k: int,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole and in blocks."""
    case = backward.Case(batch=2, seq_q=seq_q, seq_k=seq_k, heads_q=4, heads_kv=2, dim=16, dim_v=24,
                         layout=layout, causal=causal, window=window, softcap=softcap, scale=0.3,
                         dlse=True)  # fmt: skip
    given = backward.logical(backward.make_inputs(case, "cpu"))
    order = [given[name] for name in ("dout", "q", "k", "v", "dlse")]
    want = reference_backward.gradients_float64(*order, **case.options)
    for block_scores in (2**24, 150):
        monkeypatch.setattr(backward, "_BLOCK_SCORES", block_scores)
        got = backward.float64(given, case)
        usual = backward.plain(given, case)
        for name in backward.GRADIENTS:
            x = oracle.heads_first(got[name], layout).numpy()  # and back
            np.testing.assert_allclose(x, getattr(want, name), rtol=1e-10, atol=1e-12)
            error = (usual[name] - got[name]).abs().max().item() if x.size else 0.0
            assert error <= 0.05 * max(1.0, float(np.abs(x).max(initial=0.0)))


@pytest.mark.parametrize("seed", range(40))
def test_random_backward_calls_on_the_cpu(seed: int) -> None:
    case = backward.random_case(seed, "cpu")
    shorter = {"seq_q": min(case.seq_q, 300), "seq_k": min(case.seq_k, 300)}
    backward.check_case(dataclasses.replace(case, **shorter), "cpu")


@pytest.mark.parametrize("name", backward.GRADIENTS)
def test_a_wrong_gradient_is_seen(name: str) -> None:
    """One number of one head, by as much as the largest of it."""
    case = backward.Case(seq_q=40, seq_k=50, heads_q=4, heads_kv=2, kernel="cpu", causal="top_left")
    inputs = backward.make_inputs(case, "cpu")
    given = backward.logical(inputs)
    for wrong in (1.0, float("nan")):
        got = backward.gradients(case, inputs)
        backward.assert_accurate(got, given, case)
        got[name][0, 3, 1, 5] += wrong * got[name][0, :, 1].abs().max()
        with pytest.raises(AssertionError, match=name):
            backward.assert_accurate(got, given, case)
    got = backward.gradients(case, inputs)
    if name != "dq":
        got[name][0, 45, 0, 0] = 1e-30  # of a key that no query sees
        with pytest.raises(AssertionError, match="not 0 where no pair is seen"):
            backward.assert_accurate(got, given, case)
