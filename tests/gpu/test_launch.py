"""The kernel that was planned is the kernel that runs, and nothing else is launched."""

from __future__ import annotations

import ctypes as c
import dataclasses
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import capi
import flashmoe_science as fm
import kernels
import pytest
import torch
from gpu import cases, families, memory
from gpu.cases import Case
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.gpu

# Head dimensions of calls: those of the compiled kernels, and some that are padded to them.
DIMS = sorted(
    {(kernel.dim, kernel.dim_v) for name in kernels.FAMILIES for kernel in kernels.attention(name)}
    | {(8, 8), (40, 64), (72, 8), (136, 136), (160, 160), (176, 72), (128, 192), (8, 256)}
)
ELEMENTS = {"fp16": "__half", "bf16": "__nv_bfloat16"}


def _call(case: Case) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    inputs = cases.make_values(case, "cuda:0")
    out = torch.empty(case.shape(case.seq_q, case.heads_q, case.dim_v), dtype=inputs[0].dtype,
                      device="cuda:0")  # fmt: skip
    lse = torch.empty((case.batch, case.heads_q, case.seq_q), device="cuda:0")
    options = {**case.mask, "return_lse": True, "out": out, "lse": lse}
    return inputs, {**options, "kernel": case.kernel}


def _case(family: str, dtype: str, dim: int, dim_v: int) -> Case:
    return Case(dtype=dtype, batch=2, seq_q=333, seq_k=444, heads_q=6, heads_kv=2, dim=dim,
                dim_v=dim_v, causal="bottom_right", kernel=family)  # fmt: skip


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_the_plan_is_the_launch(
    dtype: str, dims: tuple[int, int], softcap: float | None, family: str
) -> None:
    compiled = kernels.least_padding(family, *dims)
    case = dataclasses.replace(_case(family, dtype, *dims), softcap=softcap)
    inputs, options = _call(case)
    plan = fm.attention_plan(*inputs, **options)
    fm.flash_attention(*inputs, **options)
    launch = fm.last_launches()[0]
    name = f"attention_forward_{kernels.stem(family)}_{dtype}_d{compiled[0]}_dv{compiled[1]}"
    if family in kernels.COPY_ENGINE and softcap is not None:  # others' kernels take it as it is
        name += "_softcap"
    if family == "sm89_few_rows":
        assert plan.kernel == f"{name}_r{plan.tile_q}"
    else:
        assert plan.kernel in (name, f"{name}_w8")  # _w8: where two blocks do not fit an SM
    assert (plan.dim, plan.dim_v) == compiled
    assert plan.family == kernels.family_of(family)
    assert families.of_plan(plan) == family
    assert plan.grid == (families.blocks(case, plan), 1, 1)
    assert plan.block[0] in families.THREADS[family]
    assert plan.block[1:] == (1, 1)
    assert plan.shared_bytes <= families.SHARED_BYTES[family]
    if family != "sm90_split_kv":
        assert plan.workspace_bytes == 0  # so few keys are one block's, or a cluster's
    assert len(plan.launches) == (2 if plan.workspace_bytes > 0 else 1)
    assert fm.last_launches() == plan.launches
    assert plan.microseconds > 0
    assert (plan.cluster > 0) == (family == "sm89_few_rows")
    assert launch.device == "cuda:0"
    assert 0 < launch.registers <= 255
    assert launch.registers * plan.block[0] <= families.REGISTERS
    assert launch.local_bytes == 0
    assert re.fullmatch(rf"sm_{launch.binary_arch}a?", plan.isa)
    assert plan.isa == "sm_90a" or family not in kernels.COPY_ENGINE
    pairs = sum(min(case.seq_k, max(0, i + 1 + case.seq_k - case.seq_q))
                for i in range(case.seq_q))  # fmt: skip
    assert plan.flops == 2.0 * case.batch * case.heads_q * pairs * sum(dims)


@pytest.fixture(scope="module")
def _profiler_is_warm() -> None:
    """The first profile of a process starts the profiler's machinery; it sees less."""
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.zeros(8, device="cuda:0").add_(1)
        torch.cuda.synchronize()


def _profiled_work(path: Path, inputs: tuple, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What the GPU did during one call: kernels, copies and fills, from the profiler's trace."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        fm.flash_attention(*inputs, **options)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


@pytest.mark.usefixtures("_profiler_is_warm")
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_a_profiler_sees_the_planned_kernels_and_nothing_else(
    dtype: str, dims: tuple[int, int], family: str, tmp_path: Path
) -> None:
    inputs, options = _call(_case(family, dtype, *dims))
    plan = fm.attention_plan(*inputs, **options)
    fm.flash_attention(*inputs, **options)
    torch.cuda.synchronize()
    work = _profiled_work(tmp_path / "trace.json", inputs, options)
    assert all(event["cat"] == "kernel" for event in work)
    work.sort(key=lambda event: event["ts"])
    names = [event["name"] for event in work]
    assert len(work) == len(plan.launches) == len(fm.last_launches()), names
    assert all("flashmoe::attention_combine_kernel<" in name for name in names[1:])
    for event, launch in zip(work, fm.last_launches(), strict=True):
        arguments = event["args"]
        assert (tuple(arguments["grid"]), tuple(arguments["block"])) == (launch.grid, launch.block)
        assert arguments["shared memory"] == launch.shared_bytes
        assert arguments["registers per thread"] == launch.registers
    assert fm.last_launches() == plan.launches
    name = names[0]
    namespace = families.NAMESPACES.get(family, family)
    assert f"flashmoe::{namespace}::attention_forward_kernel<" in name
    traits = re.search(r"Traits<\s*(\w+),\s*(?:\(int\))?(\d+),\s*(?:\(int\))?(\d+)", name)
    assert traits is not None, name
    assert traits.groups() == (ELEMENTS[dtype], str(plan.dim), str(plan.dim_v))


@pytest.mark.usefixtures("_profiler_is_warm")
@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing_runs_for_an_empty_result(
    shape: tuple[int, int], family: str, tmp_path: Path
) -> None:
    batch, seq_q = shape
    inputs, options = _call(Case(batch=batch, seq_q=seq_q, seq_k=70, kernel=family))
    assert _profiled_work(tmp_path / "trace.json", inputs, options) == []


@pytest.mark.parametrize("values", ["normal", "nan"])
def test_plan_reads_no_data(values: str, family: str) -> None:
    """The same kernel whatever the tensors hold."""
    inputs, options = _call(_case(family, "fp16", 64, 64))
    want = fm.attention_plan(*inputs, **options)
    if values == "nan":
        inputs[0].fill_(float("nan"))
    assert fm.attention_plan(*inputs, **options) == want
    described = fm.attention_plan_for(
        batch=2, seq_q=333, seq_k=444, heads_q=6, heads_kv=2, dim=64, dtype="fp16",
        device="cuda:0", causal="bottom_right", kernel=family, return_lse=True,
    )  # fmt: skip
    assert described == want


def test_a_gpu_call_never_goes_to_the_cpu() -> None:
    inputs, options = _call(_case("sm89", "fp16", 64, 64))
    options["kernel"] = None
    assert fm.attention_plan(*inputs, **options).family != "cpu"
    for result in (options["out"], options["lse"]):
        result.fill_(7.0)
    options["kernel"] = "cpu"
    with pytest.raises(NotImplementedError, match=r"^kernel: cannot be served: cpu: .*"):
        fm.flash_attention(*inputs, **options)
    with pytest.raises(NotImplementedError, match=r"^kernel: cannot be served: cpu: .*"):
        fm.attention_plan(*inputs, **options)
    options["kernel"] = "sm42"
    with pytest.raises(ValueError, match=r'^kernel: got "sm42", built in are .*sm89'):
        fm.flash_attention(*inputs, **options)
    for result in (options["out"], options["lse"]):
        assert (result == 7.0).all()
    on_host = [x.cpu() for x in inputs]
    for family in families.serving():
        with pytest.raises(NotImplementedError, match="the tensors are on the CPU"):
            fm.flash_attention(*on_host, kernel=family)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_the_best_family_serves_what_names_none(dtype: str, dims: tuple[int, int]) -> None:
    case = dataclasses.replace(_case("sm89", dtype, *dims), seq_q=3000, seq_k=4000)
    inputs, options = _call(case)
    options["kernel"] = None
    plan = fm.attention_plan(*inputs, **options)
    assert plan.family == families.of_many_rows()
    reasons = dict(line.split(": ", 1) for line in plan.rejected.splitlines())
    built = set(fm.build_info().kernel_families.split())
    every = {"cpu", *map(kernels.family_of, kernels.FAMILIES), *kernels.OF_SEQUENCES}
    assert set(reasons) == built & every - {plan.family}
    for other in set(families.serving()) - {families.of_plan(plan)}:
        slower = fm.attention_plan(*inputs, **options | {"kernel": other})
        assert slower.microseconds >= plan.microseconds
        assert kernels.family_of(other) == plan.family or reasons[other] == (
            f"takes {slower.microseconds:.1f} us by its estimate, {plan.family} "
            f"{plan.microseconds:.1f} us"
        )
    fm.flash_attention(*inputs, **options)
    assert fm.last_launches() == plan.launches


def _described(case: Case, strides: dict[str, list[int]]) -> capi.AttentionForwardParams:
    """A call on addresses that mean nothing, to be planned: contiguous but for `strides`."""
    keep = torch.empty(0, dtype=cases.DTYPES[case.dtype], device="cuda:0")
    shapes = {
        "q": case.shape(case.seq_q, case.heads_q, case.dim),
        "k": case.shape(case.seq_k, case.heads_kv, case.dim),
        "v": case.shape(case.seq_k, case.heads_kv, case.dim_v),
        "out": case.shape(case.seq_q, case.heads_q, case.dim_v),
    }
    params = capi.AttentionForwardParams(struct_size=c.sizeof(capi.AttentionForwardParams))
    params.keep = {
        name: memory.raw_tensor(
            keep,
            2**45,
            shape,
            strides.get(name) or list(torch.empty(shape, device="meta").stride()),
        )
        for name, shape in shapes.items()
    }
    for name, view in params.keep.items():
        setattr(params, name, c.pointer(view))
    return params


# What the copy engine cannot walk, as a factor of the contiguous stride or in bytes.
ODD_STRIDES = [
    *((name, 1, 0) for name in ("q", "k", "v")),
    *((name, axis, -1) for name in ("q", "k", "v", "out") for axis in (0, 1, 2)),
    *((name, 0, 2**40) for name in ("q", "k", "v", "out")),
]


@pytest.mark.parametrize(("name", "axis", "factor"), ODD_STRIDES)
def test_sm90_leaves_strides_it_cannot_walk_to_sm89(
    name: str, axis: int, factor: int, sm90: str
) -> None:
    case = Case(dtype="bf16", batch=8, seq_q=8000, seq_k=9000, heads_q=8, heads_kv=4)
    plain = _described(case, {})
    assert capi.attention_plan(plain).family.decode() == sm90
    strides = list(plain.keep[name].strides[:4])
    strides[axis] = factor // 2 if factor == 2**40 else strides[axis] * factor
    plan = capi.attention_plan(_described(case, {name: strides}))
    assert plan.family == b"sm89"
    reasons = dict(line.split(": ", 1) for line in plan.rejected.decode().splitlines())
    assert re.match(r"a stride that is negative, 2\^40 bytes or more", reasons[sm90])
    strides[axis] = 2**40 // 2 - 8  # the largest that it walks
    assert capi.attention_plan(_described(case, {name: strides})).family.decode() == sm90


def _with_arch(arch: str, program: str) -> str:
    environment = {**os.environ, "FLASHMOE_ARCH": arch}
    before = """
        import flashmoe_science as fm
        import torch
        q = torch.randn(1, 100, 2, 64, device="cuda").half()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(before) + textwrap.dedent(program)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("family", sorted({*map(kernels.family_of, kernels.FAMILIES)}))
def test_flashmoe_arch_names_the_family(family: str) -> None:
    if family not in map(kernels.family_of, families.serving()):
        pytest.skip(f"the {family} kernels do not serve this GPU")
    program = f"""
        got = fm.flash_attention(q, q, q)
        print(fm.last_launches()[0].kernel, fm.attention_plan(q, q, q).family)
        assert torch.equal(got, fm.flash_attention(q, q, q, kernel="{family}"))
    """
    said = _with_arch(family, program)
    assert re.fullmatch(
        rf"attention_forward_{family}_(split_kv_)?fp16_d64_dv64(_r\d+)? {family}", said
    )


@pytest.mark.parametrize(("arch", "kind"), [("sm42", "ValueError"), ("cpu", "NotImplementedError")])
def test_a_family_that_cannot_serve_is_an_error(arch: str, kind: str) -> None:
    program = f"""
        try:
            fm.flash_attention(q, q, q)
        except {kind} as error:
            print(error)
        print(fm.flash_attention(q.cpu(), q.cpu(), q.cpu()).shape[1])  # of GPU calls only
    """
    sentence, length = _with_arch(arch, program).splitlines()
    assert sentence.startswith("FLASHMOE_ARCH: ")
    assert arch in sentence
    assert length == "100"


def test_device_info() -> None:
    info = fm.device_info("cuda:0")
    properties = torch.cuda.get_device_properties(0)
    assert info.name == properties.name
    assert info.compute_capability == 10 * properties.major + properties.minor
    assert info.multiprocessors == properties.multi_processor_count
    assert info.l2_bytes == properties.L2_cache_size
    assert info.memory_bytes == properties.total_memory
    assert info.shared_bytes_per_block == properties.shared_memory_per_block_optin
    assert info.kernel_family == families.of_many_rows()
    assert fm.cuda_device_count() == torch.cuda.device_count()


@pytest.mark.parametrize("causal", cases.CAUSAL)
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_the_eight_warp_kernel_where_it_is_not_the_choice(dtype: str, causal: str) -> None:
    kernel = f"attention_forward_sm89_{dtype}_d128_dv128_w8"
    for seq_q, seq_k in ((1, 1), (255, 257), (1000, 1000), (300, 777), (777, 300)):
        case = Case(dtype=dtype, batch=2, seq_q=seq_q, seq_k=seq_k, heads_q=4, heads_kv=2, dim=128,
                    dim_v=120, causal=causal, kernel=kernel)  # fmt: skip
        cases.check_case(case, "cuda:0")
        launch = fm.last_launches()[0]
        assert (launch.kernel, launch.block) == (kernel, (256, 1, 1))
        assert launch.local_bytes == 0


def test_a_kernel_that_cannot_serve_a_call_is_refused_by_name() -> None:
    q = torch.randn(1, 32, 2, 64, device="cuda:0", dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="d64_dv64 serves this call, not"):
        fm.flash_attention(q, q, q, kernel="attention_forward_sm89_fp16_d32_dv32")
