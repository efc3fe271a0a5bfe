"""The mixture of experts in float64, and the rules that every kernel is held to.

Routing is exact: the same ids and the same order, always; weights within WEIGHT_TOLERANCE of
float64. For products the rule of reference.py:

    max|ours - ref| <= 2 * max|plain - ref| + ulp        (4 where there are few values)

ref is float64 mathematics on the same inputs, plain the same formula the ordinary way: what each
step gives rounded to the inputs' dtype, sums in fp32.

Written from include/flashmoe/moe.h and from nothing else; loops over tokens and experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from reference import dtype_of, to_numpy, ulp

SCORINGS = ("softmax", "topk_softmax", "sigmoid")
GATES = ("gate_up", "up_gate", "interleaved", "separate", "none")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")

WEIGHT_TOLERANCE = 1e-5  # relative: scores are fp32, their sums of up to 1024 terms
LSE_TOLERANCE = 1e-5


class Routing(NamedTuple):
    ids: np.ndarray  # [T, K] int32
    weights: np.ndarray  # [T, K] float64
    offsets: np.ndarray  # [E + 1] int32
    pairs: np.ndarray  # [T * K] int32
    slots: np.ndarray  # [T, K] int32
    lse: np.ndarray | None  # [T] float64


# ---- routing -------------------------------------------------------------------------------------


def sort_pairs(ids: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """offsets, pairs and slots for ids of which -1 is no expert."""
    tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    pairs = np.full(tokens * top_k, -1, np.int32)
    slots = np.full(tokens * top_k, -1, np.int32)
    offsets = np.zeros(num_experts + 1, np.int32)
    slot = 0
    for expert in range(num_experts):
        for pair in np.flatnonzero(flat == expert):
            pairs[slot] = pair
            slots[pair] = slot
            slot += 1
        offsets[expert + 1] = slot
    return offsets, pairs, slots.reshape(tokens, top_k)


def _greatest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the greatest, equal ones by index; NaN counts as -inf."""
    return np.argsort(-np.where(np.isnan(values), -np.inf, values), kind="stable")[:count]


def sigmoid(z: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-z))


def choices(logits: np.ndarray, scoring: str, bias: np.ndarray | None) -> np.ndarray:
    """What orders the experts of a token."""
    return sigmoid(logits) + bias if scoring == "sigmoid" and bias is not None else logits


def route(
    logits: Any,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    selection_bias: Any = None,
    num_groups: int = 1,
    top_groups: int | None = None,
    scale: float = 1.0,
) -> Routing:
    logits = to_numpy(logits)
    bias = None if selection_bias is None else to_numpy(selection_bias)
    tokens, experts = logits.shape
    ids = np.zeros((tokens, top_k), np.int32)
    weights = np.zeros((tokens, top_k))
    with np.errstate(all="ignore"):
        for t in range(tokens):
            z = logits[t]
            choice = choices(z, scoring, bias)
            if num_groups > 1:
                choice = sigmoid(z) + (0 if bias is None else bias)
                allowed = _allowed(choice, num_groups, top_groups or 1)
                choice = np.where(np.isnan(choice), -np.inf, choices(z, scoring, bias))
                # Experts outside come after every one inside, whatever those are.
                inside = np.flatnonzero(allowed)
                chosen = inside[_greatest(choice[inside], top_k)]
            else:
                chosen = _greatest(choice, top_k)
            ids[t] = chosen
            weights[t] = _scores(z, chosen, scoring)
            if renormalize:
                total = weights[t].sum()
                weights[t] = weights[t] / total if total != 0 else weights[t]
        weights *= scale
        top = logits.max(1, initial=-np.inf)
        lse = np.log(np.exp(logits - np.where(np.isfinite(top), top, 0)[:, None]).sum(1))
        lse = lse + np.where(np.isfinite(top), top, 0)
    return Routing(ids, weights, *sort_pairs(ids, experts), lse)


def _allowed(choice: np.ndarray, num_groups: int, top_groups: int) -> np.ndarray:
    """[E]: whether an expert's group is one of the best."""
    groups = np.where(np.isnan(choice), -np.inf, choice).reshape(num_groups, -1)
    sums = np.sort(groups, 1)[:, -2:].sum(1)
    best = _greatest(sums, top_groups)
    return np.repeat(np.isin(np.arange(num_groups), best), groups.shape[1])


def _scores(z: np.ndarray, chosen: np.ndarray, scoring: str) -> np.ndarray:
    if scoring == "sigmoid":
        return sigmoid(z[chosen])
    over = z if scoring == "softmax" else z[chosen]
    weights = np.exp(z[chosen] - over.max())
    return weights / np.exp(over - over.max()).sum()


def route_given(
    ids: Any, weights: Any = None, *, num_experts: int, expert_map: Any = None
) -> Routing:
    ids = np.asarray(ids)
    made = np.full(ids.shape, -1, np.int32)
    for at, wanted in np.ndenumerate(ids):
        expert = int(wanted)
        if expert_map is not None:
            mapped = 0 <= expert < len(expert_map)
            expert = int(expert_map[expert]) if mapped else -1
        if 0 <= expert < num_experts:
            made[at] = expert
    given = np.ones(ids.shape) if weights is None else to_numpy(weights)
    return Routing(made, np.where(made < 0, 0, given), *sort_pairs(made, num_experts), None)


def closest_choices(
    logits: Any, *, scoring: str = "softmax", selection_bias: Any = None, num_groups: int = 1,
    **_: Any,
) -> float:  # fmt: skip
    """The least distance between two choices, or groups, of one token that are not equal. Where
    choices are computed in fp32, as sigmoid(logits) + bias is, a smaller one than that arithmetic
    keeps apart leaves the order open."""
    z = to_numpy(logits)
    bias = None if selection_bias is None else to_numpy(selection_bias)
    if num_groups == 1 and (scoring != "sigmoid" or bias is None):
        return np.inf
    with np.errstate(all="ignore"):
        choice = sigmoid(z) + (0 if bias is None else bias)
        rows = [choice]
        if num_groups > 1:
            # A sum of two depends on which two, so that equal sums of different ones are open.
            two = np.sort(np.where(np.isnan(choice), -np.inf, choice)
                          .reshape(len(z), num_groups, z.shape[1] // num_groups),
                          2)[..., -2:]  # fmt: skip
            rows.append(two.sum(2))
        least = np.inf
        for row in (r for values in rows for r in values):
            gaps = np.diff(np.sort(row[np.isfinite(row)]))
            least = min(least, gaps[gaps > 0].min(initial=np.inf))
    return least


def assert_routed(got: Any, want: Routing) -> None:
    """ids, offsets, pairs and slots exactly; weights and lse as near as fp32 allows."""
    for name in ("ids", "offsets", "pairs", "slots"):
        values = to_integers(getattr(got, name))
        np.testing.assert_array_equal(values, getattr(want, name), err_msg=name)
    assert str(got.weights.dtype).endswith("float32")
    np.testing.assert_allclose(
        to_numpy(got.weights), want.weights, rtol=WEIGHT_TOLERANCE, atol=1e-37, err_msg="weights"
    )
    if got.lse is not None and want.lse is not None:
        assert str(got.lse.dtype).endswith("float32")
        np.testing.assert_allclose(
            to_numpy(got.lse), want.lse, rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE, err_msg="lse"
        )


def to_integers(tensor: Any) -> np.ndarray:
    if type(tensor).__module__.startswith("torch"):
        tensor = tensor.cpu().numpy()
    elif type(tensor).__module__.startswith("cupy"):
        tensor = tensor.get()
    values = np.asarray(tensor)
    assert values.dtype == np.int32
    return values


# ---- products ------------------------------------------------------------------------------------


class _Arithmetic(NamedTuple):
    """How a computation rounds: sums in `compute`, every step's result to `rounded`."""

    compute: np.dtype[Any]
    rounded: np.dtype[Any]

    def round(self, x: np.ndarray) -> np.ndarray:
        low = x.astype(self.rounded).astype(self.compute)
        return np.where(np.isinf(low), x, low)  # fp16 ends at 65504: that is no error to allow for

    def product(self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        """x [n, k] times w [m, k], plus a row: [n, m]."""
        x, w = x.astype(self.compute), w.astype(self.compute)
        if self.rounded == np.float32:  # in order, as reference.py says
            out = np.zeros((len(x), len(w)), self.compute)
            for k in range(w.shape[1]):
                out += x[:, k, None] * w[None, :, k]
        else:
            out = x @ w.T
        return out if bias is None else out + bias.astype(self.compute)

    def number(self, value: float) -> Any:
        return self.compute.type(value)


_DOUBLE = np.dtype(np.float64)
_SINGLE = np.dtype(np.float32)
EXACT = _Arithmetic(_DOUBLE, _DOUBLE)


def _erf(z: np.ndarray) -> np.ndarray:
    import math

    return np.vectorize(math.erf, otypes=[np.float64])(z.astype(np.float64)).astype(z.dtype)


def activate(z: np.ndarray, activation: str, alpha: float, number: Any = float) -> np.ndarray:
    with np.errstate(all="ignore"):
        if activation == "silu":
            return z * (1 / (1 + np.exp(-number(alpha) * z)))
        if activation == "gelu":
            return z * number(0.5) * (1 + _erf(z / number(np.sqrt(2))))
        if activation == "gelu_tanh":
            inner = number(np.sqrt(2 / np.pi)) * (z + number(0.044715) * z**3)
            return z * number(0.5) * (1 + np.tanh(inner))
        positive = np.where(np.isnan(z), z, np.maximum(z, 0))
        return positive if activation == "relu" else positive * positive


def split_rows(w_gate_up: Any, w_up: Any, gate: str) -> tuple[Any, Any]:
    """The rows of the gate and of up, of weights [E, rows, H] or biases [E, rows]; gate None
    without one."""
    half = w_gate_up.shape[1] // 2
    if gate == "gate_up":
        return w_gate_up[:, :half], w_gate_up[:, half:]
    if gate == "up_gate":
        return w_gate_up[:, half:], w_gate_up[:, :half]
    if gate == "interleaved":
        return w_gate_up[:, 0::2], w_gate_up[:, 1::2]
    if gate == "separate":
        return w_gate_up, w_up
    return None, w_gate_up


class Layer(NamedTuple):
    out: np.ndarray  # [T, H]
    pre_activation: np.ndarray  # [T * K, 2I] or [T * K, I], NaN where there is no pair


def _forward(
    x: np.ndarray,
    w_gate_up: np.ndarray,
    w_down: np.ndarray,
    routing: Routing,
    arithmetic: _Arithmetic,
    *,
    w_up: np.ndarray | None,
    gate: str,
    activation: str,
    b_gate_up: np.ndarray | None,
    b_up: np.ndarray | None,
    b_down: np.ndarray | None,
    alpha: float,
    limit: float | None,
    up_offset: float,
    weight_on_input: bool,
) -> Layer:
    number, round_ = arithmetic.number, arithmetic.round
    w_gate, w_other = split_rows(w_gate_up, w_up, gate)
    b_gate, b_other = (None, None) if b_gate_up is None else split_rows(b_gate_up, b_up, gate)
    if gate == "separate":
        b_gate, b_other = b_gate_up, b_up
    weights = to_numpy(routing.weights).astype(arithmetic.compute)
    offsets, pairs = (np.asarray(a).astype(np.int64) for a in (routing.offsets, routing.pairs))
    tokens, top_k = weights.shape
    inner = w_other.shape[1]
    x = x.astype(arithmetic.compute)
    pre = np.full((tokens * top_k, inner if w_gate is None else 2 * inner), np.nan)
    terms = np.zeros((tokens * top_k, x.shape[1]), arithmetic.compute)
    has = np.zeros(tokens * top_k, bool)
    with np.errstate(all="ignore"):
        for e in range(len(w_down)):
            of = pairs[offsets[e] : offsets[e + 1]]
            if len(of) == 0:
                continue
            rows = x[of // top_k]
            factor = weights.reshape(-1)[of][:, None]
            if weight_on_input:
                rows = round_(rows * factor)
            u = round_(arithmetic.product(rows, w_other[e], _row(b_other, e)))
            g = None
            if w_gate is not None:
                g = round_(arithmetic.product(rows, w_gate[e], _row(b_gate, e)))
            pre[offsets[e] : offsets[e + 1]] = u if g is None else np.concatenate([g, u], 1)
            if limit is not None:
                u = np.clip(u, -number(limit), number(limit))
                g = None if g is None else np.minimum(g, number(limit))
            if g is None:
                a = round_(activate(u, activation, alpha, number))
            else:
                a = round_(activate(g, activation, alpha, number))
                a = round_(a * (u + number(up_offset)))
            y = round_(arithmetic.product(a, w_down[e], _row(b_down, e)))
            terms[of] = y if weight_on_input else round_(y * factor)
            has[of] = True
        kept = np.where(has[:, None], terms, 0).reshape(tokens, top_k, x.shape[1])
        out = np.zeros_like(x)
        for k in range(top_k):
            out = out + kept[:, k]
    return Layer(round_(out), pre)


def _row(bias: np.ndarray | None, e: int) -> np.ndarray | None:
    return None if bias is None else bias[e]


_OPTIONS: dict[str, Any] = {
    "w_up": None, "gate": "gate_up", "activation": "silu", "b_gate_up": None, "b_up": None,
    "b_down": None, "alpha": 1.0, "limit": None, "up_offset": 0.0, "weight_on_input": False,
}  # fmt: skip


def _arrays(options: dict[str, Any]) -> dict[str, Any]:
    unknown = options.keys() - _OPTIONS.keys()
    assert not unknown, unknown
    tensors = ("w_up", "b_gate_up", "b_up", "b_down")
    return _OPTIONS | {
        name: to_numpy(value) if name in tensors and value is not None else value
        for name, value in options.items()
    }


def _host(routing: Any) -> Routing:
    parts = (to_integers(getattr(routing, n)) for n in ("offsets", "pairs", "slots"))
    return Routing(routing.ids, to_numpy(routing.weights), *parts, None)


def forward_float64(x: Any, w_gate_up: Any, w_down: Any, routing: Any, **options: Any) -> Layer:
    """moe_forward in float64, for the routing given; options by moe_forward's names."""
    arrays = (to_numpy(a) for a in (x, w_gate_up, w_down))
    return _forward(*arrays, _host(routing), EXACT, **_arrays(options))


def forward_plain(
    x: Any, w_gate_up: Any, w_down: Any, routing: Any, *, dtype: np.dtype[Any], **options: Any
) -> Layer:
    """The ordinary computation in `dtype`."""
    arrays = (to_numpy(a) for a in (x, w_gate_up, w_down))
    return _forward(*arrays, _host(routing), _Arithmetic(_SINGLE, dtype), **_arrays(options))


FEW = 2**14  # values, of which the greatest error of the ordinary computation is a matter of luck


def allowed_error(ref: np.ndarray, plain: np.ndarray, dtype: np.dtype[Any]) -> float:
    both = np.isfinite(ref) & np.isfinite(plain)
    if not both.any():
        return 0.0
    times = 4 if ref.size < FEW else 2
    largest = float(np.abs(ref[both]).max())
    return float(times * np.abs(plain - ref)[both].max() + ulp(dtype, largest))


def assert_near(name: str, got: np.ndarray, ref: np.ndarray, allowed: float) -> None:
    """Within `allowed` where the reference is finite; there, and nowhere else, finite."""
    assert got.shape == ref.shape, name
    wild = ~np.isfinite(ref)
    np.testing.assert_array_equal(~np.isfinite(got), wild, err_msg=f"{name}: not finite")
    error = np.where(wild, 0, np.abs(np.where(wild, 0, got) - np.where(wild, 0, ref)))
    if error.size == 0:
        return
    worst = np.unravel_index(np.argmax(error), error.shape)
    assert error[worst] <= allowed, (
        f"{name}{list(map(int, worst))} is {got[worst]}, the reference {ref[worst]}: error "
        f"{error[worst]:.3g}, allowed {allowed:.3g}"
    )


def assert_forward(
    out: Any, x: Any, w_gate_up: Any, w_down: Any, routing: Any, *, pre_activation: Any = None,
    **options: Any,
) -> None:  # fmt: skip
    """Holds one result, of any framework, to the accuracy rule."""
    dtype = dtype_of(x)
    assert dtype_of(out) == dtype
    ref = forward_float64(x, w_gate_up, w_down, routing, **options)
    plain = forward_plain(x, w_gate_up, w_down, routing, dtype=dtype, **options)
    assert_near("out", to_numpy(out), ref.out, allowed_error(ref.out, plain.out, dtype))
    if pre_activation is None:
        return
    assert dtype_of(pre_activation) == dtype
    taken = int(to_integers(routing.offsets)[-1])
    got, want = to_numpy(pre_activation)[:taken], ref.pre_activation[:taken]
    allowed = allowed_error(want, plain.pre_activation[:taken], dtype)
    assert_near("pre_activation", got, want, allowed)


def _grouped(
    x: np.ndarray, w: np.ndarray, offsets: Any, counts: Any, bias: Any, arithmetic: _Arithmetic
) -> np.ndarray:
    out = np.full((*x.shape[:-1], w.shape[1]), np.nan)
    with np.errstate(all="ignore"):
        for e in range(len(w)):
            at: Any = slice(int(offsets[e]), int(offsets[e + 1])) if counts is None else (
                e, slice(0, int(counts[e]))
            )  # fmt: skip
            out[at] = arithmetic.round(arithmetic.product(x[at], w[e], _row(bias, e)))
    return out


def assert_grouped_product(
    out: Any, x: Any, w: Any, *, offsets: Any = None, counts: Any = None, bias: Any = None
) -> None:
    """Holds the rows that an expert has to the accuracy rule."""
    dtype = dtype_of(x)
    assert dtype_of(out) == dtype
    bias = None if bias is None else to_numpy(bias)
    offsets, counts = (None if a is None else to_integers(a) for a in (offsets, counts))
    ref = _grouped(to_numpy(x), to_numpy(w), offsets, counts, bias, EXACT)
    usual = _Arithmetic(_SINGLE, dtype)
    plain = _grouped(to_numpy(x), to_numpy(w), offsets, counts, bias, usual)
    has = rows_of_experts(ref.shape[:-1], offsets, counts)
    allowed = allowed_error(ref[has], plain[has], dtype)
    assert_near("out", to_numpy(out)[has], ref[has], allowed)


def rows_of_experts(shape: tuple[int, ...], offsets: Any, counts: Any) -> np.ndarray:
    """Which rows an expert has."""
    if counts is None:
        row = np.arange(shape[0])
        return (row >= int(offsets[0])) & (row < int(offsets[-1]))
    return np.arange(shape[1])[None, :] < np.asarray(counts)[:, None]
