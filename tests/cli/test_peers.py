"""Peers are found without being imported, prepared on our memory, and say why when they cannot."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from flashmoe_science.cli import main, peers
from flashmoe_science.cli.arrays import Arrays, choose_arrays
from flashmoe_science.cli.measure import OURS, make_inputs
from flashmoe_science.cli.peers import flash_attention, flashinfer, jax_cudnn, torch_sdpa
from flashmoe_science.cli.peers.peer import Peer, Refused, is_causal, is_installed
from flashmoe_science.cli.reference import judge
from flashmoe_science.cli.shapes import Shape
from flashmoe_science.cli.timing import Contender

SMALL = ["--seq", "32", "--heads", "2", "--dim", "64", "--device", "cpu", "--seconds", "0.01"]

# What the packages of the FlashAttention family promise, as plain mathematics.
ATTENTION = """
import torch

def attend(q, k, v, causal, window=(-1, -1), softcap=0.0):
    q, k, v = (x.swapaxes(1, 2).float() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.swapaxes(2, 3) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = scores.shape[-2:]
    ahead = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
    left, right = (-1 if end is None else end for end in window)
    right = 0 if causal else right
    if right >= 0:
        scores.masked_fill_(ahead > right, -torch.inf)
    if left >= 0:
        scores.masked_fill_(ahead < -left, -torch.inf)
    return (scores.softmax(-1) @ v).swapaxes(1, 2)
"""


class Packages:
    """A folder on the path in which tests put packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, path: str, text: str = "") -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def peer(self, name: str, module: str, text: str) -> None:
        """A distribution that offers a peer of that name by the entry point group."""
        self.write(f"{module}.py", text)
        self.write(f"{module}-1.2.dist-info/METADATA", f"Name: {module}\nVersion: 1.2\n")
        entry = f"[{peers.GROUP}]\n{name} = {module}:PEER\n"
        self.write(f"{module}-1.2.dist-info/entry_points.txt", entry)


@pytest.fixture
def packages(modules: Path) -> Packages:
    return Packages(modules)


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", *SMALL, *options, "--json"])
    return code, json.loads(capsys.readouterr().out)


PLUGIN = """
import functools
from flashmoe_science.cli.peers.peer import Peer, Refused
from flashmoe_science.cli.timing import Contender

def prepare(arrays, shape, inputs):
    if shape.causal != "none":
        raise Refused("only full attention")
    q, k, v = (x.swapaxes(1, 2) for x in inputs)
    sdpa = functools.partial(arrays.xp.nn.functional.scaled_dot_product_attention, q, k, v)
    return Contender("", sdpa, output=lambda out: out.swapaxes(1, 2))

PEER = Peer("any", ("cpu",), ("{module}",), "mine", "pip install mine", prepare)
"""


def test_another_package_adds_a_peer(
    packages: Packages, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    packages.peer("their-attention", "mine", PLUGIN.replace("{module}", "mine"))
    assert "their-attention" in peers.peer_names()
    assert "mine" not in sys.modules  # its name is known before it is imported
    code, document = run(capsys, "--peer", "their-attention")
    assert code == 0
    assert document["peers"] == {"their-attention": {"status": "found", "version": "1.2"}}
    entry = document["cells"][0]["contenders"]["their-attention"]
    assert (entry["status"], entry["version"]) == ("ok", "1.2")
    assert entry["against"]["low"] <= entry["against"]["ratio"] <= entry["against"]["high"]
    code, document = run(capsys, "--peer", "their-attention", "--causal")
    refusal = document["cells"][0]["contenders"]["their-attention"]
    assert refusal == {"status": "refused", "reason": "only full attention", "version": "1.2"}


def test_a_missing_peer_is_said_once_and_in_every_row_when_asked_for(
    packages: Packages, capsys: pytest.CaptureFixture[str]
) -> None:
    packages.peer("absent", "mine", PLUGIN.replace("{module}", "not_here"))
    _, document = run(capsys)
    reason = "not installed: pip install mine"
    assert document["peers"]["absent"] == {"status": "missing", "reason": reason}
    assert "absent" not in document["cells"][0]["contenders"]
    assert main(["bench", *SMALL]) == 0
    assert capsys.readouterr().out.count("absent") == 1
    _, document = run(capsys, "--peer", "absent")
    assert document["cells"][0]["contenders"]["absent"] == {"status": "missing", "reason": reason}


@pytest.mark.parametrize(
    ("text", "reason"),
    [("raise OSError('no driver')", "OSError: no driver"), ("PEER = 3", "is a int, not a Peer")],
)
def test_a_package_that_does_not_load_is_missing(
    packages: Packages, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    packages.peer("broken", "mine", text)
    code, document = run(capsys)
    assert code == 0
    assert document["peers"]["broken"]["status"] == "missing"
    assert reason in document["peers"]["broken"]["reason"]


def test_an_output_of_another_shape_is_refused(
    packages: Packages, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PLUGIN.replace("{module}", "mine").replace("out.swapaxes(1, 2)", "out")
    packages.peer("sloppy", "mine", text)
    code, document = run(capsys, "--peer", "sloppy")
    assert code == 0
    entry = document["cells"][0]["contenders"]["sloppy"]
    assert entry["status"] == "refused"
    assert entry["reason"] == "its output is (1, 2, 32, 64), and not (1, 32, 2, 64)"


def test_a_peer_that_raises_is_refused(
    packages: Packages, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = "import warnings; warnings.warn('too new'); assert False, 'sm_90 only'\n    if shape"
    text = PLUGIN.replace("{module}", "mine").replace("if shape", failing)
    packages.peer("picky", "mine", text)
    code, document = run(capsys, "--peer", "picky")
    assert code == 0
    entry = document["cells"][0]["contenders"]["picky"]
    assert (entry["status"], entry["reason"]) == ("refused", "sm_90 only; too new")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fastest", "--peer: got fastest, accepted are torch-sdpa, torch-flash"),
        ("torch-flash", "--peer: torch-flash runs on cuda, not on cpu"),
    ],
)
def test_a_peer_that_cannot_be_is_explained(
    name: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *SMALL, "--peer", name]) == 1
    assert sentence in capsys.readouterr().err


def test_looking_for_a_package_does_not_import_it(packages: Packages) -> None:
    packages.write("heavy/__init__.py", "raise SystemExit('imported')")
    packages.write("heavy/part.py")
    packages.write("heavy/folder/__init__.py")
    assert [is_installed(m) for m in ("heavy", "heavy.part", "heavy.folder")] == [True] * 3
    assert not is_installed("heavy.other")
    assert not is_installed("lighter.part")


def test_peers_of_a_gpu_are_known_without_one() -> None:
    names = ["torch-flash", "torch-cudnn", "torch-efficient", "torch-math", "fa2", "fa3", "fa4",
             "flashinfer", "jax-cudnn"]  # fmt: skip
    assert set(names) <= set(peers.peer_names())
    assert all(p.devices == ("cuda",) for p in peers._BUILT_IN if p.name in names)


def prepared(peer: Peer, shape: Shape) -> str:
    """Prepares the peer on the CPU and holds its output to the accuracy rule."""
    arrays = choose_arrays("cpu")
    inputs = make_inputs(arrays, shape)
    _, output = peer.contender(arrays, shape, inputs)
    assert tuple(output.shape) == (shape.batch, shape.seq_q, shape.heads_q, shape.dim_v)
    return judge(arrays, shape, inputs, {"peer": output})["peer"].reason


SHAPES = [
    Shape(2, 40, 40, 4, 2, 64, 64, "fp32"),
    Shape(2, 40, 40, 4, 2, 64, 64, "fp32", "top_left"),
    Shape(2, 24, 40, 4, 2, 64, 64, "fp32", "bottom_right"),
    Shape(3, 1, 48, 4, 2, 64, 64, "fp32"),
    Shape(3, 1, 48, 4, 4, 64, 64, "fp32", "bottom_right"),
    Shape(2, 40, 40, 4, 2, 64, 64, "fp32", "bottom_right", window_left=9),
    Shape(2, 40, 40, 4, 2, 64, 64, "fp32", softcap=0.8),
    Shape(2, 40, 40, 4, 2, 64, 64, "fp32", window_left=9, softcap=0.8),
    Shape(3, 1, 48, 4, 2, 64, 64, "fp32", "bottom_right", window_left=9, softcap=0.8),
]
WINDOWS = [
    Shape(2, 40, 40, 4, 2, 64, 64, "fp32", window_left=9, window_right=3),
    Shape(2, 40, 40, 4, 2, 64, 64, "fp32", window_right=3),
]


@pytest.mark.parametrize(
    "shape",
    [
        dataclasses.replace(s, dtype=dtype, dim_v=32)
        for s in SHAPES
        for dtype in ("fp32", "bf16")
        if s.window is None and s.softcap is None and s.causal != "bottom_right"
    ],
    ids=str,
)
def test_torchs_attention_works_on_our_memory(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On views of it: what is copied or converted before is not the peer's time."""
    torch = pytest.importorskip("torch")
    arrays = choose_arrays("cpu")
    inputs = make_inputs(arrays, shape)
    seen: list[Any] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watched(*tensors: Any, **options: Any) -> Any:
        seen.append((tensors, options))
        return real(*tensors, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    _, output = torch_sdpa.PEERS[0].contender(arrays, shape, inputs)
    assert judge(arrays, shape, inputs, {"peer": output})["peer"].reason == ""
    [(tensors, options)] = seen
    for given, ours in zip(tensors, inputs, strict=True):
        assert (given.data_ptr(), given.dtype) == (ours.data_ptr(), ours.dtype)
        assert given.swapaxes(1, 2).stride() == ours.stride()
    assert options.get("scale") is None


def test_torchs_mask_is_aligned_top_left() -> None:
    pytest.importorskip("torch")
    shape = Shape(1, 4, 8, 2, 2, 64, 64, "fp32", "bottom_right")
    with pytest.raises(Refused, match="torch's causal mask is aligned top left"):
        prepared(torch_sdpa.PEERS[0], shape)
    assert prepared(torch_sdpa.PEERS[0], dataclasses.replace(shape, seq_q=1)) == ""


def test_one_query_is_masked_where_it_does_not_see_every_key() -> None:
    one = Shape(1, 1, 8, 2, 2, 64, 64, "fp32", "top_left")
    with pytest.raises(Refused, match="aligned bottom right; this mask is top left"):
        is_causal(one, "bottom_right", "who")
    assert is_causal(one, "top_left", "who")
    assert not is_causal(dataclasses.replace(one, causal="bottom_right"), "bottom_right", "who")


def test_a_peers_output_is_waited_for() -> None:
    """Before another stream, or the host, looks at it; and what fails on the way is its own."""
    events: list[str] = []

    class Late(Arrays):
        def synchronize(self) -> None:
            events.append("synchronize")

    def prepare(*_: Any) -> Contender:
        def call() -> Any:
            events.append("call")
            return Arrays().array([[[[0.0] * 8]]])

        return Contender("", call)

    late = Peer("late", ("cpu",), ("numpy",), "numpy", "", prepare)
    late.contender(Late(), Shape(1, 1, 1, 1, 1, 8, 8, "fp32"), None)
    assert events == ["call", "synchronize"]


@pytest.mark.parametrize("shape", [*SHAPES, *WINDOWS], ids=str)
@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4"])
def test_flash_attention_is_called_as_it_wants(packages: Packages, name: str, shape: Shape) -> None:
    pytest.importorskip("torch")
    packages.write("plain_attention.py", ATTENTION)
    package = """
from plain_attention import attend
def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size={unbounded},
                    softcap=0.0, {options}):
    assert all({absent} or end >= 0 for end in window_size)
    assert {fair}
    return {answer}
"""
    answer = "attend(q, k, v, causal, window_size, softcap)"
    by_minus_one = {"unbounded": "(-1, -1)", "absent": "end == -1", "fair": "True"}
    if name == "fa2":
        packages.write("flash_attn_2_cuda.py")
        text = package.format(options="dropout_p=0.0", answer=answer, **by_minus_one)
        packages.write("flash_attn/__init__.py", text)
    elif name == "fa3":
        by_minus_one["fair"] = "num_splits != 1, 'it may not split keys'"
        text = package.format(options="num_splits=1", answer=answer, **by_minus_one)
        packages.write("flash_attn_interface.py", text)
    else:
        by_none = {"unbounded": "(None, None)", "absent": "end is None", "fair": "True"}
        text = package.format(options="num_splits=1", answer=f"({answer}, None)", **by_none)
        packages.write("flash_attn/cute/__init__.py", text)
    found = {p.name: p for p in flash_attention.PEERS}
    assert [n for n, p in found.items() if p.missing() is None] == [name]
    assert prepared(found[name], shape) == ""


def test_a_mask_of_another_alignment_is_refused() -> None:
    pytest.importorskip("torch")
    shape = Shape(1, 4, 8, 2, 2, 64, 64, "fp32", "top_left")
    for peer in (*flash_attention.PEERS, *flashinfer.PEERS):
        with pytest.raises(Refused, match="aligned bottom right; this mask is top left"):
            prepared(peer, shape)


FLASHINFER = """
import torch
from plain_attention import attend

class BatchPrefillWithRaggedKVCacheWrapper:
    def __init__(self, workspace, kv_layout):
        assert (workspace.dtype, kv_layout) == (torch.uint8, "NHD")

    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo,
             causal, q_data_type, window_left=-1, logits_soft_cap=None):
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        self.q, self.kv, self.causal = qo_indptr, kv_indptr, causal
        self.logits = (window_left, -1), logits_soft_cap or 0.0
        self.heads = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)

    def run(self, q, k, v):
        assert (*q.shape[1:], k.shape[1], v.shape[2]) == tuple(self.heads[i] for i in (0, 2, 1, 3))
        parts = [
            attend(q[a:b][None], k[c:d][None], v[c:d][None], self.causal, *self.logits)[0]
            for a, b, c, d in zip(self.q, self.q[1:], self.kv, self.kv[1:])
        ]
        return torch.cat(parts)

class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(self, workspace, kv_layout, use_tensor_cores):
        assert (workspace.dtype, kv_layout) == (torch.uint8, "NHD")
        self.use_tensor_cores = use_tensor_cores

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
             q_data_type, kv_data_type, window_left=-1, logits_soft_cap=None):
        self.logits = (window_left, -1), logits_soft_cap or 0.0
        assert self.use_tensor_cores == (num_qo_heads > num_kv_heads)
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        self.indptr, self.indices, self.last, self.page = indptr, indices, last_page_len, page_size

    def run(self, q, cache):
        parts = []
        for i, (a, b) in enumerate(zip(self.indptr, self.indptr[1:])):
            keys = int(b - a - 1) * self.page + int(self.last[i])
            k, v = (x[self.indices[a:b]].flatten(0, 1)[None, :keys] for x in cache)
            parts.append(attend(q[i][None, None], k, v, False, *self.logits)[0])
        return torch.cat(parts)
"""


@pytest.mark.parametrize("shape", [*SHAPES, Shape(2, 1, 35, 4, 2, 64, 64, "fp32")], ids=str)
def test_flashinfer_is_planned_as_it_wants(packages: Packages, shape: Shape) -> None:
    pytest.importorskip("torch")
    if shape.causal == "top_left":
        shape = Shape(2, 40, 40, 4, 2, 64, 32, "fp32", "top_left")
    packages.write("plain_attention.py", ATTENTION)
    packages.write("flashinfer.py", FLASHINFER)
    assert flashinfer.PEERS[0].missing() is None
    assert prepared(flashinfer.PEERS[0], shape) == ""


def test_windows_and_softcaps_that_a_peer_lacks_are_refused() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    found = {peer.name: peer for peer in (*torch_sdpa.PEERS, *flashinfer.PEERS, *jax_cudnn.PEERS)}
    banded, capped = WINDOWS[0], Shape(2, 40, 40, 4, 2, 64, 64, "fp32", softcap=0.8)
    for name, shape, reason in [
        ("torch-sdpa", banded, "torch's scaled_dot_product_attention takes no window"),
        ("torch-flash", capped, "torch's scaled_dot_product_attention takes no softcap"),
        ("flashinfer", banded, "FlashInfer takes no window to the right"),
        ("jax-cudnn", capped, "JAX's dot_product_attention takes no softcap"),
        (
            "jax-cudnn",
            Shape(2, 24, 40, 4, 2, 64, 64, "fp32", window_left=9),
            "JAX's window is aligned top left; this window is bottom right",
        ),
        (
            "flashinfer",
            Shape(2, 24, 40, 4, 2, 64, 64, "fp32", "top_left", window_left=9),
            "FlashInfer's causal mask is aligned bottom right; this mask is top left",
        ),
    ]:
        with pytest.raises(Refused, match=f"^{reason}$"):
            prepared(found[name], shape)


@pytest.mark.parametrize(
    "shape",
    [
        s
        for s in (*SHAPES, *WINDOWS)
        if s.softcap is None and (s.causal != "bottom_right" or s.seq_q in (1, s.seq_k))
    ],
    ids=str,
)
def test_jax_works_on_torchs_memory(shape: Shape) -> None:
    """cuDNN needs a GPU; XLA's own implementation takes the same road."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    prepare = functools.partial(jax_cudnn.prepare, "xla")
    assert prepared(Peer("jax", ("cpu",), ("jax",), "jax", "", prepare), shape) == ""


def test_all_peers_of_the_device_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    _, document = run(capsys)
    assert document["peers"]["torch-sdpa"]["status"] == "found"
    assert document["peers"]["torch-sdpa"]["version"]
    assert OURS not in document["peers"]
