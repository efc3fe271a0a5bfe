"""The accuracy rule for gradients of a mixture of experts.

    max|ours - ref| <= 2 max|plain - ref| + 2 ulp

as for attention's gradients (gradient_reference.py): for dx and dlogits on some tokens, and for the
gradients of weights of some experts, to which all tokens of an expert add. `ref` is float64
mathematics from the inputs only; `plain` is what a framework without fused kernels computes: every
product, activation and weighting of the forward (moe_reference.py) and of the backward takes and
gives the inputs' dtype and accumulates in fp32. dlogits may also be off by the fp32 rounding of a
cancellation: it is a weight times the difference of its gradient and a mean of gradients, which is
0 if a token has one expert.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.moe_gradient_inputs import NAMES, Gradients, MoeGradientInputs
from flashmoe_science.cli.moe_reference import routing_of
from flashmoe_science.cli.moe_shapes import MoeBackwardShape, MoeShape
from flashmoe_science.cli.reference import (
    EPSILON,
    Accuracy,
    difference,
    fault,
    largest,
    sample,
)

_CANCELLATION = 4 * 2.0**-23  # relative to the largest gradient of a weight, in dlogits
# Total operations of the reference on tokens, and on experts.
_TOKEN_FLOPS = {"cpu": 2**32, "cuda": 2**39}
_EXPERT_FLOPS = {"cpu": 2**34, "cuda": 2**44}
_LEAST_TOKENS, _MOST_TOKENS = 4, 512
_BLOCK = {"cpu": 2**22, "cuda": 2**27}  # values of one expert's rows at once


@dataclasses.dataclass
class _Rows:
    """Intermediates of the backward for one expert's rows, one per token; wider than the dtype."""

    dweights: Any  # [rows], of the routing's weights
    dy: Any  # [rows, H], of what w_down gives
    activation: Any  # [rows, I], what w_down takes
    dboth: Any  # [rows, 2I], of what w_gate_up gives


class _Computation:
    """The backward in float64 (dtype "fp64"), or the plain one in a dtype."""

    def __init__(self, arrays: Arrays, shape: MoeShape, dtype: str) -> None:
        self._arrays, self._inner, self._dtype = arrays, shape.inner, dtype
        self.exact = dtype == "fp64"

    def wide(self, values: Any) -> Any:
        return self._arrays.cast(values, "fp64" if self.exact else "fp32")

    def stored(self, values: Any) -> Any:
        """A value as stored between two steps."""
        return values if self.exact else self._arrays.rounded(values, self._dtype)

    def rows(self, weights: tuple[Any, Any], x: Any, dout: Any, scales: Any) -> _Rows:
        """`weights` are one expert's w_gate_up and w_down, `scales` [rows] the routing's."""
        xp, stored = self._arrays.xp, self.stored
        w_gate_up, w_down = weights
        scales = stored(self.wide(scales))[:, None]
        both = stored(x @ w_gate_up.T)
        gate, up = both[:, : self._inner], both[:, self._inner :]
        sigmoid = 1.0 / (1.0 + xp.exp(-gate))
        silu = stored(gate * sigmoid)
        activation = stored(silu * up)
        y = stored(activation @ w_down.T)
        dy = stored(dout * scales)
        da = stored(dy @ w_down)
        dboth = xp.zeros_like(both)
        dboth[:, : self._inner] = stored(stored(da * up) * sigmoid * (1.0 + gate * (1.0 - sigmoid)))
        dboth[:, self._inner :] = stored(da * silu)
        return _Rows(stored(stored(dout * y).sum(axis=-1)), dy, activation, dboth)

    def of_tokens(
        self, inputs: MoeGradientInputs, tokens: list[int], ids: Any, weights: Any
    ) -> tuple[Any, Any, Any]:
        """dx [tokens, H], dlogits [tokens, E] and dweights [tokens, K] of some tokens."""
        xp, layer = self._arrays.xp, inputs.layer
        x, dout = self.wide(layer.x[tokens]), self.wide(inputs.dout[tokens])
        scales = self.wide(weights)
        parts = xp.zeros_like(x[:, None, :] + scales[..., None])
        dweights = xp.zeros_like(scales)
        for expert in sorted(set(ids.reshape((-1,)).tolist())):
            rows, ks = xp.where(ids == expert)
            of = self.wide(layer.w_gate_up[expert]), self.wide(layer.w_down[expert])
            made = self.rows(of, x[rows], dout[rows], weights[rows, ks])
            parts[rows, ks] = self.stored(made.dboth @ of[0])
            dweights[rows, ks] = made.dweights
        mean = (scales * dweights).sum(axis=-1, keepdims=True)
        dlogits = xp.zeros_like(self.wide(layer.logits[0][tokens]))
        dlogits[self._arrays.arange(len(tokens))[:, None], ids] = scales * (dweights - mean)
        return self.stored(parts.sum(axis=1)), self.stored(dlogits), dweights

    def of_expert(
        self, inputs: MoeGradientInputs, expert: int, ids: Any, weights: Any, block: int
    ) -> tuple[Any, Any]:
        """dw_gate_up [2I, H] and dw_down [H, I] of one expert, of all its tokens."""
        layer = inputs.layer
        of = self.wide(layer.w_gate_up[expert]), self.wide(layer.w_down[expert])
        dw_gate_up, dw_down = (0.0 * w for w in of)
        tokens, ks = self._arrays.xp.where(ids == expert)
        for begin in range(0, len(tokens), block):
            at, k = tokens[begin : begin + block], ks[begin : begin + block]
            x, dout = self.wide(layer.x[at]), self.wide(inputs.dout[at])
            made = self.rows(of, x, dout, weights[at, k])
            dw_gate_up += made.dboth.T @ x
            dw_down += made.dy.T @ made.activation
        return self.stored(dw_gate_up), self.stored(dw_down)


class _Judge:
    """Verdicts on parts of gradients, of each contender."""

    def __init__(
        self, arrays: Arrays, shape: MoeShape, outputs: dict[str, Gradients], checked: str
    ) -> None:
        self._arrays, self._shape, self._checked = arrays, shape, checked
        self._finite = {
            who: {
                name: bool(arrays.xp.isfinite(x).all()) for name, x in zip(NAMES, of, strict=True)
            }
            for who, of in outputs.items()
        }
        self.verdicts: dict[str, list[Accuracy]] = {who: [] for who in outputs}

    def add(
        self, name: str, ref: Any, plain: Any, parts: dict[str, Any], left: float = 0.0
    ) -> None:
        """Checks `parts`, one per contender, against the rule; `left` is an additional
        allowance."""
        xp, cast = self._arrays.xp, self._arrays.cast
        plain_error = difference(xp, cast(plain, "fp64"), ref)
        greatest = largest(xp, ref)
        epsilon = EPSILON[self._shape.dtype]
        ulp = epsilon * 2.0 ** math.floor(math.log2(greatest)) if greatest > 0 else 0.0
        bound = 2.0 * plain_error + 2.0 * ulp + left
        for who, part in parts.items():
            error = difference(xp, cast(part, "fp64"), ref)
            reason = fault(error, bound, None, self._finite[who][name], name)
            self.verdicts[who].append(
                Accuracy(not reason, error, plain_error, bound, None, self._checked, reason, name)
            )

    def verdict(self, who: str) -> Accuracy:
        """The first failed verdict, else that of the part closest to its bound."""
        found = self.verdicts[who]
        failed = [verdict for verdict in found if not verdict.passed]
        # A bound of 0, for an expert without tokens, allows only 0.
        return (
            failed[0] if failed else max(found, key=lambda v: v.error / v.bound if v.bound else 0)
        )


def _affordable(held: list[int], counts: list[int], shape: MoeShape, most: float) -> int:
    """How many of the held experts, from the fewest tokens up, are checked: those that together
    cost at most `most`, and at least one with tokens."""
    spent, number = 0.0, 0
    for expert in held:
        spent += 18.0 * shape.hidden * shape.inner * counts[expert]
        if spent > most and number and counts[held[number - 1]]:
            break
        number += 1
    return number


def judge_moe_gradients(
    arrays: Arrays,
    shape: MoeBackwardShape,
    inputs: MoeGradientInputs,
    outputs: dict[str, Gradients],
) -> dict[str, Accuracy]:
    """Checks every contender's gradients (MoeGradientInputs.checked) against the rule, with one
    reference.

    Of many tokens, evenly spaced ones are checked; of the held experts' weights, every gradient.
    All given elements are checked to be finite. The errors are those of the part that comes closest
    to its bound, or breaks it.
    """
    xp = arrays.xp
    kind = "cpu" if arrays.device == "cpu" else "cuda"
    logits = inputs.layer.logits[0]
    of_token = 12.0 * shape.top_k * shape.hidden * shape.inner
    affordable = int(_TOKEN_FLOPS[kind] / of_token)
    tokens = sample(shape.tokens, max(_LEAST_TOKENS, min(_MOST_TOKENS, affordable)))
    ids, weights = routing_of(arrays, shape, logits)
    counts = [int((ids == expert).sum()) for expert in inputs.held]
    of_held = dict(zip(inputs.held, counts, strict=True))
    by_expert = [of_held.get(expert, 0) for expert in range(shape.experts)]
    held = inputs.held[: _affordable(inputs.held, by_expert, shape, _EXPERT_FLOPS[kind])]
    checked = f"{len(tokens)} of {shape.tokens} tokens, {len(held)} of {shape.experts} experts"
    judge = _Judge(arrays, shape, outputs, checked)

    ways = [_Computation(arrays, shape, dtype) for dtype in ("fp64", shape.dtype)]
    exact, plain = (way.of_tokens(inputs, tokens, ids[tokens], weights[tokens]) for way in ways)
    left = (0.0, _CANCELLATION * largest(xp, exact[2]))
    for i, name in enumerate(NAMES[:2]):
        parts = {who: of[i][tokens] for who, of in outputs.items()}
        judge.add(name, exact[i], plain[i], parts, left[i])
    block = max(1, _BLOCK[kind] // (shape.hidden + 2 * shape.inner))
    for place, expert in enumerate(held):
        right, rough = (way.of_expert(inputs, expert, ids, weights, block) for way in ways)
        for i, name in enumerate(NAMES[2:]):
            parts = {who: of[i + 2][place] for who, of in outputs.items()}
            judge.add(name, right[i], rough[i], parts)
    return {who: judge.verdict(who) for who in outputs}
