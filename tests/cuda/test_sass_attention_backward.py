"""The machine code of the sm_90 attention backward, as it is in the library: no GPU needed."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import kernels
import pytest
import sass
from kernels import Kernel

FAMILY = "sm90_backward"
_FUNCTION = re.compile(
    rf"\d{FAMILY}\d\dattention_backward_(kernel|prologue|sinks)I.*?Traits"
    r"I(6__half|13__nv_bfloat16)Li(\d+)ELi(\d+)E\w*?_\d+([A-Za-z]\w*?)ILi"
)
_RESERVED = 1024  # bytes of shared memory, which cuobjdump counts as well


class Code(NamedTuple):
    arch: str
    kernel: Kernel


def _kernel_of(function: str, launch: str) -> Kernel | None:
    found = _FUNCTION.search(function)
    if found is None or found[1] != launch:
        return None
    _, element, dim, dim_v, tuning = found.groups()
    return Kernel(FAMILY, sass.ELEMENTS[element], int(dim), int(dim_v), tuning)


def _mains(function: str) -> Kernel | None:
    return _kernel_of(function, "kernel")


def _sinks(function: str) -> Kernel | None:
    return _kernel_of(function, "sinks")


def _prologues(function: str) -> Kernel | None:
    return _kernel_of(function, "prologue")


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if "90a-real" not in sass.architectures():
        sass.cannot("built without the sm90 kernels")


@pytest.fixture(scope="module")
def mains() -> dict[Code, Counter[str]]:
    return {Code(*code): opcodes for code, opcodes in sass.instructions(_mains).items()}


@pytest.fixture(scope="module")
def prologues() -> dict[Code, Counter[str]]:
    return {Code(*code): opcodes for code, opcodes in sass.instructions(_prologues).items()}


@pytest.fixture(scope="module")
def sinks() -> dict[Code, Counter[str]]:
    return {Code(*code): opcodes for code, opcodes in sass.instructions(_sinks).items()}


def test_every_kernel_is_there_for_its_architecture_alone(
    mains: dict[Code, Counter[str]],
    prologues: dict[Code, Counter[str]],
    sinks: dict[Code, Counter[str]],
) -> None:
    expected = {Code("sm_90a", kernel) for kernel in kernels.attention(FAMILY)}
    assert expected
    assert set(mains) == set(prologues) == set(sinks) == expected


def test_products_are_wgmma(mains: dict[Code, Counter[str]]) -> None:
    for code, opcodes in mains.items():
        widths = sass.check_wgmma(code, opcodes, code.kernel.dtype)
        # Scores of a step's queries; dK and dV of a tile's columns; of dQ all columns of half of
        # the queries, half of the columns of 64, or panels of 64 columns.
        dim, dim_v = code.kernel.dim, code.kernel.dim_v
        queries = 128 if dim == 64 and not code.kernel.capped else 64
        of_dq = dim if queries == 128 else dim // 2 if dim <= 128 else 64
        assert set(widths) == {queries, dim, dim_v, of_dq}, f"{code}: {widths}"
        assert sass.count(opcodes, "HMMA") == 0, f"{code}: products of one warp"
        products = sum(widths.values())
        # Where ptxas gives a group of products up, each is begun and awaited by itself.
        for name in ("WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR.LE"):
            assert 0 < 2 * opcodes[name] <= products, f"{code}: products are serialised"


def test_tiles_come_and_go_by_the_copy_engine(mains: dict[Code, Counter[str]]) -> None:
    for code, opcodes in mains.items():
        sass.check_tma(code, opcodes)
        assert sass.count(opcodes, "LDGSTS") == 0, f"{code}: copies of a thread's own"


def test_roles_divide_the_registers(mains: dict[Code, Counter[str]]) -> None:
    for code, opcodes in mains.items():
        sass.check_roles_divide_the_registers(code, opcodes)


def test_launches_wait_for_what_is_ahead_of_them(
    mains: dict[Code, Counter[str]],
    prologues: dict[Code, Counter[str]],
    sinks: dict[Code, Counter[str]],
) -> None:
    for code, opcodes in (*mains.items(), *prologues.items(), *sinks.items()):
        sass.check_launches_wait(code, opcodes)


def test_sums_have_a_fixed_order(
    mains: dict[Code, Counter[str]],
    prologues: dict[Code, Counter[str]],
    sinks: dict[Code, Counter[str]],
) -> None:
    """Parts of dQ are added at one place, by turns; the only atomic is the ticket."""
    for code, opcodes in mains.items():
        sass.check_atomics_count_blocks(code, opcodes, counts=True)
        adds = {name: n for name, n in opcodes.items() if name.startswith("UBLKRED")}
        assert adds == {"UBLKRED.G.S.ADD.F32.RN": 1}, f"{code}: {adds}"
        for name in ("LDG.E.STRONG.GPU", "STG.E.STRONG.GPU", "MEMBAR.ALL.GPU"):
            assert opcodes[name] > 0, f"{code}: turns are not waited for: no {name}"
    for code, opcodes in (*prologues.items(), *sinks.items()):
        sass.check_no_atomics(code, opcodes)


def test_nothing_is_in_local_memory(
    mains: dict[Code, Counter[str]], prologues: dict[Code, Counter[str]]
) -> None:
    for found, kernel_of in ((mains, _mains), (prologues, _prologues)):
        resources = {Code(*code): used for code, used in sass.resources(kernel_of).items()}
        assert set(resources) == set(found)
        for code, opcodes in found.items():
            used = resources[code]
            # Of static shared memory plans for models know that there is none.
            assert used["SHARED"] == _RESERVED, f"{code}: {used}"
            sass.check_no_local_memory(code, opcodes, used)
