"""FlashMoE inside torch: operators for torch.compile and torch.export, routing of torch's own
attention, and modules with the weights of common models.

    import flashmoe_science.torch as fmt

    compiled = torch.compile(model, fullgraph=True)      # with fm.flash_attention, fm.fused_moe
    out = fmt.scaled_dot_product_attention(q, k, v, is_causal=True)     # torch's very semantics
    with fmt.sdpa_kernel():                              # torch's own calls, ours where they can be
        out = model(x)

Importing this module registers the operators torch.ops.flashmoe.*, and tells torch.compile that the
functions of flashmoe_science are these. If that package is imported, torch.compile imports this
module automatically. Attention and the mixture of experts have gradients.
"""

from flashmoe_science.torch.append import kv_append
from flashmoe_science.torch.check import check_sequences
from flashmoe_science.torch.gather import kv_gather
from flashmoe_science.torch.merge import merge_states
from flashmoe_science.torch.modules import (
    FlashMoELayer,
    FlashMoEScienceAttention,
    MultiheadAttention,
)
from flashmoe_science.torch.operators import (
    flash_attention,
    flash_attention_backward,
    fused_moe,
    grouped_product,
    moe_forward,
    moe_route,
    moe_route_given,
)
from flashmoe_science.torch.sdpa import scaled_dot_product_attention, sdpa_kernel
from flashmoe_science.torch.varlen import varlen_attn, varlen_attn_out

__all__ = [
    "FlashMoELayer",
    "FlashMoEScienceAttention",
    "MultiheadAttention",
    "check_sequences",
    "flash_attention",
    "flash_attention_backward",
    "fused_moe",
    "grouped_product",
    "kv_append",
    "kv_gather",
    "merge_states",
    "moe_forward",
    "moe_route",
    "moe_route_given",
    "scaled_dot_product_attention",
    "sdpa_kernel",
    "varlen_attn",
    "varlen_attn_out",
]
