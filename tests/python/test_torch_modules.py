"""Modules of flashmoe_science.torch: the weights and the results of torch's and transformers'."""

from __future__ import annotations

import copy
import re
from typing import Any

import flashmoe_science as fm
import moe_oracle
import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import flashmoe_science.torch as fmt  # noqa: E402


def normal(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- MultiheadAttention ----


def pair(**options: Any) -> tuple[Any, Any]:
    """torch's module, and ours with its state dict."""
    torch.manual_seed(0)
    stock = torch.nn.MultiheadAttention(32, 2, **options).eval()
    if stock.in_proj_bias is not None:
        torch.nn.init.normal_(stock.in_proj_bias)
        torch.nn.init.normal_(stock.out_proj.bias)
    ours = fmt.MultiheadAttention(32, 2, **options).eval()
    assert ours.load_state_dict(stock.state_dict()) == ours.load_state_dict(stock.state_dict())
    assert list(ours.state_dict()) == list(stock.state_dict())
    return stock, ours


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_self_attention(is_causal: bool, bias: bool, batch_first: bool) -> None:
    stock, ours = pair(bias=bias, batch_first=batch_first)
    x = normal(5, 5, 32)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5) if is_causal else None
    with torch.no_grad():
        want, _ = stock(x, x, x, need_weights=False, attn_mask=mask, is_causal=is_causal)
        for given in (mask, None):
            got, weights = ours(x, x, x, attn_mask=given, is_causal=is_causal)
            assert weights is None
            assert got.shape == want.shape
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("options", [{}, {"kdim": 24, "vdim": 40}, {"batch_first": True}], ids=str)
def test_cross_attention(options: dict[str, Any]) -> None:
    stock, ours = pair(**options)
    batch_axis = 0 if options.get("batch_first") else 1
    q = normal(7, 3, 32)
    k, v = normal(9, 3, options.get("kdim", 32), seed=1), normal(9, 3, options.get("vdim", 32))
    if batch_axis == 0:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    with torch.no_grad():
        want, _ = stock(q, k, v, need_weights=False)
        torch.testing.assert_close(ours(q, k, v)[0], want)
        one = [x.select(batch_axis, 0) for x in (q, k, v)]
        torch.testing.assert_close(ours(*one)[0], stock(*one, need_weights=False)[0])


def test_inside_an_encoder_layer() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True).eval()
    x = normal(2, 9, 32)
    calls = []
    with torch.no_grad():
        want = layer(x)
        ours = fmt.MultiheadAttention(32, 2, batch_first=True).eval()
        ours.load_state_dict(layer.self_attn.state_dict())
        ours.register_forward_hook(lambda *_: calls.append(1))
        layer.self_attn = ours
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            torch.testing.assert_close(layer(x), want)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert calls == [1]


def hiding(kind: str, *shape: int, seed: int) -> Any:
    """A mask of torch's: True, or -inf among numbers, hides a key; the first is seen by all."""
    hidden = normal(*shape, seed=seed) > 0.3
    hidden[..., 0] = False
    if kind == "bool":
        return hidden
    return normal(*shape, seed=seed + 1).masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("of_heads", [False, True])
@pytest.mark.parametrize("of_pairs", [None, "bool", "numbers"])
@pytest.mark.parametrize("of_keys", [None, "bool", "numbers"])
def test_masks(
    of_keys: str | None, of_pairs: str | None, of_heads: bool, batch_first: bool
) -> None:
    stock, ours = pair(batch_first=batch_first)
    q, k = normal(3, 7, 32), normal(3, 9, 32, seed=1)
    if not batch_first:
        q, k = q.transpose(0, 1), k.transpose(0, 1)
    masks: dict[str, Any] = {}
    if of_keys is not None:
        masks["key_padding_mask"] = hiding(of_keys, 3, 9, seed=2)
    if of_pairs is not None:
        shape = (3 * 2, 7, 9) if of_heads else (7, 9)
        masks["attn_mask"] = hiding(of_pairs, *shape, seed=4)
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    got, _ = ours(leaves[0], leaves[1], leaves[1], **masks)
    if of_keys != of_pairs and None not in (of_keys, of_pairs):  # which torch is to deprecate
        masks = {name: mask if mask.dtype != torch.bool else
                 torch.zeros(mask.shape).masked_fill(mask, -torch.inf)
                 for name, mask in masks.items()}  # fmt: skip
    want, _ = stock(q.requires_grad_(), k.requires_grad_(), k, need_weights=False, **masks)
    torch.testing.assert_close(got, want)
    dout = normal(*want.shape, seed=6)
    made = torch.autograd.grad(got, [*leaves, *ours.parameters()], dout)
    stocks = torch.autograd.grad(want, [q, k, *stock.parameters()], dout)
    for ours_dx, stock_dx in zip(made, stocks, strict=True):
        torch.testing.assert_close(ours_dx, stock_dx, atol=2e-5, rtol=1e-4)


def test_masks_without_a_batch() -> None:
    stock, ours = pair()
    q, k = normal(7, 32), normal(9, 32, seed=1)
    masks = {"key_padding_mask": hiding("bool", 9, seed=2),
             "attn_mask": hiding("bool", 2, 7, 9, seed=4)}  # fmt: skip
    with torch.no_grad():
        want, _ = stock(q, k, k, need_weights=False, **masks)
        torch.testing.assert_close(ours(q, k, k, **masks)[0], want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_masks_of_other_dtypes(dtype: Any) -> None:
    """Masks of a dtype that attention does not take with its tensors, and under autocast."""
    stock, ours = pair(batch_first=True)
    x, mask = normal(3, 7, 32), hiding("numbers", 7, 7, seed=4).to(dtype)
    with torch.no_grad():
        want, _ = stock(x, x, x, need_weights=False, attn_mask=mask.float())
        torch.testing.assert_close(ours(x, x, x, attn_mask=mask)[0], want)
        with torch.autocast("cpu", dtype=torch.float16):
            half = ours(x, x, x, attn_mask=mask)[0]
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), want, atol=2e-2, rtol=2e-2)


def test_padding_of_a_causal_call() -> None:
    stock, ours = pair(batch_first=True)
    x, padding = normal(3, 7, 32), torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = padding[2, 2:] = True
    mask = torch.triu(torch.ones(7, 7, dtype=torch.bool), 1)
    with torch.no_grad():
        want, _ = stock(x, x, x, padding, need_weights=False, attn_mask=mask, is_causal=True)
        for given in (mask, None):
            got, _ = ours(x, x, x, padding, attn_mask=given, is_causal=True)
            torch.testing.assert_close(got, want)


def test_a_query_of_which_all_keys_are_hidden() -> None:
    _, ours = pair(batch_first=True)
    x, padding = normal(2, 7, 32), torch.tensor([[False], [True]]).expand(2, 7)
    with torch.no_grad():
        got, _ = ours(x, x, x, padding)
        assert torch.equal(got[1], ours.out_proj.bias.expand(7, 32))


def test_masks_inside_torchs_encoder_and_decoder() -> None:
    torch.manual_seed(0)
    stock = torch.nn.Transformer(
        32, 2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=48, dropout=0.0,
        batch_first=True,
    )  # fmt: skip
    ours = copy.deepcopy(stock)
    for layer in ours.modules():
        for name, module in list(layer.named_children()):
            if isinstance(module, torch.nn.MultiheadAttention):
                made = fmt.MultiheadAttention(32, 2, batch_first=True)
                made.load_state_dict(module.state_dict())
                setattr(layer, name, made)
    source, target = normal(2, 9, 32), normal(2, 5, 32, seed=1)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    causal = torch.nn.Transformer.generate_square_subsequent_mask(5)
    options = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding,
               "tgt_mask": causal, "tgt_is_causal": True}  # fmt: skip
    want, got = (model(source, target, **options) for model in (stock, ours))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_masks_in_one_graph() -> None:
    _, ours = pair(batch_first=True)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq in (7, 12):
        x, padding = normal(2, seq, 32), hiding("bool", 2, seq, seed=2)
        mask = hiding("numbers", seq, seq, seed=4)
        with torch.no_grad():
            got, want = (call(x, x, x, padding, attn_mask=mask)[0] for call in (compiled, ours))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"kdim": 24, "vdim": 40}, {"bias": False}], ids=str)
def test_attention_modules_train(options: dict[str, Any], is_causal: bool) -> None:
    """In float64: gradients of all parameters and inputs, and a step of an optimizer, are those of
    torch's module, whose math is written out where weights are asked for."""
    stock, ours = (module.double().train() for module in pair(batch_first=True, **options))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(7).double() if is_causal else None
    given = [normal(2, 7, options.get(name, 32), seed=i).double().requires_grad_()
             for i, name in enumerate(("", "kdim", "vdim"))]  # fmt: skip
    dout = normal(2, 7, 32, seed=3).double()
    want, _ = stock(*given, attn_mask=mask, need_weights=True)
    got, _ = ours(*given, is_causal=is_causal)
    torch.testing.assert_close(got, want)
    pairs = zip(
        torch.autograd.grad(got, [*given, *ours.parameters()], dout, retain_graph=True),
        torch.autograd.grad(want, [*given, *stock.parameters()], dout, retain_graph=True),
        strict=True,
    )
    for ours_dx, stock_dx in pairs:
        torch.testing.assert_close(ours_dx, stock_dx)
    for module, out in ((ours, got), (stock, want)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        (out * dout).sum().backward()
        optimizer.step()
    for name, trained in stock.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], trained)
    assert list(ours.state_dict()) == list(stock.state_dict())


def test_what_attention_modules_lack_is_refused_with_a_sentence() -> None:
    _, ours = pair(batch_first=True)
    x = normal(2, 9, 32)
    learned = torch.zeros(9, 9, requires_grad=True)
    for options, match in (
        ({"need_weights": True}, r"^need_weights: got True, accepted is False"),
        ({"attn_mask": learned}, r"^attn_mask: .*gradient"),
    ):
        with pytest.raises(NotImplementedError, match=match):
            ours(x, x, x, **options)
    with pytest.raises(NotImplementedError, match=r"^add_bias_kv: got True, accepted is False"):
        fmt.MultiheadAttention(32, 2, add_bias_kv=True)
    training = fmt.MultiheadAttention(32, 2, dropout=0.1)
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match=r"^dropout: got 0.1 in training"),
    ):
        training(x, x, x)
    with pytest.raises(ValueError, match=r"^query: got 4 dimensions, accepted are 2 or 3"):
        ours(x[None], x, x)
    for given, match in (
        ((x, x, x[:, :3]), r"^value: its sequence length is 3, but key has 9"),
        ((x, x[:1], x[:1]), r"^key: its batch is 1, but query has 2"),
    ):
        with pytest.raises(ValueError, match=match):
            ours(*given)


def test_masks_that_do_not_fit_are_refused_with_a_sentence() -> None:
    _, ours = pair(batch_first=True)
    x = normal(2, 9, 32)
    for options, error, sentence in (
        ({"key_padding_mask": torch.zeros(9, 2)}, ValueError,
         "key_padding_mask: got shape [9, 2], accepted is [2, 9]"),
        ({"attn_mask": torch.zeros(3, 9, 9)}, ValueError,
         "attn_mask: got shape [3, 9, 9], accepted are [9, 9] and [4, 9, 9]"),
        ({"attn_mask": torch.zeros(9, 9, dtype=torch.int32)}, TypeError,
         "attn_mask: got dtype torch.int32, accepted are torch.bool and dtypes of real numbers"),
        ({"key_padding_mask": [0] * 9}, TypeError,
         "key_padding_mask: got list, accepted are a torch.Tensor and None"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
            ours(x, x, x, **options)


# ---- FlashMoELayer ----


def reference(layer: Any, x: Any) -> Any:
    """In float64, by the oracle of the tests."""
    rows = x.flatten(0, -2)
    router, experts = layer.gate, layer.experts
    logits = torch.nn.functional.linear(rows, router.weight, router.bias)
    options = layer.options
    names = ("scoring", "renormalize", "num_groups", "top_groups", "scale")
    bias = router.e_score_correction_bias
    routing = moe_oracle.route(
        logits.numpy(), layer.top_k, **{n: options[n] for n in names if options[n] is not None},
        **({} if bias is None else {"selection_bias": bias.numpy()}),
    )  # fmt: skip
    up, down = getattr(experts, experts.up_name), experts.down_proj
    if layer.transposed:
        up, down = up.mT, down.mT
    b_up = getattr(experts, f"{experts.up_name}_bias")
    names = ("gate", "activation", "alpha", "limit", "up_offset", "weight_on_input")
    rows, up, down, b_up, b_down = (
        None if t is None else t.numpy() for t in (rows, up, down, b_up, experts.down_proj_bias)
    )
    made = moe_oracle.forward_float64(
        rows, up, down, routing, b_gate_up=b_up, b_down=b_down, **{n: options[n] for n in names}
    )
    return torch.from_numpy(made.out).view(x.shape)


LAYERS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mixtral": {"scoring": "topk_softmax", "renormalize": False},
    "gpt-oss": {
        "scoring": "topk_softmax", "renormalize": False, "router_bias": True, "expert_bias": True,
        "gate": "interleaved", "transposed": True, "alpha": 1.702, "limit": 7.0, "up_offset": 1.0,
    },
    "deepseek-v3": {
        "scoring": "sigmoid", "selection_bias": True, "num_groups": 4, "top_groups": 2,
        "scale": 2.5,
    },
    "llama4": {
        "scoring": "sigmoid", "renormalize": False, "weight_on_input": True, "transposed": True,
    },
    "nemotron": {"gate": "none", "activation": "relu2"},
}  # fmt: skip
NAMED = pytest.mark.parametrize("name", LAYERS)


def layer_of(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = fmt.FlashMoELayer(32, 24, 8, 2, **LAYERS[name] | options)
    if layer.gate.e_score_correction_bias is not None:
        layer.gate.e_score_correction_bias.uniform_(-0.3, 0.3)
    return layer


@NAMED
def test_layer(name: str) -> None:
    layer, x = layer_of(name), normal(2, 7, 32)
    with torch.no_grad():
        got = layer(x)
        torch.testing.assert_close(got, reference(layer, x).float(), atol=1e-4, rtol=1e-4)
    again = fmt.FlashMoELayer(32, 24, 8, 2, **LAYERS[name])
    again.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert torch.equal(again(x), got)


def test_names_and_shapes_are_transformers() -> None:
    assert {n: tuple(p.shape) for n, p in layer_of("qwen3").state_dict().items()} == {
        "gate.weight": (8, 32),
        "experts.gate_up_proj": (8, 48, 32),
        "experts.down_proj": (8, 32, 24),
    }
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.AutoConfig.for_model(
        "qwen3_moe", hidden_size=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
        norm_topk_prob=True,
    )  # fmt: skip
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config._experts_implementation = "eager"
    stock = Qwen3MoeSparseMoeBlock(config).eval()
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    layer = fmt.FlashMoELayer(32, 24, 8, 2)
    layer.load_state_dict(stock.state_dict())
    x = normal(2, 7, 32)
    with torch.no_grad():
        want = stock(x)
        want = want[0] if isinstance(want, tuple) else want
        torch.testing.assert_close(layer(x), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
@pytest.mark.parametrize(
    "options", [{}, {"gate": "up_gate"}, {"gate": "interleaved", "transposed": True}], ids=str
)
def test_tensors_of_single_experts_are_stacked(
    options: dict[str, Any], names: tuple[str, str, str]
) -> None:
    gate, up = normal(8, 24, 32) / 6, normal(8, 24, 32, seed=1) / 6
    down = normal(8, 32, 24, seed=2) / 5
    state = {"block.gate.weight": normal(8, 32)}
    for e in range(8):
        for name, matrix in zip(names, (gate[e], up[e], down[e]), strict=True):
            state[f"block.experts.{e}.{name}.weight"] = matrix
    model = torch.nn.ModuleDict({"block": fmt.FlashMoELayer(32, 24, 8, 2, **options)})
    model.load_state_dict(state)
    x = normal(5, 32, seed=3)
    routing = fm.moe_route(x @ state["block.gate.weight"].T, 2, renormalize=True)
    want = fm.moe_forward(x, gate, down, routing, gate="separate", w_up=up)
    with torch.no_grad():
        torch.testing.assert_close(model["block"](x), want)
    with pytest.raises(ValueError, match=r"^state_dict: got tensors of the experts .* all 6$"):
        torch.nn.ModuleDict({"block": fmt.FlashMoELayer(32, 24, 6, 2)}).load_state_dict(dict(state))
    del state[f"block.experts.3.{names[2]}.weight"]
    with pytest.raises(ValueError, match=r"^state_dict: got tensors of the experts \[0, 1, 2, 4"):
        fmt.FlashMoELayer(32, 24, 8, 2).load_state_dict(
            {k.removeprefix("block."): v for k, v in state.items()}
        )


def of_single_experts(*names: str) -> dict[str, Any]:
    shapes = {"gate_proj": (24, 32), "up_proj": (24, 32), "down_proj": (32, 24)}
    state = {f"experts.{e}.{name}.weight": torch.ones(shapes[name])
             for e in range(3) for name in names}  # fmt: skip
    return state | {"gate.weight": torch.ones(3, 32)}


def test_a_gate_of_single_experts_is_not_dropped() -> None:
    layer = fmt.FlashMoELayer(32, 24, 3, 2, gate="none", activation="relu2")
    layer.load_state_dict(of_single_experts("up_proj", "down_proj"))
    gated = of_single_experts("gate_proj", "up_proj", "down_proj")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*experts\.2\.gate_proj\.weight"):
        layer.load_state_dict(gated)
    found = layer.load_state_dict(gated, strict=False)
    assert found.unexpected_keys == [f"experts.{e}.gate_proj.weight" for e in range(3)]
    assert found.missing_keys == []


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_a_single_expert_of_a_wrong_shape_is_named(name: str) -> None:
    state = of_single_experts("gate_proj", "up_proj", "down_proj")
    key = f"experts.1.{name}.weight"
    accepted = list(state[key].shape)
    state[key] = state[key][:-1]
    got = list(state[key].shape)
    sentence = f"state_dict: got shape {got} of {key}, accepted is {accepted}"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        fmt.FlashMoELayer(32, 24, 3, 2).load_state_dict(state)


def test_a_selection_bias_is_reset_to_zero() -> None:
    with torch.device("meta"):
        layer: Any = fmt.FlashMoELayer(32, 24, 8, 2, selection_bias=True)
    layer = layer.to_empty(device="cpu")
    layer.gate.e_score_correction_bias.fill_(7)  # what new memory may hold
    layer.reset_parameters()
    assert not layer.gate.e_score_correction_bias.any()


def test_an_assigned_selection_bias_stays_fp32() -> None:
    model = torch.nn.ModuleDict({"block": layer_of("deepseek-v3")})
    state = {name: x.bfloat16() for name, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    bias = model["block"].gate.e_score_correction_bias
    assert bias.dtype == torch.float32
    assert torch.equal(bias, state["block.gate.e_score_correction_bias"].float())
    assert state["block.gate.e_score_correction_bias"].dtype == torch.bfloat16
    with torch.no_grad():
        assert model["block"](normal(3, 32).bfloat16()).dtype == torch.bfloat16


def test_a_selection_bias_stays_fp32() -> None:
    layer = layer_of("deepseek-v3")
    before = layer.gate.e_score_correction_bias.clone()
    layer = layer.to(torch.bfloat16)
    assert layer.experts.down_proj.dtype == torch.bfloat16
    assert torch.equal(layer.gate.e_score_correction_bias, before)
    with torch.no_grad():
        assert layer(normal(3, 32).bfloat16()).dtype == torch.bfloat16


def test_layers_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match=r'^gate: got "separate", accepted are'):
        fmt.FlashMoELayer(32, 24, 8, 2, gate="separate")


def test_modules_compile_without_breaks() -> None:
    torch._dynamo.reset()
    attention = fmt.MultiheadAttention(32, 2, batch_first=True).eval()
    layer = layer_of("gpt-oss").eval()

    def block(x: Any) -> Any:
        return layer(x + attention(x, x, x, is_causal=True)[0])

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for seq in (7, 11, 40):
            x = normal(2, seq, 32)
            torch.testing.assert_close(compiled(x), block(x))


class _Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = fmt.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: Any, hidden: Any = None) -> Any:
        return self.attention(x, x, x, key_padding_mask=hidden)[0]


@pytest.mark.parametrize("padded", [False, True])
def test_attention_modules_are_exported_for_any_length(padded: bool) -> None:
    torch.manual_seed(0)
    attention = _Attention().eval()

    def inputs(seq: int) -> tuple[Any, ...]:
        hidden = normal(2, seq, seed=1) > 1
        return (normal(2, seq, 32), hidden) if padded else (normal(2, seq, 32),)

    length = {1: torch.export.Dim("seq", min=2, max=4096)}
    with torch.no_grad():
        program = torch.export.export(
            attention, inputs(10), dynamic_shapes=(length,) * (1 + padded), strict=False
        ).module()
        for seq in (10, 33):
            torch.testing.assert_close(program(*inputs(seq)), attention(*inputs(seq)))
