"""flash_attn_with_kvcache: what FlashAttention 2's function of that name says that it does."""

from __future__ import annotations

import inspect
import math
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from flashmoe_science.flash_attn import flash_attn_with_kvcache  # noqa: E402

BATCH, ROWS, PAGE, HEADS, HEADS_K, DIM, DIM_V = 3, 24, 4, 4, 2, 32, 16
LENGTHS = (7, 0, 19)
LEFT = (2, 0, 5)
WAYS = ["plain", "indexed", "paged"]
MASKS: list[dict[str, Any]] = [
    {}, {"causal": True}, {"window_size": (3, 1)}, {"causal": True, "window_size": (4, 0)},
]  # fmt: skip


def normal(*shape: int, seed: int, dtype: Any) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Cache:
    """The same keys in rows of a batch or in blocks; NaN where there are none."""

    def __init__(self, way: str, dtype: Any = torch.float32, rows: int = ROWS) -> None:
        self.rows, self.tables, self.way = rows, {}, way
        generator = torch.Generator().manual_seed(9)
        if way == "paged":
            table = torch.randperm(BATCH * rows // PAGE + 2, generator=generator)
            self.table = table[: BATCH * rows // PAGE].reshape(BATCH, -1).int()
            self.tables = {"block_table": self.table}
            shape = (BATCH * rows // PAGE + 2, PAGE)
        elif way == "indexed":
            self.index = torch.tensor([4, 0, 2], dtype=torch.int32)
            self.tables, shape = {"cache_batch_idx": self.index}, (5, rows)
        else:
            shape = (BATCH, rows)
        self.k, self.v = (
            torch.full((*shape, HEADS_K, dim), torch.nan, dtype=dtype) for dim in (DIM, DIM_V)
        )
        kept = [normal(BATCH, rows, HEADS_K, dim, seed=dim, dtype=dtype) for dim in (DIM, DIM_V)]
        for b, length in enumerate(LENGTHS):
            for cache, new in zip((self.k, self.v), kept, strict=True):
                for row in range(length):
                    cache[self.place(b, row)] = new[b, row]

    def place(self, b: int, row: int) -> tuple[int, int]:
        if self.way == "paged":
            return int(self.table[b, row // PAGE]), row % PAGE
        return (int(self.index[b]) if self.way == "indexed" else b), row

    def keys(self, b: int, begin: int, end: int) -> list[Any]:
        """k and v of a sequence, [1, keys, heads, dim]."""
        places = [self.place(b, row) for row in range(begin, end)]
        return [torch.stack([x[p] for p in places])[None] if places else x[:1, :0]
                for x in (self.k, self.v)]  # fmt: skip


def attend(q: Any, k: Any, v: Any, mask: dict[str, Any], scale: float, softcap: float) -> Any:
    """out and lse of one sequence, in the tensors' precision."""
    rows, keys = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(HEADS // HEADS_K, 2) for x in (k, v))
    logits = torch.einsum("bthd,bshd->bhts", q, k) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    at, key = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    left, right = mask.get("window_size", (-1, -1))
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if mask.get("causal"):
        seen &= key <= at
    elif right >= 0:
        seen &= key <= at + right
    if left >= 0:
        seen &= key >= at - left
    logits = logits.masked_fill(~seen, -torch.inf)
    lse = logits.logsumexp(-1) if keys else logits.new_full(logits.shape[:3], -torch.inf)
    weights = torch.where(lse[..., None] > -torch.inf, (logits - lse[..., None]).exp(), 0)
    return torch.einsum("bhts,bshd->bthd", weights.to(v.dtype), v), lse


def rotated(x: Any, positions: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    n = cos.shape[1]
    a, b = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if interleaved else (
        slice(0, n), slice(n, 2 * n)
    )  # fmt: skip
    c, s = cos[positions][:, None], sin[positions][:, None]
    made = x.clone()
    made[..., a] = x[..., a] * c - x[..., b] * s
    made[..., b] = x[..., b] * c + x[..., a] * s
    return made


def assert_rule(got: Any, plain: Any, ref: Any, dtype: Any) -> None:
    """max|ours - ref| <= 2 max|plain - ref| + ulp"""
    largest = ref.abs().max().item()
    ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest)) if largest else 0.0
    bound = 2 * (plain.double() - ref).abs().max().item() + ulp
    assert (got.double() - ref).abs().max().item() <= bound


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("rotary", [None, False, True], ids=["none", "neox", "interleaved"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_appends_and_attends(dtype: Any, way: str, rotary: bool | None, mask: Any) -> None:
    cache, before = Cache(way, dtype), Cache(way, dtype)
    q, k = (normal(BATCH, 3, h, DIM, seed=i, dtype=dtype) for i, h in ((1, HEADS), (2, HEADS_K)))
    v = normal(BATCH, 3, HEADS_K, DIM_V, seed=3, dtype=dtype)
    given: dict[str, Any] = {"cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32)}
    if rotary is not None:
        angles = torch.rand((ROWS, 12), generator=torch.Generator().manual_seed(4)) * 6
        given |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype),
                  "rotary_interleaved": rotary}  # fmt: skip
    options = {"softmax_scale": 0.3, "softcap": 5.0, **mask}
    leftpad = torch.tensor(LEFT, dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, **given, **cache.tables, **options, cache_leftpad=leftpad,
        num_splits=3, return_softmax_lse=True,
    )  # fmt: skip
    assert (out.shape, out.dtype) == ((BATCH, 3, HEADS, DIM_V), dtype)
    for b, length in enumerate(LENGTHS):
        made = []
        for wide in (torch.float64, dtype):
            keys, values = before.keys(b, 0, length)
            new_k, new_q, tables = k[b].to(wide), q[b].to(wide), given
            if rotary is not None:
                tables = [given[f"rotary_{n}"].to(wide) for n in ("cos", "sin")]
                at = length + torch.arange(3)
                new_k = rotated(new_k, at, *tables, rotary).to(dtype).to(wide)
                new_q = rotated(new_q, at if mask else at * 0 + length, *tables, rotary)
                new_q = new_q.to(dtype).to(wide)
            keys = torch.cat([keys.to(wide), new_k[None]], 1)[:, LEFT[b] :]
            values = torch.cat([values.to(wide), v[b : b + 1].to(wide)], 1)[:, LEFT[b] :]
            made.append(attend(new_q[None], keys, values, mask, 0.3, 5.0))
        assert_rule(out[b : b + 1], made[1][0], made[0][0], dtype)
        torch.testing.assert_close(lse[b : b + 1].double(), made[0][1], atol=1e-3, rtol=1e-3)
        # What the cache has: what it had, and behind it the new rows; nothing else.
        for row in range(ROWS):
            place = cache.place(b, row)
            if length <= row < length + 3:
                want = k[b, row - length]
                if rotary is not None:
                    position = torch.tensor([row])
                    tables = [given[f"rotary_{n}"].double() for n in ("cos", "sin")]
                    want = rotated(want.double()[None], position, *tables, rotary)[0].to(dtype)
                torch.testing.assert_close(cache.k[place], want)
                assert torch.equal(cache.v[place], v[b, row - length])
            else:
                assert torch.equal(cache.k[place].isnan(), before.k[place].isnan())
                torch.testing.assert_close(
                    cache.k[place], before.k[place], atol=0, rtol=0, equal_nan=True
                )
    # Other rows and pages were free, and stay.
    assert cache.v.isnan().sum() == before.v.isnan().sum() - 3 * BATCH * HEADS_K * DIM_V


@pytest.mark.parametrize("way", WAYS)
def test_without_new_keys(way: str) -> None:
    cache, q = Cache(way), normal(BATCH, 2, HEADS, DIM, seed=1, dtype=torch.float32)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    options: dict[str, Any] = {"causal": True, **cache.tables}
    out = flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=lengths, **options)
    for b, length in enumerate(LENGTHS):
        plain, ref = (
            attend(q[b : b + 1].to(wide), *(x.to(wide) for x in cache.keys(b, 0, length)),
                   {"causal": True}, DIM**-0.5, 0.0)[0]
            for wide in (torch.float32, torch.float64)
        )  # fmt: skip
        assert_rule(out[b : b + 1], plain, ref, torch.float32)
    one = flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=5, **options)
    five = torch.full((BATCH,), 5, dtype=torch.int32)
    same = flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=five, **options)
    torch.testing.assert_close(one, same, atol=0, rtol=0, equal_nan=True)
    whole = flash_attn_with_kvcache(q, cache.k.nan_to_num(1), cache.v.nan_to_num(1), **options)
    assert whole.isfinite().all()


def test_decoding_gives_the_bits_of_one_call() -> None:
    """Token by token through pages, and all at once."""
    q, k = (normal(BATCH, 10, h, DIM, seed=i, dtype=torch.float32)
            for i, h in ((1, HEADS), (2, HEADS_K)))  # fmt: skip
    v = normal(BATCH, 10, HEADS_K, DIM_V, seed=3, dtype=torch.float32)
    cache, rows = Cache("paged"), []
    lengths = torch.tensor(LENGTHS, dtype=torch.int32).clamp(max=10)
    for i in range(10):
        one = slice(i, i + 1)
        rows.append(flash_attn_with_kvcache(
            q[:, one], cache.k, cache.v, k[:, one], v[:, one], cache_seqlens=lengths + i,
            causal=True, **cache.tables,
        ))  # fmt: skip
    again = Cache("plain")
    out = flash_attn_with_kvcache(q, again.k, again.v, k, v, cache_seqlens=lengths, causal=True)
    torch.testing.assert_close(torch.cat(rows, 1), out, atol=1e-6, rtol=1e-5)


def test_new_keys_without_room_are_left_out() -> None:
    cache = Cache("plain")
    q, k = (normal(BATCH, 8, h, DIM, seed=i, dtype=torch.float32)
            for i, h in ((1, HEADS), (2, HEADS_K)))  # fmt: skip
    v = normal(BATCH, 8, HEADS_K, DIM_V, seed=3, dtype=torch.float32)
    lengths = torch.tensor([ROWS - 2, ROWS, 0], dtype=torch.int32)
    cache.k.nan_to_num_(0.5), cache.v.nan_to_num_(0.5)
    before = cache.k.clone()
    out = flash_attn_with_kvcache(q, cache.k, cache.v, k, v, cache_seqlens=lengths)
    assert out.isfinite().all()
    assert torch.equal(cache.k[0, -2:], k[0, :2])
    assert torch.equal(cache.k[1], before[1])
    plain, ref = (
        attend(q[:1].to(wide), cache.k[:1].to(wide), cache.v[:1].to(wide), {}, DIM**-0.5, 0.0)[0]
        for wide in (torch.float32, torch.float64)
    )
    assert_rule(out[:1], plain, ref, torch.float32)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_graph(backend: str) -> None:
    """One for all lengths, which writes to the cache where nothing in it is mutated, too."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)
    cos, sin = (normal(ROWS, DIM // 2, seed=i, dtype=torch.float32) for i in (5, 6))

    def step(q: Any, k: Any, v: Any, cache: Any, values: Any, lengths: Any, table: Any) -> Any:
        return flash_attn_with_kvcache(
            q, cache, values, k, v, cos, sin, lengths, block_table=table, causal=True
        )

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    q, k = (normal(BATCH, 2, h, DIM, seed=i, dtype=torch.float32)
            for i, h in ((1, HEADS), (2, HEADS_K)))  # fmt: skip
    v = normal(BATCH, 2, HEADS_K, DIM_V, seed=3, dtype=torch.float32)
    made = []
    for function in (step, compiled):
        cache = Cache("paged")
        lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        outs = [function(q, k, v, cache.k, cache.v, lengths + i, cache.table) for i in (0, 2)]
        made.append([*outs, cache.k, cache.v])
    for eager, graph in zip(*made, strict=True):
        torch.testing.assert_close(eager, graph, atol=0, rtol=0, equal_nan=True)
    assert counter.frame_count == 1


def test_arguments_are_flash_attentions() -> None:
    parameters = inspect.signature(flash_attn_with_kvcache).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [
        "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens",
        "cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale", "causal", "window_size",
        "softcap", "rotary_interleaved", "alibi_slopes", "num_splits", "return_softmax_lse",
    ]  # fmt: skip
    assert parameters["rotary_interleaved"].default is True
    assert parameters["window_size"].default == (-1, -1)


WRONG: dict[str, tuple[dict[str, Any], Any, str]] = {
    "v": ({"v": None}, ValueError, "v: got None with k"),
    "k": ({"k": None}, ValueError, "k: got None with v"),
    "lengths": ({"cache_seqlens": None}, ValueError, "cache_seqlens: got None with k"),
    "wide": ({"cache_seqlens": torch.zeros(3, dtype=torch.int64)}, TypeError, "cache_seqlens: "),
    "rotary": ({"k": None, "v": None, "rotary_cos": torch.ones(9, 4)}, ValueError, "rotary_cos: "),
    "sin": ({"rotary_sin": torch.ones(9, 4)}, ValueError, "rotary_sin: got one, accepted is None"),
    "alibi": ({"alibi_slopes": torch.ones(4)}, NotImplementedError, "alibi_slopes: got slopes"),
    "rank": ({"q": torch.ones(3, 4, DIM)}, ValueError, "q: got 3 dimensions, accepted are 4"),
    "grad": ({"k": torch.ones(3, 2, 2, DIM, requires_grad=True)}, ValueError, "k: requires grad"),
    "grad of q": ({"q": torch.ones(3, 2, 4, DIM, requires_grad=True),
                   "cache_batch_idx": torch.arange(3).int()},
                  NotImplementedError, "q: requires grad"),
    "scale": ({"softmax_scale": math.nan}, ValueError,
              "softmax_scale: got nan, accepted is a finite positive number, or None"),
    "left": ({"cache_leftpad": torch.zeros(4).int()}, ValueError, "cache_leftpad: got 4 numbers"),
    "no tensor": ({"cache_leftpad": ((3,), (0, 32, 1), (1, 0), None)}, TypeError,
                  r"cache_leftpad: got tuple, accepted is a torch\.Tensor"),
    "index": ({"cache_batch_idx": torch.ones(3)}, TypeError, "cache_batch_idx: got dtype fp32"),
    "heads": ({"q": torch.ones(3, 2, 3, DIM)}, ValueError, "k_cache: got 2 heads, accepted are"),
    "sink": ({"s_aux": torch.ones(3)}, ValueError, "s_aux: its number of heads is 3, but q has 4"),
    "out": ({"out": torch.ones(3, 1, 4, DIM_V)}, ValueError, "out: its sequence length is 1"),
    "flag": ({"return_softmax_lse": 1}, TypeError, "return_softmax_lse: got 1 of type int"),
    "window": ({"window_size": (1,)}, ValueError, r"window_size: got \(1,\), accepted is a pair"),
    "cap": ({"softcap": math.nan}, TypeError, "softcap: got nan of type float, accepted is a num"),
    "rotary_seqlens": ({"rotary_cos": torch.ones(9, 4), "rotary_sin": torch.ones(9, 4),
                        "rotary_seqlens": torch.zeros(1).int()},
                       ValueError, "rotary_seqlens: got 1 numbers, accepted are 3, of 3 sequences"),
    "grad of rotated q": ({"rotary_cos": torch.ones(9, 4), "rotary_sin": torch.ones(9, 4),
                           "rotary_seqlens": torch.zeros(3).int(),
                           "q": torch.ones(3, 2, 4, DIM, requires_grad=True)},
                          ValueError, "q: requires grad"),
    "few of sin": ({"rotary_cos": torch.ones(9, 4), "rotary_sin": torch.ones(8, 4)}, ValueError,
                   "rotary_sin: its number of positions is 8, but rotary_cos has 9"),
    "grad of out": ({"out": torch.ones(3, 2, 4, DIM_V, requires_grad=True)}, ValueError,
                    "out: requires grad"),
    "splits": ({"num_splits": -1}, ValueError, "num_splits: got -1, accepted is a number of parts"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "error", "sentence"), WRONG.values(), ids=WRONG)
def test_what_is_wrong(given: dict[str, Any], error: Any, sentence: str) -> None:
    cache = Cache("plain")
    arguments = {
        "q": torch.ones(3, 2, 4, DIM), "k_cache": cache.k, "v_cache": cache.v,
        "k": torch.ones(3, 2, 2, DIM), "v": torch.ones(3, 2, 2, DIM_V),
        "cache_seqlens": torch.zeros(3, dtype=torch.int32),
    }  # fmt: skip
    flash_attn_with_kvcache(**arguments)  # it is known then that a like call is right
    cache.k.fill_(7), cache.v.fill_(7)
    with pytest.raises(error, match=f"^{sentence}"):
        flash_attn_with_kvcache(**arguments | given)
    assert (cache.k == 7).all()
    assert (cache.v == 7).all()


def test_an_output_over_the_cache_is_refused_before_it_is_written() -> None:
    k_cache, v_cache = (torch.zeros(2, 8, 2, DIM) for _ in range(2))
    q, k = torch.ones(2, 1, 2, DIM), torch.ones(2, 1, 2, DIM)
    lengths = torch.zeros(2, dtype=torch.int32)
    for out in (torch.empty(2, 1, 2, DIM), v_cache[:, 4:5]):  # alike but for where they lie
        wrong = out.data_ptr() == v_cache[:, 4:5].data_ptr()
        context = (
            pytest.raises(ValueError, match=r"^out: it shares memory") if wrong else nullcontext()
        )
        v_cache.zero_()
        with context:
            flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=lengths, out=out)
        assert bool(v_cache.any()) != wrong


RAGGED_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rotary_seqlens": ({"rotary_seqlens": torch.ones(1).int()},
                       "rotary_seqlens: got 1 numbers, accepted are 2, of 2 sequences"),
    "cache_seqlens": ({"cache_seqlens": torch.ones(1).int()},
                      "cache_seqlens: got 1 numbers, accepted are 2, of 2 sequences"),
    "of new keys": ({"cu_seqlens_k_new": torch.tensor([0, 1, 2, 2]).int()},
                    "cu_seqlens_k_new: got 4 numbers, accepted are 3, one more than there are"),
    "of no new keys": ({"cu_seqlens_k_new": torch.zeros(0).int()},
                       "cu_seqlens_k_new: got 0 numbers, accepted are 3, one more than there are"),
    "of queries": ({"cu_seqlens_q": torch.zeros(0).int()},
                   "cu_seqlens_q: got 0 numbers, accepted is one more than there are sequences"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "sentence"), RAGGED_WRONG.values(), ids=RAGGED_WRONG)
def test_tables_of_another_number_of_ragged_sequences(given: dict[str, Any], sentence: str) -> None:
    """With rotary, where positions are computed from them."""
    rows, table = torch.ones(2, 2, DIM), torch.rand(8, 4)
    cache, starts = torch.zeros(2, 4, 2, DIM), torch.tensor([0, 1, 2], dtype=torch.int32)
    arguments = {
        "q": rows, "k_cache": cache, "v_cache": torch.zeros_like(cache), "k": rows, "v": rows,
        "rotary_cos": table, "rotary_sin": table, "cache_seqlens": torch.ones(2).int(),
        "cu_seqlens_q": starts, "cu_seqlens_k_new": starts, "causal": True,
    }  # fmt: skip
    flash_attn_with_kvcache(**arguments)
    cache.zero_()
    with pytest.raises(ValueError, match=f"^{sentence}"):
        flash_attn_with_kvcache(**arguments | given)
    assert not cache.any()


@pytest.mark.parametrize("causal", [False, True])
def test_no_sequences_are_rotated(causal: bool) -> None:
    rows, cache, table = torch.ones(2, 2, DIM), torch.zeros(2, 4, 2, DIM), torch.rand(8, 4)
    starts = torch.zeros(1, dtype=torch.int32)
    out = flash_attn_with_kvcache(
        rows, cache, cache.clone(), rows[:0], rows[:0], table, table, cache_seqlens=starts[:0],
        block_table=torch.zeros(0, 2, dtype=torch.int32), cu_seqlens_q=starts,
        cu_seqlens_k_new=starts, causal=causal,
    )  # fmt: skip
    assert out.shape == rows.shape
    assert not cache.any()


def refused_and_unwritten(error: Any, sentence: str, **given: Any) -> None:
    k_cache, v_cache = (torch.zeros(2, 8, 2, DIM) for _ in range(2))
    new = torch.ones(2, 1, 2, DIM)
    arguments = {"q": new, "k": new, "v": new, "cache_seqlens": torch.zeros(2, dtype=torch.int32)}
    with pytest.raises(error, match=f"^{sentence}"):
        flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **arguments | given)
    assert not k_cache.any()
    assert not v_cache.any()


def test_an_inference_tensor_as_output_is_refused_before_the_cache_is_written() -> None:
    with torch.inference_mode():
        out = torch.empty(2, 1, 2, DIM)
    refused_and_unwritten(ValueError, "out: it is an inference tensor", out=out)


@pytest.mark.parametrize("name", ["q", "s_aux", "out"])
def test_a_tangent_is_refused_before_the_cache_is_written(name: str) -> None:
    forward_ad: Any = torch.autograd.forward_ad
    primal = torch.ones(2) if name == "s_aux" else torch.ones(2, 1, 2, DIM)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(primal, torch.ones_like(primal))
        refused_and_unwritten(ValueError, f"{name}: has a tangent", **{name: dual})


def test_an_output_that_autocast_does_not_give_is_refused_before_the_cache_is_written() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        refused_and_unwritten(TypeError, "out: got dtype fp32", out=torch.empty(2, 1, 2, DIM))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("what", ["cache", "out", "s_aux"])
def test_autocast_with_new_keys(what: str, grad: bool) -> None:
    """Gives what it gives without them."""
    narrow, lengths = torch.bfloat16, torch.tensor(LENGTHS, dtype=torch.int32)
    kept = narrow if what == "cache" else torch.float32
    cache = Cache("plain", kept)
    q = normal(BATCH, 2, HEADS, DIM, seed=1, dtype=torch.float32)
    k, v = (normal(BATCH, 2, HEADS_K, dim, seed=dim, dtype=kept) for dim in (DIM, DIM_V))
    given: dict[str, Any] = {"causal": True}
    if what == "s_aux":
        given["s_aux"] = torch.ones(HEADS, dtype=narrow)
    q.requires_grad_(grad and what != "out")
    out = torch.empty(BATCH, 2, HEADS, DIM_V, dtype=narrow) if what == "out" else None
    with torch.autocast("cpu", narrow):
        got = flash_attn_with_kvcache(
            q, cache.k, cache.v, k, v, cache_seqlens=lengths, out=out, **given
        )
        want = flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=lengths + 2, **given)
    assert got.dtype == narrow
    assert got.requires_grad == q.requires_grad
    torch.testing.assert_close(got, want, atol=0, rtol=0)


def test_under_autocast_the_check_before_an_append_copies_no_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flashmoe_science import _flash_attn

    cache, copied = Cache("plain"), []
    q = torch.ones(BATCH, 2, HEADS, DIM)
    how = {"sinks": None, "seqused_k": torch.tensor(LENGTHS, dtype=torch.int32)}
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *how: copied.append(x) or to(x, *how))
    with torch.autocast("cpu", torch.bfloat16):
        _flash_attn.check_before_append(q, cache.k, cache.v, how, False, None)
    assert [x is q for x in copied] == [True]
