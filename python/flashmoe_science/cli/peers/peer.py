"""The class of a peer, and what its module needs to find, refuse and prepare."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.shapes import Shape
from flashmoe_science.cli.suites import ATTENTION, AnyShape
from flashmoe_science.cli.timing import Contender

Inputs = tuple[Any, Any, Any]  # q, k, v, [batch, seq, heads, dim]
BackwardInputs = tuple[Any, Any, Any, Any]  # and dout
_REASON_LENGTH = 500


class Refused(Exception):
    """A peer that does not serve a shape; the message is its reason."""


@dataclasses.dataclass(frozen=True)
class Missing:
    """A peer that cannot be timed here at all, and why."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Peer:
    """One implementation of an operation.

    Attributes:
        name: Its name in --peer and the record.
        devices: Kinds of device that it runs on: "cpu", "cuda".
        modules: Modules to look for; any of them means that it is installed. They are looked up as
            files; nothing is imported.
        distribution: The installed package whose version goes into the record.
        install: How to get it, for a person.
        prepare: (arrays, shape, inputs) -> Contender, whose call computes the operation on the
            inputs' own memory. Inputs for attention: q, k, v [batch, seq, heads, dim] as torch
            tensors. For its backward and training: q, k, v and dout; the call returns dq, dk and
            dv. For a mixture of experts: a MoeInputs, whose logits the call takes in turn
            (MoeInputs.rotation), from the first on. For its backward and training: a
            MoeGradientInputs; the call returns the gradients of all `leaves`, and the contender's
            output is `checked`. Everything besides the operation (plans, views, compilation)
            happens here and is not timed. Raises Refused with the reason if it does not serve the
            shape.
        operation: "attention_forward", "attention_backward", "attention_training",
            "moe_forward", "moe_backward" or "moe_training".
    """

    name: str
    devices: tuple[str, ...]
    modules: tuple[str, ...]
    distribution: str
    install: str
    prepare: Callable[[Arrays, Any, Any], Contender]
    operation: str = ATTENTION

    def with_name(self, name: str) -> Peer:
        return dataclasses.replace(self, name=name)

    def missing(self) -> Missing | None:
        if any(is_installed(module) for module in self.modules):
            return None
        return Missing(self.name, f"not installed: {self.install}")

    def version(self) -> str:
        """The version of its package, "" if the package has none."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def contender(self, arrays: Arrays, shape: AnyShape, inputs: Any) -> tuple[Contender, Any]:
        """What to time, with its output, or outputs, of the shape's output_extents.

        Raises Refused with its full message if it has none to give.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                contender = dataclasses.replace(self.prepare(arrays, shape, inputs), name=self.name)
                with contender.context():
                    output = contender.output(contender.call())
                    arrays.synchronize()
                extents = shape.output_extents
                if extents_of(output) != extents:
                    raise Refused(f"its output is {extents_of(output)}, and not {extents}")
            except Refused:
                raise
            except Exception as error:  # third-party code; it may also run out of memory
                said = [str(error) or type(error).__name__]
                said += [str(w.message).split(" (Triggered internally")[0] for w in caught]
                raise Refused("; ".join(dict.fromkeys(said))[:_REASON_LENGTH]) from error
        return contender, output


def extents_of(output: Any) -> tuple[Any, ...]:
    """The shape of one output, or of each of several."""
    several = isinstance(output, tuple)
    return tuple(map(extents_of, output)) if several else tuple(output.shape)


def is_installed(module: str) -> bool:
    """Whether a module is there, without importing it or the package that holds it."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a module put into sys.modules by hand has no spec
        return False
    if spec is None or not rest:
        return spec is not None
    places = [Path(place).joinpath(*rest) for place in spec.submodule_search_locations or ()]
    return any(p.is_dir() or p.with_suffix(".py").is_file() for p in places)


def import_first(modules: tuple[str, ...]) -> Any:
    """The first installed one of the modules."""
    return importlib.import_module(next(m for m in modules if is_installed(m)))


def is_causal(shape: Shape, alignment: str, who: str) -> bool:
    """Whether the shape is masked causally; refuses a mask with another alignment than `who`'s.

    A single query aligned bottom right sees every key: that is no mask.
    """
    if shape.causal == "bottom_right" and shape.seq_q == 1:
        return False
    if shape.causal not in ("none", alignment) and shape.seq_q != shape.seq_k:
        theirs, ours = (a.replace("_", " ") for a in (alignment, shape.causal))
        raise Refused(f"{who}'s causal mask is aligned {theirs}; this mask is {ours}")
    return shape.causal != "none"


def window_of(shape: Shape, alignment: str, who: str) -> tuple[int | None, int | None] | None:
    """The shape's window; refuses one whose queries align differently than `who`'s."""
    ours = "top_left" if shape.causal == "top_left" else "bottom_right"
    if shape.window is not None and ours != alignment and shape.seq_q != shape.seq_k:
        theirs, this = (a.replace("_", " ") for a in (alignment, ours))
        raise Refused(f"{who}'s window is aligned {theirs}; this window is {this}")
    return shape.window


def refuse_window(shape: Shape, who: str) -> None:
    if shape.window is not None:
        raise Refused(f"{who} takes no window")


def refuse_softcap(shape: Shape, who: str) -> None:
    if shape.softcap is not None:
        raise Refused(f"{who} takes no softcap")
