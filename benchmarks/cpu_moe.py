"""Our mixture of experts on the CPU beside a loop of torch's matrix products over experts.

Both go from the experts and weights of each token to the layer's output: ours by sorting them
(flashmoe_moe_route with given ids) and the layer, torch's by gathering the tokens of one expert
after the other. See cpu_pairs.py for how they are timed. Every cell's result is checked against
float64 first.

    python benchmarks/cpu_moe.py --output 'benchmarks/results/cpu_moe_<cpu>.json'
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from pathlib import Path

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
# hidden, inner, experts, top_k: thin experts of Qwen3-MoE's, and broad ones of Mixtral's kind
LAYERS = {"thin": (2048, 768, 32, 4), "broad": (2048, 3584, 8, 2)}
CHECKED_TOKENS = 16


class Layer:
    """Random weights and routing; the layer by us, by torch, and in float64."""

    def __init__(self, name: str, tokens: int, dtype: torch.dtype, transposed: bool) -> None:
        hidden, inner, experts, top_k = LAYERS[name]
        self.x = torch.randn(tokens, hidden).to(dtype)
        self.gate_up = (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).to(dtype)
        self.down = (torch.randn(experts, hidden, inner) / inner**0.5).to(dtype)
        if transposed:  # stored as [experts, columns, rows]
            self.gate_up = self.gate_up.mT.contiguous().mT
            self.down = self.down.mT.contiguous().mT
        logits = torch.randn(tokens, experts)
        self.weights, self.ids = logits.softmax(-1).topk(top_k)
        self.ids = self.ids.to(torch.int32)
        self.flops = 6.0 * tokens * top_k * hidden * inner

    def ours(self) -> tuple[Call, str]:
        """The call as a framework would make it: outputs and workspaces are fresh each time."""
        lib = capi.load()
        experts = self.gate_up.shape[0]
        routing = capi_moe.Routing.poisoned(len(self.x), experts, self.ids.shape[1])
        route = capi_moe.make_params(
            capi_moe.RouteParams,
            given_ids=as_array(self.ids),
            given_weights=as_array(self.weights),
            **routing.arrays(),
        )
        arrays = routing.arrays()
        forward = capi_moe.make_params(
            capi_moe.ForwardParams,
            x=as_array(self.x),
            w_gate_up=as_array(self.gate_up),
            w_down=as_array(self.down),
            out=as_array(torch.empty_like(self.x)),
            **{name: arrays[name] for name in ("weights", "offsets", "pairs", "slots")},
        )
        size = capi.c.c_size_t()

        def call() -> torch.Tensor:
            out = torch.empty_like(self.x)
            forward.out.contents.data = out.data_ptr()
            for params in (route, forward):
                run, _, workspace_size = capi_moe.functions(params, lib)
                capi.check(workspace_size(params, size), lib)
                workspace = torch.empty(size.value, dtype=torch.uint8)
                capi.check(run(params, workspace.data_ptr(), size.value, None), lib)
            return out

        kernel = capi_moe.plan_of(forward).launches[0].kernel.decode()
        return call, kernel

    def theirs(self) -> torch.Tensor:
        top_k = self.ids.shape[1]
        ids = self.ids.flatten()
        order = ids.argsort(stable=True)
        counts = torch.bincount(ids, minlength=self.gate_up.shape[0]).tolist()
        weights = self.weights.flatten()[order].to(self.x.dtype)
        out = torch.zeros_like(self.x)
        for expert, pairs in enumerate(order.split(counts)):
            if len(pairs) == 0:
                continue
            tokens = pairs // top_k
            gate, up = F.linear(self.x[tokens], self.gate_up[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[expert])
            y *= weights[sum(counts[:expert]) : sum(counts[: expert + 1]), None]
            out.index_add_(0, tokens, y)
        return out

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


def measure_cell(
    name: str, tokens: int, dtype: str, transposed: bool, threads: int, pairs: int,
    order: random.Random,
) -> dict[str, object]:  # fmt: skip
    layer = Layer(name, tokens, DTYPES[dtype], transposed)
    ours, kernel = layer.ours()
    some = min(tokens, CHECKED_TOKENS)
    error = check_error(ours()[:some], layer.theirs()[:some], layer.exact(some))
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
        "max_error": error,
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
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--orientations", nargs="+", choices=["rows", "transposed"],
                        default=["rows", "transposed"])  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file; <cpu> becomes the processor's name")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    order = random.Random(arguments.seed)
    env = environment()
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
        cell = measure_cell(name, tokens, dtype, transposed, threads, arguments.pairs, order)
        cells.append(cell)
        low, high = cell["ratio_quartiles"]
        print(
            f"{threads:7} {name} {dtype:>5} {tokens:6} {orientation:10} | "
            f"{cell['ours_ms']:8.3f} {cell['torch_ms']:9.3f} {cell['ours_gflops']:8.1f} | "
            f"{cell['ratio']:.2f} [{low:.2f}, {high:.2f}]",
            flush=True,
        )
    what = {
        "what": "mixture of experts on the CPU, ours against a loop of torch's products over "
        "experts; ratio = torch / ours",
        "layers": {name: LAYERS[name] for name in arguments.layers},
    }
    return conclude(cells, env, what, arguments.output)


if __name__ == "__main__":
    sys.exit(main())
