"""Records of `flashmoe bench`: the schema that they keep, and reading one back."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from flashmoe_science.cli.output import CommandError
from flashmoe_science.cli.stats import MOST_SPREAD

SCHEMA = 2
_READABLE = (1, 2)  # a record of schema 1 lacks fields of 2; shared fields mean the same


def is_moe(shape: dict[str, Any]) -> bool:
    """Whether a row's shape is a mixture of experts."""
    return "experts" in shape


def ratio_of(cell: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any] | None:
    """A peer's ratio in a row, None if it has none.

    For a mixture of experts it is the ratio of calls in a CUDA graph if both were captured: a peer
    with many small launches should be beaten in its kernels, not in its host code.
    """
    found = entry.get("against")
    if is_moe(cell["shape"]):
        found = entry.get("graph_against", found)
    ratio: dict[str, Any] | None = found
    return ratio


def launches_of(cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The launches of our call in a row; an older record has one."""
    launches: list[dict[str, Any]] = cell.get("launches") or [cell["launch"]]
    return launches


def withheld_words(number: int) -> str:
    """Why this many ratios have no verdict."""
    spread = f"{MOST_SPREAD * 100:g} %"
    return f"no verdict in {number}: quartiles spread over more than {spread} of a median"


def summary_words(of_peer: dict[str, Any]) -> str:
    """What a record's summary says of a peer."""
    s = of_peer
    parts = []
    if s["rows"]:
        parts = [
            f"geometric mean {s['geometric_mean']:.2f}, from {s['least']:.2f} to {s['most']:.2f}",
            f"faster in {s['faster']}, tied in {s['tie']}, slower in {s['slower']} of {s['rows']}",
        ]
    withheld = s.get("withheld", 0)  # older records have no such field
    return "; ".join([*parts, withheld_words(withheld)] if withheld else parts)


def record_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of current records."""
    file = resources.files("flashmoe_science") / "bench_schema" / "record.json"
    schema: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return schema


def schema_violations(document: dict[str, Any]) -> list[str]:
    """Violations of the schema in `document`, one sentence each; needs the package jsonschema."""
    jsonschema = importlib.import_module("jsonschema")
    errors = jsonschema.Draft202012Validator(record_schema()).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in errors]


def read_record(path: str) -> dict[str, Any]:
    """The record in a file, of schema 1 or 2; raises CommandError if it is none.

    A record of schema 2 is validated if the package jsonschema is installed.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CommandError(f"{path} is not JSON: {error}") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema not in _READABLE or "cells" not in document:
        raise CommandError(
            f"{path} is not a record of flashmoe bench: its schema is {schema}, accepted are "
            f"{' and '.join(map(str, _READABLE))}"
        )
    if schema == SCHEMA and importlib.util.find_spec("jsonschema") is not None:
        violations = schema_violations(document)
        if violations:
            raise CommandError(f"{path} breaks the schema of records: {violations[0][:500]}")
    record: dict[str, Any] = document
    return record
