"""The `flashmoe` command: what is installed, does it work, what would run, how fast is it.

Neither the library nor a framework is imported here or at the top of the subcommands' modules, so
that `flashmoe info` can still explain an installation that is broken.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from flashmoe_science.cli import bench, check, config, info, plan, plan_moe, plot, profile
from flashmoe_science.cli.environment import build_info, package_version
from flashmoe_science.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, CommandError
from flashmoe_science.errors import FlashMoEError

_DESCRIPTION = """\
Exact attention and mixture of experts for NVIDIA GPUs and CPUs: the command line of FlashMoE.

Every subcommand takes --json and then writes one JSON document to standard output and nothing
else. Without a GPU all of them work on the CPU backend and say so.
"""

_EPILOG = """\
exit codes
  0    done; for check: all seven checks passed; for bench: no row of ours is void
  1    the request failed, a check failed, a row is void or a gate failed; the reason is printed
  2    the command line is wrong
  130  interrupted; bench has kept what it measured

examples
  flashmoe check
  flashmoe plan --batch 1 --seq 4096 --heads 32 --kv-heads 8 --dim 128 --causal
  flashmoe plan --seq 4096 --heads 32 --dim 128 --gpu h200
  flashmoe plan-moe --tokens 4096 --hidden 2048 --inner 768 --experts 128 --top-k 8
  flashmoe bench --suite cpu --json results.json
  flashmoe plot results.json --html report.html
  flashmoe profile --seq 4096 --heads 16 --dim 128 --causal
  cmake -B build -DCMAKE_PREFIX_PATH="$(flashmoe config --cmakedir)"
"""


class _Version(argparse.Action):
    """Prints the versions of the package and the library, and what is built in, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        try:
            build = build_info()
        except CommandError as error:
            parser.exit(EXIT_FAILED, f"flashmoe-science {package_version()}: {error}\n")
        cuda = build["cuda_architectures"]
        print(
            f"flashmoe-science {package_version()}, libflashmoe {build['version']}, "
            f"{f'CUDA {cuda}' if cuda else 'without CUDA'}; kernel families: "
            f"{build['kernel_families'].replace(' ', ', ')}"
        )
        parser.exit(EXIT_OK)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; each subcommand adds its own part."""
    parser = argparse.ArgumentParser(
        prog="flashmoe",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="versions and kernel families, in a line"
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (info, check, plan, plan_moe, bench, plot, profile, config):
        module.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code."""
    command = "flashmoe"
    try:
        try:
            arguments = build_parser().parse_args(argv)
        except SystemExit:  # after --help and --version
            _flush()
            raise
        command = f"flashmoe {arguments.command}"
        arguments.argv = list(sys.argv[1:] if argv is None else argv)  # what a record says
        code = int(arguments.run(arguments))
        _flush()
        return code
    except (CommandError, FlashMoEError) as error:  # both are whole explanations
        _say(f"{command}: {error}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        _say(f"{command}: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `flashmoe info | head`: the reader has what it wanted
        _discard()
        return EXIT_OK
    except OSError as error:
        if error.filename is not None:  # not of the output, which is open
            raise
        _discard()
        _say(f"{command}: the output cannot be written: {error.strerror}")
        return EXIT_FAILED


def _flush() -> None:
    """Python would do it after main, where errors are tracebacks."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _discard() -> None:
    """Lets Python flush at its end what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(sentence: str) -> None:
    if sys.stderr is not None:  # print would take standard output instead
        print(sentence, file=sys.stderr)
