"""How calls run: the same every time, on the caller's stream, in graphs, from several threads."""

from __future__ import annotations

import ctypes as c
import dataclasses
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import capi
import flashmoe_science as fm
import kernels
import pytest
import torch
from gpu import cases, families, memory, oracle
from gpu.cases import Case

pytestmark = pytest.mark.gpu

CASES = [
    Case(dtype="bf16", batch=2, seq_q=1000, seq_k=1000, heads_q=8, heads_kv=2, causal="top_left"),
    Case(dtype="fp16", batch=2, seq_q=777, seq_k=1023, heads_q=4, heads_kv=4, dim=128, dim_v=128),
    Case(dtype="bf16", seq_q=513, seq_k=900, heads_q=8, heads_kv=1, dim=192, dim_v=128,
         causal="bottom_right"),
    Case(dtype="fp16", seq_q=500, seq_k=700, heads_q=4, heads_kv=4, dim=256, dim_v=256,
         causal="bottom_right"),
    Case(dtype="bf16", batch=3, seq_q=300, seq_k=300, heads_q=5, heads_kv=5, dim=40, dim_v=88,
         window=(90, 20), softcap=5.0),
]  # fmt: skip


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest, family: str) -> Case:
    """Each of CASES for each family."""
    return dataclasses.replace(request.param, kernel=family)


def _cases(family: str) -> list[Case]:
    return [dataclasses.replace(case, kernel=family) for case in CASES]


def _attention(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return fm.flash_attention(q, k, v, **case.mask, return_lse=True, kernel=case.kernel)


def _same_bits(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(memory.bits(a), memory.bits(b)) for a, b in zip(got, want, strict=True))


def _busy(milliseconds: float) -> None:
    """Keeps the current stream busy for at least about this long."""
    torch.cuda._sleep(int(milliseconds * 2e6))


def _warm(*some: Case) -> None:
    """The first call of a kernel loads its code, which may wait for the device."""
    for case in some:
        _attention(case, *cases.make_values(case, "cuda:0"))
    torch.cuda.synchronize()


def test_a_hundred_runs_give_the_same_bits(case: Case) -> None:
    q, k, v = cases.make_values(case, "cuda:0")
    want = _attention(case, q, k, v)
    oracle.assert_accurate(*want, q, k, v, **case.mask)
    other, noise = torch.cuda.Stream(), torch.cuda.Stream()
    for run in range(100):
        if run % 3 == 1:  # on another stream
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                got = _attention(case, q, k, v)
            torch.cuda.current_stream().wait_stream(other)
        elif run % 3 == 2:  # beside other work, which takes some of the GPU away
            with torch.cuda.stream(noise):
                a = torch.randn(1024, 1024, device="cuda")
                for _ in range(5):
                    a = a @ a * 1e-3
            got = _attention(case, q, k, v)
        else:
            got = _attention(case, q, k, v)
        assert _same_bits(got, want), f"run {run}"
    torch.cuda.synchronize()


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_other_heads_make_no_difference_to_the_bits(dtype: str, dim: int, family: str) -> None:
    """How tiles are dealt to blocks, and what a block computed before one, depend on all heads."""
    if family in ("sm89_few_rows", "sm90_split_kv"):
        pytest.skip("how it splits the keys depends on all heads, and the sums on that")
    case = Case(dtype=dtype, batch=3, seq_q=1100, seq_k=1100, heads_q=12, heads_kv=12, dim=dim,
                dim_v=dim, causal="bottom_right", kernel=family)  # fmt: skip
    q, k, v = cases.make_values(case, "cuda:0")
    out, lse = _attention(case, q, k, v)
    for batch, head in ((0, 0), (1, 7), (2, 11)):
        one = (slice(batch, batch + 1), slice(None), slice(head, head + 1))
        got = _attention(case, q[one], k[one], v[one])
        assert _same_bits(got, (out[one], lse[batch : batch + 1, head : head + 1]))


def test_strides_make_no_difference_to_the_bits(case: Case) -> None:
    q, k, v = cases.make_values(case, "cuda:0")
    want = _attention(case, q, k, v)
    heads_first = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out, lse = fm.flash_attention(
        *heads_first, **case.mask, return_lse=True, layout="bhsd", kernel=case.kernel
    )
    assert _same_bits((out.transpose(1, 2).contiguous(), lse), want)


def test_graph_replays_follow_the_inputs(case: Case) -> None:
    q, k, v = cases.make_values(case, "cuda:0")
    _warm(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _attention(case, q, k, v)
    for seed in range(1, 4):
        fresh = cases.make_values(dataclasses.replace(case, seed=seed), "cuda:0")
        for static, new in zip((q, k, v), fresh, strict=True):
            static.copy_(new)
        for result in captured:
            result.fill_(float("nan"))
        graph.replay()
        assert _same_bits(captured, _attention(case, *fresh))
        oracle.assert_accurate(*captured, *fresh, **case.mask)


@pytest.mark.parametrize("others", ["same", "all", "torch"])
def test_calls_that_read_what_the_one_before_wrote(others: str, family: str) -> None:
    """A chain of them, as calls and as a graph: kernels may start before those ahead have ended."""
    case = _cases(family)[0]
    q, k, v = cases.make_values(case, "cuda:0")
    asked = {"same": [family], "all": [family, *families.serving()], "torch": [family]}[others]
    _warm(*(dataclasses.replace(case, kernel=kernel) for kernel in asked))

    def chain(x: torch.Tensor, between: Callable[[], object]) -> torch.Tensor:
        for kernel in itertools.islice(itertools.cycle(asked), 20):
            x = fm.flash_attention(x, k, v, causal=True, kernel=kernel)
            if others == "torch":
                x = x * 1.5
            between()
        return x

    want = chain(q, torch.cuda.synchronize)
    for _ in range(5):
        assert torch.equal(memory.bits(chain(q, lambda: None)), memory.bits(want))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(q, lambda: None)
    got.fill_(float("nan"))
    graph.replay()
    assert torch.equal(memory.bits(got), memory.bits(want))


def _run_program(program: str, family: str) -> None:
    """A process of its own, in which calls that name no kernel go to the family."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True,
        timeout=300, check=False, env={**os.environ, "FLASHMOE_ARCH": kernels.family_of(family)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_launches_that_follow_one_another_leave_nothing_behind(case: Case) -> None:
    """Into the same output, with other numbers of tiles between them."""
    shorter = dataclasses.replace(case, seq_q=case.seq_q // 3, seed=1)
    calls = []
    for one in (case, shorter, dataclasses.replace(case, seed=2)):
        inputs = cases.make_values(one, "cuda:0")
        calls.append((one, inputs, _attention(one, *inputs)))
    results = [torch.empty_like(x) for x in calls[0][2]]
    copies = []
    for run in range(30):
        one, inputs, want = calls[run % len(calls)]
        out, lse = (x.flatten()[: y.numel()].view(y.shape)
                    for x, y in zip(results, want, strict=True))  # fmt: skip
        fm.flash_attention(
            *inputs, **one.mask, return_lse=True, kernel=one.kernel, out=out, lse=lse
        )
        copies.append((run, (out.clone(), lse.clone()), want))
    for run, got, want in copies:
        assert _same_bits(got, want), f"run {run}"


def test_two_streams_at_once(case: Case) -> None:
    """Blocks of one launch wait for room beside those of another."""
    other = dataclasses.replace(case, seed=1, seq_k=case.seq_k // 2)
    calls = []
    for one in (case, other):
        inputs = cases.make_values(one, "cuda:0")
        calls.append((one, inputs, _attention(one, *inputs), torch.cuda.Stream()))
    torch.cuda.synchronize()
    copies = []
    for run in range(40):
        for one, inputs, want, stream in calls:
            with torch.cuda.stream(stream):
                copies.append((run, _attention(one, *inputs), want))
    torch.cuda.synchronize()
    for run, got, want in copies:
        assert _same_bits(got, want), f"run {run}"


def test_the_first_call_of_a_process_can_be_captured(family: str) -> None:
    program = """
        import flashmoe_science as fm
        import torch

        q, k, v = (torch.randn(2, 300, 4, 64, device="cuda").bfloat16() for _ in range(3))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fm.flash_attention(q, k, v, causal=True)
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, fm.flash_attention(q, k, v, causal=True))
    """
    _run_program(program, family)


@pytest.mark.parametrize("how", ["current", "argument", "handle", "c"])
def test_runs_on_the_given_stream_and_waits_for_nothing(case: Case, how: str) -> None:
    """Inputs arrive late on a stream of their own. Right results prove the order, and a call that
    returns before its inputs are there has synchronised nothing."""
    q, k, v = (torch.zeros_like(x) for x in cases.make_values(case, "cuda:0"))
    fresh = cases.make_values(case, "cuda:0")
    out = torch.full(case.shape(case.seq_q, case.heads_q, case.dim_v), float("nan"),
                     dtype=q.dtype, device="cuda:0")  # fmt: skip
    lse = torch.full((case.batch, case.heads_q, case.seq_q), float("nan"), device="cuda:0")
    _warm(case)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _busy(300)
        for static, new in zip((q, k, v), fresh, strict=True):
            static.copy_(new)
    options = {**case.mask, "return_lse": True, "kernel": case.kernel}
    options |= {"out": out, "lse": lse}
    if how == "current":
        with torch.cuda.stream(stream):
            fm.flash_attention(q, k, v, **options)
    elif how == "c":
        raws = [memory.Placed(x, x, ()).raw() for x in (q, k, v, out, lse)]
        with torch.cuda.stream(stream):
            memory.call(*raws, **case.mask | {"causal": case.causal}, kernel=case.kernel)
    else:
        given = stream if how == "argument" else stream.cuda_stream
        fm.flash_attention(q, k, v, **options, stream=given)
    assert not stream.query(), "the call waited for its stream"
    with torch.cuda.stream(stream):
        copies = out.clone(), lse.clone()
    stream.synchronize()
    oracle.assert_accurate(*copies, *fresh, **case.mask)


def test_does_not_wait_for_other_streams(family: str) -> None:
    case = _cases(family)[1]
    q, k, v = cases.make_values(case, "cuda:0")
    _warm(case)
    busy, quick = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        _busy(500)
    with torch.cuda.stream(quick):
        got = _attention(case, q, k, v)
    quick.synchronize()
    assert not busy.query(), "the call waited for a stream that is not its own"
    oracle.assert_accurate(*got, q, k, v, **case.mask)


def test_threads_with_streams_of_their_own() -> None:
    """Results, and the last launch, are each thread's own; all families at once."""
    everything = [case for family in families.serving() for case in _cases(family)]
    _warm(*everything)
    wants = []
    for case in everything:
        inputs = cases.make_values(case, "cuda:0")
        planned = fm.attention_plan(*inputs, **case.mask, kernel=case.kernel).launches
        wants.append((case, inputs, _attention(case, *inputs), planned))
    torch.cuda.synchronize()
    failures: list[str] = []
    start = threading.Barrier(len(wants))

    def work(case: Case, inputs: tuple, want: tuple, planned: tuple[fm.Launch, ...]) -> None:
        try:
            stream = torch.cuda.Stream()
            start.wait()
            with torch.cuda.stream(stream):
                for run in range(60):
                    got = _attention(case, *inputs)
                    if fm.last_launches() != planned:
                        failures.append(f"{case}: launched {fm.last_launches()}, not {planned}")
                    if not _same_bits(got, want):
                        failures.append(f"{case}: run {run} differs")
        except Exception as error:
            failures.append(f"{case}: {error!r}")

    threads = [threading.Thread(target=work, args=want) for want in wants]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[:5]


def test_first_calls_from_many_threads_at_once(family: str) -> None:
    """Loading a kernel's code is safe when all threads come first."""
    program = """
        import threading
        import flashmoe_science as fm
        import torch

        inputs = [[torch.randn(1, 200, 2, dim, device="cuda").half() for _ in range(3)]
                  for dim in (32, 64, 128, 256) for _ in range(4)]
        results = [None] * len(inputs)
        start = threading.Barrier(len(inputs))

        def work(i):
            start.wait()
            results[i] = fm.flash_attention(*inputs[i])
            torch.cuda.synchronize()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for triple, result in zip(inputs, results):
            assert torch.equal(result, fm.flash_attention(*triple))
    """
    _run_program(program, family)


@pytest.mark.alone  # another process's allocation would count
def test_allocates_no_device_memory(family: str) -> None:
    for case in _cases(family):
        q, k, v = cases.make_values(case, "cuda:0")
        out, lse = _attention(case, q, k, v)
        options = {**case.mask, "return_lse": True, "kernel": family}
        options |= {"out": out, "lse": lse}
        workspaces = 50 if fm.attention_plan(q, k, v, **options).workspace_bytes > 0 else 0
        torch.cuda.synchronize()
        torch_before = torch.cuda.memory_stats()["allocation.all.allocated"]
        free_before, _ = torch.cuda.mem_get_info()
        for _ in range(50):
            fm.flash_attention(q, k, v, **options)
        torch.cuda.synchronize()
        torch_now = torch.cuda.memory_stats()["allocation.all.allocated"]
        assert torch_now == torch_before + workspaces  # which come from torch
        assert torch.cuda.mem_get_info()[0] >= free_before


def test_frees_its_tensors(family: str) -> None:
    case = _cases(family)[0]
    q, k, v = cases.make_values(case, "cuda:0")
    _attention(case, q, k, v)
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        _attention(case, q, k, v)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_other_threads_run_while_a_launch_waits_for_the_queue(family: str) -> None:
    """The launch queue is filled behind a long kernel; the interpreter lock must be free then."""
    case = Case(seq_q=64, seq_k=64, kernel=family)
    q, k, v = cases.make_values(case, "cuda:0")
    out = torch.empty_like(q)
    _warm(case)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.005)

    thread = threading.Thread(target=tick)
    thread.start()
    _busy(400)
    for _ in range(3000):  # a queue holds about a thousand
        fm.flash_attention(q, k, v, out=out, kernel=family)
    torch.cuda.synchronize()
    stop.set()
    thread.join()
    longest = max(b - a for a, b in itertools.pairwise(ticks))
    assert longest < 0.25, f"other threads stood still for {longest:.3f} s"


def test_current_device_stays(family: str) -> None:
    device = torch.cuda.current_device()
    for case in _cases(family):
        _attention(case, *cases.make_values(case, "cuda:0"))
        assert torch.cuda.current_device() == device


def test_a_threads_first_use_of_cuda_may_be_a_call(family: str) -> None:
    """Such a thread has no context yet, which the driver asks for but does not make."""
    case = Case(dtype="bf16", seq_q=300, seq_k=700, heads_q=4, heads_kv=4, kernel=family)
    q, k, v = cases.make_values(case, "cuda:0")
    want = _attention(case, q, k, v)
    results = [torch.full_like(x, float("nan")) for x in want]
    params = capi.AttentionForwardParams(struct_size=c.sizeof(capi.AttentionForwardParams))
    views = [memory.Placed(x, x, ()).raw() for x in (q, k, v, *results)]
    for name, view in zip(("q", "k", "v", "out", "lse"), views, strict=True):
        setattr(params, name, c.pointer(view))
    params.kernel = family.encode()
    lib = capi.load()
    size = fm.attention_plan(q, k, v, return_lse=True, kernel=family).workspace_bytes
    workspace = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda:0")
    statuses: list[int] = []

    def work() -> None:
        for _ in range(3):
            statuses.append(
                lib.flashmoe_attention_forward(
                    params, c.c_void_p(workspace.data_ptr()), c.c_size_t(size), None
                )
            )

    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert statuses == [0, 0, 0], lib.flashmoe_last_error().decode()
    torch.cuda.synchronize()
    assert _same_bits(tuple(results), want)


def test_calls_in_turn_are_what_they_are_alone(family: str) -> None:
    """Shapes, strides and options that take turns, more of them than the library keeps."""
    rng = torch.Generator().manual_seed(0)
    every = []
    for i, case in enumerate(itertools.islice(itertools.cycle(_cases(family)), 13)):
        one = dataclasses.replace(case, seq_q=case.seq_q // 2 + i, seed=i)
        inputs = cases.make_values(one, "cuda:0")
        every.append((one, inputs, _attention(one, *inputs)))
        torch.cuda.synchronize()
    for i in torch.randint(len(every), (300,), generator=rng).tolist():
        one, inputs, want = every[i]
        assert _same_bits(_attention(one, *inputs), want), str(one)
        copies = (x.clone() for x in inputs)  # elsewhere in memory
        assert _same_bits(_attention(one, *copies), want), str(one)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs to tell one from the other"
)
def test_tensors_of_another_gpu(case: Case) -> None:
    """The call goes to the tensors' GPU and its current stream; the current device stays."""
    torch.cuda.set_device(0)
    want = _attention(case, *cases.make_values(case, "cuda:0"))
    q, k, v = (x.to("cuda:1") for x in cases.make_values(case, "cuda:0"))
    got = _attention(case, q, k, v)
    assert torch.cuda.current_device() == 0
    assert got[0].device == torch.device("cuda:1")
    assert {launch.device for launch in fm.last_launches()} == {"cuda:1"}
    oracle.assert_accurate(*got, q, k, v, **case.mask)
    if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
        assert _same_bits(tuple(x.to("cuda:0") for x in got), want)
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream):  # makes cuda:1 current
        _busy(100)
        late = q * 1
        again = _attention(case, late, k, v)
    assert not stream.query()
    stream.synchronize()
    assert _same_bits(again, got)
    with pytest.raises(ValueError, match=r"^k: it is on cuda:1 but q is on cuda:0"):
        _attention(case, q.to("cuda:0"), k, v)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs to tell one from the other"
)
def test_the_current_gpu_may_change_between_calls(family: str) -> None:
    """New outputs come to lie beside the tensors, whichever GPU was current before, and nothing of
    them elsewhere, not even for a moment."""

    def allocations(device: str) -> int:
        return torch.cuda.memory_stats(device)["allocation.all.allocated"]

    case = _cases(family)[0]
    everything = []
    for device in ("cuda:0", "cuda:1"):
        inputs = tuple(x.to(device) for x in cases.make_values(case, "cuda:0"))
        everything.append((device, inputs, _attention(case, *inputs)))
    try:
        for current in (0, 1, 1, 0, 1, 0, 0):
            torch.cuda.set_device(current)
            for device, inputs, want in (*everything, *reversed(everything)):
                other = {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}[device]
                before = allocations(other)
                got = _attention(case, *inputs)
                assert allocations(other) == before
                assert [str(x.device) for x in got] == [device] * 2
                assert torch.cuda.current_device() == current
                assert _same_bits(got, want)
    finally:
        torch.cuda.set_device(0)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs to tell one from the other"
)
def test_a_stream_of_another_gpu_is_an_error(family: str) -> None:
    case = _cases(family)[0]
    q, k, v = cases.make_values(case, "cuda:0")
    out = torch.full_like(q, float("nan"))
    stream = torch.cuda.Stream("cuda:1")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^launching attention_forward_"):
            fm.flash_attention(q, k, v, out=out, kernel=family, stream=stream)
    torch.cuda.synchronize("cuda:0")
    torch.cuda.synchronize("cuda:1")
    assert out.isnan().all()
