"""The thread pool: its size, several callers at once, fork, and no threads before they are due."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import capi
import capi_moe
import numpy as np
import pytest
from capi import normal
from moe_layers import make_layer, random_routing

TESTS = Path(__file__).resolve().parent.parent


def threads_of_process() -> int:
    return len(os.listdir("/proc/self/task"))


def problem(seed: int, seq: int = 256) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [normal(rng, (1, seq, 4, 64), np.dtype(np.float32)) for _ in range(3)]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "FLASHMOE_LIBRARY": str(capi.library_path()), **environment}
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{code}"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_default_is_the_affinity_mask() -> None:
    lib = capi.load_fresh()
    assert lib.flashmoe_get_num_threads() == len(os.sched_getaffinity(0))


def test_environment_sets_the_default() -> None:
    lib = capi.load_fresh(FLASHMOE_NUM_THREADS="3")
    assert lib.flashmoe_get_num_threads() == 3
    assert lib.flashmoe_set_num_threads(5) == capi.OK
    assert lib.flashmoe_get_num_threads() == 5
    assert lib.flashmoe_set_num_threads(0) == capi.OK
    assert lib.flashmoe_get_num_threads() == 3


@pytest.mark.parametrize("value", ["0", "-1", "two", "4097", "3x"])
def test_bad_environment_is_said_and_ignored(value: str) -> None:
    done = run_python(
        "import capi; print(capi.load().flashmoe_get_num_threads())", FLASHMOE_NUM_THREADS=value
    )
    assert int(done.stdout) == len(os.sched_getaffinity(0))
    assert f'FLASHMOE_NUM_THREADS: got "{value}", accepted are 1 to 4096' in done.stderr


# FIRST is what the first thread, and so the process, is bound to, OTHER is for another one, ASKS is
# for the one that asks; None: the first.
COUNT = """
import os, threading
everywhere = os.sched_getaffinity(0)
one = {min(everywhere)}
stop = threading.Event()
other = threading.Thread(target=lambda: (os.sched_setaffinity(0, OTHER), stop.wait()))
other.start()
os.sched_setaffinity(0, FIRST)
import capi
counts = []
ask = lambda: (os.sched_setaffinity(0, ASKS), counts.append(capi.load().flashmoe_get_num_threads()))
if ASKS is None:
    counts.append(capi.load().flashmoe_get_num_threads())
else:
    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
stop.set()
print(len(everywhere), *counts)
"""


@pytest.mark.parametrize(
    ("first", "other", "asks", "environment", "all_of_them"),
    [
        ("everywhere", "everywhere", "one", {}, True),
        ("one", "one", "everywhere", {}, True),
        ("one", "everywhere", "None", {}, False),
        ("one", "everywhere", "one", {"OMP_PROC_BIND": " False "}, False),
        ("one", "everywhere", "None", {"OMP_PROC_BIND": "Spread,close"}, True),
        ("one", "everywhere", "None", {"OMP_PLACES": "cores"}, True),
        ("one", "one", "None", {"OMP_PROC_BIND": "true"}, False),
    ],
)
def test_a_thread_bound_alone_does_not_speak_for_the_process(
    first: str, other: str, asks: str, environment: dict[str, str], all_of_them: bool
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two processors")
    code = COUNT.replace("FIRST", first).replace("OTHER", other).replace("ASKS", asks)
    done = run_python(code, **environment)
    assert done.returncode == 0, done.stderr
    everywhere, count = map(int, done.stdout.split())
    assert count == (everywhere if all_of_them else 1)


# torch's OpenMP binds the first thread when it is loaded, and shows its functions.
BOUND = """
import os
everywhere = os.sched_getaffinity(0)
import torch
assert len(os.sched_getaffinity(0)) == 1, "OpenMP has bound no thread"
import capi, numpy as np
lib = capi.load()
print(len(everywhere), lib.flashmoe_get_num_threads())
before = set(os.listdir("/proc/self/task"))
q = np.ones((1, 256, 4, 64), np.float32)
capi.attention(q, q, q, lib=lib)
for helper in set(os.listdir("/proc/self/task")) - before:
    assert os.sched_getaffinity(int(helper)) == everywhere - os.sched_getaffinity(0), "helpers"
"""


@pytest.mark.parametrize("value", ["true", "SPREAD", "close, spread"])
def test_openmp_binding_is_not_the_process(value: str) -> None:
    pytest.importorskip("torch")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two processors")
    done = run_python(BOUND, OMP_PROC_BIND=value)
    assert done.returncode == 0, done.stderr
    everywhere, count = map(int, done.stdout.split())
    assert count == everywhere


@pytest.mark.parametrize("n", [-1, 4097])
def test_bad_count_is_refused(library: ctypes.CDLL, n: int) -> None:
    before = library.flashmoe_get_num_threads()
    assert library.flashmoe_set_num_threads(n) == capi.INVALID_ARGUMENT
    assert f"n: got {n}" in library.flashmoe_last_error().decode()
    assert library.flashmoe_get_num_threads() == before


def test_threads_start_when_a_call_needs_them() -> None:
    lib = capi.load_fresh()
    before = threads_of_process()
    lib.flashmoe_set_num_threads(4)
    small = [x[:, :16] for x in problem(0)]
    capi.attention(*small, lib=lib)
    assert threads_of_process() == before, "a tiny call is one thread's work"
    capi.attention(*problem(0), lib=lib)
    assert threads_of_process() == before + 3
    capi.attention(*problem(0), lib=lib)
    assert threads_of_process() == before + 3


def test_helpers_stay_off_the_callers_processor() -> None:
    """And where the caller may run, also if that changes."""
    mine = os.sched_getaffinity(0)
    if len(mine) < 2:
        pytest.skip("needs two processors")
    lib = capi.load_fresh()
    before = set(os.listdir("/proc/self/task"))
    lib.flashmoe_set_num_threads(4)
    expected = capi.attention(*problem(0), lib=lib)
    helpers = [int(task) for task in set(os.listdir("/proc/self/task")) - before]
    assert len(helpers) == 3

    def allowed(caller: set[int]) -> list[set[int]]:
        os.sched_setaffinity(0, caller)
        out, _ = capi.attention(*problem(0), lib=lib)
        np.testing.assert_array_equal(out, expected[0])
        return [os.sched_getaffinity(helper) for helper in helpers]

    try:
        assert all(a < mine and len(a) == len(mine) - 1 for a in allowed(mine))
        one, other = sorted(mine)[:2]
        pair = allowed({one, other})
        assert pair in ([{one}] * 3, [{other}] * 3)
        assert allowed({one}) == pair, "of one processor nothing would be left"
        assert all(len(a) == len(mine) - 1 for a in allowed(mine))
    finally:
        os.sched_setaffinity(0, mine)


COUNTS = (1, 2, 3, 5, 8, 16, 64)


def calls_with_workspace(dtype: str) -> dict[str, tuple[Any, np.ndarray]]:
    """Parameters and output of calls that keep several threads busy, by name."""
    rng = np.random.default_rng(3)
    kind = capi.DTYPES[dtype]
    calls: dict[str, tuple[Any, np.ndarray]] = {}
    # Large tiles, small ones where threads are many, and fewer tiles than threads.
    for name, batch, seq, heads in (("long", 1, 700, 2), ("one head", 1, 96, 1), ("few", 3, 40, 2)):
        q, k, v = (normal(rng, (batch, seq, heads, 64), kind) for _ in range(3))
        out = np.empty_like(q)
        calls[f"attention, {name}"] = capi.attention_params(q, k, v, out), out
    for tokens in (5, 150):
        layer = make_layer(rng, 4, 264, 520, kind)
        x = normal(rng, (tokens, 264), kind)
        out = capi.aligned_empty(x.shape, kind)
        routing = random_routing(rng, tokens, 4, 2).arrays()
        routed = {name: routing[name] for name in ("weights", "offsets", "pairs", "slots")}
        params = capi_moe.make_params(
            capi_moe.ForwardParams, x=x, out=out, **routed, **layer.arguments
        )
        calls[f"layer, {tokens} tokens"] = params, out
    x, w = normal(rng, (90, 264), kind), normal(rng, (3, 520, 264), kind)
    out = capi.aligned_empty((90, 520), kind)
    offsets = np.array([0, 30, 31, 90], np.int32)
    params = capi_moe.make_params(capi_moe.ProductParams, x=x, w=w, offsets=offsets, out=out)
    calls["product"] = params, out
    logits = rng.standard_normal((1000, 64)).astype(np.float32)
    made = capi_moe.Routing.poisoned(1000, 64, 4)
    params = capi_moe.make_params(capi_moe.RouteParams, logits=logits, **made.arrays())
    calls["route"] = params, made.pairs
    return calls


@pytest.mark.parametrize("dtype", capi.DTYPES)
def test_workspace_serves_whatever_the_threads_become(isa_library: ctypes.CDLL, dtype: str) -> None:
    """A query and the call that it is for are two: in between others may set the number."""
    lib = isa_library
    guard = 4096
    try:
        for name, (params, out) in calls_with_workspace(dtype).items():
            function = capi_moe.FUNCTIONS.get(type(params), "flashmoe_attention_forward")
            run, workspace_size = (getattr(lib, function + end) for end in ("", "_workspace_size"))
            results = set()
            for asked in COUNTS:
                capi.check(lib.flashmoe_set_num_threads(asked), lib)
                size = ctypes.c_size_t()
                capi.check(workspace_size(ctypes.byref(params), ctypes.byref(size)), lib)
                memory = capi.aligned_empty((size.value + guard,), np.dtype(np.uint8), 16)
                for running in COUNTS:
                    capi.check(lib.flashmoe_set_num_threads(running), lib)
                    memory[...] = 0xA5
                    out.view(np.uint8)[...] = 0xFF
                    where = ctypes.c_void_p(memory.ctypes.data)
                    status = run(ctypes.byref(params), where, size, None)
                    said = lib.flashmoe_last_error().decode()
                    assert status == capi.OK, f"{name}, {asked} threads, then {running}: {said}"
                    assert (memory[size.value :] == 0xA5).all(), f"{name}: wrote behind"
                    results.add(out.tobytes())
            assert len(results) == 1, f"{name}: the bits depend on the threads"
    finally:
        capi.check(lib.flashmoe_set_num_threads(0), lib)


def test_threads_are_those_there_is_workspace_for(library: ctypes.CDLL) -> None:
    params, _ = calls_with_workspace("fp32")["attention, long"]

    def threads_in(workspace: np.ndarray) -> int:
        capi.run_attention(params, library, workspace)
        [launch] = capi.last_launches(library)
        return launch.block[0]

    def workspace_for(threads: int) -> np.ndarray:
        capi.check(library.flashmoe_set_num_threads(threads), library)
        size = capi.attention_plan(params, library).workspace_bytes
        return capi.aligned_empty((size,), np.dtype(np.uint8))

    try:
        one, eight = workspace_for(1), workspace_for(8)
        assert threads_in(eight) == 8
        assert 1 <= threads_in(one) < 8
        with pytest.raises(capi.FlashmoeError, match=f"this call needs {eight.nbytes} ") as caught:
            capi.run_attention(params, library, one[:64])
        assert caught.value.status == capi.WORKSPACE_TOO_SMALL
        capi.check(library.flashmoe_set_num_threads(2), library)
        assert threads_in(eight) == 2
    finally:
        capi.check(library.flashmoe_set_num_threads(0), library)


def test_idle_threads_sleep(library: ctypes.CDLL) -> None:
    library.flashmoe_set_num_threads(4)
    capi.attention(*problem(0), lib=library)
    library.flashmoe_set_num_threads(0)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


def test_many_callers_at_once(library: ctypes.CDLL) -> None:
    library.flashmoe_set_num_threads(3)
    problems = [problem(seed, 200 + 40 * seed) for seed in range(6)]
    expected = [capi.attention(*p, lib=library) for p in problems]
    failures: list[int] = []

    def caller(index: int) -> None:
        for _ in range(8):
            out, lse = capi.attention(*problems[index], lib=library)
            if not (
                np.array_equal(out, expected[index][0]) and np.array_equal(lse, expected[index][1])
            ):
                failures.append(index)

    callers = [threading.Thread(target=caller, args=(i,)) for i in range(len(problems))]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(timeout=60)
        assert not thread.is_alive()
    library.flashmoe_set_num_threads(0)
    assert failures == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_computes(library: ctypes.CDLL) -> None:
    library.flashmoe_set_num_threads(3)
    inputs = problem(1)
    expected, _ = capi.attention(*inputs, lib=library)
    for _ in range(3):
        child = os.fork()
        if child == 0:
            out, _ = capi.attention(*inputs, lib=library)
            os._exit(0 if np.array_equal(out, expected) else 1)
        deadline = time.monotonic() + 30
        done, status = 0, 0
        while done == 0 and time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.001)
        if done == 0:
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert done == child, "the child hangs"
        assert status == 0
    np.testing.assert_array_equal(capi.attention(*inputs, lib=library)[0], expected)
    library.flashmoe_set_num_threads(0)


def test_fork_while_others_compute() -> None:
    done = run_python(
        """
import os, threading, numpy as np, capi
rng = np.random.default_rng(0)
inputs = [capi.normal(rng, (1, 256, 4, 64), np.dtype(np.float32)) for _ in range(3)]
lib = capi.load()
lib.flashmoe_set_num_threads(3)
expected = capi.attention(*inputs)[0]
stop = threading.Event()
def spin():
    while not stop.is_set():
        capi.attention(*inputs)
workers = [threading.Thread(target=spin) for _ in range(2)]
for w in workers: w.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(capi.attention(*inputs)[0], expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for w in workers: w.join()
print("done")
"""
    )
    assert done.stdout.strip() == "done", done.stderr
