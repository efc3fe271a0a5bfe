"""Small calls of the mixture of experts on memory of exactly their size, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize_moe.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize_moe.py --small sm90

Memory comes from the CUDA driver, one allocation for each tensor, as in sanitize.py.
Every result is checked as well. Prints the kernels that ran.
"""

from __future__ import annotations

import argparse
import ctypes as c
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import capi
import capi_moe
import kernels
import moe_oracle
import numpy as np
from gpu.sanitize import Driver
from moe_cases import Case, random_ids
from moe_chains import MULTIPROCESSORS, RouteChain, few_tokens, once, sm89, sm90, twice

FAMILIES = ("sm89_few_tokens", "sm90", "sm89")
PARTS = ("route", *FAMILIES)
LAYERS_ALONE = "sm89_few_tokens"  # has no grouped products

# Each kernel once, on what is least for all that it does: more steps than a pipeline has stages
# and, where blocks take one tile after the other, more tiles than there are blocks.
_FEW = Case(tokens=3, hidden=456, inner=456, experts=2, top_k=2)
_TILES = Case(tokens=24, hidden=392, inner=392, experts=24, top_k=2)
_SM90 = Case(tokens=20, hidden=392, inner=392, experts=2, top_k=2)
_SM89 = Case(tokens=24, hidden=136, inner=392, experts=24, top_k=2)
# More than two token tiles by all rows for each cluster, that are runs.
_KEPT = Case(tokens=3200, hidden=4096, inner=200, experts=1, top_k=1)


def _changed(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, **changes)


SMALL = (
    few_tokens("few tokens", _FEW, "r16_n8"),
    few_tokens("whole stripes", Case(tokens=2, hidden=32 * MULTIPROCESSORS, inner=264, experts=2,
                                 top_k=1), "r32_n8"),
    few_tokens("9 tokens", _changed(_FEW, tokens=9, gate="none", activation="relu2", bias="x"),
           "r32_n16", pre_activation=True),
    few_tokens("long rows", _changed(_FEW, hidden=1032, inner=776, experts=3), "bulk",
           pre_activation=True),
    sm90("narrow tiles", _TILES, "swiglu_up_narrow"),
    sm90("wide tiles", _changed(_SM90, tokens=200, experts=1, top_k=1), "swiglu_up"),
    sm90("weights kept", _KEPT, "swiglu_up", "down_short"),
    sm90("more weights kept", _changed(_KEPT, inner=456), "swiglu_up", "down_middle"),
    sm90("any activation", _changed(_TILES, activation="gelu", bias="fp32", top_k=3), "gated_up",
         pre_activation=True),
    sm90("no gate", _changed(_SM90, gate="none", activation="relu2"), "up", pre_activation=True),
    sm90("transposed", _changed(_SM90, transposed=True, bias="x"), "gated_up_trans", "down_trans"),
    sm90("no gate, transposed", _changed(_SM90, gate="none", transposed=True), "up_trans",
         "down_trans"),
    sm90("transposed interleaved rows",
         _changed(_SM90, gate="interleaved", transposed=True, bias="x"),
         "gated_up_interleaved", "down_trans", pre_activation=True),
    sm89("gated", _SM89, pre_activation=True),
    sm89("tiles of one step", Case(tokens=24, hidden=24, inner=32, experts=24, top_k=2)),
    sm89("no gate", _changed(_SM89, gate="none", bias="x", top_k=3)),
    sm89("interleaved rows", _changed(_SM89, gate="interleaved", transposed=True, top_k=5)),
    sm89("no gate, transposed", _changed(_SM89, gate="none", transposed=True, experts=2)),
)  # fmt: skip

# With the ends of tiles, and routings that hold anything.
LAYERS = (
    Case(tokens=3, hidden=72, inner=40, experts=5, top_k=2),
    Case(tokens=5, hidden=520, inner=776, experts=3, top_k=2, gate="interleaved", limit=1.0),
    Case(tokens=70, hidden=136, inner=72, experts=4, top_k=3, gate="interleaved", transposed=True,
         bias="x", limit=1.0, alpha=1.702, up_offset=1.0),
    Case(tokens=33, hidden=64, inner=64, experts=6, top_k=1, gate="separate", activation="gelu",
         weight_on_input=True, bias="fp32"),
    Case(tokens=17, hidden=128, inner=64, experts=3, top_k=2, gate="none", activation="relu2",
         transposed=True),
    Case(tokens=200, hidden=256, inner=128, experts=2, top_k=2, gate="up_gate"),
    Case(tokens=900, hidden=136, inner=248, experts=4, top_k=2),
)  # fmt: skip


def _small_routes() -> list[RouteChain]:
    """In a cluster of two blocks, and in two launches."""
    made = [RouteChain(40, 60, 8, once("given"), "int64"),
            RouteChain(513, 60, 32, twice("given"), "int64")]  # fmt: skip
    for experts in (32, 128, 256, 512, 1024):
        for bits, dtype in ((32, "bf16"), (64, "fp32")):
            kind = f"key{bits}_e{experts}"
            made += [RouteChain(20, experts - 2, 5, once(kind), dtype),
                     RouteChain(513, experts - 2, 5, twice(kind), dtype)]  # fmt: skip
    return made


SMALL_ROUTES = _small_routes()
_GROUPS = {"scoring": "sigmoid", "num_groups": 8, "top_groups": 4}
ROUTES = (
    RouteChain(1, 8, 2, once("key64_e32"), "fp32"),
    RouteChain(37, 60, 4, once("key64_e128"), "fp32", {"renormalize": True}),
    RouteChain(512, 256, 8, once("key64_e256"), "fp16", _GROUPS),
    RouteChain(513, 256, 8, twice("key64_e256"), "fp16", _GROUPS),
    RouteChain(65, 1024, 32, once("key32_e1024"), "fp16", {"scoring": "topk_softmax"}),
    RouteChain(0, 8, 2, once("key64_e32"), "fp32"),
    RouteChain(3, 8, 2, once("given"), "int64"),
)


def stated_kernels(part: str) -> set[str]:
    """What the part runs on the GPU that the chains are stated for."""
    if part == "route":
        return {kernel for route in (*SMALL_ROUTES, *ROUTES) for kernel in route.kernels}
    chains = [chain for chain in SMALL if chain.family == part]
    return {name for chain in chains for dtype in kernels.DTYPES for name in chain.names(dtype)}


GPU = (capi.CUDA, 0)


class Runner:
    """Runs calls of the C ABI on copies of their arrays, which the driver makes."""

    def __init__(
        self, driver: Any, device: tuple[int, int] = GPU, *, unwritten: bool = False
    ) -> None:
        self.driver = driver
        self.device = capi.Device(*device)
        self.lib = capi.load()
        self.unwritten = unwritten

    def serves(self, params: Any) -> bool:
        """Whether the family that the call names computes it here."""
        for view in params.keep:
            view.device = self.device
        try:
            capi_moe.plan_of(params, self.lib)
        except capi.FlashmoeError as error:
            if error.status != capi.UNSUPPORTED:
                raise
            return False
        return True

    def run(self, params: Any, *outputs: np.ndarray, written: bool = True) -> list[str]:
        """Computes, brings every array back, and names the kernels.

        outputs: All of which the call writes. With `unwritten` they and the workspace are memory
        that nothing has been copied to, unless this call is known to read what it does not use.
        """
        fresh = self.unwritten and written
        uploaded = []
        for view in params.keep:
            view.device = self.device
            array = view.keep
            stored = storage_of(array)
            if stored.nbytes == 0:  # of which the driver makes none
                view.data = None
                continue
            of_output = any(array is output for output in outputs)
            make = self.driver.allocate if fresh and of_output else self.driver.upload
            view.data = make(stored)
            uploaded.append((view.data, stored))
        plan = capi_moe.plan_of(params, self.lib)
        workspace = np.full(max(plan.workspace_bytes, 1), 0xFF, np.uint8)
        scratch = (self.driver.allocate if fresh else self.driver.upload)(workspace)
        call = getattr(self.lib, capi_moe.FUNCTIONS[type(params)])
        capi.check(call(params, c.c_void_p(scratch), c.c_size_t(plan.workspace_bytes), None),
                   self.lib)  # fmt: skip
        self.driver.synchronize()
        for address, array in uploaded:
            array[...] = self.driver.download(address, array)
            self.driver.free(address)
        self.driver.free(scratch)
        return [launch.kernel.decode() for launch in plan.launches]


def storage_of(array: np.ndarray) -> np.ndarray:
    """The contiguous array that a matrix turned round is of; others are their own."""
    made = array if array.flags.c_contiguous else array.swapaxes(-1, -2)
    assert made.flags.c_contiguous and made.ctypes.data == array.ctypes.data
    return made


def low(values: np.ndarray, dtype: str) -> np.ndarray:
    made = capi.aligned_empty(values.shape, capi.DTYPES[dtype])
    made[...] = values.astype(capi.DTYPES[dtype])
    return made


def layer_arrays(case: Case, dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(case.tokens)

    def matrix(rows: int, columns: int, turned: bool = case.transposed) -> np.ndarray:
        shape = (case.experts, columns, rows) if turned else (case.experts, rows, columns)
        made = low(rng.standard_normal(shape, np.float32) * np.float32(columns**-0.5), dtype)
        return made.swapaxes(1, 2) if turned else made

    made = {
        "x": low(rng.standard_normal((case.tokens, case.hidden)), dtype),
        "w_gate_up": matrix(case.rows, case.hidden),
        "w_down": matrix(case.hidden, case.inner, case.turns_down),
    }
    if case.gate == "separate":
        made["w_up"] = matrix(case.inner, case.hidden)
    if case.bias is not None:
        of = dtype if case.bias == "x" else "fp32"
        made["b_gate_up"] = low(rng.standard_normal((case.experts, case.rows)), of)
        made["b_down"] = low(rng.standard_normal((case.experts, case.hidden)), of)
        if case.gate == "separate":
            made["b_up"] = low(rng.standard_normal((case.experts, case.inner)), of)
    return made


def check_layer(
    runner: Runner, family: str, case: Case, dtype: str, *, wild: bool = False,
    pre_activation: bool = False,
) -> list[str]:  # fmt: skip
    """One call; with `wild` offsets, pairs and slots hold anything, and nothing is checked but that
    the call stays inside of its memory. No kernels where the family refuses it."""
    rng = np.random.default_rng(1)
    arrays = layer_arrays(case, dtype)
    ids = random_ids(rng, case)
    ids[1::5, 0] = -1
    offsets, pairs, slots = moe_oracle.sort_pairs(ids, case.experts)
    weights = rng.random(ids.shape, np.float32)
    routing = {"weights": weights, "offsets": offsets, "pairs": pairs, "slots": slots}
    if wild:
        for name in ("offsets", "pairs", "slots"):
            routing[name] = rng.integers(-(2**31), 2**31, routing[name].shape).astype(np.int32)
    out = low(np.full((case.tokens, case.hidden), np.nan), dtype)
    width = case.inner if case.gate == "none" else 2 * case.inner
    pre = low(np.full((pairs.size, width), np.nan), dtype) if pre_activation else None
    gate = {"none": "no_gate"}.get(case.gate, case.gate)
    params = capi_moe.make_params(
        capi_moe.ForwardParams, **arrays, **routing, out=out, pre_activation=pre,
        gate=capi_moe.GATES[gate], activation=capi_moe.ACTIVATIONS[case.activation],
        limit=case.limit or 0.0, alpha=0.0 if case.alpha == 1.0 else case.alpha,
        up_offset=case.up_offset, weight_on_input=int(case.weight_on_input), kernel=family.encode(),
    )  # fmt: skip
    if not runner.serves(params):
        return []
    # The copy engine brings sm90 boxes that reach into rows of other experts, which `up` may not
    # have written yet.
    ran = runner.run(params, out, written=not wild and family != "sm90")
    if not wild:
        routed = moe_oracle.Routing(ids, weights, offsets, pairs, slots, None)
        moe_oracle.assert_forward(out, **arrays, routing=routed, pre_activation=pre, **case.options)
    return ran


def check_product(runner: Runner, family: str, dtype: str, masked: bool) -> list[str]:
    rng = np.random.default_rng(2)
    experts, n, k, most = 3, 72, 136, 40
    bounds: dict[str, np.ndarray] = {"counts": np.array([40, 0, 7], np.int32)}
    x = rng.standard_normal((experts, most, k))
    if not masked:
        x = x.reshape(-1, k)
        bounds = {"offsets": np.array([0, 33, 33, 118], np.int32)}
    arrays = {"x": low(x, dtype), "w": low(rng.standard_normal((experts, n, k)) / 12, dtype)}
    out = low(np.full((*x.shape[:-1], n), np.nan), dtype)
    params = capi_moe.make_params(capi_moe.ProductParams, **arrays, **bounds, out=out,
                                  kernel=family.encode())  # fmt: skip
    if not runner.serves(params):
        return []
    ran = runner.run(params)  # rows that no expert has are not written
    moe_oracle.assert_grouped_product(out, **arrays, **bounds)
    return ran


def check_route(runner: Runner, route: RouteChain) -> list[str]:
    rng = np.random.default_rng(3)
    routing = capi_moe.Routing.poisoned(
        route.tokens, route.experts, route.top_k, lse=not route.given
    )
    outputs = routing.arrays()
    arrays: dict[str, np.ndarray] = {}
    if route.given:
        shape = (route.tokens, route.top_k)
        arrays["given_ids"] = rng.integers(-2, route.experts + 2, shape)
        want = moe_oracle.route_given(arrays["given_ids"], num_experts=route.experts)
    else:
        values = rng.standard_normal((route.tokens, route.experts), np.float32)
        arrays["logits"] = low(values, route.dtype)
        want = moe_oracle.route(arrays["logits"], route.top_k, **route.options)
    params = capi_moe.make_params(capi_moe.RouteParams, **arrays, **outputs, **route.c_options)
    ran = runner.run(params, *(array for array in outputs.values() if array is not None))
    moe_oracle.assert_routed(routing, want)
    return ran


def run_part(runner: Runner, part: str, small: bool) -> set[str]:
    seen: set[str] = set()
    if part == "route":
        for route in SMALL_ROUTES if small else (*SMALL_ROUTES, *ROUTES):
            seen |= set(check_route(runner, route))
        return seen
    for dtype in kernels.DTYPES:
        for chain in (chain for chain in SMALL if chain.family == part):
            seen |= set(check_layer(runner, part, chain.case, dtype,
                                    pre_activation=chain.pre_activation))  # fmt: skip
        for masked in (False, True) if part != LAYERS_ALONE else ():
            seen |= set(check_product(runner, part, dtype, masked))
        for case in () if small else LAYERS:
            seen |= set(check_layer(runner, part, case, dtype))
            check_layer(runner, part, case, dtype, wild=True)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="each kernel on its smallest call")
    parser.add_argument("--unwritten", action="store_true",
                        help="outputs and workspaces that nothing was copied to")  # fmt: skip
    given = parser.parse_args()
    begin = time.monotonic()
    runner = Runner(Driver(), unwritten=given.unwritten)
    built = capi.BuildInfo(struct_size=c.sizeof(capi.BuildInfo))
    capi.check(runner.lib.flashmoe_get_build_info(built), runner.lib)
    seen: set[str] = set()
    for part in given.parts or PARTS:
        if part == "route" or part in built.kernel_families.decode().split():
            seen |= run_part(runner, part, given.small)
    print("\n".join(sorted(seen)))
    print(f"{time.monotonic() - begin:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
