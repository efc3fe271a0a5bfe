"""The machine code of the attention backward, as it is in the library: no GPU needed."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import kernels
import pytest
import sass
from kernels import Kernel

# The kernel is of the family's namespace, and so is what sm90 has behind it; the prologue and the
# kernel of dsinks are everybody's.
_FUNCTION = re.compile(
    r"attention_backward_(?:ragged_)?(kernel|prologue|sinks|behind)I.*?Traits"
    r"I(6__half|13__nv_bfloat16)Li(\d+)ELi(\d+)E\w*?_\d+([A-Za-z]\w*?)ILi"
)
_FAMILY = re.compile(r"\d(sm\d\d_backward)\d")
_LAUNCHES = ("prologue", "kernel", "behind")
_RESERVED = 1024  # bytes of shared memory, which cuobjdump counts as well


class Code(NamedTuple):
    arch: str
    kernel: Kernel


Found = dict[Code, Counter[str]]


def _kernel_of(function: str, launch: str) -> Kernel | None:
    found, family = _FUNCTION.search(function), _FAMILY.search(function)
    if found is None or family is None or found[1].replace("sinks", "behind") != launch:
        return None
    _, element, dim, dim_v, tuning = found.groups()
    return Kernel(family[1], sass.ELEMENTS[element], int(dim), int(dim_v), tuning)


def _around(kernel: Kernel) -> Kernel:
    """Whose prologue it has, and whose kernel behind: with a softcap, where tiles are the same with
    and without, those of the kernel that has none."""
    if kernel.family != "sm90_backward" or not kernel.capped or kernel.dim <= 64:
        return kernel
    tuning = kernel.tuning.removeprefix("Capped")
    return kernel._replace(tuning="TableTuning" if tuning == "Tuning" else tuning)


def _of(found: Found, family: str) -> Found:
    """The kernels of one family, which must not be empty."""
    of_family = {code: opcodes for code, opcodes in found.items() if code.kernel.family == family}
    if not of_family:
        sass.cannot(f"built without the {family} kernels")
    return of_family


@pytest.fixture(scope="module")
def launches() -> dict[str, Found]:
    """How often each opcode occurs in the kernels of each launch."""
    return {
        launch: {
            Code(*code): opcodes
            for code, opcodes in sass.instructions(
                lambda function, launch=launch: _kernel_of(function, launch)
            ).items()
        }
        for launch in _LAUNCHES
    }


@pytest.fixture(scope="module")
def mains(launches: dict[str, Found]) -> Found:
    return launches["kernel"]


def test_every_kernel_is_there_for_its_architectures(launches: dict[str, Found]) -> None:
    """Those of sm_90a's own instructions for it alone; and none for Ada that Ada cannot run, which
    use no more than sm_90 has."""
    real = sass.real_architectures()
    ours = kernels.attention("sm89_backward")
    ada_alone = sass.architectures() == ["89-real"]
    expected = {
        Code(arch.removesuffix("a") if kernel.large else arch, kernel)
        for arch in real
        for kernel in ours
        if arch != "sm_89" or ada_alone or not kernel.large
    }
    assert expected
    if "sm_90a" in real:
        expected |= {Code("sm_90a", kernel) for kernel in kernels.attention("sm90_backward")}
    assert set(launches["kernel"]) == expected
    for launch in ("prologue", "behind"):
        assert set(launches[launch]) == {Code(arch, _around(kernel)) for arch, kernel in expected}


def test_products_are_wgmma(mains: dict[Code, Counter[str]]) -> None:
    for code, opcodes in _of(mains, "sm90_backward").items():
        widths = sass.check_wgmma(code, opcodes, code.kernel.dtype)
        # Scores of a step's queries; dK and dV of a tile's columns, 256 as two of 128; of dQ all
        # columns of half of the queries, half of the columns of 64, panels of 64 columns, or in
        # clusters a block's half of 256, or panels of 32.
        dim, dim_v = code.kernel.dim, code.kernel.dim_v
        queries = 128 if dim == 64 and not code.kernel.capped else 64
        of_dq = dim if queries == 128 else dim // 2 if dim <= 128 else 64 if dim_v <= 128 else 32
        if dim == 256:
            dim = dim_v = of_dq = 128
        assert set(widths) == {queries, dim, dim_v, of_dq}, f"{code}: {widths}"
        assert sass.count(opcodes, "HMMA") == 0, f"{code}: products of one warp"
        products = sum(widths.values())
        # Where ptxas gives a group of products up, each is begun and awaited by itself.
        for name in ("WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR.LE"):
            assert 0 < 2 * opcodes[name] <= products, f"{code}: products are serialised"


def test_tiles_come_and_go_by_the_copy_engine(mains: dict[Code, Counter[str]]) -> None:
    for code, opcodes in _of(mains, "sm90_backward").items():
        # In clusters gradients leave from registers.
        sass.check_tma(code, opcodes, stores=code.kernel.dim_v <= 128)
        assert sass.count(opcodes, "LDGSTS") == 0, f"{code}: copies of a thread's own"


def test_blocks_share_items_where_dv_is_above_128(mains: dict[Code, Counter[str]]) -> None:
    """They load queries for each other, pass items on, and send dS."""
    for code, opcodes in _of(mains, "sm90_backward").items():
        clusters = code.kernel.dim_v > 128
        for name in ("UCGABAR_ARV", "UCGABAR_WAIT", "STAS"):
            assert (sass.count(opcodes, name) > 0) == clusters, f"{code}: {name}: {opcodes}"
        assert (opcodes["UTMALDG.4D.MULTICAST"] > 0) == clusters, f"{code}: {opcodes}"
        assert (opcodes["UBLKCP.S.S"] > 0) == clusters, f"{code}: {opcodes}"


def test_roles_divide_the_registers(mains: dict[Code, Counter[str]]) -> None:
    for code, opcodes in _of(mains, "sm90_backward").items():
        sass.check_roles_divide_the_registers(code, opcodes)


def test_products_of_sm89_are_of_warps(mains: Found) -> None:
    for code, opcodes in _of(mains, "sm89_backward").items():
        sass.check_mma_sync(code, opcodes, code.kernel.dtype)
        # Masks come by as many bytes as a lane's keys side by side have.
        shorter = ("LDGSTS.E.64",) if code.kernel.biased else ()
        sass.check_cp_async(code, opcodes, awaited_by="ARRIVES", shorter=shorter)
        # P and dS by columns; Q, K and dO by rows of theirs.
        assert sass.transposing_loads(opcodes) > 0, f"{code}: {opcodes}"


def test_launches_wait_for_what_is_ahead_of_them(launches: dict[str, Found]) -> None:
    for launch, found in launches.items():
        for code, opcodes in found.items():
            # Sinks, and repair, which finds its rows before it waits.
            parts = 2 if launch == "behind" and code.kernel.family == "sm90_backward" else 1
            # Tables of sequences were written before the launch ahead let this one start.
            tables = parts == 2 and code.kernel.ragged
            sass.check_launches_wait(code, opcodes, parts, parts, reads_tables=tables)


def _atomics(opcodes: Counter[str]) -> dict[str, int]:
    names = ("ATOM", "ATOMG", "RED", "REDG")
    return {name: n for name, n in opcodes.items() if name.split(".")[0] in names}


def test_sums_have_a_fixed_order(launches: dict[str, Found]) -> None:
    """Parts of dQ are added at one place, by turns; beside that the only atomic is the ticket."""
    for code, opcodes in launches["kernel"].items():
        if code.kernel.family == "sm90_backward":
            sass.check_atomics_count_blocks(code, opcodes, counts=True)
            adds = {n for n in opcodes if n.split(".")[0] in ("UBLKRED", "REDG") and ".F32" in n}
            # In clusters from the registers that dQ is in, else from shared memory.
            in_vectors = "REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU"
            expected = in_vectors if code.kernel.dim_v > 128 else "UBLKRED.G.S.ADD.F32.RN"
            assert adds == {expected}, f"{code}: {adds}"
        else:
            adds = {name: n for name, n in _atomics(opcodes).items() if ".F32" in name}
            assert len(adds) == 1, f"{code}: {adds}"
            # As many as a thread's part of dQ has registers, or a quarter of it in vectors.
            vectors = sass.is_hopper(code.arch)
            assert ("x4" in next(iter(adds))) == vectors, f"{code}: {adds}"
            assert _atomics(opcodes).keys() - adds.keys() == {"ATOMG.E.ADD.STRONG.GPU"}, code
        for name in ("LDG.E.STRONG.GPU", "STG.E.STRONG.GPU", "MEMBAR.ALL.GPU"):
            assert opcodes[name] > 0, f"{code}: turns are not waited for: no {name}"
    for launch in ("prologue", "behind"):
        for code, opcodes in launches[launch].items():
            sass.check_no_atomics(code, opcodes)


@pytest.mark.parametrize("launch", _LAUNCHES)
def test_nothing_is_in_local_memory(launches: dict[str, Found], launch: str) -> None:
    resources = {
        Code(*code): used
        for code, used in sass.resources(lambda function: _kernel_of(function, launch)).items()
    }
    assert set(resources) == set(launches[launch])
    for code, opcodes in launches[launch].items():
        used = resources[code]
        # Plans for models know that there is no static shared memory.
        reserved = _RESERVED if sass.is_hopper(code.arch) else 0
        assert used["SHARED"] == reserved, f"{code}: {used}"
        sass.check_no_local_memory(code, opcodes, used)
