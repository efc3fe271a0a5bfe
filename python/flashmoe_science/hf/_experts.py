"""transformers' experts function, computed by ours; transformers' own serves what ours does not
cover."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers.activations import ACT2CLS
from transformers.integrations import moe as hf_moe

import flashmoe_science
from flashmoe_science._dtypes import parse_extent, parse_flag
from flashmoe_science.errors import _without_addresses
from flashmoe_science.hf import _report
from flashmoe_science.hf._limits import EXTENT_MULTIPLE, REFUSALS, not_ours
from flashmoe_science.torch import operators

_MOST_EXPERTS, _MOST_TOP_K = 1024, 32

_max_workspace_bytes: int | None = None
_recompute = False


def set_gradients(max_workspace_bytes: int | None, recompute: bool) -> None:
    """Sets the gradient options of all later calls."""
    global _max_workspace_bytes, _recompute
    if max_workspace_bytes is not None:
        accepted = "1 to 2**63 - 1, or None, for no bound"
        max_workspace_bytes = parse_extent(
            "max_workspace_bytes", max_workspace_bytes, 2**63, accepted, first=1
        )
    recompute = parse_flag("recompute", recompute)
    _max_workspace_bytes, _recompute = max_workspace_bytes, recompute


# transformers' and torch's activations by our names: exactly those with our formulas.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def _fp8_module() -> Any:
    try:
        found = importlib.import_module("transformers.integrations.finegrained_fp8")
    except ImportError:
        return None
    return found if hasattr(found, "FP8ExpertsInterface") else None


_FP8 = _fp8_module()


def _activation_classes() -> dict[type, str]:
    classes: dict[type, str] = {torch.nn.SiLU: "silu", torch.nn.ReLU: "relu"}
    for name, ours in _ACTIVATIONS.items():
        entry: Any = ACT2CLS[name]
        kind = entry[0] if isinstance(entry, tuple) else entry
        classes.setdefault(kind, ours)
    return classes


_ACTIVATION_CLASSES = _activation_classes()
# Some models have a function of torch instead of a module.
_ACTIVATION_FUNCTIONS = (
    (torch.nn.functional.silu, "silu"),
    (torch.nn.functional.gelu, "gelu"),
    (torch.nn.functional.relu, "relu"),
)
# What transformers' grouped_mm takes.
_GROUPED = (torch.float32, torch.float16, torch.bfloat16)


def _activation(function: Any) -> str | None:
    """Our name for a module's activation, None if we lack it."""
    if isinstance(function, torch.nn.GELU):
        return "gelu" if function.approximate == "none" else "gelu_tanh"
    for known, ours in _ACTIVATION_FUNCTIONS:
        if known is function:
            return ours
    return _ACTIVATION_CLASSES.get(type(function))


def _unknown_activation(function: Any) -> str:
    name = getattr(function, "__name__", None) or type(function).__name__
    return f"the activation is {name}"


def _gate_options(module: Any) -> dict[str, Any] | str:
    """The arguments of moe_forward for a module's activation and gate, or why there are none."""
    if not module.has_gate:
        activation = _activation(module.act_fn)
        if activation is None:
            return _unknown_activation(module.act_fn)
        return {"gate": "none", "activation": activation}
    layout = "gate_up" if module.is_concatenated else "interleaved"
    gate = type(module)._apply_gate
    if gate is hf_moe._default_apply_gate and module.is_concatenated:
        activation = _activation(module.act_fn)
        if activation is None:
            return _unknown_activation(module.act_fn)
        return {"gate": layout, "activation": activation}
    if type(module).__name__ == "GptOssExperts" and not module.is_concatenated:
        clamped = {"alpha": module.alpha, "limit": module.limit, "up_offset": 1.0}
        return {"gate": layout, "activation": "silu"} | clamped
    return f"{type(module).__name__} has a gate of its own"


def _sizes(module: Any) -> tuple[int, int]:
    """The hidden size, and the inner size of an expert."""
    rows, columns = module.down_proj.shape[1:]
    return (columns, rows) if module.is_transposed else (rows, columns)


def experts(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """transformers' experts function: hidden_states [T, H], the experts of each token [T, K] and
    their weights, to [T, H]. Ids beyond the module's experts belong to another device and add 0."""
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    w_up, w_down = (getattr(module, name) for name in names)
    options = _gate_options(module)
    tensors = (hidden_states, w_up, w_down)
    reason = not_ours(tensors)
    if isinstance(options, str):
        reason = reason or options
    elif getattr(module, "has_post_expert_norm", False):
        reason = reason or "there is a norm behind each expert"
    elif module.num_experts > _MOST_EXPERTS or top_k_index.shape[-1] > _MOST_TOP_K:
        reason = reason or f"there are {module.num_experts} experts, {top_k_index.shape[-1]} each"
    elif any(size % EXTENT_MULTIPLE != 0 for size in _sizes(module)):
        hidden, inner = _sizes(module)
        reason = reason or f"the hidden size is {hidden}, that of an expert {inner}"
    if not reason:
        assert isinstance(options, dict)
        options |= {"max_workspace_bytes": _max_workspace_bytes, "recompute": _recompute}
        if module.is_transposed:
            w_up, w_down = w_up.transpose(1, 2), w_down.transpose(1, 2)
        if module.has_bias:
            biases = (getattr(module, f"{name}_bias") for name in names)
            options |= dict(zip(("b_gate_up", "b_down"), biases, strict=True))
        if torch.compiler.is_compiling():
            routing = operators.moe_route_given(
                top_k_index, top_k_weights, num_experts=module.num_experts
            )
            _report.note_ours(module, "experts")
            made: torch.Tensor = operators.moe_forward(
                hidden_states, w_up, w_down, routing, **options
            )
            return made
        try:
            routing = flashmoe_science.moe_route_given(
                top_k_index, top_k_weights, num_experts=module.num_experts
            )
            ours: torch.Tensor = flashmoe_science.moe_forward(
                hidden_states, w_up, w_down, routing, **options
            )
            _report.note_ours(module, "experts")
            return ours
        except REFUSALS as error:
            reason = _without_addresses(error)
    _report.note_stock(module, "experts", reason)
    theirs = _stock(module, w_down.dtype)
    out: torch.Tensor = theirs(module, hidden_states, top_k_index, top_k_weights)
    return out


def _stock(module: Any, dtype: torch.dtype) -> Callable[..., Any]:
    """transformers' own function for a module's experts."""
    if dtype in _GROUPED:
        return hf_moe.grouped_mm_experts_forward
    # The model's own code goes expert by expert, which a graph cannot hold; batched_mm copies an
    # expert's weights for each token.
    dispatching = type(module).forward
    own: Callable[..., Any] = inspect.unwrap(dispatching)
    if own is dispatching or torch.compiler.is_compiling():
        return hf_moe.batched_mm_experts_forward
    return own


def register(names: Iterable[str]) -> None:
    """Registers our experts under these names, and transformers' own for weights in FP8, which have
    an interface of their own in newer versions."""
    for name in names:
        hf_moe.ExpertsInterface.register(name, experts)
        if _FP8 is not None:
            _FP8.FP8ExpertsInterface.register(name, _fp8_experts)


def _fp8_experts(module: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """transformers' experts function for weights in FP8, which ours does not take."""
    _report.note_stock(module, "experts", "weights are FP8")
    own: Callable[..., Any] = inspect.unwrap(type(module).forward)
    # grouped_mm refuses activations that are scaled by stored numbers.
    static = module.activation_scheme == "static"
    theirs: Any = own if static else _FP8.fp8_grouped_mm_experts_forward
    out: torch.Tensor = theirs(module, *inputs)
    return out
