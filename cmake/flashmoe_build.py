"""PEP 517 build backend: scikit-build-core, and nvcc from PyPI where there is no CUDA toolkit.

A static `build-system.requires` would download 130 MB of compiler on machines that have one, or
that build without CUDA. The search below is the one of FlashmoeCuda.cmake.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scikit_build_core import build as _scikit_build
from scikit_build_core.build import *  # noqa: F403  (the remaining hooks, unchanged)

ConfigSettings = Mapping[str, "str | Sequence[str]"]

# All of one minor release: nvcc's packages do not pin one another, and a cicc that is newer than
# ptxas emits PTX it cannot read. 13.0 and 13.1 do not link out of the box.
NVCC_REQUIREMENTS = [
    "nvidia-cuda-nvcc==13.2.*",
    "nvidia-cuda-crt==13.2.*",
    "nvidia-nvvm==13.2.*",
    "nvidia-cuda-runtime==13.2.*",
    "nvidia-cuda-cccl==13.2.*",
]

# Where FlashmoeCuda.cmake looks besides the PATH.
TOOLKIT_ROOTS = ("/usr/local/cuda", "/opt/cuda")

_FALSE = {"0", "OFF", "NO", "FALSE", "N", "IGNORE", "NOTFOUND", ""}  # as CMake's if() has it


def _strings(value: str | Sequence[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _arguments(config_settings: ConfigSettings) -> Iterator[str]:
    """CMake's `-D` arguments from everywhere scikit-build-core reads them, the last one winning."""
    environment = os.environ
    yield from shlex.split(environment.get("CMAKE_ARGS", ""))
    for define in filter(None, environment.get("SKBUILD_CMAKE_DEFINE", "").split(";")):
        yield f"-D{define}"
    yield from environment.get("SKBUILD_CMAKE_ARGS", "").split(";")
    for key, value in config_settings.items():
        name = key.removeprefix("skbuild.")
        if name == "cmake.args":
            for text in _strings(value):
                yield from text.split(";")
        elif name.startswith("cmake.define."):
            for text in _strings(value):
                yield f"-D{name.removeprefix('cmake.define.')}={text}"


def cmake_definitions(config_settings: ConfigSettings | None) -> dict[str, str]:
    """CMake cache entries that this build sets, by name."""
    definitions = {}
    arguments = iter(_arguments(config_settings or {}))
    for argument in arguments:
        if argument == "-D":
            argument = "-D" + next(arguments, "")
        if argument.startswith("-D") and "=" in argument:
            name, _, value = argument[2:].partition("=")
            definitions[name.partition(":")[0].strip()] = value
    return definitions


def find_toolkit() -> str | None:
    """The nvcc that FlashmoeCuda.cmake would use without help, or None."""
    if compiler := os.environ.get("CUDACXX"):
        return compiler
    roots = [os.environ[name] for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name)]
    for root in roots:
        if nvcc := shutil.which("nvcc", path=str(Path(root) / "bin")):
            return nvcc
    if nvcc := shutil.which("nvcc"):
        return nvcc
    for root in TOOLKIT_ROOTS:
        if nvcc := shutil.which("nvcc", path=str(Path(root) / "bin")):
            return nvcc
    return None


def nvcc_requirements(config_settings: ConfigSettings | None = None) -> list[str]:
    """What to install in order to have nvcc: nothing where there is one, or none is wanted."""
    definitions = cmake_definitions(config_settings)
    if definitions.get("FLASHMOE_CUDA", "ON").upper() in _FALSE:
        return []
    if definitions.get("CMAKE_CUDA_COMPILER") or find_toolkit():
        return []
    return list(NVCC_REQUIREMENTS)


def get_requires_for_build_wheel(
    config_settings: dict[str, str | list[str]] | None = None,
) -> list[str]:
    requirements = _scikit_build.get_requires_for_build_wheel(config_settings)
    return [*requirements, *nvcc_requirements(config_settings)]


def get_requires_for_build_editable(
    config_settings: dict[str, str | list[str]] | None = None,
) -> list[str]:
    requirements = _scikit_build.get_requires_for_build_editable(config_settings)
    return [*requirements, *nvcc_requirements(config_settings)]
