"""The accuracy rule itself: a loop in Python agrees with it, and it rejects what it should."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from flashmoe_science.cli import reference
from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.measure import make_inputs
from flashmoe_science.cli.shapes import Shape


def by_loops(shape: Shape, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Attention one query at a time, float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros((shape.batch, shape.seq_q, shape.heads_q, shape.dim_v))
    lse = np.full((shape.batch, shape.heads_q, shape.seq_q), -math.inf)
    for b, i, h in np.ndindex(shape.batch, shape.seq_q, shape.heads_q):
        g = h // (shape.heads_q // shape.heads_kv)
        place = i if shape.causal == "top_left" else i + shape.seq_k - shape.seq_q
        right = shape.window_right if shape.causal == "none" else 0
        first = 0 if shape.window_left is None else max(place - shape.window_left, 0)
        end = shape.seq_k if right is None else min(place + right + 1, shape.seq_k)
        if first >= end:
            continue
        scores = k[b, first:end, g] @ q[b, i, h] / math.sqrt(shape.dim)
        if shape.softcap is not None:
            scores = shape.softcap * np.tanh(scores / shape.softcap)
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights @ v[b, first:end, g] / weights.sum()
        lse[b, h, i] = scores.max() + math.log(weights.sum())
    return out, lse


SHAPES = [
    Shape(2, 9, 9, 4, 2, 16, 16, "fp32"),
    Shape(1, 5, 11, 3, 1, 8, 24, "fp32", "bottom_right"),
    Shape(1, 11, 5, 2, 2, 8, 8, "fp32", "bottom_right"),
    Shape(1, 11, 5, 2, 2, 8, 8, "fp32", "top_left"),
    Shape(1, 5, 11, 2, 2, 8, 8, "fp32", "top_left"),
    Shape(1, 9, 9, 2, 2, 8, 8, "fp32", window_left=2, window_right=3),
    Shape(1, 5, 11, 2, 1, 8, 8, "fp32", "bottom_right", window_left=1),
    Shape(1, 5, 11, 2, 1, 8, 8, "fp32", "top_left", window_left=1, window_right=0),
    Shape(1, 11, 5, 2, 1, 8, 8, "fp32", window_right=1, softcap=0.5),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_agrees_with_loops(shape: Shape) -> None:
    arrays = Arrays()
    inputs = make_inputs(arrays, shape)
    out, lse = by_loops(shape, *inputs)
    verdict = reference.judge(arrays, shape, inputs, {"x": out}, lse)["x"]
    assert verdict.passed
    assert verdict.error < 1e-14
    assert verdict.lse_error is not None
    assert verdict.lse_error < 1e-14
    assert verdict.plain_error > 0


def test_blocks_do_not_change_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dataclasses.replace(SHAPES[1], batch=3)
    arrays = Arrays()
    inputs = make_inputs(arrays, shape)
    out, lse = by_loops(shape, *inputs)
    out += 1e-6
    whole = reference.judge(arrays, shape, inputs, {"x": out}, lse)["x"]
    monkeypatch.setattr(reference, "SCORE_BLOCK", {"cpu": 23})
    blocks = reference.judge(arrays, shape, inputs, {"x": out}, lse)["x"]
    # A BLAS may add up products of other extents in another order.
    assert blocks.plain_error == pytest.approx(whole.plain_error, rel=0.5)
    of_plain = {"plain_error": 0.0, "bound": 0.0, "reason": ""}
    assert dataclasses.replace(blocks, **of_plain) == dataclasses.replace(whole, **of_plain)


def test_long_sequences_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SCORE_BUDGET", {"cpu": 9 * 9 * 3})
    shape = SHAPES[0]
    arrays = Arrays()
    inputs = make_inputs(arrays, shape)
    out, _ = by_loops(shape, *inputs)
    verdict = reference.judge(arrays, shape, inputs, {"x": out})["x"]
    assert verdict.passed
    assert verdict.checked == "4 of 8 heads, 6 of 9 rows"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (math.nan, "never written"),
        (math.inf, "never written"),
        (0.5, "max|out - float64|"),
    ],
)
def test_one_wrong_element_is_seen(spoil: float, reason: str) -> None:
    shape = SHAPES[0]
    arrays = Arrays()
    inputs = make_inputs(arrays, shape)
    out, lse = by_loops(shape, *inputs)
    out[1, 8, 3, 15] += spoil
    verdict = reference.judge(arrays, shape, inputs, {"x": out}, lse)["x"]
    assert not verdict.passed
    assert reason in verdict.reason


def test_the_bound_is_twice_the_plain_error_and_an_ulp() -> None:
    shape = SHAPES[0]
    arrays = Arrays()
    inputs = make_inputs(arrays, shape)
    exact, _ = by_loops(shape, *inputs)
    plain_error = reference.judge(arrays, shape, inputs, {"x": exact})["x"].plain_error
    ulp = 2.0 ** (math.floor(math.log2(abs(exact).max())) - 23)
    for times, passes in ((0.9, True), (1.1, False)):
        out = exact.copy()
        out[1, 8, 3, 15] += times * (2 * plain_error + ulp)
        assert reference.judge(arrays, shape, inputs, {"x": out})["x"].passed == passes


@pytest.mark.parametrize("place", [(0, 0, 0), (0, 3, 8), (1, 3, 8)])
def test_every_block_counts(monkeypatch: pytest.MonkeyPatch, place: tuple[int, int, int]) -> None:
    monkeypatch.setattr(reference, "SCORE_BLOCK", {"cpu": 23})
    shape, (b, h, i) = SHAPES[0], place
    arrays = Arrays()
    inputs = make_inputs(arrays, shape)
    out, lse = by_loops(shape, *inputs)
    lse[b, h, i] += 0.01
    assert "max|lse" in reference.judge(arrays, shape, inputs, {"x": out}, lse)["x"].reason
    out[b, i, h, 0] += 0.5
    assert "max|out" in reference.judge(arrays, shape, inputs, {"x": out}, lse)["x"].reason


@pytest.mark.parametrize("spoil", [math.nan, 0.01])
def test_a_wrong_lse_is_seen(spoil: float) -> None:
    shape = SHAPES[0]
    arrays = Arrays()
    inputs = make_inputs(arrays, shape)
    out, lse = by_loops(shape, *inputs)
    lse[1, 3, 8] += spoil
    verdict = reference.judge(arrays, shape, inputs, {"x": out}, lse)["x"]
    assert "max|lse - float64|" in verdict.reason


def test_rounding_to_bf16_is_to_nearest_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], dtype=np.uint32)
    want = np.array([0x3F800000, 0x3F820000, 0x3F810000, 0x3F800000], dtype=np.uint32)
    rounded = Arrays().rounded(bits.view(np.float32), "bf16")
    assert rounded.view(np.uint32).tolist() == want.tolist()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_numpy_and_torch_judge_alike(dtype: str) -> None:
    pytest.importorskip("torch")
    from flashmoe_science.cli.arrays import TorchArrays

    shape = dataclasses.replace(SHAPES[1], dtype=dtype)
    arrays = TorchArrays()
    inputs = make_inputs(arrays, shape)
    host = tuple(arrays.to_host(x) for x in inputs)
    out, _ = by_loops(shape, *host)
    rounded = arrays.cast(arrays.xp.from_numpy(out), dtype)
    there = reference.judge(arrays, shape, inputs, {"x": rounded})["x"]
    here = reference.judge(Arrays(), shape, host, {"x": arrays.to_host(rounded)})["x"]
    assert there.passed
    assert here.passed
    assert here.error == pytest.approx(there.error)
    assert here.plain_error == pytest.approx(there.plain_error, rel=0.5)


def test_one_query_gathers_few_keys_at_a_time() -> None:
    """Decoding: a block of scores is small, the keys behind it are not."""
    blocks = list(reference._blocks(list(range(100)), [0], keys=1000, dim=128, limit=10 * 128000))
    assert [len(pairs) for pairs, _ in blocks] == [10] * 10
