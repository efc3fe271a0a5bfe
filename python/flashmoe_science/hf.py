"""FlashMoE as the attention and the experts of Hugging Face transformers, version 5 or newer.

    from flashmoe_science import hf

    hf.register()
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="fmoe", experts_implementation="fmoe"
    )

The model's code and weights stay as they are; weights are read where they lie. A call that our
operations do not cover goes to transformers' own implementation, and a warning says which and why,
once for each reason.

Covered by attention: no padding, causal or not, queries that end where the keys end (a prompt,
and what follows it through a growing cache), grouped heads, sliding windows no longer than the
keys, softcap, inference. Covered by experts: gated and plain ones in every layout transformers
knows, with biases, SiLU, GELU, ReLU and squared ReLU, gpt-oss's clamped gate, expert parallelism,
inference.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.activations import ACT2CLS
from transformers.integrations import moe as hf_moe
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import flashmoe_science
from flashmoe_science._say import say_once
from flashmoe_science.errors import InvalidArgumentError, UnsupportedError, _without_addresses
from flashmoe_science.torch import operators

NAME = "fmoe"
_DTYPES = {
    "cpu": (torch.float32, torch.float16, torch.bfloat16),
    "cuda": (torch.float16, torch.bfloat16),
}
_MOST_EXPERTS, _MOST_TOP_K = 1024, 32
_EXTENT_MULTIPLE = 8  # of head dimensions, hidden and inner sizes

# A model is right: where its tensors are refused (rows begin at odd addresses, say), it is a limit
# of ours.
_REFUSALS = (InvalidArgumentError, UnsupportedError)


def register(name: str = NAME) -> str:
    """Makes FlashMoE an attention and an experts implementation of transformers, of that name.

    The name must not contain "flash": transformers takes all such names of attention for packages
    of its own. Registering twice changes nothing.

    Returns:
        The name.

    Raises:
        InvalidArgumentError: The name contains "flash".
    """
    if "flash" in name:
        raise InvalidArgumentError(
            f'name: got {name}, accepted is one without "flash", which transformers takes for its '
            "own attention packages"
        )
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, attention_mask)
    hf_moe.ExpertsInterface.register(name, experts)
    return name


def _say(operation: str, reason: str) -> None:
    say_once(__name__, f"{operation} by transformers' own implementation: {reason}")


def _not_ours(tensors: tuple[torch.Tensor, ...]) -> str:
    """Why no operation of ours takes these, "" when it does."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "a gradient is asked for, and there is no backward pass yet"
    first = tensors[0]
    kind = first.device.type
    if kind not in _DTYPES or (kind == "cuda" and operators.cuda_devices() == 0):
        return f"tensors are on {first.device}"
    if any(t.dtype not in _DTYPES[kind] or t.dtype != first.dtype for t in tensors):
        found = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
        return f"tensors are of {found} on {kind}"
    return ""


# ---- attention -------------------------------------------------------------------------------

# Options of attention functions that change what is computed, and that ours does not have.
_FOREIGN_OPTIONS = ("s_aux", "position_bias", "cache", "block_mask")
_MOST_DIM = 256


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention function: query [batch, heads, seq, dim], key and value likewise with
    the key heads, to [batch, seq, heads, dim]."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    masked = bool(causal) and query.shape[2] > 1
    reason = _not_ours((query, key, value)) or _attention_refusal(
        query, key, value, attention_mask, dropout, options
    )
    if not reason:
        window = options.get("sliding_window") if causal else None
        if window is not None and window >= key.shape[2]:
            window = None
        call: dict[str, Any] = {
            "causal": "bottom_right" if masked else False,
            "window": None if window is None else (window - 1, None),
            "scale": scaling,
            "softcap": options.get("softcap"),
        }
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if torch.compiler.is_compiling():
            return operators.flash_attention(q, k, v, **call), None
        out = query.new_empty((*q.shape[:3], v.shape[3]))
        try:
            flashmoe_science.flash_attention(q, k, v, **call, out=out)
            return out, None
        except _REFUSALS as error:
            reason = _without_addresses(error)
    _say("attention", reason)
    answer: tuple[torch.Tensor, torch.Tensor | None] = _stock_attention(module, options)(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
        is_causal=is_causal, **options,
    )  # fmt: skip
    return answer


def _attention_refusal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> str:
    """What of the call our attention does not have, "" when it has all."""
    if attention_mask is not None:
        return "there is padding, or a mask of another kind than causal"
    if dropout != 0.0:
        return "there is dropout"
    dims = (query.shape[3], value.shape[3])
    if any(d % _EXTENT_MULTIPLE != 0 or d > _MOST_DIM for d in dims):
        return f"head dimensions are {dims[0]} and {dims[1]}"
    for name in _FOREIGN_OPTIONS:
        if options.get(name) is not None:
            return f"the model passes {name}"
    if key.shape[2] < query.shape[2]:
        return "there are fewer keys than queries"
    return ""


def _stock_attention(module: torch.nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    """transformers' SDPA; for what it does not have the model's own eager function."""
    beyond_sdpa = ("softcap", "s_aux", "block_mask")
    if all(options.get(name) is None for name in beyond_sdpa):
        return sdpa_attention_forward
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return sdpa_attention_forward if eager is None else functools.partial(_eager, eager)


def _eager(
    function: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A model's eager function, which knows masks that are added and no others."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal and query.shape[2] > 1:
        rows, keys = query.shape[2], key.shape[2]
        ones = torch.ones(rows, keys, dtype=torch.bool, device=query.device)
        attention_mask = ones.tril(keys - rows)[None, None]
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        least = torch.finfo(query.dtype).min
        zeros = torch.zeros((), dtype=query.dtype, device=query.device)
        attention_mask = torch.where(attention_mask, zeros, least)
    answer: tuple[torch.Tensor, torch.Tensor | None] = function(
        module, query, key, value, attention_mask, **options
    )
    return answer


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> torch.Tensor | None:
    """transformers' mask function: None where `attention` masks by itself, else SDPA's mask.

    `attention` takes a missing mask to be causal from the last query and key backwards, if it is
    causal; so there is none only where nothing is padded, and the queries end where the keys do.
    """
    plain = allow_is_causal_skip or allow_is_bidirectional_skip
    within = local_size is None or kv_length < local_size
    # What a padding mask holds a graph cannot know.
    if plain and within and not (torch.compiler.is_compiling() and attention_mask is not None):
        ends_together = (
            not isinstance(q_offset, torch.Tensor) and q_offset + q_length == kv_offset + kv_length
        )
        padded = attention_mask is not None and (
            attention_mask.shape[-1] != kv_offset + kv_length or not bool(attention_mask.all())
        )
        if (ends_together or not allow_is_causal_skip) and not padded:
            return None
    mask: torch.Tensor | None = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **options,
    )
    return mask


# ---- experts ---------------------------------------------------------------------------------

# transformers' activations and torch's by our names; exactly those whose formula is ours.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


@functools.cache
def _activation_classes() -> dict[type, str]:
    classes: dict[type, str] = {torch.nn.SiLU: "silu", torch.nn.ReLU: "relu"}
    for name, ours in _ACTIVATIONS.items():
        entry: Any = ACT2CLS[name]
        kind = entry[0] if isinstance(entry, tuple) else entry
        classes.setdefault(kind, ours)
    return classes


def _activation(function: Any) -> str | None:
    """Our name of a module's activation, None where it is none of ours."""
    if isinstance(function, torch.nn.GELU):
        return "gelu" if function.approximate == "none" else "gelu_tanh"
    return _activation_classes().get(type(function))


def _gate_options(module: Any) -> dict[str, Any] | str:
    """What moe_forward is told of a module's activation and gate; or why it cannot be."""
    if not module.has_gate:
        activation = _activation(module.act_fn)
        if activation is None:
            return f"the activation is {type(module.act_fn).__name__}"
        return {"gate": "none", "activation": activation}
    layout = "gate_up" if module.is_concatenated else "interleaved"
    gate = type(module)._apply_gate
    if gate is hf_moe._default_apply_gate and module.is_concatenated:
        activation = _activation(module.act_fn)
        if activation is None:
            return f"the activation is {type(module.act_fn).__name__}"
        return {"gate": layout, "activation": activation}
    if type(module).__name__ == "GptOssExperts" and not module.is_concatenated:
        clamped = {"alpha": module.alpha, "limit": module.limit, "up_offset": 1.0}
        return {"gate": layout, "activation": "silu"} | clamped
    return f"{type(module).__name__} has a gate of its own"


def _sizes(module: Any) -> tuple[int, int]:
    """The hidden size, and that of an expert."""
    rows, columns = module.down_proj.shape[1:]
    return (columns, rows) if module.is_transposed else (rows, columns)


def experts(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """transformers' experts function: hidden_states [T, H], the experts of each token [T, K] and
    their weights, to [T, H]. Ids beyond the module's experts are another device's, and add 0."""
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    w_up, w_down = (getattr(module, name) for name in names)
    options = _gate_options(module)
    reason = _not_ours((hidden_states, w_up, w_down))
    if not reason and top_k_weights.requires_grad and torch.is_grad_enabled():
        reason = "a gradient is asked for, and there is no backward pass yet"
    if isinstance(options, str):
        reason = reason or options
    elif getattr(module, "has_post_expert_norm", False):
        reason = reason or "there is a norm behind each expert"
    elif module.num_experts > _MOST_EXPERTS or top_k_index.shape[-1] > _MOST_TOP_K:
        reason = reason or f"there are {module.num_experts} experts, {top_k_index.shape[-1]} each"
    elif any(size % _EXTENT_MULTIPLE != 0 for size in _sizes(module)):
        hidden, inner = _sizes(module)
        reason = reason or f"the hidden size is {hidden}, that of an expert {inner}"
    if not reason:
        assert isinstance(options, dict)
        if module.is_transposed:
            w_up, w_down = w_up.transpose(1, 2), w_down.transpose(1, 2)
        if module.has_bias:
            biases = (getattr(module, f"{name}_bias") for name in names)
            options |= dict(zip(("b_gate_up", "b_down"), biases, strict=True))
        if torch.compiler.is_compiling():
            routing = operators.moe_route_given(
                top_k_index, top_k_weights, num_experts=module.num_experts
            )
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
            return ours
        except _REFUSALS as error:
            reason = _without_addresses(error)
    _say("experts", reason)
    out: torch.Tensor = hf_moe.grouped_mm_experts_forward(
        module, hidden_states, top_k_index, top_k_weights
    )
    return out
