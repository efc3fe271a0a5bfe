"""Information about the library: build, devices, log, last launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashmoe_science import _core
from flashmoe_science._dtypes import parse_device
from flashmoe_science.errors import InvalidArgumentError
from flashmoe_science.plan import Launch, launches_of


@dataclass(frozen=True)
class BuildInfo:
    """The contents of the library."""

    version: str
    cuda_architectures: str
    """Such as "89-real;90a-real;89-virtual"; "" for a CPU-only build."""
    cuda_compiler: str
    """Version of nvcc, or ""."""
    host_compiler: str
    kernel_families: str
    """Family names for `kernel`, such as "cpu sm89 sm90"."""
    cuda_runtime_version: int
    """13000 for 13.0; 0 for a CPU-only build."""


@dataclass(frozen=True)
class DeviceInfo:
    """A device as the library sees it."""

    name: str
    isa: str
    """CPU: "avx512", "avx2" or "scalar"; GPU: such as "sm_90"."""
    kernel_family: str
    """The family calls go to by default; "" if none can run."""
    compute_capability: int
    """GPU: 10 * major + minor; CPU: 0."""
    multiprocessors: int
    """GPU: number of SMs; CPU: threads the library uses."""
    driver_version: int
    """GPU: CUDA version of the driver, 13000 for 13.0; CPU: 0."""
    shared_bytes_per_block: int
    """GPU: the opt-in maximum; CPU: 0."""
    l2_bytes: int
    memory_bytes: int


def build_info() -> BuildInfo:
    """The contents of the library: version, architectures, compilers, kernel families."""
    return BuildInfo(**_core.build_info())


def device_info(device: object = "cpu") -> DeviceInfo:
    """Describes a device.

    Args:
        device: "cpu", "cuda", "cuda:N", an object that prints as one (a torch.device), or a model
            of GPUs that need not be here: "h100", "h200", "l4", "rtx4090".

    Raises:
        ValueError: Not the name of a device.
        RuntimeError: There is no such device, no driver, or the build has no CUDA.
    """
    return DeviceInfo(**_core.device_info(*parse_device(device)))


def last_launches() -> tuple[Launch, ...]:
    """The launches of this thread's last call that launched something, in order, read back.

    Raises:
        ValueError: Nothing was launched on this thread yet.
    """
    return launches_of(_core.last_launches())


def last_launch() -> Launch:
    """The last of last_launches().

    Raises:
        ValueError: Nothing was launched on this thread yet.
    """
    return last_launches()[-1]


_LEVELS = {"off": 0, "error": 1, "info": 2, "debug": 3}


def set_log(level: int | str, callback: Callable[[int, str], object] | None = None) -> None:
    """Sets what the library logs, and where.

    Before the first call both come from the environment: FLASHMOE_LOG_LEVEL (0 to 3) and
    FLASHMOE_LOG_FILE (a path, or "stdout"; default stderr). %i in a path becomes the process id, in
    a forked child its own.

    Args:
        level: 0 "off"; 1 "error", a line for each failed call; 2 "info", also a line for each
            launched call with its shapes and plan; 3 "debug", also why other kernels were not used.
        callback: Called with (level, line), from any thread that calls the library; it may call the
            library. None keeps the current destination. It is never released.

    Raises:
        ValueError: Not a level.
    """
    if isinstance(level, str):
        if level not in _LEVELS:
            raise InvalidArgumentError(
                f"level: got {level!r}, accepted are 'off', 'error', 'info', 'debug' and 0 to 3"
            )
        level = _LEVELS[level]
    _core.set_log(level, callback)
