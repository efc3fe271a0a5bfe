"""The kernels of the mixture of experts that the build instantiates, read from where they are
listed: what the library calls each, and what a profiler does."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import kernels

_CUDA = Path(__file__).resolve().parents[1] / "cuda" / "moe"
ELEMENTS = {"fp16": "__half", "bf16": "__nv_bfloat16"}
_ONLY_OF_GRADIENTS = re.compile("_down_wide|_up_gradient")


def _enumerators(header: str, name: str) -> dict[str, int]:
    """The enumerators of an enumeration without explicit numbers."""
    text = re.sub(r"//.*", "", (_CUDA / header).read_text(encoding="utf-8"))
    found = re.search(rf"enum class {name} {{([^}}]*)}}", text)
    assert found is not None, f"{header} has no {name}"
    return {each.strip(): i for i, each in enumerate(found[1].split(","))}


def entries(variable: str) -> list[list[str]]:
    """Values of the variables of an instance's template, and last the suffix of its name."""
    return [e.split(",") for e in kernels.list_of("FlashmoeInstantiate.cmake", variable)]


def experts_per_lane() -> list[int]:
    """The experts per lane of the kernels that route logits."""
    text = (kernels.CMAKE / "FlashmoeInstantiate.cmake").read_text(encoding="utf-8")
    found = re.search(r"set\(FLASHMOE_MOE_ROUTE_EXPERTS_PER_LANE ([\d ]+)\)", text)
    assert found is not None
    return [int(number) for number in found[1].split()]


def _route() -> dict[str, str]:
    choosers = {"given": "GivenChooser"}
    for per_lane in experts_per_lane():
        for bits in (32, 64):
            choosers[f"key{bits}_e{32 * per_lane}"] = f"LogitChooser<{per_lane},Key{bits}>"
    made = {"moe_route_place": "moe_route::route_place_kernel"}
    for name, chooser in choosers.items():
        for stage in ("once", "choose"):
            made[f"moe_route_{stage}_{name}"] = f"moe_route::route_{stage}_kernel<{chooser}>"
    return made


def _few_tokens(dtype: str) -> dict[str, str]:
    made = {}
    for stage in ("up", "down"):
        for tiles, token_blocks, suffix in entries("FLASHMOE_MOE_SM89_FEW_TOKENS_KERNELS"):
            traits = f"Traits<{ELEMENTS[dtype]},{tiles},{token_blocks}>"
            name = f"moe_{stage}_sm89_few_tokens_{dtype}{suffix}"
            made[name] = f"moe::sm89_few_tokens::moe_{stage}_kernel<{traits}>"
        for (suffix,) in entries("FLASHMOE_MOE_SM90_FEW_TOKENS_KERNELS"):
            name = f"moe_{stage}_sm90_few_tokens_{dtype}{suffix}"
            made[name] = f"moe::sm89_few_tokens::bulk::moe_{stage}_bulk_kernel<{ELEMENTS[dtype]}>"
    return made


def _products(family: str, dtype: str, header: str, first: str) -> dict[str, str]:
    """The products of a family whose kernels have two enumerators."""
    kinds, majors = _enumerators(header, first), _enumerators(header, "Major")
    made = {}
    for kind, major, suffix in entries(f"FLASHMOE_MOE_{family.upper()}_KERNELS"):
        of = f"({first}){kinds[kind.split('::')[-1]]},(Major){majors[major.split('::')[-1]]}"
        made[f"grouped_product_{family}_{dtype}{suffix}"] = (
            f"moe::{family}::grouped_product_kernel<Traits<{ELEMENTS[dtype]},{of}>>"
        )
    return made


def _combine(dtype: str) -> dict[str, str]:
    text = (_CUDA / "combine" / "combine.cu").read_text(encoding="utf-8")
    batches = re.findall(rf'FLASHMOE_COMBINE\(\d, "{dtype}", \w+, (\d+)\)', text)
    assert batches
    return {
        f"moe_combine_{dtype}_k{batch}": (
            f"moe_combine::moe_combine_kernel<{ELEMENTS[dtype]},{batch}>"
        )
        for batch in batches
    }


def of_family(family: str) -> dict[str, str]:
    """The function of each kernel, by the library's name; of "route" and "combine" too, which are
    the same for all families."""
    if family == "route":
        return _route()
    made = {}
    for dtype in kernels.DTYPES:
        if family == "sm89_few_tokens":
            made |= _few_tokens(dtype)
        elif family == "sm90":
            made |= _products("sm90", dtype, "sm90/entry.h", "Use")
        elif family == "sm89":
            made |= _products("sm89", dtype, "sm89/traits.cuh", "Rows")
        else:
            made |= _combine(dtype)
    return made


FAMILIES = ("route", "sm89_few_tokens", "sm90", "sm89", "combine")


def _made() -> dict[str, str]:
    return {name: f for family in FAMILIES for name, f in of_family(family).items()}


def every() -> dict[str, str]:
    """Every kernel of the forward."""
    return {name: f for name, f in _made().items() if not _ONLY_OF_GRADIENTS.search(name)}


def of_gradients() -> dict[str, str]:
    """Every kernel of the backward of layers and grouped products."""
    made = {name: f for name, f in _made().items() if _ONLY_OF_GRADIENTS.search(name)}
    made |= {
        "moe_backward_zeros": "moe_backward::zeros_kernel",
        "moe_backward_slots": "moe_backward::slots_kernel",
        "moe_route_backward": "moe_route_backward::route_backward_kernel",
    }
    for dtype in kernels.DTYPES:
        element = ELEMENTS[dtype]
        for stage in ("rows", "combine", "sums"):
            made[f"moe_backward_{stage}_{dtype}"] = f"moe_backward::{stage}_kernel<{element}>"
        made[f"moe_backward_sm89_{dtype}"] = (
            f"moe::sm89_backward::weight_gradients_kernel<Traits<{element}>>"
        )
        for (suffix,) in entries("FLASHMOE_MOE_SM90_BACKWARD_KERNELS"):
            made[f"moe_backward_sm90_{dtype}{suffix}"] = (
                f"moe::sm90_backward::weight_gradient_kernel<Traits<{element}>>"
            )
    return made


def function_of(demangled: str) -> str | None:
    """As `of_family` has it, of a function's whole name; None for other functions."""
    found = re.match(r"(?:void )?flashmoe::(moe.*?)\([^()]*Params\)", demangled)
    if found is None:
        return None
    name, _, arguments = found[1].partition("<")
    arguments = re.sub(r"(?:\w+::)+|\s", "", arguments)
    return f"{name}<{arguments}" if arguments else name


def demangle(function: str) -> str:
    """As C++ compilers do."""
    run = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    run.restype = ctypes.c_void_p
    made = run(function.encode(), None, None, None)
    assert made, f"not a mangled name: {function}"
    try:
        return ctypes.string_at(made).decode()
    finally:
        free = ctypes.CDLL(None).free
        free.argtypes = [ctypes.c_void_p]
        free(made)
