"""transformers' models train with our attention as they do with the stock one.

In fp32 on the CPU and in bf16 on the GPU, beside the same model in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

import flashmoe_science  # noqa: E402
from flashmoe_science import hf  # noqa: E402
from hf_models import SIZES, STOCK_ATTENTION, TOKENS, make, said, with_ours  # noqa: E402
from torch_calls import refuse_gradients  # noqa: E402
from torch_training import Case, needs_gradients  # noqa: E402

STEPS = 20
HEADS = Case("of these models", dim=16, dim_v=16)


def encoder(**given: Any) -> Any:
    """BERT with a head that predicts tokens."""
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**SIZES, intermediate_size=96, **dropout | given)
    torch.manual_seed(1)
    return transformers.BertForMaskedLM._from_config(config, attn_implementation="eager")


def decoder_behind_encoder() -> Any:
    config = transformers.BartConfig(
        vocab_size=99, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.BartForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    )


# By name the model, and its layers' calls of attention.
MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "llama": (lambda: make("llama", moe=False), 2),  # grouped heads
    "bert": (encoder, 2),
    "bart": (decoder_behind_encoder, 3),  # attention across
    "mistral": (lambda: make("mistral", moe=False, sliding_window=5), 2),
    "gemma2": (lambda: make("gemma2", moe=False, sliding_window=5), 2),  # softcap
}


def in_float64(model: Any) -> Any:
    """By SDPA where the model has that, since eager attention rounds to fp32."""
    made = copy.deepcopy(model).double()
    if made._supports_sdpa and getattr(made.config, "attn_logit_softcapping", None) is None:
        made.set_attn_implementation("sdpa")
    return made


def by_ours(model: Any) -> Any:
    return with_ours(model, moe=False)


def train(model: Any) -> torch.Tensor:
    """The losses of some steps, [STEPS]."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(STEPS):
        begins = torch.randint(96, (4, 1), generator=generator)
        tokens = (3 + (begins + torch.arange(24)) % 96).to(model.device)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().double())
    return torch.stack(losses).cpu()


def gradients(model: Any, **inputs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    tokens = TOKENS.to(model.device)
    model(**{"input_ids": tokens, "labels": tokens} | inputs).loss.backward()
    return {n: p.grad.double().cpu() for n, p in model.named_parameters() if p.grad is not None}


def ulp(reference: torch.Tensor, dtype: torch.dtype = torch.float32) -> float:
    largest = reference.abs().max().item()
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest))


DEVICES = pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)],
    ids=str,
)


@DEVICES
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_losses_follow_the_stock_ones(
    kind: str, device: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """max|ours - float64's| <= 2 max|stock - float64's| + ulp, where stock is torch's SDPA or eager
    attention: rounding that adds up over the steps is more with one today, with the other
    tomorrow."""
    needs_gradients(device, HEADS)
    made, calls = MODELS[kind]
    eager = made().to(device, dtype)
    sdpa = copy.deepcopy(eager)
    sdpa.set_attn_implementation("sdpa")
    reference = train(in_float64(eager))
    ours = train(by_ours(eager))
    assert reference[-1] < reference[0] - 0.1
    allowed = max((train(stock) - reference).abs().max().item() for stock in (eager, sdpa))
    assert (ours - reference).abs().max().item() <= 2 * allowed + ulp(reference, dtype)
    assert (hf.report().ours, hf.report().stock) == (STEPS * calls, 0)
    assert said(caplog) == []


@DEVICES
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_the_stock_models(kind: str, device: str, dtype: torch.dtype) -> None:
    """Compares the gradients of every parameter."""
    needs_gradients(device, HEADS)
    made, calls = MODELS[kind]
    stock = made().to(device, dtype)
    reference = gradients(in_float64(stock))
    ours = gradients(by_ours(stock))
    assert hf.report().ours == calls
    plain = gradients(stock)
    assert ours.keys() == reference.keys() == plain.keys()
    # A gradient that is 0 except for rounding, such as a key bias's, takes the largest unit of all.
    least = max(ulp(gradient, dtype) for gradient in reference.values())
    for name, want in reference.items():
        error, usual = ((x[name] - want).abs().max().item() for x in (ours, plain))
        assert error <= 2 * usual + least, name


def test_sinks_are_trained() -> None:
    """gpt-oss's."""
    stock = make("gpt_oss")
    ours, want = gradients(by_ours(stock)), gradients(stock)
    assert ours["model.layers.0.self_attn.sinks"].shape == (4,)
    for name, gradient in want.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-5, rtol=1e-4)
    assert (hf.report().ours, hf.report().stock) == (2, 0)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_checkpoints_recompute_the_same_bits(kind: str, use_reentrant: bool) -> None:
    made, calls = MODELS[kind]
    model = by_ours(made()).train()
    want = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    hf.reset_report()
    got = gradients(model, **({} if kind == "bert" else {"use_cache": False}))
    assert (hf.report().ours, hf.report().stock) == (2 * calls, 0)
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())


def assert_same_gradients(model: Any, **inputs: Any) -> None:
    # Which has memory that is not written hold NaN.
    torch.use_deterministic_algorithms(True)
    try:
        ours = gradients(by_ours(model), **inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, want in gradients(model, **inputs).items():
        torch.testing.assert_close(ours[name], want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("padded", [slice(8, None), slice(0, 3)], ids=["right", "left"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "bert"])
def test_padded_batches_are_trained_by_ours(
    kind: str, padded: slice, caplog: pytest.LogCaptureFixture
) -> None:
    made, calls = MODELS[kind]
    mask = torch.ones_like(TOKENS)
    mask[0, padded] = 0
    labels = TOKENS.where(mask.bool(), -100)
    if kind != "bert":  # of a first token padding is no context: eager attention has it see all
        labels[0, 3 if padded.start == 0 else 0] = -100
    assert_same_gradients(made(), attention_mask=mask, labels=labels)
    assert said(caplog) == []
    assert (hf.report().ours, hf.report().stock) == (calls, 0)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_packed_rows_are_trained_by_ours(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    made, calls = MODELS[kind]
    at = torch.arange(11)
    places = torch.stack([at.where(at < 4, at - 4), at.where(at < 9, at - 9)])
    labels = TOKENS.where(places > 0, -100)
    assert_same_gradients(made(), position_ids=places, labels=labels, use_cache=False)
    assert said(caplog) == []
    assert (hf.report().ours, hf.report().stock) == (calls, 0)


def test_padding_between_tokens_is_trained_by_ours(caplog: pytest.LogCaptureFixture) -> None:
    mask = torch.ones_like(TOKENS)
    mask[0, 4:6] = 0
    labels = TOKENS.where(mask.bool(), -100)
    assert_same_gradients(make("llama", moe=False), attention_mask=mask, labels=labels)
    assert said(caplog) == []
    assert (hf.report().ours, hf.report().stock) == (2, 0)


def test_dropout_in_training_goes_to_the_stock_attention(caplog: pytest.LogCaptureFixture) -> None:
    stock = encoder(attention_probs_dropout_prob=0.3)
    ours = by_ours(stock)
    made = []
    for model in (ours.train(), stock.train()):
        model.set_attn_implementation(hf.NAME if model is ours else "sdpa")
        torch.manual_seed(2)
        made.append(gradients(model))
    assert all(torch.equal(made[0][name], want) for name, want in made[1].items())
    assert said(caplog) == [f"{STOCK_ATTENTION}there is dropout"]
    gradients(ours.eval())
    assert (hf.report().ours, hf.report().stock) == (2, 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_that_no_kernel_computes_go_to_the_stock_attention(
    compiled: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_gradients(monkeypatch, dim=16)
    torch._dynamo.reset()
    stock = make("llama", moe=False)
    ours = by_ours(stock)
    if compiled:
        torch.compile(ours, fullgraph=True, backend="aot_eager")(
            input_ids=TOKENS, labels=TOKENS
        ).loss.backward()
        got = {n: p.grad.double() for n, p in ours.named_parameters()}
    else:
        got = gradients(ours)
    for name, want in gradients(stock).items():
        torch.testing.assert_close(got[name], want, atol=1e-5, rtol=1e-4)
    (reason,) = said(caplog)
    assert reason.startswith(STOCK_ATTENTION)
    assert "no kernel computes the gradients of this call (sm0: head dimension 16)" in reason
    assert compiled or (hf.report().ours, hf.report().stock) == (0, 2)


def test_under_autocast() -> None:
    """bf16 as torch's autocast of the CPU has it, weights and gradients in fp32."""
    stock = make("llama", moe=False)
    stock.set_attn_implementation("sdpa")
    reference = gradients(in_float64(stock))
    with torch.autocast("cpu", torch.bfloat16):
        ours, plain = gradients(by_ours(stock)), gradients(stock)
    assert (hf.report().ours, hf.report().stock) == (2, 0)
    for name, want in reference.items():
        error, usual = ((x[name] - want).abs().max() for x in (ours, plain))
        assert error <= 2 * usual + 2.0**16 * ulp(want), name  # bf16's


def test_a_compiled_model_trains_in_one_graph() -> None:
    """With a cache, without which transformers makes a mask that a graph cannot look into."""
    ours = by_ours(make("llama", moe=False))
    want = gradients(ours)
    torch._dynamo.reset()
    ours.zero_grad()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    compiled(input_ids=TOKENS, labels=TOKENS).loss.backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), want[name], atol=1e-5, rtol=1e-4)
    assert [layer.ours > 0 for layer in hf.report().compiled] == [True]


EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_follow_the_stock_loss(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    stock = make(kind)
    ours = copy.deepcopy(stock)
    ours.set_experts_implementation(hf.NAME)
    hf.reset_report()
    losses, expected = train(ours), train(stock)
    assert expected[-1] < expected[0] - 0.1
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3)
    assert hf.report().stock == 0
    assert hf.report().ours >= STEPS
    assert said(caplog) == []


def layers_of(model: Any) -> int:
    """The number of layers that have experts."""
    config = model.config
    return int(config.num_hidden_layers - getattr(config, "first_k_dense_replace", 0))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", EXPERTS)
def test_checkpoints_recompute_the_bits_of_experts(kind: str, use_reentrant: bool) -> None:
    model = make(kind).train()
    model.set_experts_implementation(hf.NAME)
    want, saved = gradients(model), saved_bytes(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    hf.reset_report()
    got = gradients(model, use_cache=False)
    # Without reentrance a layer is left as soon as all that was saved is there again: in our call.
    assert layers_of(model) <= hf.report().ours <= 2 * layers_of(model)
    assert hf.report().stock == 0
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())
    assert saved_bytes(model) < saved / 2


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_under_autocast(kind: str) -> None:
    """In bf16 as in torch's CPU autocast, with weights and gradients in fp32: as near as the stock
    implementation. Uses one layer, since the next one's routing may hinge on a rounding."""
    stock = make(kind, num_hidden_layers=2 if kind == "deepseek_v3" else 1).train()
    ours = copy.deepcopy(stock)
    ours.set_experts_implementation(hf.NAME)
    want = gradients(in_float64(stock))
    hf.reset_report()
    with torch.autocast("cpu", torch.bfloat16):
        expected, made = gradients(stock), gradients(ours)
    assert (hf.report().ours, hf.report().stock) == (layers_of(ours), 0)
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters() if p.grad is not None)
    assert made.keys() == want.keys()
    for name, gradient in made.items():
        size = want[name].norm()
        error, ordinary = (gradient - want[name]).norm(), (expected[name] - want[name]).norm()
        assert error <= 2 * ordinary + 0.02 * size, name


def test_the_workspace_of_experts_gradients_is_bounded() -> None:
    """One that is too low is told of; one that is not gives the same bits."""
    model = make("mixtral")
    model.set_experts_implementation(hf.NAME)
    want = gradients(model)
    try:
        hf.register(max_workspace_bytes=1)
        with pytest.raises(flashmoe_science.UnsupportedError, match="max_workspace_bytes: got 1, "):
            gradients(model)
        hf.register(max_workspace_bytes=1 << 30)
        for name, gradient in gradients(model).items():
            assert torch.equal(gradient, want[name]), name
        for bound in (0, 1 << 70):
            told = rf"^max_workspace_bytes: got {bound}, accepted are 1 to 2\*\*63 - 1, or None"
            with pytest.raises(ValueError, match=told):
                hf.register(max_workspace_bytes=bound)
    finally:
        hf.register()


@pytest.mark.parametrize(
    ("given", "got", "accepted"),
    [
        ({"max_workspace_bytes": 1.5}, "1.5 of type float", "1 to 2**63 - 1, or None"),
        ({"max_workspace_bytes": True}, "True of type bool", "1 to 2**63 - 1, or None"),
        ({"max_workspace_bytes": "1"}, "'1' of type str", "1 to 2**63 - 1, or None"),
        ({"recompute": "no"}, "'no' of type str", "False and True"),
    ],
    ids=str,
)
def test_options_of_a_wrong_type_are_refused_when_given(
    given: dict[str, Any], got: str, accepted: str
) -> None:
    [name] = given
    with pytest.raises(TypeError) as refused:
        hf.register(**given)
    assert str(refused.value).startswith(f"{name}: got {got}, accepted are {accepted}")


def saved_bytes(model: Any) -> int:
    """What a step saves, each memory once."""
    kept: dict[int, int] = {}

    def pack(x: Any) -> Any:
        kept[x.data_ptr()] = x.nbytes
        return x

    tokens = TOKENS.to(model.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        held = model(tokens, labels=tokens)
    del held
    return sum(kept.values())


def test_experts_gradients_are_recomputed() -> None:
    """From inputs alone, to the same bits."""
    model = make("mixtral")
    model.set_experts_implementation(hf.NAME)
    want, saved = gradients(model), saved_bytes(model)
    try:
        hf.register(recompute=True)
        for name, gradient in gradients(model).items():
            assert torch.equal(gradient, want[name]), name
        pairs = TOKENS.numel() * model.config.num_experts_per_tok
        each = 2 * model.config.intermediate_size * 4 * pairs
        assert saved - saved_bytes(model) == each * model.config.num_hidden_layers
    finally:
        hf.register()
