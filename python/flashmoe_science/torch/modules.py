"""torch.nn modules on the operators, with the weights of common models."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from flashmoe_science.errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    UnsupportedError,
    _naming,
)
from flashmoe_science.moe import Activation, Gate, Scoring
from flashmoe_science.torch.operators import flash_attention, fused_moe

_attend: Any = _naming({"q": "query", "k": "key", "v": "value", "attn_bias": "attn_mask"})(
    flash_attention
)
_attend_to_itself: Any = _naming({
    f"{name}_{of}": name for name in ("cu_seqlens", "seqused", "max_seqlen") for of in "qk"
})(flash_attention)  # fmt: skip


def _as_pairs(
    name: str, mask: torch.Tensor, shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> torch.Tensor:
    """Reshapes a mask: each pair maps a shape to one of [batch, heads, queries, keys], where 1
    broadcasts."""
    if not isinstance(mask, torch.Tensor):
        raise ArgumentTypeError(
            f"{name}: got {type(mask).__name__}, accepted are a torch.Tensor and None"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ArgumentTypeError(
            f"{name}: got dtype {mask.dtype}, accepted are torch.bool and dtypes of real numbers"
        )
    for shape, viewed in shapes:
        if tuple(mask.shape) == shape:
            return mask.view(viewed)
    accepted = " and ".join(str(list(shape)) for shape, _ in shapes)
    verb = "are" if len(shapes) > 1 else "is"
    raise InvalidArgumentError(f"{name}: got shape {list(mask.shape)}, accepted {verb} {accepted}")


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention by FlashMoE, with its arguments, parameters and parameter names,
    so that their state dicts are interchangeable.

    Differences: need_weights is always False, since nothing of size seq x seq is stored. Dropout in
    training, add_bias_kv, add_zero_attn and gradients of masks are not supported yet. A query whose
    keys are all hidden attends to nothing, where torch has NaN. embed_dim / num_heads is a multiple
    of 8, at most 256.

    In eval mode nn.TransformerEncoderLayer computes by itself and calls no attention module, unless
    torch.backends.mha.set_fastpath_enabled(False) was called.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, **options: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, **options)
        for name in ("add_bias_kv", "add_zero_attn"):
            if options.get(name):
                raise UnsupportedError(f"{name}: got True, accepted is False")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """Attends, and projects.

        Args:
            query: [seq_q, batch, embed_dim], [batch, seq_q, embed_dim] with batch_first, or
                [seq_q, embed_dim].
            key, value: Likewise with seq_k and kdim, vdim.
            key_padding_mask: [batch, seq_k], or [seq_k] without a batch: True hides a key from all
                queries. Numbers are added to its logits; -inf hides it.
            need_weights: False.
            attn_mask: [seq_q, seq_k], or [batch * num_heads, seq_q, seq_k], likewise for a query
                and a key. With is_causal=True it is assumed to be the causal mask, as in torch, and
                not read.
            is_causal: Query i sees the keys up to i.

        Returns:
            (out, None), out with query's shape.
        """
        if need_weights:
            raise UnsupportedError(
                "need_weights: got True, accepted is False: no weights are stored"
            )
        if self.dropout != 0.0 and self.training:
            raise UnsupportedError(f"dropout: got {self.dropout} in training, accepted is 0")
        batched = query.dim() == 3
        if query.dim() not in (2, 3):
            raise InvalidArgumentError(f"query: got {query.dim()} dimensions, accepted are 2 or 3")
        q, k, v = (self._heads(x, batched) for x in self._projected(query, key, value))
        masks = self._masks(key_padding_mask, None if is_causal else attn_mask, q, k, batched)
        # torch's causal mask begins at the top left.
        out = _attend(q, k, v, causal="top_left" if is_causal else False, **masks)
        out = out.flatten(2)  # [batch, seq, embed_dim]
        if not batched:
            out = out[0]
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return nn.functional.linear(out, self.out_proj.weight, self.out_proj.bias), None

    def _masks(
        self,
        key_padding_mask: torch.Tensor | None,
        attn_mask: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        batched: bool,
    ) -> dict[str, torch.Tensor]:
        """flash_attention's masks, where True shows a key instead of hiding it."""
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        # Not in a dict: in a torch.export graph extents have no hash.
        of_keys: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
            ((batch, keys) if batched else (keys,), (batch, 1, 1, keys))
        ]
        of_pairs: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
            ((queries, keys), (1, 1, queries, keys)),
            ((batch * self.num_heads, queries, keys), (batch, self.num_heads, queries, keys)),
        ]
        hidden: torch.Tensor | None = None
        added: torch.Tensor | None = None
        for name, mask, shapes in (
            ("key_padding_mask", key_padding_mask, of_keys), ("attn_mask", attn_mask, of_pairs),
        ):  # fmt: skip
            if mask is None:
                continue
            pairs = _as_pairs(name, mask, shapes)
            if mask.dtype == torch.bool:
                hidden = pairs if hidden is None else hidden | pairs
            else:
                added = pairs if added is None else added + pairs
        given = {}
        if hidden is not None:
            given["attn_mask"] = ~hidden
        if added is not None:
            same = added.dtype in (torch.float32, q.dtype)
            given["attn_bias"] = added if same else added.to(q.dtype)
        return given

    def _projected(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        linear = nn.functional.linear
        bias = self.in_proj_bias
        if self._qkv_same_embed_dim and query is key and key is value:
            return linear(query, self.in_proj_weight, bias).chunk(3, -1)
        if self._qkv_same_embed_dim:
            weights: Any = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        pairs = zip((query, key, value), weights, biases, strict=True)
        return tuple(linear(x, weight, b) for x, weight, b in pairs)

    def _heads(self, projected: torch.Tensor, batched: bool) -> torch.Tensor:
        """[batch, seq, heads, dim], a view."""
        rows = projected.shape[:-1]
        split = projected.view((*rows, self.num_heads, self.head_dim))
        if not batched:
            return split[None]
        return split if self.batch_first else split.transpose(0, 1)


class FlashMoEScienceAttention(nn.Module):
    """Self-attention with its projections, computed by flash_attention.

    Parameters have the names and shapes of Hugging Face transformers' layers (version 5): Llama,
    Mistral, with qkv_bias Qwen2, with sinks and all biases gpt-oss. There is no KV cache.

        q_proj.weight    [num_heads * head_dim, H]
        k_proj.weight    [num_kv_heads * head_dim, H]
        v_proj.weight    [num_kv_heads * head_dim_v, H]
        o_proj.weight    [H, num_heads * head_dim_v]
        q_proj.bias, k_proj.bias, v_proj.bias     with qkv_bias
        o_proj.bias      [H], with out_bias
        sinks            [num_heads], with sinks

    Args:
        hidden_size, num_heads: H, and the number of query heads.
        num_kv_heads: Number of key and value heads, a divisor of num_heads; None is num_heads.
        head_dim: Head dimension of queries and keys; None is H / num_heads.
        head_dim_v: Head dimension of values; None is head_dim.
        causal, window, scale, softcap, kernel: As in flash_attention.
        sinks: Whether each head has a learned sink.
        qkv_bias, out_bias: Whether projections have biases.
        device, dtype: Device and dtype of the parameters.
    """

    sinks: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        head_dim_v: int | None = None,
        causal: bool | str = False,
        window: Sequence[int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        qkv_bias: bool = False,
        out_bias: bool = False,
        kernel: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None and hidden_size % num_heads != 0:
            raise InvalidArgumentError(
                f"num_heads: got {num_heads}, accepted without a head_dim are divisors of "
                f"hidden_size, {hidden_size}"
            )
        heads_kv = num_heads if num_kv_heads is None else num_kv_heads
        if heads_kv < 1 or num_heads % heads_kv != 0:
            raise InvalidArgumentError(
                f"num_kv_heads: got {heads_kv}, accepted are divisors of num_heads, {num_heads}"
            )
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, heads_kv
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.head_dim_v = self.head_dim if head_dim_v is None else head_dim_v
        self.options: dict[str, Any] = {
            "causal": causal, "window": window, "scale": scale, "softcap": softcap,
            "kernel": kernel,
        }  # fmt: skip
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, qkv_bias, **where)
        self.k_proj = nn.Linear(hidden_size, heads_kv * self.head_dim, qkv_bias, **where)
        self.v_proj = nn.Linear(hidden_size, heads_kv * self.head_dim_v, qkv_bias, **where)
        self.o_proj = nn.Linear(num_heads * self.head_dim_v, hidden_size, out_bias, **where)
        self.sinks = nn.Parameter(torch.zeros(num_heads, **where)) if sinks else None

    def reset_parameters(self) -> None:
        """Initialises projections like nn.Linear, and sinks with 0."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            projection.reset_parameters()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cu_seqlens: torch.Tensor | None = None,
        seqused: torch.Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> torch.Tensor:
        """Projects, attends, and projects.

        Args:
            hidden_states: [batch, seq, H], or [seq, H].
            position_embeddings: (cos, sin) of each row, both [batch or 1, seq, head_dim], which
                rotate queries and keys: the result of transformers' rotary embeddings.
            cu_seqlens: [sequences + 1], int32: the beginning of each packed sequence of [1, seq, H]
                or [seq, H], and the end of the last.
            seqused: [batch], int32: how many of the first rows of each sequence count. Not with
                cu_seqlens.
            max_seqlen: The most rows of a sequence, if known.

        Returns:
            hidden_states' shape. In rows of no sequence, attention and its gradient are 0.
        """
        if hidden_states.dim() not in (2, 3):
            raise InvalidArgumentError(
                f"hidden_states: got {hidden_states.dim()} dimensions, accepted are 2 or 3"
            )
        if cu_seqlens is not None and seqused is not None:
            raise InvalidArgumentError("seqused: got one beside cu_seqlens, accepted is None")
        x = hidden_states if hidden_states.dim() == 3 else hidden_states[None]
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim_v))
        if position_embeddings is not None:
            q, k = (_rotated(heads, *position_embeddings) for heads in (q, k))
        out = _attend_to_itself(
            q, k, v, sinks=self.sinks, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
            seqused_q=seqused, seqused_k=seqused, max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen, **self.options,
        ).flatten(2)  # fmt: skip
        outside = _rows_of_no_sequence(out, cu_seqlens, seqused)
        if outside is not None:  # out may hold anything there, and the last product would read it
            out = out.masked_fill(outside[..., None], 0)
        made: torch.Tensor = self.o_proj(out)
        return made if hidden_states.dim() == 3 else made[0]

    def extra_repr(self) -> str:
        heads = f"{self.hidden_size}, {self.num_heads}, {self.num_kv_heads}"
        given = {name: x for name, x in self.options.items() if x not in (None, False)}
        return ", ".join([heads, *(f"{name}={x!r}" for name, x in given.items())])


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[batch, seq, heads, dim] with rotated pairs of the first and second half."""
    first, second = heads.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (heads * cos[..., None, :] + turned * sin[..., None, :]).to(heads.dtype)


def _rows_of_no_sequence(
    rows: torch.Tensor, cu_seqlens: torch.Tensor | None, seqused: torch.Tensor | None
) -> torch.Tensor | None:
    """The rows of [batch, seq, ...] that belong to no sequence; None if all belong to one."""
    if cu_seqlens is None and seqused is None:
        return None
    index = torch.arange(rows.shape[1], device=rows.device)[None]
    if seqused is not None:
        return index >= seqused[:, None]
    assert cu_seqlens is not None
    return (index < cu_seqlens[0]) | (index >= cu_seqlens[-1])


class _Router(nn.Module):
    """The weights of a router: those of a Linear, and DeepSeek-V3's correction bias."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    e_score_correction_bias: torch.Tensor | None

    def __init__(
        self, experts: int, hidden: int, bias: bool, correction: bool, **where: Any
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden, **where))
        self.bias = nn.Parameter(torch.empty(experts, **where)) if bias else None
        # Always fp32, since the choice of experts depends on it.
        made = torch.zeros(experts, device=where.get("device")) if correction else None
        self.register_buffer("e_score_correction_bias", made)
        hook: Any = self.register_load_state_dict_pre_hook
        hook(_keep_fp32)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = self.e_score_correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = self.e_score_correction_bias
        if kept is not None and moved is not None and moved.dtype != torch.float32:
            self.e_score_correction_bias = kept.to(moved.device)
        return self


def _keep_fp32(_: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """Casts a correction bias, which load_state_dict with assign=True would take as it is."""
    key = f"{prefix}e_score_correction_bias"
    if key in state:
        state[key] = state[key].to(torch.float32)


class _Experts(nn.Module):
    """The weights of all experts, each stacked in one tensor."""

    def __init__(
        self, experts: int, hidden: int, inner: int, gated: bool, bias: bool, transposed: bool,
        **where: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        rows = 2 * inner if gated else inner
        self.up_name = "gate_up_proj" if gated else "up_proj"

        def matrix(n: int, k: int) -> nn.Parameter:
            shape = (experts, k, n) if transposed else (experts, n, k)
            return nn.Parameter(torch.empty(shape, **where))

        self.register_parameter(self.up_name, matrix(rows, hidden))
        self.down_proj = matrix(hidden, inner)
        for name, n in ((self.up_name, rows), ("down_proj", hidden)):
            made = nn.Parameter(torch.empty(experts, n, **where)) if bias else None
            self.register_parameter(f"{name}_bias", made)


class FlashMoELayer(nn.Module):
    """A layer of experts with its router, computed by fused_moe.

    Parameters have the names and shapes of Hugging Face transformers' layers (version 5):
    Qwen3-MoE, Mixtral, OLMoE, and with the options of that model gpt-oss, DeepSeek-V3's routed
    experts and others. Checkpoints with one tensor per expert (experts.0.gate_proj.weight or
    experts.0.w1.weight and so on) are stacked while loading.

        gate.weight                    [E, H]
        gate.bias                      [E], with router_bias
        gate.e_score_correction_bias   [E] fp32, a buffer, with selection_bias
        experts.gate_up_proj           [E, 2I, H], transposed [E, H, 2I]; up_proj [E, I, H] ungated
        experts.down_proj              [E, H, I], transposed [E, I, H]
        experts.gate_up_proj_bias, experts.down_proj_bias     [E, rows], with expert_bias

    Args:
        hidden_size, intermediate_size, num_experts, top_k: H, I, E and K.
        gate: Order of the rows of gate_up_proj, as in moe_forward, except "separate".
        transposed: Whether experts' matrices are stored transposed, as in gpt-oss and Llama 4.
        router_bias, expert_bias, selection_bias: Whether these parameters exist.
        scoring, renormalize, num_groups, top_groups, scale: As in moe_route.
        activation, alpha, limit, up_offset, weight_on_input: As in moe_forward.
        max_workspace_bytes, recompute, kernel: Likewise.
        device, dtype: Device and dtype of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        scoring: Scoring = "softmax",
        renormalize: bool = True,
        router_bias: bool = False,
        selection_bias: bool = False,
        num_groups: int = 1,
        top_groups: int | None = None,
        scale: float = 1.0,
        gate: Gate = "gate_up",
        activation: Activation = "silu",
        transposed: bool = False,
        expert_bias: bool = False,
        alpha: float = 1.0,
        limit: float | None = None,
        up_offset: float = 0.0,
        weight_on_input: bool = False,
        max_workspace_bytes: int | None = None,
        recompute: bool = False,
        kernel: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if gate == "separate":
            raise InvalidArgumentError(
                'gate: got "separate", accepted are "gate_up", "up_gate", "interleaved" and '
                '"none": gate and up are one parameter'
            )
        where = {"device": device, "dtype": dtype}
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_experts, self.top_k, self.transposed = num_experts, top_k, transposed
        self.options: dict[str, Any] = {
            "scoring": scoring, "renormalize": renormalize, "num_groups": num_groups,
            "top_groups": top_groups, "scale": scale, "gate": gate, "activation": activation,
            "alpha": alpha, "limit": limit, "up_offset": up_offset,
            "weight_on_input": weight_on_input, "max_workspace_bytes": max_workspace_bytes,
            "recompute": recompute, "kernel": kernel,
        }  # fmt: skip
        self.gate = _Router(num_experts, hidden_size, router_bias, selection_bias, **where)
        self.experts = _Experts(
            num_experts, hidden_size, intermediate_size, gate != "none", expert_bias, transposed,
            **where,
        )  # fmt: skip
        hook: Any = self.register_load_state_dict_pre_hook
        hook(_stack_experts)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises like nn.Linear: uniform within 1 / sqrt(columns). A correction bias is 0."""
        named = (*self.gate.named_parameters(), *self.experts.named_parameters())
        for name, parameter in named:
            columns = self.intermediate_size if name.startswith("down") else self.hidden_size
            nn.init.uniform_(parameter, -1 / math.sqrt(columns), 1 / math.sqrt(columns))
        if self.gate.e_score_correction_bias is not None:
            nn.init.zeros_(self.gate.e_score_correction_bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., H] to the same."""
        gate: Any = self.gate  # once: a module looks its parts up through a function
        experts: Any = self.experts
        name = experts.up_name
        w_up, w_down = getattr(experts, name), experts.down_proj
        if self.transposed:
            w_up, w_down = w_up.transpose(1, 2), w_down.transpose(1, 2)
        return fused_moe(
            hidden_states, gate.weight, w_up, w_down, self.top_k, router_bias=gate.bias,
            selection_bias=gate.e_score_correction_bias,
            b_gate_up=getattr(experts, f"{name}_bias"), b_down=experts.down_proj_bias,
            **self.options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        sizes = f"{self.hidden_size}, {self.intermediate_size}"
        return f"{sizes}, num_experts={self.num_experts}, top_k={self.top_k}"


# Names of one expert's matrices in checkpoints: gate, up, down.
_ONE_EXPERT = {"gate_proj": 0, "up_proj": 1, "down_proj": 2, "w1": 0, "w3": 1, "w2": 2}
_ONE_KEY = re.compile(r"experts\.(\d+)\.(\w+)\.weight")


def _stack_experts(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replaces the tensors of single experts by stacked ones."""
    found: dict[int, dict[int, torch.Tensor]] = {}
    gate, rows = layer.options["gate"], (layer.intermediate_size, layer.hidden_size)
    for key in list(state):
        match = _ONE_KEY.fullmatch(key[len(prefix) :]) if key.startswith(prefix) else None
        which = None if match is None else _ONE_EXPERT.get(match[2])
        # Without a gate its tensors stay, as keys that the layer does not have.
        if match is None or which is None or (which == 0 and gate == "none"):
            continue
        matrix, shape = state.pop(key), rows[::-1] if which == 2 else rows
        if tuple(matrix.shape) != shape:
            raise InvalidArgumentError(
                f"state_dict: got shape {list(matrix.shape)} of {key}, accepted is {list(shape)}"
            )
        found.setdefault(which, {})[int(match[1])] = matrix
    if not found:
        return

    def stacked(which: int) -> torch.Tensor:
        parts = found.get(which, {})
        if sorted(parts) != list(range(layer.num_experts)):
            raise InvalidArgumentError(
                f"state_dict: got tensors of the experts {sorted(parts)}, accepted are those of "
                f"all {layer.num_experts}"
            )
        return torch.stack([parts[e] for e in range(layer.num_experts)])

    up, down = stacked(1), stacked(2)
    if gate == "up_gate":
        up = torch.cat([up, stacked(0)], 1)
    elif gate == "gate_up":
        up = torch.cat([stacked(0), up], 1)
    elif gate == "interleaved":
        up = torch.stack([stacked(0), up], 2).flatten(1, 2)
    for name, matrix in ((layer.experts.up_name, up), ("down_proj", down)):
        state[f"{prefix}experts.{name}"] = matrix.transpose(1, 2) if layer.transposed else matrix
