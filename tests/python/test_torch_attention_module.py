"""FlashMoEScienceAttention: transformers' weights and results, training, sequences of lengths."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import flashmoe_science.torch as fmt  # noqa: E402
from torch_training import assert_same_bits, normal  # noqa: E402

F = torch.nn.functional
H = 64
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped-causal": {"num_kv_heads": 2, "causal": True},
    "dims": {"head_dim": 24, "head_dim_v": 40, "qkv_bias": True, "out_bias": True},
    "window-softcap": {"window": (3, 2), "softcap": 2.0, "scale": 0.5},
    "sinks": {"num_kv_heads": 1, "sinks": True, "causal": "top_left", "window": (4, None)},
}
WAYS = pytest.mark.parametrize("name", OPTIONS)


def made(name: str, dtype: Any = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    attention = fmt.FlashMoEScienceAttention(H, 4, dtype=dtype, **OPTIONS[name], **options)
    if attention.sinks is not None:
        torch.nn.init.normal_(attention.sinks)
    return attention


class Stock(torch.nn.Module):
    """The same projections, and attention written out with its scores."""

    def __init__(self, ours: Any) -> None:
        super().__init__()
        for name, part in ours.named_children():
            self.add_module(name, copy.deepcopy(part))
        self.sinks = copy.deepcopy(ours.sinks)
        self.how, self.heads = ours.options, (ours.num_heads, ours.num_kv_heads)

    def forward(self, x: Any) -> Any:
        heads, heads_kv = self.heads
        q, k, v = (projection(x).unflatten(-1, (n, -1)).transpose(1, 2)
                   for projection, n in ((self.q_proj, heads), (self.k_proj, heads_kv),
                                         (self.v_proj, heads_kv)))  # fmt: skip
        k, v = (y.repeat_interleave(heads // heads_kv, 1) for y in (k, v))
        scores = q @ k.mT * (self.how["scale"] or q.shape[-1] ** -0.5)
        if self.how["softcap"] is not None:
            scores = self.how["softcap"] * (scores / self.how["softcap"]).tanh()
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])  # behind the key
        left, right = self.how["window"] or (None, None)
        right = 0 if self.how["causal"] else right
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        hidden |= distance > left if left is not None else hidden
        hidden |= -distance > right if right is not None else hidden
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks[:, None, None].expand(len(x), -1, x.shape[1], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : x.shape[1]]
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


def gradients(module: Any, x: Any, **how: Any) -> tuple[Any, ...]:
    x = x.detach().requires_grad_()
    out = module(x, **how)
    dout = normal(out.shape, "cpu", torch.float32, 9).to(out.dtype)
    return out, *torch.autograd.grad(out, [x, *module.parameters()], dout)


@WAYS
def test_results_and_gradients_are_those_of_scores_written_out(name: str) -> None:
    ours = made(name, torch.float64)
    x = normal((2, 13, H), "cpu", torch.float64)
    stock = Stock(ours)
    for got, want in zip(gradients(ours, x), gradients(stock, x), strict=True):
        torch.testing.assert_close(got, want)
    assert torch.equal(ours(x[0]), ours(x[:1])[0])


@WAYS
def test_training_follows_the_stock_module(name: str) -> None:
    """To copy the row before: the loss falls, step for step with the stock one."""
    ours = made(name)
    stock = Stock(ours)
    x = normal((2, 12, H), "cpu", torch.float32)
    target = x.roll(1, 1)
    losses: list[list[float]] = [[], []]
    for module, of in zip((ours, stock), losses, strict=True):
        optimizer = torch.optim.AdamW(module.parameters(), lr=2e-2)
        for _ in range(12):
            loss = (module(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            of.append(loss.item())
    assert losses[0][-1] < 0.7 * losses[0][0]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-3)


LAYERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "LlamaAttention", {}, {}),
    "llama-bias": ("llama", "LlamaAttention", {"attention_bias": True},
                   {"qkv_bias": True, "out_bias": True}),
    "mistral": ("mistral", "MistralAttention", {"sliding_window": None}, {}),
    "qwen2": ("qwen2", "Qwen2Attention", {}, {"qkv_bias": True}),
    "gpt-oss": ("gpt_oss", "GptOssAttention",
                {"attention_bias": True, "sliding_window": 5, "layer_types": ["full_attention"]},
                {"qkv_bias": True, "out_bias": True, "sinks": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_state_dict_is_that_of_transformers(name: str) -> None:
    """Strictly loaded it has the layer's results and gradients, rotated positions among them."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    kind, layer, config_options, options = LAYERS[name]
    modeling = pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=H, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_hidden_layers=1, attn_implementation="eager", **config_options,
    )  # fmt: skip
    torch.manual_seed(0)
    stock = getattr(modeling, layer)(config, layer_idx=0)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    rotary = next(x for n, x in vars(modeling).items() if n.endswith("RotaryEmbedding"))(config)
    ours = fmt.FlashMoEScienceAttention(
        H, 4, 2, head_dim=16, causal=True, scale=stock.scaling, **options
    )
    ours.load_state_dict(stock.state_dict())
    assert {n: p.shape for n, p in ours.named_parameters()} == {
        n: p.shape for n, p in stock.named_parameters()
    }
    x = normal((2, 13, H), "cpu", torch.float32)
    positions = rotary(x, torch.arange(13)[None])
    mask = torch.full((13, 13), -torch.inf).triu(1)[None, None]

    def of(module: Any, positions: Any, **how: Any) -> dict[str, Any]:
        out = module(x, position_embeddings=positions, **how)
        out = out[0] if isinstance(out, tuple) else out
        named = dict(module.named_parameters())
        dout = normal(out.shape, "cpu", torch.float32, 9)
        made = torch.autograd.grad(out, list(named.values()), dout)
        return {"out": out} | dict(zip(named, made, strict=True))

    want = of(stock, positions, attention_mask=mask)
    if kind == "gpt_oss":  # whose cos and sin are of half a head, the same for either half
        positions = tuple(torch.cat([y, y], -1) for y in positions)
    got = of(ours, positions)
    for key, y in want.items():
        torch.testing.assert_close(got[key], y, atol=2e-5, rtol=2e-4)


# ---- sequences of any lengths ----


@WAYS
def test_packed_and_padded_sequences_have_the_results_of_their_own_calls(name: str) -> None:
    ours = made(name)
    x = normal((3, 9, H), "cpu", torch.float32)
    lengths = [5, 9, 2]
    alone = [ours(x[i : i + 1, :n]) for i, n in enumerate(lengths)]
    used = torch.tensor(lengths, dtype=torch.int32)
    padded = ours(x, seqused=used, max_seqlen=9)
    for i, n in enumerate(lengths):
        torch.testing.assert_close(padded[i, :n], alone[i][0])
    nothing = ours.o_proj(torch.zeros(ours.o_proj.in_features))
    assert torch.equal(padded[2, 2:], nothing.expand(7, H))

    rows = torch.cat([x[i, :n] for i, n in enumerate(lengths)] + [x[0, :3]])  # 3 of no sequence
    starts = torch.tensor([0, 5, 14, 16], dtype=torch.int32)
    for packed in (ours(rows, cu_seqlens=starts), ours(rows[None], cu_seqlens=starts)[0]):
        torch.testing.assert_close(packed[:16], torch.cat([y[0] for y in alone]))
        assert torch.equal(packed[16:], nothing.expand(3, H))


@pytest.mark.parametrize("way", ["padded", "packed"])
def test_rows_of_no_sequence_reach_no_gradient(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in memory that attention does not write."""
    ours = made("sinks")
    x = normal((2, 9, H), "cpu", torch.float32)
    given: dict[str, Any] = {
        "padded": (x, {"seqused": torch.tensor([4, 7], dtype=torch.int32)}),
        "packed": (x.flatten(0, 1), {"cu_seqlens": torch.tensor([1, 5, 14], dtype=torch.int32)}),
    }
    real = fmt.modules.flash_attention

    def poisoned(*tensors: Any, **how: Any) -> Any:
        out = real(*tensors, **how)
        outside = torch.ones(out.shape[:2], dtype=torch.bool)
        if way == "padded":
            outside[0, :4] = outside[1, :7] = False
        else:
            outside[0, 1:14] = False
        return out.masked_fill(outside[..., None, None], torch.nan)

    rows, how = given[way]
    want = gradients(ours, rows, **how)
    monkeypatch.setattr(fmt.modules, "flash_attention", poisoned)
    got = gradients(ours, rows, **how)
    assert all(x.isfinite().all() for x in got)
    assert_same_bits(got, want)


# ---- graphs, autocast ----


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_in_one_graph_for_every_length(packed: bool) -> None:
    torch._dynamo.reset()
    ours = made("sinks")
    graphs = []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    step = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    count = torch.compile(ours, fullgraph=True, dynamic=True, backend=counted)
    for rows in (12, 17, 30):
        x = normal((1, rows, H), "cpu", torch.float32)
        starts = torch.tensor([0, 3, rows], dtype=torch.int32)
        how = {"cu_seqlens": starts, "max_seqlen": 64} if packed else {}
        want = gradients(ours, x, **how)
        out = step(x.requires_grad_(), **how)
        dout = normal(out.shape, "cpu", torch.float32, 9)
        got = (out, *torch.autograd.grad(out, [x, *ours.parameters()], dout))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
        count(x.detach(), **how)
    assert len(graphs) == 1


@WAYS
def test_autocast(name: str) -> None:
    """Master weights in fp32: results in bf16, gradients in fp32."""
    ours = made(name)
    x = normal((2, 13, H), "cpu", torch.float32)
    want = gradients(ours, x)
    positions = (torch.ones(1, 13, ours.head_dim), torch.zeros(1, 13, ours.head_dim))
    for how in ({}, {"position_embeddings": positions}):  # by 0: the same numbers
        with torch.autocast("cpu", torch.bfloat16):
            got = gradients(ours, x, **how)
        assert got[0].dtype == torch.bfloat16
        assert {y.dtype for y in got[1:]} == {torch.float32}
        for a, b in zip(got, want, strict=True):
            most = max(1.0, float(b.abs().max()))  # of keys' bias the gradient is 0
            torch.testing.assert_close(a.float(), b, atol=3e-2 * most, rtol=3e-2)


def test_what_is_wrong_is_named() -> None:
    kind = fmt.FlashMoEScienceAttention
    with pytest.raises(ValueError, match=r"^num_heads: got 5, accepted without a head_dim are"):
        kind(64, 5)
    with pytest.raises(ValueError, match=r"^num_kv_heads: got 3, accepted are divisors of num_h"):
        kind(64, 4, 3)
    ours, x = kind(64, 4), torch.zeros(2, 9, 64)
    with pytest.raises(ValueError, match=r"^hidden_states: got 4 dimensions, accepted are 2 or 3"):
        ours(x[None])
    starts = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^seqused: got one beside cu_seqlens, accepted is None"):
        ours(x[:1], cu_seqlens=starts, seqused=starts[1:])
    for given, error, sentence in (
        ({"seqused": torch.tensor([9, 9])}, TypeError, "seqused: got dtype int64"),
        ({"cu_seqlens": starts.long()}, TypeError, "cu_seqlens: got dtype int64"),
        ({"cu_seqlens": starts, "max_seqlen": -1}, ValueError, "max_seqlen: got -1"),
    ):
        with pytest.raises(error, match=f"^{sentence}"):
            ours(x[:1] if "cu_seqlens" in given else x, **given)
    with pytest.raises(ValueError, match=r"^window: "):
        kind(64, 4, window=(-3, 0))(x)


def test_it_prints_its_options() -> None:
    made_one = fmt.FlashMoEScienceAttention(64, 4, 2, causal=True, window=(8, None))
    text = "FlashMoEScienceAttention(\n  64, 4, 2, causal=True, window=(8, None)\n"
    assert repr(made_one).startswith(text)
