"""A record of `flashmoe bench` as read back, and the words that describe it everywhere."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
from pathlib import Path
from typing import Any

from flashmoe_science.cli import records
from flashmoe_science.cli.measure import OURS
from flashmoe_science.cli.shapes import logits_text, window_text


@dataclasses.dataclass(frozen=True)
class Record:
    """One recorded run: its file, the SHA-256 of the file's bytes, and what it holds."""

    path: Path
    digest: str
    document: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def cells(self) -> list[dict[str, Any]]:
        cells: list[dict[str, Any]] = self.document["cells"]
        return cells

    @property
    def source(self) -> str:
        """What a picture made from it carries, so that another record is noticed."""
        return f"{self.path.name} sha256:{self.digest}"


def read_record(path: Path) -> Record:
    """Reads one file; raises CommandError where it is not a record of `flashmoe bench`."""
    document = records.read_record(str(path))
    return Record(path, hashlib.sha256(path.read_bytes()).hexdigest(), document)


# ---- what was measured -----------------------------------------------------------------------


def contenders(cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Those of a row that were timed, by name; of a void row none."""
    found = cell.get("contenders", {}) if cell["status"] == "ok" else {}
    return {name: entry for name, entry in found.items() if entry["status"] == "ok"}


def timed_names(cells: list[dict[str, Any]]) -> list[str]:
    """Everyone who was timed in some row, ours first."""
    names = dict.fromkeys(name for cell in cells for name in contenders(cell))
    return sorted(names, key=lambda name: name != OURS)


def peer_names(cells: list[dict[str, Any]]) -> list[str]:
    """The peers with a ratio in some row, in the order they appear."""
    found = [n for c in cells for n, e in contenders(c).items() if "against" in e]
    return list(dict.fromkeys(found))


def against(cell: dict[str, Any], peer: str) -> dict[str, Any] | None:
    """The ratio of a peer's time over ours in a row, None where there is none."""
    return contenders(cell).get(peer, {}).get("against")


def panel_key(shape: dict[str, Any]) -> tuple[str, str, int, int]:
    """What the rows of one line of a grid share: element type, mask and head dimensions."""
    return shape["dtype"], mask_name(shape), shape["dim"], shape["dim_v"]


def is_grid(cells: list[dict[str, Any]]) -> bool:
    """Whether the rows are lines over the sequence length: at least two lengths, none twice."""
    places = [(panel_key(c["shape"]), c["shape"]["seq_q"]) for c in cells]
    square = all(c["shape"]["seq_q"] == c["shape"]["seq_k"] for c in cells)
    lengths = {length for _, length in places}
    return square and len(lengths) > 1 and len(set(places)) == len(places)


# ---- in words --------------------------------------------------------------------------------


def on_cpu(document: dict[str, Any]) -> bool:
    return bool(document["device"]["device"] == "cpu")


def unit(document: dict[str, Any]) -> tuple[str, float]:
    """The unit of speed, and how many of it are one TFLOP/s."""
    return ("GFLOP/s", 1e3) if on_cpu(document) else ("TFLOP/s", 1.0)


def number(value: float) -> str:
    """Whole from 10 up, with two digits below: 421, 84, 0.037."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"


def _window(shape: dict[str, Any]) -> tuple[int | None, int | None] | None:
    """A row's window; records from before there were windows have none."""
    ends = shape.get("window_left"), shape.get("window_right")
    return None if ends == (None, None) else ends


def mask_name(shape: dict[str, Any]) -> str:
    """Such as "causal window 1023,none softcap 50"."""
    names = {"none": "full", "bottom_right": "causal", "top_left": "causal (top left)"}
    return names[shape["causal"]] + logits_text(_window(shape), shape.get("softcap"))


def extents(shape: dict[str, Any]) -> dict[str, str]:
    """A shape's fields as tables name them; a pair that differs has a slash."""

    def pair(first: str, second: str) -> str:
        a, b = shape[first], shape[second]
        return f"{a}" if a == b else f"{a}/{b}"

    return {
        "dtype": shape["dtype"],
        "B": f"{shape['batch']}",
        "S": pair("seq_q", "seq_k"),
        "H": pair("heads_q", "heads_kv"),
        "D": pair("dim", "dim_v"),
        "mask": mask_name(shape),
    }


def extents_text(fields: dict[str, str]) -> str:
    """Such as "bf16 B4 S4096 H32/8 D128 causal"."""
    return " ".join(v if len(name) > 1 else f"{name}{v}" for name, v in fields.items())


def panel_name(key: tuple[str, str, int, int], dtypes: set[str]) -> str:
    """Such as "D 64 causal", with the element type before it where there are several."""
    dtype, mask, dim, dim_v = key
    dims = f"D {dim}" if dim == dim_v else f"D {dim}/{dim_v}"
    return f"{f'{dtype} ' if len(dtypes) > 1 else ''}{dims} {mask}"


def machine(document: dict[str, Any]) -> str:
    device = str(document["device"]["name"])
    if on_cpu(document):
        device += f" (CPU, {document['environment']['threads']} threads)"
    return device


def commit(document: dict[str, Any]) -> str:
    """The first twelve digits of the commit it was measured at, with what marks it changed."""
    text = document["commit"]
    if not isinstance(text, str) or not text:  # the probe failed, or there was no history
        return "unknown"
    digits, plus, changes = text.partition("+")
    return digits[:12] + plus + changes


def versions(document: dict[str, Any]) -> str:
    packages = document["environment"]["packages"]
    return f"torch {packages['torch']}" if "torch" in packages else ""


def provenance(document: dict[str, Any], outdated: bool = False) -> str:
    """Machine, day, commit and versions in one line, and whether kernels have changed since."""
    at = f"commit {commit(document)}"
    if outdated:
        at = f"measured at {commit(document)} (the kernels have changed since)"
    words = [machine(document), document["date"][:10], at]
    words += filter(None, [versions(document)])
    if not document.get("complete", True):
        words.append("interrupted: not every shape was measured")
    return ", ".join(words)


# ---- how to repeat it ------------------------------------------------------------------------


def shape_flags(shape: dict[str, Any]) -> list[str]:
    """The flags of `flashmoe bench` that give this shape."""
    words = ["--batch", shape["batch"]]
    if shape["seq_q"] == shape["seq_k"]:
        words += ["--seq", shape["seq_q"]]
    else:
        words += ["--seq-q", shape["seq_q"], "--seq-k", shape["seq_k"]]
    words += ["--heads", shape["heads_q"]]
    if shape["heads_kv"] != shape["heads_q"]:
        words += ["--kv-heads", shape["heads_kv"]]
    words += ["--dim", shape["dim"]]
    if shape["dim_v"] != shape["dim"]:
        words += ["--dim-v", shape["dim_v"]]
    if shape["causal"] != "none":
        words += ["--causal"] if shape["causal"] == "bottom_right" else ["--causal", "top_left"]
    window = _window(shape)
    words += [] if window is None else ["--window", window_text(window)]
    words += [] if shape.get("softcap") is None else ["--softcap", f"{shape['softcap']:g}"]
    return [str(word) for word in [*words, "--dtype", shape["dtype"]]]


def _device_flags(document: dict[str, Any]) -> list[str]:
    return ["--device", "cpu" if on_cpu(document) else "cuda"]


def row_command(document: dict[str, Any], cell: dict[str, Any]) -> str:
    """The command that measures this one row again."""
    words = ["flashmoe", "bench", *shape_flags(cell["shape"]), *_device_flags(document)]
    return shlex.join(words)


def command(document: dict[str, Any]) -> str:
    """The command that measures all of it again; "" where the record does not say."""
    if "command" in document:
        return shlex.join(document["command"])
    if document.get("suite") is not None:  # records before schema 2 name their suite only
        words = ["flashmoe", "bench", "--suite", document["suite"], *_device_flags(document)]
        return shlex.join(words)
    return row_command(document, document["cells"][0]) if document["cells"] else ""
