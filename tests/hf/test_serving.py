"""transformers' continuous batching by our attention: the tokens of requests are those that the
stock model generates of each alone, whatever runs beside them."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("transformers.generation.continuous_batching")

import flashmoe_science  # noqa: E402
from flashmoe_science import hf  # noqa: E402
from flashmoe_science.hf import _packed  # noqa: E402
from hf_models import STOCK_ATTENTION, make, said, with_ours  # noqa: E402
from transformers.generation.continuous_batching import initialization  # noqa: E402

NEW = 10
# The first layer, all or none of the layers have a window of so many keys.
KINDS = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5},
    "gpt_oss": {},
    "qwen3": {},
}
_generator = torch.Generator().manual_seed(7)
PROMPTS = [
    torch.randint(1, 99, (length,), generator=_generator).tolist() for length in (3, 17, 9, 30, 1)
]
HOW = transformers.GenerationConfig(
    max_new_tokens=NEW, do_sample=False, eos_token_id=98, pad_token_id=0
)
PAGE_SIZE = "page_size" if hasattr(transformers.ContinuousBatchingConfig(), "page_size") else (
    "block_size")  # fmt: skip


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What our calls of attention launched, read back in the thread that serves."""
    found: list[str] = []
    real = flashmoe_science.flash_attention

    def call(*arguments: Any, **options: Any) -> Any:
        out = real(*arguments, **options)
        assert threading.current_thread() is not threading.main_thread()
        found.extend(launch.kernel for launch in flashmoe_science.last_launches())
        return out

    monkeypatch.setattr(flashmoe_science, "flash_attention", call)
    return found


def serve(model: Any, **given: Any) -> list[list[int]]:
    """In steps of 24 tokens, so that prompts come in chunks and beside decoding."""
    settings = {"num_blocks": 16, "max_batch_tokens": 24, PAGE_SIZE: 256} | given
    made = model.generate_batch(
        PROMPTS,
        generation_config=HOW,
        continuous_batching_config=transformers.ContinuousBatchingConfig(**settings),
    )
    by_prompt = {tuple(x.prompt_ids): x.generated_tokens for x in made.values()}
    return [by_prompt[tuple(prompt)] for prompt in PROMPTS]


def alone(model: Any) -> list[list[int]]:
    """Of each request what the model generates of it."""
    return [
        model.generate(torch.tensor([prompt], device=model.device), generation_config=HOW)[
            0, len(prompt) :
        ].tolist()
        for prompt in PROMPTS
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_requests_get_the_stock_models_tokens(
    kind: str, kernels: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    stock = make(kind, moe=False, **KINDS[kind])
    ours = with_ours(stock, moe=False)
    assert serve(ours) == alone(stock)
    report = hf.report()
    assert (report.ours > 2 * NEW, report.stock) == (True, 0)
    assert len(kernels) == report.ours
    assert all(kernel.startswith("attention_forward_cpu") for kernel in kernels)
    assert said(caplog) == []
    assert ours.config._attn_implementation == "fmoe"


def test_tokens_of_requests_that_decode_go_to_pages(
    monkeypatch: pytest.MonkeyPatch, kernels: list[str]
) -> None:
    """transformers has pages on GPUs alone; what computes them is there on the CPU, too."""
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    sequences = []
    real = _packed._attend_to_pages

    def noting(q: Any, *others: Any) -> Any:
        sequences.append(q.shape[1])
        return real(q, *others)

    monkeypatch.setattr(_packed, "_attend_to_pages", noting)
    stock = make("llama", moe=False)
    assert serve(with_ours(stock, moe=False), max_blocks_per_request=4) == alone(stock)
    assert max(sequences) > 1
    assert hf.report().stock == 0


def test_requests_that_ours_refuses_get_their_tokens_from_the_stock_attention(
    kernels: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for kind in ("llama", "mistral", "gemma2"):
        stock = make(kind, moe=False, **KINDS[kind]).double()
        assert serve(with_ours(stock, moe=False)) == alone(stock)
    assert kernels == []
    assert said(caplog) == [f"{STOCK_ATTENTION}tensors are of float64 on cpu"]
    assert hf.report().ours == 0


def test_strictly_a_request_that_ours_refuses_fails(caplog: pytest.LogCaptureFixture) -> None:
    hf.register(strict=True)
    ours = with_ours(make("llama", moe=False).double(), moe=False)
    with caplog.at_level(logging.CRITICAL):
        made = ours.generate_batch(
            PROMPTS[:1],
            generation_config=HOW,
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                **{"num_blocks": 16, "max_batch_tokens": 24, PAGE_SIZE: 256}
            ),
        )
    assert all(x.error for x in made.values())


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_get_the_stock_models_tokens_on_the_gpu(
    kind: str, graphs: bool, kernels: list[str]
) -> None:
    """In pages where no layer has a window, and in CUDA graphs for all batches of a size."""
    moe = kind == "gpt_oss"  # whose own experts cannot be captured
    stock = make(kind, moe=moe, **KINDS[kind]).to("cuda", torch.float16)
    ours = with_ours(stock, moe=moe)
    given = {"num_blocks": 64, "use_cuda_graph": graphs, "use_async_batching": False}
    made, expected = serve(ours, **given), alone(stock)
    same = sum(a == b for a, b in zip(made, expected, strict=True))
    assert same >= len(PROMPTS) - 1, (made, expected)  # fp16: one may take another way
    report = hf.report()
    assert (report.ours > 0, report.stock) == (True, 0)
    assert kernels
    assert all(kernel.startswith("attention_forward_sm") for kernel in kernels), set(kernels)
