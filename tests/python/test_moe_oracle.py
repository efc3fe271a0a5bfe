"""The oracle of the mixture of experts: NumPy's against torch's, both against a token written out,
and what it must refuse."""

from __future__ import annotations

import math
from typing import Any

import flashmoe_science as fm
import moe_oracle
import numpy as np
import producers
import pytest
from moe_cases import CASES, Case, make, rounded

torch = pytest.importorskip("torch")


def one_token(case: Case, made: dict[str, Any], t: int) -> np.ndarray:
    """[H] of one token, number by number in Python's own arithmetic."""

    def activated(z: float) -> float:
        if case.activation == "silu":
            return z / (1 + math.exp(-case.alpha * z))
        if case.activation == "gelu":
            return z * 0.5 * (1 + math.erf(z / math.sqrt(2)))
        if case.activation == "gelu_tanh":
            return z * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        return max(z, 0.0) ** (2 if case.activation == "relu2" else 1)

    def dot(row: Any, values: list[float]) -> float:
        return math.fsum(float(a) * b for a, b in zip(row, values, strict=True))

    def bias(name: str, e: int, i: int) -> float:
        return float(made[name][e, i]) if name in made else 0.0

    def rows_of(i: int) -> dict[str, int]:
        """Where gate and up of the i-th value are in w_gate_up; not there in one of their own."""
        return {
            "gate_up": {"gate": i, "up": case.inner + i},
            "up_gate": {"gate": case.inner + i, "up": i},
            "interleaved": {"gate": 2 * i, "up": 2 * i + 1},
            "separate": {"gate": i},
            "none": {"up": i},
        }[case.gate]

    def first(of: str, e: int, i: int, x: list[float]) -> float:
        row = rows_of(i).get(of)
        if row is None:
            return dot(made["w_up"][e, i], x) + bias("b_up", e, i)
        return dot(made["w_gate_up"][e, row], x) + bias("b_gate_up", e, row)

    limit = math.inf if case.limit is None else case.limit
    out = np.zeros(case.hidden)
    for k in range(case.top_k):
        e, weight = int(made["routing"].ids[t, k]), float(made["routing"].weights[t, k])
        x = [float(v) * (weight if case.weight_on_input else 1) for v in made["x"][t]]
        inner = []
        for i in range(case.inner):
            u = min(max(first("up", e, i, x), -limit), limit)
            if case.gate == "none":
                inner.append(activated(u))
            else:
                inner.append(activated(min(first("gate", e, i, x), limit)) * (u + case.up_offset))
        for h in range(case.hidden):
            y = dot(made["w_down"][e, h], inner) + bias("b_down", e, h)
            out[h] += y if case.weight_on_input else weight * y
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_is_its_tokens_written_out(case: Case) -> None:
    made = rounded(case, "fp32")
    whole = moe_oracle.forward_float64(**made, **case.options)
    for t in (0, case.tokens - 1):
        np.testing.assert_allclose(whole.out[t], one_token(case, made, t), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_layers_agree(case: Case, dtype: str) -> None:
    of_numpy, of_torch = rounded(case, dtype), make(case, producers.Torch(), dtype)
    want = moe_oracle.forward_float64(**of_numpy, **case.options)
    ref = moe_oracle.forward_float64(**of_torch, **case.options)
    assert isinstance(want.out, np.ndarray) and isinstance(ref.out, torch.Tensor)
    low = moe_oracle.dtype_of(of_numpy["x"])
    plain = moe_oracle.forward_plain(**of_numpy, **case.options, dtype=low)
    plainly = moe_oracle.forward_plain(**of_torch, **case.options, dtype=low)
    # Sums of fp32 in another order, and what is rounded after them.
    eps = {"fp16": 2.0**-9, "bf16": 2.0**-6, "fp32": 2.0**-20}[dtype]
    for name in ("out", "pre_activation"):
        numbers = getattr(want, name)
        np.testing.assert_allclose(getattr(ref, name).numpy(), numbers, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(
            getattr(plainly, name).numpy(), getattr(plain, name), atol=eps * np.nanmax(abs(numbers))
        )
    out, pre = fm.moe_forward(**of_torch, **case.options, return_pre_activation=True)
    for made in (of_numpy, of_torch):
        moe_oracle.assert_forward(out, **made, **case.options, pre_activation=pre)
        one_nan = torch.where(torch.arange(case.hidden) == 3, torch.nan, out).to(out.dtype)
        for wrong in (out * 1.1, one_nan):
            with pytest.raises(AssertionError, match=r"^out\["):
                moe_oracle.assert_forward(wrong, **made, **case.options)
        with pytest.raises(AssertionError, match=r"^pre_activation\["):
            moe_oracle.assert_forward(out, **made, **case.options, pre_activation=pre + 1)


def test_a_result_beyond_the_numbers_of_its_dtype_is_infinite() -> None:
    """fp16 ends at 65504; a finite number there, or an infinity elsewhere, is wrong."""
    low = np.dtype(np.float16)
    ref = plain = np.array([1.0, 1e5, 2.0])
    moe_oracle.assert_near("out", np.array([1, np.inf, 2], low), ref, plain, low)
    for wrong in ([1, 65504, 2], [np.inf, np.inf, 2]):
        with pytest.raises(AssertionError, match=r"^out\["):
            moe_oracle.assert_near("out", np.array(wrong, low), ref, plain, low)


ROUTES: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_k": 8, "scoring": "topk_softmax"},
    {"top_k": 2, "scoring": "sigmoid", "renormalize": True, "scale": 2.5},
    {"top_k": 3, "scoring": "sigmoid", "num_groups": 4, "top_groups": 2, "renormalize": True},
    {"top_k": 8, "scoring": "sigmoid", "num_groups": 4, "top_groups": 2},
]


@pytest.mark.parametrize("options", ROUTES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("wild", [False, True])
def test_routes_agree(options: dict[str, Any], biased: bool, wild: bool) -> None:
    rng = np.random.default_rng(0)
    logits = rng.integers(-3, 4, (40, 16)).astype(np.float32)
    if wild:
        values = np.array([np.nan, np.inf, -np.inf], np.float32)
        logits = np.where(rng.random(logits.shape) < 0.2, values[rng.integers(0, 3, logits.shape)],
                          logits)  # fmt: skip
    if biased and options.get("scoring") == "sigmoid":
        options = options | {"selection_bias": rng.integers(-2, 3, 16).astype(np.float32) / 8}
    want = moe_oracle.route(logits, **options)
    tensors = {n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v
               for n, v in options.items()}  # fmt: skip
    got = moe_oracle.route(torch.from_numpy(logits), **tensors)
    for name in ("ids", "offsets", "pairs", "slots"):
        np.testing.assert_array_equal(getattr(got, name).numpy(), getattr(want, name), name)
    np.testing.assert_allclose(got.weights.numpy(), want.weights, rtol=1e-12)
    np.testing.assert_allclose(got.lse.numpy(), want.lse, rtol=1e-12)
    ours = fm.moe_route(torch.from_numpy(logits), **tensors, return_lse=True)
    for ref in (want, got):
        moe_oracle.assert_routed(ours, ref)
        with pytest.raises(AssertionError, match=r"^weights"):
            moe_oracle.assert_routed(ours._replace(weights=ours.weights + 1e-3), ref)
        with pytest.raises(AssertionError, match=r"^lse"):
            moe_oracle.assert_routed(ours._replace(lse=ours.lse * 1.001 + 0.1), ref)
        with pytest.raises(AssertionError, match=r"^pairs\[0\] is"):
            moe_oracle.assert_routed(ours._replace(pairs=ours.pairs.flip(0)), ref)


def test_a_route_written_out() -> None:
    """Equal choices by index; of groups the best by their two greatest; pairs by expert, token."""
    logits = np.log(np.array([[1.0, 4.0, 2.0, 4.0], [8.0, 1.0, 1.0, 6.0]], np.float32))
    routing = moe_oracle.route(logits, 2)
    assert routing.ids.tolist() == [[1, 3], [0, 3]]
    np.testing.assert_allclose(routing.weights, [[4 / 11, 4 / 11], [0.5, 6 / 16]], rtol=1e-7)
    np.testing.assert_allclose(np.exp(routing.lse), [11, 16], rtol=1e-7)
    assert routing.offsets.tolist() == [0, 1, 2, 2, 4]
    assert routing.pairs.tolist() == [2, 0, 1, 3]
    assert routing.slots.tolist() == [[1, 2], [0, 3]]
    halves = moe_oracle.route(logits, 2, renormalize=True, scale=3.0)
    np.testing.assert_allclose(halves.weights, [[1.5, 1.5], [24 / 14, 18 / 14]], rtol=1e-7)
    grouped = {"scoring": "sigmoid", "num_groups": 2, "top_groups": 1}
    routing = moe_oracle.route(logits, 2, **grouped)  # sigmoid(log n) is n / (n + 1)
    assert routing.ids.tolist() == [[3, 2], [0, 1]]  # 2/3 + 4/5 over 1/2 + 4/5; 8/9 over 6/7
    np.testing.assert_allclose(routing.weights, [[4 / 5, 2 / 3], [8 / 9, 1 / 2]], rtol=1e-7)
    bias = np.array([0.0, 0.0, 0.0, 9.0], np.float32)
    routing = moe_oracle.route(logits, 2, **grouped, selection_bias=bias)
    assert routing.ids.tolist() == [[3, 2], [3, 2]]
    np.testing.assert_allclose(routing.weights[1], [6 / 7, 1 / 2], rtol=1e-7)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_given_ids_agree(mapped: bool, renormalize: bool) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(-2, 9, (30, 5))
    weights = rng.random((30, 5), np.float32)
    expert_map = rng.integers(-1, 7, 6).astype(np.int32) if mapped else None
    options = {"num_experts": 6, "renormalize": renormalize, "scale": 0.5}
    want = moe_oracle.route_given(ids, weights, **options, expert_map=expert_map)
    got = moe_oracle.route_given(
        torch.from_numpy(ids), torch.from_numpy(weights), **options,
        expert_map=None if expert_map is None else torch.from_numpy(expert_map),
    )  # fmt: skip
    moe_oracle.assert_routed(got._replace(weights=got.weights.float()), want)
    for (t, k), given in np.ndenumerate(ids):
        known = not mapped or 0 <= given < 6
        expert = int(expert_map[given]) if expert_map is not None and known else int(given)
        mine = known and 0 <= expert < 6
        assert want.ids[t, k] == (expert if mine else -1)
        total = weights[t].astype(np.float64).sum() if renormalize else 1.0
        assert want.weights[t, k] == pytest.approx(weights[t, k] / total * 0.5 if mine else 0)


@pytest.mark.parametrize("masked", [False, True])
def test_grouped_products_agree(masked: bool) -> None:
    rng = np.random.default_rng(0)
    w = torch.from_numpy(rng.standard_normal((3, 16, 24), np.float32)).half()
    x = torch.from_numpy(rng.standard_normal((3, 7, 24), np.float32)).half()
    bounds = {"counts": torch.tensor([7, 0, 3], dtype=torch.int32)}
    if not masked:
        x = x.view(21, 24)
        bounds = {"offsets": torch.tensor([1, 9, 9, 20], dtype=torch.int32)}
    out = fm.grouped_product(x, w, **bounds)
    arrays = {name: t.numpy() for name, t in bounds.items()}
    for given in ({"x": x, "w": w, **bounds}, {"x": x.numpy(), "w": w.numpy(), **arrays}):
        moe_oracle.assert_grouped_product(out, **given)
        with pytest.raises(AssertionError, match=r"^out\["):
            moe_oracle.assert_grouped_product(out + 1, **given)
