"""Mixture-of-experts shapes for `bench`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, ClassVar

from flashmoe_science.cli.output import CommandError, at_least
from flashmoe_science.cli.shapes import ITEM_BYTES, given_pass_options

MOE = "moe_forward"
MOE_BACKWARD = "moe_backward"
MOE_TRAINING = "moe_training"
_HELD_EXPERTS = (
    3  # experts whose gradients of weights are kept for checks: all would be as large as the
    # weights
)


@dataclasses.dataclass(frozen=True)
class MoeShape:
    """One layer of gated experts on its tokens, from the router's logits.

    Attributes:
        tokens: T.
        hidden: H, of the tokens and the output.
        inner: I, of an expert's activation; its weights are [2I, H] and [H, I].
        experts: E.
        top_k: K, experts of a token.
        dtype: Dtype of tokens, logits, weights and output.
        skew: A token's experts are drawn without replacement; rank r (from 1) has weight r^-skew
            (Zipf's law). 0: all experts are equally likely.
        model: The model with this shape, for people; not compared.
    """

    operation: ClassVar[str] = MOE

    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    dtype: str = "bf16"
    skew: float = 0.0
    model: str = dataclasses.field(default="", compare=False)

    @property
    def pairs(self) -> int:
        """Number of pairs of a token and one of its experts."""
        return self.tokens * self.top_k

    @property
    def flops(self) -> float:
        """FLOPs of the experts' products, 6 T K H I; the router's logits are given."""
        return 6.0 * self.pairs * self.hidden * self.inner

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights."""
        return 3 * self.hidden * self.inner * ITEM_BYTES[self.dtype]

    @property
    def gradients(self) -> bool:
        """Whether gradients are computed."""
        return self.operation != MOE

    def traffic(self, active: int) -> int:
        """Least traffic if `active` experts have tokens: their weights, the tokens, the logits and
        the output, each once."""
        values = self.tokens * (2 * self.hidden + self.experts)
        return active * self.expert_bytes + values * ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Least traffic with as many active experts as possible."""
        return self.traffic(min(self.experts, self.pairs))

    @property
    def output_extents(self) -> tuple[Any, ...]:
        """[tokens, hidden]"""
        return (self.tokens, self.hidden)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return min(self.tokens, self.hidden, self.inner, self.experts, self.top_k) < 1

    def __str__(self) -> str:
        extents = f"T{self.tokens} H{self.hidden} I{self.inner} E{self.experts} K{self.top_k}"
        return f"{self.dtype} {extents}{skew_text(self.skew)}"


@dataclasses.dataclass(frozen=True)
class MoeBackwardShape(MoeShape):
    """The backward of one layer and of its routing: the gradients of the tokens, the router's
    logits and the experts' weights, from a forward that saved what activations were applied to."""

    operation: ClassVar[str] = MOE_BACKWARD

    @property
    def flops(self) -> float:
        """FLOPs of the experts' products, two for each of the forward's: 12 T K H I."""
        return 2.0 * super().flops

    @property
    def _saved_bytes(self) -> int:
        """Bytes of what activations were applied to, [T K, 2I]."""
        return self.pairs * 2 * self.inner * ITEM_BYTES[self.dtype]

    def traffic(self, active: int) -> int:
        """Least traffic if `active` experts have tokens: their weights, the gradients of all
        weights, the saved tensors, and the tokens, the logits, the output's gradient and those of
        tokens and logits, each once."""
        values = self.tokens * (3 * self.hidden + 2 * self.experts)
        weights = (active + self.experts) * self.expert_bytes
        return weights + self._saved_bytes + values * ITEM_BYTES[self.dtype]

    @property
    def held_experts(self) -> int:
        """Experts whose gradients of weights are checked against the accuracy rule."""
        return min(self.experts, _HELD_EXPERTS)

    @property
    def output_extents(self) -> tuple[Any, ...]:
        """Extents of the checked outputs: the gradients of tokens and logits, and of a few experts'
        weights."""
        held = self.held_experts
        return (
            (self.tokens, self.hidden),
            (self.tokens, self.experts),
            (held, 2 * self.inner, self.hidden),
            (held, self.hidden, self.inner),
        )


@dataclasses.dataclass(frozen=True)
class MoeTrainingShape(MoeBackwardShape):
    """A forward from the router's logits and the backward of it."""

    operation: ClassVar[str] = MOE_TRAINING

    @property
    def flops(self) -> float:
        """FLOPs of the forward's products and the backward's, 18 T K H I."""
        return 1.5 * super().flops

    def traffic(self, active: int) -> int:
        """Least traffic of both calls, one after the other; the first of them saves."""
        forward = MoeShape.traffic(self, active) + self._saved_bytes
        return forward + super().traffic(active)


MOE_SHAPES: dict[str, type[MoeShape]] = {
    shape.operation: shape for shape in (MoeShape, MoeBackwardShape, MoeTrainingShape)
}


def skew_text(skew: float) -> str:
    """Text such as " zipf 1", "" if all experts are equally likely."""
    return f" zipf {skew:g}" if skew else ""


_EXTENTS = {"--tokens": "tokens", "--hidden": "hidden", "--inner": "inner",
            "--experts": "experts", "--top-k": "top_k"}  # fmt: skip


def _skew(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 10:
        raise argparse.ArgumentTypeError(f"got {text}, accepted is a number from 0 to 10")
    return value


def add_moe_shape_options(parser: argparse.ArgumentParser) -> None:
    """The flags that describe one shape; --dtype is that of the attention shapes."""
    group = parser.add_argument_group("shape of a mixture of experts")
    extent: Any = at_least(0)
    group.add_argument("--tokens", type=extent, metavar="N", help="tokens")
    group.add_argument("--hidden", type=extent, metavar="N", help="values of a token")
    group.add_argument("--inner", type=extent, metavar="N", help="of an expert's activation")
    group.add_argument("--experts", type=extent, metavar="N", help="experts of the layer")
    group.add_argument("--top-k", type=extent, metavar="N", help="experts of a token")
    group.add_argument(
        "--skew",
        type=_skew,
        metavar="X",
        help="Zipf's exponent of how experts are liked (default 0: all alike)",
    )


def given_moe_options(arguments: argparse.Namespace) -> list[str]:
    """The given flags."""
    return [
        n for n, f in {**_EXTENTS, "--skew": "skew"}.items() if getattr(arguments, f) is not None
    ]


def moe_shape_from_options(arguments: argparse.Namespace, dtype: str) -> MoeShape:
    """The shape that the flags describe, for the requested pass; refuses flags that leave an extent
    open."""
    extents = {}
    for name, field in _EXTENTS.items():
        extents[field] = getattr(arguments, field)
        if extents[field] is None:
            raise CommandError(f"{name} is missing")
    top_k, experts = extents["top_k"], extents["experts"]
    if top_k > experts:
        raise CommandError(f"--top-k: got {top_k}, accepted are at most the {experts} experts")
    by_flag = {"--backward": MOE_BACKWARD, "--training": MOE_TRAINING}
    operations = [by_flag[flag] for flag in given_pass_options(arguments)] or [MOE]
    return MOE_SHAPES[operations[0]](
        **extents, dtype=arguments.dtype or dtype, skew=arguments.skew or 0.0
    )
