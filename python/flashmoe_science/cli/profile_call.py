"""The process that Nsight Compute watches for `flashmoe profile`: one call of ours, checked.

    python -m flashmoe_science.cli.profile_call SHAPE DEVICE KERNEL FILE

SHAPE is a JSON object of shapes.Shape's fields, KERNEL a family or "". The profiler is on during
the second call only: the first loads the kernel. FILE receives plan, launches and accuracy, or the
reason why the call is void.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from typing import Any

from flashmoe_science.cli import environment
from flashmoe_science.cli.arrays import Arrays, choose_arrays
from flashmoe_science.cli.measure import OURS, call_ours, launch_mismatch, make_inputs
from flashmoe_science.cli.output import write_json
from flashmoe_science.cli.reference import judge
from flashmoe_science.cli.shapes import Shape


@contextlib.contextmanager
def _profiler(arrays: Arrays) -> Any:
    """Profiles the enclosed code; torch and CuPy use the same names for it."""
    if arrays.device == "cpu":
        yield
        return
    arrays.xp.cuda.profiler.start()
    yield
    arrays.synchronize()
    arrays.xp.cuda.profiler.stop()


def profiled_call(shape: Shape, device: str, kernel: str | None) -> dict[str, Any]:
    """Plan, launches and accuracy of the profiled call, or {"reason": why it is void}."""
    flashmoe = environment.package()
    arrays = choose_arrays(device)
    inputs = make_inputs(arrays, shape)
    try:
        call_ours(flashmoe, arrays, shape, inputs, kernel)
        with _profiler(arrays):
            ours = call_ours(flashmoe, arrays, shape, inputs, kernel)
    except (flashmoe.FlashMoEError, ValueError, TypeError, RuntimeError) as error:
        return {"reason": f"the call failed: {error}"}
    mismatch = launch_mismatch(ours.plan, ours.launches)
    if mismatch:
        return {"reason": f"the launched kernel is not the planned one: {mismatch}"}
    verdict = judge(arrays, shape, inputs, {OURS: ours.out}, ours.lse)[OURS]
    if not verdict.passed:
        return {"reason": verdict.reason}
    about = {"plan": ours.plan, "launches": ours.launches}
    return about | {"accuracy": dataclasses.asdict(verdict)}


def main(argv: list[str]) -> None:
    shape, device, kernel, file = argv
    write_json(profiled_call(Shape(**json.loads(shape)), device, kernel or None), file)


if __name__ == "__main__":
    main(sys.argv[1:])
