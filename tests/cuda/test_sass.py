"""The machine code of the attention kernels, as it is in the library: no GPU needed.

cuobjdump (and nvdisasm, which it calls) come with the CUDA toolkit or with the PyPI packages
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm. Without them, or with a library built without CUDA,
these tests skip; where FLASHMOE_TEST_REQUIRE is set, which is continuous integration, they fail.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import kernels
import pytest
import sass
from kernels import Kernel

_ELEMENTS = {"6__half": "fp16", "13__nv_bfloat16": "bf16"}
_FUNCTION = re.compile(
    r"\d(sm\d\d|short)(?:_rows)?\d\dattention_forward_kernelI.*?Traits"
    r"I(6__half|13__nv_bfloat16)Li(\d+)ELi(\d+)E(?:NS\w*?_\d+([A-Za-z]\w*?)ILi|Li(\d+)E)"
)
_ANYWHERE = ("sm89", "short")  # families that are compiled for every architecture


@pytest.fixture(scope="module")
def architectures() -> list[str]:
    """What the library says it holds, such as ["89-real", "90a-real", "89-virtual"]."""
    return sass.architectures()


def _kernel_of(function: str) -> Kernel | None:
    found = _FUNCTION.search(function)
    if found is None:
        return None
    family, element, dim, dim_v, tuning, rows = found.groups()
    return Kernel(family, _ELEMENTS[element], int(dim), int(dim_v), tuning or rows)


class Code(NamedTuple):
    """One kernel's code for one architecture."""

    arch: str
    kernel: Kernel


@pytest.fixture(scope="module")
def instructions(architectures: list[str]) -> dict[Code, Counter[str]]:
    """How often each opcode occurs."""
    found = sass.instructions(_kernel_of)
    return {Code(*code): opcodes for code, opcodes in found.items()}


@pytest.fixture(scope="module")
def resources(architectures: list[str]) -> dict[Code, dict[str, int]]:
    """Registers, stack, local and shared memory of each kernel."""
    return {Code(*code): used for code, used in sass.resources(_kernel_of).items()}


def _expected(architectures: list[str]) -> set[Code]:
    """The families of every architecture; the kernels of sm_90a's own instructions for it alone."""
    real = [name.removesuffix("-real") for name in architectures if not name.endswith("-virtual")]
    codes = {Code(f"sm_{arch}", kernel) for arch in real for kernel in _anywhere()}
    if "90a" in real:
        codes |= {Code("sm_90a", kernel) for kernel in kernels.attention("sm90")}
    return codes


def _anywhere() -> set[Kernel]:
    return {kernel for family in _ANYWHERE for kernel in kernels.attention(family)}


def _of(instructions: dict[Code, Counter[str]], family: str) -> dict[Code, Counter[str]]:
    """The code of one family, of which there must be some."""
    found = {
        code: opcodes for code, opcodes in instructions.items() if code.kernel.family == family
    }
    if not found:
        sass.cannot(f"built without the {family} kernels")
    return found


def _is_hopper(code: Code) -> bool:
    """Or newer: there are clusters and dependent launches."""
    return int(re.findall(r"\d+", code.arch)[0]) >= 90


def test_every_shipped_architecture_is_built_in(architectures: list[str]) -> None:
    missing = sorted(set(kernels.shipped_architectures()) - set(architectures))
    if missing:
        sass.cannot(f"built for {' '.join(architectures)} only, not {' '.join(missing)}")


def test_every_kernel_is_there_for_every_architecture(
    architectures: list[str], instructions: dict[Code, Counter[str]]
) -> None:
    assert set(instructions) == _expected(architectures)


def test_ptx_is_there_for_what_is_newer(architectures: list[str]) -> None:
    virtual = {f"sm_{name.removesuffix('-virtual')}" for name in architectures if "virtual" in name}
    if not virtual:
        sass.cannot("built without PTX")
    found: dict[str, set[Kernel]] = {}
    target = ""
    for line in sass.dump("-ptx"):
        if line.startswith(".target"):
            target = line.split()[1].rstrip(",")
        elif ".entry" in line:
            kernel = _kernel_of(line)
            if kernel is not None:
                found.setdefault(target, set()).add(kernel)
    assert found == {target: _anywhere() for target in virtual}


def test_sm89_products_are_mma_sync(instructions: dict[Code, Counter[str]]) -> None:
    for code, opcodes in _of(instructions, "sm89").items():
        suffix = "F32.BF16" if code.kernel.dtype == "bf16" else "F32"
        products = opcodes[f"HMMA.16816.{suffix}"]
        assert products > 0, f"{code}: no HMMA.16816.{suffix}"
        assert products == sass.count(opcodes, "HMMA"), f"{code}: products of another kind"


def test_sm89_fragments_come_by_ldmatrix(instructions: dict[Code, Counter[str]]) -> None:
    for code, opcodes in _of(instructions, "sm89").items():
        transposed = sum(n for name, n in opcodes.items() if re.match(r"LDSM.*\.M?T", name))
        assert sass.count(opcodes, "LDSM") > transposed > 0, f"{code}: {opcodes}"


def test_sm89_tiles_come_by_cp_async(instructions: dict[Code, Counter[str]]) -> None:
    for code, opcodes in _of(instructions, "sm89").items():
        copies = [name for name in opcodes if name.startswith("LDGSTS")]
        assert copies, f"{code}: no LDGSTS"
        assert all("128" in name for name in copies), f"{code}: {copies}"  # 16 bytes each
        assert sass.count(opcodes, "LDGDEPBAR") > 0, f"{code}: nothing waits for the copies"


def test_sm90_products_are_wgmma(instructions: dict[Code, Counter[str]]) -> None:
    for code, opcodes in _of(instructions, "sm90").items():
        suffix = "F32.BF16" if code.kernel.dtype == "bf16" else "F32"
        kind = re.compile(rf"HGMMA\.64x\d+x16\.{re.escape(suffix)}")
        products = sum(n for name, n in opcodes.items() if kind.fullmatch(name))
        assert products > 0, f"{code}: no HGMMA of {suffix}: {opcodes}"
        assert products == sass.count(opcodes, "HGMMA"), f"{code}: products of another kind"
        # The scores of a step whose offsets did not hold, again: one slice of at most 128 keys.
        assert sass.count(opcodes, "HMMA") <= 16, f"{code}: products of one warp"
        # Where ptxas gives a group of products up, each is begun and awaited by itself.
        for name in ("WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR.LE"):
            assert 0 < 2 * opcodes[name] <= products, f"{code}: products are serialised"


def test_sm90_tiles_come_and_go_by_tma(instructions: dict[Code, Counter[str]]) -> None:
    for code, opcodes in _of(instructions, "sm90").items():
        for name in ("UTMALDG", "UTMASTG", "SYNCS"):  # loads, stores, and barriers to wait at
            assert sass.count(opcodes, name) > 0, f"{code}: no {name}"
        assert sass.count(opcodes, "LDGSTS") == 0, f"{code}: copies of a thread's own"


def test_sm90_first_products_may_be_narrow(instructions: dict[Code, Counter[str]]) -> None:
    """Of a step of 128 keys, the first of a tile has 64 where no row of a group sees more."""
    for code, opcodes in _of(instructions, "sm90").items():
        kernel = code.kernel
        if kernel.dim not in (
            96,
            128,
        ):  # at 64 P V is as wide; the others' steps are not of 128 keys
            continue
        narrow = sum(n for name, n in opcodes.items() if name.startswith("HGMMA.64x64x16."))
        # With and without the last P V of the tile before it.
        assert narrow == (0 if kernel.capped else 2 * kernel.dim // 16), f"{code}: {opcodes}"


def test_sm90_roles_divide_the_registers(instructions: dict[Code, Counter[str]]) -> None:
    """ptxas leaves setmaxnreg out where it cannot keep to it."""
    for code, opcodes in _of(instructions, "sm90").items():
        moves = [name for name in opcodes if name.startswith("USETMAXREG")]
        assert any("TRY_ALLOC" in name for name in moves), f"{code}: {moves}"
        assert any("DEALLOC" in name for name in moves), f"{code}: {moves}"


def test_short_products_are_mma_sync(instructions: dict[Code, Counter[str]]) -> None:
    for code, opcodes in _of(instructions, "short").items():
        suffix = "F32.BF16" if code.kernel.dtype == "bf16" else "F32"
        products = opcodes[f"HMMA.16816.{suffix}"]
        assert products > 0, f"{code}: no HMMA.16816.{suffix}"
        assert products == sass.count(opcodes, "HMMA"), f"{code}: products of another kind"
        # Its K and V fragments need nothing but pairing, and its probabilities a transposition.
        assert sass.count(opcodes, "MOVM") > 0, f"{code}: probabilities are not transposed"


def test_short_keys_and_values_go_straight_to_registers(
    instructions: dict[Code, Counter[str]],
) -> None:
    for code, opcodes in _of(instructions, "short").items():
        for name in ("LDGSTS", "LDSM", "UTMALDG", "UBLKCP"):
            assert sass.count(opcodes, name) == 0, f"{code}: {name}"
        # 16 bytes each; smaller ones are of compute_row_alone, an element at a time.
        loads = {name: n for name, n in opcodes.items() if name.startswith("LDG")}
        streamed = sum(n for name, n in loads.items() if ".NA." in name)
        kernel = code.kernel
        keys = sum(n for name, n in loads.items() if name.endswith(".128"))
        assert streamed > 0, f"{code}: {loads}"
        assert keys > streamed > 4 * (kernel.dim + kernel.dim_v) / 32, f"{code}: {loads}"
        assert all(name.endswith(".128") for name in loads if ".NA." in name), f"{code}: {loads}"


def test_short_blocks_share_keys_where_there_are_clusters(
    instructions: dict[Code, Counter[str]],
) -> None:
    """Their barrier, and stores to one another."""
    for code, opcodes in _of(instructions, "short").items():
        for name in ("UCGABAR_ARV", "UCGABAR_WAIT", "STAS"):
            assert (sass.count(opcodes, name) > 0) == _is_hopper(code), f"{code}: {name}: {opcodes}"


@pytest.mark.parametrize("family", ["sm89", "sm90", "short"])
def test_launches_wait_for_what_is_ahead_of_them(
    family: str, instructions: dict[Code, Counter[str]]
) -> None:
    """Before they let the next one start, and before they touch a tensor."""
    for code, opcodes in _of(instructions, family).items():
        order = list(opcodes)  # by where each comes first
        if not _is_hopper(code):
            assert not {"ACQBULK", "PREEXIT"} & set(order), f"{code}: {opcodes}"
            continue
        assert opcodes["ACQBULK"] == opcodes["PREEXIT"] == 1, f"{code}: {opcodes}"
        before = order[: order.index("ACQBULK")]
        touching = re.compile(r"(PREEXIT|LDG|STG|LD|ST|UTMALDG|UTMASTG)(\.|$)")
        assert not [name for name in before if touching.match(name)], f"{code}: {before}"
        # ld.global.nc promises that nothing is written from the kernel's start on.
        assert not [name for name in order if "CONSTANT" in name], f"{code}: {opcodes}"


def test_nothing_is_in_local_memory(
    instructions: dict[Code, Counter[str]], resources: dict[Code, dict[str, int]]
) -> None:
    assert set(resources) == set(instructions)
    wrong = []
    for code, opcodes in instructions.items():
        spilled = {name: n for name, n in opcodes.items() if re.match(r"(LDL|STL)\b", name)}
        used = resources[code]
        if spilled or used["STACK"] or used["LOCAL"] or not 0 < used["REG"] <= 255:
            wrong.append(f"{code}: {spilled} {used}")
    assert not wrong, "\n".join(wrong)


def test_no_atomics_and_no_fences(instructions: dict[Code, Counter[str]]) -> None:
    """Blocks share nothing: results do not depend on their order, and none waits for another."""
    for code, opcodes in instructions.items():
        for name in ("ATOM", "ATOMG", "RED"):
            assert sass.count(opcodes, name) == 0, f"{code}: {name}"
        # Within a block, what was written to shared memory is shown to the copy engine; and sm90
        # reads what its copy engine wrote, once, where causal rows came out non-finite.
        fences = [name for name in opcodes if name.startswith("MEMBAR") and name[-4:] != ".CTA"]
        assert sum(opcodes[name] for name in fences) <= (code.kernel.family == "sm90"), (
            f"{code}: {fences}"
        )
