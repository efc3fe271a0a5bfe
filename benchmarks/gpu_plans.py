"""The plans of all suites' shapes on the GPU at hand, as one record.

    python benchmarks/gpu_plans.py --output benchmarks/results/plans_h200.json

Nothing is timed. tests/cli/test_plan_models.py holds the plans for a GPU that is not here to those
that one was given.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import flashmoe_science as fm
from flashmoe_science.cli import measure_moe_backward
from flashmoe_science.cli.environment import as_dict, plan_as_dict
from flashmoe_science.cli.measure_backward import one_after_the_other
from flashmoe_science.cli.moe_shapes import MOE_SHAPES, MoeShape, MoeTrainingShape
from flashmoe_science.cli.plan import plan_for
from flashmoe_science.cli.shapes import BackwardShape, Shape
from flashmoe_science.cli.suites import (
    MOE_TRAINING,
    TRAINING,
    load_suite,
    operation_of,
    suite_names,
)

# Suites of a family that is asked for by name.
BY_FAMILY = (("attention-forward", "sm89"), ("moe-training", "sm89"))
# A forward and its backward together: each also has its own suite.
_OF_BOTH = (TRAINING, MOE_TRAINING)


def plan_of(shape: Any, device: str, kernel: str | None = None) -> dict[str, Any]:
    """What a record of `flashmoe bench` tells of the plan of one of its rows."""
    if operation_of(shape) == TRAINING:
        forward, backward = (
            plan_as_dict(plan_for(fm, of(**vars(shape)), device)) for of in (Shape, BackwardShape)
        )
        return one_after_the_other(forward, backward)
    if operation_of(shape) not in MOE_SHAPES:
        return plan_as_dict(plan_for(fm, shape, device, kernel=kernel))
    return _plan_of_experts(shape, device, kernel)


def _plan_of_experts(shape: MoeShape, device: str, kernel: str | None) -> dict[str, Any]:
    of: dict[str, Any] = {"dtype": shape.dtype, "device": device}
    routing = of | {n: getattr(shape, n) for n in ("tokens", "experts", "top_k")}
    layer = routing | {n: getattr(shape, n) for n in ("hidden", "inner")}
    if not shape.gradients:
        return as_dict(fm.moe_plan_for(**layer, kernel=kernel))
    plans = []
    if isinstance(shape, MoeTrainingShape):
        plans.append(fm.moe_route_plan_for(**routing, renormalize=True))
        plans.append(fm.moe_plan_for(**layer, return_pre_activation=True))
    plans.append(fm.moe_backward_plan_for(**layer, kernel=kernel))
    plans.append(fm.moe_route_backward_plan_for(**routing, renormalize=True))
    whole = [as_dict(plan) for plan in plans]
    return measure_moe_backward.one_after_the_other(whole, shape.operation)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--output", type=Path, required=True, help="write the record here")
    arguments = parser.parse_args()
    suites = []
    for name, kernel in [*((name, None) for name in suite_names()), *BY_FAMILY]:
        suite = load_suite(name)
        if suite.device == "cpu" or suite.operation in _OF_BOTH:
            continue
        plans = [plan_of(shape, arguments.device, kernel) for shape in suite.shapes]
        for plan in plans:
            plan["microseconds"] = round(plan["microseconds"], 3)
        cells = [
            {"shape": vars(shape), "plan": plan}
            for shape, plan in zip(suite.shapes, plans, strict=True)
        ]
        suites.append(
            {"suite": name, "operation": suite.operation, "kernel": kernel, "cells": cells}
        )
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": as_dict(fm.device_info(arguments.device)),
        "library": as_dict(fm.build_info()),
        "suites": suites,
    }
    arguments.output.write_text(json.dumps(record, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
