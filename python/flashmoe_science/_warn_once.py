"""Warnings that are given once in a process, also of calls that are traced. Imports torch."""

from __future__ import annotations

import logging
import threading

import torch

_lock = threading.Lock()
_warned: set[tuple[str, str]] = set()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def warn_once(logger: str, sentence: str) -> None:
    """Warns by the logger of that name, unless it has warned with the same sentence before.

    torch.compile and torch.export run this while they trace, and keep nothing of it in the graph:
    arguments are constants there, hence a logger's name. A size in the sentence becomes a constant
    of the graph too, so what varies from call to call, as lengths do, has no place in it.
    """
    with _lock:
        if (logger, sentence) in _warned:
            return
        _warned.add((logger, sentence))
    logging.getLogger(logger).warning("%s", sentence)


def forget() -> None:
    """Forgets all warnings that were given."""
    with _lock:
        _warned.clear()
