"""Training through torch's autograd on the CPU: the checks that tests/gpu makes on a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from torch_training import CASES, CHECKS, Case, check_gradients  # noqa: E402


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case) -> None:
    check_gradients(case, "cpu", torch.bfloat16)


@pytest.mark.parametrize("name", CHECKS)
def test_training(name: str) -> None:
    CHECKS[name]("cpu", torch.bfloat16)
