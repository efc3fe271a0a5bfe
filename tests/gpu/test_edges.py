"""Edges of the definition: rows without keys, empty extents, NaN and infinity."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import pytest
import torch
from gpu import cases, memory, oracle

pytestmark = pytest.mark.gpu

# Every compiled kernel, some of them with dimensions that are padded to one.
DIMS = ((32, 32), (40, 24), (64, 64), (72, 96), (128, 128), (136, 160), (192, 128), (192, 192),
        (256, 256), (200, 248))  # fmt: skip


def _normal(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(cases.DTYPES[dtype])


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_rows_that_see_no_key(dtype: str, dim: int, dim_v: int, family: str) -> None:
    seq_q, seq_k = 333, 50
    blind = seq_q - seq_k
    q = _normal((2, seq_q, 3, dim), dtype)
    k, v = _normal((2, seq_k, 3, dim), dtype, 1), _normal((2, seq_k, 3, dim_v), dtype, 2)
    out, lse = fm.flash_attention(q, k, v, causal="bottom_right", return_lse=True, kernel=family)
    assert (memory.bits(out[:, :blind].contiguous()) == 0).all()  # +0
    assert lse[:, :, :blind].isneginf().all()
    assert lse[:, :, blind:].isfinite().all()
    oracle.assert_accurate(out, lse, q, k, v, "bottom_right")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("causal", cases.CAUSAL)
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_no_keys_at_all(dtype: str, causal: str, dim: int, dim_v: int, family: str) -> None:
    cases.check_case(
        cases.Case(dtype=dtype, batch=2, seq_q=70, seq_k=0, heads_q=2, heads_kv=1, dim=dim,
                   dim_v=dim_v, causal=causal, kernel=family),
        "cuda:0",
    )  # fmt: skip
    q = _normal((2, 70, 2, dim), dtype)
    k, v = q.new_empty(2, 0, 2, dim), q.new_empty(2, 0, 2, dim_v)
    out, lse = fm.flash_attention(
        q, k, v, causal=False if causal == "none" else causal, return_lse=True, kernel=family
    )
    assert (memory.bits(out) == 0).all()
    assert lse.isneginf().all()


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
@pytest.mark.parametrize(("batch", "seq_q", "seq_k"), [(0, 5, 5), (3, 0, 5), (0, 0, 0), (3, 0, 0)])
def test_empty_output(
    dtype: str, causal: bool | str, batch: int, seq_q: int, seq_k: int, family: str
) -> None:
    q = _normal((batch, seq_q, 4, 64), dtype)
    k = _normal((batch, seq_k, 2, 64), dtype)
    out, lse = fm.flash_attention(q, k, k, causal=causal, return_lse=True, kernel=family)
    assert tuple(out.shape) == (batch, seq_q, 4, 64)
    assert tuple(lse.shape) == (batch, 4, seq_q)
    torch.cuda.synchronize()


def _check_containment(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: str,
    clean: torch.Tensor,
    family: str,
    **mask: Any,
) -> None:
    option = False if causal == "none" else causal
    out, lse = fm.flash_attention(q, k, v, causal=option, **mask, return_lse=True, kernel=family)
    oracle.assert_accurate(out, lse, q, k, v, causal, **mask)
    # And no more than the reference has: rows of batch entry 0, which is clean, keep their bits.
    assert torch.equal(memory.bits(out[0]), memory.bits(clean[0]))


KEYS = (0, 1, 14, 31, 32, 33, 63, 64, 95, 96, 100, 127, 128, 130, 149, 191, 255, 256, 269)
LENGTHS = ((270, 270), (150, 270), (400, 270))


@pytest.mark.parametrize("causal", cases.CAUSAL)
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_nan_and_infinity_of_v_reach_the_rows_that_see_them(
    dtype: str, dim: int, dim_v: int, causal: str, family: str
) -> None:
    """One bad element of V in every batch entry but the first; masked keys weigh nothing, and
    0 * NaN must not be added for them, also not inside tiles on the diagonal."""
    bads = (float("nan"), float("inf"), float("-inf"))
    batch = 1 + len(bads) * len(KEYS)
    for seq_q, seq_k in LENGTHS:
        q = _normal((batch, seq_q, 2, dim), dtype)
        k, v = (
            _normal((batch, seq_k, 1, dim), dtype, 1),
            _normal((batch, seq_k, 1, dim_v), dtype, 2),
        )
        option = False if causal == "none" else causal
        clean = fm.flash_attention(q, k, v, causal=option, kernel=family)
        for i in range(1, batch):
            key, bad = KEYS[(i - 1) % len(KEYS)], bads[(i - 1) // len(KEYS)]
            v[i, key, 0, (7 * i) % dim_v] = bad
        _check_containment(q, k, v, causal, clean, family)


@pytest.mark.parametrize("causal", cases.CAUSAL)
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_nan_and_infinity_of_q_and_k_reach_the_rows_that_see_them(
    dtype: str, dim: int, dim_v: int, causal: str, family: str
) -> None:
    bads = (float("nan"), float("inf"), float("-inf"))
    batch = 1 + len(bads) * len(KEYS)
    for seq_q, seq_k in LENGTHS:
        q = _normal((batch, seq_q, 2, dim), dtype)
        k, v = (
            _normal((batch, seq_k, 1, dim), dtype, 1),
            _normal((batch, seq_k, 1, dim_v), dtype, 2),
        )
        option = False if causal == "none" else causal
        clean = fm.flash_attention(q, k, v, causal=option, kernel=family)
        good_q = q.clone()
        for i in range(1, batch):
            key, bad = KEYS[(i - 1) % len(KEYS)], bads[(i - 1) // len(KEYS)]
            k[i, key, 0, (5 * i) % dim] = bad
            q[i, key % seq_q, i % 2, (3 * i) % dim] = bad
        _check_containment(good_q, k, v, causal, clean, family)
        k = _normal((batch, seq_k, 1, dim), dtype, 1)
        _check_containment(q, k, v, causal, clean, family)


@pytest.mark.parametrize(("window", "softcap"), [((40, 70), None), ((128, None), 4.0)])
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_nan_and_infinity_stay_inside_a_window(
    dtype: str,
    dim: int,
    dim_v: int,
    window: tuple[int | None, int | None],
    softcap: float | None,
    family: str,
) -> None:
    """A bad key, in K, in V or in both: the rows next to those that see it keep clear of it, to the
    left of the window as to the right."""
    bads = (float("nan"), float("inf"))
    batch = 1 + len(bads) * len(KEYS)
    seq_q, seq_k = ((270, 270), (150, 270))[dim % 16 // 8]
    q = _normal((batch, seq_q, 2, dim), dtype)
    k, v = _normal((batch, seq_k, 1, dim), dtype, 1), _normal((batch, seq_k, 1, dim_v), dtype, 2)
    mask = {"window": window, "softcap": softcap}
    clean = fm.flash_attention(q, k, v, **mask, kernel=family)
    for i in range(1, batch):
        key, bad = KEYS[(i - 1) % len(KEYS)], bads[(i - 1) // len(KEYS)]
        if i % 3 != 0:
            k[i, key, 0, (5 * i) % dim] = bad
        if i % 3 != 1:
            v[i, key, 0, (7 * i) % dim_v] = bad
    _check_containment(q, k, v, "none", clean, family, **mask)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_rows_whose_window_holds_no_key(dtype: str, dim: int, dim_v: int, family: str) -> None:
    """Whole tiles of them, and parts of tiles, before the first key and behind the last."""
    seq_q, seq_k = 500, 150
    q = _normal((1, seq_q, 2, dim), dtype)
    k, v = _normal((1, seq_k, 2, dim), dtype, 1), _normal((1, seq_k, 2, dim_v), dtype, 2)
    for causal, window in ((False, (20, 30)), ("top_left", (20, None)), ("bottom_right", (0, 0))):
        options = {"causal": causal, "window": window}
        out, lse = fm.flash_attention(q, k, v, **options, return_lse=True, kernel=family)
        rows = torch.arange(seq_q, device="cuda")
        blind = ~oracle.visible(rows, seq_q, seq_k, **options).any(1)
        assert blind.any()
        assert (memory.bits(out[:, blind].contiguous()) == 0).all()  # +0
        assert lse[:, :, blind].isneginf().all()
        assert lse[:, :, ~blind].isfinite().all()
        oracle.assert_accurate(out, lse, q, k, v, **options)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("dim", "dim_v"), DIMS[::3])
def test_infinite_scores_under_a_softcap(dtype: str, dim: int, dim_v: int, family: str) -> None:
    """tanh takes them to +-1, and a NaN to a NaN."""
    q = _normal((1, 130, 1, dim), dtype)
    q[..., 0] = 1
    k, v = _normal((1, 300, 1, dim), dtype, 1), _normal((1, 300, 1, dim_v), dtype, 2)
    k[0, 50, 0, 0], k[0, 200, 0, 0] = float("inf"), float("-inf")
    for window in (None, (120, 30)):
        options = {"softcap": 3.0, "window": window}
        out, lse = fm.flash_attention(q, k, v, **options, return_lse=True, kernel=family)
        oracle.assert_accurate(out, lse, q, k, v, **options)
        assert lse.isfinite().all()
    k[0, 200, 0, 0] = float("nan")
    out, lse = fm.flash_attention(q, k, v, softcap=3.0, return_lse=True, kernel=family)
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_tanh_is_accurate_relative_to_its_value(dtype: str, family: str) -> None:
    """One key: lse is its logit. From where tanh is the identity to where it is 1."""
    numbers = torch.cat([torch.logspace(-4, 1.5, 1000), torch.linspace(0.1, 12, 1000)]).cuda()
    q = torch.zeros((1, 4000, 1, 64), device="cuda", dtype=cases.DTYPES[dtype])
    q[0, :, 0, 0] = torch.cat([numbers, -numbers])
    k = torch.zeros((1, 1, 1, 64), device="cuda", dtype=q.dtype)
    k[..., 0] = 1
    for cap in (1024.0, 131072.0):
        options = {"scale": cap, "softcap": cap, "return_lse": True, "kernel": family}
        _, lse = fm.flash_attention(q, k, k, **options)
        exact = cap * q[0, :, 0, 0].double().tanh()
        torch.testing.assert_close(lse[0, 0].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_several_bad_values_at_once(dtype: str, dim: int, dim_v: int, family: str) -> None:
    """Opposite infinities and NaNs of one column, each visible to more rows than the next."""
    q = _normal((3, 300, 2, dim), dtype)
    k, v = _normal((3, 300, 2, dim), dtype, 1), _normal((3, 300, 2, dim_v), dtype, 2)
    clean = fm.flash_attention(q, k, v, causal=True, kernel=family)
    for key in (40, 41, 130, 200, 299):
        v[1, key, 0, key % dim_v] = float("inf")
    v[1, 150, 0, 40 % dim_v] = float("-inf")
    v[2, 96, 1] = float("nan")
    v[2, 250, 0] = float("nan")
    k[2, 251, 1, 3] = float("nan")
    _check_containment(q, k, v, "bottom_right", clean, family)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_minus_infinity_scores(dtype: str, dim: int, dim_v: int, family: str) -> None:
    """Keys at -inf count as hidden beside finite ones; a row of nothing else is NaN."""
    q = _normal((1, 130, 1, dim), dtype)
    q[..., 0] = 1
    k, v = _normal((1, 600, 1, dim), dtype, 1), _normal((1, 600, 1, dim_v), dtype, 2)
    k[0, :520, 0, 0] = float("-inf")  # many whole steps of the main loop
    for keys in (600, 520):
        out, lse = fm.flash_attention(q, k[:, :keys], v[:, :keys], return_lse=True, kernel=family)
        oracle.assert_accurate(out, lse, q, k[:, :keys], v[:, :keys])
        assert out.isnan().all() if keys == 520 else out.isfinite().all()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_scores_beyond_the_exponent_range(dtype: str, family: str) -> None:
    q = torch.full((1, 200, 1, 8), 200.0, device="cuda", dtype=cases.DTYPES[dtype])
    k = torch.zeros((1, 300, 1, 8), device="cuda", dtype=q.dtype)
    k[0, 7], k[0, 290] = 100.0, 150.0
    v = _normal((1, 300, 1, 24), dtype)
    out, lse = fm.flash_attention(q, k, v, return_lse=True, kernel=family)
    assert (out[0, :, 0] == v[0, 290, 0]).all()
    torch.testing.assert_close(
        lse, torch.full_like(lse, 200.0 * 150.0 * 8 / 8**0.5), rtol=1e-6, atol=0
    )


# Magnitudes of q and k: their product with the scale takes more bits than fp32 has.
MAGNITUDES = {
    "fp16": [1.3125 * 2.0**e for e in (5, 12, 13, 14, 15)],
    "bf16": [1.3125 * 2.0**e for e in (12, 13, 14, 17, 31, 50, 62)],
}


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_logits_of_any_magnitude(dtype: str, dim: int, dim_v: int, family: str) -> None:
    """Up to the largest finite ones, of either sign, equal and apart."""
    for seq_q, seq_k in ((150, 270), (3, 5000)):
        v = _normal((1, seq_k, 1, dim_v), dtype, 1)
        generator = torch.Generator(device="cuda").manual_seed(seq_k)
        levels = torch.tensor([1, 0.75, 0.5, -0.5, -1], device="cuda")
        level_of_key = levels[torch.randint(5, (seq_k,), generator=generator, device="cuda")]
        for magnitude in MAGNITUDES[dtype]:
            q, k = torch.zeros((2, 1, 5000, 2, dim), device="cuda", dtype=v.dtype)
            q, k = q[:, :seq_q], k[:, :seq_k, :1]
            q[0, :, :, 0] = magnitude
            q[0, 1::2, :, 0] = -magnitude
            k[0, :, 0, 0] = level_of_key * magnitude
            for causal, window in (("none", None), ("bottom_right", None), ("none", (40, 30))):
                out, lse = fm.flash_attention(
                    q, k, v, causal=False if causal == "none" else causal, window=window,
                    return_lse=True, kernel=family,
                )  # fmt: skip
                oracle.assert_accurate(out, lse, q, k, v, causal, window=window)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("dim", "dim_v"), DIMS[::3])
def test_keys_far_below_the_others_weigh_nothing(
    dtype: str, dim: int, dim_v: int, family: str
) -> None:
    """Whole steps of them, before and behind the others."""
    for seq_q, seq_k in ((150, 900), (3, 5000)):
        q = _normal((1, seq_q, 2, dim), dtype)
        k, v = _normal((1, seq_k, 1, dim), dtype, 1), _normal((1, seq_k, 1, dim_v), dtype, 2)
        k[..., 0] = 0
        for magnitude in MAGNITUDES[dtype]:
            q[..., 0] = magnitude
            k[:, 3 * seq_k // 5 :, :, 0] = -magnitude
            k[:, : seq_k // 5, :, 0] = -magnitude
            out, lse = fm.flash_attention(q, k, v, return_lse=True, kernel=family)
            oracle.assert_accurate(out, lse, q, k, v)
            among = slice(seq_k // 5, 3 * seq_k // 5)
            clean = q.clone()
            clean[..., 0] = 0
            oracle.assert_accurate(out, lse, clean, k[:, among], v[:, among])


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("keys", [1, 2, 77])
def test_the_average_of_keys_with_one_large_logit(dtype: str, keys: int, family: str) -> None:
    value = {"fp16": 65504.0, "bf16": 133120.0}[dtype]
    q = torch.full((1, 5, 1, 64), value, device="cuda", dtype=cases.DTYPES[dtype])
    v = _normal((1, keys, 1, 64), dtype)
    k = torch.full((1, keys, 1, 64), value, device="cuda", dtype=q.dtype)
    out, lse = fm.flash_attention(q, k, v, return_lse=True, kernel=family)
    want = v.double().mean(1, keepdim=True)
    torch.testing.assert_close(out.double(), want.expand(1, 5, 1, 64), rtol=1e-2, atol=1e-3)
    exact = torch.full_like(lse, float(q[0, 0, 0, 0]) ** 2 * 64 / 8)
    torch.testing.assert_close(lse, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_single_key_passes_v_through(dtype: str, family: str) -> None:
    """Denormals and the largest numbers, bit by bit."""
    pattern = torch.arange(256, device="cuda", dtype=torch.int32) * 256 + 1
    v = pattern.to(torch.int16).view(cases.DTYPES[dtype]).reshape(1, 1, 1, 256)
    keep = v.isfinite() & (v.double().abs() >= torch.finfo(torch.float32).tiny)
    v = torch.where(keep, v, torch.ones_like(v))
    q = torch.zeros((1, 1, 1, 8), device="cuda", dtype=v.dtype)
    out, lse = fm.flash_attention(q, q, v, return_lse=True, kernel=family)
    assert torch.equal(memory.bits(out), memory.bits(v))
    assert lse.item() == 0.0


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("causal", [False, "top_left"])
def test_equal_logits_average(dtype: str, causal: bool | str, family: str) -> None:
    q = torch.ones((1, 500, 2, 64), device="cuda", dtype=cases.DTYPES[dtype])
    k = torch.full_like(q, 0.5)
    v = _normal((1, 500, 2, 64), dtype)
    out, lse = fm.flash_attention(q, k, v, causal=causal, return_lse=True, kernel=family)
    oracle.assert_accurate(out, lse, q, k, v, causal or "none")
    count = torch.arange(1, 501, device="cuda") if causal else torch.tensor(500.0, device="cuda")
    want = (32 / 8 + count.double().log()).expand(500)
    torch.testing.assert_close(lse[0, 1].double(), want, rtol=0, atol=1e-5)
