"""nvcc becomes a build requirement exactly where CMake would find none, and where it is wanted."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from installations import ROOT, require_tool

pytest.importorskip("scikit_build_core")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The build backend on a machine without any CUDA toolkit."""
    spec = importlib.util.spec_from_file_location(
        "flashmoe_build", ROOT / "cmake/flashmoe_build.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "TOOLKIT_ROOTS", (str(tmp_path / "usr-local-cuda"),))
    for name in ("CUDACXX", "CUDA_PATH", "CUDA_HOME", "CMAKE_ARGS", "SKBUILD_CMAKE_ARGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("SKBUILD_CMAKE_DEFINE", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(ROOT)
    return module


def fake_nvcc(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    nvcc = directory / "nvcc"
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    nvcc.chmod(0o755)
    return nvcc


def test_without_a_toolkit(backend: ModuleType) -> None:
    requirements = backend.nvcc_requirements({})
    assert requirements == backend.NVCC_REQUIREMENTS
    for hook in ("get_requires_for_build_wheel", "get_requires_for_build_editable"):
        assert set(requirements) < set(getattr(backend, hook)({}))


def test_all_parts_are_of_one_minor_release(backend: ModuleType) -> None:
    pins = dict(line.split("==") for line in backend.NVCC_REQUIREMENTS)
    assert set(pins) == {
        "nvidia-cuda-nvcc",
        "nvidia-cuda-crt",
        "nvidia-nvvm",
        "nvidia-cuda-runtime",
        "nvidia-cuda-cccl",
    }
    [version] = set(pins.values())
    major, minor, patch = version.split(".")
    assert (int(major), int(minor)) >= (13, 2) and patch == "*"


@pytest.mark.parametrize("place", ["CUDACXX", "CUDA_PATH", "CUDA_HOME", "PATH", "usual"])
def test_a_toolkit_goes_first(
    backend: ModuleType, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if place == "usual":
        nvcc = fake_nvcc(tmp_path / "usr-local-cuda" / "bin")
    else:
        nvcc = fake_nvcc(tmp_path / "toolkit" / "bin")
        value = {"CUDACXX": nvcc, "PATH": nvcc.parent}.get(place, nvcc.parents[1])
        monkeypatch.setenv(place, str(value))
    assert backend.find_toolkit() == str(nvcc)
    assert backend.nvcc_requirements({}) == []


def test_an_empty_toolkit_folder_is_none(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CUDACXX", "")
    assert backend.nvcc_requirements({}) == backend.NVCC_REQUIREMENTS


@pytest.mark.parametrize(
    "settings",
    [
        {"cmake.define.FLASHMOE_CUDA": "OFF"},
        {"cmake.define.FLASHMOE_CUDA": "off"},
        {"skbuild.cmake.define.FLASHMOE_CUDA": "0"},
        {"cmake.args": "-DFLASHMOE_CUDA=OFF"},
        {"cmake.args": ["-GNinja", "-DFLASHMOE_CUDA:BOOL=FALSE"]},
        {"cmake.args": "-GNinja;-DFLASHMOE_CUDA=NO"},
        {"cmake.define.CMAKE_CUDA_COMPILER": "/opt/nvcc"},
    ],
)
def test_not_wanted_by_settings(backend: ModuleType, settings: dict[str, str | list[str]]) -> None:
    assert backend.nvcc_requirements(settings) == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CMAKE_ARGS", "-DCMAKE_BUILD_TYPE=Debug -DFLASHMOE_CUDA=OFF"),
        ("CMAKE_ARGS", "-D FLASHMOE_CUDA=OFF"),
        ("SKBUILD_CMAKE_ARGS", "-DFLASHMOE_CUDA=OFF"),
        ("SKBUILD_CMAKE_DEFINE", "FLASHMOE_CUDA=OFF;FLASHMOE_STATIC=ON"),
    ],
)
def test_not_wanted_by_environment(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert backend.nvcc_requirements({}) == []


def test_settings_overrule_the_environment(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CMAKE_ARGS", "-DFLASHMOE_CUDA=OFF")
    settings = {"cmake.define.FLASHMOE_CUDA": "ON"}
    assert backend.nvcc_requirements(settings) == backend.NVCC_REQUIREMENTS


@pytest.mark.parametrize("place", ["CUDA_PATH", "CUDA_HOME", "PATH"])
def test_cmake_finds_the_same_nvcc(
    backend: ModuleType, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FlashmoeCuda.cmake looks where the backend looks: a decoy nvcc must be the one it takes."""
    monkeypatch.undo()
    cmake = require_tool("cmake")
    nvcc = fake_nvcc(tmp_path / "toolkit" / "bin")
    env = {name: value for name, value in os.environ.items() if not name.startswith("CUDA")}
    if place == "PATH":
        env["PATH"] = f"{nvcc.parent}{os.pathsep}{env['PATH']}"
    else:
        env[place] = str(nvcc.parents[1])
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(probe C)\n"
        f'include("{ROOT}/cmake/FlashmoeCuda.cmake")\n'
    )
    build = tmp_path / "build"
    subprocess.run([cmake, "-S", tmp_path, "-B", build], env=env, capture_output=True, check=False)
    cache = (build / "CMakeCache.txt").read_text()
    assert re.search(r"^FLASHMOE_NVCC:\w+=(.*)$", cache, re.MULTILINE)[1] == str(nvcc)
