"""Hopper's kernels for short windows, which take all keys of 64 rows at once: by name against
float64, and that the plan chooses them and what it chose is launched."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import kernels
import pytest
import torch
from gpu import cases, oracle, ragged
from gpu.cases import Case
from kernels import Kernel

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
WINDOW_KERNELS = sorted(
    kernel for kernel in kernels.attention("sm90_whole_tiles") if kernel.windowed
)
DENSE = [kernel for kernel in WINDOW_KERNELS if not kernel.ragged]
RAGGED = [kernel for kernel in WINDOW_KERNELS if kernel.ragged]
# Keys before and behind a query, 128 at most together.
WINDOWS = ((127, 0), (128, 0), (64, 64), (0, 128), (0, 0), (1, 127), (63, 1), (5, 70), (31, 31))
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257, 384, 500, 1021)


def _require(kernel: Kernel) -> None:
    q = torch.zeros(1, 300, 1, 64, dtype=cases.DTYPES[kernel.dtype], device=DEVICE)
    try:
        fm.attention_plan(q, q, q, causal=True, kernel="sm90_whole_tiles")
    except (NotImplementedError, ValueError) as error:
        pytest.skip(str(error))


def _check(case: Case, name: str) -> None:
    try:
        cases.check_case(case, DEVICE)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error
    assert fm.last_launches()[0].kernel == name, str(case)


@pytest.mark.parametrize("kernel", DENSE, ids=lambda kernel: kernel.table_name)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_every_pair_of_lengths(kernel: Kernel, window: tuple[int, int]) -> None:
    """Where a bound hides no key the call is served by its name all the same."""
    _require(kernel)
    for i, seq_q in enumerate(LENGTHS):
        for j, seq_k in enumerate(LENGTHS):
            causal = cases.CAUSAL[(i + j) % 3] if window[1] == 0 else "none"
            case = Case(dtype=kernel.dtype, seq_q=seq_q, seq_k=seq_k, heads_q=2, heads_kv=1,
                        causal=causal, window=window, kernel=kernel.table_name,
                        sinks=(None, "normal")[(i + j) % 2], layout=("bshd", "bhsd")[i % 2],
                        entry=("python", "c")[j % 2], seed=i)  # fmt: skip
            _check(case, kernel.table_name)


@pytest.mark.parametrize("kernel", DENSE, ids=lambda kernel: kernel.table_name)
@pytest.mark.parametrize("values", sorted(set(cases.VALUES)))
def test_every_kind_of_values(kernel: Kernel, values: str) -> None:
    _require(kernel)
    for i, (dim, dim_v) in enumerate(((64, 64), (40, 24), (8, 64))):
        for sinks in (None, *cases.SINKS):
            case = Case(dtype=kernel.dtype, batch=2, seq_q=700, seq_k=700 + 37 * i, heads_q=6,
                        heads_kv=2, dim=dim, dim_v=dim_v, causal="bottom_right",
                        window=(100, None), values=values, sinks=sinks,
                        kernel=kernel.table_name, seed=i)  # fmt: skip
            _check(case, kernel.table_name)


@pytest.mark.parametrize("kernel", DENSE, ids=lambda kernel: kernel.table_name)
def test_more_tiles_than_blocks(kernel: Kernel) -> None:
    """Rings wrap around, and tiles of other heads follow each other."""
    _require(kernel)
    for seed, (seq_q, seq_k, window) in enumerate(
        ((4099, 4099, (127, 0)), (3000, 2000, (50, 0)), (2000, 2777, (20, 108)))
    ):
        case = Case(dtype=kernel.dtype, batch=2, seq_q=seq_q, seq_k=seq_k, heads_q=16, heads_kv=2,
                    window=window, kernel=kernel.table_name, seed=seed)  # fmt: skip
        _check(case, kernel.table_name)


@pytest.mark.parametrize("kernel", DENSE, ids=lambda kernel: kernel.table_name)
def test_what_is_not_finite_reaches_the_rows_that_see_it(kernel: Kernel) -> None:
    """A block of keys is multiplied for 64 rows, of which some see the key and others do not."""
    _require(kernel)
    for bad in (float("nan"), float("inf")):
        for key in (0, 130, 449):
            q, k, v = (
                torch.randn(1, 450, 2, 64, device=DEVICE).to(cases.DTYPES[kernel.dtype])
                for _ in range(3)
            )
            v[:, key] = bad
            options = {"causal": True, "window": (127, None)}
            out = fm.flash_attention(q, k, v, **options, kernel=kernel.table_name)
            assert fm.last_launches()[0].kernel == kernel.table_name
            rows = torch.arange(450, device=DEVICE)
            seen = (rows >= key) & (rows <= key + 127)
            assert not out[:, seen].isfinite().any()
            assert out[:, ~seen].isfinite().all()
            oracle.assert_accurate(out, None, q, k, v, **options)


@pytest.mark.parametrize("kernel", DENSE, ids=lambda kernel: kernel.table_name)
def test_infinities_of_few_keys(kernel: Kernel) -> None:
    """What stands for steps that there are not leaves no NaN, where no key is hidden either."""
    _require(kernel)
    q, k, v = (
        torch.randn(1, n, 2, 64, device=DEVICE).to(cases.DTYPES[kernel.dtype]) for n in (70, 30, 30)
    )
    v[:, 5] = float("inf")
    lengths = torch.full((1,), 30, dtype=torch.int32, device=DEVICE)
    ragged_name = kernel.table_name.replace("_window", "_ragged_window")
    for name, tables in ((kernel.table_name, {}), (ragged_name, {"seqused_k": lengths})):
        out = fm.flash_attention(q, k, v, kernel=name, **tables)
        assert fm.last_launches()[0].kernel == name
        assert (out == float("inf")).all()


def _plan(dtype: str, dim: int = 64, seq: int = 2048, **options: Any) -> Any:
    q = torch.zeros(2, seq, 8, dim, dtype=cases.DTYPES[dtype], device=DEVICE)
    k = torch.zeros(2, seq, 2, dim, dtype=cases.DTYPES[dtype], device=DEVICE)
    return fm.attention_plan(q, k, k, **options)


@pytest.mark.parametrize("kernel", DENSE, ids=lambda kernel: kernel.table_name)
def test_the_plan_takes_it_for_short_windows_alone(kernel: Kernel) -> None:
    _require(kernel)
    for options in (
        {"causal": True, "window": (128, None)},
        {"causal": "top_left", "window": (127, 0)},
        {"window": (64, 64)},
        {"dim": 32, "causal": True, "window": (127, None)},
    ):
        assert _plan(kernel.dtype, **options).launches[0].kernel == kernel.table_name
    for options in (
        {"causal": True, "window": (129, None)},
        {"causal": True},
        {"window": (64, None)},
        {"causal": True, "window": (127, None), "softcap": 20.0},
        {"dim": 128, "causal": True, "window": (127, None)},
        {"seq": 100, "causal": True, "window": (127, None)},
        {"seq": 200, "causal": True, "window": (127, None)},  # one wave of tiles of two steps
    ):
        assert "window" not in _plan(kernel.dtype, **options).launches[0].kernel


@pytest.mark.parametrize("kernel", RAGGED, ids=lambda kernel: kernel.table_name)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_sequences_have_the_bits_of_dense_calls(kernel: Kernel, window: tuple[int, int]) -> None:
    _require(kernel)
    lengths_q = (5, 0, 1, 40, 300, 1, 129, 640, 64)
    lengths_k = (9, 300, 0, 33, 170, 515, 128, 640, 200)
    for seed, heads in enumerate(((4, 2), (8, 1))):
        batch = ragged.make(lengths_q, lengths_k, dtype=kernel.dtype, heads=heads, sinks=seed == 1,
                            seed=seed)  # fmt: skip
        options: dict[str, Any] = {"window": window}
        if window[1] == 0:
            options["causal"] = ("bottom_right", "top_left")[seed]
        for name, call in ragged.ways(batch).items():
            got = ragged.check(batch, call, DEVICE, kernel="sm90_whole_tiles", **options)
            assert got.kernel == kernel.table_name, name


@pytest.mark.parametrize("kernel", RAGGED, ids=lambda kernel: kernel.table_name)
@pytest.mark.parametrize("size", [1, 16, 48, 256])
def test_pages(kernel: Kernel, size: int) -> None:
    _require(kernel)
    batch = ragged.make((200, 1, 333), (200, 900, 500), dtype=kernel.dtype)
    got = ragged.check(batch, ragged.paginate(batch, size), DEVICE, kernel="sm90_whole_tiles",
                       causal="bottom_right", window=(127, None))  # fmt: skip
    assert got.kernel == kernel.table_name
