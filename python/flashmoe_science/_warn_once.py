"""Warnings given once per process, also for traced calls. Imports torch."""

from __future__ import annotations

import logging
import threading

import torch

_lock = threading.Lock()
_warned: set[tuple[str, str]] = set()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def warn_once(logger: str, sentence: str) -> None:
    """Warns by the logger of that name, unless it has warned with the same sentence before.

    torch.compile and torch.export run this while they trace, and keep nothing of it in the graph.
    Arguments are constants there, hence a logger's name. A size in the sentence becomes a constant
    of the graph, so the sentence must not contain what varies between calls, such as lengths.
    """
    with _lock:
        if (logger, sentence) in _warned:
            return
        _warned.add((logger, sentence))
    logging.getLogger(logger).warning("%s", sentence)


def forget() -> None:
    """Forgets all given warnings."""
    with _lock:
        _warned.clear()
