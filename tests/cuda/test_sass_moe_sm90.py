"""The machine code of the sm90 grouped products, as it is in the library: no GPU needed."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import kernels
import pytest
import sass

# In the order of the enumeration.
_USES = (
    "swiglu_up", "gated_up", "up", "down", "narrow_up", "short_down", "middle_down", "wide_down",
    "up_gradient",
)  # fmt: skip
_MAJORS = ("columns", "rows", "rows interleaved")  # and so here
_KEPT_STEPS = {"short_down": 4, "middle_down": 8}  # of 64 columns, of weights in registers
_COLUMNS = ("swiglu_up", "narrow_up", *_KEPT_STEPS)  # whose weights have contiguous columns
_DOWN = ("down", "wide_down", *_KEPT_STEPS)  # which take rows as they lie
_FUNCTION = re.compile(
    r"moe4sm9022grouped_product_kernelI\w*?Traits"
    r"I(6__half|13__nv_bfloat16)L\w*?3UseE([0-8])EL\w*?5MajorE([0-2])E"
)
# What tiles' widths there is code for: multiples of so many tokens, up to so many.
_WIDTHS = {
    "swiglu_up": (16, 192),
    "narrow_up": (16, 96),
    "gated_up": (32, 192),
    "up": (64, 192),
    "down": (16, 192),
    "short_down": (16, 192),
    "middle_down": (16, 128),
    "wide_down": (64, 192),
    "up_gradient": (32, 192),
}


class Kernel(NamedTuple):
    dtype: str
    use: str
    major: str


def _kernel_of(function: str) -> Kernel | None:
    found = _FUNCTION.search(function)
    if found is None:
        return None
    return Kernel(sass.ELEMENTS[found[1]], _USES[int(found[2])], _MAJORS[int(found[3])])


@pytest.fixture(scope="module")
def instructions() -> dict[tuple[str, Kernel], Counter[str]]:
    if "90a-real" not in sass.architectures():
        sass.cannot("built without the sm90 kernels")
    return sass.instructions(_kernel_of)


def test_every_kernel_is_there_for_its_architecture_alone(
    instructions: dict[tuple[str, Kernel], Counter[str]],
) -> None:
    assert set(instructions) == {
        ("sm_90a", Kernel(dtype, use, major))
        for dtype in kernels.DTYPES
        for use in _USES
        for major in _MAJORS
        if major == "columns" or use not in _COLUMNS
        if major != "rows interleaved" or use == "gated_up"
    }


def test_products_are_wgmma_of_every_width(
    instructions: dict[tuple[str, Kernel], Counter[str]],
) -> None:
    for code, opcodes in instructions.items():
        widths = sass.check_wgmma(code, opcodes, code[1].dtype)
        step, widest = _WIDTHS[code[1].use]
        assert set(widths) == set(range(step, widest + 1, step)), f"{code}: {widths}"
        # A step of 64 columns, of two halves of the weights, at a tile's start and inside its loop;
        # or all steps, of weights in registers.
        steps = _KEPT_STEPS.get(code[1].use)
        assert set(widths.values()) == {16 if steps is None else 4 * steps}, f"{code}: {widths}"
        # Where ptxas gives a group of products up, each is begun and awaited by itself.
        begun = (steps or 2) * len(widths)
        assert opcodes["WARPGROUP.ARRIVE"] == begun, f"{code}: products are serialised"


def test_tiles_come_and_go_by_tma_and_rows_are_gathered(
    instructions: dict[tuple[str, Kernel], Counter[str]],
) -> None:
    for code, opcodes in instructions.items():
        sass.check_tma(code, opcodes, stores=code[1].use != "wide_down")
        assert any("MULTICAST" in name for name in opcodes if name.startswith("UTMALDG")), code
        copies = [name for name in opcodes if name.startswith("LDGSTS")]
        assert bool(copies) == (code[1].use not in _DOWN), f"{code}: {copies}"
        assert all("128" in name for name in copies), f"{code}: {copies}"  # 16 bytes each
        # `up` sets its progress to zero; but for sums that are fp32, or added to what there is, no
        # thread stores by itself what it computes.
        wide = code[1].use == "wide_down"
        by_threads = sass.count(opcodes, "STG")
        assert (by_threads == 0) == (code[1].use in _DOWN and not wide), f"{code}: {opcodes}"
        transposed = any(re.match(r"STSM.*\.M?T", name) for name in opcodes)
        assert transposed != wide, f"{code}: {opcodes}"
        read = sass.count(opcodes, "LDSM")
        if code[1].use == "up_gradient":  # as much as is written, of which a is a third
            assert 3 * read == 2 * sass.count(opcodes, "STSM"), f"{code}: {opcodes}"
        else:  # weights that are kept: 64 rows of all columns, four matrices of 8 by 8 a warp
            assert read == 4 * _KEPT_STEPS.get(code[1].use, 0), f"{code}: {opcodes}"


def test_copies_have_uniform_operands(
    instructions: dict[tuple[str, Kernel], Counter[str]],
) -> None:
    """ptxas makes a loop for each copy whose operands it does not know to be uniform, or that it
    does not know to be issued by one lane."""
    for code, opcodes in instructions.items():
        assert opcodes["BRA.U.ANY"] == 0, f"{code}: {opcodes}"


def test_roles_divide_the_registers(instructions: dict[tuple[str, Kernel], Counter[str]]) -> None:
    for code, opcodes in instructions.items():
        sass.check_roles_divide_the_registers(code, opcodes)


def test_loads_come_first(instructions: dict[tuple[str, Kernel], Counter[str]]) -> None:
    for code, opcodes in instructions.items():
        sass.check_loads_come_first(code, opcodes)


def test_launches_wait_for_what_is_ahead_of_them(
    instructions: dict[tuple[str, Kernel], Counter[str]],
) -> None:
    for code, opcodes in instructions.items():
        # In `down` every role waits for itself; after `up` only roles with nothing else to do.
        sass.check_launches_wait(code, opcodes, waits=3 if code[1].use in _DOWN else 1)


def test_nothing_is_in_local_memory_and_atomics_are_those_between_up_and_down(
    instructions: dict[tuple[str, Kernel], Counter[str]],
) -> None:
    resources = sass.resources(_kernel_of)
    assert set(resources) == set(instructions)
    for code, opcodes in instructions.items():
        sass.check_no_local_memory(code, opcodes, resources[code])
        # `up` counts the tiles that it has stored, `down` the items that it has taken.
        atomics = {name.partition(".")[0] for name in opcodes if name.startswith(("ATOM", "RED"))}
        use = code[1].use
        made = set() if use == "up_gradient" else {"ATOMG"} if use in _DOWN else {"REDG"}
        assert atomics - {"REDUX"} == made, code
