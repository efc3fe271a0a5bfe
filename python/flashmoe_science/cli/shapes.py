"""Attention shapes for `plan`, `check` and `bench`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, ClassVar

from flashmoe_science.cli.output import CommandError, positive

FORWARD = "attention_forward"
BACKWARD = "attention_backward"
TRAINING = "attention_training"

CAUSAL_CHOICES = ("none", "bottom_right", "top_left")
DTYPE_CHOICES = ("fp32", "fp16", "bf16")
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention call: extents, element type, mask and softcap."""

    operation: ClassVar[str] = FORWARD

    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int
    dim: int
    dim_v: int
    dtype: str = "bf16"
    causal: str = "none"
    window_left: int | None = None  # keys before a query's own; None: all
    window_right: int | None = None
    softcap: float | None = None

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        """As flash_attention takes it."""
        ends = (self.window_left, self.window_right)
        return None if ends == (None, None) else ends

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of flash_attention and its plans besides extents and dtype."""
        causal = False if self.causal == "none" else self.causal
        return {"causal": causal, "window": self.window, "softcap": self.softcap}

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """Query i sees the keys from i + bounds[0] to i + bounds[1]; None: from the first, to the
        last."""
        place = 0 if self.causal == "top_left" else self.seq_k - self.seq_q
        right = self.window_right if self.causal == "none" else 0
        return (
            None if self.window_left is None else place - self.window_left,
            None if right is None else place + right,
        )

    def _pairs_before(self, offset: int) -> int:
        """Pairs of a query i and a key j < i + offset: none for the first queries, then a ramp,
        then all."""
        begin = min(max(-offset, 0), self.seq_q)
        end = min(max(self.seq_k - offset, 0), self.seq_q)
        ramp = (end - begin) * (2 * offset + begin + end - 1) // 2
        return ramp + (self.seq_q - end) * self.seq_k

    @property
    def _flops_of_a_dimension(self) -> float:
        """FLOPs of one product per dimension that it sums over or outputs. Pairs that the mask
        hides cost nothing."""
        left, right = self.bounds
        pairs = self.seq_q * self.seq_k if right is None else self._pairs_before(right + 1)
        pairs -= 0 if left is None else self._pairs_before(left)
        return 2.0 * self.batch * self.heads_q * pairs

    @property
    def flops(self) -> float:
        """FLOPs of the two products, as the library counts them."""
        return self._flops_of_a_dimension * (self.dim + self.dim_v)

    @property
    def _tensor_bytes(self) -> int:
        """Bytes of q, k, v and out in their dtype."""
        keys = self.batch * self.seq_k * self.heads_kv
        rows = self.batch * self.seq_q * self.heads_q
        return (keys + rows) * (self.dim + self.dim_v) * ITEM_BYTES[self.dtype]

    @property
    def _lse_bytes(self) -> int:
        return self.batch * self.seq_q * self.heads_q * 4

    @property
    def bytes(self) -> int:
        """Least traffic: q, k, v and out read or written once in their dtype, lse in fp32."""
        return self._tensor_bytes + self._lse_bytes

    @property
    def tokens(self) -> int:
        """Queries: what a model's tokens per second count."""
        return self.batch * self.seq_q

    @property
    def output_extents(self) -> tuple[Any, ...]:
        """[batch, seq_q, heads_q, dim_v]"""
        return (self.batch, self.seq_q, self.heads_q, self.dim_v)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return min(self.batch, self.seq_q, self.seq_k, self.heads_q, self.heads_kv) < 1

    def __str__(self) -> str:
        seq = f"{self.seq_q}" if self.seq_q == self.seq_k else f"{self.seq_q}/{self.seq_k}"
        heads = f"{self.heads_q}"
        if self.heads_kv != self.heads_q:
            heads = f"{self.heads_q}/{self.heads_kv}"
        dim = f"{self.dim}" if self.dim == self.dim_v else f"{self.dim}/{self.dim_v}"
        mask = {"none": "", "bottom_right": " causal", "top_left": " causal(top_left)"}
        text = f"{self.dtype} B{self.batch} S{seq} H{heads} D{dim}{mask[self.causal]}"
        return text + logits_text(self.window, self.softcap)


@dataclasses.dataclass(frozen=True)
class BackwardShape(Shape):
    """One call of attention's backward: dq, dk and dv of the same extents."""

    operation: ClassVar[str] = BACKWARD

    @property
    def flops(self) -> float:
        """FLOPs of the five products, as the library counts them: the scores again, dout v, and one
        per gradient. That is 2.5 times the forward's if dim equals dim_v."""
        return self._flops_of_a_dimension * (3 * self.dim + 2 * self.dim_v)

    @property
    def bytes(self) -> int:
        """Least traffic: q, k, v, out, their gradients and lse, each once."""
        return 2 * self._tensor_bytes + self._lse_bytes

    @property
    def output_extents(self) -> tuple[Any, ...]:
        """The extents of dq, dk and dv, which are those of q, k and v."""
        keys = (self.batch, self.seq_k, self.heads_kv)
        queries = (self.batch, self.seq_q, self.heads_q, self.dim)
        return queries, (*keys, self.dim), (*keys, self.dim_v)


@dataclasses.dataclass(frozen=True)
class TrainingShape(BackwardShape):
    """A forward call and the backward of it: dq, dk and dv of q, k, v and dout."""

    operation: ClassVar[str] = TRAINING

    @property
    def flops(self) -> float:
        """FLOPs of the forward's two products and the backward's five."""
        return self._flops_of_a_dimension * (4 * self.dim + 3 * self.dim_v)

    @property
    def bytes(self) -> int:
        """Least traffic of both calls, one after the other."""
        return 3 * self._tensor_bytes + 2 * self._lse_bytes


ATTENTION_SHAPES: dict[str, type[Shape]] = {
    shape.operation: shape for shape in (Shape, BackwardShape, TrainingShape)
}


def logits_text(window: tuple[int | None, int | None] | None, softcap: float | None) -> str:
    """Such as " window 1024,none softcap 50", "" without either."""
    text = "" if window is None else f" window {window_text(window)}"
    return text + ("" if softcap is None else f" softcap {softcap:g}")


def window_text(window: tuple[int | None, int | None]) -> str:
    """As --window takes it."""
    return ",".join("none" if end is None else str(end) for end in window)


def parse_window(text: str) -> tuple[int | None, int | None]:
    """Parses the value of --window; raises ValueError if it is none."""
    ends = [None if end == "none" else int(end) for end in text.split(",")]
    if len(ends) != 2 or any(end is not None and end < 0 for end in ends):
        raise ValueError(text)
    return ends[0], ends[1]


def _window_option(text: str) -> tuple[int | None, int | None]:
    try:
        return parse_window(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text}, accepted is LEFT,RIGHT: numbers of keys from 0 up, or none for no bound"
        ) from None


def add_shape_options(parser: argparse.ArgumentParser, required: bool) -> None:
    """Adds the flags that describe one shape; `required` is off if the caller has a suite."""
    group = parser.add_argument_group("shape")
    group.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default 1)")
    group.add_argument(
        "--seq", type=int, metavar="N", help="queries and keys of a sequence, when equal"
    )
    group.add_argument("--seq-q", type=int, metavar="N", help="queries of a sequence")
    group.add_argument("--seq-k", type=int, metavar="N", help="keys of a sequence")
    group.add_argument("--heads", type=int, metavar="N", required=required, help="query heads")
    group.add_argument(
        "--kv-heads", type=int, metavar="N", help="key and value heads (default: --heads)"
    )
    group.add_argument(
        "--dim", type=int, metavar="N", required=required, help="dimensions of a query and key head"
    )
    group.add_argument("--dim-v", type=int, metavar="N", help="of a value head (default: --dim)")
    group.add_argument(
        "--causal",
        nargs="?",
        const="bottom_right",
        default="none",
        choices=CAUSAL_CHOICES,
        help="mask; --causal alone means bottom_right",
    )
    group.add_argument(
        "--window",
        type=_window_option,
        metavar="LEFT,RIGHT",
        help="keys that a query sees before and behind its own, such as 1023,0; none for no bound",
    )
    group.add_argument(
        "--softcap",
        type=positive(float),
        metavar="X",
        help="logits become X tanh(logit / X)",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPE_CHOICES,
        help="element type (default: bf16 on a GPU, fp32 on the CPU)",
    )


_SHAPE_OPTIONS = (
    "--batch",
    "--seq",
    "--seq-q",
    "--seq-k",
    "--heads",
    "--kv-heads",
    "--dim",
    "--dim-v",
    "--causal",
    "--window",
    "--softcap",
    "--dtype",
)


def given_shape_options(arguments: argparse.Namespace) -> list[str]:
    """The shape flags that differ from their defaults."""
    defaults: dict[str, Any] = {"batch": 1, "causal": "none"}
    fields = {name: name.removeprefix("--").replace("-", "_") for name in _SHAPE_OPTIONS}
    return [n for n, f in fields.items() if getattr(arguments, f) != defaults.get(f)]


def shape_from_options(arguments: argparse.Namespace, dtype: str) -> Shape:
    """The shape that the flags describe; refuses flags that leave an extent open or give it
    twice."""
    if arguments.seq is not None and (arguments.seq_q, arguments.seq_k) != (None, None):
        raise CommandError("--seq: give either --seq or --seq-q and --seq-k, not both")
    seq_q: Any = arguments.seq if arguments.seq is not None else arguments.seq_q
    seq_k: Any = arguments.seq if arguments.seq is not None else arguments.seq_k
    extents = {"--seq (or --seq-q)": seq_q, "--seq (or --seq-k)": seq_k}
    extents |= {"--heads": arguments.heads, "--dim": arguments.dim}
    for name, value in extents.items():
        if value is None:
            raise CommandError(f"{name} is missing")
    return Shape(
        batch=arguments.batch,
        seq_q=seq_q,
        seq_k=seq_k,
        heads_q=arguments.heads,
        heads_kv=arguments.heads if arguments.kv_heads is None else arguments.kv_heads,
        dim=arguments.dim,
        dim_v=arguments.dim if arguments.dim_v is None else arguments.dim_v,
        dtype=arguments.dtype or dtype,
        causal=arguments.causal,
        window_left=arguments.window[0] if arguments.window else None,
        window_right=arguments.window[1] if arguments.window else None,
        softcap=arguments.softcap,
    )


def add_pass_options(parser: argparse.ArgumentParser, training: bool = False) -> None:
    """Adds the flags for the pass of an operation; without them it is the forward."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--backward", action="store_true", help="the gradients alone, of what a forward saved"
    )
    if training:
        group.add_argument(
            "--training",
            action="store_true",
            help="forward and backward through torch.autograd, one after the other",
        )


def given_pass_options(arguments: argparse.Namespace) -> list[str]:
    return [f"--{name}" for name in ("backward", "training") if getattr(arguments, name, False)]


def of_pass(shape: Shape, arguments: argparse.Namespace) -> Shape:
    """The same extents, for the pass that the flags ask for."""
    by_flag = {"--backward": BACKWARD, "--training": TRAINING}
    operations = [by_flag[flag] for flag in given_pass_options(arguments)] or [FORWARD]
    return ATTENTION_SHAPES[operations[0]](**vars(shape))
