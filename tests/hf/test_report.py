"""What ran each layer is counted, whoever calls it, and a strict registration allows ours alone."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from flashmoe_science import UnsupportedError, hf  # noqa: E402
from flashmoe_science.hf import _report  # noqa: E402
from hf_models import MODELS, SIZES, TOKENS, logits, make, said, with_ours  # noqa: E402

WEIGHTS = "the weights of attention are asked for"


@torch.no_grad()
def not_ours(model: Any) -> Any:
    return model(TOKENS, output_attentions=True)


def test_every_layer_has_its_calls_and_reasons() -> None:
    ours = with_ours(make("mixtral"))
    logits(ours)
    logits(ours)
    not_ours(ours)
    ours(TOKENS)
    report = hf.report()
    reasons = {WEIGHTS: 1}
    expected = [
        hf.Layer("MixtralForCausalLM", f"model.layers.{n}.{name}", operation, count, stock)
        for name, operation, count, stock in (
            ("self_attn", "attention", 3, reasons),
            ("mlp.experts", "experts", 4, {}),
        )
        for n in range(2)
    ]
    key = lambda layer: (layer.operation, layer.name)  # noqa: E731
    assert sorted(report.layers, key=key) == sorted(expected, key=key)
    assert (report.ours, report.stock) == (14, 2)
    assert report.compiled == ()
    assert report.without_choice == ()
    document = json.loads(json.dumps(dataclasses.asdict(report)))
    assert document["layers"][0]["stock"] == reasons


def test_a_report_is_text_for_people() -> None:
    ours = with_ours(make("mixtral"))
    assert str(hf.report()) == (
        "0 calls by FlashMoE, 0 by transformers\n"
        "  attention of MixtralForCausalLM: model.layers.*.self_attn (2 layers, each): not called\n"
        "  experts of MixtralForCausalLM: model.layers.*.mlp.experts (2 layers, each): not called"
    )
    logits(ours)
    not_ours(ours)
    assert str(hf.report()) == (
        "6 calls by FlashMoE, 2 by transformers\n"
        "  attention of MixtralForCausalLM: model.layers.*.self_attn (2 layers, each): "
        "1 by FlashMoE, 1 by transformers\n"
        f"    1 because {WEIGHTS}\n"
        "  experts of MixtralForCausalLM: model.layers.*.mlp.experts (2 layers, each): "
        "2 by FlashMoE, 0 by transformers"
    )


def test_layers_that_differ_have_lines_of_their_own() -> None:
    ours = with_ours(make("gemma2", moe=False, sliding_window=5), moe=False)
    ours.model.layers[1].self_attn.scaling = -1.0  # which the library refuses
    logits(ours)
    assert [layer.ours for layer in hf.report().layers] == [1, 0]
    assert "layers" not in str(hf.report()).replace("model.layers", "")


def test_a_reset_returns_what_was_and_keeps_the_layers() -> None:
    ours = with_ours(make("llama", moe=False), moe=False)
    logits(ours)
    assert hf.reset_report().ours == 2
    assert [(layer.ours, layer.stock) for layer in hf.report().layers] == [(0, {}), (0, {})]
    logits(ours)
    assert hf.report().ours == 2


def test_layers_of_another_implementation_are_no_part_of_a_report() -> None:
    ours = with_ours(make("llama", moe=False), moe=False)
    assert len(hf.report().layers) == 2
    ours.set_attn_implementation("sdpa")
    assert hf.report().layers == ()


def test_calls_of_models_that_are_gone_are_kept_until_a_reset() -> None:
    ours = with_ours(make("llama", moe=False), moe=False)
    logits(ours)
    del ours
    gc.collect()
    assert hf.report().ours == 2
    assert hf.reset_report().ours == 2
    assert hf.report().layers == ()
    assert not _report._by_module


def test_layers_that_come_and_go_take_no_memory() -> None:
    """As the replicas of torch.nn.DataParallel."""
    there = len(_report._calls)
    for _ in range(5000):
        _report.note_ours(torch.nn.Identity(), "attention")
    assert hf.report().ours == 5000
    assert len(_report._calls) <= there + _report._MOST_GONE + 1


def test_layers_that_are_gone_are_joined_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many names there are of them, which cannot be joined."""
    joins = []
    join = _report._join_gone
    monkeypatch.setattr(_report, "_join_gone", lambda: [joins.append(1), join()])
    for i in range(3 * _report._MOST_GONE):
        kind = type(f"Layer{i}", (torch.nn.Identity,), {})
        _report.note_ours(kind(), "attention")
    assert 1 <= len(joins) <= 4


def test_layers_of_a_copy_are_apart() -> None:
    ours = with_ours(make("llama", moe=False), moe=False)
    logits(copy.deepcopy(ours))
    assert sorted((layer.name, layer.ours) for layer in hf.report().layers) == [
        ("LlamaAttention", 1),
        ("LlamaAttention", 1),
        ("model.layers.0.self_attn", 0),
        ("model.layers.1.self_attn", 0),
    ]


def test_a_layer_that_asks_for_nothing_is_in_the_report() -> None:
    """SigLIP's pooling, which is torch's module."""
    config = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        image_size=16, patch_size=8,
    )  # fmt: skip
    model = transformers.SiglipVisionModel._from_config(config, attn_implementation="flashmoe")
    report = hf.report()
    assert report.without_choice == ("SiglipVisionModel: MultiheadAttention",)
    assert str(report).endswith(
        "layers that ask for no implementation, and are not counted:\n"
        "  SiglipVisionModel: MultiheadAttention"
    )
    model.set_attn_implementation("eager")
    assert hf.report().without_choice == ()


def test_threads_lose_no_call() -> None:
    layer = torch.nn.Identity()
    totals = []

    def call() -> None:
        for n in range(2000):
            _report.note_ours(layer, "attention")
            if n % 100 == 0:
                totals.append(hf.reset_report().ours)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(totals) + hf.report().ours == 4 * 2000


# ---- compiled ---------------------------------------------------------------------------------


def test_compiled_graphs_are_counted_where_they_are_traced() -> None:
    ours = with_ours(make("mixtral"))
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        compiled(TOKENS, use_cache=True)
        report = hf.report()
        for _ in range(3):
            compiled(TOKENS, use_cache=True)
    assert report.ours == report.stock == 0
    assert {(layer.name, layer.operation, layer.ours % 2) for layer in report.compiled} == {
        ("MixtralAttention", "attention", 0), ("MixtralExperts", "experts", 0)
    }  # fmt: skip
    assert all(layer.ours >= 2 for layer in report.compiled)
    assert "traced into compiled graphs:\n  attention of MixtralAttention: " in str(report)
    hf.reset_report()
    with torch.no_grad():
        compiled(TOKENS, use_cache=True)
    assert hf.report().compiled == ()


def test_layers_that_share_their_code_are_compiled_once() -> None:
    """Counting guards no module."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    layers = [torch.nn.Identity() for _ in range(12)]

    @torch.compile(backend=counter, fullgraph=True)
    def call(layer: Any, q: Any) -> Any:
        return hf.attention(layer, q, q, q, None)[0]

    q = torch.randn(1, 2, 5, 16)
    for layer in layers:
        call(layer, q)
    assert counter.frame_count == 1
    assert [(layer.name, layer.ours) for layer in hf.report().compiled] == [("Identity", 1)]


# ---- strict -----------------------------------------------------------------------------------


def test_strict_allows_what_is_ours() -> None:
    hf.register(strict=True)
    ours = with_ours(make("mixtral"))
    with torch.no_grad():
        ours.generate(TOKENS, max_new_tokens=3, do_sample=False)
    assert hf.report().stock == 0


def test_strict_refuses_what_is_not(caplog: pytest.LogCaptureFixture) -> None:
    ours = with_ours(make("mixtral"))
    hf.register(strict=True)
    rest = "; registered as strict, FlashMoE leaves no call to transformers' own implementation"
    with pytest.raises(UnsupportedError) as caught:
        not_ours(ours)
    assert str(caught.value) == f"attention of MixtralAttention: {WEIGHTS}{rest}"
    ours.set_attn_implementation("sdpa")
    function = torch.nn.Softplus()
    for layer in ours.model.layers:
        layer.mlp.experts.act_fn = function
    with pytest.raises(UnsupportedError) as caught:
        ours(TOKENS)
    reason = "the activation is Softplus"
    assert str(caught.value) == f"experts of MixtralExperts: {reason}{rest}"
    assert hf.report().stock == 0
    assert said(caplog) == []
    hf.register()
    ours(TOKENS)  # and it is allowed again


def test_strict_refuses_what_the_library_refuses() -> None:
    """Rows that begin between two multiples of 16 bytes."""
    hf.register(strict=True)
    q = torch.randn(5 * 2 * 4 * 16 + 1)[1:].view(5, 2, 4, 16)
    with pytest.raises(UnsupportedError, match="not a multiple of 16 bytes; registered as strict"):
        hf.attention(torch.nn.Module(), q, q, q, None)


def test_strict_holds_for_graphs_that_were_compiled_before() -> None:
    ours = with_ours(make("llama", moe=False), moe=False)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager")
    with torch.no_grad():
        compiled(TOKENS, output_attentions=True)
        hf.register(strict=True)
        with pytest.raises(UnsupportedError, match=WEIGHTS):
            compiled(TOKENS, output_attentions=True)
        compiled(TOKENS)


def test_strict_takes_a_model_of_models() -> None:
    hf.register(strict=True)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
              "num_attention_heads": 4, "image_size": 16, "patch_size": 8}  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.LlamaConfig(**SIZES | MODELS["llama"]),
    )
    model = transformers.LlavaForConditionalGeneration._from_config(
        config, attn_implementation="flashmoe"
    )
    logits(model.eval())
    names = {layer.name for layer in hf.report().layers if not layer.ours}
    assert names == {"model.vision_tower.encoder.layers.0.self_attn"}  # there was no image
