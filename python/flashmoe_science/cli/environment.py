"""A description of this machine and this installation.

Probes are independent: one that fails reports why and the others still run, so that a broken
installation can describe itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flashmoe_science.cli.output import CommandError

_PACKAGES = (
    "numpy",
    "torch",
    "jax",
    "jaxlib",
    "cupy",
    "transformers",
    "nanobind-backend",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "flashinfer-python",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)

# Shared libraries to report when mapped into this process.
_LIBRARIES = re.compile(
    r"lib(flashmoe|cudart|cuda|cudnn|cublas|nvrtc|torch|c10|gomp|iomp5|openblas|mkl|tcmalloc"
    r"|jemalloc|c)[-_.\w]*\.so"
)

_NVIDIA_SMI_FIELDS = (
    "index",
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_throttle_reasons.active",
    "ecc.mode.current",
)


def guarded(probe: Callable[[], Any]) -> Any:
    """The probe's answer, or {"error": why} when it has none."""
    try:
        return probe()
    except CommandError as error:
        return {"error": str(error)}
    except Exception as error:  # a broken installation may raise anything
        return {"error": f"{type(error).__name__}: {error}"}


def failed(answer: Any) -> bool:
    return isinstance(answer, dict) and set(answer) == {"error"}


def words(names: str) -> list[str]:
    """The library's lists: names with a semicolon or a space between them."""
    return re.findall(r"[^;\s]+", names)


def as_dict(value: Any) -> dict[str, Any]:
    """The fields of one of the package's dataclasses, sequences as lists."""
    return {name: _lists(field) for name, field in dataclasses.asdict(value).items()}


# Fields of an AttentionPlan's main launch, which a document has besides the plan's own. Records
# older than lists of launches have the same names.
_OF_MAIN_LAUNCH = (
    "kernel", "grid", "block", "shared_bytes", "cluster", "stages", "tile_q", "tile_k", "dim",
    "dim_v",
)  # fmt: skip


def plan_as_dict(plan: Any) -> dict[str, Any]:
    """The fields of a plan and, for attention, those of its main launch."""
    main = {name: _lists(getattr(plan, name)) for name in _OF_MAIN_LAUNCH if hasattr(plan, name)}
    return main | as_dict(plan)


def last_launches(flashmoe: Any) -> list[dict[str, Any]]:
    """What this thread's last call launched, read back."""
    return [as_dict(launch) for launch in flashmoe.last_launches()]


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _lists(item) for name, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def package() -> Any:
    """The package, with its library loaded; raises CommandError if it is broken."""
    try:
        module = importlib.import_module("flashmoe_science")
        module.cuda_device_count()
    except (ImportError, OSError, AttributeError) as error:
        raise CommandError(f"the package does not load: {error}") from error
    return module


def package_directories() -> list[Path]:
    """Folders that hold the package's files: more than one in an editable installation."""
    spec = importlib.util.find_spec("flashmoe_science")
    found = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    return [p for p in dict.fromkeys(found) if p.is_dir()]


def package_version() -> str:
    return importlib.metadata.version("flashmoe-science")


def build_info() -> dict[str, Any]:
    return as_dict(package().build_info())


def devices() -> list[dict[str, Any]]:
    """The CPU and every CUDA device the library can use."""
    flashmoe = package()
    names = ["cpu"] + [f"cuda:{i}" for i in range(flashmoe.cuda_device_count())]
    described = []
    for name in names:
        answer = guarded(lambda name=name: as_dict(flashmoe.device_info(name)))  # type: ignore[misc]
        described.append({"device": name, **answer})
    return described


def nvidia_smi() -> list[dict[str, str]]:
    """One dictionary per GPU, [] without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    for fields in (_NVIDIA_SMI_FIELDS, _NVIDIA_SMI_FIELDS[:3]):  # drivers rename fields
        query = subprocess.run(
            [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        if query.returncode == 0:
            rows = [line.split(", ") for line in query.stdout.strip().splitlines()]
            return [dict(zip(fields, row, strict=False)) for row in rows]
    return []


def cpu_model() -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else platform.processor()


def available_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def package_versions() -> dict[str, str]:
    """Versions of installed packages, read from metadata without importing."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for distribution in importlib.metadata.distributions():  # CuPy's wheels carry a suffix
        name = str(distribution.metadata["Name"] or "")
        if name.lower().startswith("cupy-cuda"):
            found[name] = distribution.version
    return found


def loaded_libraries() -> list[str]:
    """Paths of the shared libraries mapped into this process, from /proc/self/maps."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    paths = {fields[-1] for fields in map(str.split, maps.splitlines()) if len(fields) > 5}
    return sorted(p for p in paths if _LIBRARIES.match(Path(p).name))


def environment_variables() -> dict[str, str]:
    prefixes = ("FLASHMOE_", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDACXX", "OMP_NUM_THREADS")
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes)}


_NOT_RECORDS = ":(top,exclude)benchmarks/results"  # as git says it


def git_commit() -> str:
    """FLASHMOE_COMMIT, for a copy of the sources without their history; else the commit of the
    current working tree, marked if it has changes other than records of measurements; "" outside
    one."""
    told = os.environ.get("FLASHMOE_COMMIT", "")
    git = shutil.which("git")
    if told or git is None:
        return told
    changes = ["status", "--porcelain", "--untracked-files=no", "--", ":/", _NOT_RECORDS]
    commands = (["rev-parse", "HEAD"], changes)
    answers = [
        subprocess.run([git, *c], capture_output=True, text=True, timeout=20, check=False)
        for c in commands
    ]
    if answers[0].returncode != 0:
        return ""
    return answers[0].stdout.strip() + ("+changes" if answers[1].stdout.strip() else "")


_SOURCES = ("include", "core", "cpu", "cuda", "bindings", "cmake/*.cmake", "CMakeLists.txt")


def checkout() -> Path | None:
    """Root of the FlashMoE checkout that contains the working directory, None outside one."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "include/flashmoe/flashmoe.h").is_file() and (folder / "core").is_dir():
            return folder
    return None


def _hash_of(root: Path, names: Iterable[str]) -> str:
    """SHA-256 of the output of sha256sum for these files, ordered by their names' bytes."""
    digest = hashlib.sha256()
    for name in sorted(name.encode() for name in names):
        content = hashlib.sha256((root / name.decode()).read_bytes()).hexdigest()
        digest.update(content.encode() + b"  " + name + b"\n")
    return digest.hexdigest()


def source_hash(root: Path | None = None) -> str:
    """SHA-256 of the sources that the library is built from, "" outside a checkout.

    It is what this prints in the root of the checkout:

        find include core cpu cuda bindings cmake/*.cmake CMakeLists.txt -type f |
          LC_ALL=C sort | xargs sha256sum | sha256sum
    """
    root = root or checkout()
    if root is None:
        return ""
    tops = [path for pattern in _SOURCES for path in root.glob(pattern)]
    files = [f for top in tops for f in ([top] if top.is_file() else top.rglob("*"))]
    return _hash_of(root, [f.relative_to(root).as_posix() for f in files if f.is_file()])


# Files of one operation only: its kernels, how they are compiled, and what chooses among them.
# Included headers are found by following them, since all operations share most of them.
_KERNELS = {
    ("attention_forward", "cuda"): ("cuda/attention/**/*",),
    ("attention_forward", "cpu"): ("cpu/attention*",),
    ("attention_backward", "cuda"): ("cuda/attention/**/*backward*", "cuda/attention/*backward*/*"),
    ("attention_backward", "cpu"): ("cpu/attention*",),
    ("moe_forward", "cuda"): ("cuda/moe/**/*",),
    ("moe_forward", "cpu"): ("cpu/moe*", "cpu/grouped_product*"),
    # Gradients also use products of the forward.
    ("moe_backward", "cuda"): ("cuda/moe/**/*",),
    ("moe_backward", "cpu"): ("cpu/moe*", "cpu/grouped_product*"),
}
# What ragged, padded and paged batches alone are computed by: no suite of dense calls has it.
_OF_SEQUENCES = tuple(
    f"cuda/attention/{folder}/" for folder in ("decode", "sm89_decode", "sm90_mla", "lengths")
)
_CHOICE = {
    "attention_forward": ("core/ops/attention/forward.cpp", "core/choose.cpp", "core/choose.h"),
    "attention_backward": ("core/ops/attention/backward.cpp", "core/choose.cpp", "core/choose.h"),
    "moe_forward": (
        "core/ops/moe/forward.cpp",
        "core/ops/moe/route.cpp",
        "core/ops/moe/grouped_product.cpp",
        "core/ops/moe/fused.cpp",
        "core/choose.cpp",
        "core/choose.h",
    ),
    "moe_backward": (
        "core/ops/moe/backward.cpp",
        "core/ops/moe/route_backward.cpp",
        "core/choose.cpp",
        "core/choose.h",
    ),
}
_COMPILATION = {
    "cuda": ("cmake/FlashmoeCompile.cmake", "cmake/FlashmoeCuda.cmake"),
    "cpu": ("cmake/FlashmoeCompile.cmake", "cmake/FlashmoeHarden.cmake"),
}
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def kernel_sources(operation: str, kind: str, root: Path) -> list[str]:
    """Names, from the root of a checkout, of the files that an operation's kernels are made of.

    `kind` of device is "cuda" or "cpu". They are the operation's own files of that backend, what
    these include of the same backend, and so on, each header with the source file beside it; what
    in core/ chooses among the kernels; and how they are compiled. The host's code around them is
    not among them.
    """

    def found(patterns: Iterable[str]) -> set[str]:
        files = (f for pattern in patterns for f in root.glob(pattern) if f.is_file())
        return {f.relative_to(root).as_posix() for f in files}

    of, _, way = operation.rpartition("_")
    if way == "training":
        parts = (kernel_sources(f"{of}_{each}", kind, root) for each in ("forward", "backward"))
        return sorted(set().union(*parts))
    names: set[str] = set()
    following = found(_KERNELS[operation, kind])
    if way == "forward" and kind == "cuda":  # on the CPU one hash covers both
        following = {name for name in following if "backward" not in name}
        following = {name for name in following if not name.startswith(_OF_SEQUENCES)}
    while following:
        names |= following
        texts = [(root / name).read_text(encoding="utf-8") for name in following]
        headers = {header for text in texts for header in _INCLUDE.findall(text)}
        sources = {str(Path(header).with_suffix(".cpp")) for header in headers}
        of_backend = (n for n in headers | sources if n.startswith(f"{kind}/"))
        following = {n for n in of_backend if (root / n).is_file()} - names
    return sorted(names | found(_CHOICE[operation]) | found(_COMPILATION[kind]))


def kernels_hash(operation: str, kind: str, root: Path | None = None) -> str:
    """SHA-256 of an operation's kernel_sources, hashed as source_hash does; "" outside a checkout.

    A record carries it: kernels other than the measured ones have a different hash.
    """
    root = root or checkout()
    return "" if root is None else _hash_of(root, kernel_sources(operation, kind, root))


def for_record() -> dict[str, Any]:
    """The environment for a kept result: everything except paths on this machine."""
    document = collect()
    for key in ("location", "executable", "loaded"):
        del document[key]
    variables = document["variables"]
    document["variables"] = {k: "(a path)" if "/" in v else v for k, v in variables.items()}
    return document


def collect() -> dict[str, Any]:
    """Everything above as one document."""
    return {
        "package": guarded(package_version),
        "location": guarded(lambda: [str(p) for p in package_directories()]),
        "library": guarded(build_info),
        "devices": guarded(devices),
        "nvidia_smi": guarded(nvidia_smi),
        "cpu": guarded(cpu_model),
        "processors": guarded(available_processors),
        "threads": guarded(lambda: package().get_num_threads()),
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "platform": guarded(platform.platform),
        "libc": guarded(lambda: " ".join(platform.libc_ver())),
        "packages": guarded(package_versions),
        "variables": guarded(environment_variables),
        "loaded": guarded(loaded_libraries),
    }
