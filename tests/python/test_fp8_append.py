"""kv_append to caches of fp8 (e4m3): what a cache of k's dtype would get, divided by a scale and
rounded as torch rounds it; in every framework, and what is refused."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest

torch = pytest.importorskip("torch")

FP8 = torch.float8_e4m3fn
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PAGES, PAGE, HEADS = 7, 8, 3


def codes(tensor: Any) -> Any:
    return tensor.view(torch.uint8)


def rounded(numbers: Any, scale: Any) -> Any:
    """[pages, rows, heads, dim] by scales of [pages or 1, heads or 1]."""
    divided = numbers.float() / scale.expand(numbers.shape[0], numbers.shape[2])[:, None, :, None]
    return divided.clamp(-448, 448).to(FP8)


def arguments(dtype: Any, rotary: str = "", dim: int = 48, dim_v: int = 32) -> dict[str, Any]:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "k": (torch.randn(2, 5, HEADS, dim) * 9).to(dtype),
        "v": (torch.randn(2, 5, HEADS, dim_v) * 200).to(dtype),
        "cache_seqlens": torch.tensor([2, 12], dtype=torch.int32),
        "page_table": torch.tensor([[3, 0, -1], [5, 2, 6]], dtype=torch.int32),
        "seqused": torch.tensor([5, 4], dtype=torch.int32),
    }  # fmt: skip
    if rotary:
        angles = torch.rand(20, {"neox": 16, "interleaved": 16, "odd": 3}[rotary]) * 6
        given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(),
                  "interleaved": rotary == "interleaved",
                  "q": torch.randn(2, 5, 4, dim).to(dtype)}  # fmt: skip
    return given


def caches(dtype: Any, dim: int = 48, dim_v: int = 32) -> list[Any]:
    """Full of one number."""
    made = [torch.full((PAGES, PAGE, HEADS, n), 3.0).to(dtype) for n in (dim, dim_v)]
    return made


@pytest.mark.parametrize("rotary", ["", "neox", "interleaved", "odd"])
@pytest.mark.parametrize("scales", ["none", "one", "heads", "pages"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_nearest_numbers(dtype: str, scales: str, rotary: str) -> None:
    given = arguments(DTYPES[dtype], rotary)
    shape = {"none": (1, 1), "one": (), "heads": (HEADS,), "pages": (PAGES, HEADS)}[scales]
    torch.manual_seed(1)
    k_scale, v_scale = torch.rand(shape) + 0.1, torch.rand(shape) * 0.7 + 0.2
    if scales == "none":
        k_scale = v_scale = torch.ones(1, 1)
    given_scales = {} if scales == "none" else {"k_scale": k_scale, "v_scale": v_scale}
    narrow, wide = caches(FP8), caches(DTYPES[dtype])
    turned = fm.kv_append(k_cache=narrow[0], v_cache=narrow[1], **given_scales, **given)
    same = fm.kv_append(k_cache=wide[0], v_cache=wide[1], **given)
    assert turned is same is None or torch.equal(turned, same)
    saturated = 0
    for got, numbers, scale in zip(narrow, wide, (k_scale, v_scale), strict=True):
        fresh = (numbers != 3).any(-1)
        want = rounded(numbers, scale)
        assert torch.equal(codes(got)[fresh], codes(want)[fresh])
        assert (got.float()[~fresh] == 3).all() and fresh.sum() == 9 * HEADS
        saturated += int((want.float().abs() == 448).sum())
    assert saturated > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_16_bits_and_all_that_lie_between(dtype: str) -> None:
    """Ties go to the even one; NaN stays NaN, infinity is the largest number."""
    if dtype == "fp32":
        exact = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FP8).float()
        exact = exact[~exact.isnan()].sort().values
        middle = (exact[1:] + exact[:-1]) / 2
        above, below = (torch.nextafter(middle, torch.tensor(s)) for s in (torch.inf, -torch.inf))
        numbers = torch.cat([exact, middle, above, below, torch.tensor([1e-30, 2**-10, 470, 1e30])])
    else:
        numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    dim = 64
    rows = numbers[: len(numbers) // dim * dim].view(1, -1, 1, dim)
    cache = [torch.zeros(rows.shape).to(FP8) for _ in range(2)]
    fm.kv_append(rows, rows, *cache)
    want = rows.float().clamp(-448, 448).to(FP8)
    nan = rows.float().isnan()
    for got in cache:
        assert torch.equal(codes(got)[~nan], codes(want)[~nan])
        assert (codes(got)[nan] == 0x7F).all()


def test_attention_of_what_was_appended() -> None:
    """A cache of a scale's multiples comes back as it was."""
    torch.manual_seed(0)
    scale = torch.tensor([0.25, 2.0])
    numbers = [torch.randn(3, 20, 2, 32).to(FP8).float() for _ in range(2)]
    k, v = ((x * scale[None, None, :, None]).bfloat16() for x in numbers)
    cache = [torch.zeros(3, 24, 2, 32).to(FP8) for _ in range(2)]
    fm.kv_append(k, v, *cache, k_scale=scale, v_scale=scale)
    q = torch.randn(3, 1, 4, 32).bfloat16()
    used = torch.full((3,), 20, dtype=torch.int32)
    got = fm.flash_attention(q, *cache, k_scale=scale, v_scale=scale, seqused_k=used)
    assert torch.equal(got, fm.flash_attention(q, k, v))


@pytest.mark.parametrize("framework", ["numpy", "jax", "compile"])
def test_other_frameworks(framework: str) -> None:
    given = arguments(torch.float32, "neox")
    scales = {"k_scale": torch.tensor([0.3, 1.0, 2.1]), "v_scale": torch.tensor(0.7)}
    want = caches(FP8)
    turned = fm.kv_append(k_cache=want[0], v_cache=want[1], **scales, **given)
    got = caches(FP8)
    if framework == "compile":
        call = torch.compile(
            lambda k_cache, v_cache: fm.kv_append(
                k_cache=k_cache, v_cache=v_cache, **scales, **given
            ),
            fullgraph=True, backend="eager",
        )  # fmt: skip
        assert torch.equal(call(*got), turned)
    else:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        arrays = [codes(x).numpy().view(ml_dtypes.float8_e4m3fn) for x in got]
        others = {n: x.numpy() if torch.is_tensor(x) else x for n, x in (given | scales).items()}
        if framework == "numpy":
            made = fm.kv_append(k_cache=arrays[0], v_cache=arrays[1], **others)
        else:
            jnp = pytest.importorskip("jax.numpy")
            others = {
                n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in others.items()
            }
            *arrays, made = fm.kv_append(
                k_cache=jnp.asarray(arrays[0]), v_cache=jnp.asarray(arrays[1]), **others
            )
        np.testing.assert_array_equal(np.asarray(made), turned.numpy())
        got = [torch.from_numpy(np.asarray(x).view(np.uint8).copy()).view(FP8) for x in arrays]
    assert all(torch.equal(codes(x), codes(y)) for x, y in zip(got, want, strict=True))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "k": ({"k": torch.ones(1, 2, 1, 16).to(FP8)}, TypeError, "k: got dtype fp8_e4m3, accepted are"),
    "one cache": (
        {"v_cache": torch.ones(1, 4, 1, 16).half()}, TypeError,
        "v_cache: got dtype fp16, accepted is fp8_e4m3 as k_cache's",
    ),
    "fp64": (
        {"k": torch.ones(1, 2, 1, 16).double(), "v": torch.ones(1, 2, 1, 16).double()}, TypeError,
        "k_cache: got dtype fp8_e4m3, accepted is fp64 as k's",
    ),
    "scale of another cache": (
        {"k_cache": torch.ones(1, 4, 1, 16).half(), "v_cache": torch.ones(1, 4, 1, 16).half(),
         "k_scale": torch.ones(1)}, ValueError,
        "k_scale: got one, accepted with caches of k's dtype is none",
    ),
    "shape of a scale": ({"v_scale": torch.ones(2, 1)}, ValueError, "v_scale: got shape [2, 1]"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, kind, sentence = REFUSED[name]
    given: dict[str, Any] = {n: torch.ones(1, 2, 1, 16).half() for n in ("k", "v")}
    given |= {n: torch.ones(1, 4, 1, 16).to(FP8) for n in ("k_cache", "v_cache")}
    with pytest.raises(kind) as raised:
        fm.kv_append(**(given | changes))
    assert str(raised.value).startswith(sentence)


def test_a_plan_says_so() -> None:
    k = torch.ones(1, 2, 1, 16).half()
    cache = torch.ones(1, 4, 1, 16).to(FP8)
    plan = fm.kv_append_plan(k, k, cache, cache.clone())
    assert plan.launches[0].kernel == f"kv_append_cpu_{plan.isa}_fp16_fp8"
