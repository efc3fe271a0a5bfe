"""flashmoe_science.flash_attn: FlashAttention 2's functions, results and gradients."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pytest
from reference import assert_accurate
from reference_backward import assert_gradients_accurate

torch = pytest.importorskip("torch", minversion="2.6")

from flashmoe_science import flash_attn  # noqa: E402
from flashmoe_science.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
TENSORS = {
    "flash_attn_func": ["q", "k", "v"],
    "flash_attn_qkvpacked_func": ["qkv"],
    "flash_attn_kvpacked_func": ["q", "kv"],
    "flash_attn_varlen_func": ["q", "k", "v", "cu_seqlens_q"],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen"],
    "flash_attn_varlen_kvpacked_func": ["q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
                                        "max_seqlen_k"],
}  # fmt: skip
OFFSETS = ["cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]  # of varlen_func, before the options
FURTHER = {"flash_attn_varlen_func": {"block_table": None}}
# By name alone, as FlashAttention 3 and vLLM have them.
NAMED = {
    "flash_attn_func": ["qv", "q_descale", "k_descale", "v_descale", "attention_chunk",
                        "num_splits", "pack_gqa", "sm_margin", "s_aux", "learnable_sink",
                        "return_softmax_lse", "out"],
}  # fmt: skip
NAMED["flash_attn_varlen_func"] = ["page_table", "seqused_q", "seqused_k", "scheduler_metadata",
                                   "fa_version", *NAMED["flash_attn_func"]]  # fmt: skip
# What is said, and what it means as flash_attention and the reference have it.
MEANINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"softmax_scale": 0.3, "softcap": 2.0}, {"scale": 0.3, "softcap": 2.0}),
    ({"softcap": -1.0, "deterministic": True}, {}),
    ({"window_size": (5, 3)}, {"window": (5, 3)}),
    ({"window_size": (-1, 0)}, {"window": (None, 0)}),
    ({"window_size": (0, -1)}, {"window": (0, None)}),
    ({"window_size": (4, 9), "causal": True}, {"window": (4, None), "causal": True}),
]


def normal(*shape: int, seed: int = 0, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(dtype: Any = torch.float32) -> list[Any]:
    """q, k, v and dout: grouped heads, fewer queries than keys."""
    shapes = [(2, 17, 4, 16), (2, 29, 2, 16), (2, 29, 2, 16), (2, 17, 4, 16)]
    return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def leaves(*tensors: Any) -> list[Any]:
    return [x.clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("name", TENSORS)
def test_arguments_are_flash_attentions(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    required = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty]
    assert required == TENSORS[name]
    options = {n: p.default for n, p in parameters.items()
               if n not in required and p.kind is p.POSITIONAL_OR_KEYWORD}  # fmt: skip
    offsets = OFFSETS if name == "flash_attn_varlen_func" else []
    want = dict.fromkeys(offsets) | OPTIONS | FURTHER.get(name, {})
    assert list(options.items()) == list(want.items())
    named = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert sorted(named) == sorted(NAMED.get(name, []))


def test_what_there_is() -> None:
    others = ["flash_attn_with_kvcache", "merge_attn_states"]
    assert sorted([*TENSORS, *others]) == flash_attn.__all__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("said", "meant"), MEANINGS, ids=str)
def test_results_and_gradients(said: dict[str, Any], meant: dict[str, Any], dtype: Any) -> None:
    q, k, v, dout = inputs(dtype)
    given = leaves(q, k, v)
    out, lse, probabilities = flash_attn_func(*given, **said, return_attn_probs=True)
    assert_accurate(out, lse, q, k, v, **meant)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    # As FlashAttention 2.7 and newer without dropout.
    assert probabilities.shape == (0,)
    assert probabilities.dtype == dtype
    assert torch.equal(flash_attn_func(q, k, v, **said), out)
    gradients = torch.autograd.grad(out, given, dout)
    assert_gradients_accurate(gradients, dout, q, k, v, **meant)


def test_options_by_position() -> None:
    q, k, v, _ = inputs()
    how = (0.0, 0.3, True, (6, -1), 3.0, None, True, True)
    out, lse, _ = flash_attn_func(q, k, v, *how)
    assert_accurate(out, lse, q, k, v, True, window=(6, None), scale=0.3, softcap=3.0)
    kv = torch.stack([k, v], 2)
    assert torch.equal(flash_attn_kvpacked_func(q, kv, *how)[0], out)
    alone = flash_attn_func(k, k, v, *how)
    packed = flash_attn_qkvpacked_func(torch.stack([k, k, v], 2), *how)
    assert all(map(torch.equal, alone, packed))


def test_a_query_that_sees_nothing() -> None:
    q, k, *_ = inputs()
    out, lse, _ = flash_attn_func(k, q[:, :, :2], q[:, :, 2:], causal=True, return_attn_probs=True)
    assert (out[:, :12] == 0).all()
    assert (lse[:, :, :12] == -torch.inf).all()


def test_the_log_sum_exp_has_a_gradient() -> None:
    q, k, v, dout = inputs()
    dlse = normal(2, 4, 17, seed=9)
    given = leaves(q, k, v)
    out, lse, _ = flash_attn_func(*given, causal=True, return_attn_probs=True)
    gradients = torch.autograd.grad((out, lse), given, (dout, dlse))
    assert_gradients_accurate(gradients, dout, q, k, v, dlse, causal=True)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_a_packed_gradient_of_keys_and_values(wanted: tuple[bool, bool]) -> None:
    q, k, v, dout = inputs(torch.bfloat16)
    given = leaves(q, torch.stack([k, v], 2))
    for x, needed in zip(given, wanted, strict=True):
        x.requires_grad_(needed)
    flash_attn_kvpacked_func(*given, causal=True).backward(dout)
    dq, dkv = (x.grad for x in given)
    assert [x is not None for x in (dq, dkv)] == list(wanted)
    dk, dv = (None, None) if dkv is None else (dkv[:, :, 0], dkv[:, :, 1])
    assert_gradients_accurate((dq, dk, dv), dout, q, k, v, causal=True)


def test_a_packed_gradient_of_all_three() -> None:
    qkv = normal(2, 21, 3, 4, 24).requires_grad_()
    dout = normal(2, 21, 4, 24, seed=1)
    out = flash_attn_qkvpacked_func(qkv, window_size=(7, 7))
    q, k, v = qkv.detach().unbind(2)
    assert_accurate(out, None, q, k, v, window=(7, 7))
    (dqkv,) = torch.autograd.grad(out, qkv, dout)
    assert dqkv.shape == qkv.shape
    assert dqkv.is_contiguous()
    assert_gradients_accurate(dqkv.unbind(2), dout, q, k, v, window=(7, 7))


def test_packed_tensors_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    real = flash_attn.flash_attention

    def noting(*tensors: Any, **options: Any) -> Any:
        found.append([x.data_ptr() for x in tensors])
        return real(*tensors, **options)

    monkeypatch.setattr(flash_attn, "flash_attention", noting)
    qkv = normal(2, 5, 3, 4, 16)
    flash_attn_qkvpacked_func(qkv)
    q, kv = normal(2, 5, 4, 16), normal(2, 5, 2, 4, 16)
    flash_attn_kvpacked_func(q, kv)
    assert found == [
        [qkv[:, :, i].data_ptr() for i in range(3)],
        [q.data_ptr(), *(kv[:, :, i].data_ptr() for i in range(2))],
    ]


def test_double_precision() -> None:
    """FlashAttention has none; here torch's own check of gradients can be used."""
    qkv = normal(1, 5, 3, 2, 8, dtype=torch.float64).requires_grad_()

    def call(packed: Any) -> Any:
        return flash_attn_qkvpacked_func(packed, causal=True, return_attn_probs=True)[:2]

    assert torch.autograd.gradcheck(call, [qkv])


def test_compiled_in_one_graph() -> None:
    def loss(q: Any, kv: Any) -> Any:
        return flash_attn_kvpacked_func(q, kv, causal=True, window_size=(6, 0)).square().sum()

    q, k, v, _ = inputs()
    given = leaves(q, torch.stack([k, v], 2))
    want = torch.autograd.grad(loss(*given), given)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for x, y in zip(torch.autograd.grad(compiled(*given), given), want, strict=True):
        torch.testing.assert_close(x, y)


def test_what_is_not_there_is_refused_with_a_sentence() -> None:
    q, k, v, _ = inputs()
    kv, qkv = torch.stack([k, v], 2), torch.stack([k, k, v], 2)
    with pytest.raises(NotImplementedError, match=r"^dropout_p: got 0\.1, accepted is 0\.0"):
        flash_attn_func(q, k, v, 0.1)
    with pytest.raises(NotImplementedError, match=r"^alibi_slopes: got slopes, accepted is None"):
        flash_attn_kvpacked_func(q, kv, alibi_slopes=torch.ones(4))
    with pytest.raises(ValueError, match=r"^qkv: got shape \(2, 29, 2, 2, 16\), accepted is \[bat"):
        flash_attn_qkvpacked_func(kv)
    with pytest.raises(ValueError, match=r"^kv: got shape .*accepted is \[batch, seq, 2, heads, d"):
        flash_attn_kvpacked_func(q, qkv)
    with pytest.raises(TypeError, match=r"^qkv: got ndarray, accepted is a torch\.Tensor"):
        flash_attn_qkvpacked_func(np.zeros((1, 2, 3, 4, 8)))
    with pytest.raises(
        ValueError, match=r"^q: its head dimension is 12, accepted are multiples of 8"
    ):
        flash_attn_func(q[..., :12], k[..., :12], v[..., :12])


WRONG: dict[str, tuple[dict[str, Any], Any, str]] = {
    "scale": ({"softmax_scale": 0.0}, ValueError, "softmax_scale: got 0.0, accepted is a finite"),
    "window": ({"window_size": -1}, ValueError, "window_size: got -1, accepted is a pair (left, "),
    "extent": ({"window_size": ("a", 1)}, ValueError, "window_size: got ('a', 1), accepted is a"),
    "extents": ({"window_size": torch.ones(3)}, ValueError, "window_size: got tensor"),
    "softcap": ({"softcap": "1"}, TypeError, "softcap: got '1' of type str, accepted is a number"),
    "softcaps": ({"softcap": torch.ones(2)}, TypeError, "softcap: got tensor"),
    "causal": ({"causal": torch.ones(2)}, TypeError, "causal: got Tensor, accepted are False and"),
    "splits": ({"num_splits": 1.0}, TypeError, "num_splits: got 1.0 of type float, accepted is a"),
    "chunk": ({"attention_chunk": "a"}, TypeError, "attention_chunk: got 'a' of type str, accepte"),
    "sinks": ({"s_aux": torch.ones(4, 1)}, ValueError, "s_aux: got 2 dimensions, accepted are 1"),
}


@pytest.mark.parametrize(("given", "error", "sentence"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_has_the_callers_name(given: Any, error: Any, sentence: str) -> None:
    q, k, v, _ = inputs()
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    for call in (
        lambda: flash_attn_func(q, k, v, **given),
        lambda: flash_attn_varlen_func(q[0], k[0], v[0], offsets, offsets, 3, 3, **given),
    ):
        with pytest.raises(error, match=f"^{re.escape(sentence)}"):
            call()


def test_what_is_wrong_with_packed_tensors_has_their_name() -> None:
    q, offsets = torch.ones(1, 3, 4, 16), torch.tensor([0, 3], dtype=torch.int32)
    qkv, kv = torch.ones(1, 3, 3, 4, 12), torch.ones(1, 3, 2, 3, 16)
    for call, error, sentence in (
        (lambda: flash_attn_qkvpacked_func(qkv), ValueError, "qkv: its head dimension is 12"),
        (lambda: flash_attn_qkvpacked_func(qkv.int()), TypeError, "qkv: got dtype int32"),
        (lambda: flash_attn_kvpacked_func(q, kv), ValueError, "kv: got 3 heads, accepted are"),
        (lambda: flash_attn_varlen_qkvpacked_func(qkv[0], offsets, 3), ValueError,
         "qkv: its head dimension is 12"),
        (lambda: flash_attn_varlen_qkvpacked_func(qkv[0, ..., :8], offsets.long(), 3), TypeError,
         "cu_seqlens: got dtype int64"),
        (lambda: flash_attn_varlen_qkvpacked_func(qkv[0, ..., :8], offsets, -1), ValueError,
         "max_seqlen: got -1, accepted is"),
        (lambda: flash_attn_varlen_kvpacked_func(q[0], kv[0], offsets, offsets, 3, 3), ValueError,
         "kv: got 3 heads, accepted are"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{sentence}"):
            call()


def test_none_and_negative_numbers_are_no_bounds_of_windows() -> None:
    q, k, v, _ = inputs()
    for window, same in (
        ((None, None), (-1, -1)), ((3, None), (3, -1)), ([None, np.int64(2)], (-1, 2)),
    ):  # fmt: skip
        made = flash_attn_func(q, k, v, window_size=window)  # type: ignore[arg-type]
        assert torch.equal(made, flash_attn_func(q, k, v, window_size=same))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_tensors_that_are_not_dense_are_refused(name: str) -> None:
    q, k, v, _ = inputs()
    given = {"q": q[0], "k": k[0], "v": v[0]}
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    for wrong, kind in (
        (given[name].to_sparse(), "one of layout torch.sparse_coo"),
        (torch.nested.nested_tensor([given[name]]), "a nested tensor"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: got {kind}, accepted is a dense"):
            flash_attn_varlen_func(
                **given | {name: wrong}, cu_seqlens_q=offsets, cu_seqlens_k=offsets
            )


# ---- variable lengths ----

LENGTHS_Q, LENGTHS_K = (3, 0, 17, 1, 6), (9, 4, 29, 40, 0)
BLOCK = 8


def starts(lengths: tuple[int, ...]) -> Any:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def ragged(dtype: Any = torch.float32) -> list[Any]:
    """q, k and v of all sequences, and their offsets."""
    total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    shapes = [(total_q, 4, 16), (total_k, 2, 16), (total_k, 2, 24)]
    tensors = [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    return [*tensors, starts(LENGTHS_Q), starts(LENGTHS_K)]


def of_each(function: Any, q: Any, k: Any, v: Any, **said: Any) -> tuple[Any, Any]:
    """out and softmax_lse by a dense call of each sequence."""
    parts = [x[None].split(n, 1) for x, n in ((q, LENGTHS_Q), (k, LENGTHS_K), (v, LENGTHS_K))]
    made = [function(*given, **said, return_attn_probs=True) for given in zip(*parts, strict=True)]
    return torch.cat([x[0][0] for x in made]), torch.cat([x[1][0] for x in made], 1)


def blocks_of(x: Any) -> tuple[Any, Any]:
    """Its sequences in blocks from anywhere, poisoned elsewhere, and the table."""
    counts = [-(-n // BLOCK) for n in LENGTHS_K]
    order = iter(torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(5)))
    blocks = x.new_full((sum(counts) + 2, BLOCK, *x.shape[1:]), torch.nan)
    table = torch.full((len(LENGTHS_K), max(counts)), -1, dtype=torch.int32)
    for b, rows in enumerate(x.split(LENGTHS_K)):
        for i, part in enumerate(rows.split(BLOCK) if len(rows) else ()):
            table[b, i] = at = next(order)
            blocks[at, : len(part)] = part
    return blocks, table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("said", "meant"), MEANINGS, ids=str)
def test_each_sequence_has_the_bits_of_its_own_call(
    said: dict[str, Any], meant: dict[str, Any], dtype: Any
) -> None:
    q, k, v, cu_q, cu_k = ragged(dtype)
    out, lse, probabilities = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max(LENGTHS_Q), max(LENGTHS_K), **said, return_attn_probs=True
    )
    want, want_lse = of_each(flash_attn_func, q, k, v, **said)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert (out.dtype, lse.dtype, probabilities.shape) == (dtype, torch.float32, (0,))
    third = slice(3, 20), slice(13, 42)
    parts = (x[None, rows] for x, rows in ((q, third[0]), (k, third[1]), (v, third[1])))
    assert_accurate(out[None, third[0]], lse[None, :, third[0]], *parts, **meant)
    loose = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 1000, 10**6, **said)
    assert torch.equal(loose, want)
    (blocks_k, table), (blocks_v, _) = blocks_of(k), blocks_of(v)
    paged = flash_attn_varlen_func(
        q, blocks_k, blocks_v, cu_q, cu_k, max(LENGTHS_Q), max(LENGTHS_K), **said,
        block_table=table,
    )  # fmt: skip
    assert torch.equal(paged, want)


def test_variable_lengths_by_position_and_packed() -> None:
    q, k, _, cu_q, cu_k = ragged()
    how = (0.0, 0.3, True, (6, -1), 3.0, None, True, True)
    said = {"softmax_scale": 0.3, "causal": True, "window_size": (6, -1), "softcap": 3.0}
    want = of_each(flash_attn_func, q, k, -k, **said)
    kv = torch.stack([k, -k], 1)
    made = flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 17, 40, *how)
    assert all(map(torch.equal, made[:2], want))
    qkv = torch.stack([k, k, -k], 1)
    alone = flash_attn_varlen_func(k, k, -k, cu_k, cu_k, 40, 40, *how)
    packed = flash_attn_varlen_qkvpacked_func(qkv, cu_k, 40, *how)
    assert all(map(torch.equal, alone, packed))
    with_table = flash_attn_varlen_func(q, *(x[None] for x in (k, -k)), cu_q[:2], cu_k[:2], 3, 9,
                                        *how, torch.zeros(1, 1, dtype=torch.int32))  # fmt: skip
    assert torch.equal(with_table[0][:3], want[0][:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("said", "meant"), MEANINGS, ids=str)
def test_each_sequence_has_the_gradients_of_its_own_call(
    said: dict[str, Any], meant: dict[str, Any], dtype: Any
) -> None:
    q, k, v, cu_q, cu_k = ragged(dtype)
    dout = normal(sum(LENGTHS_Q), 4, 24, seed=8, dtype=dtype)
    given, alone = leaves(q, k, v), leaves(q, k, v)
    out = flash_attn_varlen_func(*given, cu_q, cu_k, 17, 40, **said)
    gradients = torch.autograd.grad(out, given, dout)
    want = torch.autograd.grad(of_each(flash_attn_func, *alone, **said)[0], alone, dout)
    assert all(map(torch.equal, gradients, want))
    third = slice(3, 20), slice(13, 42)
    rows = [x[None, third[i]] for i, x in ((0, dout), (0, q), (1, k), (1, v))]
    parts = [x[None, third[i]] for i, x in zip((0, 1, 1), gradients, strict=True)]
    assert_gradients_accurate(parts, *rows, **meant)


def test_packed_gradients_of_variable_lengths() -> None:
    q, k, _, cu_q, cu_k = ragged()
    kv, qkv = torch.stack([k, -k], 1), torch.stack([k, k, -k], 1)
    given = leaves(q, kv)
    flash_attn_varlen_kvpacked_func(*given, cu_q, cu_k, 17, 40, causal=True).sum().backward()
    apart = leaves(q, k, -k)
    flash_attn_varlen_func(*apart, cu_q, cu_k, 17, 40, causal=True).sum().backward()
    assert torch.equal(given[0].grad, apart[0].grad)
    assert torch.equal(given[1].grad, torch.stack([x.grad for x in apart[1:]], 1))
    (packed,) = leaves(qkv)
    out, lse, _ = flash_attn_varlen_qkvpacked_func(packed, cu_k, 40, return_attn_probs=True)
    (out.sum() + lse.sum()).backward()
    apart = leaves(k, k, -k)
    out, lse, _ = flash_attn_varlen_func(*apart, cu_k, cu_k, 40, 40, return_attn_probs=True)
    (out.sum() + lse.sum()).backward()
    assert torch.equal(packed.grad, torch.stack([x.grad for x in apart], 1))


def test_a_bound_cuts_sequences_off() -> None:
    q, k, v, cu_q, cu_k = ragged()
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 17, 20)
    want = flash_attn_func(q[None, 3:20], k[None, 13:33], v[None, 13:33])
    assert torch.equal(out[3:20], want[0])


def test_variable_lengths_compiled_once_for_all() -> None:
    def call(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, 64, 64, causal=True)

    given = ragged()
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for ends in (given[3], torch.tensor([0, 20, 20, 20, 20, 27], dtype=torch.int32)):
        given[3] = ends
        with torch.compiler.set_stance("default" if ends[1] == 3 else "fail_on_recompile"):
            assert torch.equal(compiled(*given), call(*given))


def test_variable_lengths_refuse() -> None:
    q, k, v, cu_q, cu_k = ragged()
    call = flash_attn_varlen_func
    with pytest.raises(NotImplementedError, match=r"^dropout_p: got 0\.1, accepted is 0\.0"):
        call(q, k, v, cu_q, cu_k, 17, 40, 0.1)
    with pytest.raises(NotImplementedError, match=r"^alibi_slopes: got slopes, accepted is None"):
        call(q, k, v, cu_q, cu_k, 17, 40, alibi_slopes=torch.ones(4))
    with pytest.raises(ValueError, match=r"^q: got 4 dimensions, accepted are 3"):
        call(q[None], k, v, cu_q, cu_k, 17, 40)
    with pytest.raises(ValueError, match=r"^v: got 3 dimensions, accepted are 4"):
        call(q, k[None], v, cu_q, cu_k, 17, 40, block_table=torch.zeros(5, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^cu_seqlens_k: got 2 dimensions, accepted is 1"):
        call(q, k, v, cu_q, cu_k[None], 17, 40)
    with pytest.raises(ValueError, match=r"^cu_seqlens_k: got 5 numbers, accepted are 6"):
        call(q, k, v, cu_q, cu_k[1:], 17, 40)
    with pytest.raises(TypeError, match=r"^cu_seqlens_q: got dtype int64"):
        call(q, k, v, cu_q.long(), cu_k, 17, 40)
    with pytest.raises(TypeError, match=r"^cu_seqlens_q: got list, accepted is a torch\.Tensor"):
        call(q, k, v, [0, 27], cu_k, 17, 40)
    with pytest.raises(ValueError, match=r"^max_seqlen_k: got -1, accepted is a number of 0"):
        call(q, k, v, cu_q, cu_k, 17, -1)
    with pytest.raises(ValueError, match=r"^qkv: got shape .*accepted is \[total, 3, heads, dim\]"):
        flash_attn_varlen_qkvpacked_func(torch.stack([k, k], 1), cu_k, 40)
    with pytest.raises(
        ValueError, match=r"^kv: got shape .*accepted is \[total_k, 2, heads, dim\]"
    ):
        flash_attn_varlen_kvpacked_func(q, k, cu_q, cu_k, 17, 40)
    table = torch.zeros(5, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"^q: requires grad.*block_table: got one"):
        call(q.requires_grad_(), k[None], v[None], cu_q, cu_k, 17, 40, block_table=table)


# ---- vLLM's merge ----


def parts(dtype: Any = torch.float32) -> list[Any]:
    """prefix_output and prefix_lse, [tokens, heads, dim] and [heads, tokens], and the suffix's."""
    made = []
    for seed in (0, 1):
        made += [normal(9, 4, 16, seed=seed, dtype=dtype), 3 * normal(4, 9, seed=seed + 2)]
    return made


def merged_of(prefix: Any, prefix_lse: Any, suffix: Any, suffix_lse: Any) -> tuple[Any, Any]:
    """By vLLM's words: an lse of +inf is -inf."""
    lses = torch.stack([prefix_lse, suffix_lse]).double()
    lses[lses == torch.inf] = -torch.inf
    lse = torch.logsumexp(lses, 0)
    weights = torch.where(lses == -torch.inf, 0.0, (lses - lse).exp()).transpose(1, 2)[..., None]
    outs = torch.stack([prefix, suffix]).double()
    return torch.where(weights == 0, 0.0, weights * outs).sum(0), lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merge_attn_states(dtype: Any) -> None:
    names = ["output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output_lse",
             "prefill_tokens_with_context", "output_scale"]  # fmt: skip
    assert list(inspect.signature(flash_attn.merge_attn_states).parameters) == names
    prefix, prefix_lse, suffix, suffix_lse = given = parts(dtype)
    prefix_lse[0, 1], suffix_lse[1, 2] = torch.inf, -torch.inf
    prefix[1, 0], suffix[2, 1] = torch.nan, torch.nan
    prefix_lse[2, 3], suffix_lse[2, 3] = -torch.inf, torch.inf
    before = [x.clone() for x in given]
    output, output_lse = torch.full_like(prefix, 7e4), torch.full_like(prefix_lse, 7e4)
    assert flash_attn.merge_attn_states(output, *given, output_lse) is None
    for x, y in zip(given, before, strict=True):
        assert torch.equal(x.nan_to_num(5), y.nan_to_num(5))
    want, want_lse = merged_of(*given)
    unit = 1e-6 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(output.double(), want, rtol=unit, atol=unit)
    torch.testing.assert_close(output_lse.double(), want_lse, rtol=1e-6, atol=1e-6)
    assert (output[3, 2] == 0).all() and output_lse[2, 3] == -torch.inf
    alone = torch.full_like(output, torch.nan)
    flash_attn.merge_attn_states(alone, *given)
    assert torch.equal(alone, output)
    flash_attn.merge_attn_states(prefix, *given, prefix_lse)  # in place
    assert torch.equal(prefix, output) and torch.equal(prefix_lse, output_lse)


def test_merge_attn_states_of_prefix_and_suffix() -> None:
    q, k, v, _ = inputs()
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    first = flash_attn_func(q[:1], k[:1, :20], v[:1, :20], return_attn_probs=True)
    last = flash_attn_func(q[:1], k[:1, 20:], v[:1, 20:], return_attn_probs=True)
    output, output_lse = torch.empty_like(out[0]), torch.empty_like(lse[0])
    flash_attn.merge_attn_states(
        output, first[0][0], first[1][0], last[0][0], last[1][0], output_lse
    )
    torch.testing.assert_close(output, out[0])
    torch.testing.assert_close(output_lse, lse[0])


def test_merge_attn_states_of_tokens_without_context() -> None:
    prefix, prefix_lse, suffix, suffix_lse = parts()
    output, output_lse = torch.empty_like(prefix), torch.empty_like(prefix_lse)
    flash_attn.merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse)
    want = torch.cat([output[:4], suffix[4:]])
    before = prefix_lse.clone()
    prefix[4:] = torch.nan
    flash_attn.merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, output_lse, 4)
    assert torch.equal(output, want)
    assert torch.equal(output_lse[:, 4:], suffix_lse[:, 4:])
    assert torch.equal(prefix_lse, before)


def test_merge_attn_states_to_fp8() -> None:
    given = parts(torch.bfloat16)
    given[0][2, 1], given[2][2, 1] = 1000, 1000
    scale = torch.tensor([0.25])
    output = torch.empty_like(given[0], dtype=torch.float8_e4m3fn)
    flash_attn.merge_attn_states(output, *given, output_scale=scale)
    wide = torch.empty_like(given[0], dtype=torch.float32)
    flash_attn.merge_attn_states(wide, *given)
    assert (output[2, 1].float() == 448).all()
    torch.testing.assert_close(output.double(), (wide.double() * 4).clamp(-448, 448),
                               rtol=2.0**-4, atol=2.0**-10)  # fmt: skip


def test_merge_attn_states_refuses() -> None:
    prefix, prefix_lse, suffix, suffix_lse = parts()
    with pytest.raises(ValueError, match=r"^output_scale: got None with an output of torch.float8"):
        flash_attn.merge_attn_states(
            torch.empty_like(prefix, dtype=torch.float8_e4m3fn),
            prefix, prefix_lse, suffix, suffix_lse,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"^output_scale: got one with an output of torch.float32"):
        flash_attn.merge_attn_states(
            torch.empty_like(prefix), prefix, prefix_lse, suffix, suffix_lse,
            output_scale=torch.ones(1),
        )  # fmt: skip
    output = torch.empty_like(prefix)
    call = flash_attn.merge_attn_states
    with pytest.raises(ValueError, match="prefix_lse: got 3 dimensions, accepted are 2"):
        call(output, prefix, prefix_lse[None], suffix, suffix_lse)
    with pytest.raises(TypeError, match=r"output: got ndarray, accepted is a torch.Tensor"):
        call(output.numpy(), prefix, prefix_lse, suffix, suffix_lse)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^output: it shares memory with suffix_output"):
        call(suffix, prefix, prefix_lse, suffix, suffix_lse)
    with pytest.raises(ValueError, match=r"^suffix_lse: its number of heads is 3"):
        call(output, prefix, prefix_lse, suffix, suffix_lse[:3])
    with pytest.raises(TypeError, match=r"^output_lse: got float, accepted is a torch\.Tensor"):
        call(output, prefix, prefix_lse, suffix, suffix_lse, 1.5)  # type: ignore[arg-type]
    for tokens, error in ((-1, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match=rf"^prefill_tokens_with_context: got {tokens}"):
            call(
                output, prefix, prefix_lse, suffix, suffix_lse,
                prefill_tokens_with_context=tokens,  # type: ignore[arg-type]
            )  # fmt: skip
    with pytest.raises(ValueError, match="requires grad, but the merge of attention states has no"):
        call(output, prefix.requires_grad_(), prefix_lse, suffix, suffix_lse)
