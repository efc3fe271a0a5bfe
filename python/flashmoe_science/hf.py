"""FlashMoE as the attention and the experts of Hugging Face transformers, version 5 or newer.

    from flashmoe_science import hf

    hf.register()
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="flashmoe", experts_implementation="flashmoe"
    )

The model's code and weights stay as they are; weights are read where they lie. A call that our
operations do not cover goes to transformers' own implementation, and a warning says which and why,
once for each reason.

Covered by attention: no padding, causal or not, queries that end where the keys end (a prompt,
and what follows it through a growing or sliding cache; a prompt into a static one), cross
attention, grouped heads, sliding windows, softcap, inference. Covered by experts: gated and plain
ones in every layout transformers knows, with biases, SiLU, GELU, ReLU and squared ReLU, gpt-oss's
clamped gate, expert parallelism, inference.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2CLS
from transformers.integrations import moe as hf_moe
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

import flashmoe_science
from flashmoe_science._say import say_once
from flashmoe_science.errors import InvalidArgumentError, UnsupportedError, _without_addresses
from flashmoe_science.torch import operators

NAME = "flashmoe"
# transformers takes an attention whose name contains "flash" for one of its flash attention
# packages, which it then imports and gives packed sequences; this is the name in configurations.
_KEPT_NAME = "fmoe"
_DTYPES = {
    "cpu": (torch.float32, torch.float16, torch.bfloat16),
    "cuda": (torch.float16, torch.bfloat16),
}
_MOST_EXPERTS, _MOST_TOP_K = 1024, 32
_EXTENT_MULTIPLE = 8  # of head dimensions, hidden and inner sizes

# A model is right: where its tensors are refused (rows begin at odd addresses, say), it is a limit
# of ours.
_REFUSALS = (InvalidArgumentError, UnsupportedError)


def register() -> str:
    """Makes FlashMoE the attention and the experts implementation "flashmoe" of transformers.

    A model's configuration keeps the attention as "fmoe", a name that is accepted, too. Registering
    twice changes nothing.

    Returns:
        "flashmoe".
    """
    for name in (NAME, _KEPT_NAME):
        hf_moe.ExpertsInterface.register(name, experts)
    AttentionInterface.register(_KEPT_NAME, attention)
    AttentionMaskInterface.register(_KEPT_NAME, attention_mask)
    for method in ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation"):
        checked = getattr(PreTrainedModel, method)
        if not hasattr(checked, "_flashmoe"):
            setattr(PreTrainedModel, method, _with_our_name(checked))
    return NAME


def _with_our_name(checked: Callable[..., str]) -> Callable[..., str]:
    """A method by which models check the name of an attention, and that knows ours."""

    @functools.wraps(checked)
    def check(self: Any, name: str | None, *arguments: Any, **options: Any) -> str:
        _keep_our_name(self.config)
        return checked(self, _KEPT_NAME if name == NAME else name, *arguments, **options)

    check._flashmoe = True  # type: ignore[attr-defined]
    return check


def _keep_our_name(config: Any) -> None:
    """In a model's configuration and in those within it, whose models may not check theirs."""
    if config._attn_implementation_internal == NAME:
        config._attn_implementation_internal = _KEPT_NAME
    for name in config.sub_configs:
        if isinstance(within := getattr(config, name, None), PreTrainedConfig):
            _keep_our_name(within)


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
_FOREIGN_OPTIONS = (
    "s_aux",
    "sinks",
    "position_bias",
    "cache",
    "block_mask",
    "indices",
    "block_indices",
)
# Those that torch's SDPA does not have either.
_BEYOND_SDPA = ("softcap", "s_aux", "sinks", "block_mask", "indices", "block_indices")
_MOST_DIM = 256
# An attribute of a mask that hides, of what `attention` sees without one, the keys from this number
# on: those that a static cache has room for.
_FILLED = "_flashmoe_filled"


class _Visible(NamedTuple):
    """The keys that queries see where transformers passes no mask; as flash_attention has it."""

    causal: bool
    window: tuple[int, int | None] | None

    @property
    def whole(self) -> bool:
        return not self.causal and self.window is None


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
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    filled = None if torch.compiler.is_compiling() else getattr(attention_mask, _FILLED, None)
    k, v = (key, value) if filled is None else (x[:, :, :filled] for x in (key, value))
    visible = _visible(module, query, k, causal, options)
    reason = _not_ours((query, k, v)) or _attention_refusal(
        query, k, v, attention_mask if filled is None else None, visible, dropout, options
    )
    if not reason:
        call: dict[str, Any] = {
            "causal": "bottom_right" if visible.causal else False,
            "window": visible.window,
            "scale": scaling,
            "softcap": options.get("softcap"),
        }
        q, k, v = (x.transpose(1, 2) for x in (query, k, v))
        if torch.compiler.is_compiling():
            return operators.flash_attention(q, k, v, **call), None
        out = query.new_empty((*q.shape[:3], v.shape[3]))
        try:
            flashmoe_science.flash_attention(q, k, v, **call, out=out)
            return out, None
        except _REFUSALS as error:
            reason = _without_addresses(error)
    _say("attention", reason)
    options |= {"dropout": dropout, "scaling": scaling}
    eager = _eager_attention(module, options)
    # torch's SDPA knows a causal mask of as many keys as queries, a model's own function none.
    known = eager is None and visible.window is None and query.shape[2] >= key.shape[2]
    if attention_mask is None and not visible.whole and not known:
        attention_mask = _mask_of(visible, query, key)
    answer: tuple[torch.Tensor, torch.Tensor | None]
    if eager is None:
        answer = sdpa_attention_forward(
            module, query, key, value, attention_mask, is_causal=is_causal, **options
        )
    else:
        added = _added(attention_mask, query.dtype)
        answer = eager(module, query, key, value, added, **options)
    return answer


def _visible(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    options: dict[str, Any],
) -> _Visible:
    """What a call without a mask means."""
    size = options.get("sliding_window")
    if size is None:
        window = None
    elif causal:
        window = None if size >= key.shape[2] else (size - 1, None)
    else:
        # The size is that of a flash attention, which takes it for one key less on either side. A
        # few models pass their configuration's, by which transformers masks, as it is.
        configured = getattr(getattr(module, "config", None), "sliding_window", None)
        reach = size if size == configured else size - 1
        window = None if reach + 1 >= key.shape[2] else (reach, reach)
    return _Visible(causal and query.shape[2] > 1, window)


def _mask_of(visible: _Visible, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """SDPA's mask of these keys, [1, 1, queries, keys]."""
    rows, keys = query.shape[2], key.shape[2]
    at = torch.arange(rows, device=query.device)[:, None] + (keys - rows)
    keys_at = torch.arange(keys, device=query.device)[None, :]
    seen = keys_at <= at if visible.causal else torch.ones_like(keys_at <= at)
    if visible.window is not None:
        left, right = visible.window
        seen &= keys_at >= at - left
        if right is not None:
            seen &= keys_at <= at + right
    return seen[None, None]


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The mask in the form that models' own functions know: added to the logits."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def _attention_refusal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    visible: _Visible,
    dropout: float,
    options: dict[str, Any],
) -> str:
    """What of the call our attention does not have, "" when it has all."""
    if attention_mask is not None:
        return "there is padding, or a mask of another kind than causal or a sliding window"
    if options.get("output_attentions"):
        return "the weights of attention are asked for"
    if dropout != 0.0:
        return "there is dropout"
    dims = (query.shape[3], value.shape[3])
    if any(d % _EXTENT_MULTIPLE != 0 or d > _MOST_DIM for d in dims):
        return f"head dimensions are {dims[0]} and {dims[1]}"
    for name in _FOREIGN_OPTIONS:
        if options.get(name) is not None:
            return f"the model passes {name}"
    if visible.causal and key.shape[2] < query.shape[2]:
        return "there are fewer keys than queries"
    return ""


def _eager_attention(module: torch.nn.Module, options: dict[str, Any]) -> Callable[..., Any] | None:
    """The model's own function, where SDPA does not compute what is asked."""
    beyond = options.get("output_attentions") or any(
        options.get(name) is not None for name in _BEYOND_SDPA
    )
    if not beyond:
        return None
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,  # a tensor with a static cache
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **options: Any,
) -> torch.Tensor | None:
    """transformers' mask function: None where `attention` masks by itself, else SDPA's mask.

    Without a mask `attention` takes the keys to be causal, if it is causal, and within the layer's
    window, both from the last query and key backwards. So there is none only where that is so and
    nothing is padded.
    """
    known = local_size is None or kv_length < local_size or _is_window(local_size, config)
    filled: int | None = None
    if allow_is_causal_skip and known:
        filled = _filled(q_offset, q_length, kv_offset, kv_length)
    elif allow_is_bidirectional_skip and known:
        windowed = local_size is not None and kv_length >= local_size
        aligned = q_length == kv_length and mask_function is not bidirectional_mask_function
        if not windowed or aligned:
            filled = kv_length
    if filled is not None and _is_padded(attention_mask, kv_offset, filled):
        filled = None
    if filled == kv_length:  # and no cache has room for more
        return None
    mask: torch.Tensor | None = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        config=config,
        **options,
    )
    if filled is not None and mask is not None:
        mask = mask.contiguous()  # as generate() has it: another tensor would lack the attribute
        setattr(mask, _FILLED, filled)
    return mask


def _filled(q_offset: Any, q_length: int, kv_offset: int, kv_length: int) -> int | None:
    """How many of the keys there are up to the last query, where that can be known."""
    if torch.compiler.is_compiling():
        # A static cache counts in a tensor, and a graph knows no attributes of its tensors.
        together = (
            not isinstance(q_offset, torch.Tensor) and q_offset + q_length == kv_offset + kv_length
        )
        return kv_length if together else None
    filled = int(q_offset) + q_length - kv_offset
    return filled if q_length <= filled <= kv_length else None


def _is_window(local_size: int | None, config: Any) -> bool:
    """Whether a mask of this size is a sliding window, and no chunk, that `attention` is told."""
    return (
        local_size == getattr(config, "sliding_window", None)
        and local_size != getattr(config, "attention_chunk_size", None)
        and _passes_windows(type(config).__module__)
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _passes_windows(configuration: str) -> bool:
    """Whether the models of a configuration's module tell attention functions their windows.

    A few have them in masks alone. So it is looked up in the source, where transformers looks for
    what implementations its models take.
    """
    return _source_passes_windows(configuration)


@functools.cache
def _source_passes_windows(configuration: str) -> bool:
    package, _, name = configuration.rpartition(".")
    model = sys.modules.get(f"{package}.{name.replace('configuration_', 'modeling_', 1)}")
    if model is None:
        return False
    try:
        source = inspect.getsource(model)
    except (OSError, TypeError):
        return False
    return re.search(r"^ +sliding_window=", source, re.MULTILINE) is not None


def _is_padded(mask: torch.Tensor | None, kv_offset: int, kv_length: int) -> bool:
    """Whether a padding mask hides any of these keys; what it holds a graph cannot know."""
    if mask is None:
        return False
    end = kv_offset + kv_length
    if torch.compiler.is_compiling() or mask.shape[-1] < end:
        return True
    return not bool(mask[:, kv_offset:end].all())


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


def _activation_classes() -> dict[type, str]:
    classes: dict[type, str] = {torch.nn.SiLU: "silu", torch.nn.ReLU: "relu"}
    for name, ours in _ACTIVATIONS.items():
        entry: Any = ACT2CLS[name]
        kind = entry[0] if isinstance(entry, tuple) else entry
        classes.setdefault(kind, ours)
    return classes


_ACTIVATION_CLASSES = _activation_classes()


def _activation(function: Any) -> str | None:
    """Our name of a module's activation, None where it is none of ours."""
    if isinstance(function, torch.nn.GELU):
        return "gelu" if function.approximate == "none" else "gelu_tanh"
    return _ACTIVATION_CLASSES.get(type(function))


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
