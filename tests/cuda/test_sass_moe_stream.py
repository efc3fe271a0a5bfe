"""The machine code of the stream kernels of the mixture of experts, as it is in the library."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import kernels
import pytest
import sass

_ELEMENTS = {"6__half": "fp16", "13__nv_bfloat16": "bf16"}
_FUNCTION = re.compile(
    r"moe6stream\d+moe_(up|down)_kernelI\w*?Traits"
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
    return Kernel(found[1], _ELEMENTS[found[2]], int(found[3]), int(found[4]))


@pytest.fixture(scope="module")
def instructions() -> Code:
    sass.architectures()
    return sass.instructions(_kernel_of)


def test_both_stages_are_there_for_every_architecture(instructions: Code) -> None:
    real = [name for name in sass.architectures() if not name.endswith("-virtual")]
    assert set(instructions) == {
        (f"sm_{name.removesuffix('-real')}", Kernel(stage, dtype, *tile))
        for name in real
        for stage in ("up", "down")
        for dtype in kernels.DTYPES
        for tile in _TILES
    }


def test_products_are_mma_sync(instructions: Code) -> None:
    for code, opcodes in instructions.items():
        kernel = code[1]
        suffix = "F32.BF16" if kernel.dtype == "bf16" else "F32"
        products = opcodes[f"HMMA.16816.{suffix}"]
        # The step is there once: 2 chunks of 2 k16 steps, for each tile and block of tokens.
        assert products == 4 * kernel.tiles * kernel.token_blocks, f"{code}: {products}"
        assert products == sass.count(opcodes, "HMMA"), f"{code}: products of another kind"


def test_weights_come_in_copies_of_16_bytes(instructions: Code) -> None:
    for code, opcodes in instructions.items():
        copies = [name for name in opcodes if name.startswith("LDGSTS")]
        assert copies, f"{code}: no LDGSTS"
        assert all("128" in name for name in copies), f"{code}: {copies}"
        assert any("BYPASS" in name for name in copies), f"{code}: weights go through the L1"


def test_steps_jump_by_no_table(instructions: Code) -> None:
    """A switch over the depth of the pipeline would be in every step. (`up` may have one for its
    activation, at the end of a unit.)"""
    for code, opcodes in instructions.items():
        if code[1].stage == "up":
            continue
        assert sass.count(opcodes, "BRX") == 0, f"{code}"


def test_dependent_launches_are_of_sm90(instructions: Code) -> None:
    for code, opcodes in instructions.items():
        dependent = int(re.findall(r"\d+", code[0])[0]) >= 90
        for name in ("PREEXIT", "ACQBULK"):
            assert (sass.count(opcodes, name) > 0) == dependent, f"{code}: {name}"


def test_atomics_only_count_blocks(instructions: Code) -> None:
    """Sums are added up in a fixed order; a counter tells the last block to leave its part."""
    for code, opcodes in instructions.items():
        atomics = {n: c for n, c in opcodes.items() if n.split(".")[0] in ("ATOM", "ATOMG", "RED")}
        assert sum(atomics.values()) == (code[1].stage == "down"), f"{code}: {atomics}"
        assert not any(".F" in name for name in atomics), f"{code}: {atomics}"


def test_nothing_is_in_local_memory(instructions: Code) -> None:
    for code, opcodes in instructions.items():
        assert not any(re.match(r"(LDL|STL)\b", name) for name in opcodes), f"{code}"
