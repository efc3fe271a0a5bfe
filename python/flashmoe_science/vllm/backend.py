"""vLLM's attention, computed by ours: the backend, its batch metadata, and the calls of a layer.

A step of vLLM is one batch of packed queries, prompts beside decoding, over pages. A layer writes
its new keys and values to their slots by kv_append, and attends by one call of flash_attention.
Lengths and tables stay on the device, so that CUDA graphs serve any batch.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

import flashmoe_science
from flashmoe_science.errors import UnsupportedError

_DIM_MULTIPLE, _MOST_DIM = 8, 256
_LEAST_CAPABILITY = (8, 9)
_CACHE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


@dataclass
class Metadata:
    """What a layer must know about a batch; tensors are vLLM's own."""

    num_actual_tokens: int  # without padding
    max_query_len: int
    query_start_loc: torch.Tensor  # [requests + 1]
    seq_lens: torch.Tensor  # [requests], keys including new ones
    block_table: torch.Tensor  # [requests, blocks]
    slot_mapping: torch.Tensor  # [tokens]
    causal: bool


class Builder(AttentionMetadataBuilder[Metadata]):
    """Plans nothing, so builds nothing: a graph reads the batch when it runs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Metadata:
        given = common_attn_metadata
        return Metadata(
            given.num_actual_tokens,
            given.max_query_len,
            given.query_start_loc,
            given.seq_lens,
            given.block_table_tensor,
            given.slot_mapping,
            given.causal,
        )

    def update_block_table(
        self, metadata: Metadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> Metadata:
        changed = copy.copy(metadata)  # vLLM may have set attributes of its own on it
        changed.block_table, changed.slot_mapping = blk_table, slot_mapping
        return changed


class FlashMoEBackend(AttentionBackend):
    """Attention of decoders and encoders, with sinks, windows and softcap."""

    accept_output_buffer = True
    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *_CACHE_DTYPES]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM's own name for plugins

    @staticmethod
    def get_impl_cls() -> type[Attention]:
        return Attention

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        heads_first = get_kv_cache_layout() == "HND"
        if include_num_layers_dimension:
            return (1, 2, 4, 0, 3, 5) if heads_first else (1, 0, 2, 3, 4, 5)
        return (0, 1, 3, 2, 4) if heads_first else (0, 1, 2, 3, 4)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % _DIM_MULTIPLE == 0 and head_size <= _MOST_DIM

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool((capability.major, capability.minor) >= _LEAST_CAPABILITY)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, *_ENCODERS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        device_capability: Any,
    ) -> str | None:
        """A sentence where keys and values would be kept in another element type than queries."""
        if _CACHE_DTYPES.get(kv_cache_dtype, dtype) == dtype:
            return None
        model = str(dtype).removeprefix("torch.")
        return f"kv_cache_dtype {kv_cache_dtype} not supported for a model in {model}: give auto"


class Attention(AttentionImpl[Metadata]):
    """The calls of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise UnsupportedError("alibi_slopes: got slopes, accepted is None: there is no ALiBi")
        if kv_cache_dtype not in FlashMoEBackend.supported_kv_cache_dtypes:
            accepted = ", ".join(FlashMoEBackend.supported_kv_cache_dtypes)
            raise UnsupportedError(f"kv_cache_dtype: got {kv_cache_dtype}, accepted are {accepted}")
        if not FlashMoEBackend.supports_attn_type(attn_type):
            raise UnsupportedError(f"attn_type: got {attn_type}, accepted are decoders, encoders")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.attn_type = attn_type
        reach = None if sliding_window is None else sliding_window - 1
        sides = (reach, reach if attn_type in _ENCODERS else None)
        self._options: dict[str, Any] = {
            "scale": self.scale,
            "window": None if reach is None else sides,
            "softcap": logits_soft_cap or None,
            "sinks": sinks,
        }

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes [tokens, heads, dim] to their slots; padding has slot -1."""
        if self.attn_type in _ENCODERS:
            return
        k_cache, v_cache = kv_cache.unbind(1)
        count = slot_mapping.shape[0]
        flashmoe_science.kv_append(
            key[None, :count], value[None, :count], k_cache, v_cache, slots=slot_mapping[None]
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends with [tokens, heads, dim] to the written keys, into `output` of the same form."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("output_scale: got one, accepted is None: outputs are 16 bits")
        if attn_metadata is None:  # vLLM is measuring memory
            return output.fill_(0)
        count, starts = attn_metadata.num_actual_tokens, attn_metadata.query_start_loc
        tables: dict[str, Any] = {"cu_seqlens_q": starts}
        if self.attn_type in _ENCODERS:
            k, v, causal = key[None, :count], value[None, :count], False
            tables["cu_seqlens_k"] = starts
        else:
            k, v = kv_cache.unbind(1)
            causal = attn_metadata.causal
            if not causal and self._options["window"] is not None:
                # Ours would have no bound to the right, vLLM's own backends do not agree on one.
                raise UnsupportedError(
                    "sliding_window: got one, accepted for a decoder that is not causal is None"
                )
            tables |= {
                "seqused_k": attn_metadata.seq_lens,
                "page_table": attn_metadata.block_table,
            }
        flashmoe_science.flash_attention(
            query[None, :count],
            k,
            v,
            out=output.view(query.shape[0], self.num_heads, -1)[None, :count],
            causal=causal,
            max_seqlen_q=attn_metadata.max_query_len,
            **tables,
            **self._options,
        )
        return output
