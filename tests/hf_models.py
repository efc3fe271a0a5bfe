"""transformers' models as tests make them: small, of random weights, stock."""

from __future__ import annotations

import copy
import importlib
import math
from typing import Any

import pytest
import torch
import transformers
from flashmoe_science import hf

# transformers imports a part of itself when that is first used: after whatever other tests of this
# process have done, and what fails once fails in all tests that follow. So it is imported here.
for part in ("models.auto.modeling_auto", "generation.utils"):
    importlib.import_module(f"transformers.{part}")

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "qwen3_moe": {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
                  "intermediate_size": 96, "head_dim": 16, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 72},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 40},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40,
                "head_dim": 16, "sliding_window": 8},
    "llama": {"intermediate_size": 96},
    "qwen3": {"intermediate_size": 96, "head_dim": 16},
    "mistral": {"intermediate_size": 96, "sliding_window": None},
    "gemma2": {"intermediate_size": 96, "head_dim": 16, "sliding_window": 32,
               "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {"intermediate_size": 96, "head_dim": 16, "query_pre_attn_scalar": 16,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                  "shared_expert_intermediate_size": 40, "intermediate_size": 96},
    "deepseek_v3": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
                    "moe_intermediate_size": 40, "intermediate_size": 96,
                    "first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": None,
                    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                    "v_head_dim": 16, "num_key_value_heads": 4},
    "llama4_text": {"intermediate_size": 96, "intermediate_size_mlp": 96, "head_dim": 16,
                    "num_local_experts": 4},
}  # fmt: skip

TOKENS = torch.randint(0, 99, (2, 11), generator=torch.Generator().manual_seed(3))


def make(kind: str, *, moe: bool = True, **given: Any) -> Any:
    """A causal language model of random weights with the stock implementations, for inference."""
    config = transformers.AutoConfig.for_model(kind, **SIZES | MODELS.get(kind, {}) | given)
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "sinks" in name:
                parameter.normal_(std=0.1)
            elif parameter.ndim > 1:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
    if moe:
        model.set_experts_implementation("eager")
    return model.eval()


def with_ours(model: Any, *, moe: bool = True) -> Any:
    made = copy.deepcopy(model)
    made.set_attn_implementation(hf.NAME)
    if moe:
        made.set_experts_implementation(hf.NAME)
    return made


@torch.no_grad()
def logits(model: Any, **inputs: Any) -> Any:
    inputs = {
        name: value.to(model.device) for name, value in ({"input_ids": TOKENS} | inputs).items()
    }
    return model(**inputs).logits.double().cpu()


STOCK_ATTENTION = "attention by transformers' own implementation: "


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "flashmoe_science.hf"]
