"""FlashMoE as the attention and the experts of Hugging Face transformers, version 5 or newer.

    from flashmoe_science import hf

    hf.register()
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="flashmoe", experts_implementation="flashmoe"
    )

The model's code and weights stay as they are; weights are read in place. A model that would never
call our operations is refused when it is made. A call that they do not cover goes to transformers'
own implementation, and a warning says which and why, once per reason; `register(strict=True)` makes
it an error. `report()` counts the calls of both, layer by layer.

Attention covers causal and other calls, queries that end where the keys end (a prompt, and its
continuation through a growing, sliding or static cache), cross attention, grouped heads, sliding
windows, softcap, sinks, padding, packed rows, other masks, position biases, continuous batching,
and gradients of everything except masks and biases. Experts cover gated and plain ones in every
layout of transformers, with biases, SiLU, GELU, ReLU and squared ReLU, gpt-oss's clamped gate,
expert parallelism, and inference.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from flashmoe_science.hf import _experts, _models, _report, _serving
from flashmoe_science.hf._attention import attention
from flashmoe_science.hf._experts import experts, set_gradients
from flashmoe_science.hf._masks import attention_mask
from flashmoe_science.hf._models import (
    ATTENTION,
    EXPERTS,
    KEPT_NAME,
    KEPT_PAGED_NAME,
    NAME,
    Choice,
)
from flashmoe_science.hf._report import Layer, Report, report, reset_report

__all__ = [
    "Layer",
    "Report",
    "attention",
    "attention_mask",
    "experts",
    "register",
    "report",
    "reset_report",
]


def register(
    *, strict: bool = False, max_workspace_bytes: int | None = None, recompute: bool = False
) -> str:
    """Registers FlashMoE as the attention and experts implementation "flashmoe" of transformers.

    A model's configuration keeps the attention as "fmoe", which is also accepted. Registering again
    changes only the options.

    Args:
        strict: Raise an UnsupportedError that says why for a call that our operations do not cover,
            in all threads of this process. Otherwise the call goes to transformers' own
            implementation.
        max_workspace_bytes, recompute: Options of the gradients of each layer's experts, as in
            moe_forward.

    Returns:
        "flashmoe".
    """
    set_gradients(max_workspace_bytes, recompute)  # first, as it may refuse
    _experts.register((NAME, KEPT_NAME))
    for name in (KEPT_NAME, KEPT_PAGED_NAME):
        AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(KEPT_NAME, attention_mask)
    for method, with_checks in _WITH_CHECKS.items():
        theirs = getattr(PreTrainedModel, method)
        if not hasattr(theirs, "_flashmoe"):
            ours = functools.wraps(theirs)(with_checks(theirs))
            ours._flashmoe = True  # type: ignore[attr-defined]
            setattr(PreTrainedModel, method, ours)
    _report.set_strict(strict)
    return NAME


def _checking_names(theirs: Callable[..., str]) -> Callable[..., str]:
    """A method with which models check an attention's name, extended to know ours."""

    signature = inspect.signature(theirs)
    parameter = _first_parameter(signature)

    def check(self: PreTrainedModel, *arguments: Any, **options: Any) -> str:
        bound = signature.bind(self, *arguments, **options)
        name = bound.arguments.get(parameter)
        _keep_our_name(self.config)
        _models.refuse_built_by_table(self, name)
        bound.arguments[parameter] = _models.KEPT.get(name, name)
        return theirs(*bound.args, **bound.kwargs)

    return check


def _first_parameter(method: inspect.Signature) -> str:
    """The name of the first parameter after self: a caller may pass it by position or by name."""
    return list(method.parameters)[1]


def _keep_our_name(config: Any) -> None:
    """Keeps our name in a model's configuration and in nested ones, whose models may not check
    theirs."""
    if config._attn_implementation_internal == NAME:
        config._attn_implementation_internal = KEPT_NAME
    for name in config.sub_configs:
        if isinstance(within := getattr(config, name, None), PreTrainedConfig):
            _keep_our_name(within)


def _checking_layers(theirs: Callable[..., None]) -> Callable[..., None]:
    """The method that completes a model, extended: the model then has its layers."""

    def post_init(self: PreTrainedModel) -> None:
        theirs(self)
        for choice in (ATTENTION, EXPERTS):
            if choice.is_ours(self.config):
                _models.refuse_model(self, choice, whole=_models.maker_of(self))
                _name_layers(self, choice)

    return post_init


def _setting(choice: Choice) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A method that changes the implementation of a model and its submodels, extended."""

    def checking(theirs: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(theirs)
        parameter = _first_parameter(signature)

        def change(self: PreTrainedModel, *arguments: Any, **options: Any) -> None:
            given = signature.bind(self, *arguments, **options).arguments.get(parameter)
            takers = list(_models.chosen(self, given))
            for model, whole in takers:
                _models.refuse_model(model, choice, whole=whole)
            theirs(self, *arguments, **options)
            for model, _ in reversed(takers):
                _name_layers(model, choice)

        return change

    return checking


def _name_layers(model: PreTrainedModel, choice: Choice) -> None:
    alone = _models.computing_alone(model, choice)
    _serving.take_part()
    _report.name_layers(model, choice, _models.asking(model, choice), alone)


# By the names of PreTrainedModel's methods.
_WITH_CHECKS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "_check_and_adjust_attn_implementation": _checking_names,
    "get_correct_attn_implementation": _checking_names,
    "post_init": _checking_layers,
    "set_attn_implementation": _setting(ATTENTION),
    "set_experts_implementation": _setting(EXPERTS),
}
