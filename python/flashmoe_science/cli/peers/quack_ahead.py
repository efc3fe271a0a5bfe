"""Compiles the kernels that QuACK's tuner tries, in concurrent processes.

The tuner compiles in its own processes, but starts them one after another and again for every
product: minutes for each of SonicMoE's six. The compiled kernels do not depend on extents and stay
in QuACK's cache on disk. So processes that each compile a share, on a small layer, leave only
loading and timing to the tuner.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from flashmoe_science.cli.arrays import choose_arrays
from flashmoe_science.cli.moe_gradient_inputs import make_moe_gradient_inputs
from flashmoe_science.cli.moe_shapes import MoeTrainingShape
from flashmoe_science.cli.peers.peer import is_installed

WORKERS = "QUACK_COMPILE_WORKERS"  # the tuner's variable; 1: it starts no processes
_MOST_PROCESSES = 16  # each has its own context on the GPU
_LAYER = MoeTrainingShape(tokens=512, hidden=512, inner=256, experts=8, top_k=2)


@functools.cache
def compile_ahead(device: str) -> None:
    """Compiles for SonicMoE's forward and backward, once per process; reports this on standard
    error.

    Does nothing if QUACK_COMPILE_WORKERS is set, or without a tuner.
    """
    if WORKERS in os.environ or not is_installed("quack.autotuner"):
        return
    os.environ[WORKERS] = "1"  # here and in the processes
    count = max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) - 1))
    print(f"sonicmoe: {count} processes compile what QuACK tunes", file=sys.stderr, flush=True)
    begin = time.monotonic()
    name = f"{compile_share.__module__} import {compile_share.__name__}"
    codes = [f"from {name}; {compile_share.__name__}({i}, {count}, {device!r})"
             for i in range(count)]  # fmt: skip
    # The tuner compiles what one of them leaves: a failure only costs time.
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=sys.stderr) for code in codes
    ]
    try:
        failed = sum(process.wait() != 0 for process in processes)
    finally:
        for process in processes:
            process.kill()
    took = f"sonicmoe: compiled in {time.monotonic() - begin:.0f} s"
    print(took + (f"; {failed} processes failed" if failed else ""), file=sys.stderr, flush=True)


def compile_share(index: int, count: int, device: str) -> None:
    """The work of one of `count` processes: a forward and a backward, whose tuners take every
    count-th configuration and call each once instead of timing it."""
    tuner = importlib.import_module("quack.autotuner").Autotuner
    for value in vars(importlib.import_module("quack.gemm_interface")).values():
        if isinstance(value, tuner):
            value.early_config_prune = functools.partial(
                share_of, value.early_config_prune, index, count
            )
            value.cache_results = False
            value.do_bench = call_once
    from flashmoe_science.cli.peers.moe_gradients import prepare_training
    from flashmoe_science.cli.peers.sonicmoe import prepare_to_differentiate

    arrays = choose_arrays(device)
    inputs = make_moe_gradient_inputs(arrays, _LAYER)
    prepare_training(prepare_to_differentiate, arrays, _LAYER, inputs).call()
    arrays.synchronize()


def share_of(
    prune: Callable[..., list[Any]] | None,
    index: int,
    count: int,
    configs: list[Any],
    *arguments: Any,
    **options: Any,
) -> list[Any]:
    """Every count-th of the tuner's configurations; at least one, which it needs."""
    kept = prune(configs, *arguments, **options) if prune is not None else configs
    return kept[index::count] or kept[:1]


def call_once(call: Callable[[], Any], **options: Any) -> list[float]:
    """Replaces the tuner's measurement: compiles and runs, but does not measure."""
    call()
    return [0.0, 0.0, 0.0]
