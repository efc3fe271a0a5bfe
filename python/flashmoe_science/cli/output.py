"""The output of subcommands: tables for people, one JSON document for programs."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


class CommandError(Exception):
    """A request that cannot be served; the message is the whole explanation."""


def positive(kind: type[Any]) -> Callable[[str], Any]:
    """A type for argparse: a number above zero."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not (value > 0 and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"got {text}, accepted is a number above 0")
        return value

    parse.__name__ = kind.__name__  # argparse names it in "invalid int value"
    return parse


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: a whole number from `least` up."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"got {text}, accepted are {least} and more")
        return value

    parse.__name__ = "int"
    return parse


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write one JSON document to FILE, or with no FILE to standard output and nothing else",
    )


def _strict(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value


def write_json(document: dict[str, Any], destination: str) -> None:
    """Writes `document` to standard output ("-"), to a pipe or a device or, atomically, to a
    file."""
    text = json.dumps(_strict(document), indent=1, allow_nan=False, default=str) + "\n"
    if destination == "-":
        _standard_output().write(text)
        sys.stdout.flush()
        return
    with _explained(destination):
        if is_stream(destination):
            with open(destination, "a", encoding="utf-8") as stream:  # whatever it has, stays
                stream.write(text)
            return
        with _partial(destination) as (partial, path):
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)


def check_writable(destination: str) -> None:
    """Raises CommandError if `write_json` could not write: better before hours of work than
    after."""
    if destination == "-":
        _standard_output()
        return
    with _explained(destination):
        if not is_stream(destination):
            with _partial(destination):
                pass
        elif not os.access(destination, os.W_OK):  # to open a pipe would wait for its reader
            raise PermissionError("permission denied")


# Names of files that are open already, which may be regular ones.
_OPEN_FILES = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")


def is_stream(destination: str) -> bool:
    """Whether `write_json` adds to what is there, and does not replace a file: standard output,
    pipes and devices."""
    if destination == "-" or os.path.abspath(destination).startswith(_OPEN_FILES):
        return True
    kinds = (os.path.isfile, os.path.isdir)
    return os.path.exists(destination) and not any(kind(destination) for kind in kinds)


def _standard_output() -> Any:
    if sys.stdout is None:  # Python's, when it was started with that closed
        raise CommandError("--json: standard output is closed; give a FILE")
    return sys.stdout


@contextlib.contextmanager
def _explained(destination: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"--json: {destination} cannot be written: {error}") from error


@contextlib.contextmanager
def _partial(destination: str) -> Iterator[tuple[Path, Path]]:
    """A new file next to the one to replace, which a link may lead to, in an existing folder; and
    that one. The new file is gone afterwards."""
    path = Path(os.path.realpath(destination))
    if path.is_dir():
        raise IsADirectoryError("it is a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    partial.touch(exist_ok=False)
    try:
        yield partial, path
    finally:
        partial.unlink(missing_ok=True)


def _terminal(stream: Any) -> Any:
    """rich's console on the stream; None if that is closed or no terminal, or without rich."""
    if stream is None or not stream.isatty() or importlib.util.find_spec("rich") is None:
        return None
    console = importlib.import_module("rich.console")
    return console.Console(file=stream, highlight=False, soft_wrap=True)


class Output:
    """Prints lines and tables: with rich on a terminal that has it, else as plain text."""

    def __init__(self, silent: bool = False) -> None:
        self.silent = silent
        self._console = None if silent else _terminal(sys.stdout)

    def line(self, text: str = "", style: str = "") -> None:
        if self.silent:
            return
        if self._console is not None:
            self._console.print(text, style=style or None, markup=False)
        else:
            print(text, flush=True)

    @contextlib.contextmanager
    def progress(self, total: int) -> Iterator[Callable[[int, str], None]]:
        """Gives a function to call with how many of `total` are done, and what is next. It draws a
        bar on a terminal: standard error's if standard output is none. Without a terminal or rich,
        it writes a line to standard error for each item that begins, so that a log tells what took
        long or was killed.
        """
        console = self._console or _terminal(sys.stderr)
        if total < 2 or (console is None and sys.stderr is None):
            yield lambda done, text: None
            return
        if console is None:
            yield lambda done, text: print(f"{done}/{total} {text}", file=sys.stderr, flush=True)
            return
        rich = importlib.import_module("rich.progress")
        columns = (
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TimeElapsedColumn(),
            rich.TextColumn("{task.description}", markup=False),
        )
        # Draws only when told to: a redrawing thread would disturb the timing.
        with rich.Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda done, text: bar.update(
                task, completed=done, description=text, refresh=True
            )

    def heading(self, text: str) -> None:
        self.line(text, style="bold")

    def pairs(self, rows: Sequence[tuple[str, str]], indent: int = 2) -> None:
        """Lines of a name and its value, the values aligned."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            first, *rest = value.splitlines() or [""]
            self.line(f"{' ' * indent}{name:<{width}}  {first}".rstrip())
            for more in rest:
                self.line(f"{' ' * (indent + width + 2)}{more}")

    def verdict(self, passed: bool, name: str, text: str) -> None:
        """One line that begins with ok or FAIL."""
        mark = "ok  " if passed else "FAIL"
        self.line(f"{mark}  {name:<12}{text}", style="" if passed else "bold red")


class Table:
    """Prints rows as they come, under headers of fixed width, so that a long run shows its
    progress."""

    def __init__(self, output: Output, headers: Sequence[str], widths: Sequence[int]) -> None:
        self._output = output
        self._widths = list(widths)
        output.line(self._format(headers), style="bold")

    def _format(self, cells: Sequence[str]) -> str:
        first = f"{cells[0]:<{self._widths[0]}}"
        rest = [f"{cell:>{width}}" for cell, width in zip(cells[1:], self._widths[1:], strict=True)]
        return "  ".join([first, *rest]).rstrip()

    def row(self, cells: Sequence[str], style: str = "") -> None:
        self._output.line(self._format(cells), style=style)
