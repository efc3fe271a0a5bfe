"""What cuobjdump and nvdisasm say of the library that is tested, and what holds of every kernel.

Disassembling the library takes half a minute, and is done once a process: parallel.py gives all
tests of machine code to one.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import capi
import numpy as np
import numpy.typing as npt
import pytest

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)")
# An instruction is two words of 64 bits. Above this bit of the second is how it is scheduled: among
# that the barrier that it sets when it is done, of six, and those that it waits for.
_CONTROL_BIT = 41
_SCHEDULED = "sm89_decode"  # in the names of functions whose waits are found
_SOON = 64  # instructions
Kernel = TypeVar("Kernel")
Code = tuple[str, Kernel]  # architecture, such as "sm_90a", and kernel
ELEMENTS = {"6__half": "fp16", "13__nv_bfloat16": "bf16"}  # as they are in a function's name


def cannot(reason: str) -> None:
    if os.environ.get("FLASHMOE_TEST_REQUIRE"):
        pytest.fail(f"{reason} (FLASHMOE_TEST_REQUIRE is set: nothing may be left out)")
    pytest.skip(reason)


def _tool(name: str) -> str:
    candidates = [shutil.which(name), f"/usr/local/cuda/bin/{name}"]
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        candidates += sorted(map(str, Path(root).glob(f"cu*/bin/{name}")))
    for candidate in candidates:
        if candidate and Path(candidate).exists():
            return candidate
    cannot(f"needs {name}: install a CUDA toolkit or nvidia-cuda-{name}")
    raise AssertionError


def _lines(tool: str, *arguments: str, folder: str | None = None) -> Iterator[str]:
    """What it prints."""
    with subprocess.Popen(
        [_tool(tool), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    ) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            last = line.strip() or last
            yield line
    assert process.returncode == 0, f"{tool} {' '.join(arguments)}: {last}"


def dump(*options: str, folder: str | None = None) -> Iterator[str]:
    return _lines("cuobjdump", *options, str(capi.library_path().resolve()), folder=folder)


def architectures() -> list[str]:
    """What the library says it holds, such as ["89-real", "90a-real", "89-virtual"]."""
    info = capi.BuildInfo(struct_size=ctypes.sizeof(capi.BuildInfo))
    lib = capi.load()
    capi.check(lib.flashmoe_get_build_info(info), lib)
    built = info.cuda_architectures.decode().replace(";", " ").split()
    if not built:
        cannot(f"{capi.library_path()} was built without CUDA")
    return built


def real_architectures() -> list[str]:
    """Those with machine code, as cuobjdump calls them: ["sm_89", "sm_90a"]."""
    real = [name for name in architectures() if not name.endswith("-virtual")]
    return [f"sm_{name.removesuffix('-real')}" for name in real]


class _Function(NamedTuple):
    arch: str
    name: str


Words = npt.NDArray[np.uint64]  # a row of two for each instruction


def _functions() -> Iterator[tuple[_Function, Words]]:
    """The code of every one."""
    with tempfile.TemporaryDirectory() as folder:
        for line in dump("-xelf", "all", folder=folder):
            assert line.startswith("Extracting ELF file"), line
        for path in sorted(Path(folder).iterdir()):  # such as libflashmoe.so.7.sm_90a.cubin
            arch = path.name.split(".")[-2]
            for section, words in _code_sections(path.read_bytes()):
                yield _Function(arch, section.removeprefix(".text.")), words


def _code_sections(elf: bytes) -> Iterator[tuple[str, Words]]:
    """By the format's tables: where its section headers are, and of which of them names are."""
    [table] = struct.unpack_from("<Q", elf, 0x28)
    entry, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry) for i in range(count)]
    for name, _, flags, _, offset, size in headers:
        if flags & 4:  # instructions
            begin = headers[names][4] + name
            words = np.frombuffer(elf, "<u8", size // 8, offset).reshape(-1, 2)
            yield elf[begin : elf.index(b"\0", begin)].decode(), words


class _EarlyWaits:
    """Counts the waits for a streaming load of 16 bytes soon behind it, in the order of code."""

    def __init__(self) -> None:
        self.count = 0
        self._at = 0
        self._sent: dict[int, int] = {}  # by barrier, where the first load is

    def add(self, opcode: str, upper_half: int) -> None:
        control = upper_half >> _CONTROL_BIT
        self._at += 1
        for barrier in range(6):
            if control >> 11 + barrier & 1 and barrier in self._sent:
                self.count += self._at - self._sent.pop(barrier) < _SOON
        barrier = control >> 5 & 7
        if barrier < 6 and ".NA." in opcode and opcode.endswith(".128"):
            self._sent.setdefault(barrier, self._at)


def _opcodes(arch: str, words: Words) -> npt.NDArray[np.object_]:
    """The opcode of each instruction. Most occur many times, and nvdisasm is slow, so it gets only
    one of those that differ only in scheduling."""
    upper = words[:, 1] & np.uint64((1 << _CONTROL_BIT) - 1)
    order = np.lexsort((words[:, 0], upper))
    one_after_another = np.stack((words[order, 0], upper[order]))
    is_new = np.ones(len(order), bool)
    is_new[1:] = (one_after_another[:, 1:] != one_after_another[:, :-1]).any(0)
    with tempfile.NamedTemporaryFile() as file:
        words[order[is_new]].tofile(file.name)
        # They are no program: there is no flow of data to follow.
        lines = _lines(
            "nvdisasm", "--no-dataflow", "--binary", arch.replace("sm_", "SM"), file.name
        )
        named = [sys.intern(match[1]) for line in lines if (match := _INSTRUCTION.match(line))]
    assert len(named) == np.count_nonzero(is_new)
    found = np.empty(len(order), np.int64)
    found[order] = np.cumsum(is_new) - 1
    return np.array(named, object)[found]


class _Disassembly(NamedTuple):
    opcodes: dict[_Function, Counter[str]]
    early_waits: dict[_Function, _EarlyWaits]


@functools.cache
def _disassembled() -> _Disassembly:
    """How often each opcode occurs, in the order of where each comes first; and early waits."""
    found = _Disassembly({}, {})
    functions = dict(_functions())
    for arch in sorted({function.arch for function in functions}):
        of_arch = {
            function: words for function, words in functions.items() if function.arch == arch
        }
        opcodes = _opcodes(arch, np.concatenate(list(of_arch.values())))
        for function, words in of_arch.items():
            own, opcodes = opcodes[: len(words)].tolist(), opcodes[len(words) :]
            found.opcodes[function] = Counter(own)
            if _SCHEDULED in function.name:
                waits = found.early_waits[function] = _EarlyWaits()
                for opcode, upper_half in zip(own, words[:, 1].tolist(), strict=True):
                    waits.add(opcode, upper_half)
    return found


@functools.cache
def _used() -> dict[_Function, dict[str, int]]:
    found: dict[_Function, dict[str, int]] = {}
    arch = function = ""
    for line in dump("-res-usage"):
        if line.startswith("arch = "):
            arch = line.split("=")[1].strip()
        elif line.strip().startswith("Function "):
            function = line.split()[1].rstrip(":")
        elif "REG:" in line:
            numbers = re.findall(r"(\w+)(?:\[\d+\])?:(\d+)", line)
            found[_Function(arch, function)] = {name: int(number) for name, number in numbers}
    return found


Value = TypeVar("Value")


def _of_kernels(
    found: dict[_Function, Value], kernel_of: Callable[[str], Kernel | None]
) -> dict[Code[Kernel], Value]:
    kernels = ((function, kernel_of(function.name)) for function in found)
    return {(f.arch, kernel): found[f] for f, kernel in kernels if kernel is not None}


def instructions(kernel_of: Callable[[str], Kernel | None]) -> dict[Code[Kernel], Counter[str]]:
    """How often each opcode occurs, by architecture and kernel."""
    return _of_kernels(_disassembled().opcodes, kernel_of)


def early_waits(kernel_of: Callable[[str], Kernel | None]) -> dict[Code[Kernel], int]:
    """How often a kernel of sm89_decode waits for keys as soon as it has sent for them."""
    found = _of_kernels(_disassembled().early_waits, kernel_of)
    return {code: waits.count for code, waits in found.items()}


def resources(kernel_of: Callable[[str], Kernel | None]) -> dict[Code[Kernel], dict[str, int]]:
    """Registers, stack, local and shared memory of each kernel."""
    return _of_kernels(_used(), kernel_of)


def count(opcodes: Counter[str], name: str) -> int:
    """The count of all forms of an instruction."""
    return sum(n for opcode, n in opcodes.items() if opcode.split(".")[0] == name)


def is_hopper(arch: str) -> bool:
    """Or newer: there are clusters and dependent launches."""
    return int(re.findall(r"\d+", arch)[0]) >= 90


# ---- what holds of every kernel --------------------------------------------------------------


def check_mma_sync(code: Code[Kernel], opcodes: Counter[str], dtype: str) -> None:
    """Products are one warp's, of this dtype with sums in fp32."""
    name = f"HMMA.16816.{'F32.BF16' if dtype == 'bf16' else 'F32'}"
    assert opcodes[name] > 0, f"{code}: no {name}"
    assert opcodes[name] == count(opcodes, "HMMA"), f"{code}: products of another kind"


def check_wgmma(code: Code[Kernel], opcodes: Counter[str], dtype: str) -> dict[int, int]:
    """Products are a warpgroup's, likewise; how many there are of each width."""
    suffix = "F32.BF16" if dtype == "bf16" else "F32"
    kind = re.compile(rf"HGMMA\.64x(\d+)x16\.{re.escape(suffix)}")
    widths: dict[int, int] = {}
    for name, n in opcodes.items():
        if found := kind.fullmatch(name):
            widths[int(found[1])] = widths.get(int(found[1]), 0) + n
    assert widths, f"{code}: no HGMMA of {suffix}: {opcodes}"
    assert sum(widths.values()) == count(opcodes, "HGMMA"), f"{code}: products of another kind"
    return widths


def transposing_loads(opcodes: Counter[str]) -> int:
    """The count of transposing loads of matrices from shared memory."""
    return sum(n for name, n in opcodes.items() if re.match(r"LDSM.*\.M?T", name))


def check_cp_async(
    code: Code[Kernel],
    opcodes: Counter[str],
    *,
    awaited_by: str = "LDGDEPBAR",
    shorter: Collection[str] = (),
) -> None:
    """Tiles come by copies of 16 bytes, and what else by those named, which something waits for:
    groups of them, or ARRIVES at mbarriers."""
    copies = [name for name in opcodes if name.startswith("LDGSTS")]
    assert copies, f"{code}: no LDGSTS"
    assert all("128" in name or name in shorter for name in copies), f"{code}: {copies}"
    assert count(opcodes, awaited_by) > 0, f"{code}: nothing waits for the copies"


def check_tma(code: Code[Kernel], opcodes: Counter[str], *, stores: bool = True) -> None:
    """Tiles come and, unless said otherwise, go by the copy engine."""
    for name in ("UTMALDG", "SYNCS"):  # loads, and barriers to wait at
        assert count(opcodes, name) > 0, f"{code}: no {name}"
    assert (count(opcodes, "UTMASTG") > 0) == stores, f"{code}: {opcodes}"


def check_loads_come_first(code: object, opcodes: Counter[str]) -> None:
    """The code that loads lies ahead of the code that computes: where neither is in a cache yet,
    what follows one after another comes sooner, and nothing starts without the first loads."""
    names = list(opcodes)
    loads, computes = (
        next(i for i, name in enumerate(names) if name.startswith(f"USETMAXREG.{change}"))
        for change in ("DEALLOC", "TRY_ALLOC")
    )
    assert loads < computes, f"{code}: {names}"


def check_roles_divide_the_registers(code: Code[Kernel], opcodes: Counter[str]) -> None:
    """ptxas leaves setmaxnreg out where it cannot keep to it."""
    moves = [name for name in opcodes if name.startswith("USETMAXREG")]
    assert any("TRY_ALLOC" in name for name in moves), f"{code}: {moves}"
    assert any("DEALLOC" in name for name in moves), f"{code}: {moves}"


def check_launches_wait(
    code: Code[Kernel],
    opcodes: Counter[str],
    waits: int = 1,
    branches: int = 1,
    *,
    reads_tables: bool = False,
) -> None:
    """A launch waits, at so many places, for what is ahead of it before it lets the next one start,
    in so many branches, and before it touches a tensor, or but reads a table; on older
    architectures there is no such thing."""
    order = list(opcodes)  # by where each comes first
    if not is_hopper(code[0]):
        assert not {"ACQBULK", "PREEXIT"} & set(order), f"{code}: {opcodes}"
        return
    assert opcodes["ACQBULK"] == waits and opcodes["PREEXIT"] == branches, f"{code}: {opcodes}"
    before = order[: order.index("ACQBULK")]
    loads = "" if reads_tables else "LDG|LD|"
    touching = re.compile(rf"(PREEXIT|{loads}STG|ST|LDGSTS|UTMALDG|UTMASTG)(\.|$)")
    assert not [name for name in before if touching.match(name)], f"{code}: {before}"
    # ld.global.nc promises that nothing is written from the kernel's start on.
    assert not [name for name in order if "CONSTANT" in name], f"{code}: {opcodes}"


def check_no_local_memory(code: Code[Kernel], opcodes: Counter[str], used: dict[str, int]) -> None:
    spilled = {name: n for name, n in opcodes.items() if re.match(r"(LDL|STL)\b", name)}
    assert not spilled, f"{code}: {spilled}"
    assert not used["STACK"] and not used["LOCAL"] and 0 < used["REG"] <= 255, f"{code}: {used}"


def check_atomics_count_blocks(code: Code[Kernel], opcodes: Counter[str], *, counts: bool) -> None:
    """Sums have a fixed order; a counter, if any, tells the last block to leave its part."""
    atomics = {n: c for n, c in opcodes.items() if n.split(".")[0] in ("ATOM", "ATOMG", "RED")}
    assert sum(atomics.values()) == counts, f"{code}: {atomics}"
    assert not any(".F" in name for name in atomics), f"{code}: {atomics}"


def check_no_atomics(code: Code[Kernel], opcodes: Counter[str]) -> None:
    for name in ("ATOM", "ATOMG", "RED"):
        assert count(opcodes, name) == 0, f"{code}: {name}"
