"""Biases and masks by torch: scaled_dot_product_attention, autograd, graphs, transforms."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
fmt = pytest.importorskip("flashmoe_science.torch")

import flashmoe_science as fm  # noqa: E402
from torch.nn import functional as F  # noqa: E402

SEQ_Q, SEQ_K, HEADS, BATCH = 13, 21, 4, 2
# Shapes that torch broadcasts to [batch, heads, queries, keys].
SHAPES = [
    (SEQ_Q, SEQ_K),
    (1, SEQ_K),
    (SEQ_Q, 1),
    (HEADS, SEQ_Q, SEQ_K),
    (BATCH, 1, SEQ_Q, SEQ_K),
    (BATCH, 1, 1, SEQ_K),
    (BATCH, HEADS, SEQ_Q, SEQ_K),
    (1, HEADS, 1, 1),
]


def normal(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def qkv(*lead: int, heads_kv: int | None = None, dtype: Any = torch.float32) -> tuple[Any, ...]:
    of_keys = lead if heads_kv is None else (*lead[:-1], heads_kv)
    return (normal(*lead, SEQ_Q, 16, dtype=dtype), normal(*of_keys, SEQ_K, 16, dtype=dtype),
            normal(*of_keys, SEQ_K, 24, dtype=dtype))  # fmt: skip


def random_mask(*shape: int, added: bool) -> Any:
    bits = torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) < 0.7
    return torch.where(bits, normal(*shape), float("-inf")) if added else bits


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_of_every_shape(shape: tuple[int, ...], added: bool) -> None:
    q, k, v = qkv(BATCH, HEADS)
    mask = random_mask(*shape, added=added)
    got = fmt.scaled_dot_product_attention(q, k, v, mask)
    want = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(got, torch.nan_to_num(want))
    with fmt.sdpa_kernel(strict=True):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, mask), got)


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 3, 4)])
@pytest.mark.parametrize("whole", [False, True])
def test_masks_of_every_rank(lead: tuple[int, ...], whole: bool) -> None:
    q, k, v = qkv(*lead)
    mask = random_mask(*(lead if whole else ()), SEQ_Q, SEQ_K, added=False)
    mask[..., 0] = True
    got = fmt.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, mask))


def test_grouped_heads_and_16_bits() -> None:
    q, k, v = qkv(BATCH, HEADS, heads_kv=2, dtype=torch.bfloat16)
    for mask in (
        random_mask(BATCH, HEADS, SEQ_Q, SEQ_K, added=False),
        random_mask(BATCH, 1, SEQ_Q, SEQ_K, added=True),
        random_mask(BATCH, 1, SEQ_Q, SEQ_K, added=True).bfloat16(),
    ):
        mask[..., 0] = 1 if mask.dtype == torch.bool else 0
        got = fmt.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        wide = [x.double() for x in (q, k, v)]
        want = F.scaled_dot_product_attention(
            *wide, mask if mask.dtype == torch.bool else mask.double(), enable_gqa=True
        )
        torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-2)


def test_rows_that_see_no_key_are_zeros_and_have_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(BATCH, HEADS))
    mask = torch.ones(BATCH, 1, SEQ_Q, SEQ_K, dtype=torch.bool)
    mask[0, :, 3] = False
    out = fmt.scaled_dot_product_attention(q, k, v, mask)
    assert (out[0, :, 3] == 0).all()
    out.sum().backward()
    assert (q.grad[0, :, 3] == 0).all() and q.grad.isfinite().all() and k.grad.isfinite().all()


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("shape", [(BATCH, 1, SEQ_Q, SEQ_K), (HEADS, 1, SEQ_K)], ids=str)
def test_gradients(shape: tuple[int, ...], added: bool) -> None:
    mask = random_mask(*shape, added=added)
    mask[..., 0] = 0.0 if added else True
    given = [x.double() for x in qkv(BATCH, HEADS, heads_kv=2)]
    ours, theirs = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    bias = mask.double() if added else mask
    got = fmt.scaled_dot_product_attention(*ours, bias, enable_gqa=True)
    want = F.scaled_dot_product_attention(*theirs, bias, enable_gqa=True)
    torch.testing.assert_close(got, want)
    dout = normal(*want.shape).double()
    got.backward(dout)
    want.backward(dout)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_gradcheck_of_the_function() -> None:
    q, k, v = (x.double().transpose(1, 2).requires_grad_() for x in qkv(1, 2))
    pairs = {"attn_bias": random_mask(1, 2, SEQ_Q, SEQ_K, added=True).double(),
             "attn_mask": random_mask(1, 1, SEQ_Q, SEQ_K, added=False)}  # fmt: skip

    def call(q: Any, k: Any, v: Any) -> Any:
        return fm.flash_attention(q, k, v, **pairs, return_lse=True)[0]

    assert torch.autograd.gradcheck(call, (q, k, v), fast_mode=True)


def test_no_gradient_of_a_bias() -> None:
    q, k, v = (x.transpose(1, 2) for x in qkv(1, 2))
    bias = torch.zeros(1, 1, SEQ_Q, SEQ_K, requires_grad=True)
    sentence = "^attn_bias: requires grad, but no kernel computes the gradient of a bias"
    for call in (fm.flash_attention, torch.compile(fmt.flash_attention, backend="eager")):
        with pytest.raises(NotImplementedError, match=sentence):
            call(q, k, v, attn_bias=bias)
    with torch.no_grad():
        fm.flash_attention(q, k, v, attn_bias=bias)
    fm.flash_attention(q, k, v, attn_bias=bias.detach())


def padded(**of: Any) -> tuple[list[Any], dict[str, Any]]:
    """Tensors [batch, seq, heads, dim] with NaN in the padding, and their lengths."""
    tensors = [x.transpose(1, 2).contiguous().to(**of) for x in qkv(BATCH, HEADS)]
    tensors[1][0, :5], tensors[2][0, :5] = torch.nan, torch.nan
    tensors[1][1, 17:], tensors[2][1, 17:] = torch.nan, torch.nan
    int32 = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)  # noqa: E731
    return tensors, {"seqused_k": int32(SEQ_K, 17), "k_begin": int32(5, 0)}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("shape", [(BATCH, HEADS, SEQ_Q, SEQ_K), (1, 1, SEQ_Q, SEQ_K)], ids=str)
def test_beside_lengths(shape: tuple[int, ...], compiled: bool) -> None:
    """As torch's own with one mask of both: keys are places in the padded tensor."""
    tensors, lengths = padded()
    pairs = {"attn_bias": normal(*shape), "attn_mask": random_mask(*shape, added=False)}
    pairs["attn_mask"][..., 5:7] = True
    there = torch.ones(BATCH, 1, 1, SEQ_K, dtype=torch.bool)
    there[0, ..., :5] = there[1, ..., 17:] = False
    given = [x.clone().requires_grad_() for x in tensors]

    def attend(*given: Any) -> Any:
        return fm.flash_attention(*given, **pairs, **lengths)

    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    got = attend(*given)
    plain = [torch.nan_to_num(x).transpose(1, 2).requires_grad_() for x in tensors]
    bias = torch.where(pairs["attn_mask"] & there, pairs["attn_bias"], float("-inf"))
    want = F.scaled_dot_product_attention(*plain, bias)
    torch.testing.assert_close(got, want.transpose(1, 2))
    dout = normal(*got.shape)
    got.backward(dout)
    want.backward(dout.transpose(1, 2))
    for x, y in zip(given, plain, strict=True):
        torch.testing.assert_close(x.grad, y.grad.transpose(1, 2))


def test_backward_by_itself_beside_lengths() -> None:
    tensors, lengths = padded()
    mask = random_mask(BATCH, 1, SEQ_Q, SEQ_K, added=False)
    out, lse = fm.flash_attention(*tensors, attn_mask=mask, **lengths, return_lse=True)
    given = [x.clone().requires_grad_() for x in tensors]
    fm.flash_attention(*given, attn_mask=mask, **lengths).sum().backward()

    def differentiate(*tensors: Any) -> Any:
        dout = torch.ones_like(tensors[-2])
        return fm.flash_attention_backward(dout, *tensors, attn_mask=mask, **lengths)[:3]

    torch._dynamo.reset()
    compiled = torch.compile(differentiate, fullgraph=True, backend="aot_eager")
    for call in (differentiate, compiled):
        for x, y in zip(call(*tensors, out, lse), given, strict=True):
            assert torch.equal(x, y.grad)


def test_no_gradient_of_a_bias_beside_lengths() -> None:
    tensors, lengths = padded()
    bias = torch.zeros(1, 1, SEQ_Q, SEQ_K, requires_grad=True)
    for call in (fm.flash_attention, torch.compile(fmt.flash_attention, backend="eager")):
        with pytest.raises(NotImplementedError, match=r"^attn_bias: requires grad, but no kernel"):
            call(*tensors, attn_bias=bias, **lengths)


@pytest.mark.parametrize("queries", [1, SEQ_Q])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_beside_scales_and_pages_of_fp8(dtype: Any, queries: int) -> None:
    """A mask that hides a page hides its scales, too."""
    torch.manual_seed(0)
    fp8, size, pages, count = torch.float8_e4m3fn, 16, 6, 60
    q = torch.randn(BATCH, queries, HEADS, 32).to(dtype)
    k, v = (torch.randn(pages, size, 2, 32).to(fp8) for _ in range(2))
    scales = torch.rand(2, pages, 2) + 0.5
    table = torch.tensor([[0, 2, 4, 1], [5, 3, 1, 2]], dtype=torch.int32)
    mask = random_mask(BATCH, HEADS, queries, count + 4, added=False)
    mask[..., 0] = True
    mask[0, ..., size : 2 * size] = False  # page 2, which is the other's last
    mask[1, ..., 3 * size :] = False
    scales[:, 2] = torch.nan
    tables = {"page_table": table, "seqused_k": torch.tensor([count, 50], dtype=torch.int32)}
    bias = torch.randn(1, HEADS, 1, count + 4).to(dtype)
    got = fm.flash_attention(q, k, v, k_scale=scales[0], v_scale=scales[1], **tables,
                             attn_mask=mask, attn_bias=bias)  # fmt: skip
    for b, used in enumerate((count, 50)):
        wide = [
            torch.nan_to_num(x[table[b]].double() * s[table[b]][:, None, :, None].double())
            for x, s in ((k, scales[0]), (v, scales[1]))
        ]
        keys, values = (x.flatten(0, 1)[:used].repeat_interleave(2, 1) for x in wide)
        seen = torch.where(mask[b, :, :, :used], bias[0, :, :, :used].double(), float("-inf"))
        want = F.scaled_dot_product_attention(
            q[b].double().transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), seen
        )
        allowed = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(
            got[b].double(), want.transpose(0, 1), atol=allowed, rtol=allowed
        )


def test_dense_keys_with_scales_have_masks_of_their_extents() -> None:
    q, k, v = (x.transpose(1, 2) for x in qkv(2, 2))
    mask = random_mask(2, 1, SEQ_Q, SEQ_K, added=False)
    got = fm.flash_attention(q, k, v, attn_mask=mask, k_scale=torch.tensor(0.5))
    torch.testing.assert_close(got, fm.flash_attention(q, k / 2, v, attn_mask=mask))
    more = torch.ones(1, 1, 1, SEQ_K + 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"^attn_mask: its number of keys is 22, accepted are k's"):
        fm.flash_attention(q, k, v, attn_mask=more, k_scale=torch.tensor(0.5))


def test_not_beside_jagged_tensors() -> None:
    parts = [torch.randn(2, n, 16).transpose(0, 1) for n in (3, 5)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=r"^attn_mask: got one, .* beside jagged tensors"):
        fmt.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_compiles_for_every_length() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, mask: fmt.scaled_dot_product_attention(q, k, v, mask),
        fullgraph=True, dynamic=True, backend=backend,
    )  # fmt: skip
    for seq_q, seq_k in ((5, 7), (9, 9), (40, 11)):
        q, k, v = (normal(2, 3, n, 16) for n in (seq_q, seq_k, seq_k))
        mask = torch.ones(2, 1, seq_q, seq_k, dtype=torch.bool).tril()
        torch.testing.assert_close(
            compiled(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask)
        )
    assert len(graphs) == 1
    assert "flashmoe.attention.default" in graphs[0]


def test_graph_with_gradients() -> None:
    torch._dynamo.reset()
    mask = random_mask(BATCH, 1, SEQ_Q, SEQ_K, added=True)
    mask[..., 0] = 0
    given = qkv(BATCH, HEADS)
    grads = []
    call = fmt.scaled_dot_product_attention
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        tensors = [x.clone().requires_grad_() for x in given]
        function(*tensors, mask).square().sum().backward()
        grads.append([x.grad for x in tensors])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_opcheck() -> None:
    q, k, v = (x.transpose(1, 2) for x in qkv(1, 2))
    mask = torch.ones(1, 1, SEQ_Q, SEQ_K, dtype=torch.bool).tril()
    arguments = (q, k, v, None, normal(1, 2, SEQ_Q, SEQ_K), mask, "none", None, None, None, None,
                 "bshd", None)  # fmt: skip
    torch.library.opcheck(torch.ops.flashmoe.attention_with_lse.default, arguments)


@pytest.mark.parametrize("batched_mask", [False, True])
def test_vmap_and_grad(batched_mask: bool) -> None:
    q, k, v = (normal(3, 2, n, 2, 16) for n in (SEQ_Q, SEQ_K, SEQ_K))
    lead = (3,) if batched_mask else ()
    mask = random_mask(*lead, 2, 1, SEQ_Q, SEQ_K, added=False)
    mask[..., 0] = True

    def loss(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return fm.flash_attention(q, k, v, attn_mask=mask).square().sum()

    in_dims = (0, 0, 0, 0 if batched_mask else None)
    got = torch.func.vmap(torch.func.grad(loss), in_dims=in_dims)(q, k, v, mask)
    for i in range(3):
        own = q[i].clone().requires_grad_()
        loss(own, k[i], v[i], mask[i] if batched_mask else mask).backward()
        torch.testing.assert_close(got[i], own.grad)


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        (torch.ones(SEQ_Q, 20, dtype=torch.bool),
         "attn_mask: dimension -1 is 20, accepted are key's sequence length 21 and 1"),
        (torch.ones(3, 1, 1, dtype=torch.bool),
         "attn_mask: dimension -3 is 3, accepted are 4 and 1"),
        (torch.ones(1, 1, dtype=torch.int32), "attn_mask: got dtype torch.int32, accepted are"),
        (torch.ones(1, 1, 1, 1, 1, dtype=torch.bool), "attn_mask: got 5 dimensions"),
    ],
    ids=["keys", "heads", "dtype", "rank"],
)  # fmt: skip
def test_errors(mask: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        fmt.scaled_dot_product_attention(*qkv(BATCH, HEADS), mask)


def test_not_beside_is_causal() -> None:
    mask = torch.ones(SEQ_Q, SEQ_K, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"^attn_mask: got one beside is_causal=True"):
        fmt.scaled_dot_product_attention(*qkv(BATCH, HEADS), mask, is_causal=True)
