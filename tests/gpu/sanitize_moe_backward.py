"""Small calls of the gradients of the mixture of experts on memory of exactly their size, for
compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize_moe_backward.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize_moe_backward.py --small sm89

As sanitize_moe.py, whose memory and arrays it has. Every result is held to the CPU's. Prints the
kernels that ran.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import capi_moe
import kernels
import moe_oracle
import numpy as np
from gpu.sanitize import Driver
from gpu.sanitize_moe import Runner, layer_arrays, low
from moe_cases import Case, random_ids

FAMILIES = ("sm89", "sm90")
PARTS = ("route", *FAMILIES)
_NEAR = 2.0**-5  # of the largest, what two ways of rounding are apart

# More steps than a pipeline has stages, several tiles of a gradient, and ends of both.
SMALL = (
    Case(tokens=150, hidden=264, inner=136, experts=2, top_k=2, bias="x"),
    Case(tokens=9, hidden=40, inner=24, experts=3, top_k=2, gate="separate", bias="fp32",
         weight_on_input=True),
    Case(tokens=130, hidden=136, inner=72, experts=2, top_k=2),
)  # fmt: skip
LAYERS = (
    Case(tokens=70, hidden=136, inner=72, experts=4, top_k=3, gate="interleaved", transposed=True,
         bias="x", limit=1.0, alpha=1.702, up_offset=1.0),
    Case(tokens=17, hidden=128, inner=64, experts=3, top_k=2, gate="none", activation="relu2",
         transposed=True),
    Case(tokens=200, hidden=256, inner=128, experts=2, top_k=2, gate="up_gate",
         activation="gelu"),
    Case(tokens=33, hidden=64, inner=64, experts=6, top_k=1, gate="gate_up",
         activation="gelu_tanh", weight_on_input=True),
)  # fmt: skip


def stated_kernels(part: str) -> set[str]:
    if part == "route":
        return {"moe_route_backward"}
    own = {"sm89": "sm89_{}", "sm90": "sm90_{}_weight_gradient"}[part]
    stages = ("rows_{}", "combine_{}", "sums_{}", own)
    made = {f"moe_backward_{stage.format(dtype)}" for stage in stages for dtype in kernels.DTYPES}
    return made | {"moe_backward_zeros"} | ({"moe_backward_slots"} if part == "sm90" else set())


Make = Callable[[], tuple[Any, dict[str, np.ndarray]]]  # parameters, and the outputs among them


def check(runner: Runner, make: Make, *, written: bool = True, wild: bool = False) -> list[str]:
    """The call on the GPU, and then on the CPU. With `wild` it is enough that it stays inside. No
    kernels where the family refuses it."""
    params, made = make()
    if not runner.serves(params):
        return []
    ran = runner.run(params, *made.values(), written=written)
    if wild:
        return ran
    params, want = make()
    if hasattr(params, "kernel"):  # routing has one implementation for each device
        params.kernel = None
    capi_moe.run(params, runner.lib)
    for name, values in made.items():
        got, ref = values.astype(np.float64), want[name].astype(np.float64)
        largest = np.abs(ref).max(initial=1e-3)
        assert np.abs(got - ref).max(initial=0.0) <= _NEAR * largest, name
    return ran


def filled(shape: tuple[int, ...], dtype: str, accumulate: bool) -> np.ndarray:
    return low(np.full(shape, 0.5 if accumulate else np.nan), dtype)


def check_layer(
    runner: Runner, family: str, case: Case, dtype: str, *, out: str, accumulate: bool,
    wild: bool = False,
) -> list[str]:  # fmt: skip
    def make() -> tuple[Any, dict[str, np.ndarray]]:
        rng = np.random.default_rng(1)
        arrays = layer_arrays(case, dtype)
        arrays["dout"] = low(rng.standard_normal((case.tokens, case.hidden)), dtype)
        ids = random_ids(rng, case)
        # `rows` loads a slot before it knows whether the slot has an expert, and uses nothing of it
        # then: memory that nobody wrote, to initcheck.
        if not runner.unwritten:
            ids[1::5, 0] = -1
        offsets, pairs, slots = moe_oracle.sort_pairs(ids, case.experts)
        routing = {"weights": rng.random(ids.shape, np.float32), "offsets": offsets,
                   "pairs": pairs, "slots": slots}  # fmt: skip
        if wild:
            for name in ("offsets", "pairs", "slots"):
                values = rng.integers(-(2**31), 2**31, routing[name].shape)
                routing[name] = values.astype(np.int32)
        made = {"dx": filled(arrays["x"].shape, out, accumulate)}
        for name in ("w_gate_up", "w_up", "w_down"):
            if name in arrays:
                made[f"d{name}"] = filled(arrays[name].shape, out, accumulate)
                made[f"db{name[1:]}"] = filled(arrays[name].shape[:2], out, accumulate)
        made["dweights"] = filled(ids.shape, "fp32", accumulate)
        gate = {"none": "no_gate"}.get(case.gate, case.gate)
        params = capi_moe.make_params(
            capi_moe.BackwardParams, **arrays, **routing, **made, gate=capi_moe.GATES[gate],
            activation=capi_moe.ACTIVATIONS[case.activation], limit=case.limit or 0.0,
            alpha=0.0 if case.alpha == 1.0 else case.alpha, up_offset=case.up_offset,
            weight_on_input=int(case.weight_on_input), accumulate=int(accumulate),
            kernel=family.encode(),
        )  # fmt: skip
        return params, made

    # Boxes of the copy engine reach into rows of other experts, which may not be written yet.
    written = not accumulate and not wild and family != "sm90"
    return check(runner, make, written=written, wild=wild)


def check_product(
    runner: Runner, family: str, dtype: str, *, counted: bool, out: str, accumulate: bool
) -> list[str]:
    def make() -> tuple[Any, dict[str, np.ndarray]]:
        rng = np.random.default_rng(2)
        experts, n, k, most = 3, 72, 136, 40
        rows = (experts, most) if counted else (120,)
        bounds = (
            {"counts": np.array([40, 0, 7], np.int32)}
            if counted
            else {"offsets": np.array([2, 33, 33, 118], np.int32)}
        )
        made = {
            "dx": filled((*rows, k), out, accumulate),
            "dw": filled((experts, n, k), out, accumulate),
            "dbias": filled((experts, n), out, accumulate),
        }
        params = capi_moe.make_params(
            capi_moe.ProductBackwardParams, dout=low(rng.standard_normal((*rows, n)), dtype),
            x=low(rng.standard_normal((*rows, k)), dtype),
            w=low(rng.standard_normal((experts, n, k)) / 12, dtype), **bounds, **made,
            accumulate=int(accumulate), kernel=family.encode(),
        )  # fmt: skip
        return params, made

    return check(runner, make, written=not accumulate and family != "sm90")


def check_route(
    runner: Runner, experts: int, top_k: int, scoring: str, dtype: str, *, accumulate: bool
) -> list[str]:
    def make() -> tuple[Any, dict[str, np.ndarray]]:
        rng = np.random.default_rng(3)
        tokens = 21
        logits = low(rng.standard_normal((tokens, experts)), dtype)
        ids = rng.permuted(np.tile(np.arange(experts, dtype=np.int32), (tokens, 1)), axis=1)
        made = {"dlogits": filled((tokens, experts), "fp32", accumulate)}
        params = capi_moe.make_params(
            capi_moe.RouteBackwardParams,
            dweights=rng.standard_normal((tokens, top_k)).astype(np.float32),
            ids=np.ascontiguousarray(ids[:, :top_k]), logits=logits,
            dlse=rng.standard_normal(tokens).astype(np.float32), **made,
            scoring=capi_moe.SCORINGS[scoring], renormalize=1, accumulate=int(accumulate),
        )  # fmt: skip
        return params, made

    return check(runner, make, written=not accumulate)


def run_part(runner: Runner, part: str, small: bool) -> set[str]:
    seen: set[str] = set()
    if part == "route":
        for experts, top_k in ((5, 2), (200, 8), (1024, 32)):
            for scoring, dtype in zip(capi_moe.SCORINGS, ("bf16", "fp16", "fp32"), strict=True):
                for accumulate in (False, True):
                    seen |= set(check_route(runner, experts, top_k, scoring, dtype,
                                            accumulate=accumulate))  # fmt: skip
        return seen
    for dtype in kernels.DTYPES:
        for out, accumulate in ((dtype, False), ("fp32", True)):
            for case in SMALL if small else (*SMALL, *LAYERS):
                seen |= set(check_layer(runner, part, case, dtype, out=out, accumulate=accumulate))
                if not small:
                    check_layer(runner, part, case, dtype, out=out, accumulate=accumulate,
                                wild=True)  # fmt: skip
            for counted in (False, True):
                seen |= set(check_product(runner, part, dtype, counted=counted, out=out,
                                          accumulate=accumulate))  # fmt: skip
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="each kernel on its smallest calls")
    parser.add_argument("--unwritten", action="store_true",
                        help="outputs and workspaces that nothing was copied to")  # fmt: skip
    given = parser.parse_args()
    begin = time.monotonic()
    runner = Runner(Driver(), unwritten=given.unwritten)
    seen: set[str] = set()
    for part in given.parts or PARTS:
        seen |= run_part(runner, part, given.small)
    print("\n".join(sorted(seen)))
    print(f"{time.monotonic() - begin:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
