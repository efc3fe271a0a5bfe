r"""Trains a small GPT with a mixture of experts, once by FlashMoE, once by torch.

Like train_tiny_gpt.py, whose text, attention and training loop it uses, but each block has experts,
and every character takes some of them. FlashMoE's run computes attention and experts by FlashMoE;
torch's run computes attention by torch and experts by a loop over them. Both begin with the same
weights and see the same batches. A picture has both curves, and how many characters each expert of
FlashMoE's run had in the last steps. These lines differ for the experts:

    routing = moe_route(logits, top_k, renormalize=True)
    out = moe_forward(x, w_gate_up, w_down, routing)

against a softmax, a topk and, for each expert, two products of the rows that chose it, added up by
index_add.

    pip install -v '.[examples]'
    python examples/train_tiny_moe.py
    python examples/train_tiny_moe.py --experts 32 --top-k 4 --inner 64
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flashmoe_science as fm
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train_tiny_gpt as gpt

BALANCE = 0.01  # of the loss that keeps experts evenly busy (Switch Transformer, arXiv:2101.03961)
COUNTED_STEPS = 50
MOST_DIFFERENCE = 0.1  # of the two runs' training losses: a choice of experts can go either way

# Rows, logits and the experts to out and the experts of each row.
Compute = Callable[[torch.Tensor, torch.Tensor, "Experts"], tuple[torch.Tensor, torch.Tensor]]


def experts_by_flashmoe(
    x: torch.Tensor, logits: torch.Tensor, experts: Experts
) -> tuple[torch.Tensor, torch.Tensor]:
    routing = fm.moe_route(logits, experts.top_k, renormalize=True)
    return fm.moe_forward(x, experts.w_gate_up, experts.w_down, routing), routing.ids


def experts_by_torch(
    x: torch.Tensor, logits: torch.Tensor, experts: Experts
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = logits.softmax(-1).topk(experts.top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    each = zip(experts.w_gate_up.unbind(), experts.w_down.unbind(), strict=True)
    for e, (w_gate_up, w_down) in enumerate(each):
        token, k = torch.where(ids == e)
        gate, up = functional.linear(x[token], w_gate_up).chunk(2, -1)
        made = functional.linear(functional.silu(gate) * up, w_down)
        out = out.index_add(0, token, made * weights[token, k, None])
    return out, ids


class Experts(nn.Module):
    """A router and SwiGLU experts."""

    def __init__(self, dim: int, inner: int, experts: int, top_k: int, compute: Compute) -> None:
        super().__init__()
        self.top_k, self.compute = top_k, compute
        self.router = nn.Linear(dim, experts, bias=False)
        self.w_gate_up = nn.Parameter(torch.randn(experts, 2 * inner, dim) * 0.02)
        self.w_down = nn.Parameter(torch.randn(experts, dim, inner) * 0.02)
        self.balance = torch.zeros(())
        self.counts: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        logits = self.router(rows)
        out, ids = self.compute(rows, logits, self)
        count = ids.flatten().long().bincount(minlength=logits.shape[-1])
        if torch.is_grad_enabled():
            self.counts = [*self.counts[1 - COUNTED_STEPS :], count]
        share = count / ids.numel()
        self.balance = len(share) * (share * logits.softmax(-1).mean(0)).sum()
        return out.view_as(x)


class MoEGPT(gpt.GPT):
    """A GPT of which every block has experts in the place of its two linear layers."""

    def __init__(
        self, characters: int, context: int, layers: int, heads: int, dim: int,
        attend: gpt.Attend, make_experts: Callable[[], Experts],
    ) -> None:  # fmt: skip
        super().__init__(characters, context, layers, heads, dim, attend)
        for block in self.blocks:
            assert isinstance(block, gpt.Block)
            block.mlp = make_experts()  # type: ignore[assignment]

    def experts(self) -> list[Experts]:
        return [module for module in self.modules() if isinstance(module, Experts)]

    def loss(self, piece: torch.Tensor) -> torch.Tensor:
        loss = super().loss(piece)
        if torch.is_grad_enabled():
            loss = loss + BALANCE * torch.stack([e.balance for e in self.experts()]).mean()
        return loss


def draw(ours: gpt.Run, stock: gpt.Run, counts: torch.Tensor, path: Path) -> None:
    """Both curves, and [layers, experts] how many characters each expert had."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 7), height_ratios=(3, 2), layout="constrained"
    )
    above.plot(stock.losses, label=stock.name, color="#b84a00", linewidth=3, alpha=0.5)
    above.plot(ours.losses, label=ours.name, color="#0a5cc2", linewidth=1)
    above.set_ylabel("loss, nats a character")
    above.set_xlabel("step")
    above.legend()
    layers, experts = counts.shape
    width = 0.8 / layers
    for layer, row in enumerate(counts.tolist()):
        places = [e + (layer - (layers - 1) / 2) * width for e in range(experts)]
        below.bar(places, row, width, label=f"layer {layer}")
    below.axhline(counts.float().mean().item(), color="#59636e", linewidth=1)
    below.set_ylabel("characters")
    below.set_xlabel(f"expert, in the last {COUNTED_STEPS} steps")
    below.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default, words in (
        ("steps", 500, "batches to train on"),
        ("batch", 16, "pieces of text in a batch"),
        ("context", 64, "characters that the model sees at once"),
        ("layers", 2, "of the model"),
        ("heads", 4, "of each layer; dim / heads is a multiple of 8, at most 256"),
        ("dim", 128, "of the hidden states"),
        ("experts", 8, "of each layer"),
        ("top-k", 2, "experts of a character"),
        ("inner", 128, "numbers that an expert works on, a multiple of 8"),
        ("sample", 400, "characters to generate"),
        ("seed", 0, "of weights, batches and what is generated"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=words)
    parser.add_argument("--rate", type=float, default=3e-3, help="largest learning rate")
    parser.add_argument("--plot", type=Path, default=Path("train_tiny_moe.png"), help="a picture")
    given = parser.parse_args(argv)
    gpt.check_extents(parser, given, ("experts", "top_k", "inner"))
    if given.top_k > given.experts:
        parser.error(
            f"--top-k: got {given.top_k}, but there are {given.experts} experts: accepted are at "
            "most as many"
        )
    if given.inner % 8:
        parser.error(f"--inner: got {given.inner}, accepted are multiples of 8")
    return given


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    text = gpt.Text()
    training, validation = (
        gpt.batches(tokens, count, given.batch, given.context, given.seed + i)
        for i, (tokens, count) in enumerate(
            ((text.training, given.steps), (text.validation, gpt.VALIDATION_BATCHES))
        )
    )
    ways: dict[str, tuple[gpt.Attend, Compute]] = {
        "FlashMoE": (gpt.attend_by_flashmoe, experts_by_flashmoe),
        "torch": (gpt.attend_by_torch, experts_by_torch),
    }
    models: dict[str, MoEGPT] = {}
    runs: dict[str, gpt.Run] = {}
    columns: list[Any] = [
        TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    ]  # fmt: skip
    with Progress(*columns) as progress:
        for name, (attend, compute) in ways.items():
            torch.manual_seed(given.seed)
            sizes = (given.context, given.layers, given.heads, given.dim)

            def make_experts(compute: Compute = compute) -> Experts:
                return Experts(given.dim, given.inner, given.experts, given.top_k, compute)

            models[name] = MoEGPT(len(text.characters), *sizes, attend, make_experts)
            runs[name] = gpt.train(name, models[name], training, validation, given.rate, progress)

    ours, stock = runs["FlashMoE"], runs["torch"]
    parameters = sum(p.numel() for p in models["torch"].parameters())
    print(
        f"{parameters:,} parameters, {given.experts} experts a layer of which a character takes "
        f"{given.top_k}, {given.steps} steps of {given.batch} x {given.context} of "
        f"{len(text.tokens):,} characters"
    )
    for run in (ours, stock):
        print(
            f"  by {run.name:<8}  {run.seconds:6.1f} s  loss {run.losses[0]:.4f} -> "
            f"{run.loss:.4f}, of unseen text {run.validation:.4f}"
        )
    counts = torch.stack([sum(e.counts, torch.zeros(())) for e in models["FlashMoE"].experts()])
    draw(ours, stock, counts, given.plot)
    print(f"both curves, and characters of each expert, are in {given.plot}\n")
    prompt = text.encode(gpt.PROMPT)
    made = gpt.generate(models["FlashMoE"], prompt, given.sample, given.seed)
    print(text.decode(made))
    if abs(ours.loss - stock.loss) > MOST_DIFFERENCE:
        raise SystemExit(f"the losses differ: accepted is a difference of {MOST_DIFFERENCE}")


if __name__ == "__main__":
    main()
