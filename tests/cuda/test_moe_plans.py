"""What the experts' planners choose on a made-up CUDA (tests/cuda/host/) with GPUs of compute
capability 9.0: the kernels that tests/moe_chains.py and tests/gpu/sanitize_moe.py state. This
needs no GPU, but CUDA's headers, which come with nvcc."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import capi
import capi_moe
import kernels
import moe_chains
import moe_kernels
import pytest
from gpu import sanitize_moe
from installations import ROOT, checked, require_cuda_headers, require_tool
from moe_cases import Case
from moe_chains import LayerChain, RouteChain
from moe_kernels import ELEMENTS

_CORE = (
    *("checks", "choose", "dtype", "launch", "log", "operation", "overlap", "per_thread", "status"),
    *(f"ops/moe/{name}" for name in ("checks", "forward", "grouped_product", "route")),
)
_CUDA = (
    "device",
    "gpu_models",
    "launch",
    "tensor_map",
    "moe/combine/stage",
    *(f"moe/{family}/family" for family in ("route", "sm89", "sm89_few_tokens", "sm90")),
)
_HOST = ("fake_cuda", "moe_kernels")
_OPTIONS = (
    *("-std=c++17", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-pthread"),
    *("-Wl,-Bsymbolic", "-DFLASHMOE_WITH_CUDA=1", "-DFLASHMOE_WITH_SM90=1"),
    '-DFLASHMOE_CUDA_ARCHITECTURES="89-real 90a-real 89-virtual"',
)
_CODES = {"fp16": (2, 16), "bf16": (4, 16), "fp32": (2, 32), "int32": (0, 32), "int64": (0, 64)}


def _instances() -> dict[str, list[tuple[str, ...]]]:
    """The instances of each family, by its folder: macro, name and arguments."""
    made: dict[str, list[tuple[str, ...]]] = {
        "route": [("ROUTE", f"key{bits}_e{32 * per_lane}", str(per_lane), str(bits))
                  for per_lane in moe_kernels.experts_per_lane() for bits in (32, 64)],
    }  # fmt: skip
    for folder in ("sm89", "sm90", "sm89_few_tokens", "sm90_few_tokens"):
        variable = f"FLASHMOE_MOE_{folder.upper()}_KERNELS"
        made[folder] = [
            (folder.upper(), f"{dtype}{suffix}", ELEMENTS[dtype], *arguments)
            for *arguments, suffix in moe_kernels.entries(variable)
            for dtype in kernels.DTYPES
        ]
    return made


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The host code of the library, with the plan functions of its C ABI."""
    build = tmp_path_factory.mktemp("planner")
    for folder, instances in _instances().items():
        for root, line in (("cuda/moe", "FLASHMOE_ENTRY({1})\n"),
                           ("", "FLASHMOE_{0}({2})\n")):  # fmt: skip
            file = build / root / folder / ("entries.inc" if root else "instances.inc")
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = (line.format(m, name, ", ".join((name, *rest))) for m, name, *rest in instances)
            file.write_text("".join(lines), encoding="utf-8")
    sources = [*(f"core/{name}.cpp" for name in _CORE), *(f"cuda/{name}.cpp" for name in _CUDA),
               *(f"tests/cuda/host/{name}.cpp" for name in _HOST)]  # fmt: skip
    includes = [f"-I{path}" for path in (ROOT, ROOT / "include", ROOT / "tests", build)]
    made = build / "libplanner.so"
    checked([require_tool("c++"), *_OPTIONS, *includes, "-isystem", require_cuda_headers(),
             *(ROOT / source for source in sources), "-o", made])  # fmt: skip
    lib = ctypes.CDLL(str(made))
    lib.flashmoe_last_error.restype = ctypes.c_char_p
    return lib


class Tensors:
    """Tensors of a made-up GPU, or of a GPU model, each at its own address."""

    def __init__(self, device: tuple[int, int] = (capi.CUDA, 0)) -> None:
        self._made = 0
        self._device = device

    def __call__(self, *shape: int, of: str, strides: tuple[int, ...] | None = None) -> capi.Tensor:
        made = capi.Tensor()
        self._made += 1
        made.data = (1 << 40) + (self._made << 34)
        made.ndim = len(shape)
        made.shape = (ctypes.c_int64 * len(shape))(*shape)
        if strides is not None:
            made.strides = (ctypes.c_int64 * len(shape))(*strides)
        made.dtype = capi.DType(*_CODES[of], 1)
        made.device = capi.Device(*self._device)
        return made


def _planned(params: Any, planner: ctypes.CDLL) -> tuple[str, tuple[str, ...]]:
    plan = capi_moe.plan_of(params, planner)
    return plan.family.decode(), tuple(launch.kernel.decode() for launch in plan.launches)


def _route_params(chain: RouteChain) -> Any:
    tensor = Tensors()
    tokens, experts, top_k = chain.tokens, chain.experts, chain.top_k
    values = chain.c_options
    if chain.given:
        values["given_ids"] = tensor(tokens, top_k, of=chain.dtype)
    else:
        values["logits"] = tensor(tokens, experts, of=chain.dtype)
    if chain.biased:
        values["selection_bias"] = tensor(experts, of="fp32")
    return capi_moe.make_params(
        capi_moe.RouteParams, **values,
        ids=tensor(tokens, top_k, of="int32"), weights=tensor(tokens, top_k, of="fp32"),
        offsets=tensor(experts + 1, of="int32"), pairs=tensor(tokens * top_k, of="int32"),
        slots=tensor(tokens, top_k, of="int32"),
    )  # fmt: skip


def _layer_params(chain: LayerChain, dtype: str, device: tuple[int, int] = (capi.CUDA, 0)) -> Any:
    case, tensor = chain.case, Tensors(device)
    pairs = case.tokens * case.top_k

    def matrix(rows: int, columns: int, turned: bool) -> capi.Tensor:
        expert = 0 if chain.shared else rows * columns
        strides = (expert, 1, rows) if turned else (expert, columns, 1)
        return tensor(case.experts, rows, columns, of=dtype, strides=strides)

    def bias(rows: int) -> capi.Tensor:
        return tensor(case.experts, rows, of=dtype if case.bias == "x" else "fp32")

    values: dict[str, Any] = {
        "x": tensor(case.tokens, case.hidden, of=dtype),
        "w_gate_up": matrix(case.rows, case.hidden, case.transposed),
        "w_down": matrix(case.hidden, case.inner, case.turns_down),
    }
    if case.gate == "separate":
        values["w_up"] = matrix(case.inner, case.hidden, case.transposed)
    if case.bias is not None:
        values |= {"b_gate_up": bias(case.rows), "b_down": bias(case.hidden)}
    if chain.pre_activation:
        width = case.inner if case.gate == "none" else 2 * case.inner
        values["pre_activation"] = tensor(pairs, width, of=dtype)
    return capi_moe.make_params(
        capi_moe.ForwardParams, **values,
        weights=tensor(case.tokens, case.top_k, of="fp32"),
        offsets=tensor(case.experts + 1, of="int32"), pairs=tensor(pairs, of="int32"),
        slots=tensor(case.tokens, case.top_k, of="int32"),
        out=tensor(case.tokens, case.hidden, of=dtype),
        gate=capi_moe.GATES[{"none": "no_gate"}.get(case.gate, case.gate)],
        activation=capi_moe.ACTIVATIONS[case.activation], limit=case.limit or 0.0,
        alpha=0.0 if case.alpha == 1.0 else case.alpha, up_offset=case.up_offset,
        weight_on_input=int(case.weight_on_input),
        kernel=chain.family.encode() if chain.named else None,
    )  # fmt: skip


def test_routes(planner: ctypes.CDLL) -> None:
    for chain in (*moe_chains.routes(), *sanitize_moe.SMALL_ROUTES, *sanitize_moe.ROUTES):
        assert _planned(_route_params(chain), planner) == ("sm89", chain.kernels), str(chain)


@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_layers(planner: ctypes.CDLL, dtype: str) -> None:
    for chain in (*moe_chains.layers(), *sanitize_moe.SMALL):
        params = _layer_params(chain, dtype)
        if chain.kernels:
            assert _planned(params, planner) == (chain.family, chain.names(dtype)), str(chain)
            continue
        with pytest.raises(capi.FlashmoeError) as refused:
            _planned(params, planner)
        assert refused.value.status == capi.UNSUPPORTED, str(chain)
        assert f"{chain.family}: " in refused.value.sentence


_H100 = (256, 0)  # FLASHMOE_DEVICE_GPU_MODEL, FLASHMOE_GPU_H100
_TIE = 1.03
# Slower than another family, and chosen: the copy engine's kernels for few tokens of a small layer,
# and sm89's for many tokens of which every expert has few.
_KNOWN = {("small", 4), ("small", 8), ("qwen3", 128)}


@pytest.mark.parametrize("without", ["", "sm90"])
def test_layers_are_served_by_what_was_fastest(planner: ctypes.CDLL, without: str) -> None:
    """Compares the families that can compute a call, by their times on an H100."""
    text = (ROOT / "benchmarks/results/family_choice_h100.json").read_text(encoding="utf-8")
    record = json.loads(text.replace('"stream"', '"sm89_few_tokens"'))
    slow = {}
    for timed in record["experts"]:
        name, tokens = timed["layer"], timed["tokens"]
        took = {family: us for family, us in timed["us"].items() if family != without}
        experts, top_k, hidden, inner = record["experts_shapes"][name]
        case = Case(tokens, hidden, inner, experts, top_k)
        estimates = {}
        for family in took:
            params = _layer_params(LayerChain("", case, family, ()), "bf16", _H100)
            estimates[family] = capi_moe.plan_of(params, planner).microseconds
        chosen = min(took, key=lambda family: estimates[family])
        if took[chosen] > _TIE * min(took.values()):
            slow[name, tokens] = chosen
    assert slow.keys() <= _KNOWN, slow
