"""torch.nn.attention.varlen's functions and jagged nested tensors, by FlashMoE: each sequence
against a call of its own."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import flashmoe_science as fm  # noqa: E402
import flashmoe_science.torch as fmt  # noqa: E402
from flashmoe_science import _warn_once  # noqa: E402
from flashmoe_science.flash_attn import (  # noqa: E402
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

F = torch.nn.functional
LENGTHS_Q, LENGTHS_K = (5, 0, 9, 1), (7, 3, 9, 20)


class Aux(NamedTuple):
    """As torch.nn.attention.varlen.AuxRequest, which an older torch has not."""

    lse: bool = False


def starts(lengths: tuple[int, ...]) -> Any:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def normal(*shape: int, seed: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ragged(heads: int = 4, heads_kv: int = 2) -> tuple[Any, ...]:
    q = normal(sum(LENGTHS_Q), heads, 16, seed=1)
    k, v = (normal(sum(LENGTHS_K), heads_kv, 16, seed=seed) for seed in (2, 3))
    return q, k, v, starts(LENGTHS_Q), starts(LENGTHS_K)


def sequences(q: Any, k: Any, v: Any) -> Iterator[tuple[Any, Any, Any]]:
    lengths = zip(LENGTHS_Q, LENGTHS_K, starts(LENGTHS_Q), starts(LENGTHS_K), strict=False)
    for n, m, i, j in lengths:
        yield q[i : i + n], k[j : j + m], v[j : j + m]


@pytest.mark.parametrize(
    ("window", "meant"),
    [
        ((-1, -1), {}),
        ((-1, 0), {"causal": True}),
        ((3, 0), {"causal": True, "window": (3, None)}),
        ((2, 4), {"window": (2, 4)}),
    ],
    ids=str,
)
def test_each_sequence_is_a_call_of_its_own(window: Any, meant: dict[str, Any]) -> None:
    q, k, v, cu_q, cu_k = (x.requires_grad_(x.is_floating_point()) for x in ragged())
    how = {"window_size": window, "enable_gqa": True, "scale": 0.3}
    out, lse = fmt.varlen_attn(q, k, v, cu_q, cu_k, 9, 20, **how, return_aux=Aux(lse=True))
    wants = [
        fm.flash_attention(*(x[None] for x in one), **meant, scale=0.3, return_lse=True)
        for one in sequences(q, k, v)
    ]
    assert torch.equal(out, torch.cat([x[0][0] for x in wants]))
    assert torch.equal(lse, torch.cat([x[1][0] for x in wants], 1))
    made = torch.autograd.grad(out.sin().sum(), (q, k, v))
    want = torch.autograd.grad(sum(x[0].sin().sum() for x in wants), (q, k, v))
    for a, b in zip(made, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_blocks_and_lengths() -> None:
    q, k, v, cu_q, cu_k = ragged()
    used = torch.tensor([7, 2, 9, 11], dtype=torch.int32)
    want = fmt.varlen_attn(q, k, v, cu_q, cu_k, 9, 20, enable_gqa=True, seqused_k=used)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(4)).int().view(4, 5)
    blocks = [torch.full((20, 4, 2, 16), torch.nan) for _ in range(2)]
    for b, (_, *both) in enumerate(sequences(q, k, v)):
        for to, x in zip(blocks, both, strict=True):
            to[table[b]] = F.pad(x[: used[b]], (0, 0, 0, 0, 0, 20 - int(used[b]))).view(5, 4, 2, 16)
    given = {"enable_gqa": True, "seqused_k": used, "block_table": table, "num_splits": 1}
    assert torch.equal(fmt.varlen_attn(q, *blocks, cu_q, None, 9, 20, **given), want)
    out = torch.empty_like(q)
    assert fmt.varlen_attn_out(out, q, *blocks, cu_q, None, 9, 20, **given) is out
    assert torch.equal(out, want)
    _, lse = fmt.varlen_attn_out(
        out, q, k, v, cu_q, cu_k, 9, 20, enable_gqa=True, return_aux=Aux(lse=True)
    )
    assert lse.shape == (4, len(q))


def test_gradients_of_sixteen_thousand_sequences() -> None:
    """Against float64 on all rows at once, each beside the 9 keys that its sequence has at most."""
    lengths = torch.randint(0, 10, (2, 16384), generator=torch.Generator().manual_seed(5))
    queries, keys = lengths[0] // 2, lengths[1]
    cu_q, cu_k = (F.pad(x.cumsum(0), (1, 0)).int() for x in (queries, keys))
    q, k, v = (
        normal(int(total), 1, 8, seed=seed).requires_grad_()
        for seed, total in enumerate((cu_q[-1], cu_k[-1], cu_k[-1]))
    )
    out = fmt.varlen_attn(q, k, v, cu_q, cu_k, 4, 9, window_size=(-1, 0))
    of = torch.arange(16384).repeat_interleave(queries)
    last = torch.arange(len(of)) - cu_q[of] + keys[of] - queries[of]
    at = (cu_k[of, None] + torch.arange(9)).clamp(max=len(k) - 1)  # [row, key]
    seen = torch.arange(9) <= last[:, None].clamp(max=8)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    logits = torch.einsum("rd,rkd->rk", wide[0][:, 0], wide[1][at, 0]) / 8**0.5
    weights = logits.masked_fill(~seen, -1e30).softmax(-1) * seen
    want = torch.einsum("rk,rkd->rd", weights, wide[2][at, 0])
    torch.testing.assert_close(out[:, 0].double(), want, atol=1e-5, rtol=1e-5)
    made = torch.autograd.grad(out.sin().sum(), (q, k, v))
    for a, b in zip(made, torch.autograd.grad(want.sin().sum(), wide), strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
def test_on_the_gpu_torchs_own_results_and_gradients() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v, cu_q, cu_k = ragged(heads_kv=4)
    q, k, v = (F.pad(x, (0, 48)).to("cuda", torch.bfloat16).requires_grad_() for x in (q, k, v))
    given = (q, k, v, cu_q.cuda(), cu_k.cuda(), 9, 20)
    ours = fmt.varlen_attn(*given)
    assert all(x.kernel.startswith("attention_forward_sm") for x in fm.last_launches())
    torch.testing.assert_close(ours, varlen.varlen_attn(*given), atol=1e-2, rtol=1e-2)
    made, want = (
        torch.autograd.grad(f(*given).float().sin().sum(), (q, k, v))
        for f in (fmt.varlen_attn, varlen.varlen_attn)
    )
    for a, b in zip(made, want, strict=True):
        torch.testing.assert_close(a, b, atol=3e-2, rtol=3e-2)
    offsets_q, offsets_k = (x.long().cuda() for x in (cu_q, cu_k))
    key, value = (
        torch.nested.nested_tensor_from_jagged(x, offsets_k).transpose(1, 2) for x in (k, v)
    )
    query = torch.nested.nested_tensor_from_jagged(q, offsets_q).transpose(1, 2)
    with fmt.sdpa_kernel(strict=True):
        out = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(out.transpose(1, 2).values(), ours, atol=1e-2, rtol=1e-2)


def test_arguments_are_torchs() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("an older torch, of fewer arguments")
    for name in ("varlen_attn", "varlen_attn_out"):
        ours, theirs = (
            [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
            for f in (getattr(fmt, name), getattr(varlen, name))
        )
        assert ours == theirs


def test_what_is_wrong() -> None:
    q, k, v, cu_q, cu_k = ragged()
    table = torch.zeros(4, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^key: got 2 heads, but query has 4; with enable_gqa"):
        fmt.varlen_attn(q, k, v, cu_q, cu_k, 9, 20)
    with pytest.raises(ValueError, match=r"^query: got 4 dimensions, accepted are 3"):
        fmt.varlen_attn(q[None], k, v, cu_q, cu_k, 9, 20)
    with pytest.raises(ValueError, match=r"^key: got 3 dimensions, accepted are 4"):
        fmt.varlen_attn(q, k, v, cu_q, cu_k, 9, 20, block_table=table)
    with pytest.raises(ValueError, match=r"^cu_seq_k: got None without block_table"):
        fmt.varlen_attn(q, k, v, cu_q, None, 9, 20, enable_gqa=True)
    with pytest.raises(ValueError, match=r"^seqused_k: got None with block_table"):
        fmt.varlen_attn(q, k[None], v[None], cu_q, None, 9, 20, enable_gqa=True, block_table=table)


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"query": None}, TypeError, "query: got NoneType, accepted is a torch.Tensor"),
        ({"value": [1]}, TypeError, "value: got list, accepted is a torch.Tensor"),
        ({"scale": 0.0}, ValueError, "scale: got 0.0, accepted is a finite positive number"),
        ({"window_size": 3}, ValueError, "window_size: got 3, accepted is a pair"),
        ({"num_splits": torch.ones(2)}, TypeError, "num_splits: got tensor"),
        ({"enable_gqa": 1}, TypeError, "enable_gqa: got 1 of type int, accepted are False and"),
        ({"return_aux": True}, TypeError, "return_aux: got True, accepted are None and an AuxReq"),
        ({"max_q": -1}, ValueError, "max_q: got -1, accepted is a number of 0 or more"),
        ({"max_k": torch.ones(3).int()}, TypeError, "max_k: got tensor"),
        ({"cu_seq_k": torch.zeros(3).int()}, ValueError, "cu_seq_k: got 3 numbers, accepted are"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_errors_have_the_callers_names(given: dict[str, Any], error: Any, sentence: str) -> None:
    q, k, v, cu_q, cu_k = ragged(heads=2)
    arguments = {"query": q, "key": k, "value": v, "cu_seq_q": cu_q, "cu_seq_k": cu_k,
                 "max_q": 9, "max_k": 20}  # fmt: skip
    with pytest.raises(error, match=f"^{re.escape(sentence)}"):
        fmt.varlen_attn(**arguments | given)


def test_one_graph_for_all_lengths() -> None:
    def call(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
        return fmt.varlen_attn(q, k, v, cu_q, cu_k, 64, 64, window_size=(-1, 0), enable_gqa=True)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    q, k, v, cu_q, cu_k = ragged()
    assert torch.equal(compiled(q, k, v, cu_q, cu_k), call(q, k, v, cu_q, cu_k))
    with torch.compiler.set_stance("fail_on_recompile"):  # of fewer tokens and sequences
        given = (q[:5], k[:10], v[:10], cu_q[:3], cu_k[:3])
        assert torch.equal(compiled(*given), call(*given))


@pytest.mark.parametrize(
    ("name", "gradients"),
    [("varlen_attn", False), ("varlen_attn", True), ("varlen_func", False), ("varlen_func", True),
     ("with_kvcache", False)],
)  # fmt: skip
@pytest.mark.parametrize("dynamic", [None, True])
def test_one_graph_for_all_bounds(dynamic: bool | None, name: str, gradients: bool) -> None:
    """The longest sequences of each batch as numbers: symbols from the first call, or from the
    second."""
    keys = [normal(2, 30, 2, 16, seed=seed) for seed in (5, 6)]

    def call(q: Any, k: Any, v: Any, cu: Any, longest_q: int, longest_k: int) -> Any:
        if name == "varlen_attn":
            return fmt.varlen_attn(q, k, v, cu, cu, longest_q, longest_k, window_size=(-1, 0))
        if name == "varlen_func":
            return flash_attn_varlen_func(q, k, v, cu, cu, longest_q, longest_k, causal=True)
        return flash_attn_with_kvcache(
            q, *keys, k, v, cache_seqlens=cu[:2], cu_seqlens_q=cu, cu_seqlens_k_new=cu,
            max_seqlen_q=longest_q, causal=True,
        )  # fmt: skip

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    learnt = 1 if dynamic else 2
    batches = ((9, 6), (5, 10), (13, 2), (14, 1), (8, 7))  # of as many tokens: bounds alone differ
    for number, lengths in enumerate(batches):
        rows = [normal(15, 2, 16, seed=seed).requires_grad_(gradients) for seed in (1, 2, 3)]
        given = (*rows, starts(lengths), max(lengths), max(lengths) + number % 2)
        with torch.compiler.set_stance("default" if number < learnt else "fail_on_recompile"):
            out = compiled(*given)
        want = call(*given)
        assert torch.equal(out, want)
        if gradients:
            made, expected = (torch.autograd.grad(x.sin().sum(), rows) for x in (out, want))
            assert all(map(torch.equal, made, expected))


# ---- jagged tensors ---------------------------------------------------------------------------


def jagged(values: Any, lengths: tuple[int, ...]) -> Any:
    """[batch, heads, seq, dim], as torch's attention takes it."""
    return torch.nested.nested_tensor_from_jagged(values, starts(lengths).long()).transpose(1, 2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_jagged_tensors(is_causal: bool) -> None:
    """Against torch's own on dense tensors, causal from the top left."""
    q, k, v, *_ = (x.requires_grad_(x.is_floating_point()) for x in ragged(heads=2))
    lengths = (LENGTHS_Q, LENGTHS_K)
    offsets_k = starts(LENGTHS_K).long()  # one tensor: by which torch knows that lengths are alike
    key, value = (
        torch.nested.nested_tensor_from_jagged(x, offsets_k).transpose(1, 2) for x in (k, v)
    )
    with fmt.sdpa_kernel(strict=True):
        out = F.scaled_dot_product_attention(jagged(q, lengths[0]), key, value, is_causal=is_causal)
    assert out.is_nested
    rows = out.transpose(1, 2).values()
    want = torch.cat([
        F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in one), is_causal=is_causal)
        .transpose(0, 1)
        for one in sequences(q, k, v)
    ])  # fmt: skip
    torch.testing.assert_close(rows, want, atol=1e-5, rtol=1e-5)
    made = torch.autograd.grad(rows.sin().sum(), (q, k, v))
    expected = torch.autograd.grad(want.sin().sum(), (q, k, v))
    for a, b in zip(made, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_jagged_tensors_with_holes_and_grouped_heads() -> None:
    dense = [normal(3, 8, heads, 16, seed=heads) for heads in (4, 2, 2)]
    lengths = torch.tensor([8, 0, 5])
    begins = torch.zeros(3).long()
    k = torch.nested.narrow(dense[1], 1, begins, lengths, torch.jagged)
    q, v = (
        torch.nested.nested_tensor_from_jagged(
            dense[i].flatten(0, 1), k.offsets(), lengths=k.lengths()
        )
        for i in (0, 2)
    )
    out = fmt.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True)
    for b, length in enumerate(lengths.tolist()):
        want = fm.flash_attention(*(x[b : b + 1, :length] for x in dense))
        assert torch.equal(out[b].transpose(0, 1), want[0])


BATCHES = (LENGTHS_Q, (3, 14), (1, 1, 1, 12, 0), (20, 7), (4,), (2,) * 9)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("given", ["rows", "jagged"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_jagged_tensors_in_one_graph(dynamic: bool | None, given: str, gradients: bool) -> None:
    """One graph serves any number of sequences, tokens and lengths: dynamic from the first call, or
    by what torch learns from the second. Nested tensors are made in the graph, or are its
    inputs."""

    def nest(q: Any, k: Any, v: Any, offsets: Any) -> list[Any]:
        return [
            torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in (q, k, v)
        ]

    def attend(q: Any, k: Any, v: Any) -> Any:
        out = fmt.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).values()

    def of_rows(*given: Any) -> Any:
        return attend(*nest(*given))

    torch._dynamo.reset()
    function = of_rows if given == "rows" else attend
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    learnt = 1 if dynamic else 2
    for call, lengths in enumerate(BATCHES):
        rows = [normal(sum(lengths), 2, 16, seed=seed) for seed in (1, 2, 3)]
        rows = [x.requires_grad_(gradients) for x in rows]
        offsets = starts(lengths).long()
        tensors = (*rows, offsets) if given == "rows" else nest(*rows, offsets)
        with torch.compiler.set_stance("default" if call < learnt else "fail_on_recompile"):
            out = compiled(*tensors)
        cu = offsets.int()
        want = fm.flash_attention(*(x[None] for x in rows), causal=True, cu_seqlens_q=cu,
                                  cu_seqlens_k=cu)[0]  # fmt: skip
        assert torch.equal(out, want)
        if gradients:
            made, expected = (torch.autograd.grad(x.sin().sum(), rows) for x in (out, want))
            assert all(map(torch.equal, made, expected))


def test_jagged_tensors_that_were_made_apart() -> None:
    """Torch does not know their lengths to be the same; its own attention serves them."""
    q, k, v = (jagged(normal(15, 2, 16, seed=seed), LENGTHS_Q) for seed in (1, 2, 3))
    assert k.shape[2] != v.shape[2]
    offsets = q.transpose(1, 2).offsets()
    together = (
        torch.nested.nested_tensor_from_jagged(x.transpose(1, 2).values(), offsets).transpose(1, 2)
        for x in (q, k, v)
    )
    want = fmt.scaled_dot_product_attention(*together).transpose(1, 2).values()
    assert torch.equal(fmt.scaled_dot_product_attention(q, k, v).transpose(1, 2).values(), want)
    with fmt.sdpa_kernel(strict=True):
        out = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(out.transpose(1, 2).values(), want)


def test_jagged_tensors_with_holes_elsewhere() -> None:
    """They share one tensor of lengths, so torch assumes that their shapes are the same."""
    rows, lengths = normal(24, 2, 16, seed=1), torch.tensor([4, 2, 5])
    k, v = (
        torch.nested.nested_tensor_from_jagged(rows, torch.tensor(offsets), lengths=lengths)
        for offsets in ([0, 8, 16, 24], [3, 10, 19, 24])
    )
    assert k.shape[1] == v.shape[1]
    tensors = [x.transpose(1, 2) for x in (k, k, v)]
    with pytest.raises(ValueError, match=r"^value: its sequences begin at other rows"):
        fmt.scaled_dot_product_attention(*tensors)
    compiled = torch.compile(fmt.scaled_dot_product_attention, backend="eager")
    with pytest.raises(ValueError, match=r"^value: its offsets or lengths are not key's"):
        compiled(*tensors)


def test_errors_of_nested_tensors_say_what_to_pass() -> None:
    """And what they say is taken."""
    parts = [normal(n, 2, 16, seed=n) for n in LENGTHS_Q]
    rows: Any = torch.nested.nested_tensor(parts, layout=torch.jagged)
    q = rows.transpose(1, 2)
    want = fmt.scaled_dot_product_attention(q, q, q)
    attend = fmt.scaled_dot_product_attention
    with pytest.raises(ValueError, match=r"^key: .*dimension 1 is.*; pass key.transpose\(1, 2\)$"):
        attend(q, rows, q)
    with pytest.raises(ValueError, match=r"^query: got a nested tensor of layout torch.strided, "):
        attend(torch.nested.nested_tensor(parts), q, q)
    one: Any = torch.nested.nested_tensor([part[:, 0] for part in parts], layout=torch.jagged)
    with pytest.raises(
        ValueError, match=r"^query: .*; pass query.unsqueeze\(2\).transpose\(1, 2\)$"
    ):
        attend(one, one, one)
    turned = one.unsqueeze(2).transpose(1, 2)
    got, all_heads = (x.transpose(1, 2).values() for x in (attend(turned, turned, turned), want))
    torch.testing.assert_close(got, all_heads[:, :1])
    deep: Any = torch.nested.nested_tensor([part[None] for part in parts], layout=torch.jagged)
    with pytest.raises(
        ValueError, match=r"^query: got a nested tensor of 5 dimensions, .* and seq$"
    ):
        attend(deep, deep, deep)
    sentence = r"^{}: got a nested tensor, accepted is a dense one; of a jagged one values\(\) are"
    dense = normal(1, 9, 2, 16, seed=1)
    for module in (fm, fmt):
        for name, tensors in (("q", (rows, dense, dense)), ("k", (dense, rows, dense))):
            with pytest.raises(TypeError, match=sentence.format(name)):
                module.flash_attention(*tensors)
        with pytest.raises(TypeError, match=sentence.format("logits")):
            module.moe_route(torch.nested.nested_tensor([x[:, 0] for x in parts]), 2)


def test_nested_tensors_that_are_not_ours(caplog: pytest.LogCaptureFixture) -> None:
    q = jagged(normal(15, 2, 16, seed=1), LENGTHS_Q)
    other = jagged(normal(15, 2, 16, seed=2), LENGTHS_Q[::-1])
    with pytest.raises(ValueError, match=r"^key: got a dense tensor beside nested ones"):
        fmt.scaled_dot_product_attention(q, torch.randn(4, 2, 9, 16), q)
    with pytest.raises(ValueError, match=r"^query: got a nested tensor of 4 dimensions, of which"):
        fmt.scaled_dot_product_attention(q.transpose(1, 2), q, q)
    with pytest.raises(ValueError, match=r"^value: its sequences have other lengths"):
        fmt.scaled_dot_product_attention(q, q, other)
    with pytest.raises(ValueError, match=r"^value: it has 2 sequences, but query has 4"):
        fmt.scaled_dot_product_attention(q, q, jagged(normal(4, 2, 16, seed=1), (1, 3)))
    _warn_once.forget()
    odd = jagged(normal(15, 2, 12, seed=1), LENGTHS_Q)
    with caplog.at_level(logging.WARNING), fmt.sdpa_kernel():
        F.scaled_dot_product_attention(odd, odd, odd)
    assert "query: its head dimension is 12" in caplog.text
    _warn_once.forget()
