"""The machine code of the stages of gradients that go row by row, as it is in the library: no GPU
needed."""

from __future__ import annotations

import re
from collections import Counter

import kernels
import pytest
import sass

_FUNCTION = re.compile(r"12moe_backward\d+(rows|combine)_kernelI(6__half|13__nv_bfloat16)E")
# At most, of 32 bits, that a kernel stores in places: row_tokens, dots and the queue's counters;
# dweights of slots, those of pairs without one, and those with the weight on the input.
_NUMBERS = {"rows": 3, "combine": 3}


def _kernel_of(function: str) -> tuple[str, str] | None:
    found = _FUNCTION.search(function)
    return None if found is None else (found[1], sass.ELEMENTS[found[2]])


@pytest.fixture(scope="module")
def instructions() -> dict[tuple[str, tuple[str, str]], Counter[str]]:
    sass.architectures()
    return sass.instructions(_kernel_of)


def test_every_kernel_is_there_for_every_architecture(
    instructions: dict[tuple[str, tuple[str, str]], Counter[str]],
) -> None:
    assert set(instructions) == {
        (arch, (name, dtype))
        for arch in sass.real_architectures()
        for name in ("rows", "combine")
        for dtype in kernels.DTYPES
    }


def test_rows_move_by_16_bytes(
    instructions: dict[tuple[str, tuple[str, str]], Counter[str]],
) -> None:
    """A compiler that cuts a store into words has the L2 write each sector four times."""
    for code, opcodes in instructions.items():
        wide = sum(n for name, n in opcodes.items() if re.match(r"STG\b.*\.128", name))
        others = sum(n for name, n in opcodes.items() if re.match(r"STG\b", name)) - wide
        assert wide > 0, f"{code}: {opcodes}"
        assert others <= _NUMBERS[code[1][0]], f"{code}: {opcodes}"


def test_launches_wait_for_what_is_ahead_of_them(
    instructions: dict[tuple[str, tuple[str, str]], Counter[str]],
) -> None:
    for code, opcodes in instructions.items():
        sass.check_launches_wait(code, opcodes)


def test_nothing_is_in_local_memory(
    instructions: dict[tuple[str, tuple[str, str]], Counter[str]],
) -> None:
    resources = sass.resources(_kernel_of)
    assert set(resources) == set(instructions)
    for code, opcodes in instructions.items():
        sass.check_no_local_memory(code, opcodes, resources[code])
        sass.check_no_atomics(code, opcodes)
