"""The mixture of experts in float64, and the rules that every kernel is held to.

Routing is exact: the same ids and the same order, always; weights within WEIGHT_TOLERANCE of
float64. For products the rule of reference.py:

    max|ours - ref| <= 2 * max|plain - ref| + ulp        (4 where there are few values)

ref is float64 mathematics on the same inputs, plain the same formula the ordinary way: what each
step gives rounded to the inputs' dtype, sums in fp32.

Written from include/flashmoe/moe.h and from nothing else. What begins with torch tensors is
computed by torch on their device, which large calls need; everything else by NumPy. Both are the
same lines: what the two call differently is in _Numpy and _Torch. tests/python/test_moe_oracle.py
holds the two to each other and to a token written out.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from reference import dtype_of, remembering, to_numpy, ulp

SCORINGS = ("softmax", "topk_softmax", "sigmoid")
GATES = ("gate_up", "up_gate", "interleaved", "separate", "none")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")

WEIGHT_TOLERANCE = 1e-5  # relative: scores are fp32, their sums of up to 1024 terms
LSE_TOLERANCE = 1e-5
FP64_TOLERANCE = 1e-13  # of the greatest value: the ordinary computation is the reference itself
FEW = 2**14  # values, of which the greatest error of the ordinary computation is a matter of luck

_BLOCK = 2**26  # float64 numbers of a product of one step
_ROWS_OF_WEIGHTS = 2**13  # of an expert's matrix at a time

Array = Any  # of NumPy or of torch


class Routing(NamedTuple):
    ids: Array  # [T, K] int32
    weights: Array  # [T, K] float64
    offsets: Array  # [E + 1] int32
    pairs: Array  # [T * K] int32
    slots: Array  # [T, K] int32
    lse: Array | None  # [T] float64


# ---- arrays --------------------------------------------------------------------------------------


class _Numpy:
    """What NumPy calls the steps of the oracle."""

    xp: Any = np
    double: Any = np.dtype(np.float64)
    single: Any = np.dtype(np.float32)

    def tensor(self, values: Any) -> Array:
        """A tensor of any framework as an array; our own arrays stay as they are."""
        return values if isinstance(values, np.ndarray) else to_numpy(values)

    def doubles(self, values: Any) -> Array:
        return to_numpy(values)

    def integers(self, values: Any) -> Array:
        """Accepts only int32; returns int64."""
        if type(values).__module__.startswith("torch"):
            values = values.cpu().numpy()
        elif type(values).__module__.startswith("cupy"):
            values = values.get()
        made = np.asarray(values)
        assert made.dtype == np.int32
        return made.astype(np.int64)

    def wide(self, values: Any) -> Array:
        """Integers of either width as int64."""
        return np.asarray(values).astype(np.int64)

    def cast(self, values: Array, dtype: Any) -> Array:
        return values.astype(dtype)

    def short(self, values: Array) -> Array:
        return values.astype(np.int32)

    def full(self, shape: tuple[int, ...], value: float, dtype: Any) -> Array:
        return np.full(shape, value, dtype)

    def range(self, count: int) -> Array:
        return np.arange(count)

    def order(self, keys: Array) -> Array:
        """Indices along the last axis from the least up, equal ones by index."""
        return np.argsort(keys, axis=-1, kind="stable")

    def take(self, values: Array, indices: Array) -> Array:
        """Along the last axis."""
        return np.take_along_axis(values, indices, -1)

    def greatest(self, values: Array) -> Array:
        """Along the last axis, which stays, with length 1; NaN where there is one."""
        return values.max(-1, keepdims=True)

    def two_greatest(self, values: Array) -> Array:
        return np.sort(values, -1)[..., -2:]

    def join(self, parts: list[Array], axis: int) -> Array:
        return np.concatenate(parts, axis)

    def erf(self, z: Array) -> Array:
        return _erf(z.astype(np.float64)).astype(z.dtype)

    def native(self, dtype: np.dtype[Any]) -> Any:
        return dtype


_erf = np.vectorize(math.erf, otypes=[np.float64])


class _Torch:
    """What torch calls them, on one device."""

    def __init__(self, device: Any) -> None:
        import torch

        self.xp: Any = torch
        self.double: Any = torch.float64
        self.single: Any = torch.float32
        self._device = device

    def tensor(self, values: Any) -> Array:
        if isinstance(values, self.xp.Tensor):
            return values
        return self.xp.as_tensor(to_numpy(values), device=self._device)

    def doubles(self, values: Any) -> Array:
        return self.tensor(values).double()

    def integers(self, values: Any) -> Array:
        assert values.dtype == self.xp.int32
        return values.long()

    def wide(self, values: Any) -> Array:
        return self.xp.as_tensor(values, device=self._device).long()

    def cast(self, values: Array, dtype: Any) -> Array:
        return values.to(dtype)

    def short(self, values: Array) -> Array:
        return values.int()

    def full(self, shape: tuple[int, ...], value: float, dtype: Any) -> Array:
        return self.xp.full(shape, value, dtype=dtype, device=self._device)

    def range(self, count: int) -> Array:
        return self.xp.arange(count, device=self._device)

    def order(self, keys: Array) -> Array:
        return self.xp.sort(keys, dim=-1, stable=True).indices

    def take(self, values: Array, indices: Array) -> Array:
        return values.gather(-1, indices)

    def greatest(self, values: Array) -> Array:
        return values.amax(-1, keepdim=True)

    def two_greatest(self, values: Array) -> Array:
        return values.topk(min(2, values.shape[-1]), -1).values

    def join(self, parts: list[Array], axis: int) -> Array:
        return self.xp.cat(parts, axis)

    def erf(self, z: Array) -> Array:
        return self.xp.erf(z)

    def native(self, dtype: np.dtype[Any]) -> Any:
        return getattr(self.xp, dtype.name)


NUMPY = _Numpy()
_torch_on = functools.cache(_Torch)


def _library_of(values: Any) -> Any:
    """Who computes what begins with these values."""
    if type(values).__module__.partition(".")[0] == "torch":
        return _torch_on(values.device)
    return NUMPY


# ---- routing -------------------------------------------------------------------------------------


def sort_pairs(ids: Array, num_experts: int) -> tuple[Array, Array, Array]:
    """offsets, pairs and slots for ids of which -1 is no expert."""
    a = _library_of(ids)
    flat = a.wide(ids).reshape(-1)
    key = a.xp.where(flat < 0, num_experts, flat)
    order = a.order(key)
    experts = a.range(num_experts + 1)
    offsets = (key[None, :] < experts[:, None]).sum(1)
    taken = int(offsets[-1])
    pairs, slots = a.full(flat.shape, -1, order.dtype), a.full(flat.shape, -1, order.dtype)
    pairs[:taken] = order[:taken]
    slots[order[:taken]] = a.range(taken)
    return a.short(offsets), a.short(pairs), a.short(slots).reshape(tuple(ids.shape))


def _sigmoid(a: Any, z: Array) -> Array:
    return 1 / (1 + a.xp.exp(-z))


def _descending(a: Any, values: Array) -> Array:
    """Indices from the greatest down, equal ones by index; NaN counts as -inf."""
    return a.order(-a.xp.where(a.xp.isnan(values), -np.inf, values))


def _open_groups(a: Any, sums: Array, num_groups: int, top_groups: int) -> Array:
    """[T, E]: whether an expert's group is one of the best by its two greatest."""
    tokens, experts = sums.shape
    clean = a.xp.where(a.xp.isnan(sums), -np.inf, sums)
    groups = a.two_greatest(clean.reshape(tokens, num_groups, experts // num_groups)).sum(-1)
    rank = a.order(_descending(a, groups))  # of each group
    group = a.range(experts) // (experts // num_groups)
    return (rank < top_groups)[:, group]


@np.errstate(all="ignore")
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
    a = _library_of(logits)
    z = a.doubles(logits)
    bias = 0 if selection_bias is None else a.doubles(selection_bias)
    biased = _sigmoid(a, z) + bias
    chooses_biased = scoring == "sigmoid" and selection_bias is not None
    order = _descending(a, biased if chooses_biased else z)
    if num_groups > 1:
        # Experts outside come after every one inside, whatever those are.
        inside = _open_groups(a, biased, num_groups, top_groups or 1)
        outside = a.short(~a.take(inside, order))
        order = a.take(order, a.order(outside))
    ids = order[:, :top_k]
    chosen = a.take(z, ids)
    if scoring == "sigmoid":
        weights = _sigmoid(a, chosen)
    else:
        over = z if scoring == "softmax" else chosen
        top = a.greatest(over)
        weights = a.xp.exp(chosen - top) / a.xp.exp(over - top).sum(-1)[:, None]
    if renormalize:
        weights = _renormalized(a, weights)
    top = a.greatest(z)
    top = a.xp.where(a.xp.isfinite(top), top, 0)
    lse = (a.xp.log(a.xp.exp(z - top).sum(-1)[:, None]) + top)[:, 0]
    return Routing(a.short(ids), weights * scale, *sort_pairs(ids, z.shape[1]), lse)


def _renormalized(a: Any, weights: Array) -> Array:
    total = weights.sum(-1)[:, None]
    return a.xp.where(total == 0, weights, weights / total)


@np.errstate(all="ignore")
def route_given(
    ids: Any,
    weights: Any = None,
    *,
    num_experts: int,
    expert_map: Any = None,
    renormalize: bool = False,
    scale: float = 1.0,
) -> Routing:
    """Routes choices made elsewhere; an expert that is not mine takes part in renormalising."""
    a = _library_of(ids)
    expert = a.wide(ids)
    if expert_map is not None:
        known = (expert >= 0) & (expert < len(expert_map))
        mapped = a.join([a.wide(expert_map), a.full((1,), -1, expert.dtype)], 0)
        expert = mapped[a.xp.where(known, expert, len(expert_map))]
    mine = (expert >= 0) & (expert < num_experts)
    made = a.xp.where(mine, expert, -1)
    given = a.full(tuple(expert.shape), 1, a.double) if weights is None else a.doubles(weights)
    if renormalize:
        given = _renormalized(a, given)
    kept = a.xp.where(mine, given * scale, 0.0)
    return Routing(a.short(made), kept, *sort_pairs(made, num_experts), None)


@np.errstate(all="ignore")
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
    choice = _sigmoid(NUMPY, z) + (0 if bias is None else bias)
    rows = [choice]
    if num_groups > 1:
        # A sum of two depends on which two, so that equal sums of different ones are open.
        clean = np.where(np.isnan(choice), -np.inf, choice)
        rows.append(
            NUMPY.two_greatest(clean.reshape(len(z), num_groups, z.shape[1] // num_groups)).sum(2)
        )
    least = np.inf
    for row in (r for values in rows for r in values):
        gaps = np.diff(np.sort(row[np.isfinite(row)]))
        least = min(least, gaps[gaps > 0].min(initial=np.inf))
    return least


def assert_routed(got: Any, want: Routing) -> None:
    """ids, offsets, pairs and slots exactly; weights and lse as near as their dtype allows, not
    finite where, and only where, those of `want` are not."""
    a = _library_of(want.ids)
    for name in ("ids", "offsets", "pairs", "slots"):
        ours, ref = a.integers(getattr(got, name)), a.integers(getattr(want, name))
        assert ours.shape == ref.shape, name
        _assert_all(name, ours, ref, ours == ref)
    wide = str(got.weights.dtype).endswith("float64")
    near = [("weights", FP64_TOLERANCE if wide else WEIGHT_TOLERANCE, 1e-37)]
    if got.lse is not None and want.lse is not None:
        near.append(("lse", *(FP64_TOLERANCE if wide else LSE_TOLERANCE,) * 2))
    for name, relative, absolute in near:
        assert str(getattr(got, name).dtype).endswith("float64" if wide else "float32"), name
        ours, ref = a.doubles(getattr(got, name)), a.doubles(getattr(want, name))
        assert ours.shape == ref.shape, name
        finite = a.xp.isfinite(ref)
        with np.errstate(invalid="ignore"):
            close = a.xp.abs(ours - ref) <= relative * a.xp.abs(ref) + absolute
        _assert_all(name, ours, ref, a.xp.where(finite, close, ~a.xp.isfinite(ours)))


def _assert_all(name: str, got: Array, ref: Array, right: Array, more: str = "") -> None:
    if bool(right.all()):
        return
    first = tuple(int(i[0]) for i in np.nonzero(np.asarray(to_numpy(~right))))
    raise AssertionError(
        f"{name}{list(first)} is {got[first].item()}, the reference {ref[first].item()}; wrong in "
        f"{int((~right).sum())} of {math.prod(right.shape)} places{more}"
    )


# ---- products ------------------------------------------------------------------------------------


class Arithmetic(NamedTuple):
    """How a computation rounds: sums in `compute`, every step's result to `rounded`."""

    library: Any
    compute: Any
    rounded: Any

    def round(self, x: Array) -> Array:
        if self.compute == self.rounded:
            return x
        a = self.library
        low = a.cast(a.cast(x, self.rounded), self.compute)
        return a.xp.where(a.xp.isinf(low), x, low)  # fp16 ends at 65504: no error to allow for

    def product(self, x: Array, w: Array, bias: Array | None) -> Array:
        """x [n, k] times w [m, k], plus a row: [n, m]. Weights are widened some rows at a time."""
        a = self.library
        x = a.cast(x, self.compute)
        parts = []
        for begin in range(0, w.shape[0], _ROWS_OF_WEIGHTS):
            some = a.cast(w[begin : begin + _ROWS_OF_WEIGHTS], self.compute)
            if self.rounded != a.single:
                parts.append(x @ some.T)
                continue
            out = a.full((len(x), len(some)), 0, self.compute)  # in order, as reference.py says
            for k in range(some.shape[1]):
                out += x[:, k, None] * some[None, :, k]
            parts.append(out)
        whole = parts[0] if len(parts) == 1 else a.join(parts, 1)
        return whole if bias is None else whole + a.cast(bias, self.compute)

    def number(self, value: float) -> Any:
        """A scalar that does not widen arrays of `compute`."""
        return self.compute.type(value) if isinstance(self.compute, np.dtype) else value


def exact(library: Any) -> Arithmetic:
    return Arithmetic(library, library.double, library.double)


def usual(library: Any, dtype: np.dtype[Any]) -> Arithmetic:
    """The arithmetic of frameworks in `dtype`."""
    compute = library.double if dtype == np.float64 else library.single
    return Arithmetic(library, compute, library.native(dtype))


def activate(a: Arithmetic, z: Array, activation: str, alpha: float) -> Array:
    xp, number = a.library.xp, a.number
    if activation == "silu":
        return z * (1 / (1 + xp.exp(-number(alpha) * z)))
    if activation == "gelu":
        return z * number(0.5) * (1 + a.library.erf(z / number(math.sqrt(2))))
    if activation == "gelu_tanh":
        inner = number(math.sqrt(2 / math.pi)) * (z + number(0.044715) * z**3)
        return z * number(0.5) * (1 + xp.tanh(inner))
    positive = xp.where(xp.isnan(z) | (z > 0), z, number(0))
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
    out: Array  # [T, H]
    pre_activation: Array  # [T * K, 2I] or [T * K, I], NaN where there is no pair


@np.errstate(all="ignore")
def _forward(
    arithmetic: Arithmetic,
    x: Any,
    w_gate_up: Any,
    w_down: Any,
    routing: Any,
    *,
    w_up: Any = None,
    gate: str = "gate_up",
    activation: str = "silu",
    b_gate_up: Any = None,
    b_up: Any = None,
    b_down: Any = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    weight_on_input: bool = False,
) -> Layer:
    a, number, round_ = arithmetic.library, arithmetic.number, arithmetic.round
    x, w_gate_up, w_down, w_up, b_gate_up, b_up, b_down = (
        None if t is None else a.tensor(t)
        for t in (x, w_gate_up, w_down, w_up, b_gate_up, b_up, b_down)
    )
    w_gate, w_other = split_rows(w_gate_up, w_up, gate)
    b_gate, b_other = (None, None) if b_gate_up is None else split_rows(b_gate_up, b_up, gate)
    if gate == "separate":
        b_gate, b_other = b_gate_up, b_up
    weights = a.cast(a.doubles(routing.weights), arithmetic.compute)
    bounds, pairs = a.integers(routing.offsets).tolist(), a.integers(routing.pairs)
    tokens, top_k = weights.shape
    hidden = x.shape[1]
    width = w_other.shape[1] * (1 if w_gate is None else 2)
    pre = a.full((tokens * top_k, width), math.nan, arithmetic.compute)
    terms = a.full((tokens * top_k, hidden), 0, arithmetic.compute)
    at_once = max(1, _BLOCK // max(width, hidden))

    def row(bias: Array | None, e: int) -> Array | None:
        return None if bias is None else bias[e]

    for e in range(len(w_down)):
        for begin in range(bounds[e], bounds[e + 1], at_once):
            end = min(begin + at_once, bounds[e + 1])
            of = pairs[begin:end]
            rows = a.cast(x[of // top_k], arithmetic.compute)
            factor = weights.reshape(-1)[of][:, None]
            if weight_on_input:
                rows = round_(rows * factor)
            u = round_(arithmetic.product(rows, w_other[e], row(b_other, e)))
            g = None
            if w_gate is not None:
                g = round_(arithmetic.product(rows, w_gate[e], row(b_gate, e)))
            pre[begin:end] = u if g is None else a.join([g, u], 1)
            if limit is not None:
                u = u.clip(-number(limit), number(limit))
                g = None if g is None else g.clip(None, number(limit))
            acted = round_(activate(arithmetic, u if g is None else g, activation, alpha))
            if g is not None:
                acted = round_(acted * (u + number(up_offset)))
            y = round_(arithmetic.product(acted, w_down[e], row(b_down, e)))
            terms[of] = y if weight_on_input else round_(y * factor)
    terms = terms.reshape(tokens, top_k, hidden)
    out = terms[:, 0]
    for k in range(1, top_k):
        out = out + terms[:, k]
    return Layer(round_(out), pre)


@remembering
def forward_float64(x: Any, w_gate_up: Any, w_down: Any, routing: Any, **options: Any) -> Layer:
    """moe_forward in float64, for the routing given; options by moe_forward's names."""
    return _forward(exact(_library_of(x)), x, w_gate_up, w_down, routing, **options)


@remembering
def forward_plain(
    x: Any, w_gate_up: Any, w_down: Any, routing: Any, *, dtype: np.dtype[Any], **options: Any
) -> Layer:
    """The ordinary computation in `dtype`."""
    return _forward(usual(_library_of(x), dtype), x, w_gate_up, w_down, routing, **options)


def assert_near(
    name: str, got: Any, ref: Array, plain: Array, dtype: np.dtype[Any], times: int | None = None
) -> None:
    """The accuracy rule; not finite where, and only where, the reference is not or is beyond the
    dtype's numbers. `times` the error of the ordinary computation: 2, where there are few values 4.
    """
    a = _library_of(ref)
    assert dtype_of(got) == dtype, name
    got, plain = a.doubles(got), a.doubles(plain)
    assert tuple(got.shape) == tuple(ref.shape), name
    if math.prod(ref.shape) == 0:
        return
    size = a.xp.abs(ref)
    tame = a.xp.isfinite(ref) & (size <= float(_largest_of(dtype)))
    _assert_all(name, got, ref, a.xp.isfinite(got) == tame, ": finite, or not finite")
    both = tame & a.xp.isfinite(plain)
    if not bool(both.any()):
        return
    times = times or (4 if math.prod(ref.shape) < FEW else 2)
    error = a.xp.where(both, a.xp.abs(plain - ref), 0.0)
    largest = a.xp.where(both, size, 0.0)
    allowed = times * float(error.max()) + ulp(dtype, float(largest.max()))
    if dtype == np.float64:
        allowed = FP64_TOLERANCE * float(largest.max())
    ours = a.xp.where(tame, a.xp.abs(got - ref), 0.0)
    more = f"; the greatest error {float(ours.max()):.3g}, allowed {allowed:.3g}"
    _assert_all(name, got, ref, ours <= allowed, more)


def _largest_of(dtype: np.dtype[Any]) -> float:
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).max)


def assert_forward(
    out: Any, x: Any, w_gate_up: Any, w_down: Any, routing: Any, *, pre_activation: Any = None,
    times: int | None = None, **options: Any,
) -> None:  # fmt: skip
    """Holds one result, of any framework, to the accuracy rule."""
    dtype = dtype_of(x)
    ref = forward_float64(x, w_gate_up, w_down, routing, **options)
    plain = forward_plain(x, w_gate_up, w_down, routing, dtype=dtype, **options)
    assert_near("out", out, ref.out, plain.out, dtype, times)
    if pre_activation is not None:
        taken = int(routing.offsets[-1])
        wanted, usually = ref.pre_activation[:taken], plain.pre_activation[:taken]
        assert_near("pre_activation", pre_activation[:taken], wanted, usually, dtype, times)


@np.errstate(all="ignore")
def assert_grouped_product(
    out: Any, x: Any, w: Any, *, offsets: Any = None, counts: Any = None, bias: Any = None,
    times: int | None = None,
) -> None:  # fmt: skip
    """Holds the rows that an expert has to the accuracy rule."""
    a, dtype = _library_of(x), dtype_of(x)
    x, w = a.tensor(x), a.tensor(w)
    bias = None if bias is None else a.tensor(bias)
    bounds = a.integers(counts if offsets is None else offsets).tolist()
    ours, ref, plain = [], [], []
    for e in range(len(w)):
        at: Any = (e, slice(0, bounds[e])) if offsets is None else slice(bounds[e], bounds[e + 1])
        row = None if bias is None else bias[e]
        ours.append(out[at])
        ref.append(exact(a).product(x[at], w[e], row))
        arithmetic = usual(a, dtype)
        plain.append(arithmetic.round(arithmetic.product(x[at], w[e], row)))
    assert dtype_of(out) == dtype
    together = a.join([a.doubles(part) for part in ours], 0)
    assert_near("out", _of(a, together, dtype), a.join(ref, 0), a.join(plain, 0), dtype, times)


def _of(a: Any, values: Array, dtype: np.dtype[Any]) -> Array:
    return a.cast(values, a.native(dtype))


def rows_of_experts(shape: tuple[int, ...], offsets: Any, counts: Any) -> np.ndarray:
    """Which rows an expert has."""
    if counts is None:
        row = np.arange(shape[0])
        return (row >= int(offsets[0])) & (row < int(offsets[-1]))
    return np.arange(shape[1])[None, :] < np.asarray(counts)[:, None]
