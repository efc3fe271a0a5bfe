"""Models that never ask for an implementation are refused by name, and nothing else is."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from flashmoe_science import InvalidArgumentError, hf  # noqa: E402
from flashmoe_science.hf import _models  # noqa: E402
from flashmoe_science.hf._models import ATTENTION, EXPERTS  # noqa: E402
from hf_models import MODELS, SIZES, STOCK_ATTENTION, TOKENS, logits, make, said  # noqa: E402
from torch import nn  # noqa: E402
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel  # noqa: E402
from transformers.integrations.moe import ExpertsInterface  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface  # noqa: E402

# Sizes by the names that these have for them.
OLD = {
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64},
    "deberta-v2": SIZES | {"intermediate_size": 96},
    "falcon": SIZES | {"num_kv_heads": 4},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neo": {"hidden_size": 64, "num_layers": 2, "num_heads": 4,
                "attention_types": [[["global", "local"], 1]]},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64},
    "jetmoe": SIZES | {"kv_channels": 16, "intermediate_size": 40, "num_local_experts": 4},
    "opt": SIZES | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "rembert": SIZES | {"intermediate_size": 96, "input_embedding_size": 64},
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96},
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
          "num_attention_heads": 4, "image_size": 16, "patch_size": 8}  # fmt: skip


def made(kind: str, **chosen: Any) -> Any:
    config = transformers.AutoConfig.for_model(
        kind, **{"vocab_size": 99} | OLD.get(kind, SIZES | MODELS.get(kind, {}))
    )
    return transformers.AutoModel.from_config(config, **chosen).eval()


# ---- attention --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "model", "why", "accepted"),
    [
        ("bloom", "BloomModel", "whose BloomAttention asks for no implementation", '"eager"'),
        ("xglm", "XGLMModel", "whose XGLMAttention asks for no implementation", '"eager"'),
        ("falcon", "FalconModel", "which builds its attention from FALCON_ATTENTION_CLASSES",
         '"eager", "sdpa", "flash_attention_2"'),
        ("gpt_neo", "GPTNeoModel", "which builds its attention from GPT_NEO_ATTENTION_CLASSES",
         '"eager", "flash_attention_2"'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["flashmoe", "fmoe"])
def test_attention_that_asks_for_nothing_is_refused(
    name: str, kind: str, model: str, why: str, accepted: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        made(kind, attn_implementation=name)
    sentence = str(caught.value)
    assert sentence.startswith(f'attn_implementation: got "flashmoe" for {model}, {why}')
    assert sentence.endswith(f"accepted are {accepted}")


@pytest.mark.parametrize("kind", ["bloom", "xglm", "falcon", "gpt_neo"])
@pytest.mark.parametrize("given", ["flashmoe", {"": "flashmoe"}], ids=str)
def test_attention_that_asks_for_nothing_cannot_be_set(kind: str, given: Any) -> None:
    stock = made(kind)
    before = stock.config._attn_implementation
    with pytest.raises(InvalidArgumentError, match=r'^attn_implementation: got "flashmoe" for '):
        stock.set_attn_implementation(given)
    assert stock.config._attn_implementation == before
    stock(TOKENS)  # and it runs on


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """How often a model that is made with a name of the test's own calls what has that name."""
    calls: list[str] = []

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        calls.append("attention")
        return v.new_zeros(len(q), q.shape[2], q.shape[1], v.shape[3]), None

    def experts(module: Any, hidden: Any, *routing: Any) -> Any:
        calls.append("experts")
        return torch.zeros_like(hidden)

    monkeypatch.setitem(AttentionInterface._global_mapping, "probe", attention)
    monkeypatch.setitem(ExpertsInterface._global_mapping, "probe", experts)
    monkeypatch.setitem(
        AttentionMaskInterface._global_mapping,
        "probe",
        AttentionMaskInterface._global_mapping["sdpa"],
    )

    def count(kind: str, argument: str) -> int:
        calls.clear()
        try:
            model = made(kind, **{argument: "probe"})
        except KeyError:
            return 0
        run_once(model)
        return len(calls)

    return count


@torch.no_grad()
def run_once(model: Any) -> None:
    decoding = {"decoder_input_ids": TOKENS} if model.config.is_encoder_decoder else {}
    model(TOKENS, **decoding)


@pytest.mark.parametrize("kind", [*OLD, "bert", "gemma2", "llama"])
def test_what_is_accepted_is_called_and_what_is_not_is_refused(kind: str, run: Any) -> None:
    """In any release of transformers: from one to the next, models change sides."""
    wanted = run(kind, "attn_implementation")
    if wanted:
        run_once(made(kind, attn_implementation="flashmoe"))
        layers = hf.report().layers
        assert sum(layer.ours + sum(layer.stock.values()) for layer in layers) == wanted
        assert all(layer.ours or layer.stock for layer in layers)
    else:
        with pytest.raises(InvalidArgumentError, match=r'^attn_implementation: got "flashmoe"'):
            made(kind, attn_implementation="flashmoe")


class Config(PreTrainedConfig):  # type: ignore[misc]
    model_type = "tested"

    def __init__(self, hidden_size: int = 8, **options: Any) -> None:
        self.hidden_size = hidden_size
        super().__init__(**options)


ALL_ATTENTION_FUNCTIONS = AttentionInterface()  # as models have that replace one function


class AskingAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    @torch.no_grad()  # a decorator hides the function
    def forward(self, x: Any) -> Any:
        name = self.config._attn_implementation
        (ask,) = [ALL_ATTENTION_FUNCTIONS.get_interface(name, None) for _ in range(1)]
        q = x[:, None]
        return ask(self, q, q, q, None)[0][:, :, 0]


class OwnAttention(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Plain(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def model_of(*layers: type, part: Any = None) -> type:
    """A model's class of such layers, and of another model in it."""

    class Model(PreTrainedModel):  # type: ignore[misc]
        config_class = Config

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            made = [layer(config) if layer is AskingAttention else layer() for layer in layers]
            self.layers = nn.ModuleList(made)
            if part is not None:
                self.part = part(config)
            self.post_init()

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x if part is None else self.part(x)

    return Model


def ours() -> Config:
    config = Config()
    config._attn_implementation = "flashmoe"
    return config


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (model_of(Plain), "no layer of which asks for an"),
        (model_of(OwnAttention), "whose OwnAttention asks for no"),
        (model_of(Plain, part=model_of(Plain)), "no layer of which asks for an"),
        (model_of(AskingAttention, part=model_of(OwnAttention)), "whose OwnAttention asks for no"),
    ],
)
def test_a_model_without_a_layer_that_asks(model: Any, why: str) -> None:
    with pytest.raises(
        InvalidArgumentError,
        match=f'^attn_implementation: got "flashmoe" for Model( in Model)?, {why} implementation',
    ):
        model(ours())
    stock = model(Config())
    with pytest.raises(InvalidArgumentError, match=why):
        stock.set_attn_implementation("flashmoe")
    assert stock.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "model",
    [
        model_of(AskingAttention),
        model_of(AskingAttention, Plain),
        model_of(AskingAttention, part=model_of(Plain)),  # a vision model of convolutions, say
        model_of(Plain, part=model_of(AskingAttention)),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_model_with_a_layer_that_asks(late: bool, model: Any) -> None:
    made = model(Config() if late else ours())
    if late:
        made.set_attn_implementation("flashmoe")
    made(torch.randn(1, 5, 8))
    (layer,) = hf.report().layers
    assert layer.ours == 1
    assert layer.model == "Model"
    assert layer.name in ("layers.0", "part.layers.0")


def test_a_layer_beside_others_that_asks_for_nothing_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = model_of(AskingAttention, OwnAttention)(ours())
    assert said(caplog) == [f"{STOCK_ATTENTION}OwnAttention asks for no implementation"]
    assert hf.report().without_choice == ("Model: OwnAttention",)
    del model


def test_a_refused_part_names_the_choice_by_part() -> None:
    """A vision model with attention of its own beside a text model that asks."""
    config = transformers.LlavaConfig(
        vision_config=transformers.VitDetConfig(**VISION),
        text_config=transformers.LlamaConfig(**SIZES | MODELS["llama"]),
    )
    build = transformers.LlavaForConditionalGeneration._from_config
    hint = (
        r"VitDetModel in Llava\w+, whose VitDetAttention .*; other parts are chosen by a dict, as "
        r'\{"text_config": "flashmoe"\}$'
    )
    with pytest.raises(InvalidArgumentError, match=hint):
        build(copy.deepcopy(config), attn_implementation="flashmoe")
    stock = build(copy.deepcopy(config))
    with pytest.raises(InvalidArgumentError, match=hint):
        stock.set_attn_implementation("flashmoe")
    assert stock.config.text_config._attn_implementation == "sdpa"  # and nothing was set
    stock.set_attn_implementation({"text_config": "flashmoe"})
    logits(stock.eval())
    made = build(copy.deepcopy(config), attn_implementation={"text_config": "flashmoe"})
    logits(made.eval())
    assert hf.report().ours == 4


def test_names_may_be_given_as_keywords() -> None:
    """Also for models that never meet FlashMoE."""
    model = make("llama", moe=False)
    model.set_attn_implementation(attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation(attn_implementation="flashmoe")
    assert model.config._attn_implementation == "fmoe"
    assert model.get_correct_attn_implementation(requested_attention="sdpa") == "sdpa"
    experts = make("mixtral", moe=True)
    experts.set_experts_implementation(experts_implementation="eager")
    assert experts.config._experts_implementation == "eager"
    with pytest.raises(TypeError, match="missing a required argument: 'attn_implementation'"):
        model.set_attn_implementation()


@pytest.mark.parametrize("name", ["paged|flashmoe", "paged|fmoe"])
def test_a_name_for_continuous_batching_is_ours(name: str) -> None:
    """An older transformers sets it by itself, a newer one leaves out the word."""
    model = make("llama", moe=False)
    expected = logits(model)
    for given in (name, {"": name}):
        model.set_attn_implementation("eager")
        model.set_attn_implementation(given)
        assert model.config._attn_implementation in ("fmoe", "paged|fmoe")
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
    assert (hf.report().ours, hf.report().stock) == (2, 0)


# ---- experts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "model", "why"),
    [
        ("llama4_text", "Llama4TextModel", "whose Llama4TextExperts asks for no"),
        ("jetmoe", "JetMoeModel", "whose JetMoeParallelExperts asks for no"),
        ("llama", "LlamaModel", "no layer of which asks for an"),
    ],
)
def test_experts_that_ask_for_nothing_are_refused(kind: str, model: str, why: str) -> None:
    sentence = (
        f'^experts_implementation: got "flashmoe" for {model}, {why} implementation of '
        'experts; accepted are "eager"$'
    )
    with pytest.raises(InvalidArgumentError, match=sentence):
        made(kind, experts_implementation="flashmoe")
    stock = made(kind)
    before = stock.config._experts_implementation
    for given in ("flashmoe", {"": "flashmoe"}):
        with pytest.raises(InvalidArgumentError, match=sentence):
            stock.set_experts_implementation(given)
        assert stock.config._experts_implementation == before


@pytest.mark.parametrize("kind", ["gpt_oss", "jetmoe", "llama4_text", "mixtral", "qwen3_moe"])
def test_experts_that_are_accepted_are_called(kind: str, run: Any) -> None:
    wanted = run(kind, "experts_implementation")
    if wanted:
        run_once(made(kind, experts_implementation="flashmoe"))
        layers = [layer for layer in hf.report().layers if layer.operation == "experts"]
        assert sum(layer.ours + sum(layer.stock.values()) for layer in layers) == wanted
    else:
        with pytest.raises(InvalidArgumentError, match=r'^experts_implementation: got "flashmoe"'):
            made(kind, experts_implementation="flashmoe")


@pytest.mark.parametrize("given", ["flashmoe", {"text_config": "flashmoe"}], ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_a_part_without_experts_is_none_to_refuse(late: bool, given: Any) -> None:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.MixtralConfig(**SIZES | MODELS["mixtral"]),
    )
    chosen = {} if late else {"experts_implementation": given}
    model = transformers.LlavaForConditionalGeneration._from_config(config, **chosen).eval()
    if late:
        model.set_experts_implementation(given)
    logits(model)
    assert hf.report().ours == 2


def test_classes_are_known_by_what_their_code_refers_to() -> None:
    attention = importlib.import_module("transformers.models.llama.modeling_llama").LlamaAttention
    experts = importlib.import_module("transformers.models.mixtral.modeling_mixtral").MixtralExperts
    assert _models._asks(attention, ATTENTION)
    assert not _models._asks(attention, EXPERTS)
    assert _models._asks(experts, EXPERTS)
    assert not _models._asks(experts, ATTENTION)
    assert not _models._asks(PreTrainedModel, ATTENTION)  # which checks the names that are given


def test_a_refused_head_names_the_model_that_was_asked_for() -> None:
    config = transformers.AutoConfig.for_model("bloom", **OLD["bloom"])
    with pytest.raises(InvalidArgumentError) as caught:
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flashmoe")
    assert 'got "flashmoe" for BloomModel in BloomForCausalLM, whose' in str(caught.value)
    assert "dict" not in str(caught.value)  # which knows no parts


def test_the_documented_refusal() -> None:
    page = Path(__file__).parents[2] / "docs" / "huggingface.md"
    config = transformers.AutoConfig.for_model("bloom", **OLD["bloom"])
    with pytest.raises(InvalidArgumentError) as caught:
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flashmoe")
    assert f"\n{caught.value}\n" in page.read_text(encoding="utf-8")


def test_a_closure_that_is_not_filled_yet_refers_to_nothing() -> None:
    def wrapped(function: Any) -> Any:
        def forward(self: Any, x: Any) -> Any:
            return function(self, x) if later is None else x

        if function is None:
            later = None
        return forward

    kind = type("OddAttention", (nn.Module,), {"forward": wrapped(OwnAttention.forward)})
    assert not _models._asks(kind, ATTENTION)
