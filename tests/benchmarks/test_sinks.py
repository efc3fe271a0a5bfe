"""The script that times attention with sinks: what it computes, and what its record holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sinks  # noqa: E402
from flashmoe_science.cli.shapes import Shape  # noqa: E402

SHAPES = [
    Shape(2, 24, 24, 4, 2, 16, 16, "fp32", "bottom_right"),
    Shape(1, 24, 24, 4, 2, 16, 16, "fp32", "bottom_right", 5),
]


def plain(shape: Shape, inputs: tuple[Any, Any, Any], given: Any) -> Any:
    """[batch, seq, heads, dim], sinks as one more key whose value is 0."""
    q, k, v = (x.double().transpose(1, 2) for x in inputs)
    k, v = (x.repeat_interleave(shape.heads_q // shape.heads_kv, 1) for x in (k, v))
    ahead = torch.arange(shape.seq_k) - torch.arange(shape.seq_q)[:, None]
    hidden = ahead > 0
    if shape.window_left is not None:
        hidden |= ahead < -shape.window_left
    scores = (q @ k.mT / math.sqrt(shape.dim)).masked_fill(hidden, -math.inf)
    extra = given.double().reshape(1, -1, 1, 1).expand(shape.batch, -1, shape.seq_q, 1)
    return (torch.cat([scores, extra], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "shapes", lambda: SHAPES)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(sinks.environment, "for_record", dict)  # takes seconds


def run(path: Path, *options: str, status: int = 0) -> list[dict[str, Any]]:
    file = path / "sinks.json"
    words = ["--device", "cpu", "--seconds", "0.01", "--json", str(file), *options]
    assert sinks.main(words) == status
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


def test_ours_is_timed_with_sinks_and_without(small: None, tmp_path: Path) -> None:
    rows = run(tmp_path)
    assert [row["case"] for row in rows] == [str(shape) for shape in SHAPES]
    for row in rows:
        assert set(row["contenders"]) == {"flashmoe", "without sinks"}
        assert all(entry["median_s"] > 0 for entry in row["contenders"].values())
        assert row["launches"][0]["kernel"].startswith("attention_forward_")
        assert row["accuracy"]["passed"] and row["accuracy"]["lse_error"] < 1e-5


def test_a_wrong_result_has_no_times(
    small: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As it would be if the sinks were left out."""
    right = sinks.fm.flash_attention

    def without(*tensors: Any, sinks: Any = None, **options: Any) -> Any:
        return right(*tensors, **options)

    monkeypatch.setattr(sinks.fm, "flash_attention", without)
    for row in run(tmp_path, status=1):
        assert row["status"] == "void" and "contenders" not in row
    assert "void: max|out - float64| is" in capsys.readouterr().out


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_a_peer_is_held_to_the_rule(
    shift: float,
    small: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        sinks, "peer_call", lambda shape, inputs, given: lambda: plain(shape, inputs, given) + shift
    )
    for row in run(tmp_path, "--fa3", "library.so"):
        peer = row["contenders"]["fa3"]
        assert peer["status"] == ("ok" if shift == 0 else "void")
        assert ("median_s" in peer) == (shift == 0)
    said = capsys.readouterr().out
    assert ("ratio" in said) == (shift == 0)
    assert ("fa3 void: max|out - float64| is 0.1" in said) == (shift > 0)


def test_the_peer_gets_sequences_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the argument order of its operator, which is vLLM 0.22's."""
    library = torch.library.Library("_vllm_fa3_C", "DEF")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out, "
        "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
        "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
        "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
        "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
        "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
        "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, "
        "bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, "
        "Tensor? cp_tot_seqused_k) -> Tensor[]"
    )
    seen: dict[str, Any] = {}

    def fwd(*arguments: Any) -> list[Any]:
        names = [a.name for a in torch.ops._vllm_fa3_C.fwd.default._schema.arguments]
        seen.update(zip(names, arguments, strict=True))
        return [arguments[0] * 2]

    library.impl("fwd", fwd, "CPU")
    shape = SHAPES[1]
    inputs = tuple(torch.randn(1, 24, heads, 16) for heads in (4, 2, 2))
    given = torch.randn(4)
    out = sinks.peer_call(shape, inputs, given)()
    assert torch.equal(out, inputs[0] * 2)
    assert seen["cu_seqlens_q"].tolist() == seen["cu_seqlens_k"].tolist() == [0, 24]
    assert seen["s_aux"] is given
    expected = {"max_seqlen_q": 24, "max_seqlen_k": 24, "softmax_scale": 0.25, "is_causal": True,
                "window_size_left": 5, "window_size_right": 0, "softcap": 0.0, "num_splits": 0,
                "cp_world_size": 1}  # fmt: skip
    assert {name: seen[name] for name in expected} == expected
    library._destroy()
