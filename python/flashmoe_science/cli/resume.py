"""`flashmoe bench --resume`: the rows of an earlier record that need not be measured again."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from flashmoe_science.cli.output import CommandError
from flashmoe_science.cli.records import read_record
from flashmoe_science.cli.suites import AnyShape, shape_of


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


def kept_rows(
    path: str,
    document: dict[str, Any],
    shapes: Sequence[AnyShape],
    wanted: Collection[AnyShape],
) -> Kept:
    """Rows of the record in a file that match what `document`'s run would measure.

    Kernels, suite, device, sampling and torch must be the same, on the CPU threads too. A row is
    kept if every peer found now was there in the same version. Of the `wanted` shapes, void rows
    and those beside other peers are measured again.

    The run replaces the file. So where it would lose a measured row without measuring its shape
    anew, and where the record is of something else, this raises CommandError, as for a file that
    is no record. Without a file, and from a record without rows, there are none.
    """
    if not Path(path).exists():
        return Kept({})
    earlier = read_record(path)
    if not earlier["cells"]:
        return Kept({})
    if reason := _difference(earlier, document):
        raise _refusal(path, reason)
    found = {n: p["version"] for n, p in document["peers"].items() if p["status"] == "found"}
    rows, lost = {}, []
    for cell in earlier["cells"]:
        shape = shape_of(cell["shape"], document["operation"])
        void = cell["status"] != "ok"
        if shape in shapes and (shape not in wanted if void else _has(cell, found)):
            rows[shape] = cell
        elif shape not in wanted and not void:
            lost.append(shape)
    if lost:
        raise _refusal(
            path,
            f"this run would drop {len(lost)} of its rows, such as {lost[0]}: they were measured "
            "beside other peers, or are of shapes that this run leaves out, and are not measured "
            "anew",
        )
    since = earlier.get("kept", {}).get("since", earlier["date"])
    return Kept(rows, str(since) if rows else "")


def _refusal(path: str, reason: str) -> CommandError:
    return CommandError(
        f"--resume: {path} cannot be resumed: {reason}; leave --resume out to begin anew in its "
        "place, or give --json another FILE"
    )


def _difference(earlier: dict[str, Any], document: dict[str, Any]) -> str:
    """Why no row of a record is one of this run, "" if they may be."""
    kernels, theirs = (record["source"].get("kernels") for record in (document, earlier))
    if not (isinstance(kernels, str) and kernels):
        return "the kernels are not known here; run it in a checkout, which has their sources"
    if not (isinstance(theirs, str) and theirs):
        return "it does not say which kernels it measured"
    now, before = _compared(document), _compared(earlier)
    for name in now | before:
        if now.get(name) != before.get(name):
            return f"its {name} is {before.get(name)}, and here it is {now.get(name)}"
    return ""


def _compared(record: dict[str, Any]) -> dict[str, Any]:
    """What two records must have the same for their rows to stand in one, by its place."""
    fields = {name: record.get(name) for name in ("operation", "suite", "kernel")}
    fields["device.name"] = record["device"]["name"]
    if record["device"]["device"] == "cpu":
        fields["environment.threads"] = record["environment"].get("threads")
    fields["environment.packages.torch"] = record["environment"]["packages"].get("torch")
    fields |= {f"sampling.{name}": value for name, value in record.get("sampling", {}).items()}
    fields["source.kernels"] = record["source"]["kernels"]
    return fields


def _has(cell: dict[str, Any], found: dict[str, str]) -> bool:
    contenders = cell["contenders"]
    return all(
        name in contenders
        and contenders[name]["status"] != "missing"
        and contenders[name].get("version", "") == version
        for name, version in found.items()
    )
