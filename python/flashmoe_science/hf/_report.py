"""Counts what ran each layer of transformers' models: ours or transformers' own."""

from __future__ import annotations

import re
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from flashmoe_science import _warn_once
from flashmoe_science.errors import UnsupportedError
from flashmoe_science.hf._models import ATTENTION, EXPERTS, Choice

_LOGGER = "flashmoe_science.hf"
OURS = ""  # the reason of our calls


@dataclass(frozen=True)
class Layer:
    """The calls of one layer.

    Attributes:
        model: Class of the model that last named the layer; "" if none did.
        name: Its path in that model, or its class.
        operation: "attention" or "experts".
        ours: Calls by FlashMoE.
        stock: Calls by transformers' own implementation, by reason.
    """

    model: str
    name: str
    operation: str
    ours: int
    stock: Mapping[str, int]


@dataclass(frozen=True)
class Report:
    """The result of `report`; `str()` of it is for people.

    Attributes:
        layers: One entry per layer of the models that take FlashMoE, even if not called.
        compiled: How often torch.compile and torch.export traced a layer, by its class. They trace
            again after a graph break. Runs of a graph are not counted.
        without_choice: Layers that compute by themselves and ask for no implementation, as "model:
            class".
    """

    layers: tuple[Layer, ...]
    compiled: tuple[Layer, ...]
    without_choice: tuple[str, ...]

    @property
    def ours(self) -> int:
        """Calls by FlashMoE, without those in compiled graphs."""
        return sum(layer.ours for layer in self.layers)

    @property
    def stock(self) -> int:
        """Calls by transformers' own implementation, without those in compiled graphs."""
        return sum(sum(layer.stock.values()) for layer in self.layers)

    def __str__(self) -> str:
        lines = [f"{self.ours} calls by FlashMoE, {self.stock} by transformers"]
        lines += _lines(self.layers)
        if self.compiled:
            lines += ["traced into compiled graphs:", *_lines(self.compiled)]
        if self.without_choice:
            lines.append("layers that ask for no implementation, and are not counted:")
            lines += [f"  {layer}" for layer in self.without_choice]
        return "\n".join(lines)


def _lines(layers: Iterable[Layer]) -> Iterator[str]:
    """One line for layers that differ only in their number, and one per reason."""
    alike: Counter[tuple[str, str, str, int, tuple[tuple[str, int], ...]]] = Counter()
    for layer in layers:
        name = re.sub(r"(?<![A-Za-z_])\d+(?![A-Za-z_])", "*", layer.name)
        stock = tuple(sorted(layer.stock.items()))
        alike[layer.model, name, layer.operation, layer.ours, stock] += 1
    for (model, name, operation, ours, stock), number in alike.items():
        where = f"{model}: {name}" if model else name
        each = f" ({number} layers, each)" if number > 1 else ""
        total = sum(calls for _, calls in stock)
        counts = f"{ours} by FlashMoE, {total} by transformers" if ours or stock else "not called"
        yield f"  {operation} of {where}{each}: {counts}"
        for reason, calls in stock:
            yield f"    {calls} because {reason}"


@dataclass
class _Calls:
    """The calls of one layer, by operation and reason, and its place."""

    name: str
    module: weakref.ref[torch.nn.Module] | None = None
    model: str = ""
    by_reason: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def layers(self) -> Iterator[Layer]:
        for operation, reasons in self.by_reason.items():
            if reasons or self.takes_ours(operation):
                stock = {reason: n for reason, n in reasons.items() if reason != OURS}
                yield Layer(self.model, self.name, operation, reasons[OURS], stock)

    def layer(self) -> torch.nn.Module | None:
        """The layer, unless it is gone."""
        return None if self.module is None else self.module()

    def takes_ours(self, operation: str) -> bool:
        """Whether the layer exists and its configuration still chooses ours."""
        choice = ATTENTION if operation == ATTENTION.operation else EXPERTS
        return choice.is_ours(getattr(self.layer(), "config", None))


class _Alone(NamedTuple):
    """A layer that asks for no implementation: its model, and what it computes."""

    model: weakref.ref[torch.nn.Module]
    choice: Choice


_lock = threading.Lock()
_calls: list[_Calls] = []  # includes layers that are gone
_MOST_GONE = 1000  # from this many layers on, gone ones with the same name are merged
_next_join = _MOST_GONE
_by_module: weakref.WeakKeyDictionary[torch.nn.Module, _Calls] = weakref.WeakKeyDictionary()
_traced: dict[str, _Calls] = {}  # by the class of the layer
_without_choice: weakref.WeakKeyDictionary[torch.nn.Module, _Alone] = weakref.WeakKeyDictionary()
_strict = False


def set_strict(strict: bool) -> None:
    """Sets whether a call that is not ours is an error."""
    global _strict
    _strict = strict


def note_ours(module: torch.nn.Module, operation: str) -> None:
    """Counts a call by ours."""
    _note(module, operation, OURS)


def note_stock(module: torch.nn.Module, operation: str, reason: str) -> None:
    """Counts a call that goes to transformers' own implementation, and warns why.

    Raises:
        UnsupportedError: Registered as strict.
    """
    if _strict:
        raise UnsupportedError(
            f"{operation} of {type(module).__name__}: {reason}; registered as strict, FlashMoE "
            "leaves no call to transformers' own implementation"
        )
    _note(module, operation, reason)
    _warn_of_stock(operation, reason)


def _note(module: torch.nn.Module, operation: str, reason: str) -> None:
    if torch.compiler.is_compiling():
        # Passes the class: the module itself would be guarded, and each layer that shares this code
        # compiled again.
        _note_traced(type(module).__name__, operation, reason)
        return
    with _lock:
        _calls_of(module).by_reason[operation][reason] += 1


def _calls_of(module: torch.nn.Module) -> _Calls:
    global _next_join
    calls = _by_module.get(module)
    if calls is None:
        calls = _by_module[module] = _Calls(type(module).__name__, weakref.ref(module))
        _calls.append(calls)
        if len(_calls) > _next_join:
            _join_gone()
            _next_join = len(_calls) + _MOST_GONE
    return calls


def _join_gone() -> None:
    """Merges gone layers of one name, such as replicas after each call."""
    there = [calls for calls in _calls if calls.layer() is not None]
    gone: dict[tuple[str, str], _Calls] = {}
    for calls in _calls:
        if calls.layer() is None:
            joined = gone.setdefault(
                (calls.model, calls.name), _Calls(calls.name, None, calls.model)
            )
            for operation, reasons in calls.by_reason.items():
                joined.by_reason[operation] += reasons
    _calls[:] = [*gone.values(), *there]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_traced(layer: str, operation: str, reason: str) -> None:
    with _lock:
        _traced.setdefault(layer, _Calls(layer)).by_reason[operation][reason] += 1


def name_layers(
    model: torch.nn.Module, choice: Choice, asking: Iterable[str], without_choice: Iterable[str]
) -> None:
    """Names the layers of a model at these paths, which ask for an implementation."""
    kind = type(model).__name__
    modules = dict(model.named_modules())
    alone = _Alone(weakref.ref(model), choice)
    with _lock:
        for path in asking:
            calls = _calls_of(modules[path])
            calls.model, calls.name = kind, path or type(modules[path]).__name__
            calls.by_reason[choice.operation]  # creates an entry without calls
        _without_choice.update({modules[path]: alone for path in without_choice})
    for layer in sorted({type(modules[path]).__name__ for path in without_choice}):
        _warn_of_stock(choice.operation, f"{layer} asks for no implementation")


def _warn_of_stock(operation: str, reason: str) -> None:
    _warn_once.warn_once(_LOGGER, f"{operation} by transformers' own implementation: {reason}")


def report() -> Report:
    """Reports what ran the layers of transformers' models since the start or the last
    `reset_report`.

    Every layer of a model that takes FlashMoE has its number of calls by FlashMoE and, per reason,
    by transformers' own implementation. Traces by torch.compile and torch.export are counted; calls
    from a compiled graph or a CUDA graph are not.
    """
    with _lock:
        return _report()


def reset_report() -> Report:
    """Resets all counts and returns the old ones. No call is lost in between."""
    with _lock:
        made = _report()
        _calls[:] = [calls for calls in _calls if calls.layer() is not None]
        for calls in _calls:
            for reasons in calls.by_reason.values():
                reasons.clear()
        _traced.clear()
        return made


def _report() -> Report:
    layers = [layer for calls in _calls for layer in calls.layers()]
    compiled = [layer for calls in _traced.values() for layer in calls.layers()]
    alone = {
        f"{type(model).__name__}: {type(layer).__name__}"
        for layer, (found, choice) in _without_choice.items()
        if (model := found()) is not None and choice.is_ours(model.config)
    }
    return Report(tuple(layers), tuple(compiled), tuple(sorted(alone)))
