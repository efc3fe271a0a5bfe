"""Two GPUs in one process: calls go where their tensors are, and JAX's shards each to their own.

Attention's tests of this are in test_execution.py.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import flashmoe_science as fm
import flashmoe_science.torch as fmt
import moe_oracle
import pytest
import torch
from gpu import memory, moe_layers
from gpu.moe_layers import make
from moe_cases import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

CASES = [
    Case(tokens=3, hidden=1024, inner=512, experts=16, top_k=4),
    Case(tokens=400, hidden=512, inner=256, experts=16, top_k=4),
]


def _moved(values: dict[str, Any], device: str) -> dict[str, Any]:
    def one(value: Any) -> Any:
        if isinstance(value, fm.MoeRouting):
            return fm.MoeRouting(*(one(part) for part in value))
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return {name: one(value) for name, value in values.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layers_of_both_in_turns(case: Case) -> None:
    """By every family, whichever GPU is current, and the same bits where both are of a kind."""
    layer = make(case, "bf16", skew=1.0)
    families = [f for f in moe_layers.serving() if moe_layers.plan_or_none(layer, f) is not None]
    assert families
    alike = torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1)
    try:
        for family in families:
            outs = []
            for current, device in ((0, "cuda:0"), (0, "cuda:1"), (1, "cuda:0"), (1, "cuda:1")):
                torch.cuda.set_device(current)
                out = fm.moe_forward(**_moved(layer.arguments, device), kernel=family)
                assert out.device == torch.device(device)
                assert torch.cuda.current_device() == current
                moe_oracle.assert_forward(out, **_moved(layer.arguments, device))
                outs.append(memory.bits(out.cpu()))
            assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])
            assert torch.equal(outs[0], outs[1]) or not alike
    finally:
        torch.cuda.set_device(0)


def test_weights_of_another_gpu_are_an_error() -> None:
    layer = make(CASES[0], "bf16")
    given = layer.arguments | {"w_down": layer.values["w_down"].to("cuda:1")}
    with pytest.raises(ValueError, match=r"^w_down: it is on cuda:1"):
        fm.moe_forward(**given)


def test_torchs_functions_take_the_gpu_of_their_tensors() -> None:
    torch.cuda.set_device(0)
    q = torch.randn(2, 70, 4, 64, device="cuda:1", dtype=torch.float16)
    want = fm.flash_attention(q, q, q, causal=True)
    got = fmt.flash_attention(q, q, q, causal=True)
    assert got.device == torch.device("cuda:1") and torch.equal(got, want)
    assert torch.equal(torch.compile(fmt.flash_attention)(q, q, q, causal=True), want)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_jax_shards(dtype: str) -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("without JAX")
    program = Path(__file__).parents[1] / "jax_apart.py"
    done = subprocess.run(
        [sys.executable, program, dtype], capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cuda"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
