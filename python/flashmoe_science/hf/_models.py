"""Finds models that ask for an implementation, and refuses those that do not.

transformers offers attention and experts by name to every model. A layer that takes part looks the
name up in an AttentionInterface or an ExpertsInterface when called; others compute by themselves
and would never use ours. There is no list of either, so the code of a layer's class is searched for
an interface that it refers to.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from flashmoe_science.errors import InvalidArgumentError

NAME = "flashmoe"
# transformers treats an attention whose name contains "flash" as one of its flash attention
# packages, which it imports and gives packed sequences. So configurations use this name.
KEPT_NAME = "fmoe"
# Older transformers put this word before the attention's name for continuous batching.
PAGED_NAME = f"paged|{NAME}"
KEPT_PAGED_NAME = f"paged|{KEPT_NAME}"
KEPT: dict[str | None, str] = {NAME: KEPT_NAME, PAGED_NAME: KEPT_PAGED_NAME}
NAMES = (NAME, KEPT_NAME, PAGED_NAME, KEPT_PAGED_NAME)


@dataclass(frozen=True)
class Choice:
    """One of transformers' two choices.

    Attributes:
        operation: The operation to choose for.
        argument: Its argument name when models are made; configurations prefix an underscore.
        interface: The class of the tables that layers look it up in.
        suffix: The suffix of the names of classes that compute it.
    """

    operation: str
    argument: str
    interface: type
    suffix: str

    def is_ours(self, config: Any) -> bool:
        """Whether a configuration chose ours."""
        return getattr(config, f"_{self.argument}", None) in NAMES


ATTENTION = Choice("attention", "attn_implementation", AttentionInterface, "Attention")
EXPERTS = Choice("experts", "experts_implementation", ExpertsInterface, "Experts")


# ---- what the code of a class refers to -------------------------------------------------------


def _code(code: CodeType) -> Iterator[CodeType]:
    """The code object, and those of the functions and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)


def _functions(kind: type) -> Iterator[FunctionType]:
    """The methods of a model's or a layer's class, and the functions that decorators wrapped."""
    for base in kind.__mro__:
        if issubclass(PreTrainedModel, base):  # what all models inherit
            continue
        for attribute in vars(base).values():
            while isinstance(attribute, FunctionType):
                yield attribute
                attribute = getattr(attribute, "__wrapped__", None)


@functools.cache
def _referred(kind: type) -> dict[str, Any]:
    """By name, the globals and closed-over values that the methods of a class refer to."""
    found: dict[str, Any] = {}
    for function in _functions(kind):
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            with contextlib.suppress(ValueError):  # it is empty
                found[name] = cell.cell_contents
        for code in _code(function.__code__):
            for name in code.co_names:
                if name in function.__globals__:
                    found[name] = function.__globals__[name]
    return found


def _asks(kind: type, choice: Choice) -> bool:
    """Whether layers of this class look the choice up."""
    if issubclass(PreTrainedModel, kind):
        return False
    return any(isinstance(value, choice.interface) for value in _referred(kind).values())


@functools.cache
def _table(model: type[Any]) -> tuple[str, tuple[str, ...]] | None:
    """The table of attention classes that a model is built from, and its names. Such models choose
    a class while they are made, and fail with any other name.
    """
    seen: set[type] = set()
    left: list[type] = [model]
    while left:
        kind = left.pop()
        seen.add(kind)
        for name, value in _referred(kind).items():
            if (
                isinstance(value, dict)
                and "eager" in value
                and all(map(inspect.isclass, value.values()))
            ):
                return name, tuple(value)
            is_layer = inspect.isclass(value) and issubclass(value, torch.nn.Module)
            # Nested models are examined when they are made.
            if is_layer and not issubclass(value, PreTrainedModel) and value not in seen:
                left.append(value)
    return None


# ---- the layers of a model --------------------------------------------------------------------


def asking(model: torch.nn.Module, choice: Choice) -> list[str]:
    """The paths of a model's layers that look the choice up."""
    return [path for path, layer in model.named_modules() if _asks(type(layer), choice)]


def computing_alone(model: torch.nn.Module, choice: Choice) -> list[str]:
    """The paths of its layers that are named like such a layer but do not look it up.

    Excludes layers within or around a layer that does, and those around another of them.
    """
    asks = asking(model, choice)
    named = [
        path
        for path, layer in model.named_modules()
        if type(layer).__name__.endswith(choice.suffix)
    ]
    return [
        path
        for path in named
        if not any(_within(path, other) or _within(other, path) for other in asks)
        if not any(_within(other, path) for other in named if other != path)
    ]


def _within(path: str, around: str) -> bool:
    return path == around or not around or path.startswith(f"{around}.")


# ---- refusals ---------------------------------------------------------------------------------


def refuse_built_by_table(model: PreTrainedModel, given: str | None) -> None:
    """Refuses ours for a model that a table of attention classes would build.

    Raises:
        InvalidArgumentError: It is.
    """
    kind = type(model).__name__
    if given in NAMES and (table := _table(cast("type", type(model)))):
        name, accepted = table
        raise InvalidArgumentError(
            f'attn_implementation: got "{NAME}" for {kind}, which builds its attention from '
            f"{name} and asks for no implementation; accepted are {_quoted(accepted)}"
        )


def refuse_model(
    model: PreTrainedModel, choice: Choice, *, whole: PreTrainedModel | None = None
) -> None:
    """Refuses a model that would never call ours.

    Args:
        model: A complete model.
        choice: The choice that is ours in it.
        whole: The model that contains it, which may lack such layers.

    Raises:
        InvalidArgumentError: None of its layers looks the choice up.
    """
    if asking(model, choice):
        return
    layers = dict(model.named_modules())
    alone = sorted({type(layers[path]).__name__ for path in computing_alone(model, choice)})
    if whole is not None and not alone:
        return
    kind = type(model).__name__
    why = f"whose {', '.join(alone)} asks for no" if alone else "no layer of which asks for an"
    hint = ""
    if whole is not None:
        kind = f"{kind} in {type(whole).__name__}"
        if whole.config is not model.config:
            hint = f'; other parts are chosen by a dict, as {{"text_config": "{NAME}"}}'
    raise InvalidArgumentError(
        f'{choice.argument}: got "{NAME}" for {kind}, {why} implementation of '
        f"{choice.operation}; accepted are {_quoted(_accepted(model, choice))}{hint}"
    )


def _accepted(model: PreTrainedModel, choice: Choice) -> list[str]:
    """The implementations of transformers' own that a model takes."""
    if choice is EXPERTS:
        return ["eager"]
    names = {
        "eager": True,
        "sdpa": model._supports_sdpa,
        "flash_attention_2": model._supports_flash_attn,
        "flex_attention": model._supports_flex_attn,
    }
    return [name for name, taken in names.items() if taken]


def _quoted(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def maker_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """The outermost model under construction that makes this model."""
    found = None
    frame = sys._getframe(1)
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code.co_name == "__init__":
            maker = frame.f_locals.get("self")
            if isinstance(maker, PreTrainedModel) and maker is not model:
                found = maker
    return found


def chosen(
    model: PreTrainedModel, given: str | dict[str, Any] | None
) -> Iterator[tuple[PreTrainedModel, PreTrainedModel | None]]:
    """The model and nested models that chose ours, by name or part by part.

    Yields:
        A model, and the enclosing model with which it was chosen.
    """
    by_config: dict[int, Any] = {}

    def choose(config: Any, value: Any) -> None:
        own = value.get("") if isinstance(value, dict) else value
        by_config[id(config)] = own
        for name in config.sub_configs:
            within = getattr(config, name, None)
            if isinstance(within, PreTrainedConfig):
                choose(within, value.get(name) if isinstance(value, dict) else value)

    choose(model.config, given)
    default = given if isinstance(given, str) else None
    named: set[int] = set()
    for within in model.modules():
        if not isinstance(within, PreTrainedModel):
            continue
        if by_config.get(id(within.config), default) in NAMES:
            by_name = isinstance(given, str)
            yield within, model if (named if by_name else id(within.config) in named) else None
            named.add(id(within.config))
