"""The script that times grouped products under JAX: what it computes, and what its record holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax_ragged_dot as script  # noqa: E402

SMALL = [script.Shape("small", "down", 40, 16, 24, 3), script.Shape("one", "down", 9, 8, 8, 1)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "shapes", lambda: SMALL)
    monkeypatch.setattr(script, "SECONDS_PER_ROUND", 0.0)
    monkeypatch.setattr(script.environment, "for_record", dict)  # takes seconds


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_record(small: None, tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "record.json"
    assert script.main(["--rounds", "3", "--dtype", dtype, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert [row["model"] for row in document["rows"]] == ["small", "one"]
    for row in document["rows"]:
        assert list(row["contenders"]) == list(script.STEPS)
        for name in ("grouped_product", "ragged_dot", script.PEER):
            entry = row["contenders"][name]
            assert entry["status"] == "ok", entry
            assert entry["quartiles_s"][0] <= entry["median_s"] <= entry["quartiles_s"][1]
            assert max(entry["error_of_allowed"].values()) <= 1
        assert row["over"][script.PEER]["ragged_dot"] > 0


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_wrong_result_is_seen(which: int) -> None:
    dtype = np.dtype("float32")
    given = script.inputs_of(SMALL[0], dtype)
    made: list[Any] = list(script.STEPS["ragged_dot"](given))
    ref = script.reference(given)
    script.check(tuple(made), False, ref, dtype)
    made[which] = made[which].at[(0,) * made[which].ndim].add(0.1)
    with pytest.raises(AssertionError, match="error over what is allowed"):
        script.check(tuple(made), False, ref, dtype)


def test_a_contender_that_fails_is_recorded(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(given: Any) -> Any:
        raise RuntimeError("too large")

    monkeypatch.setitem(script.STEPS, script.PEER, fails)
    row = script.measure(SMALL[0], np.dtype("float32"), 2)
    assert row["contenders"][script.PEER] == {
        "status": "failed", "reason": "RuntimeError: too large"
    }  # fmt: skip
    assert script.PEER not in row["over"]
