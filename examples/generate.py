"""Generates text by FlashMoE over a paged cache, and by torch over padded rows of a dense one.

The model is a small Llama that reads bytes. It begins with random weights and is first trained for
a moment on Python's own documentation, on documents of any length packed into one row. Then it
continues a batch of prompts of different lengths, greedily, in two ways:

    FlashMoE   prompts packed, keys and values in pages, attention that knows each length
    torch      prompts padded on the left, a cache with room for the longest, and a mask

A step of the first is two calls for each layer: kv_append rotates the queries and new keys and
writes these to their pages, flash_attention reads them there. Lengths are read on the device, so
that on a GPU a step is captured once in a CUDA graph and serves all that follow. Printed are the
tokens per second of both, how many of their tokens are the same, and what was generated.

    pip install -v '.[examples]'
    python examples/generate.py
    python examples/generate.py --device cuda --dim 1024 --layers 12 --batch 64 --new 512
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pydoc_data.topics import topics
from typing import Any

import flashmoe_science as fm
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.nn import functional

BYTES = 256
HEAD_DIM = 32
GROUP = 2  # query heads that share a head of keys
PAGE_SIZE = 16
DOCUMENTS = 8  # of a training step
LONGEST = 256  # bytes of a document in training, and of a prompt

# q, k and v of a layer, [batch, seq, heads, dim], to what its queries see.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


# ---- model -----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, index: int, dim: int) -> None:
        super().__init__()
        self.index, self.heads = index, dim // HEAD_DIM
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, dim + 2 * dim // GROUP, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = (
            nn.Linear(dim, 6 * dim, bias=False),
            nn.Linear(3 * dim, dim, bias=False),
        )

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, HEAD_DIM))
        shared = self.heads // GROUP
        x = x + self.out(attend(self.index, *qkv.split([self.heads, shared, shared], 2)).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        made: torch.Tensor = x + self.down(functional.silu(gate) * up)
        return made


class Llama(nn.Module):
    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, dim)
        self.blocks = nn.ModuleList(Block(i, dim) for i in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, BYTES, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 / 2)

    def forward(self, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Logits of [batch, seq] tokens, which see what `attend` has them see."""
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, attend)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def rotary(positions: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, [positions, HEAD_DIM / 2]."""
    rates = 10000.0 ** (-torch.arange(HEAD_DIM // 2, device=device) / (HEAD_DIM // 2))
    angles = torch.arange(positions, device=device)[:, None] * rates
    return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """By torch's operations, the two halves of each head; cos and sin are [..., seq, dim / 2]."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


# ---- training on packed documents ------------------------------------------------------------


def documents(generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Pieces of the documentation, of any length."""
    texts = [
        torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) for text in topics.values()
    ]
    while True:
        text = texts[int(torch.randint(len(texts), (), generator=generator))]
        length = min(len(text), int(torch.randint(16, LONGEST, (), generator=generator)))
        begin = int(torch.randint(len(text) - length + 1, (), generator=generator))
        yield text[begin : begin + length].long()


class PackedRow:
    """Packed documents that do not see one another."""

    def __init__(self, pieces: list[torch.Tensor], device: str) -> None:
        self.tokens = torch.cat(pieces).to(device)
        at = torch.cat([torch.arange(len(piece)) for piece in pieces])
        self.cos, self.sin = (x[at].to(device) for x in rotary(LONGEST, "cpu"))
        starts = [0, *itertools.accumulate(map(len, pieces))]
        self.cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
        self.labels = self.tokens.where(at.to(device) > 0, -100)  # nothing foretells a first one

    def attend(self, _: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = (rotated(x, self.cos, self.sin) for x in (q, k))
        starts = self.cu_seqlens
        return fm.flash_attention(q, k, v, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts)


def train(model: Llama, steps: int, device: str, progress: Progress) -> float:
    """Trains on rows of documents. Returns the last loss, in nats a byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    pieces = documents(torch.Generator().manual_seed(1))
    loss = torch.zeros(())
    for _ in progress.track(range(steps), description="training"):
        row = PackedRow([next(pieces) for _ in range(DOCUMENTS)], device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(row.tokens[None], row.attend)[0]
        loss = functional.cross_entropy(logits[:-1].float(), row.labels[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


# ---- two caches ------------------------------------------------------------------------------


class Pages:
    """FlashMoE: keys and values of each request in pages, wherever there was a free one."""

    name = "FlashMoE, pages"

    def __init__(self, model: Llama, prompts: list[torch.Tensor], new: int) -> None:
        weight = model.token.weight
        device, batch = weight.device, len(prompts)
        self.new_rows = torch.tensor([len(x) for x in prompts], dtype=torch.int32, device=device)
        self.lengths = torch.zeros_like(self.new_rows)
        most = max(map(len, prompts)) + new
        each = -(-most // PAGE_SIZE)
        order = torch.randperm(batch * each, generator=torch.Generator().manual_seed(2))
        self.table = order.view(batch, each).int().to(device)
        block: Any = model.blocks[0]
        shape = (len(model.blocks), batch * each, PAGE_SIZE, block.heads // GROUP, HEAD_DIM)
        self.k, self.v = (torch.empty(shape, device=device, dtype=weight.dtype) for _ in range(2))
        self.cos, self.sin = rotary(most, str(device))
        self.tokens = torch.cat(prompts)[None]  # packed
        self.starts: torch.Tensor | None = functional.pad(self.new_rows.cumsum(0), (1, 0)).int()

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = fm.kv_append(
            k, v, self.k[layer], self.v[layer], cache_seqlens=self.lengths, page_table=self.table,
            cu_seqlens=self.starts, rotary_cos=self.cos, rotary_sin=self.sin, q=q,
        )  # fmt: skip
        return fm.flash_attention(
            q, self.k[layer], self.v[layer], causal=True, page_table=self.table,
            cu_seqlens_q=self.starts, seqused_k=self.lengths + self.new_rows,
        )  # fmt: skip

    def last(self, logits: torch.Tensor) -> torch.Tensor:
        """Those of each request's last token, [batch, BYTES]."""
        return logits[:, -1] if self.starts is None else logits[0, self.starts[1:] - 1]

    def step_done(self) -> None:
        self.lengths += self.new_rows

    def decode_from_here(self) -> None:
        """One token of each request from now on, [batch, 1]."""
        self.starts = None
        self.new_rows.fill_(1)


class PaddedRows:
    """torch: rows as long as the longest, with padding before the others, and a mask."""

    name = "torch, padded rows"

    def __init__(self, model: Llama, prompts: list[torch.Tensor], new: int) -> None:
        weight = model.token.weight
        device, batch, longest = weight.device, len(prompts), max(map(len, prompts))
        lengths = torch.tensor([len(x) for x in prompts], device=device)
        self.padding = (longest - lengths)[:, None]
        self.tokens = torch.stack([functional.pad(x, (longest - len(x), 0)) for x in prompts])
        block: Any = model.blocks[0]
        shape = (len(model.blocks), batch, block.heads // GROUP, longest + new, HEAD_DIM)
        self.k, self.v = (torch.zeros(shape, device=device, dtype=weight.dtype) for _ in range(2))
        self.cos, self.sin = rotary(longest + new, str(device))
        self.rows = torch.arange(longest, device=device)  # where what is new goes
        self.keys = torch.arange(longest + new, device=device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        at = (self.rows - self.padding).clamp(min=0)
        q, k = (rotated(x, self.cos[at], self.sin[at]) for x in (q, k))
        self.k[layer].index_copy_(2, self.rows, k.transpose(1, 2))
        self.v[layer].index_copy_(2, self.rows, v.transpose(1, 2))
        causal = self.keys <= self.rows[:, None]
        mask = causal & (self.keys >= self.padding)[:, None]  # [batch, queries, keys]
        return functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            self.k[layer],
            self.v[layer],
            attn_mask=mask[:, None],
            enable_gqa=True,
        ).transpose(1, 2)

    def last(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, -1]

    def step_done(self) -> None:
        self.rows += 1

    def decode_from_here(self) -> None:
        self.rows = self.rows[-1:].clone()


# ---- generation ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """What one way generated, [batch, new], and the seconds that all tokens but the first took."""

    name: str
    tokens: torch.Tensor
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return (self.tokens.numel() - len(self.tokens)) / self.seconds


@torch.inference_mode()
def generate(
    cache_kind: Any, model: Llama, prompts: list[torch.Tensor], new: int, progress: Progress
) -> Run:
    cache = cache_kind(model, prompts, new)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens, cache.attend)
        best = cache.last(logits).argmax(-1, keepdim=True)
        cache.step_done()
        return best

    current = step(cache.tokens)
    cache.decode_from_here()
    made = [current.clone()]

    def advance() -> None:
        current.copy_(step(current))

    replay: Callable[[], Any] = advance
    if current.is_cuda and new > 2:
        advance()  # loads the kernels
        made.append(current.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            advance()
        replay = graph.replay
        torch.cuda.synchronize()
    begin, before = time.perf_counter(), len(made)
    for _ in progress.track(range(new - before), description=cache.name):
        replay()
        made.append(current.clone())
    tokens = torch.cat(made, 1).cpu()  # waits for a GPU
    seconds = (time.perf_counter() - begin) * (new - 1) / max(1, new - before)
    return Run(cache.name, tokens, seconds)


def prompts_of(batch: int, device: str) -> list[torch.Tensor]:
    """Beginnings of the documentation, of 8 to LONGEST bytes."""
    lengths = torch.randint(8, LONGEST, (batch,), generator=torch.Generator().manual_seed(3))
    texts = [topics[name].strip() for name in sorted(topics)]
    return [
        torch.tensor(list(texts[i % len(texts)].encode()[:length]), device=device)
        for i, length in enumerate(lengths.tolist())
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    for name, default, words in (
        ("steps", 300, "batches to train on; 0 leaves the weights random"),
        ("layers", 3, "of the model"),
        ("dim", 128, f"of the hidden states, a multiple of {HEAD_DIM * GROUP}"),
        ("batch", 16, "prompts that are continued at once"),
        ("new", 128, "bytes to generate for each"),
        ("show", 3, "continuations to print"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=words)
    given = parser.parse_args(argv)
    # Of new bytes the first comes from the prompt's step, and speed is of those that follow.
    least = {"steps": 0, "layers": 1, "dim": 1, "batch": 1, "new": 2, "show": 0}
    for name, accepted in least.items():
        if getattr(given, name) < accepted:
            parser.error(f"--{name}: got {getattr(given, name)}, accepted are {accepted} and more")
    if given.dim % (HEAD_DIM * GROUP):
        parser.error(f"--dim: got {given.dim}, accepted are multiples of {HEAD_DIM * GROUP}")
    return given


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    torch.manual_seed(0)
    model = Llama(given.dim, given.layers).to(given.device)
    columns: list[Any] = [
        TextColumn("{task.description:>18}"), BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    ]  # fmt: skip
    prompts = prompts_of(given.batch, given.device)
    with Progress(*columns) as progress:
        loss = train(model, given.steps, given.device, progress)
        if given.device == "cuda":
            model = model.to(torch.bfloat16)
        ours, stock = (
            generate(kind, model, prompts, given.new, progress) for kind in (Pages, PaddedRows)
        )
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters, loss {loss:.2f} after {given.steps} steps, on {given.device}")
    print(f"{given.batch} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} bytes, "
          f"{given.new} more of each:")  # fmt: skip
    for run in (ours, stock):
        print(f"  {run.name:<18} {run.tokens_per_second:10,.0f} tokens per second")
    same = int((ours.tokens == stock.tokens).sum())
    print(f"{same} of {ours.tokens.numel()} tokens are the same\n")
    for prompt, tokens in list(zip(prompts, ours.tokens, strict=True))[: given.show]:
        begin, made = (bytes(x.tolist()).decode(errors="replace") for x in (prompt[-60:], tokens))
        print(f"...{begin} | {made}\n")
    if given.device == "cpu" and same < ours.tokens.numel():
        raise SystemExit("the tokens differ: accepted on the CPU are the same ones")


if __name__ == "__main__":
    main()
