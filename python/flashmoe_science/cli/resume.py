"""`flashmoe bench --resume`: the rows of an earlier record that need not be measured again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashmoe_science.cli.records import read_record
from flashmoe_science.cli.suites import AnyShape, shape_of

_SAME = ("operation", "suite", "kernel", "sampling")


@dataclasses.dataclass
class Kept:
    """Rows of an earlier record that hold for this run.

    Attributes:
        rows: The row of a shape, for those that have one.
        since: Time of the oldest of them, ISO 8601.
    """

    rows: dict[AnyShape, dict[str, Any]]
    since: str = ""

    def describe(self) -> dict[str, Any] | None:
        """What a record says about rows from an earlier run, None if there are none."""
        return {"rows": len(self.rows), "since": self.since} if self.rows else None


def kept_rows(path: str, document: dict[str, Any], shapes: Sequence[AnyShape]) -> Kept:
    """Rows of the record in a file that match what `document`'s run would measure.

    Kernels, suite, device, sampling and torch must be the same, and every peer found now must have
    been there in the same version. Void rows are measured again. Without a file there are none; a
    file that is no record raises CommandError.
    """
    if not Path(path).exists():
        return Kept({})
    earlier = read_record(path)
    if not _comparable(earlier, document):
        return Kept({})
    wanted = {n: p["version"] for n, p in document["peers"].items() if p["status"] == "found"}
    rows = {}
    for cell in earlier["cells"]:
        shape = shape_of(cell["shape"], document["operation"])
        if cell["status"] == "ok" and shape in shapes and _has(cell, wanted):
            rows[shape] = cell
    since = earlier.get("kept", {}).get("since", earlier["date"])
    return Kept(rows, str(since) if rows else "")


def _comparable(earlier: dict[str, Any], document: dict[str, Any]) -> bool:
    def of(record: dict[str, Any]) -> list[Any]:
        torch = record["environment"]["packages"].get("torch")
        return [*(record[key] for key in _SAME), record["device"]["name"], torch]

    kernels = document["source"]["kernels"]
    known = isinstance(kernels, str) and kernels != ""
    return known and earlier["source"].get("kernels") == kernels and of(earlier) == of(document)


def _has(cell: dict[str, Any], wanted: dict[str, str]) -> bool:
    contenders = cell["contenders"]
    return all(
        name in contenders
        and contenders[name]["status"] != "missing"
        and contenders[name].get("version", "") == version
        for name, version in wanted.items()
    )
