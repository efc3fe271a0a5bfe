"""Mixture-of-experts shapes: what `bench` is asked about beside attention."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from flashmoe_science.cli.output import CommandError, at_least
from flashmoe_science.cli.shapes import ITEM_BYTES


@dataclasses.dataclass(frozen=True)
class MoeShape:
    """One layer of gated experts on its tokens, from the router's logits.

    Attributes:
        tokens: T.
        hidden: H, of the tokens and the output.
        inner: I, of an expert's activation; its weights are [2I, H] and [H, I].
        experts: E.
        top_k: K, experts of a token.
        dtype: Of tokens, logits, weights and output.
        skew: A token's experts are drawn without replacement, the one of rank r (from 1) with
            weight r^-skew (Zipf's law). 0: every expert alike.
        model: Whose shape it is, for people; not part of what is compared.
    """

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
        """Tokens with one of their experts each."""
        return self.tokens * self.top_k

    @property
    def flops(self) -> float:
        """Of the experts' products, 6 T K H I; the router's logits are given."""
        return 6.0 * self.pairs * self.hidden * self.inner

    @property
    def expert_bytes(self) -> int:
        """Of one expert's weights."""
        return 3 * self.hidden * self.inner * ITEM_BYTES[self.dtype]

    def traffic(self, active: int) -> int:
        """Least traffic where `active` experts have tokens: their weights, the tokens, the logits
        and the output, each once."""
        values = self.tokens * (2 * self.hidden + self.experts)
        return active * self.expert_bytes + values * ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Least traffic with as many experts active as can be."""
        return self.traffic(min(self.experts, self.pairs))

    @property
    def output_extents(self) -> tuple[int, ...]:
        """[tokens, hidden]"""
        return (self.tokens, self.hidden)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return min(self.tokens, self.hidden, self.inner, self.experts, self.top_k) < 1

    def __str__(self) -> str:
        extents = f"T{self.tokens} H{self.hidden} I{self.inner} E{self.experts} K{self.top_k}"
        return f"{self.dtype} {extents}{skew_text(self.skew)}"


def skew_text(skew: float) -> str:
    """Such as " zipf 1", "" where every expert is alike."""
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
    """Those of the flags that were given."""
    return [
        n for n, f in {**_EXTENTS, "--skew": "skew"}.items() if getattr(arguments, f) is not None
    ]


def moe_shape_from_options(arguments: argparse.Namespace, dtype: str) -> MoeShape:
    """The shape the flags describe; refuses flags that leave an extent open."""
    extents = {}
    for name, field in _EXTENTS.items():
        extents[field] = getattr(arguments, field)
        if extents[field] is None:
            raise CommandError(f"{name} is missing")
    top_k, experts = extents["top_k"], extents["experts"]
    if top_k > experts:
        raise CommandError(f"--top-k: got {top_k}, accepted are at most the {experts} experts")
    return MoeShape(**extents, dtype=arguments.dtype or dtype, skew=arguments.skew or 0.0)
