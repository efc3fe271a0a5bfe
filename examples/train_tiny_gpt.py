r"""Trains a small GPT on Python's own documentation, once by FlashMoE's attention, once by torch's.

The text is that of `help("...")`, which every Python has (pydoc_data.topics); the model predicts
its next character. Both runs begin with the same weights and see the same batches, so that the
losses agree but for what rounding adds up to. Printed are the times and losses that were measured,
and what the model makes of a prompt; a picture has both curves and their difference. What differs
between the models is one line each:

    flash_attention(q, k, v, causal=True)                            # [batch, seq, heads, dim]
    scaled_dot_product_attention(q, k, v, is_causal=True)            # [batch, heads, seq, dim]

    pip install -v '.[examples]'
    python examples/train_tiny_gpt.py
    python examples/train_tiny_gpt.py --device cuda --dim 768 --heads 6 --layers 12 --context 4096 \
        --batch 8 --steps 200 --rate 6e-4
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import flashmoe_science as fm
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.nn import functional

PROMPT = "The for statement is used to "
VALIDATION_SHARE = 0.1
VALIDATION_BATCHES = 32
WARMUP_SHARE = 0.05  # of the steps
LAST_LOSSES = 20  # whose mean is a run's training loss
MOST_WIDTH = 256  # of a head
MOST_DIFFERENCE = 0.05  # of the two runs' training losses


# ---- text ------------------------------------------------------------------------------------


class Text:
    """Characters as numbers; the last tenth is for validation."""

    def __init__(self) -> None:
        text = "\n\n".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(text))
        self.number_of = {character: i for i, character in enumerate(self.characters)}
        self.tokens = self.encode(text)
        end = int(len(text) * (1 - VALIDATION_SHARE))
        self.training, self.validation = self.tokens[:end], self.tokens[end:]

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor([self.number_of[character] for character in text])

    def decode(self, tokens: torch.Tensor) -> str:
        return "".join(self.characters[token] for token in tokens.tolist())


def batches(
    tokens: torch.Tensor, count: int, batch: int, context: int, seed: int
) -> list[torch.Tensor]:
    """Pieces of the text, [batch, context + 1] each: what is read, and what comes next."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.randint(len(tokens) - context, (count, batch, 1), generator=generator)
    return list(tokens[begins + torch.arange(context + 1)])


# ---- model -----------------------------------------------------------------------------------

# q, k and v to out, each [batch, seq, heads, dim], causal.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend_by_flashmoe(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return fm.flash_attention(q, k, v, causal=True)


def attend_by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.out(self.attend(*qkv.unbind(2)).flatten(2))
        made: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return made


class GPT(nn.Module):
    def __init__(
        self, characters: int, context: int, layers: int, heads: int, dim: int, attend: Attend
    ) -> None:
        super().__init__()
        self.context = context
        self.token, self.position = nn.Embedding(characters, dim), nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads, attend) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, characters)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                last = name.endswith(("out.weight", "mlp.2.weight"))  # added to the residual
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if last else 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def loss(self, piece: torch.Tensor) -> torch.Tensor:
        """In nats a character. On a GPU in bf16, the weights in fp32."""
        device = piece.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = self(piece[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), piece[:, 1:].flatten())


@torch.no_grad()
def generate(model: GPT, tokens: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """The prompt and `count` more, drawn by the model's probabilities."""
    generator = torch.Generator(tokens.device).manual_seed(seed)
    device = tokens.device.type
    for _ in range(count):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens[None, -model.context :])[0, -1]
        drawn = torch.multinomial(logits.float().softmax(0), 1, generator=generator)
        tokens = torch.cat([tokens, drawn])
    return tokens


# ---- training --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training was: a loss for each step, in nats a character."""

    name: str
    losses: list[float]
    seconds: float
    validation: float

    @property
    def loss(self) -> float:
        last = self.losses[-LAST_LOSSES:]
        return sum(last) / len(last)


def learning_rate(step: int, steps: int) -> float:
    """Up in a line, and down by half a cosine to a tenth; of the largest."""
    warmup = max(1, int(steps * WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def train(
    name: str,
    model: GPT,
    training: Sequence[torch.Tensor],
    validation: Sequence[torch.Tensor],
    rate: float,
    progress: Progress,
) -> Run:
    steps = len(training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: learning_rate(i, steps))
    task = progress.add_task(name, total=steps)
    losses: list[torch.Tensor] = []
    model.loss(training[0]).backward()  # not timed: at their first call libraries load
    if training[0].is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for piece in training:
        loss = model.loss(piece)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        progress.advance(task)
    measured = torch.stack(losses).tolist()  # waits for a GPU
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        held_out = torch.stack([model.loss(piece) for piece in validation]).mean().item()
    return Run(name, measured, seconds, held_out)


def draw(ours: Run, stock: Run, path: Path) -> None:
    """Both curves, and how far they are apart."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained"
    )
    above.plot(stock.losses, label=stock.name, color="#b84a00", linewidth=3, alpha=0.5)
    above.plot(ours.losses, label=ours.name, color="#0a5cc2", linewidth=1)
    above.set_ylabel("loss, nats a character")
    above.legend()
    apart = [abs(a - b) for a, b in zip(ours.losses, stock.losses, strict=True)]
    below.plot(apart, ".", color="#59636e", markersize=3)
    if any(apart):
        below.set_yscale("log")  # on which there is no place for zeros
    below.set_ylabel("difference")
    below.set_xlabel("step")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    for name, default, words in (
        ("steps", 1200, "batches to train on"),
        ("batch", 16, "pieces of text in a batch"),
        ("context", 64, "characters that the model sees at once"),
        ("layers", 2, "of the model"),
        ("heads", 4, "of each layer; dim / heads is a multiple of 8, at most 256"),
        ("dim", 128, "of the hidden states"),
        ("sample", 400, "characters to generate"),
        ("seed", 0, "of weights, batches and what is generated"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=words)
    parser.add_argument("--rate", type=float, default=3e-3, help="largest learning rate")
    parser.add_argument("--plot", type=Path, default=Path("train_tiny_gpt.png"), help="a picture")
    given = parser.parse_args(argv)
    check_extents(parser, given)
    return given


def check_extents(
    parser: argparse.ArgumentParser, given: argparse.Namespace, others: Sequence[str] = ()
) -> None:
    """Refuses numbers that no model of this kind has; `others` are 1 and more, too."""
    least = dict.fromkeys(("steps", "batch", "context", "layers", "heads", "dim", *others), 1)
    for name, accepted in (least | {"sample": 0}).items():
        if getattr(given, name) < accepted:
            option = name.replace("_", "-")
            parser.error(
                f"--{option}: got {getattr(given, name)}, accepted are {accepted} and more"
            )
    width, rest = divmod(given.dim, given.heads)
    if rest or width % 8 or width > MOST_WIDTH:
        parser.error(
            f"--heads: got {given.heads}, but dim is {given.dim}: accepted are those of which "
            f"dim / heads is a multiple of 8, at most {MOST_WIDTH}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    text = Text()

    def pieces(tokens: torch.Tensor, count: int, seed: int) -> list[torch.Tensor]:
        made = batches(tokens, count, given.batch, given.context, seed)
        return [piece.to(given.device) for piece in made]

    training = pieces(text.training, given.steps, given.seed)
    validation = pieces(text.validation, VALIDATION_BATCHES, given.seed + 1)
    ways: dict[str, Attend] = {"FlashMoE": attend_by_flashmoe, "torch": attend_by_torch}
    models: dict[str, GPT] = {}
    runs: dict[str, Run] = {}
    columns: list[Any] = [
        TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    ]  # fmt: skip
    with Progress(*columns) as progress:
        for name, attend in ways.items():
            torch.manual_seed(given.seed)
            sizes = (given.context, given.layers, given.heads, given.dim)
            models[name] = GPT(len(text.characters), *sizes, attend).to(given.device)
            try:
                runs[name] = train(name, models[name], training, validation, given.rate, progress)
            except fm.UnsupportedError as error:
                raise SystemExit(f"FlashMoE cannot train this: {error}") from error

    ours, stock = runs["FlashMoE"], runs["torch"]
    parameters = sum(p.numel() for p in models["torch"].parameters())
    print(
        f"{parameters:,} parameters, {given.steps} steps of {given.batch} x {given.context} of "
        f"{len(text.tokens):,} characters, on {given.device}"
    )
    for run in (ours, stock):
        print(
            f"  attention by {run.name:<8}  {run.seconds:6.1f} s  loss {run.losses[0]:.4f} -> "
            f"{run.loss:.4f}, of unseen text {run.validation:.4f}"
        )
    draw(ours, stock, given.plot)
    print(f"both curves are in {given.plot}\n")
    prompt = text.encode(PROMPT).to(given.device)
    print(text.decode(generate(models["FlashMoE"], prompt, given.sample, given.seed)))
    if abs(ours.loss - stock.loss) > MOST_DIFFERENCE:
        raise SystemExit(f"the losses differ: accepted is a difference of {MOST_DIFFERENCE}")


if __name__ == "__main__":
    main()
