"""A Hugging Face mixture-of-experts model with FlashMoE's experts and attention.

Builds Qwen3-MoE or Mixtral from its configuration, small and with random weights, continues a
prompt with transformers' own implementations and with ours, and compares: the logits of both
with those of the model in float64, and the tokens that are generated. What changes in the model
is two names:

    hf.register()
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="flashmoe", experts_implementation="flashmoe"
    )

and so it is with from_pretrained, for a model with real weights.

    pip install '.[examples]'
    python examples/mixture_of_experts.py
    python examples/mixture_of_experts.py --model mixtral --device cuda --dtype bf16
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Sequence
from typing import Any

import flashmoe_science
import torch
from flashmoe_science import hf
from transformers import AutoConfig, AutoModelForCausalLM

# Layers as in Qwen3-30B-A3B and Mixtral-8x7B, smaller in every direction.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 8,
        "moe_intermediate_size": 96, "norm_topk_prob": True, "vocab_size": 1000,
    },
    "mixtral": {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
        "intermediate_size": 512, "vocab_size": 1000,
    },
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NEW_TOKENS = 24


def build(kind: str, device: str, dtype: torch.dtype) -> Any:
    """The model with transformers' own attention and experts, random weights of a sensible size."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
    return model.to(device, dtype).eval()


def with_flashmoe(model: Any) -> Any:
    """A copy that computes with FlashMoE."""
    name = hf.register()
    made = copy.deepcopy(model)
    made.set_attn_implementation(name)
    made.set_experts_implementation(name)
    return made


@torch.inference_mode()
def compare(model: Any, prompt: torch.Tensor) -> dict[str, float]:
    """max|logits - float64's| of the stock model and of ours, and the largest logit."""
    reference = copy.deepcopy(model).double()
    reference.set_experts_implementation("eager")  # the only one that takes float64
    exact = reference(prompt).logits
    stock = model(prompt).logits.double()
    ours = with_flashmoe(model)(prompt).logits.double()
    return {
        "stock": (stock - exact).abs().max().item(),
        "ours": (ours - exact).abs().max().item(),
        "largest": exact.abs().max().item(),
    }


def generate(model: Any, prompt: torch.Tensor) -> tuple[list[int], float]:
    """The greedy continuation, and the seconds it took."""
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    begin = time.perf_counter()
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    return tokens[0, prompt.shape[1] :].tolist(), time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="qwen3_moe")
    parser.add_argument(
        "--device", help="cpu or cuda (default: a GPU if torch and FlashMoE see one)"
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="(default: bf16 on a GPU, else fp32)"
    )
    arguments = parser.parse_args(argv)
    has_gpu = torch.cuda.is_available() and flashmoe_science.cuda_device_count() > 0
    device = arguments.device or ("cuda" if has_gpu else "cpu")
    dtype = arguments.dtype or ("fp32" if device == "cpu" else "bf16")

    model = build(arguments.model, device, DTYPES[dtype])
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, model.config.vocab_size, (1, 200), generator=generator).to(device)
    errors = compare(model, prompt)
    print(f"{arguments.model}, {sum(p.numel() for p in model.parameters()):,} parameters, {dtype}")
    print(f"logits of {prompt.shape[1]} tokens, at most {errors['largest']:.3g}, beside float64:")
    print(f"  transformers' own  max error {errors['stock']:.3g}")
    print(f"  FlashMoE           max error {errors['ours']:.3g}")
    (stock, stock_s), (ours, ours_s) = (generate(m, prompt) for m in (model, with_flashmoe(model)))
    same = sum(a == b for a, b in zip(stock, ours, strict=True))
    print(f"{NEW_TOKENS} tokens generated, {same} of them the same:")
    print(f"  transformers' own  {stock_s:.3f} s  {stock}")
    print(f"  FlashMoE           {ours_s:.3f} s  {ours}")
    print(f"the last launch was {flashmoe_science.last_launch().kernel}")


if __name__ == "__main__":
    main()
