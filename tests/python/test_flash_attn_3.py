"""flashmoe_science.flash_attn: what FlashAttention 3 and vLLM have beside FlashAttention 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
from reference import assert_accurate

torch = pytest.importorskip("torch", minversion="2.6")

from flashmoe_science import flash_attention, flash_attn, kv_append  # noqa: E402
from flashmoe_science.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

HEADS, HEADS_K, DIM, DIM_V, PAGE, ROWS = 4, 2, 32, 16, 4, 24
FP8 = torch.float8_e4m3fn


def normal(*shape: int, seed: int = 0, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32)


def starts(lengths: Any) -> Any:
    return ints(0, *torch.tensor(lengths).cumsum(0).tolist())


# ---- lengths of their own ----

ROOM_Q, ROOM_K = (3, 4, 17, 1, 6), (9, 4, 29, 40, 7)
USED_Q, USED_K = (2, 0, 17, 1, 4), (9, 3, 20, 0, 5)


def padded(dtype: Any = torch.float32) -> list[Any]:
    """q, k and v, NaN behind what each sequence has of its rows."""
    made, keys = [], (ROOM_K, USED_K, HEADS_K)
    for seed, (room, used, *rest) in enumerate(
        [(ROOM_Q, USED_Q, HEADS, DIM), (*keys, DIM), (*keys, DIM_V)]
    ):
        x = normal(sum(room), *rest, seed=seed, dtype=dtype)
        for rows, length in zip(x.split(room), used, strict=True):
            rows[length:] = torch.nan
        made.append(x)
    return made


def of_each(q: Any, k: Any, v: Any, **said: Any) -> list[tuple[Any, Any]]:
    """out and softmax_lse of each sequence by a call of its own."""
    rows = [
        [part[None, :n] for part, n in zip(x.split(room), used, strict=True)]
        for x, room, used in ((q, ROOM_Q, USED_Q), (k, ROOM_K, USED_K), (v, ROOM_K, USED_K))
    ]
    return [
        flash_attn_func(*given, **said, return_softmax_lse=True)
        for given in zip(*rows, strict=True)
    ]


def assert_of_each(out: Any, lse: Any, want: list[tuple[Any, Any]]) -> None:
    for b, (rows, sums) in enumerate(want):
        begin = sum(ROOM_Q[:b])
        assert torch.equal(out[begin : begin + USED_Q[b]], rows[0])
        assert torch.equal(lse[:, begin : begin + USED_Q[b]], sums[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("said", [{}, {"causal": True}, {"window_size": [5, 3]}], ids=str)
def test_of_its_rows_a_sequence_has_the_first(said: dict[str, Any], dtype: Any) -> None:
    q, k, v = padded(dtype)
    out, lse = flash_attn_varlen_func(
        q, k, v, starts(ROOM_Q), starts(ROOM_K), 17, 40, seqused_q=ints(*USED_Q),
        seqused_k=ints(*USED_K), **said, return_softmax_lse=True,
    )  # fmt: skip
    want = of_each(q, k, v, **said)
    assert_of_each(out, lse, want)
    third = (x[None, at : at + n] for x, at, n in ((q, 7, 17), (k, 13, 20), (v, 13, 20)))
    meant = {"window": (5, 3)} if "window_size" in said else said
    assert_accurate(want[2][0], want[2][1], *third, **meant)


def test_gradients_of_the_first_rows() -> None:
    tensors = [x.nan_to_num(0) for x in padded()]
    given, alone = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    out = flash_attn_varlen_func(
        *given, starts(ROOM_Q), starts(ROOM_K), 17, 40, causal=True, seqused_q=ints(*USED_Q),
        seqused_k=ints(*USED_K),
    )  # fmt: skip
    held = torch.cat([torch.arange(n) < used for n, used in zip(ROOM_Q, USED_Q, strict=True)])
    gradients = torch.autograd.grad(out[held].square().sum(), given)
    want = torch.cat([x[0][0] for x in of_each(*alone, causal=True)]).square().sum()
    for x, y in zip(gradients, torch.autograd.grad(want, alone), strict=True):
        assert torch.equal(x, y)


def test_as_vllm_calls_it() -> None:
    """By its names: blocks, lengths in place of offsets of keys, an output, a version."""
    q, k, v = padded(torch.bfloat16)
    counts = [-(-n // PAGE) for n in USED_K]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(3)).tolist()
    table = torch.full((5, max(counts)), -1, dtype=torch.int32)
    caches = [torch.full((len(order), PAGE, *x.shape[1:]), torch.nan, dtype=x.dtype)
              for x in (k, v)]  # fmt: skip
    for b, (begin, used) in enumerate(zip(starts(ROOM_K), USED_K, strict=False)):
        for row in range(used):
            if row % PAGE == 0:
                table[b, row // PAGE] = order.pop()
            for cache, x in zip(caches, (k, v), strict=True):
                cache[table[b, row // PAGE], row % PAGE] = x[begin + row]
    sinks = normal(HEADS, seed=8, dtype=torch.bfloat16)
    out = torch.full((sum(ROOM_Q), HEADS, DIM_V), 7.0, dtype=torch.bfloat16)
    made, lse = flash_attn_varlen_func(
        q=q, k=caches[0], v=caches[1], out=out, cu_seqlens_q=starts(ROOM_Q), max_seqlen_q=64,
        seqused_q=ints(*USED_Q), seqused_k=ints(*USED_K), max_seqlen_k=4096, softmax_scale=0.3,
        causal=True, alibi_slopes=None, window_size=[6, 0], block_table=table, softcap=3.0,
        scheduler_metadata=None, fa_version=3, num_splits=0, s_aux=sinks,
        return_softmax_lse=True,
    )  # fmt: skip
    assert made is out
    want = of_each(
        q, k, v, softmax_scale=0.3, causal=True, window_size=(6, 0), softcap=3.0, s_aux=sinks
    )
    assert_of_each(out, lse, want)
    free = torch.cat([torch.arange(n) >= used for n, used in zip(ROOM_Q, USED_Q, strict=True)])
    assert (out[free] == 7).all()
    again = flash_attn_varlen_func(
        q, *caches, starts(ROOM_Q), page_table=table, seqused_q=ints(*USED_Q),
        seqused_k=ints(*USED_K), window_size=None,
    )  # fmt: skip
    plain = of_each(q, k, v)
    assert torch.equal(again[~free], torch.cat([x[0][0] for x in plain]))


@pytest.mark.parametrize("name", ["s_aux", "learnable_sink"])
def test_sinks(name: str) -> None:
    q, k, v = (normal(2, 9, h, DIM, seed=h) for h in (HEADS, HEADS_K, HEADS_K))
    sinks = normal(HEADS, seed=8)
    out, lse = flash_attn_func(q, k, v, causal=True, **{name: sinks}, return_softmax_lse=True)
    assert_accurate(out, lse, q, k, v, True, sinks=sinks)
    given = sinks.clone().requires_grad_()
    flash_attn_func(q, k, v, **{name: given}).sum().backward()
    assert given.grad.abs().min() > 0


def test_an_output_of_the_dense_call() -> None:
    q, k, v = (normal(2, 9, h, DIM, seed=h) for h in (HEADS, HEADS_K, HEADS_K))
    out = torch.empty_like(q)
    assert flash_attn_func(q, k, v, out=out) is out
    assert torch.equal(out, flash_attn_func(q, k, v))


# ---- scales ----


def quantized(*shape: int, seed: int) -> Any:
    return normal(*shape, seed=seed).to(FP8)


def test_each_sequence_has_its_scales() -> None:
    q = normal(2, 5, HEADS, DIM)
    k, v = (quantized(2, 9, HEADS_K, dim, seed=dim) for dim in (DIM, DIM_V))
    k_descale, v_descale = (0.5 + normal(2, HEADS_K, seed=i).abs() for i in (4, 5))
    how = {"q_descale": normal(2, HEADS_K), "k_descale": k_descale, "v_descale": v_descale}
    out, lse = flash_attn_func(q, k, v, causal=True, **how, return_softmax_lse=True)
    wide = [x.float() * s[:, None, :, None] for x, s in ((k, k_descale), (v, v_descale))]
    assert_accurate(out, lse, q, *wide, True)
    same = flash_attention(q, k, v, causal=True, k_scale=k_descale, v_scale=v_descale)
    assert torch.equal(out, same)
    cached = flash_attn_with_kvcache(q, k, v, causal=True, **how)
    assert torch.equal(cached, out)


def test_scales_of_all_sequences() -> None:
    """One for all, as in vLLM: expanded to the sequences. They are not read for other dtypes."""
    q = normal(14, HEADS, DIM)
    k, v = (quantized(20, HEADS_K, dim, seed=dim) for dim in (DIM, DIM_V))
    offsets = starts((5, 9)), starts((9, 11))
    one = torch.tensor(0.7)
    how = {"k_descale": one.expand(2, HEADS_K), "v_descale": one.expand(2, HEADS_K)}
    out = flash_attn_varlen_func(q, k, v, *offsets, 9, 11, **how)
    assert_accurate(out[None, :5], None, q[None, :5], *(x.float()[None, :9] * 0.7 for x in (k, v)))
    wide = k.float(), v.float()
    assert torch.equal(
        flash_attn_varlen_func(q, *wide, *offsets, 9, 11, **how),
        flash_attn_varlen_func(q, *wide, *offsets, 9, 11),
    )
    blocks, table = (k.view(5, 4, HEADS_K, DIM), v.view(5, 4, HEADS_K, DIM_V)), ints(4, 1)[:, None]
    got = flash_attn_with_kvcache(
        q[:2, None], *blocks, cache_seqlens=3, page_table=table, **how
    )  # fmt: skip
    want = flash_attention(q[:1, None], *(x[4:, :3] for x in blocks), k_scale=one, v_scale=one)
    assert torch.equal(got[:1], want)


# ---- a cache, and offsets ----

LENGTHS, NEW, QUERIES, PLACES = (7, 0, 11), (2, 0, 5), (3, 1, 5), (4, 0, 9)


def cache_of(way: str, dtype: Any = torch.float32) -> tuple[Any, Any, dict[str, Any]]:
    shape, tables = (3, ROWS), {}
    if way == "paged":
        table = torch.randperm(20, generator=torch.Generator().manual_seed(9))[:18].int()
        shape, tables = (20, PAGE), {"page_table": table.view(3, 6)}
    elif way == "indexed":
        shape, tables = (5, ROWS), {"cache_batch_idx": ints(4, 0, 2)}
    return *(normal(*shape, HEADS_K, dim, seed=dim, dtype=dtype) for dim in (DIM, DIM_V)), tables


def rotary(positions: int = 40, dtype: Any = torch.float32) -> tuple[Any, Any]:
    angles = 6 * torch.rand((positions, 12), generator=torch.Generator().manual_seed(4))
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("ragged", ["q", "k", "both"])
@pytest.mark.parametrize("turned", [None, False, True], ids=["none", "rotated", "at"])
@pytest.mark.parametrize("way", ["plain", "indexed", "paged"])
def test_each_sequence_has_the_bits_of_its_own_call(
    way: str, turned: bool | None, ragged: str, mask: dict[str, Any]
) -> None:
    """Queries and new keys by offsets, positions of their own; the oracle is a call of one
    sequence with FlashAttention 2's arguments."""
    k_cache, v_cache, tables = cache_of(way)
    k_alone, v_alone = k_cache.clone(), v_cache.clone()
    rows_q = QUERIES if ragged != "k" else (3, 3, 3)
    rows_k = NEW if ragged != "q" else (2, 2, 2)
    q, k = (normal(sum(n), h, DIM, seed=h) for n, h in ((rows_q, HEADS), (rows_k, HEADS_K)))
    v = normal(sum(rows_k), HEADS_K, DIM_V, seed=3)
    given: dict[str, Any] = {"k": k, "v": v}
    if ragged != "q":
        given["cu_seqlens_k_new"] = starts(rows_k)
    else:
        given |= {"k": k.view(3, 2, HEADS_K, DIM), "v": v.view(3, 2, HEADS_K, DIM_V)}
    if ragged != "k":
        given |= {"q": q, "cu_seqlens_q": starts(rows_q), "max_seqlen_q": 64}
    else:
        given["q"] = q.view(3, 3, HEADS, DIM)
    tables_of_rotation: dict[str, Any] = {}
    cos, sin = rotary()
    if turned is not None:
        tables_of_rotation = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
    if turned:
        given["rotary_seqlens"] = ints(*PLACES)
    out, lse = flash_attn_with_kvcache(
        **given, k_cache=k_cache, v_cache=v_cache, **tables_of_rotation, **tables, **mask,
        cache_seqlens=ints(*LENGTHS), return_softmax_lse=True,
    )  # fmt: skip
    if ragged == "k":
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert (out.shape, lse.shape) == ((sum(rows_q), HEADS, DIM_V), (HEADS, sum(rows_q)))
    names = {"page_table": "block_table", "cache_batch_idx": "cache_batch_idx"}
    for b, parts in enumerate(zip(*(x.split(n) for x, n in ((q, rows_q), (k, rows_k), (v, rows_k))),
                                  strict=True)):  # fmt: skip
        own = {names[name]: x[b : b + 1] for name, x in tables.items()}
        caches = (k_alone, v_alone) if tables else (k_alone[b : b + 1], v_alone[b : b + 1])
        if turned:  # the position that the length stands for is another row of the tables
            tables_of_rotation |= {
                name: x.roll(LENGTHS[b] - PLACES[b], 0)
                for name, x in (("rotary_cos", cos), ("rotary_sin", sin))
            }
        mine, sums = flash_attn_with_kvcache(
            parts[0][None], *caches, *(x[None] for x in parts[1:]), **tables_of_rotation, **own,
            **mask, cache_seqlens=LENGTHS[b], return_softmax_lse=True,
        )  # fmt: skip
        at = slice(sum(rows_q[:b]), sum(rows_q[: b + 1]))
        assert torch.equal(out[at], mine[0])
        assert torch.equal(lse[:, at], sums[0])
    assert torch.equal(k_cache, k_alone)
    assert torch.equal(v_cache, v_alone)


def test_a_cache_of_fp8_is_filled_with_its_scales() -> None:
    k_cache, v_cache, tables = cache_of("paged", FP8)
    k_alone, v_alone = k_cache.clone(), v_cache.clone()
    q, k = (normal(3, 2, h, DIM, seed=h, dtype=torch.bfloat16) for h in (HEADS, HEADS_K))
    v = normal(3, 2, HEADS_K, DIM_V, seed=3, dtype=torch.bfloat16)
    k_descale, v_descale = torch.tensor([[0.1, 0.2]]), torch.tensor([[0.3, 0.05]])
    out = torch.empty(3, 2, HEADS, DIM_V, dtype=torch.bfloat16)
    made = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=ints(*LENGTHS), causal=True, out=out,
        k_descale=k_descale, v_descale=v_descale, **tables,
    )  # fmt: skip
    scales = {"k_scale": k_descale, "v_scale": v_descale, **tables}
    kv_append(k, v, k_alone, v_alone, cache_seqlens=ints(*LENGTHS), **scales)
    want = flash_attention(q, k_alone, v_alone, causal=True,
                           seqused_k=ints(*LENGTHS) + 2, **scales)  # fmt: skip
    assert made is out
    assert torch.equal(out, want)
    assert torch.equal(k_cache.view(torch.uint8), k_alone.view(torch.uint8))
    assert torch.equal(v_cache.view(torch.uint8), v_alone.view(torch.uint8))


def test_what_changes_nothing_and_what_num_splits_means(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    real = flash_attn.flash_attention

    def noting(*tensors: Any, **options: Any) -> Any:
        found.append(options["split_size"])
        return real(*tensors, **options)

    monkeypatch.setattr(flash_attn, "flash_attention", noting)
    monkeypatch.setattr(flash_attn.arguments, "attend_to_cache", noting)
    q, k, v = (normal(6, h, DIM, seed=h) for h in (HEADS, HEADS_K, HEADS_K))
    ends = starts((2, 4))
    idle = {"pack_gqa": True, "sm_margin": 8, "attention_chunk": 0}
    more = {"scheduler_metadata": ints(1)}
    dense = q[None], k[None], v[None]
    for call, extra in (
        (lambda **how: flash_attn_func(*dense, **how), {}),
        (lambda **how: flash_attn_varlen_func(q, k, v, ends, ends, 4, 4, **how), more),
        (lambda **how: flash_attn_with_kvcache(*dense, **how), more),
    ):
        plain = call()
        assert torch.equal(call(**idle, **extra), plain)
        assert torch.equal(call(num_splits=1), plain)
        assert torch.equal(call(num_splits=4), plain)
    assert found == [None, None, 1024, None] * 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_in_one_graph_for_all_lengths(backend: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    cos, sin = rotary()

    def step(q: Any, k: Any, v: Any, caches: Any, lengths: Any, offsets: Any, table: Any) -> Any:
        return flash_attn_with_kvcache(
            q, *caches, k, v, cos, sin, lengths, causal=True, page_table=table,
            cu_seqlens_q=offsets, cu_seqlens_k_new=offsets, max_seqlen_q=64,
        )  # fmt: skip

    q, k = (normal(9, h, DIM, seed=h) for h in (HEADS, HEADS_K))
    v = normal(9, HEADS_K, DIM_V, seed=3)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    made = []
    for function in (step, torch.compile(step, backend=counter, fullgraph=True)):
        k_cache, v_cache, tables = cache_of("paged")
        outs = [
            function(q, k, v, (k_cache, v_cache), ints(*lengths), starts(rows), *tables.values())
            for lengths, rows in ((LENGTHS, (2, 2, 5)), ((9, 2, 3), (7, 1, 1)))
        ]
        made.append([*outs, k_cache, v_cache])
    assert all(map(torch.equal, *made))
    assert counter.frame_count == 1


# ---- what is refused ----

REFUSED: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "qv": ("dense", {"qv": torch.ones(1)}, NotImplementedError, "qv: got one, accepted is None"),
    "chunk": ("varlen", {"attention_chunk": 64}, NotImplementedError,
              "attention_chunk: got 64, accepted is 0"),
    "sinks": ("cache", {"s_aux": torch.ones(4), "learnable_sink": torch.ones(4)}, ValueError,
              "learnable_sink: got one beside s_aux, accepted is one"),
    "tables": ("cache", {"block_table": ints(0)[None], "page_table": ints(0)[None]}, ValueError,
               "page_table: got one beside block_table"),
    "position": ("varlen", {"dropout_p": ints(3, 3)}, TypeError,
                 "dropout_p: got Tensor, accepted is 0.0: arguments by position are FlashAtt"),
    "offsets": ("varlen", {"cu_seqlens_k": None}, ValueError, "cu_seqlens_k: got None, accepted a"),
    "rank": ("cache", {"cu_seqlens_q": ints(0, 2)}, ValueError, "q: got 4 dimensions, accepted ar"),
    "new": ("cache", {"k": torch.ones(2, 3, 2, DIM), "v": torch.ones(2, 3, 2, DIM),
                      "cu_seqlens_k_new": ints(0, 2, 3)}, ValueError,
            "k: got 4 dimensions, accepted are 3"),
    "scales": ("fp8", {"k_descale": torch.ones(2, 2)}, NotImplementedError,
               "k_descale: got 2 sequences, accepted is one row for all"),
    "kind": ("fp8", {"v_descale": 1.0}, TypeError, "v_descale: got float, accepted is a torch.T"),
    "sink": ("dense", {"learnable_sink": torch.ones(3)}, ValueError,
             "learnable_sink: its number of heads is 3, but q has 4"),
    "sink-of-fa3": ("dense", {"s_aux": torch.ones(3)}, ValueError,
                    "s_aux: its number of heads is 3, but q has 4"),
    "table": ("paged", {"page_table": ints(0, 1, 1)[:, None]}, ValueError,
              "page_table: got 3 numbers, accepted are 2"),
    "table-rank": ("paged", {"page_table": ints(0, 1)}, ValueError,
                   "page_table: got 1 dimensions, accepted are 2"),
    "block-table": ("paged", {"block_table": ints(0, 1, 1)[:, None]}, ValueError,
                    "block_table: got 3 numbers, accepted are 2"),
    "block-table-dtype": ("cache", {"block_table": ints(0, 1)[:, None].long()}, TypeError,
                          "block_table: got dtype int64"),
    "table-dtype": ("cache", {"page_table": ints(0, 1)[:, None].long()}, TypeError,
                    "page_table: got dtype int64"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "given", "error", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(call: str, given: dict[str, Any], error: Any, sentence: str) -> None:
    q, k = torch.ones(6, 4, DIM), torch.ones(6, 2, DIM)
    if call == "fp8":
        k = k.to(FP8)
    ragged = {"q": q, "k": k, "v": k, "cu_seqlens_q": ints(0, 3, 6), "cu_seqlens_k": ints(0, 3, 6)}
    keys = k.view(2, 3, 2, DIM)
    cached = {"q": q.view(2, 3, 4, DIM), "k_cache": keys, "v_cache": keys, "cache_seqlens": 0}
    function, arguments = {
        "dense": (flash_attn_func, {"q": q[None], "k": k[None], "v": k[None]}),
        "cache": (flash_attn_with_kvcache, cached),
        "paged": (
            flash_attn_varlen_func,
            ragged | {"k": keys, "v": keys, "cu_seqlens_k": None, "seqused_k": ints(3, 3)},
        ),
    }.get(call, (flash_attn_varlen_func, ragged))
    with pytest.raises(error, match=f"^{sentence}"):
        function(**arguments | given)
