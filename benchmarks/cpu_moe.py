"""Our mixture of experts on the CPU beside a loop of torch's matrix products over experts.

Both go from the experts and weights of each token to the layer's output: ours by sorting them
(flashmoe_moe_route with given ids) and the layer, torch's by gathering the tokens of one expert
after the other. See cpu_pairs.py for how they are timed. Every cell's result is checked against
float64 first.

With --training the layer runs forward and backward, to the gradients of x, of all weights and of
the routing's weights: ours by flashmoe_moe_forward, which saves what its activation is applied to,
and flashmoe_moe_backward, torch's by autograd. torch's experts are tensors of their own, so that
each gradient is written where it belongs and experts do not add theirs to one of all; one without
tokens has zeros, as ours. Memory that is freed stays with the process, as the allocators do that
PyTorch's guide to performance advises for CPUs: else most of a small call are page faults, of ours
alone where an expert's gradient is small enough for glibc to keep. A small layer is checked against
float64 first, and every cell against torch.

    python benchmarks/cpu_moe.py --output 'benchmarks/results/cpu_moe_<cpu>.json'
    python benchmarks/cpu_moe.py --training \
        --output 'benchmarks/results/cpu_moe_training_<cpu>.json'

With --add cells join those of the record that is there, of the same commit, processor and torch.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from cpu_pairs import (
    DTYPES,
    ROOT,
    Call,
    as_array,
    capi,
    check_error,
    conclude,
    environment,
    set_threads,
    time_pairs,
)

sys.path.insert(0, str(ROOT / "tests"))

import capi_moe

TOKENS = (1, 4, 16, 64, 256, 1024)
TRAINING_TOKENS = (16, 64, 256, 1024)
ORIENTATIONS = ("rows", "transposed")
# hidden, inner, experts, top_k: thin experts of Qwen3-MoE's, and broad ones of Mixtral's kind
LAYERS = {"thin": (2048, 768, 32, 4), "broad": (2048, 3584, 8, 2)}
CHECKED_TOKENS = 16
SMALL_LAYER = (256, 192, 6, 2)  # whose gradients are checked against float64
SMALL_TOKENS = 40
NEAR = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2}  # of gradients by two ways, relative norms
GRADIENTS = ("dx", "dweights", "dw_gate_up", "dw_down")

Gradients = dict[str, torch.Tensor]


class Layer:
    """Random weights and routing; the layer by us, by torch, and in float64."""

    passes = 1  # products of the layer, in those of its forward

    def __init__(
        self, sizes: tuple[int, int, int, int], tokens: int, dtype: torch.dtype, transposed: bool
    ) -> None:
        hidden, inner, experts, top_k = sizes
        self.x = torch.randn(tokens, hidden).to(dtype)
        self.gate_up = (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).to(dtype)
        self.down = (torch.randn(experts, hidden, inner) / inner**0.5).to(dtype)
        if transposed:  # stored as [experts, columns, rows]
            self.gate_up = self.gate_up.mT.contiguous().mT
            self.down = self.down.mT.contiguous().mT
        logits = torch.randn(tokens, experts)
        self.weights, self.ids = logits.softmax(-1).topk(top_k)
        self.ids = self.ids.to(torch.int32)
        self.flops = self.passes * 6.0 * tokens * top_k * hidden * inner

    def routed(self) -> tuple[capi_moe.RouteParams, dict[str, np.ndarray | None]]:
        """The call that sorts the experts, and what it fills of the layer's arguments."""
        routing = capi_moe.Routing.poisoned(len(self.x), len(self.down), self.ids.shape[1])
        arrays = routing.arrays()
        route = capi_moe.make_params(
            capi_moe.RouteParams,
            given_ids=as_array(self.ids),
            given_weights=as_array(self.weights),
            **arrays,
        )
        return route, {name: arrays[name] for name in ("weights", "offsets", "pairs", "slots")}

    def given(self) -> dict[str, np.ndarray]:
        return {
            "x": as_array(self.x),
            "w_gate_up": as_array(self.gate_up),
            "w_down": as_array(self.down),
        }

    def ours(self) -> tuple[Call, str]:
        """The call as a framework would make it: outputs and workspaces are fresh each time."""
        route, sorted_pairs = self.routed()
        forward = capi_moe.make_params(
            capi_moe.ForwardParams,
            out=as_array(torch.empty_like(self.x)),
            **self.given(),
            **sorted_pairs,
        )

        def call() -> torch.Tensor:
            out = torch.empty_like(self.x)
            forward.out.contents.data = out.data_ptr()
            run(route)
            run(forward)
            return out

        kernel = capi_moe.plan_of(forward).launches[0].kernel.decode()
        return call, kernel

    def theirs(self) -> torch.Tensor:
        return loop(self.x, self.ids, self.weights, self.gate_up, self.down)

    def exact(self, tokens: int) -> torch.Tensor:
        """The first tokens' outputs in float64."""
        rows = []
        for t in range(tokens):
            row = torch.zeros(self.x.shape[1], dtype=torch.float64)
            for expert, weight in zip(self.ids[t].tolist(), self.weights[t].double(), strict=True):
                both = self.gate_up[expert].double() @ self.x[t].double()
                gate, up = both.chunk(2)
                row += weight * (self.down[expert].double() @ (F.silu(gate) * up))
            rows.append(row)
        return torch.stack(rows)

    def check(self, ours: Call, dtype: str) -> dict[str, float]:
        some = min(len(self.x), CHECKED_TOKENS)
        return check_error(ours()[:some], self.theirs()[:some], self.exact(some))


class TrainingLayer(Layer):
    """The same forward and backward, from the gradient of its output to those of all else."""

    passes = 3

    def __init__(
        self, sizes: tuple[int, int, int, int], tokens: int, dtype: torch.dtype, transposed: bool
    ) -> None:
        super().__init__(sizes, tokens, dtype, transposed)
        self.dout = torch.randn(self.x.shape).to(dtype)

    def ours(self) -> tuple[Call, str]:
        route, sorted_pairs = self.routed()
        pairs, inner = self.ids.numel(), self.down.shape[2]
        made = {
            "out": torch.empty_like(self.x),
            "pre_activation": self.x.new_empty(pairs, 2 * inner),
            "dx": torch.empty_like(self.x),
            "dweights": torch.empty_like(self.weights),
            "dw_gate_up": torch.empty_like(self.gate_up),
            "dw_down": torch.empty_like(self.down),
        }
        saved = {name: as_array(made[name]) for name in ("out", "pre_activation")}
        forward = capi_moe.make_params(
            capi_moe.ForwardParams, **saved, **self.given(), **sorted_pairs
        )
        backward = capi_moe.make_params(
            capi_moe.BackwardParams,
            dout=as_array(self.dout),
            pre_activation=saved["pre_activation"],
            **{name: as_array(made[name]) for name in GRADIENTS},
            **self.given(),
            **sorted_pairs,
        )

        def call() -> Gradients:
            fresh = {name: torch.empty_like(tensor) for name, tensor in made.items()}
            for name, tensor in fresh.items():
                for params in (forward, backward):
                    if getattr(params, name, None):
                        getattr(params, name).contents.data = tensor.data_ptr()
            run(route)
            run(forward)
            run(backward)
            return {name: fresh[name] for name in GRADIENTS}

        kernels = [launch.kernel.decode() for launch in capi_moe.plan_of(backward).launches]
        return call, next(kernel for kernel in kernels if "_dw_" in kernel)

    def theirs(self, dtype: torch.dtype | None = None) -> Gradients:
        """By autograd; in another dtype the reference."""

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to(dtype or tensor.dtype).requires_grad_()

        x, weights = leaf(self.x), leaf(self.weights)
        gate_up, down = [leaf(w) for w in self.gate_up], [leaf(w) for w in self.down]
        out = loop(x, self.ids, weights, gate_up, down)
        experts = len(down)
        dx, dweights, *dw = torch.autograd.grad(
            out, [x, weights, *gate_up, *down], self.dout.to(out.dtype), materialize_grads=True
        )
        return {"dx": dx, "dweights": dweights, "dw_gate_up": dw[:experts], "dw_down": dw[experts:]}

    def check_small(self, ours: Call) -> None:
        made, theirs, exact = ours(), self.theirs(), self.theirs(torch.float64)
        for name in GRADIENTS:
            check_error(made[name], *(as_one(of[name]) for of in (theirs, exact)))

    def check(self, ours: Call, dtype: str) -> dict[str, float]:
        """How far each gradient is from torch's, relative to its norm."""
        made, theirs = ours(), self.theirs()
        errors = {}
        for name in GRADIENTS:
            near = as_one(theirs[name])
            errors[name] = ((made[name] - near).norm() / near.norm()).item()
            if not errors[name] <= NEAR[dtype]:
                raise AssertionError(f"{name}: {errors[name]:.3g} from torch's")
        return errors


def as_one(gradient: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    return gradient if isinstance(gradient, torch.Tensor) else torch.stack(list(gradient))


def run(params: Any) -> None:
    lib = capi.load()
    size = capi.c.c_size_t()
    call, _, workspace_size = capi_moe.functions(params, lib)
    capi.check(workspace_size(params, size), lib)
    workspace = torch.empty(size.value, dtype=torch.uint8)
    capi.check(call(params, workspace.data_ptr(), size.value, None), lib)


def loop(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Gathers the tokens of one expert after the other."""
    top_k = ids.shape[1]
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=len(down)).tolist()
    weights = weights.flatten()[order].to(x.dtype)
    out = torch.zeros_like(x)
    for expert, pairs in enumerate(order.split(counts)):
        if len(pairs) == 0:
            continue
        tokens = pairs // top_k
        gate, up = F.linear(x[tokens], gate_up[expert]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down[expert])
        y = y * weights[sum(counts[:expert]) : sum(counts[: expert + 1]), None]
        out.index_add_(0, tokens, y)
    return out


def keep_memory() -> None:
    """Has glibc give no memory back to the system."""
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX
    libc = capi.c.CDLL(None)
    for option, value in ((trim_threshold, -1), (mmap_max, 0)):
        if libc.mallopt(option, value) != 1:
            raise SystemExit(f"mallopt({option}, {value}) failed")


def measure_cell(
    kind: type[Layer], name: str, tokens: int, dtype: str, transposed: bool, threads: int,
    pairs: int, order: random.Random,
) -> dict[str, object]:  # fmt: skip
    layer = kind(LAYERS[name], tokens, DTYPES[dtype], transposed)
    ours, kernel = layer.ours()
    error = layer.check(ours, dtype)
    timed = time_pairs(ours, layer.theirs, pairs, order)
    return {
        "threads": threads,
        "layer": name,
        "tokens": tokens,
        "dtype": dtype,
        "transposed": transposed,
        "kernel": kernel,
        **timed,
        "ours_gflops": layer.flops / timed["ours_ms"] / 1e6,
        "difference" if kind is TrainingLayer else "max_error": error,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--threads",
        nargs="+",
        type=int,
        default=sorted({1, len(os.sched_getaffinity(0))}),
        help="thread counts to measure with, each on the whole grid",
    )
    parser.add_argument("--pairs", type=int, default=15, help="pairs of timings per cell")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--orientations", nargs="+", choices=ORIENTATIONS)
    parser.add_argument("--training", action="store_true", help="forward and backward")
    parser.add_argument("--add", action="store_true", help="to the cells that --output has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file; <cpu> becomes the processor's name")
    arguments = parser.parse_args()
    training = arguments.training
    arguments.tokens = arguments.tokens or (TRAINING_TOKENS if training else TOKENS)
    arguments.orientations = arguments.orientations or ORIENTATIONS[: 1 if training else 2]
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.training:
        keep_memory()
    torch.manual_seed(arguments.seed)
    order = random.Random(arguments.seed)
    env = environment()
    kind = TrainingLayer if arguments.training else Layer
    print(f"{env['cpu']}, torch {torch.__version__}")
    print("threads layer dtype tokens weights    |  ours ms  torch ms  GFLOP/s | torch/ours")
    cells = []
    for threads, name, dtype, orientation, tokens in itertools.product(
        arguments.threads,
        arguments.layers,
        arguments.dtypes,
        arguments.orientations,
        arguments.tokens,
    ):
        set_threads(threads)
        transposed = orientation == "transposed"
        if arguments.training:
            small = TrainingLayer(SMALL_LAYER, SMALL_TOKENS, DTYPES[dtype], transposed)
            small.check_small(small.ours()[0])
        cell = measure_cell(kind, name, tokens, dtype, transposed, threads, arguments.pairs, order)
        cells.append(cell)
        low, high = cell["ratio_quartiles"]
        print(
            f"{threads:7} {name} {dtype:>5} {tokens:6} {orientation:10} | "
            f"{cell['ours_ms']:8.3f} {cell['torch_ms']:9.3f} {cell['ours_gflops']:8.1f} | "
            f"{cell['ratio']:.2f} [{low:.2f}, {high:.2f}]",
            flush=True,
        )
    done = "training forward and backward" if arguments.training else "mixture of experts"
    what = {
        "what": f"{done} on the CPU, ours against a loop of torch's products over experts; "
        "ratio = torch / ours",
        "training": arguments.training,
        "layers": {name: LAYERS[name] for name in arguments.layers},
    }
    return conclude(cells, env, what, arguments.output, arguments.add)


if __name__ == "__main__":
    sys.exit(main())
