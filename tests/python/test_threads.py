"""Calls from several threads, and other Python threads while the library computes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import flashmoe_science as fm
import numpy as np
import pytest


def attend() -> Callable[[], object]:
    q = np.random.default_rng(0).standard_normal((1, 2048, 8, 64), np.float32)
    return lambda: fm.flash_attention(q, q, q)


def compute_experts() -> Callable[[], object]:
    rng = np.random.default_rng(0)
    x, logits = (rng.standard_normal((2048, n), np.float32) for n in (512, 8))
    w_gate_up, w_down = (
        rng.standard_normal(s, np.float32) for s in ((8, 1024, 512), (8, 512, 512))
    )
    routing = fm.moe_route(logits, 4)
    return lambda: fm.moe_forward(x, w_gate_up, w_down, routing)


@pytest.mark.parametrize("prepare", [attend, compute_experts], ids=lambda f: f.__name__)
def test_other_threads_run_meanwhile(prepare: Callable[[], Callable[[], object]]) -> None:
    call = prepare()
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    before = fm.get_num_threads()
    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        fm.set_num_threads(1)
        begin = time.perf_counter()
        call()
        end = time.perf_counter()
    finally:
        stop.set()
        ticker.join()
        fm.set_num_threads(before)
    # Were the GIL held, no tick could fall into the middle of the call.
    quarter = (end - begin) / 4
    assert any(begin + quarter < t < end - quarter for t in ticks)


def test_concurrent_calls_do_not_disturb_each_other() -> None:
    rng = np.random.default_rng(1)
    cases = [
        tuple(rng.standard_normal((1, seq, 4, dim), np.float32) for _ in range(3))
        for seq, dim in ((65, 64), (200, 32), (33, 128), (129, 16))
    ]
    expected = [fm.flash_attention(*case, causal=True, return_lse=True) for case in cases]

    def work(index: int) -> None:
        for i in range(40):
            which = (index + i) % len(cases)
            got = fm.flash_attention(*cases[which], causal=True, return_lse=True)
            np.testing.assert_array_equal(got[0], expected[which][0])
            np.testing.assert_array_equal(got[1], expected[which][1])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_the_number_of_threads_may_change_beside_calls() -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((2, 96, 4, 64), np.float32)
    tokens = rng.standard_normal((40, 128), np.float32)
    router = rng.standard_normal((8, 128), np.float32)
    up = rng.standard_normal((8, 512, 128), np.float32)
    down = rng.standard_normal((8, 128, 256), np.float32)

    def attend() -> np.ndarray:
        return fm.flash_attention(q, q, q)

    def route_and_multiply() -> np.ndarray:
        return fm.fused_moe(tokens, router, up, down, 2)

    before = fm.get_num_threads()
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for n in (1, 7, 2, 16):
                fm.set_num_threads(n)

    def work(call: Callable[[], np.ndarray]) -> None:
        expected = call()
        for _ in range(300):
            np.testing.assert_array_equal(call(), expected)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, (attend, route_and_multiply)))
    finally:
        stop.set()
        changer.join()
        fm.set_num_threads(before)


_CALLED_BY_THE_LOG = """
import numpy as np
import flashmoe_science as fm
rng = np.random.default_rng(0)
few, many = (rng.standard_normal((n, 256), np.float32) for n in (200, 2000))
router, up, down = (
    rng.standard_normal(s, np.float32) for s in ((8, 256), (8, 256, 256), (8, 256, 128))
)
def layer(tokens):
    return fm.fused_moe(tokens, router, up, down, 2)
made = []
def log(level, line):
    if not made:
        made.append(None)  # what this call logs comes here, too
        made[0] = layer(many)
fm.set_log("info", log)
out = layer(few)
fm.set_log("off")
assert (out == layer(few)).all() and (made[0] == layer(many)).all()
"""


def test_a_log_callback_may_compute() -> None:
    """It has a workspace of its own: that of the call which logs is in use."""
    subprocess.run([sys.executable, "-c", _CALLED_BY_THE_LOG], check=True, timeout=60)


def test_the_sentence_belongs_to_the_thread_that_failed() -> None:
    good = np.zeros((1, 8, 2, 16), np.float32)

    def work(dim: int) -> None:
        bad = np.zeros((1, 8, 2, dim), np.float32)
        for _ in range(100):
            with pytest.raises(ValueError, match=f"its head dimension is {dim},"):
                fm.flash_attention(good, bad, bad)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, (8, 24, 32, 40)))


def test_the_last_launch_is_that_of_the_thread_that_made_it() -> None:
    def launch(dim: int) -> None:
        q = np.zeros((1, 8, 2, dim), np.float32)
        fm.flash_attention(q, q, q)

    launch(16)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ValueError, match="nothing was launched on this thread"):
            pool.submit(fm.last_launch).result()
        pool.submit(launch, 32).result()
        assert pool.submit(fm.last_launch).result().kernel.endswith("_d32_dv32")
    assert fm.last_launch().kernel.endswith("_d16_dv16")


_FIRST_CALLS = """
import threading
import numpy as np
import flashmoe_science as fm
q = np.ones((1, 8, 2, 16), np.float32)
barrier = threading.Barrier(8)
done = []
def work():
    barrier.wait()
    done.append(fm.flash_attention(q, q, q))
threads = [threading.Thread(target=work) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert len(done) == 8 and all((out == 1).all() for out in done)
"""


def test_first_calls_from_many_threads() -> None:
    for _ in range(3):
        subprocess.run([sys.executable, "-c", _FIRST_CALLS], check=True, timeout=60)
