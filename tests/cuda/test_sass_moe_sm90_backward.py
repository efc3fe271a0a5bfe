"""The machine code of the sm90 gradient of experts' weights, as it is in the library: no GPU
needed."""

from __future__ import annotations

import re
from collections import Counter

import kernels
import pytest
import sass

_FUNCTION = re.compile(
    r"moe13sm90_backward22weight_gradient_kernelI\w*?TraitsI(6__half|13__nv_bfloat16)E"
)
_WIDTHS = (192, 128)  # columns of a tile
_PRODUCTS = 2 * 2  # of a step: its slices of 16 rows, and parts of 64 rows of the gradient


def _dtype_of(function: str) -> str | None:
    found = _FUNCTION.search(function)
    return None if found is None else sass.ELEMENTS[found[1]]


@pytest.fixture(scope="module")
def instructions() -> dict[tuple[str, str], Counter[str]]:
    if "90a-real" not in sass.architectures():
        sass.cannot("built without the sm90 kernels")
    return sass.instructions(_dtype_of)


def test_every_kernel_is_there_for_its_architecture_alone(
    instructions: dict[tuple[str, str], Counter[str]],
) -> None:
    assert set(instructions) == {("sm_90a", dtype) for dtype in kernels.DTYPES}


def test_products_are_wgmma(instructions: dict[tuple[str, str], Counter[str]]) -> None:
    for code, opcodes in instructions.items():
        # Products of a tile's first step, and of the others.
        widths = sass.check_wgmma(code, opcodes, code[1])
        assert widths == dict.fromkeys(_WIDTHS, 2 * _PRODUCTS), code
        steps = 2 * len(_WIDTHS)
        assert opcodes["WARPGROUP.ARRIVE"] == steps, f"{code}: products are serialised"


def test_operands_come_by_tma_or_are_gathered(
    instructions: dict[tuple[str, str], Counter[str]],
) -> None:
    for code, opcodes in instructions.items():
        assert any("MULTICAST" in name for name in opcodes if name.startswith("UTMALDG")), code
        copies = [name for name in opcodes if name.startswith("LDGSTS")]
        assert copies and all("128" in name for name in copies), f"{code}: {copies}"


def test_copies_have_uniform_operands(
    instructions: dict[tuple[str, str], Counter[str]],
) -> None:
    """ptxas makes a loop for each copy whose operands it does not know to be uniform, or that it
    does not know to be issued by one lane. Eight of them take as long as a step's products."""
    for code, opcodes in instructions.items():
        assert opcodes["BRA.U.ANY"] == 0, f"{code}: {opcodes}"


def test_roles_divide_the_registers(instructions: dict[tuple[str, str], Counter[str]]) -> None:
    for code, opcodes in instructions.items():
        sass.check_roles_divide_the_registers(code, opcodes)


def test_loads_come_first(instructions: dict[tuple[str, str], Counter[str]]) -> None:
    for code, opcodes in instructions.items():
        sass.check_loads_come_first(code, opcodes)


def test_launches_wait_for_what_is_ahead_of_them(
    instructions: dict[tuple[str, str], Counter[str]],
) -> None:
    for code, opcodes in instructions.items():
        sass.check_launches_wait(code, opcodes, waits=1)


def test_nothing_is_in_local_memory_and_nothing_is_added_up_by_atomics(
    instructions: dict[tuple[str, str], Counter[str]],
) -> None:
    """One takes tiles from the queue."""
    resources = sass.resources(_dtype_of)
    assert set(resources) == set(instructions)
    for code, opcodes in instructions.items():
        sass.check_no_local_memory(code, opcodes, resources[code])
        atomics = {name.partition(".")[0] for name in opcodes if name.startswith(("ATOM", "RED"))}
        assert atomics - {"REDUX"} == {"ATOMG"}, code


def test_tiles_do_not_wait_for_all_memory_accesses(
    instructions: dict[tuple[str, str], Counter[str]],
) -> None:
    """A block ends with a release to its cluster. One for each tile took as long as four steps."""
    for code, opcodes in instructions.items():
        fences = [name for name in opcodes if name.startswith("MEMBAR") and name[-4:] != ".CTA"]
        assert sum(opcodes[name] for name in fences) == 1, f"{code}: {fences}"
