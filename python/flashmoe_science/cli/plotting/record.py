"""A record of `flashmoe bench`, read back, and the words that describe it everywhere."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
from pathlib import Path
from typing import Any

from flashmoe_science.cli import records
from flashmoe_science.cli.measure import OURS
from flashmoe_science.cli.moe_shapes import MOE_BACKWARD, MOE_TRAINING, skew_text
from flashmoe_science.cli.records import is_moe
from flashmoe_science.cli.shapes import BACKWARD, TRAINING, logits_text, window_text
from flashmoe_science.cli.stats import summary


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
        """Text in its pictures, so that a changed record is noticed."""
        return f"{self.path.name} sha256:{self.digest}"


def read_record(path: Path) -> Record:
    """Reads one file; raises CommandError if it is not a record of `flashmoe bench`."""
    document = records.read_record(str(path))
    return Record(path, hashlib.sha256(path.read_bytes()).hexdigest(), document)


# ---- what was measured -----------------------------------------------------------------------


def contenders(cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The timed contenders of a row, by name; none for a void row."""
    found = cell.get("contenders", {}) if cell["status"] == "ok" else {}
    return {name: entry for name, entry in found.items() if entry["status"] == "ok"}


def timed_names(cells: list[dict[str, Any]]) -> list[str]:
    """All contenders timed in some row, ours first."""
    names = dict.fromkeys(name for cell in cells for name in contenders(cell))
    return sorted(names, key=lambda name: name != OURS)


def peer_names(cells: list[dict[str, Any]]) -> list[str]:
    """The peers with a ratio in some row, in the order they appear."""
    found = [n for c in cells for n, e in contenders(c).items() if "against" in e]
    return list(dict.fromkeys(found))


def against(cell: dict[str, Any], peer: str) -> dict[str, Any] | None:
    """The ratio of a peer's time over ours in a row, None without one."""
    return records.ratio_of(cell, contenders(cell).get(peer, {}))


def times(cell: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """Median and quartiles of the clock that counts, and TFLOP/s by it.

    For a mixture of experts that is the clock of calls in a CUDA graph, as in records.ratio_of.
    """
    if not is_moe(cell["shape"]) or "graph_samples_s" not in entry:
        return entry
    found = summary(entry["graph_samples_s"])
    return found | {"tflops": cell["flops"] / found["median_s"] * 1e-12}


PanelKey = tuple[str, str, int, int] | tuple[str, str, str]


def panel_key(shape: dict[str, Any]) -> PanelKey:
    """What the rows of one line of a grid share: element type, mask and head dimensions; or element
    type, routing and layer."""
    if is_moe(shape):
        return shape["dtype"], routing_name(shape), layer_name(shape)
    return shape["dtype"], mask_name(shape), shape["dim"], shape["dim_v"]


def place(shape: dict[str, Any]) -> int:
    """The place of a row on its line: sequence length, or tokens."""
    length: int = shape["tokens"] if is_moe(shape) else shape["seq_q"]
    return length


def place_name(cells: list[dict[str, Any]]) -> tuple[str, str]:
    """What the places are, as a letter and in words."""
    moe = any(is_moe(c["shape"]) for c in cells)
    return ("T", "tokens") if moe else ("S", "sequence length")


def is_grid(cells: list[dict[str, Any]]) -> bool:
    """Whether the rows form lines over the sequence length, or over tokens: at least two places,
    each with at most one row. Lines over tokens have all places."""
    places = [(panel_key(c["shape"]), place(c["shape"])) for c in cells]
    lengths = {length for _, length in places}
    if any(is_moe(c["shape"]) for c in cells):
        regular = len(places) == len(lengths) * len({key for key, _ in places})
    else:
        regular = all(c["shape"]["seq_q"] == c["shape"]["seq_k"] for c in cells)
    return regular and len(lengths) > 1 and len(set(places)) == len(places)


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


def routing_name(shape: dict[str, Any]) -> str:
    """How tokens choose experts: "uniform", or such as "zipf 1"."""
    return skew_text(shape["skew"]).strip() or "uniform"


def layer_name(shape: dict[str, Any]) -> str:
    """The model, or without one text such as "H2048 I768 E128 K8"."""
    extents = {"H": "hidden", "I": "inner", "E": "experts", "K": "top_k"}
    words = " ".join(f"{name}{shape[field]}" for name, field in extents.items())
    return shape.get("model") or words


def _moe_extents(shape: dict[str, Any]) -> dict[str, str]:
    names = {"T": "tokens", "H": "hidden", "I": "inner", "E": "experts", "K": "top_k"}
    fields = {"dtype": shape["dtype"]}
    if shape.get("model"):
        fields["model"] = shape["model"]
    fields |= {name: str(shape[field]) for name, field in names.items()}
    return fields | {"routing": routing_name(shape)}


def extents(shape: dict[str, Any]) -> dict[str, str]:
    """A shape's fields as tables name them; a pair that differs has a slash."""
    if is_moe(shape):
        return _moe_extents(shape)

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


def panel_name(key: PanelKey, dtypes: set[str]) -> str:
    """Text such as "D 64 causal" or "olmoe zipf 1", preceded by the element type if there are
    several."""
    if len(key) == 3:
        dtype, mask, dims = key
    else:
        dtype, mask, dim, dim_v = key
        dims = f"D {dim}" if dim == dim_v else f"D {dim}/{dim_v}"
    return f"{f'{dtype} ' if len(dtypes) > 1 else ''}{dims} {mask}"


def machine(document: dict[str, Any]) -> str:
    device = str(document["device"]["name"])
    if on_cpu(document):
        device += f" (CPU, {document['environment']['threads']} threads)"
    return device


def commit(document: dict[str, Any]) -> str:
    """The first twelve digits of its commit, with the mark of changes."""
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
        words.append("not every shape was measured")
    return ", ".join(words)


# ---- how to repeat it ------------------------------------------------------------------------


def shape_flags(shape: dict[str, Any]) -> list[str]:
    """The flags of `flashmoe bench` that give this shape."""
    if is_moe(shape):
        fields = ("tokens", "hidden", "inner", "experts", "top_k")
        words = [w for f in fields for w in (f"--{f.replace('_', '-')}", shape[f])]
        words += ["--skew", f"{shape['skew']:g}"] if shape["skew"] else []
        return [str(word) for word in [*words, "--dtype", shape["dtype"]]]
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
    of_pass = {operation: ["--backward"] for operation in (BACKWARD, MOE_BACKWARD)}
    of_pass |= {operation: ["--training"] for operation in (TRAINING, MOE_TRAINING)}
    words = ["flashmoe", "bench", *shape_flags(cell["shape"])]
    words += of_pass.get(document.get("operation", ""), [])
    sustained = document["sampling"].get("sustained") if "sampling" in document else None
    words += ["--sustained", f"{sustained:g}"] if sustained else []
    return shlex.join([*words, *_device_flags(document)])


def command(document: dict[str, Any]) -> str:
    """The command that measures all of it again; "" if the record does not say."""
    if "command" in document:
        return shlex.join(document["command"])
    if document.get("suite") is not None:  # records before schema 2 name their suite only
        words = ["flashmoe", "bench", "--suite", document["suite"], *_device_flags(document)]
        return shlex.join(words)
    return row_command(document, document["cells"][0]) if document["cells"] else ""
