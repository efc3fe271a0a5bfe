"""`flashmoe info`: what is installed here and what would run."""

from __future__ import annotations

import argparse
from typing import Any

from flashmoe_science.cli import environment
from flashmoe_science.cli.output import (
    EXIT_FAILED,
    EXIT_OK,
    Output,
    add_json_option,
    write_json,
)

_DESCRIPTION = """\
Describes this installation and this machine: package and library, the kernel families built in,
every device and the family its calls go to, threads, versions of the frameworks found (read from
their metadata, not imported), FLASHMOE_* variables and the shared libraries loaded.

Every probe stands alone, so it also runs where the library is missing or broken, says what is
wrong, and exits with 1. Paste its output into a bug report.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "info",
        help="what is installed here and what would run",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def _text(answer: Any) -> str:
    if environment.failed(answer):
        return f"not available: {answer['error']}"
    return str(answer) if answer not in ("", None) else "none"


def version_text(number: int) -> str:
    """CUDA's 13000 as 13.0; "none" for 0."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else "none"


def device_text(device: dict[str, Any]) -> str:
    """One line: the device and what it runs."""
    if "error" in device:
        return f"not available: {device['error']}"
    gib = device["memory_bytes"] / 2**30
    family = device["kernel_family"]
    runs = f"runs the {family} kernels" if family else "no kernel built in runs here"
    if device["compute_capability"]:
        units = f"{device['multiprocessors']} SMs, driver for CUDA " + version_text(
            device["driver_version"]
        )
    else:
        units = f"{device['multiprocessors']} threads"
    return f"{device['name']} ({device['isa']}, {units}, {gib:.0f} GiB): {runs}"


def _library_rows(library: Any) -> list[tuple[str, str]]:
    if environment.failed(library):
        return [("library", _text(library))]
    families = ", ".join(environment.words(library["kernel_families"]))
    architectures = ", ".join(environment.words(library["cuda_architectures"]))
    runtime = version_text(library["cuda_runtime_version"])
    return [
        ("library", library["version"]),
        ("kernel families", families),
        ("CUDA architectures", architectures or "none (CPU-only build)"),
        ("CUDA compiler", f"{library['cuda_compiler'] or 'none'}, runtime {runtime}"),
        ("host compiler", library["host_compiler"]),
    ]


def _print(document: dict[str, Any], output: Output) -> None:
    output.heading("FlashMoE")
    output.pairs(
        [
            ("package", _text(document["package"])),
            ("location", "\n".join(document["location"]) or "none"),
            *_library_rows(document["library"]),
        ]
    )
    output.heading("Devices")
    devices = document["devices"]
    if environment.failed(devices):
        output.pairs([("devices", _text(devices))])
    else:
        output.pairs([(d["device"], device_text(d)) for d in devices])
        if not any(d["device"].startswith("cuda") for d in devices):
            output.line("  No usable GPU here: calls run on the CPU backend.")
    for gpu in document["nvidia_smi"] if isinstance(document["nvidia_smi"], list) else []:
        output.pairs([(f"nvidia-smi {gpu['index']}", ", ".join(f"{v}" for v in gpu.values()))])
    output.heading("Machine")
    output.pairs(
        [
            ("CPU", f"{_text(document['cpu'])}, {document['processors']} processors"),
            ("threads", _text(document["threads"])),
            ("platform", f"{_text(document['platform'])}, {_text(document['libc'])}"),
            ("Python", f"{document['python']} ({document['executable']})"),
            *((name, version) for name, version in document["packages"].items()),
        ]
    )
    output.heading("Variables")
    output.pairs(list(document["variables"].items()) or [("none", "")])
    output.heading("Loaded shared libraries")
    loaded = document["loaded"]
    output.pairs([(path, "") for path in loaded] if isinstance(loaded, list) else [("", "")])


def run(arguments: argparse.Namespace) -> int:
    document = environment.collect()
    if arguments.json != "-":
        _print(document, Output())
    if arguments.json is not None:
        write_json(document, arguments.json)
    works = not environment.failed(document["library"])
    return EXIT_OK if works else EXIT_FAILED
