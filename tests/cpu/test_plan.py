"""The plan is the launch, and the instruction set is the one asked for."""

from __future__ import annotations

import ctypes
import os
import platform

import capi
import numpy as np
import parallel
import pytest
from capi import normal


def params_of(
    dtype: str = "fp32", batch: int = 1, seq: int = 300, heads: int = 4, dim: int = 64, **options
) -> capi.AttentionForwardParams:
    rng = np.random.default_rng(0)
    q, k, v = (normal(rng, (batch, seq, heads, dim), capi.DTYPES[dtype]) for _ in range(3))
    return capi.attention_params(q, k, v, np.empty_like(q), **options)


@pytest.mark.parametrize("dtype", capi.DTYPES)
def test_plan_is_the_launch(isa_library: ctypes.CDLL, dtype: str) -> None:
    isa_library.flashmoe_set_num_threads(2)
    params = params_of(dtype)
    plan = capi.attention_plan(params, isa_library)
    capi.run_attention(params, isa_library)
    launches = capi.last_launches(isa_library)
    isa_library.flashmoe_set_num_threads(0)
    isa = plan.isa.decode()
    assert capi.is_planned(plan, launches)
    [launch] = launches
    assert launch.kernel.decode() == f"attention_forward_cpu_{isa}_{dtype}_d64_dv64"
    assert (launch.device.device_type, launch.device.device_id) == (capi.CPU, 0)
    assert launch.grid[0] == 4 * -(-300 // launch.tile_m)
    assert launch.block[0] == 2
    assert (launch.dim, launch.dim_v) == (64, 64)
    assert (plan.operation, plan.family) == (b"attention_forward", b"cpu")
    assert plan.bytes == 4 * 4 * 300 * 64 * capi.DTYPES[dtype].itemsize
    assert plan.flops == 4 * 4 * 300 * 300 * 64


def test_pairs_of_bf16_are_for_bf16_alone(isa_library: ctypes.CDLL) -> None:
    names = {d: capi.attention_plan(params_of(d), isa_library).isa.decode() for d in capi.DTYPES}
    assert names["fp32"] == names["fp16"]
    if names["bf16"] != names["fp32"]:
        assert names["bf16"] in ("avx512bf16", "amx")
        assert names["fp32"] == "avx512"


def test_tiny_calls_take_one_thread(library: ctypes.CDLL) -> None:
    library.flashmoe_set_num_threads(8)
    plan = capi.attention_plan(params_of(seq=16, heads=2), library)
    library.flashmoe_set_num_threads(0)
    assert plan.launches[0].block[0] == 1


def test_tiles_shrink_to_occupy_the_threads(library: ctypes.CDLL) -> None:
    library.flashmoe_set_num_threads(16)
    plan = capi.attention_plan(params_of(seq=1000, heads=1), library)
    library.flashmoe_set_num_threads(0)
    assert plan.launches[0].grid[0] >= 16


def test_heads_of_a_group_share_a_tile(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(0)
    q = normal(rng, (2, 1, 32, 64), np.dtype(np.float32))
    k, v = (normal(rng, (2, 100, 4, 64), np.dtype(np.float32)) for _ in range(2))
    library.flashmoe_set_num_threads(2)  # more would share a group's heads out
    plan = capi.attention_plan(capi.attention_params(q, k, v, np.empty_like(q)), library)
    library.flashmoe_set_num_threads(0)
    assert plan.launches[0].grid[0] == 2 * 4


def test_workspace_does_not_grow_with_the_sequence(library: ctypes.CDLL) -> None:
    library.flashmoe_set_num_threads(2)
    sizes = {
        capi.attention_plan(params_of(seq=s, heads=1, dim=16), library).workspace_bytes
        for s in (2000, 20000)
    }
    library.flashmoe_set_num_threads(0)
    assert len(sizes) == 1


def test_tensors_on_a_gpu_are_refused(library: ctypes.CDLL) -> None:
    params = params_of("fp16", kernel=b"cpu")
    for view in params.keep.values():
        view.device = capi.Device(capi.CUDA, 1)
    with pytest.raises(capi.FlashmoeError, match="the tensors are on cuda:1") as caught:
        capi.attention_plan(params, library)
    assert caught.value.status == capi.UNSUPPORTED


def test_short_workspace_is_refused(library: ctypes.CDLL) -> None:
    params = params_of(seq=16)  # work for one thread: with more, fewer would run
    size = capi.attention_plan(params, library).workspace_bytes
    workspace = capi.aligned_empty((size - 1,), np.dtype(np.uint8))
    with pytest.raises(capi.FlashmoeError, match=f"got {size - 1} bytes, this call needs {size}"):
        capi.run_attention(params, library, workspace)


def test_unknown_isa_is_an_error() -> None:
    lib = capi.load_fresh(FLASHMOE_CPU_ISA="sse9")
    with pytest.raises(capi.FlashmoeError) as caught:
        capi.attention_plan(params_of(), lib)
    assert caught.value.status == capi.INVALID_ARGUMENT
    assert 'FLASHMOE_CPU_ISA: got "sse9", accepted are scalar, avx2' in caught.value.sentence
    info = capi.DeviceInfo(struct_size=ctypes.sizeof(capi.DeviceInfo))
    status = lib.flashmoe_get_device_info(capi.Device(capi.CPU, 0), info)
    assert status == capi.INVALID_ARGUMENT


@pytest.mark.parametrize("isa", parallel.ISAS)
def test_isa_that_is_asked_for(isa: str) -> None:
    """Skips where this processor lacks it, for all tests of isa_library."""
    lib = capi.load_fresh(FLASHMOE_CPU_ISA=isa)
    info = capi.DeviceInfo(struct_size=ctypes.sizeof(capi.DeviceInfo))
    if lib.flashmoe_get_device_info(capi.Device(capi.CPU, 0), info) == capi.UNSUPPORTED:
        pytest.skip(lib.flashmoe_last_error().decode())
    base = "avx512" if isa in ("avx512bf16", "amx") else isa
    assert info.isa.decode() == base


@pytest.mark.skipif(platform.machine() == "x86_64", reason="x86-64 knows these")
def test_isa_of_another_processor_is_an_error() -> None:
    lib = capi.load_fresh(FLASHMOE_CPU_ISA="avx2")
    with pytest.raises(capi.FlashmoeError, match="this processor and this build have scalar"):
        capi.attention_plan(params_of(), lib)


def test_device_info(library: ctypes.CDLL) -> None:
    info = capi.DeviceInfo(struct_size=ctypes.sizeof(capi.DeviceInfo))
    capi.check(library.flashmoe_get_device_info(capi.Device(capi.CPU, 0), info), library)
    assert info.isa.decode() in ("scalar", "avx2", "avx512")
    assert info.kernel_family == b"cpu"
    assert info.name
    assert info.multiprocessors == library.flashmoe_get_num_threads()
    assert info.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
