"""The machine code of Hopper's few-token kernels, as it is in the library."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import kernels
import pytest
import sass

_FUNCTION = re.compile(
    r"moe15sm89_few_tokens4bulk\d+moe_(up|down)_bulk_kernelI(6__half|13__nv_bfloat16)E"
)


class Kernel(NamedTuple):
    stage: str
    dtype: str


Code = dict[tuple[str, Kernel], Counter[str]]


def _kernel_of(function: str) -> Kernel | None:
    found = _FUNCTION.search(function)
    if found is None:
        return None
    return Kernel(found[1], sass.ELEMENTS[found[2]])


@pytest.fixture(scope="module")
def instructions() -> Code:
    if "90a-real" not in sass.architectures():
        sass.cannot("built without the sm90 kernels")
    return sass.instructions(_kernel_of)


def test_both_stages_are_there_for_hopper_alone(instructions: Code) -> None:
    assert set(instructions) == {
        ("sm_90a", Kernel(stage, dtype)) for stage in ("up", "down") for dtype in kernels.DTYPES
    }


def test_products_are_mma_sync(instructions: Code) -> None:
    for code, opcodes in instructions.items():
        sass.check_mma_sync(code, opcodes, code[1].dtype)
        # Products of three rounds at a time, and of one.
        assert sass.count(opcodes, "HMMA") == 2 * (3 + 1), f"{code}: {opcodes}"


def test_rows_come_by_the_copy_engine_from_one_thread(instructions: Code) -> None:
    for code, opcodes in instructions.items():
        # 16 of weights and one of tokens: together, and of `down`'s first stages apart too.
        places = 17 * (2 if code[1].stage == "up" else 3) - (0 if code[1].stage == "up" else 17)
        assert sass.count(opcodes, "UBLKCP") >= places, f"{code}: {opcodes}"
        assert sass.count(opcodes, "LDGSTS") == 0, f"{code}: {opcodes}"
        # Where ptxas does not know that one thread copies, it takes lanes one by one.
        loops = [name for name in opcodes if name.startswith("BRA.U.ANY")]
        assert not loops, f"{code}: {loops}"


def test_dependent_launches(instructions: Code) -> None:
    for code, opcodes in instructions.items():
        for name in ("PREEXIT", "ACQBULK"):
            assert sass.count(opcodes, name) > 0, f"{code}: {name}"


def test_atomics_only_count_blocks(instructions: Code) -> None:
    for code, opcodes in instructions.items():
        sass.check_atomics_count_blocks(code, opcodes, counts=code[1].stage == "down")


def test_nothing_is_in_local_memory(instructions: Code) -> None:
    resources = sass.resources(_kernel_of)
    assert set(resources) == set(instructions)
    for code, opcodes in instructions.items():
        sass.check_no_local_memory(code, opcodes, resources[code])
