"""Steps of training under JAX, each a program of its own, since XLA's flags count once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_HEAD = """
import jax
import jax.numpy as jnp
import numpy as np
import flashmoe_science as fm
"""

_TAIL = """
def step(weights, x):
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return [w - rate * g for w, g in zip(weights, gradients)], value

compiled = jax.jit(step)

def train(busy):
    made, values, kept = weights, [], []
    for i in range(12):
        made, value = compiled(made, x)
        values.append(value)
        if busy:  # memory that was free when a graph was recorded comes to be others'
            kept.append(jnp.full((1 << 20) * (1 + i % 3), i, jnp.float32))
    assert all((k == k[0]).all() for k in kept)
    return made, values

got, values = train(busy=True)
again, _ = train(busy=False)
for a, b in zip(got, again):
    np.testing.assert_array_equal(a, b)
assert values[-1] < values[0], values
assert all(np.isfinite(float(v)) for v in values)
print("losses", float(values[0]), float(values[-1]))
"""


def assert_steps_repeat(model: str, folder: Path, graphs: bool) -> None:
    """The same bits whatever else there is in memory, in XLA's CUDA graphs and without them.
    `model` is the part of the program that makes x, weights, rate and loss(weights, x)."""
    enabled = "+CUSTOM_CALL" if graphs else ""
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_graph_min_graph_size=1 "
        f"--xla_gpu_enable_command_buffer={enabled} --xla_gpu_deterministic_ops=true"
    )
    program = folder / "steps.py"
    program.write_text(_HEAD + model + _TAIL)
    done = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "losses" in done.stdout
