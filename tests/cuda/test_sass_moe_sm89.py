"""The machine code of the sm89 grouped products, as it is in the library: no GPU needed."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import kernels
import pytest
import sass

_FUNCTION = re.compile(
    r"moe4sm8922grouped_product_kernelI\w*?Traits"
    r"I(6__half|13__nv_bfloat16)L\w*?4RowsE([01])EL\w*?5MajorE([01])E"
)


class Kernel(NamedTuple):
    dtype: str
    gated: bool
    transposed: bool


def _kernel_of(function: str) -> Kernel | None:
    found = _FUNCTION.search(function)
    if found is None:
        return None
    return Kernel(sass.ELEMENTS[found[1]], found[2] == "1", found[3] == "1")


@pytest.fixture(scope="module")
def instructions() -> dict[tuple[str, Kernel], Counter[str]]:
    sass.architectures()
    return sass.instructions(_kernel_of)


def test_every_kernel_is_there_for_every_architecture(
    instructions: dict[tuple[str, Kernel], Counter[str]],
) -> None:
    assert set(instructions) == {
        (arch, Kernel(dtype, gated, transposed))
        for arch in sass.real_architectures()
        for dtype in kernels.DTYPES
        for gated in (False, True)
        for transposed in (False, True)
    }


def test_products_are_mma_sync(instructions: dict[tuple[str, Kernel], Counter[str]]) -> None:
    for code, opcodes in instructions.items():
        sass.check_mma_sync(code, opcodes, code[1].dtype)


def test_fragments_come_by_ldmatrix(instructions: dict[tuple[str, Kernel], Counter[str]]) -> None:
    for code, opcodes in instructions.items():
        transposed = sass.transposing_loads(opcodes)
        assert sass.count(opcodes, "LDSM") > transposed, f"{code}: {opcodes}"
        assert (transposed > 0) == code[1].transposed, f"{code}: {opcodes}"


def test_tiles_come_by_cp_async(instructions: dict[tuple[str, Kernel], Counter[str]]) -> None:
    for code, opcodes in instructions.items():
        sass.check_cp_async(code, opcodes)


def test_rows_are_written_in_whole_pieces(
    instructions: dict[tuple[str, Kernel], Counter[str]],
) -> None:
    """Those of a layer; gradients in fp32 or that add go by element, which plain products make."""
    for code, opcodes in instructions.items():
        stores = {name for name in opcodes if name.startswith("STG")}
        by_element = set() if code[1].gated else {"STG.E", "STG.E.U16"}
        assert stores - by_element == {"STG.E.128"}, f"{code}: {stores}"
        assert sass.count(opcodes, "MOVM") > 0, f"{code}: accumulators are not transposed"


def test_launches_wait_for_what_is_ahead_of_them(
    instructions: dict[tuple[str, Kernel], Counter[str]],
) -> None:
    for code, opcodes in instructions.items():
        sass.check_launches_wait(code, opcodes)


def test_nothing_is_in_local_memory_and_there_are_no_atomics(
    instructions: dict[tuple[str, Kernel], Counter[str]],
) -> None:
    resources = sass.resources(_kernel_of)
    assert set(resources) == set(instructions)
    for code, opcodes in instructions.items():
        sass.check_no_local_memory(code, opcodes, resources[code])
        sass.check_no_atomics(code, opcodes)
