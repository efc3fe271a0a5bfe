"""The machine code of the sm89 grouped products, as it is in the library: no GPU needed."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import kernels
import pytest
import sass

_ELEMENTS = {"6__half": "fp16", "13__nv_bfloat16": "bf16"}
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
    return Kernel(_ELEMENTS[found[1]], found[2] == "1", found[3] == "1")


@pytest.fixture(scope="module")
def instructions() -> dict[tuple[str, Kernel], Counter[str]]:
    sass.architectures()
    return sass.instructions(_kernel_of)


def test_every_kernel_is_there_for_every_architecture(
    instructions: dict[tuple[str, Kernel], Counter[str]],
) -> None:
    real = [name for name in sass.architectures() if not name.endswith("-virtual")]
    assert set(instructions) == {
        (f"sm_{name.removesuffix('-real')}", Kernel(dtype, gated, transposed))
        for name in real
        for dtype in kernels.DTYPES
        for gated in (False, True)
        for transposed in (False, True)
    }


def test_products_are_mma_sync(instructions: dict[tuple[str, Kernel], Counter[str]]) -> None:
    for code, opcodes in instructions.items():
        suffix = "F32.BF16" if code[1].dtype == "bf16" else "F32"
        products = opcodes[f"HMMA.16816.{suffix}"]
        assert products > 0, f"{code}: no HMMA.16816.{suffix}"
        assert products == sass.count(opcodes, "HMMA"), f"{code}: products of another kind"


def test_fragments_come_by_ldmatrix(instructions: dict[tuple[str, Kernel], Counter[str]]) -> None:
    for code, opcodes in instructions.items():
        transposed = sum(n for name, n in opcodes.items() if re.match(r"LDSM.*\.M?T", name))
        assert sass.count(opcodes, "LDSM") > transposed, f"{code}: {opcodes}"
        assert (transposed > 0) == code[1].transposed, f"{code}: {opcodes}"


def test_tiles_come_by_cp_async(instructions: dict[tuple[str, Kernel], Counter[str]]) -> None:
    for code, opcodes in instructions.items():
        copies = [name for name in opcodes if name.startswith("LDGSTS")]
        assert copies, f"{code}: no LDGSTS"
        assert all("128" in name for name in copies), f"{code}: {copies}"  # 16 bytes each
        assert sass.count(opcodes, "LDGDEPBAR") > 0, f"{code}: nothing waits for the copies"


def test_rows_are_written_in_whole_pieces(
    instructions: dict[tuple[str, Kernel], Counter[str]],
) -> None:
    for code, opcodes in instructions.items():
        stores = [name for name in opcodes if name.startswith("STG")]
        assert stores and all(name.endswith(".128") for name in stores), f"{code}: {stores}"
        assert sass.count(opcodes, "MOVM") > 0, f"{code}: accumulators are not transposed"


def test_launches_wait_for_what_is_ahead_of_them(
    instructions: dict[tuple[str, Kernel], Counter[str]],
) -> None:
    """Before they let the next one start, and before they touch a tensor."""
    for code, opcodes in instructions.items():
        order = list(opcodes)  # by where each comes first
        if int(re.findall(r"\d+", code[0])[0]) < 90:
            assert not {"ACQBULK", "PREEXIT"} & set(order), f"{code}: {opcodes}"
            continue
        assert opcodes["ACQBULK"] == opcodes["PREEXIT"] == 1, f"{code}: {opcodes}"
        before = order[: order.index("ACQBULK")]
        touching = re.compile(r"(PREEXIT|LDG|STG|LD|ST|LDGSTS)(\.|$)")
        assert not [name for name in before if touching.match(name)], f"{code}: {before}"
        # ld.global.nc promises that nothing is written from the kernel's start on.
        assert not [name for name in order if "CONSTANT" in name], f"{code}: {opcodes}"


def test_nothing_is_in_local_memory_and_there_are_no_atomics(
    instructions: dict[tuple[str, Kernel], Counter[str]],
) -> None:
    resources = sass.resources(_kernel_of)
    assert set(resources) == set(instructions)
    for code, opcodes in instructions.items():
        for name in ("LDL", "STL", "ATOM", "ATOMG", "RED"):
            assert sass.count(opcodes, name) == 0, f"{code}: {name}"
        used = resources[code]
        assert not used["STACK"] and not used["LOCAL"] and 0 < used["REG"] <= 255, f"{code}: {used}"
