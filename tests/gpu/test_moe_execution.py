"""How calls of the mixture of experts run: the planned launches and nothing else, the same bits
every time, on the caller's stream, in graphs, from several threads."""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flashmoe_science as fm
import moe_oracle
import pytest
import torch
from gpu import memory, moe_layers
from gpu.moe_layers import DEVICE, Layer, generator, make
from moe_cases import Case
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.gpu

CASES = [
    Case(tokens=1, hidden=1024, inner=512, experts=64, top_k=8),
    Case(tokens=16, hidden=512, inner=256, experts=8, top_k=2, gate="interleaved", bias="fp32",
         transposed=True, limit=7.0, alpha=1.702, up_offset=1.0),
    Case(tokens=700, hidden=512, inner=384, experts=16, top_k=4),
    # More tiles of both products than clusters of blocks fit a GPU: one begins under the other.
    Case(tokens=600, hidden=1024, inner=512, experts=40, top_k=4),
    # Weights of `down` that are kept, for more runs of tiles than there are clusters.
    Case(tokens=8000, hidden=2048, inner=256, experts=16, top_k=2),
    Case(tokens=8000, hidden=1024, inner=512, experts=16, top_k=2),
]  # fmt: skip


@pytest.fixture(params=moe_layers.FAMILIES)
def moe_family(request: pytest.FixtureRequest) -> str:
    reason = moe_layers.why_not(request.param)
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture(params=CASES, ids=str)
def layer(request: pytest.FixtureRequest, moe_family: str) -> Layer:
    made = make(request.param, "bf16", skew=1.0)
    if moe_layers.plan_or_none(made, moe_family) is None:
        pytest.skip(f"the {moe_family} family leaves this call to others")
    return made


def router_of(case: Case, seed: int = 4) -> torch.Tensor:
    made = torch.randn(case.experts, case.hidden, generator=generator(seed), device=DEVICE)
    return (made * case.hidden**-0.5).bfloat16()


def fused_of(layer: Layer) -> Callable[[], torch.Tensor]:
    values = dict(layer.values)
    tokens, router = values.pop("x"), router_of(layer.case)
    options = {"top_k": layer.case.top_k, "renormalize": True, **values, **layer.case.options}
    return lambda: fm.fused_moe(tokens, router, **options)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(memory.bits(a), memory.bits(b))


def busy(milliseconds: float) -> None:
    torch.cuda._sleep(int(milliseconds * 2e6))


# ---- the plan is the launch ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def _profiler_is_warm() -> None:
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.zeros(8, device=DEVICE).add_(1)
        torch.cuda.synchronize()


def work_of(path: Path, call: Callable[[], object]) -> list[dict[str, Any]]:
    """What the GPU did during one call, in order: kernels, copies and fills."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"])


def assert_planned(work: list[dict[str, Any]], launches: tuple[fm.Launch, ...]) -> None:
    assert [e["cat"] for e in work] == ["kernel"] * len(launches), [e["name"] for e in work]
    for event, launch in zip(work, launches, strict=True):
        assert "flashmoe::" in event["name"]
        arguments = event["args"]
        got = (tuple(arguments["grid"]), tuple(arguments["block"]), arguments["shared memory"])
        want = (launch.grid, launch.block, launch.shared_bytes)
        assert got == want, launch.kernel
        assert arguments["registers per thread"] * launch.block[0] <= 65536


@pytest.mark.usefixtures("_profiler_is_warm")
def test_a_profiler_sees_the_planned_layer(layer: Layer, moe_family: str, tmp_path: Path) -> None:
    plan = fm.moe_plan(**layer.arguments, kernel=moe_family)
    assert plan.family == moe_family
    assert 1 <= len(plan.launches) <= 3

    def call() -> object:
        return fm.moe_forward(**layer.arguments, kernel=moe_family)

    call()
    assert fm.last_launches() == plan.launches
    assert all(launch.local_bytes == 0 for launch in fm.last_launches())
    torch.cuda.synchronize()
    assert_planned(work_of(tmp_path / "trace.json", call), plan.launches)


@pytest.mark.usefixtures("_profiler_is_warm")
@pytest.mark.parametrize("shape", [(1, 8, 2), (7, 128, 8), (3000, 256, 8), (0, 8, 2)])
def test_a_profiler_sees_the_planned_routing(shape: tuple[int, int, int], tmp_path: Path) -> None:
    tokens, experts, top_k = shape
    logits = torch.randn(tokens, experts, device=DEVICE)
    ids = torch.zeros(tokens, top_k, dtype=torch.int64, device=DEVICE)
    plan = fm.moe_route_plan(logits, top_k)
    assert 1 <= len(plan.launches) <= 2
    for call in (lambda: fm.moe_route(logits, top_k),
                 lambda: fm.moe_route_given(ids, num_experts=experts)):  # fmt: skip
        call()
        torch.cuda.synchronize()
        work = work_of(tmp_path / "trace.json", call)
        assert [e["cat"] for e in work] in (["kernel"], ["kernel"] * 2)
        assert all("flashmoe::" in e["name"] for e in work)
    work = work_of(tmp_path / "trace.json", lambda: fm.moe_route(logits, top_k))
    assert_planned(work, plan.launches)


@pytest.mark.usefixtures("_profiler_is_warm")
def test_a_profiler_sees_nothing_else_in_a_fused_call(tmp_path: Path) -> None:
    for case in CASES:
        call = fused_of(make(case, "bf16"))
        call()
        torch.cuda.synchronize()
        work = work_of(tmp_path / "trace.json", call)
        assert 3 <= len(work) <= 7
        assert_planned(work, fm.last_launches())


Product = Callable[[], torch.Tensor]


@pytest.fixture(params=["offsets", "counts"])
def product(request: pytest.FixtureRequest, moe_family: str) -> tuple[Product, dict[str, Any]]:
    """A grouped product, and its arguments: of rows that are sorted, or masked."""
    if not moe_layers.multiplies(moe_family):
        pytest.skip("computes layers alone")
    experts, n, k, most = 24, 264, 520, 90
    counts = torch.randint(0, most + 1, (experts,), generator=generator(1), device=DEVICE).int()
    counts[3], counts[7] = 0, most
    x = torch.randn(experts, most, k, generator=generator(2), device=DEVICE).bfloat16()
    w = torch.randn(experts, n, k, generator=generator(3), device=DEVICE).bfloat16() * k**-0.5
    bounds = {"counts": counts}
    if request.param == "offsets":
        x = x.view(-1, k)
        bounds = {"offsets": torch.cat([counts.new_zeros(1), counts.cumsum(0).int()])}
    arguments = {"x": x, "w": w, **bounds, "out": x.new_zeros(*x.shape[:-1], n)}
    return lambda: fm.grouped_product(**arguments, kernel=moe_family), arguments


@pytest.mark.usefixtures("_profiler_is_warm")
def test_a_profiler_sees_the_planned_product(
    product: tuple[Product, dict[str, Any]], moe_family: str, tmp_path: Path
) -> None:
    call, arguments = product
    plan = fm.grouped_product_plan(**arguments, kernel=moe_family)
    assert plan.family == moe_family and len(plan.launches) == 1
    call()
    assert fm.last_launches() == plan.launches
    assert_planned(work_of(tmp_path / "trace.json", call), plan.launches)


def test_products_give_the_same_bits_in_graphs_and_out_of_them(
    product: tuple[Product, dict[str, Any]],
) -> None:
    call, arguments = product
    want = call().clone()
    operands = {name: value for name, value in arguments.items() if name != "out"}
    moe_oracle.assert_grouped_product(want, **operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for run in range(50):
        captured.zero_()
        if run % 2:
            graph.replay()
        else:
            call()
        assert same_bits(captured, want), f"run {run}"
    arguments["x"].normal_(generator=generator(8))
    for name in ("counts", "offsets"):
        if name in arguments:
            arguments[name].div_(2, rounding_mode="floor")
    graph.replay()
    again = captured.clone()
    assert same_bits(call(), again)
    moe_oracle.assert_grouped_product(again, **operands)


def test_plans_read_no_data(layer: Layer, moe_family: str) -> None:
    want = fm.moe_plan(**layer.arguments, kernel=moe_family)
    layer.values["x"].fill_(torch.nan)
    layer.routing.offsets.fill_(-1)
    assert fm.moe_plan(**layer.arguments, kernel=moe_family) == want
    case = layer.case
    if case.bias is None:
        described = fm.moe_plan_for(
            tokens=case.tokens, hidden=case.hidden, inner=case.inner, experts=case.experts,
            top_k=case.top_k, device=DEVICE, kernel=moe_family,
        )  # fmt: skip
        assert described == want


def test_a_gpu_call_never_goes_to_the_cpu() -> None:
    layer = make(CASES[0], "bf16")
    with pytest.raises(NotImplementedError, match=r"^kernel: cannot be served: cpu: "):
        fm.moe_forward(**layer.arguments, kernel="cpu")
    assert fm.moe_plan(**layer.arguments).family != "cpu"
    assert fm.moe_route_plan(torch.zeros(3, 8, device=DEVICE), 2).family != "cpu"
    x = torch.zeros(3, 16, device=DEVICE)
    w = torch.zeros(1, 8, 16, device=DEVICE)
    with pytest.raises((TypeError, NotImplementedError)):  # fp32 is the CPU's
        fm.grouped_product(x, w, offsets=torch.tensor([0, 3], dtype=torch.int32, device=DEVICE))


# ---- the same bits -------------------------------------------------------------------------------


def test_a_hundred_runs_give_the_same_bits(layer: Layer, moe_family: str) -> None:
    want = fm.moe_forward(**layer.arguments, kernel=moe_family)
    moe_oracle.assert_forward(want, **layer.arguments)
    other, noise = torch.cuda.Stream(), torch.cuda.Stream()
    for run in range(100):
        if run % 3 == 1:
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                got = fm.moe_forward(**layer.arguments, kernel=moe_family)
            torch.cuda.current_stream().wait_stream(other)
        else:
            if run % 3 == 2:  # beside other work, which takes some of the GPU away
                with torch.cuda.stream(noise):
                    a = torch.randn(1024, 1024, device=DEVICE)
                    for _ in range(5):
                        a = a @ a * 1e-3
            got = fm.moe_forward(**layer.arguments, kernel=moe_family)
        assert same_bits(got, want), f"run {run}"
    torch.cuda.synchronize()


def test_saving_pre_activations_changes_no_bit(layer: Layer, moe_family: str) -> None:
    """On Hopper the same kernel serves training's forward and that alone."""
    if moe_family != "sm90":
        pytest.skip("that is said of Hopper alone")
    want = fm.moe_forward(**layer.arguments, kernel=moe_family)
    got, _ = fm.moe_forward(**layer.arguments, kernel=moe_family, return_pre_activation=True)
    assert same_bits(got, want)


def test_routing_and_fused_calls_give_the_same_bits() -> None:
    for case in CASES:
        logits = torch.randn(case.tokens, case.experts, device=DEVICE)
        want = fm.moe_route(logits, case.top_k, return_lse=True)
        call = fused_of(make(case, "bf16"))
        out = call()
        for _ in range(50):
            got = fm.moe_route(logits, case.top_k, return_lse=True)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
            assert same_bits(call(), out)


# ---- streams, graphs, threads --------------------------------------------------------------------


def test_graph_replays_follow_the_inputs(layer: Layer, moe_family: str) -> None:
    case, arguments = layer.case, layer.arguments
    logits = torch.randn(case.tokens, case.experts, generator=generator(0), device=DEVICE)
    values = dict(layer.values)
    x = values.pop("x")

    def call() -> torch.Tensor:
        routing = fm.moe_route(logits, case.top_k, renormalize=True)
        return fm.moe_forward(x, routing=routing, **values, **case.options, kernel=moe_family)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for seed in range(1, 4):
        logits.copy_(torch.randn(logits.shape, generator=generator(seed), device=DEVICE))
        x.copy_(torch.randn(x.shape, generator=generator(seed + 9), device=DEVICE))
        captured.fill_(torch.nan)
        graph.replay()
        assert same_bits(captured, call())
        routing = fm.moe_route(logits, case.top_k, renormalize=True)
        moe_oracle.assert_forward(captured, **arguments | {"routing": routing})


@pytest.mark.parametrize("tokens", [8, 512, 513])
@pytest.mark.parametrize("kind", [None, torch.int32, torch.int64])
def test_routing_in_a_graph(tokens: int, kind: torch.dtype | None) -> None:
    """Routes logits, and ids some of which belong to nobody, in one launch and in two."""
    experts, top_k = 60, 32
    g = generator(tokens)

    def fill(source: torch.Tensor) -> None:
        if kind is None:
            source.copy_((torch.randn(source.shape, generator=g, device=DEVICE) * 2).round())
        else:
            source.copy_(torch.randint(-9, experts + 9, source.shape, generator=g, device=DEVICE))

    width, low = (experts, torch.float32) if kind is None else (top_k, kind)
    source = torch.zeros(tokens, width, dtype=low, device=DEVICE)

    def call() -> fm.MoeRouting:
        if kind is None:
            return fm.moe_route(source, top_k)
        return fm.moe_route_given(source, num_experts=experts)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(3):
        fill(source)
        graph.replay()
        want = (moe_oracle.route(source, top_k) if kind is None
                else moe_oracle.route_given(source, num_experts=experts))  # fmt: skip
        moe_oracle.assert_routed(captured, want)


def test_a_fused_call_in_a_graph() -> None:
    for case in CASES:
        layer = make(case, "bf16")
        call = fused_of(layer)
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        layer.values["x"].normal_(generator=generator(8))
        captured.fill_(torch.nan)
        graph.replay()
        assert same_bits(captured, call())


def test_every_launch_of_a_fused_call_is_planned_and_told() -> None:
    for case in CASES:
        layer = make(case, "bf16")
        values = dict(layer.values)
        tokens, router = values.pop("x"), router_of(case)
        plan = fm.fused_moe_plan(tokens, router, top_k=case.top_k, renormalize=True, **values,
                                 **case.options)  # fmt: skip
        fused_of(layer)()
        told = fm.last_launches()
        assert [x.kernel for x in told] == [x.kernel for x in plan.launches]
        assert all(x.registers > 0 for x in told)


def test_the_first_fused_call_of_a_process_can_be_captured() -> None:
    import subprocess
    import sys

    program = """
import flashmoe_science as fm, torch
x, r = (torch.randn(n, 256, device="cuda").bfloat16() for n in (9, 8))
w, d = (torch.randn(8, *s, device="cuda").bfloat16() / 16 for s in ((256, 256), (256, 128)))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = fm.fused_moe(x, r, w, d, 2)
captured.fill_(float("nan"))
graph.replay()
assert torch.equal(captured, fm.fused_moe(x, r, w, d, 2))
graph.replay()
assert torch.equal(captured, fm.fused_moe(x, r, w, d, 2))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["current", "argument", "handle"])
def test_runs_on_the_given_stream_and_waits_for_nothing(
    layer: Layer, moe_family: str, how: str
) -> None:
    fresh = layer.values["x"].clone()
    fm.moe_forward(**layer.arguments, kernel=moe_family)
    torch.cuda.synchronize()
    layer.values["x"].zero_()
    out = torch.full_like(fresh, torch.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy(300)
        layer.values["x"].copy_(fresh)
    if how == "current":
        with torch.cuda.stream(stream):
            fm.moe_forward(**layer.arguments, out=out, kernel=moe_family)
    else:
        given = stream if how == "argument" else stream.cuda_stream
        fm.moe_forward(**layer.arguments, out=out, kernel=moe_family, stream=given)
    assert not stream.query(), "the call waited for its stream"
    stream.synchronize()
    moe_oracle.assert_forward(out, **layer.arguments)


def test_a_fused_call_on_a_given_stream_waits_for_nothing() -> None:
    layer = make(CASES[2], "bf16")
    call = fused_of(layer)
    want = call()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    values = dict(layer.values)
    tokens, router = values.pop("x"), router_of(layer.case)
    out = torch.full_like(want, torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        busy(200)
    fm.fused_moe(tokens, router, top_k=layer.case.top_k, renormalize=True, **values,
                 **layer.case.options, out=out, stream=stream)  # fmt: skip
    assert not stream.query(), "the call waited for its stream"
    # Memory of torch's current stream, in which the workspace must not lie any more.
    noise = [torch.full((1 << 20,), 0xFF, dtype=torch.uint8, device=DEVICE) for _ in range(64)]
    stream.synchronize()
    assert same_bits(out, want)
    assert len(noise) == 64


def test_workspace_is_memory_of_the_stream_that_uses_it() -> None:
    """Memory that work of the current stream may still use is not handed to another stream's."""
    from flashmoe_science import _dispatch

    size = 48 << 20
    like = torch.zeros(1, device=DEVICE)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    busy(50)  # on the current stream, to which this memory goes back
    block = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    address = block.data_ptr()
    del block
    made = _dispatch.workspace(like, size, side.cuda_stream)
    assert made.data_ptr() != address
    workspace = made.data_ptr()
    del made
    again = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    assert again.data_ptr() == address, "the side stream may still use its own"
    assert _dispatch.workspace(like, size, side.cuda_stream).data_ptr() == workspace
    torch.cuda.synchronize()


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_no_workspace_is_tried_that_is_too_small(case: Case) -> None:
    """A log has a line for each call of the library that fails, and for each of too little."""
    layer = make(case, "bf16")
    lines: list[str] = []
    fm.set_log("debug", lambda _, line: lines.append(line))
    try:
        fused_of(layer)()
        fm.moe_forward(**layer.arguments)
    finally:
        fm.set_log("off")
    assert lines
    assert not [line for line in lines if line.startswith("FLASHMOE_ERROR")]


def test_two_streams_at_once(moe_family: str) -> None:
    calls = []
    for seed, case in enumerate(CASES):
        layer = make(dataclasses.replace(case, seed=seed), "bf16")
        if moe_layers.plan_or_none(layer, moe_family) is not None:
            want = fm.moe_forward(**layer.arguments, kernel=moe_family)
            calls.append((layer, want, torch.cuda.Stream()))
    torch.cuda.synchronize()
    assert calls
    copies = []
    for run in range(40):
        for layer, want, stream in calls:
            with torch.cuda.stream(stream):
                got = fm.moe_forward(**layer.arguments, kernel=moe_family)
                copies.append((run, got, want))
    torch.cuda.synchronize()
    for run, got, want in copies:
        assert same_bits(got, want), f"run {run}"


def test_threads_with_streams_of_their_own() -> None:
    wants = []
    for family in moe_layers.serving():
        for case in CASES:
            layer = make(case, "bf16")
            plan = moe_layers.plan_or_none(layer, family)
            if plan is not None:
                want = fm.moe_forward(**layer.arguments, kernel=family)
                wants.append((layer, family, want, plan.launches))
    torch.cuda.synchronize()
    failures: list[str] = []
    start = threading.Barrier(len(wants))

    def work(layer: Layer, family: str, want: torch.Tensor, planned: tuple[fm.Launch, ...]) -> None:
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for run in range(40):
                    got = fm.moe_forward(**layer.arguments, kernel=family)
                    if fm.last_launches() != planned:
                        failures.append(f"{family}: launched {fm.last_launches()}, not {planned}")
                    if not same_bits(got, want):
                        failures.append(f"{family} {layer.case}: run {run} differs")
        except Exception as error:
            failures.append(f"{family} {layer.case}: {error!r}")

    threads = [threading.Thread(target=work, args=want) for want in wants]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[:5]


def test_frees_its_tensors(moe_family: str) -> None:
    layer = make(CASES[1], "bf16")
    if moe_layers.plan_or_none(layer, moe_family) is None:
        pytest.skip(f"the {moe_family} family leaves this call to others")
    call = fused_of(layer)
    call()
    fm.moe_forward(**layer.arguments, kernel=moe_family)
    torch.cuda.synchronize()
    gc.collect()  # of tests before this one
    before = torch.cuda.memory_allocated()
    for _ in range(300):
        fm.moe_forward(**layer.arguments, kernel=moe_family)
        call()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


# ---- bad input -----------------------------------------------------------------------------------


def test_bad_calls_write_nothing(moe_family: str) -> None:
    layer = make(CASES[1], "bf16")
    arguments = layer.arguments
    out = memory.poisoned(16 * 512, torch.bfloat16, DEVICE).view(16, 512)
    before = memory.bits(out).clone()
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"x": arguments["x"].float()}, NotImplementedError,
         "x: it is on cuda:0 and of dtype fp32"),
        ({"x": arguments["x"].cpu()}, ValueError, "w_gate_up: it is on cuda:0"),
        ({"w_down": arguments["w_down"].cpu()}, ValueError, "w_down: it is on cpu"),
        ({"w_down": arguments["w_down"][:7]}, ValueError, "w_down: its number of experts is 7"),
        ({"routing": layer.routing._replace(slots=layer.routing.slots.cpu())}, ValueError,
         "slots: it is on cpu"),
        ({"b_down": arguments["b_down"].half()}, TypeError, "b_down: got dtype fp16"),
        ({"kernel": "sm12"}, ValueError, 'kernel: got "sm12"'),
    ]  # fmt: skip
    for changed, kind, sentence in bad:
        with pytest.raises(kind) as caught:
            fm.moe_forward(**{**arguments, "kernel": moe_family, **changed}, out=out)
        assert str(caught.value).startswith(sentence)
    torch.cuda.synchronize()
    assert torch.equal(memory.bits(out), before)
