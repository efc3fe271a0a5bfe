"""The script that times gradients of weights: what it computes, and what its record holds."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import moe_weight_gradients as script  # noqa: E402

SMALL = [script.Shape("small", "down", 40, 16, 24, 3), script.Shape("one", "down", 9, 8, 8, 1)]


def deep_gemm(wrong: float = 0.0) -> types.ModuleType:
    """A stand-in with the arguments of DeepGEMM's function."""
    module = types.ModuleType("deep_gemm")
    module.__spec__ = types.SimpleNamespace(name="deep_gemm")  # type: ignore[assignment]

    def product(a: Any, b: Any, d: Any, ks: list[int], ks_tensor: Any, c: Any) -> None:
        assert a.shape[0] == b.shape[0] == sum(ks)
        assert all(k % 128 == 0 for k in ks)
        assert ks_tensor.tolist() == ks
        assert c is d
        begin = 0
        for e, k in enumerate(ks):
            d[e] += a[begin : begin + k].T @ b[begin : begin + k] + wrong
            begin += k

    module.k_grouped_bf16_gemm_tn_contiguous = product  # type: ignore[attr-defined]
    return module


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "shapes", lambda: SMALL)
    monkeypatch.setattr(script.environment, "for_record", dict)  # takes seconds
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm())


def test_the_record(small: None, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert script.main(["--device", "cpu", "--seconds", "0.001", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["model"] for row in rows] == ["small", "one"]
    for row in rows:
        assert list(row["contenders"]) == [script.OURS, script.TORCH, script.DEEP_GEMM]
        for name in (script.OURS, script.DEEP_GEMM):
            entry = row["contenders"][name]
            assert entry["status"] == "ok", entry
            assert entry["error_of_allowed"] <= 1
            assert entry["q1_s"] <= entry["median_s"] <= entry["q3_s"]
        assert row["contenders"][script.DEEP_GEMM]["over_ours"]["ratio"] > 0
    assert script.main(["--device", "cpu", "--model", "one", "--json", str(path)]) == 0
    assert [row["model"] for row in json.loads(path.read_text())["rows"]] == ["one"]


def test_what_is_wrong_is_not_timed(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm(wrong=0.1))
    row = script.measure(SMALL[0], "cpu", torch.float32, script.Sampling(seconds=0.001))
    entry = row["contenders"][script.DEEP_GEMM]
    assert entry["status"] == "void"
    assert "median_s" not in entry
