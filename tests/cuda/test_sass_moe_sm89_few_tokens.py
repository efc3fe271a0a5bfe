"""The machine code of the few-token kernels of the mixture of experts, as it is in the library."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import kernels
import pytest
import sass

_FUNCTION = re.compile(
    r"moe15sm89_few_tokens\d\dmoe_(up|down)_kernelI\w*?Traits"
    r"I(6__half|13__nv_bfloat16)Li(\d)ELi(\d)E"
)
_TILES = ((1, 1), (2, 1), (2, 2))


class Kernel(NamedTuple):
    stage: str
    dtype: str
    tiles: int
    token_blocks: int


Code = dict[tuple[str, Kernel], Counter[str]]


def _kernel_of(function: str) -> Kernel | None:
    found = _FUNCTION.search(function)
    if found is None:
        return None
    return Kernel(found[1], sass.ELEMENTS[found[2]], int(found[3]), int(found[4]))


@pytest.fixture(scope="module")
def instructions() -> Code:
    sass.architectures()
    return sass.instructions(_kernel_of)


def test_both_stages_are_there_for_every_architecture(instructions: Code) -> None:
    assert set(instructions) == {
        (arch, Kernel(stage, dtype, *tile))
        for arch in sass.real_architectures()
        for stage in ("up", "down")
        for dtype in kernels.DTYPES
        for tile in _TILES
    }


def test_products_are_mma_sync(instructions: Code) -> None:
    for code, opcodes in instructions.items():
        kernel = code[1]
        sass.check_mma_sync(code, opcodes, kernel.dtype)
        # The step is there once: 2 chunks of 2 k16 steps, for each tile and block of tokens.
        products = sass.count(opcodes, "HMMA")
        assert products == 4 * kernel.tiles * kernel.token_blocks, f"{code}: {products}"


def test_weights_come_in_copies_of_16_bytes(instructions: Code) -> None:
    for code, opcodes in instructions.items():
        sass.check_cp_async(code, opcodes)
        bypassing = [name for name in opcodes if name.startswith("LDGSTS") and "BYPASS" in name]
        assert bypassing, f"{code}: weights go through the L1"


def test_steps_jump_by_no_table(instructions: Code) -> None:
    """A switch over the depth of the pipeline would be in every step. (`up` may have one for its
    activation, at the end of a unit.)"""
    for code, opcodes in instructions.items():
        if code[1].stage == "up":
            continue
        assert sass.count(opcodes, "BRX") == 0, f"{code}"


def test_dependent_launches_are_of_sm90(instructions: Code) -> None:
    for code, opcodes in instructions.items():
        for name in ("PREEXIT", "ACQBULK"):
            assert (sass.count(opcodes, name) > 0) == sass.is_hopper(code[0]), f"{code}: {name}"


def test_atomics_only_count_blocks(instructions: Code) -> None:
    for code, opcodes in instructions.items():
        sass.check_atomics_count_blocks(code, opcodes, counts=code[1].stage == "down")


def test_nothing_is_in_local_memory(instructions: Code) -> None:
    resources = sass.resources(_kernel_of)
    assert set(resources) == set(instructions)
    for code, opcodes in instructions.items():
        sass.check_no_local_memory(code, opcodes, resources[code])
