"""Products of grouped rows with their gradients under jax.jit: ours beside jax.lax.ragged_dot.

    python benchmarks/jax_ragged_dot.py --json benchmarks/results/jax_ragged_dot_h200.json

One step is a forward and both gradients, as jax.vjp has them: `grouped_product` on weights
[E, N, K], `ragged_dot` on weights [E, K, N], and JAX's own by its default and by its option
jax_ragged_dot_use_gpu_pallas_triton_lowering. Rows are those of models' layers, each group with as
many as chance gives it. Every contender is held to the accuracy rule first, in fp32 by NumPy, for
the largest group and two others. Calls take turns; the figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flashmoe_science as fm
import jax
import jax.numpy as jnp
import numpy as np
from flashmoe_science.cli import environment
from flashmoe_science.jax import ragged_dot

ROUNDS = 15
SECONDS_PER_ROUND = 0.01  # at least, of one contender
FP32_SUMS = 1e-5  # of the largest value: what the order of a sum in fp32 may change
PEER, TRITON = "jax.lax.ragged_dot", "jax.lax.ragged_dot, Triton"
_TRITON_OPTION = "jax_ragged_dot_use_gpu_pallas_triton_lowering"


class Shape(NamedTuple):
    model: str
    product: str
    rows: int
    k: int
    n: int
    groups: int

    def __str__(self) -> str:
        return f"{self.model} {self.product}, {self.rows} x {self.k} x {self.n}, {self.groups}"


def shapes() -> list[Shape]:
    """Both products of a layer of 2048 tokens, and of as many as are trained with."""
    made = []
    for model, hidden, inner, experts, top_k, counts in (
        ("olmoe", 2048, 1024, 64, 8, (2048, 8192)),
        ("qwen3-30b", 2048, 768, 128, 8, (2048, 8192)),
        ("mixtral", 4096, 14336, 8, 2, (2048, 8192)),
    ):
        for tokens in counts:
            rows = tokens * top_k
            made.append(Shape(model, "gate and up", rows, hidden, 2 * inner, experts))
            made.append(Shape(model, "down", rows, inner, hidden, experts))
    return made


class Inputs(NamedTuple):
    x: Any
    w: Any
    """[E, K, N]."""
    turned: Any
    """[E, N, K]."""
    dout: Any
    sizes: Any


def inputs_of(shape: Shape, dtype: Any) -> Inputs:
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(shape.rows, np.full(shape.groups, 1 / shape.groups))

    def normal(seed: int, *extents: int) -> Any:
        return jax.random.normal(jax.random.key(seed), extents, dtype)

    w = normal(1, shape.groups, shape.k, shape.n) * shape.k**-0.5
    return Inputs(
        normal(0, shape.rows, shape.k), w, jnp.swapaxes(w, 1, 2).copy(),
        normal(2, shape.rows, shape.n), jnp.asarray(sizes, jnp.int32),
    )  # fmt: skip


Step = Callable[[Inputs], tuple[Any, Any, Any]]
"""out, dx, and dw as [E, K, N] or, of grouped_product, [E, N, K]."""


def _by_offsets(x: Any, w: Any, sizes: Any) -> Any:
    return fm.grouped_product(x, w, offsets=jnp.pad(jnp.cumsum(sizes, dtype=jnp.int32), (1, 0)))


def _step(product: Callable[..., Any], turned: bool = False) -> Step:
    def step(given: Inputs) -> tuple[Any, Any, Any]:
        w = given.turned if turned else given.w
        out, pull = jax.vjp(lambda x, w: product(x, w, given.sizes), given.x, w)
        return (out, *pull(given.dout))

    return step


STEPS: dict[str, Step] = {
    "grouped_product": _step(_by_offsets, turned=True),
    "ragged_dot": _step(ragged_dot),
    PEER: _step(jax.lax.ragged_dot),
    TRITON: _step(jax.lax.ragged_dot),
}


def compiled(name: str, step: Step, given: Inputs) -> Any:
    if name != TRITON:
        return jax.jit(step).lower(given).compile()
    jax.config.update(_TRITON_OPTION, True)
    try:
        return jax.jit(step).lower(given).compile()
    finally:
        jax.config.update(_TRITON_OPTION, False)


def reference(given: Inputs) -> list[tuple[int, slice, Any, Any, Any]]:
    """For the largest group and two others: its rows and, in fp32, its part of what a step
    makes."""
    sizes = np.asarray(given.sizes)
    ends = np.cumsum(sizes)
    chosen = sorted({int(sizes.argmax()), 0, len(sizes) - 1})
    made = []
    for e in chosen:
        rows = slice(int(ends[e] - sizes[e]), int(ends[e]))
        parts = (given.x[rows], given.w[e], given.dout[rows])
        x, w, dout = (np.asarray(part).astype(np.float32) for part in parts)
        made.append((e, rows, x @ w, dout @ w.T, x.T @ dout))
    return made


def check(made: tuple[Any, Any, Any], turned: bool, ref: Any, dtype: Any) -> dict[str, float]:
    """The greatest error of each gradient over what is allowed; raises if it is above 1."""
    worst = dict.fromkeys(("out", "dx", "dw"), 0.0)
    out, dx, dw = made
    for e, rows, *wanted in ref:
        own = dw[e].T if turned else dw[e]
        for name, got, want in zip(worst, (out[rows], dx[rows], own), wanted, strict=True):
            if want.size == 0:
                continue
            largest = float(np.abs(want).max())
            rounded = np.abs(want.astype(dtype).astype(np.float32) - want).max()
            spacing = max(float(jnp.finfo(dtype).eps), FP32_SUMS) * largest
            error = np.abs(np.asarray(got).astype(np.float32) - want).max()
            worst[name] = max(worst[name], float(error / (2 * rounded + spacing)))
    bad = {name: x for name, x in worst.items() if not x <= 1}
    if bad:
        raise AssertionError(f"error over what is allowed: {bad}")
    return worst


def _seconds(call: Callable[[], Any], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        made = call()
    jax.block_until_ready(made)
    return (time.perf_counter() - begin) / count


def measure(shape: Shape, dtype: Any, rounds: int) -> dict[str, Any]:
    given = inputs_of(shape, dtype)
    ref = reference(given)
    calls: dict[str, Callable[[], Any]] = {}
    row: dict[str, Any] = {"case": str(shape)} | shape._asdict() | {"contenders": {}}
    for name, step in STEPS.items():
        entry = row["contenders"][name] = {"status": "ok"}
        try:
            program = compiled(name, step, given)
            made = jax.block_until_ready(program(given))
            entry["error_of_allowed"] = check(made, name == "grouped_product", ref, dtype)
            memory = program.memory_analysis()
            entry["temporary_bytes"] = getattr(memory, "temp_size_in_bytes", None)
            del made
            calls[name] = lambda program=program: program(given)
        except Exception as error:  # JAX's own may not fit into memory
            entry |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}
    counts = {n: max(1, round(SECONDS_PER_ROUND / _seconds(call, 2))) for n, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_seconds(call, counts[name]))
    for name, each in times.items():
        lower, median, upper = statistics.quantiles(each, n=4)
        row["contenders"][name] |= {
            "median_s": median, "quartiles_s": [lower, upper],
            "tflops": 6e-12 * shape.rows * shape.k * shape.n / median,
        }  # fmt: skip
    row["over"] = {
        peer: {ours: statistics.median(times[peer]) / statistics.median(times[ours])
               for ours in ("grouped_product", "ragged_dot") if ours in times}
        for peer in (PEER, TRITON) if peer in times
    }  # fmt: skip
    return row


def record(dtype: Any, rounds: int, wanted: list[Shape], path: Path | None) -> dict[str, Any]:
    device = jax.devices()[0]
    document: dict[str, Any] = {
        "operation": "jax_ragged_dot",
        "title": "Grouped products with gradients under jax.jit, beside jax.lax.ragged_dot",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": environment.git_commit(),
        "device": {"device": str(device), "name": device.device_kind},
        "environment": environment.for_record(),
        "jax": jax.__version__,
        "dtype": np.dtype(dtype).name,
        "rounds": rounds,
        "rows": [],
    }
    for shape in wanted:
        row = measure(shape, dtype, rounds)
        document["rows"].append(row)
        words = [
            f"{name} {1e3 * x['median_s']:.2f} ms" if x["status"] == "ok" else f"{name} failed"
            for name, x in row["contenders"].items()
        ]
        ratios = [f"{x:.1f}" for over in row["over"].values() for x in over.values()]
        print(f"{row['case']}: {', '.join(words)}; {' '.join(ratios)}", flush=True)
        if path is not None:  # a run that is cut short has what it measured
            path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--models", nargs="*", help="these alone")
    parser.add_argument("--most-rows", type=int, help="no shape with more")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the record there")
    options = parser.parse_args(argv)
    wanted = [
        shape
        for shape in shapes()
        if (options.models is None or shape.model in options.models)
        and (options.most_rows is None or shape.rows <= options.most_rows)
    ]
    document = record(jnp.dtype(options.dtype), options.rounds, wanted, options.json)
    ours = (
        row["contenders"][n] for row in document["rows"] for n in ("grouped_product", "ragged_dot")
    )
    return 0 if all(entry["status"] == "ok" for entry in ours) else 1


if __name__ == "__main__":
    raise SystemExit(main())
