"""Attention on the GPU against float64: shapes, lengths, masks, strides, magnitudes.

Every call goes through tests/gpu/cases.py: inputs, outputs and all memory around them are poisoned
with NaN beforehand, and everything outside the outputs must come back untouched.
"""

from __future__ import annotations

import dataclasses

import flashmoe_science as fm
import kernels
import pytest
import torch
from gpu import cases, families, memory, oracle
from gpu.cases import Case

pytestmark = pytest.mark.gpu

RANDOM_CASES = [cases.random_case(seed) for seed in range(300)]
OTHER_CASES = [cases.random_case(seed) for seed in range(300, 400)]


@pytest.mark.parametrize("case", RANDOM_CASES, ids=str)
def test_random_call(case: Case, family: str) -> None:
    cases.check_case(cases.for_family(case, family), "cuda:0")


@pytest.mark.parametrize("case", OTHER_CASES, ids=str)
def test_random_call_that_names_no_kernel(case: Case) -> None:
    """Where few-row kernels would take longer, to the best family that walks its strides."""
    cases.check_case(case, "cuda:0")
    family = families.of_many_rows()
    expected = {family, "sm89_few_rows"}
    if not cases.is_walkable(case):
        expected = {"sm89", "sm89_few_rows"}
    ran = fm.last_launches()[0].kernel
    assert ran.startswith(tuple(f"attention_forward_{each}_" for each in expected))


@pytest.mark.parametrize("dim", cases.DIMS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_head_dimension(dtype: str, dim: int, family: str) -> None:
    others = {dim, 8, 64, 128, 192, 256, 264 - dim}
    for i, dim_v in enumerate(sorted(others)):
        cases.check_case(
            Case(
                dtype=dtype,
                batch=2,
                seq_q=150,
                seq_k=150 + 17 * (i % 3),
                heads_q=4,
                heads_kv=2,
                dim=dim,
                dim_v=dim_v,
                causal=cases.CAUSAL[i % 3],
                layout=("bshd", "bhsd")[i % 2],
                kernel=family,
                seed=dim_v,
            ),
            "cuda:0",
        )


EDGE_LENGTHS = (1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257)


@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("causal", cases.CAUSAL)
def test_every_pair_of_lengths(dim: int, dim_v: int, causal: str, family: str) -> None:
    for seq_q in EDGE_LENGTHS:
        for seq_k in EDGE_LENGTHS:
            dtype = ("fp16", "bf16")[(seq_q + seq_k) % 2]
            case = Case(dtype=dtype, seq_q=seq_q, seq_k=seq_k, heads_q=2, heads_kv=1, dim=dim,
                        dim_v=dim_v, causal=causal, kernel=family, seed=seq_k)  # fmt: skip
            try:
                cases.check_case(case, "cuda:0")
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("causal", cases.CAUSAL)
@pytest.mark.parametrize(
    ("seq_q", "seq_k"), [(1, 8192), (5, 20001), (4099, 4099), (3000, 9001), (9001, 3000)]
)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_long_sequences(
    dtype: str, causal: str, seq_q: int, seq_k: int, dim: int, family: str
) -> None:
    case = Case(dtype=dtype, seq_q=seq_q, seq_k=seq_k, heads_q=2, heads_kv=1, dim=dim, dim_v=dim,
                causal=causal, kernel=family)  # fmt: skip
    cases.check_case(case, "cuda:0")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 8192), (4099, 4099), (3000, 9001), (9001, 3000)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_long_sequences_in_a_window(
    dtype: str, seq_q: int, seq_k: int, dim: int, family: str
) -> None:
    for window, softcap in (((1023, 0), None), ((100, 1500), 30.0)):
        case = Case(dtype=dtype, seq_q=seq_q, seq_k=seq_k, heads_q=2, heads_kv=1, dim=dim,
                    dim_v=dim, window=window, softcap=softcap, kernel=family)  # fmt: skip
        cases.check_case(case, "cuda:0")


@pytest.mark.parametrize("values", sorted(set(cases.VALUES)))
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_every_kind_of_values_under_a_softcap(softcap: float, values: str, family: str) -> None:
    for dim, dim_v in ((64, 64), (128, 128), (192, 128), (256, 256)):
        case = Case(dtype=("fp16", "bf16")[softcap > 1], batch=2, seq_q=500, seq_k=700, heads_q=3,
                    heads_kv=3, dim=dim, dim_v=dim_v, causal="bottom_right", window=(200, None),
                    softcap=softcap, values=values, kernel=family)  # fmt: skip
        cases.check_case(case, "cuda:0")


@pytest.mark.parametrize("sinks", cases.SINKS)
@pytest.mark.parametrize("values", ["normal", "huge", "buried"])
def test_every_kind_of_sinks(values: str, sinks: str, family: str) -> None:
    for i, (dim, dim_v) in enumerate(((64, 64), (128, 128), (192, 128), (256, 256))):
        for seq_q, seq_k in ((500, 400), (3, 2100)):  # of the first some rows see no key
            case = Case(dtype=("fp16", "bf16")[i % 2], batch=2, seq_q=seq_q, seq_k=seq_k,
                        heads_q=6, heads_kv=2, dim=dim, dim_v=dim_v, causal="bottom_right",
                        window=(300, None), sinks=sinks, values=values, kernel=family,
                        seed=i // 2, entry=("c", "python")[i % 2])  # fmt: skip
            cases.check_case(case, "cuda:0")
            whole = dataclasses.replace(case, causal="none", window=None, softcap=20.0)
            cases.check_case(whole, "cuda:0")


@pytest.mark.parametrize("values", sorted(set(cases.VALUES)))
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_kind_of_values(dtype: str, causal: str, values: str, family: str) -> None:
    for dim, dim_v in ((64, 64), (128, 128), (192, 128), (256, 256)):
        case = Case(dtype=dtype, batch=2, seq_q=700, seq_k=1100, heads_q=3, heads_kv=3, dim=dim,
                    dim_v=dim_v, causal=causal, values=values, kernel=family)  # fmt: skip
        cases.check_case(case, "cuda:0")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_slices_of_a_packed_projection(dtype: str, causal: bool | str, family: str) -> None:
    """q, k and v as a model has them: parts of one [batch, seq, heads, dim] product."""
    heads_q, heads_kv = 6, 2
    packed = torch.randn(3, 333, heads_q + 2 * heads_kv, 64, device="cuda").to(cases.DTYPES[dtype])
    q, k, v = packed.split((heads_q, heads_kv, heads_kv), dim=2)
    assert not q.is_contiguous()
    options = {"causal": causal, "kernel": family}
    out, lse = fm.flash_attention(q, k, v, **options, return_lse=True)
    oracle.assert_accurate(out, lse, q, k, v, causal)
    # The same tensors, heads first: nothing is copied, so the bits are the same.
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    again = fm.flash_attention(*swapped, **options, layout="bhsd")
    assert torch.equal(again.transpose(1, 2), out)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_broadcast_keys_and_values(dtype: str, family: str) -> None:
    """One K and V for the whole batch, or for all heads, or one key for all, by strides of 0."""
    q = torch.randn(4, 200, 4, 128, device="cuda").to(cases.DTYPES[dtype])
    for shape in ((1, 600, 4, 128), (4, 600, 1, 128), (4, 1, 4, 128), (1, 600, 1, 128)):
        k, v = (torch.randn(shape, device="cuda").to(q.dtype).expand(4, 600, 4, 128) for _ in "kv")
        assert 0 in k.stride()
        # TMA cannot stand still along keys.
        served = "sm89" if family in kernels.COPY_ENGINE and shape[1] == 1 else family
        out, lse = fm.flash_attention(q, k, v, causal=True, return_lse=True, kernel=served)
        ran = fm.last_launches()[0].kernel
        assert ran.startswith(f"attention_forward_{kernels.stem(served)}_{dtype}_")
        oracle.assert_accurate(out, lse, q, k, v, True)
        copies = (x.contiguous() for x in (k, v))
        assert torch.equal(out, fm.flash_attention(q, *copies, causal=True, kernel=ran))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("repeated", [("batch",), ("heads",), ("batch", "heads")], ids="-".join)
@pytest.mark.parametrize("names", ["q", "k", "v", "qkv"])
def test_repeated_batches_and_heads(
    names: str, repeated: tuple[str, ...], layout: str, family: str
) -> None:
    """Strides of 0 along batches and heads: every family serves them, with the bits of a copy."""
    shape = {"batch": 3, "seq": 300, "heads": 4, "dim": 64}
    order = (
        ("batch", "seq", "heads", "dim") if layout == "bshd" else ("batch", "heads", "seq", "dim")
    )
    tensors = {}
    for name in "qkv":
        stored = [1 if name in names and axis in repeated else shape[axis] for axis in order]
        x = torch.randn(stored, device="cuda").bfloat16().expand([shape[axis] for axis in order])
        assert (0 in x.stride()) == (name in names)
        tensors[name] = x
    options = {"causal": True, "layout": layout, "return_lse": True, "kernel": family}
    out, lse = fm.flash_attention(**tensors, **options)
    assert fm.last_launches()[0].kernel.startswith(
        f"attention_forward_{kernels.stem(family)}_bf16_"
    )
    oracle.assert_accurate(out, lse, **tensors, causal=True, layout=layout)
    copies = {name: x.contiguous() for name, x in tensors.items()}
    again, lse_again = fm.flash_attention(**copies, **options)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


def test_more_tiles_than_a_grid_had_room_for(family: str) -> None:
    """Beyond 65535 blocks, where an old grid dimension ended."""
    case = Case(dtype="bf16", batch=2500, seq_q=3, seq_k=5, heads_q=40, heads_kv=8, dim=16,
                dim_v=8, causal="bottom_right", kernel=family)  # fmt: skip
    cases.check_case(case, "cuda:0")


@pytest.mark.parametrize("axis", ["batch", "seq", "heads"])
@pytest.mark.parametrize("entry", ["python", "c"])
def test_strides_beyond_31_bits(axis: str, entry: str, family: str) -> None:
    """q, k, v and out interleaved in one buffer whose last entries lie past element 2^31."""
    shape = {"batch": (2, 130, 2, 64), "seq": (2, 257, 2, 64), "heads": (2, 130, 3, 64)}[axis]
    far_axis = ("batch", "seq", "heads").index(axis)
    far = -(-(2**31) // (shape[far_axis] - 1) // 8) * 8 + 8
    assert far * (shape[far_axis] - 1) > 2**31
    near = [0, 0, 0, 1]
    step = 64
    for other in (2, 1, 0):
        if other != far_axis:
            near[other] = step
            step *= shape[other]
    near[far_axis] = far
    count = 4 * step + far * (shape[far_axis] - 1) + step
    free, _ = torch.cuda.mem_get_info()
    if free < 2 * count + 2**31:
        pytest.skip(f"needs {2 * count / 2**30:.0f} GiB of free GPU memory and some to spare")
    buffer = torch.empty(count, dtype=torch.bfloat16, device="cuda:0")
    q, k, v, out = (buffer.as_strided(shape, near, i * step) for i in range(4))
    for x in (q, k, v):
        x.copy_(torch.randn(shape, device="cuda:0"))
    out.fill_(float("nan"))
    lse = torch.full((shape[0], shape[2], shape[1]), float("nan"), device="cuda:0")
    if entry == "python":
        options = {"causal": True, "return_lse": True, "kernel": family}
        fm.flash_attention(q, k, v, **options, out=out, lse=lse)
    else:
        # All axes backwards, so that the far end comes first, where the family walks that.
        backwards = () if family in kernels.COPY_ENGINE else (0, 1, 2)
        raws = [memory.Placed(buffer, x, backwards).raw() for x in (q, k, v, out)]
        raw_lse = memory.Placed(lse, lse, ()).raw()
        memory.call(*raws, raw_lse, causal="bottom_right", kernel=family)
        q, k, v, out = (x.flip(backwards) for x in (q, k, v, out))
    oracle.assert_accurate(out, lse, q, k, v, True)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_new_outputs_have_the_right_kind(layout: str, family: str) -> None:
    case = Case(batch=2, seq_q=70, seq_k=90, heads_q=4, heads_kv=2, dim=64, dim_v=48, layout=layout)
    for dtype in cases.DTYPES:
        q, k, v = cases.make_values(dataclasses.replace(case, dtype=dtype), "cuda:0")
        out = fm.flash_attention(q, k, v, layout=layout, kernel=family)
        assert type(out) is torch.Tensor
        assert (out.device, out.dtype, out.requires_grad) == (q.device, q.dtype, False)
        assert out.shape == (*q.shape[:3], 48)
        again, lse = fm.flash_attention(q, k, v, layout=layout, return_lse=True, kernel=family)
        assert torch.equal(again, out)
        assert (lse.device, lse.dtype, tuple(lse.shape)) == (q.device, torch.float32, (2, 4, 70))
        oracle.assert_accurate(out, lse, q, k, v, layout=layout)
