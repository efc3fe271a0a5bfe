"""Models whose own attention reads masks alone; their layers may be wrong about being causal.

transformers says of their classes that they support neither SDPA nor flash attentions, which are
the ones that ask the layers.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from flashmoe_science import hf  # noqa: E402
from hf_models import STOCK_ATTENTION, TOKENS, said  # noqa: E402

WIDE = {"vocab_size": 99, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "max_position_embeddings": 64}  # fmt: skip
DEEPSEEK = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 16, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "q_lora_rank": 32,
            "o_lora_rank": 16, "sliding_window": 8, "index_n_heads": 4, "index_head_dim": 16,
            "max_position_embeddings": 64,
            "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
            "compress_rates": {"compressed_sparse_attention": 4,
                               "heavily_compressed_attention": 16}}  # fmt: skip
IDS = TOKENS.clamp(min=3)


def made(auto: Any, kind: str, **sizes: Any) -> tuple[Any, Any]:
    """A stock model of random weights, and the same with our attention."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config = transformers.AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(1)
    stock = auto.from_config(config, attn_implementation="eager").eval()
    ours = copy.deepcopy(stock)
    ours.set_attn_implementation(hf.NAME)
    return stock, ours


def padded(side: str | None) -> Any:
    mask = torch.ones_like(IDS)
    if side == "left":
        mask[1, :4] = 0
    elif side == "right":
        mask[1, 7:] = 0
    return mask


def assert_same(stock: Any, ours: Any, tokens: Any, **inputs: Any) -> None:
    with torch.no_grad():
        want, got = (model(**inputs)[0][tokens.bool()] for model in (stock, ours))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("side", [None, "right"])
def test_an_encoder_that_does_not_say_that_it_is_one(side: str | None) -> None:
    sizes = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 96, "max_position_embeddings": 64}  # fmt: skip
    stock, ours = made(transformers.AutoModel, "splinter", **sizes)
    mask = padded(side)
    assert_same(stock, ours, mask, input_ids=IDS, attention_mask=mask)
    assert (hf.report().ours, hf.report().stock) == (2, 0)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_decoder_that_does_not_say_that_it_is_one(side: str | None) -> None:
    stock, ours = made(transformers.AutoModelForCausalLM, "bigbird_pegasus", **WIDE)
    mask = padded(side)
    assert_same(stock, ours, mask, input_ids=IDS, attention_mask=mask)
    assert (hf.report().ours, hf.report().stock) == (2, 0)
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.generate(IDS, **settings), stock.generate(IDS, **settings))
    assert hf.report().stock == 0


def test_gradients_of_such_a_decoder() -> None:
    both = made(transformers.AutoModelForCausalLM, "bigbird_pegasus", **WIDE)
    for model in both:
        model(IDS, labels=IDS).loss.backward()
    for (name, want), got in zip(both[0].named_parameters(), both[1].parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=1e-5, rtol=1e-4, msg=name)
    assert (hf.report().ours, hf.report().stock) == (2, 0)


def test_an_encoder_and_a_decoder_whose_layers_are_alike() -> None:
    """Attention in each and across, by one class that says of all that they are not causal."""
    sizes = WIDE | {"encoder_sparse_step": 0, "decoder_sparse_step": 0}
    stock, ours = made(transformers.AutoModel, "nllb-moe", **sizes)
    mask = padded("right")
    inputs = {"input_ids": IDS, "attention_mask": mask, "decoder_input_ids": IDS[:, :5]}
    assert_same(stock, ours, torch.ones(2, 5), **inputs)
    del inputs["attention_mask"]  # then there is none across
    assert_same(stock, ours, torch.ones(2, 5), **inputs)
    assert (hf.report().ours, hf.report().stock) == (2 * 6, 0)


@pytest.mark.parametrize("side", [None, "left"])
def test_a_layer_that_extends_its_mask(side: str | None) -> None:
    """DeepSeek V4 adds compressed keys, and what hides them in the form of its own attention."""
    stock, ours = made(transformers.AutoModelForCausalLM, "deepseek_v4", **DEEPSEEK)
    ids = IDS.repeat(1, 3)
    mask = torch.cat([padded(side), torch.ones_like(ids[:, IDS.shape[1] :])], 1)
    assert_same(stock, ours, mask, input_ids=ids, attention_mask=mask)
    assert (hf.report().ours, hf.report().stock) == (2, 0)
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.generate(ids, **settings), stock.generate(ids, **settings))
    assert hf.report().stock == 0


@pytest.mark.parametrize("kind", ["splinter", "bigbird_pegasus"])
def test_in_a_graph(kind: str) -> None:
    if kind == "splinter":
        sizes = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 1,
                 "num_attention_heads": 4, "intermediate_size": 96}  # fmt: skip
        stock, ours = made(transformers.AutoModel, kind, **sizes)
    else:
        stock, ours = made(transformers.AutoModelForCausalLM, kind, **WIDE)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_same(stock, compiled, padded(None), input_ids=IDS)
    assert hf.report().stock == 0 and all(layer.ours for layer in hf.report().compiled)


@pytest.mark.parametrize("kind", ["splinter", "bigbird_pegasus"])
def test_what_ours_refuses_goes_to_the_stock_attention_as_it_is(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "splinter":
        sizes = {"vocab_size": 99, "hidden_size": 48, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "intermediate_size": 96}  # fmt: skip
        stock, ours = made(transformers.AutoModel, kind, **sizes)
    else:
        sizes = WIDE | {"d_model": 48}
        stock, ours = made(transformers.AutoModelForCausalLM, kind, **sizes)
    assert_same(stock, ours, padded(None), input_ids=IDS)
    assert said(caplog) == [STOCK_ATTENTION + "head dimensions are 12 and 12"]
    assert (hf.report().ours, hf.report().stock) == (0, 2)


def test_packed_rows_without_a_mask() -> None:
    """By the offsets that a flash attention is given, without a mask: then a layer is asked."""
    _, ours = made(transformers.AutoModelForCausalLM, "bigbird_pegasus", **WIDE)
    layer = ours.model.decoder.layers[0].self_attn
    q, k, v = torch.randn(3, 1, 4, 11, 16)
    starts = torch.tensor([0, 5, 11], dtype=torch.int32)
    offsets = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 6,
               "max_length_k": 6}  # fmt: skip
    for is_causal in (False, True):
        layer.is_causal = is_causal
        got, _ = hf.attention(layer, q, k, v, None, **offsets)
        for a, b in ((0, 5), (5, 11)):
            part = (x[:, :, a:b] for x in (q, k, v))
            want = torch.nn.functional.scaled_dot_product_attention(*part, is_causal=is_causal)
            torch.testing.assert_close(got[:, a:b].transpose(1, 2), want)
