"""Caches of fp8 (e4m3) on a GPU: attention has the bits of the widened cache, appending those of
the CPU; scales of every shape beside float64; NaN in all that no sequence has."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import kernels
import pytest
import torch

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
FP8 = torch.float8_e4m3fn
NAN_CODES = (0x7F, 0xFF)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LENGTHS = (1500, 0, 17, 3000, 300, 64, 1)


def as_codes(tensor: Any) -> Any:
    return tensor.view(torch.uint8)


def bits(tensor: Any) -> Any:
    return tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def assert_same(got: Any, want: Any) -> None:
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(bits(mine), bits(other))


class Paged:
    """Sequences whose keys are in pages, in any order; other rows hold NaN."""

    def __init__(self, dtype: Any, size: int, queries: int, heads: tuple[int, int], dim: int,
                 dim_v: int, lengths: tuple[int, ...] = LENGTHS, seed: int = 0):  # fmt: skip
        self.lengths, self.size = lengths, size
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        normal = lambda *s: torch.randn(s, device=DEVICE, generator=self.generator)  # noqa: E731
        needed = [-(-n // size) for n in lengths]
        self.pages = sum(needed) + 7
        self.heads = heads[1]
        self.q = normal(len(lengths), queries, heads[0], dim).to(dtype)
        self.k, self.v = (normal(self.pages, size, heads[1], n).to(FP8) for n in (dim, dim_v))
        order = torch.randperm(self.pages, device=DEVICE, generator=self.generator).int()
        shape = (len(lengths), max(needed) + 2)
        self.table = torch.full(shape, 1 << 30, dtype=torch.int32, device=DEVICE)
        for b, (count, n) in enumerate(zip(needed, lengths, strict=True)):
            self.table[b, :count], order = order[:count], order[count:]
            if n % size:
                for tensor, code in zip((self.k, self.v), NAN_CODES, strict=True):
                    as_codes(tensor)[int(self.table[b, n // size]), n % size :] = code
        self.free = order.long()
        for tensor, code in zip((self.k, self.v), NAN_CODES, strict=True):
            as_codes(tensor)[self.free] = code
        used = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.tables = {"page_table": self.table, "seqused_k": used}

    def random(self, *shape: int) -> Any:
        return torch.rand(shape, device=DEVICE, generator=self.generator)

    def widened(self, k_scale: Any = None, v_scale: Any = None) -> tuple[Any, ...]:
        made = []
        for tensor, scale in ((self.k, k_scale), (self.v, v_scale)):
            by = 1.0 if scale is None else scale.expand(self.pages, self.heads)[:, None, :, None]
            made.append((tensor.float() * by).to(self.q.dtype))
        return tuple(made)

    def call(self, **options: Any) -> tuple[Any, Any]:
        """out and lse, and the name of the kernel is kept."""
        made = fm.flash_attention(
            self.q, self.k, self.v, return_lse=True, **self.tables, **options
        )  # fmt: skip
        self.kernel = fm.last_launches()[0].kernel
        return made

    def call_wide(self, scales: tuple[Any, Any] = (None, None), **options: Any) -> tuple[Any, Any]:
        """By the same schedule, over the cache in q's dtype."""
        return fm.flash_attention(
            self.q, *self.widened(*scales), return_lse=True, **self.tables,
            kernel=self.kernel.removesuffix("_fp8"), **options,
        )  # fmt: skip


def exact(batch: Paged, k_scale: Any, v_scale: Any) -> Any:
    """out in float64, causal from the last key back."""
    q = batch.q.double()
    group = q.shape[2] // batch.heads
    out = torch.zeros(*q.shape[:3], batch.v.shape[3], dtype=torch.float64, device=DEVICE)
    for b, n in enumerate(batch.lengths):
        pages = batch.table[b, : -(-n // batch.size)].long()
        k, v = (
            (x[pages].double() * s[pages].double()[:, None, :, None]).flatten(0, 1)[:n]
            for x, s in ((batch.k, k_scale), (batch.v, v_scale))
        )
        at = torch.arange(n, device=DEVICE) - (n - q.shape[1])
        hidden = at > torch.arange(q.shape[1], device=DEVICE)[:, None]
        for h in range(q.shape[2]):
            logits = q[b, :, h] @ k[:, h // group].T / q.shape[3] ** 0.5
            weights = logits.masked_fill(hidden, -torch.inf).softmax(1)
            out[b, :, h] = weights.nan_to_num(0) @ v[:, h // group]
    return out


def _kernels() -> list[kernels.Kernel]:
    return sorted(kernel for kernel in kernels.attention("sm89_decode") if kernel.fp8)


@pytest.mark.parametrize("split_size", [None, 256])
@pytest.mark.parametrize(("size", "queries"), [(1, 1), (16, 1), (48, 3)])
@pytest.mark.parametrize("compiled", _kernels(), ids=lambda k: k.table_name.split("decode_")[1])
def test_bits_and_values(
    compiled: kernels.Kernel, size: int, queries: int, split_size: int | None
) -> None:
    dtype = DTYPES[compiled.dtype]
    heads = (2 * min(compiled.rows, 6), 2)
    batch = Paged(dtype, size, queries, heads, compiled.dim, compiled.dim_v)
    options = {"causal": True, "split_size": split_size}
    got = batch.call(kernel=compiled.table_name, **options)
    assert batch.kernel == compiled.table_name
    assert_same(got, batch.call_wide(**options))
    # Powers of two: as good as multiplied. In fp16 weights less a page's scale may be subnormal.
    exponents = torch.randint(-4, 5, (batch.pages, batch.heads), device=DEVICE)
    exponents = exponents[:1] if dtype == torch.float16 else exponents
    scale = torch.exp2(exponents.float())
    got = batch.call(kernel=compiled.table_name, k_scale=scale, v_scale=scale, **options)
    assert_same(got, batch.call_wide((scale, scale), **options))
    # Scales per head in any shape.
    of_heads = batch.random(batch.heads) + 0.3
    shapes = (of_heads, of_heads.expand(batch.pages, -1).contiguous())
    made = [batch.call(kernel=compiled.table_name, k_scale=s, v_scale=s, **options) for s in shapes]
    assert_same(*made)
    # Any, beside float64 and beside a cache that is multiplied and rounded.
    k_scale = batch.random(batch.pages, batch.heads) + 0.3
    v_scale = (batch.random(batch.pages, batch.heads) + 0.03) * 0.02
    k_scale[batch.free] = v_scale[batch.free] = torch.nan
    out, _ = batch.call(kernel=compiled.table_name, k_scale=k_scale, v_scale=v_scale, **options)
    want = exact(batch, k_scale, v_scale)
    near, _ = batch.call_wide((k_scale, v_scale), **options)
    allowed = 2 * (near.double() - want).abs().max() + 1e-4 * want.abs().max()
    assert (out.double() - want).abs().max() <= allowed


@pytest.mark.parametrize(
    "options", [{}, {"window": (100, None)}, {"softcap": 3.0}, {"sinks": True}], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code(dtype: str, options: dict[str, Any]) -> None:
    batch = Paged(DTYPES[dtype], 16, 4, (8, 2), 128, 128, (900, 256, 40))
    batch.q *= 0.02
    if "sinks" in options:
        options = {"sinks": torch.randn(8, device=DEVICE)}
    for tensor in (batch.k, batch.v):
        made = torch.randint(0, 256, tensor.shape, device=DEVICE, generator=batch.generator)
        as_codes(tensor).copy_(torch.where(made % 128 == 127, 0, made).to(torch.uint8))
    got = batch.call(causal=True, kernel="sm89_decode", **options)
    assert_same(got, batch.call_wide(causal=True, **options))


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_reaches_the_rows_that_see_it_alone(dtype: str, which: str) -> None:
    """A NaN in a sequence's last key reaches its last query, for the query heads of one KV head."""
    batch = Paged(DTYPES[dtype], 16, 4, (8, 2), 128, 128, (900, 256, 40))
    tensor = batch.k if which == "k" else batch.v
    as_codes(tensor)[int(batch.table[0, 899 // 16]), 899 % 16, 0, 5] = 0xFF
    scale = torch.tensor(0.7, device=DEVICE)
    out, _ = batch.call(causal=True, kernel="sm89_decode", v_scale=scale)
    nan = out.isnan()
    assert nan[0, 3, :4].any(-1).all() and nan.sum() == (4 * 128 if which == "k" else 4)


@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
def test_a_nan_scale_reaches_the_rows_that_see_its_page_alone(which: str) -> None:
    batch = Paged(torch.bfloat16, 16, 4, (8, 2), 128, 128, (897, 256, 40))
    scale = torch.ones(batch.pages, 1, device=DEVICE)
    scale[int(batch.table[0, 56])] = torch.nan
    out, _ = batch.call(causal=True, kernel="sm89_decode", **{which: scale})
    assert out[0, 3].isnan().all() and out.isnan().sum() == 8 * 128


@pytest.mark.parametrize("queries", [1, 200])
def test_rows_of_a_batch_and_prompts(queries: int) -> None:
    """sm89_decode is chosen, since the others refuse; for dense batches, too."""
    k, v = (torch.randn(3, 700, 2, 128, device=DEVICE).to(FP8) for _ in range(2))
    q = torch.randn(3, queries, 8, 128, device=DEVICE).bfloat16()
    scale = torch.tensor([[0.5, 2], [1, 4], [0.25, 1]], device=DEVICE)
    wide = [(x.float() * scale[:, None, :, None]).bfloat16() for x in (k, v)]
    index = torch.tensor([2, 0, 7], dtype=torch.int32, device=DEVICE)
    every = torch.full((3,), 700, dtype=torch.int32, device=DEVICE)
    for tables, same in (({}, {"seqused_k": every}), ({"batch_index": index},) * 2):
        got = fm.flash_attention(q, k, v, causal=True, k_scale=scale, v_scale=scale, **tables)
        kernel = fm.last_launches()[0].kernel
        assert kernel.startswith("attention_forward_sm89_decode_") and kernel.endswith("_fp8")
        plain = kernel.removesuffix("_fp8")
        want = fm.flash_attention(q, *wide, causal=True, kernel=plain, **same)
        assert_same([got], [want])


@pytest.mark.parametrize("kernel", ["sm89", "mixed", "sm89_few_rows", "sm90"])
def test_other_families_say_why(kernel: str) -> None:
    batch = Paged(torch.bfloat16, 16, 70, (8, 2), 64, 64)
    with pytest.raises((NotImplementedError, ValueError), match="kernel"):
        batch.call(kernel=kernel)


def test_one_capture_serves_other_scales() -> None:
    batch = Paged(torch.bfloat16, 16, 1, (8, 2), 128, 128)
    scale = torch.ones(batch.pages, 2, device=DEVICE)
    batch.call(k_scale=scale, v_scale=scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = batch.call(k_scale=scale, v_scale=scale)
    for seed in range(3):
        scale.copy_(torch.exp2(torch.randint(-3, 4, scale.shape, device=DEVICE).float()) + seed)
        graph.replay()
        assert_same(captured, batch.call(k_scale=scale, v_scale=scale))


@pytest.mark.parametrize("rotary", ["", "neox", "interleaved", "odd"])
@pytest.mark.parametrize("scales", ["none", "heads", "pages"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_appending_has_the_bits_of_the_cpu(dtype: str, scales: str, rotary: str) -> None:
    torch.manual_seed(0)
    pages, size, heads, dim, dim_v = 7, 8, 3, 48, 32
    kind = torch.float32 if dtype == "fp32" else DTYPES[dtype]
    given: dict[str, Any] = {
        "k": (torch.randn(2, 5, heads, dim) * 9).to(kind),
        "v": (torch.randn(2, 5, heads, dim_v) * 200).to(kind),
        "cache_seqlens": torch.tensor([2, 12], dtype=torch.int32),
        "page_table": torch.tensor([[3, 0, -1], [5, 2, 6]], dtype=torch.int32),
    }  # fmt: skip
    given["v"][0, 0, 0, :4] = torch.tensor([torch.inf, -torch.inf, 1e-6, -1e-9])
    if rotary:
        angles = torch.rand(20, {"neox": 16, "interleaved": 16, "odd": 3}[rotary]) * 6
        given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(),
                  "q": torch.randn(2, 5, 4, dim).to(kind)}  # fmt: skip
    shape = {"none": (1,), "heads": (heads,), "pages": (pages, heads)}[scales]
    if scales != "none":
        given |= {"k_scale": torch.rand(shape) + 0.1, "v_scale": torch.rand(shape) + 0.2}
    made = []
    for device in ("cpu", DEVICE):
        caches = [torch.zeros(pages, size, heads, n).to(FP8).to(device) for n in (dim, dim_v)]
        there = {name: tensor.to(device) for name, tensor in given.items()}
        turned = fm.kv_append(
            k_cache=caches[0], v_cache=caches[1], interleaved=rotary == "interleaved", **there
        )
        made.append([as_codes(cache).cpu() for cache in caches] + [turned])
    assert torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][1], made[1][1])
    assert made[0][2] is None or torch.equal(made[0][2], made[1][2].cpu())
