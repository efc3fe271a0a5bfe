"""The suites: named lists of shapes of one operation, files in flashmoe_science/bench_suites."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from flashmoe_science.cli.moe_shapes import (
    MOE,
    MOE_BACKWARD,
    MOE_SHAPES,
    MOE_TRAINING,
    MoeShape,
)
from flashmoe_science.cli.output import CommandError
from flashmoe_science.cli.shapes import ATTENTION_SHAPES, BACKWARD, FORWARD, TRAINING, Shape

__all__ = ["ATTENTION", "BACKWARD", "MOE", "MOE_BACKWARD", "MOE_TRAINING", "TRAINING"]

ATTENTION = FORWARD
AnyShape = Shape | MoeShape


@dataclasses.dataclass(frozen=True)
class Suite:
    """A named list of shapes, one of the files in flashmoe_science/bench_suites."""

    name: str
    title: str
    device: str  # "cuda", "cpu" or "any"
    shapes: tuple[AnyShape, ...]
    operation: str = ATTENTION
    sustained: float = 0.0  # seconds of calls without a pause, for each contender


def operation_of(shape: AnyShape) -> str:
    """The record's name of a shape's operation."""
    return shape.operation


def shape_of(fields: Mapping[str, Any], operation: str = ATTENTION) -> AnyShape:
    """The shape of a row in a record of that operation."""
    if "experts" in fields:  # files older than backwards may not name their operation
        return MOE_SHAPES.get(operation, MoeShape)(**fields)
    return ATTENTION_SHAPES[operation](**fields)


def _suite_files() -> dict[str, Any]:
    try:
        folder = resources.files("flashmoe_science") / "bench_suites"
        files = [f for f in folder.iterdir() if f.name.endswith(".json")]
    except OSError:  # a broken installation must still be able to explain itself
        return {}
    return dict(sorted((f.name.removesuffix(".json"), f) for f in files))


def suite_names() -> list[str]:
    return list(_suite_files())


def _expand(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Expands an entry with list fields into one entry per combination."""
    expanded: list[dict[str, Any]] = [{}]
    for key, value in entry.items():
        values = value if isinstance(value, list) else [value]
        expanded = [{**partial, key: item} for partial in expanded for item in values]
    return expanded


def _attention_shape(entry: dict[str, Any], operation: str) -> Shape:
    """Derives fields that an entry leaves out: tokens / seq = batch, width / dim = heads."""
    seq_k: int = entry["seq_k"] if "seq_k" in entry else entry["seq"]
    seq_q: int = entry["seq_q"] if "seq_q" in entry else entry["seq"]
    dim = entry["dim"]
    batch = entry["batch"] if "batch" in entry else entry["tokens"] // seq_q
    heads = entry["heads"] if "heads" in entry else entry["width"] // dim
    return ATTENTION_SHAPES[operation](
        batch=batch,
        seq_q=seq_q,
        seq_k=seq_k,
        heads_q=heads,
        heads_kv=entry.get("kv_heads", heads),
        dim=dim,
        dim_v=entry.get("dim_v", dim),
        dtype=entry["dtype"],
        causal=entry["causal"],
        window_left=entry.get("window_left"),
        window_right=entry.get("window_right"),
        softcap=entry.get("softcap"),
    )


def load_suite(name: str) -> Suite:
    files = _suite_files()
    if name not in files:
        raise CommandError(f"--suite: got {name}, accepted are {', '.join(files)}")
    document = json.loads(files[name].read_text(encoding="utf-8"))
    operation = document.get("operation", ATTENTION)
    groups = document["shapes"]
    if isinstance(groups, str):  # those of another suite
        groups = json.loads(files[groups].read_text(encoding="utf-8"))["shapes"]
    entries = [entry for group in groups for entry in _expand(group)]
    shapes: tuple[AnyShape, ...]
    if operation in MOE_SHAPES:
        shapes = tuple(MOE_SHAPES[operation](**entry) for entry in entries)
    else:
        shapes = tuple(_attention_shape(entry, operation) for entry in entries)
    sustained = document.get("sustained", 0.0)
    return Suite(name, document["title"], document["device"], shapes, operation, sustained)
