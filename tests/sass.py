"""What cuobjdump says of the library that is tested."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import capi
import pytest

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)")
Kernel = TypeVar("Kernel")


def cannot(reason: str) -> None:
    if os.environ.get("FLASHMOE_TEST_REQUIRE"):
        pytest.fail(f"{reason} (FLASHMOE_TEST_REQUIRE is set: nothing may be left out)")
    pytest.skip(reason)


def _cuobjdump() -> str:
    candidates = [shutil.which("cuobjdump"), "/usr/local/cuda/bin/cuobjdump"]
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        candidates += sorted(map(str, Path(root).glob("cu*/bin/cuobjdump")))
    for candidate in candidates:
        if candidate and Path(candidate).exists():
            return candidate
    cannot("needs cuobjdump: install a CUDA toolkit or nvidia-cuda-cuobjdump")
    raise AssertionError


def dump(*options: str) -> Iterator[str]:
    tool = _cuobjdump()
    beside = f"{Path(tool).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # where nvdisasm is
    path = str(capi.library_path().resolve())
    with subprocess.Popen(
        [tool, *options, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": beside},
    ) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            last = line.strip() or last
            yield line
    assert process.returncode == 0, f"cuobjdump {' '.join(options)}: {last}"


def architectures() -> list[str]:
    """What the library says it holds, such as ["89-real", "90a-real", "89-virtual"]."""
    info = capi.BuildInfo(struct_size=ctypes.sizeof(capi.BuildInfo))
    lib = capi.load()
    capi.check(lib.flashmoe_get_build_info(info), lib)
    built = info.cuda_architectures.decode().replace(";", " ").split()
    if not built:
        cannot(f"{capi.library_path()} was built without CUDA")
    return built


def instructions(
    kernel_of: Callable[[str], Kernel | None],
) -> dict[tuple[str, Kernel], Counter[str]]:
    """How often each opcode occurs, by architecture and kernel."""
    found: dict[tuple[str, Kernel], Counter[str]] = {}
    arch = ""
    opcodes: Counter[str] = Counter()
    for line in dump("-sass"):
        if line.startswith("arch = "):
            arch = line.split("=")[1].strip()
        elif "Function :" in line:
            opcodes = Counter()
            kernel = kernel_of(line)
            if kernel is not None:
                found[arch, kernel] = opcodes
        else:
            match = _INSTRUCTION.match(line)
            if match is not None:
                opcodes[match[1]] += 1
    return found


def resources(
    kernel_of: Callable[[str], Kernel | None],
) -> dict[tuple[str, Kernel], dict[str, int]]:
    """Registers, stack, local and shared memory of each kernel."""
    found: dict[tuple[str, Kernel], dict[str, int]] = {}
    arch = ""
    kernel: Kernel | None = None
    for line in dump("-res-usage"):
        if line.startswith("arch = "):
            arch = line.split("=")[1].strip()
        elif line.strip().startswith("Function "):
            kernel = kernel_of(line)
        elif "REG:" in line and kernel is not None:
            numbers = re.findall(r"(\w+)(?:\[\d+\])?:(\d+)", line)
            found[arch, kernel] = {name: int(number) for name, number in numbers}
            kernel = None
    return found


def count(opcodes: Counter[str], name: str) -> int:
    """Of all forms of an instruction."""
    return sum(n for opcode, n in opcodes.items() if opcode.split(".")[0] == name)
