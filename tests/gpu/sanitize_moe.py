"""Small calls of the mixture of experts on memory of exactly their size, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize_moe.py

Memory comes from the CUDA driver, one allocation for each tensor, as in sanitize_attention.py.
Every result is checked as well.
"""

from __future__ import annotations

import ctypes as c
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import capi
import capi_moe
import moe_oracle
import numpy as np
from moe_cases import Case, random_ids
from sanitize_attention import Driver

FAMILIES = ("stream", "sm90", "sm89")
LAYERS_ALONE = "stream"  # has no grouped products
_DTYPES = ("fp16", "bf16")

_LAYERS = (
    Case(tokens=3, hidden=72, inner=40, experts=5, top_k=2),
    Case(tokens=70, hidden=136, inner=72, experts=4, top_k=3, gate="interleaved", transposed=True,
         bias="x", limit=1.0, alpha=1.702, up_offset=1.0),
    Case(tokens=33, hidden=64, inner=64, experts=6, top_k=1, gate="separate", activation="gelu",
         weight_on_input=True, bias="fp32"),
    Case(tokens=17, hidden=128, inner=64, experts=3, top_k=2, gate="none", activation="relu2",
         transposed=True),
    Case(tokens=200, hidden=256, inner=128, experts=2, top_k=2, gate="up_gate"),
)  # fmt: skip
_ROUTES: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
    (1, 8, 2, {}),
    (37, 60, 4, {"renormalize": 1}),
    (100, 256, 8, {"scoring": 2, "num_groups": 8, "top_groups": 4}),
    (65, 1024, 32, {"scoring": 1}),
    (0, 8, 2, {}),
)


class Gpu:
    """Runs calls of the C ABI on copies of their arrays."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.lib = capi.load()

    def serves(self, params: Any) -> bool:
        """Whether the family that the call names computes it here."""
        for view in params.keep:
            view.device = capi.Device(capi.CUDA, 0)
        try:
            capi_moe.plan_of(params, self.lib)
        except capi.FlashmoeError as error:
            if error.status != capi.UNSUPPORTED:
                raise
            return False
        return True

    def run(self, params: Any) -> list[str]:
        """Computes, brings every array back, and names the kernels."""
        uploaded = []
        for view in params.keep:
            view.device = capi.Device(capi.CUDA, 0)
            array = view.keep
            stored = storage_of(array)
            if stored.nbytes == 0:  # of which the driver makes none
                view.data = None
                continue
            view.data = self.driver.upload(stored)
            uploaded.append((view.data, stored))
        plan = capi_moe.plan_of(params, self.lib)
        workspace = np.full(max(plan.workspace_bytes, 1), 0xFF, np.uint8)
        scratch = self.driver.upload(workspace)
        call = getattr(self.lib, capi_moe.FUNCTIONS[type(params)])
        capi.check(call(params, c.c_void_p(scratch), c.c_size_t(plan.workspace_bytes), None),
                   self.lib)  # fmt: skip
        self.driver.synchronize()
        for address, array in uploaded:
            array[...] = self.driver.download(address, array)
            self.driver.free(address)
        self.driver.free(scratch)
        return [plan.stage[i].kernel.decode() for i in range(plan.launches)]


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

    def matrix(rows: int, columns: int) -> np.ndarray:
        shape = (case.experts, columns, rows) if case.transposed else (case.experts, rows, columns)
        made = low(rng.standard_normal(shape) * columns**-0.5, dtype)
        return made.swapaxes(1, 2) if case.transposed else made

    made = {
        "x": low(rng.standard_normal((case.tokens, case.hidden)), dtype),
        "w_gate_up": matrix(case.rows, case.hidden),
        "w_down": matrix(case.hidden, case.inner),
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


def check_layer(gpu: Gpu, family: str, case: Case, dtype: str, wild: bool = False) -> list[str]:
    """One call; with `wild` offsets, pairs and slots hold anything, and nothing is checked but that
    the call stays inside of its memory."""
    rng = np.random.default_rng(1)
    arrays = layer_arrays(case, dtype)
    ids = random_ids(rng, case)
    ids[::5, 0] = -1
    offsets, pairs, slots = moe_oracle.sort_pairs(ids, case.experts)
    weights = rng.random(ids.shape, np.float32)
    routing = {"weights": weights, "offsets": offsets, "pairs": pairs, "slots": slots}
    if wild:
        for name in ("offsets", "pairs", "slots"):
            routing[name] = rng.integers(-(2**31), 2**31, routing[name].shape).astype(np.int32)
    out = low(np.full((case.tokens, case.hidden), np.nan), dtype)
    gate = {"none": "no_gate"}.get(case.gate, case.gate)
    params = capi_moe.make_params(
        capi_moe.ForwardParams, **arrays, **routing, out=out, gate=capi_moe.GATES[gate],
        activation=capi_moe.ACTIVATIONS[case.activation], limit=case.limit or 0.0,
        alpha=0.0 if case.alpha == 1.0 else case.alpha, up_offset=case.up_offset,
        weight_on_input=int(case.weight_on_input), kernel=family.encode(),
    )  # fmt: skip
    if not gpu.serves(params):
        return []
    ran = gpu.run(params)
    if not wild:
        routed = moe_oracle.Routing(ids, weights, offsets, pairs, slots, None)
        moe_oracle.assert_forward(out, **arrays, routing=routed, **case.options)
    return ran


def check_product(gpu: Gpu, family: str, dtype: str, masked: bool) -> list[str]:
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
    if not gpu.serves(params):
        return []
    ran = gpu.run(params)
    moe_oracle.assert_grouped_product(out, **arrays, **bounds)
    return ran


def check_route(gpu: Gpu, tokens: int, experts: int, top_k: int, options: dict[str, Any],
                given: bool) -> list[str]:  # fmt: skip
    rng = np.random.default_rng(3)
    routing = capi_moe.Routing.poisoned(tokens, experts, top_k, lse=not given)
    arrays: dict[str, np.ndarray] = {"logits": rng.standard_normal((tokens, experts), np.float32)}
    if given:
        arrays = {"given_ids": rng.integers(-2, experts + 2, (tokens, top_k))}
        options = {}
    params = capi_moe.make_params(capi_moe.RouteParams, **arrays, **routing.arrays(), **options)
    ran = gpu.run(params)
    if given:
        want = moe_oracle.route_given(arrays["given_ids"], num_experts=experts)
    else:
        names = {"scoring": moe_oracle.SCORINGS[options.get("scoring", 0)]}
        named = {n: v for n, v in options.items() if n in ("num_groups", "top_groups")}
        want = moe_oracle.route(arrays["logits"], top_k, **names, **named,
                                renormalize=bool(options.get("renormalize")))  # fmt: skip
    moe_oracle.assert_routed(routing, want)
    return ran


def main() -> None:
    gpu = Gpu()
    seen: set[str] = set()
    built = capi.BuildInfo(struct_size=c.sizeof(capi.BuildInfo))
    capi.check(gpu.lib.flashmoe_get_build_info(built), gpu.lib)
    for tokens, experts, top_k, options in _ROUTES:
        for given in (False, True):
            seen |= set(check_route(gpu, tokens, experts, top_k, options, given))
    for family in FAMILIES:
        if family not in built.kernel_families.decode().split():
            continue
        for dtype in _DTYPES:
            for case in _LAYERS:
                seen |= set(check_layer(gpu, family, case, dtype))
                check_layer(gpu, family, case, dtype, wild=True)
            for masked in (False, True) if family != LAYERS_ALONE else ():
                seen |= set(check_product(gpu, family, dtype, masked))
    print("\n".join(sorted(seen)))


if __name__ == "__main__":
    main()
