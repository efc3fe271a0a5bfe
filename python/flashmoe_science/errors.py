"""The package's exceptions. Each is a FlashMoEError and one of Python's own kinds.

The message is the library's sentence: it names the argument, what it got and what is accepted.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class FlashMoEError(Exception):
    """Base of everything this package raises.

    Attributes:
        status: Name of the C ABI's status, such as "FLASHMOE_ERROR_UNSUPPORTED".
    """

    status: str = "FLASHMOE_ERROR_INTERNAL"
    _names_both: bool = False  # both names of one argument are given, which _naming leaves alone


class InvalidArgumentError(FlashMoEError, ValueError):
    """An argument's value is wrong: a shape, a stride, an alignment, an option."""

    status = "FLASHMOE_ERROR_INVALID_ARGUMENT"


class _TransformedError(InvalidArgumentError):
    """An argument is a tensor of a transform of torch.func, which torch's operators take."""


class ArgumentTypeError(FlashMoEError, TypeError):
    """An argument is no tensor, has a dtype that is not accepted, or is of another library."""

    status = "FLASHMOE_ERROR_INVALID_ARGUMENT"


class UnsupportedError(FlashMoEError, NotImplementedError):
    """A valid request that no kernel in this build serves."""

    status = "FLASHMOE_ERROR_UNSUPPORTED"


class DeviceError(FlashMoEError, RuntimeError):
    """The device cannot be used, this build has no code for it, or CUDA reported an error."""

    status = "FLASHMOE_ERROR_CUDA"


class OutOfMemoryError(FlashMoEError, MemoryError):
    """The host has no memory for the call."""

    status = "FLASHMOE_ERROR_OUT_OF_MEMORY"


class InternalError(FlashMoEError, RuntimeError):
    """A defect of this library; please report it."""


_STATUSES: dict[int, tuple[str, type[FlashMoEError]]] = {
    1: ("FLASHMOE_ERROR_INVALID_ARGUMENT", InvalidArgumentError),
    2: ("FLASHMOE_ERROR_UNSUPPORTED", UnsupportedError),
    3: ("FLASHMOE_ERROR_ARCH_NOT_BUILT", DeviceError),
    4: ("FLASHMOE_ERROR_NO_DEVICE", DeviceError),
    # The package supplies every workspace, so a workspace that is too small means no memory.
    5: ("FLASHMOE_ERROR_WORKSPACE_TOO_SMALL", OutOfMemoryError),
    6: ("FLASHMOE_ERROR_CUDA", DeviceError),
    7: ("FLASHMOE_ERROR_OUT_OF_MEMORY", OutOfMemoryError),
    8: ("FLASHMOE_ERROR_INTERNAL", InternalError),
}


def _from_status(status: int, sentence: str) -> FlashMoEError:
    """The exception of a failed call of the C ABI."""
    name, kind = _STATUSES.get(status, ("FLASHMOE_ERROR_INTERNAL", InternalError))
    if kind is InvalidArgumentError and ": got dtype " in sentence:
        kind = ArgumentTypeError  # by Python's convention a wrong dtype is a TypeError
    error = kind(sentence)
    error.status = name
    return error


def _without_addresses(error: FlashMoEError) -> str:
    """The sentence without what differs between calls, for code that reports each reason once."""
    return re.sub(r"\b0x[0-9a-f]+\b", "…", str(error))


def _naming(
    names: dict[str, str], also: dict[str, str] | None = None
) -> Callable[[_Function], _Function]:
    """A decorator for functions with other argument names: in the sentences of errors it replaces
    the library's names by theirs.

    Args:
        names: Their names, keyed by the library's.
        also: Second names, keyed by the first, of keyword-only arguments. If one is given, the
            sentence uses it.
    """
    firsts = names | {first: first for first in also or {}}
    # "number of positions" names an extent, and no argument.
    words = re.compile(rf"\b(?<!number of )({'|'.join(firsts)})\b")

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def named(*arguments: Any, **options: Any) -> Any:
            try:
                return function(*arguments, **options)
            except FlashMoEError as error:
                if error._names_both:
                    raise
                given = {x: y for x, y in (also or {}).items() if options.get(y) is not None}
                called = {ours: given.get(theirs, theirs) for ours, theirs in firsts.items()}
                sentence = words.sub(lambda found: called[found[0]], str(error))
                if sentence == str(error):
                    raise
                renamed = type(error)(sentence)
                renamed.status = error.status
                raise renamed from None

        return named  # type: ignore[return-value]

    return decorate


def _type_error(_: object, sentence: str) -> ArgumentTypeError:
    return ArgumentTypeError(sentence)


def _value_error(_: object, sentence: str) -> InvalidArgumentError:
    return InvalidArgumentError(sentence)
