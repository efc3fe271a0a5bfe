"""transformers' continuous batching by our attention: the tokens of requests are those that the
stock model generates of each alone, whatever runs beside them."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import threading
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("transformers.generation.continuous_batching")

import flashmoe_science  # noqa: E402
from flashmoe_science import hf  # noqa: E402
from flashmoe_science.hf import _attention, _packed  # noqa: E402
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


def serve(model: Any, prompts: list[list[int]] = PROMPTS, **given: Any) -> list[list[int]]:
    """In steps of 24 tokens, so that prompts come in chunks and beside decoding."""
    settings = {"num_blocks": 16, "max_batch_tokens": 24, PAGE_SIZE: 256} | given
    made = model.generate_batch(
        prompts,
        generation_config=HOW,
        continuous_batching_config=transformers.ContinuousBatchingConfig(**settings),
    )
    by_prompt = {tuple(x.prompt_ids): x.generated_tokens for x in made.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


def alone(model: Any, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """What the model generates for each request alone."""
    return [
        model.generate(torch.tensor([prompt], device=model.device), generation_config=HOW)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]


# ---- many requests, in 16 bits -------------------------------------------------------------------
#
# In 16 bits two right implementations part at the first near-tie of two tokens, and every token
# behind it differs: of models of random weights that is most requests. So not tokens are compared
# but logits, of the sequences that were served, beside those of the stock model in float64.

_lengths = torch.randint(1, 48, (24,), generator=_generator).tolist()
MANY = [torch.randint(1, 98, (length,), generator=_generator).tolist() for length in _lengths]
# Pages of many requests that come and go, which are used again and again.
FEW_PAGES = {"num_blocks": 48, "max_batch_tokens": 64, PAGE_SIZE: 16}


class Served(NamedTuple):
    """One row of logits of a step: the tokens that the step had of this request, and where the
    first of them stands."""

    begin: int
    tokens: tuple[int, ...]
    logits: Any


def record_steps(model: Any) -> list[Served]:
    """What the model will be served, step by step, as its forward calls see it."""
    found: list[Served] = []

    def note(_: Any, __: Any, given: dict[str, Any], made: Any) -> None:
        tokens = given["input_ids"][0].tolist()
        positions = given["position_ids"][0].tolist()
        starts = given["cu_seq_lens_q"].tolist()
        wanted = given["logits_indices"].tolist()
        rows = made.logits[0].double().cpu()
        for begin, end in itertools.pairwise(starts):
            if begin == end or end - 1 not in wanted:
                continue
            row = wanted.index(end - 1) if "logits_to_keep" in given else end - 1
            found.append(Served(positions[begin], tuple(tokens[begin:end]), rows[row]))

    model.register_forward_hook(note, with_kwargs=True)
    return found


@torch.no_grad()
def logits_of(model: Any, sequences: list[list[int]]) -> list[Any]:
    tokens = [torch.tensor([x], device=model.device) for x in sequences]
    return [model(x).logits[0].double().cpu() for x in tokens]


class Judged(NamedTuple):
    """The greatest errors against float64 in logits of what was served, of ours and of the stock
    model in 16 bits; and by how much float64 prefers another token to one that was served."""

    ours: float
    stock: float
    ulp: float
    margin: float
    apart: int


def judge(stock: Any, sequences: list[list[int]], steps: list[Served] | None) -> Judged:
    right = logits_of(copy.deepcopy(stock).double().cpu(), sequences)
    plain = logits_of(stock, sequences)
    error = max(float((a - b).abs().max()) for a, b in zip(plain, right, strict=True))
    greatest = max(float(x.abs().max()) for x in right)
    bits = {torch.float16: 10, torch.bfloat16: 7}[stock.dtype]
    ulp = 2.0 ** (math.floor(math.log2(greatest)) - bits)
    margin, apart = 0.0, 0
    for prompt, sequence, logits in zip(MANY, sequences, right, strict=True):
        for at in range(len(prompt), len(sequence)):
            missed = float(logits[at - 1].max() - logits[at - 1, sequence[at]])
            margin, apart = max(margin, missed), apart + (missed > 0)
    ours, seen = 0.0, set()
    for step in steps or ():
        # Whose they are: requests that have these tokens there, nearly always one.
        errors = {
            i: float((step.logits - right[i][step.begin + len(step.tokens) - 1]).abs().max())
            for i, x in enumerate(sequences)
            if tuple(x[step.begin : step.begin + len(step.tokens)]) == step.tokens
        }
        assert errors, step
        best = min(errors, key=errors.__getitem__)
        seen.add((best, step.begin + len(step.tokens)))
        ours = max(ours, errors[best])
    if steps is not None:
        every = sum(len(x) - len(p) for p, x in zip(MANY, sequences, strict=True))
        assert len(steps) == every
        assert len(seen) > 0.9 * every
    return Judged(ours, error, ulp, margin, apart)


def assert_as_near_as_stock(judged: Judged) -> None:
    bound = 2 * judged.stock + judged.ulp
    assert judged.ours <= bound, judged
    assert judged.margin <= 2 * bound, judged  # either token's logit may be off by so much


def serve_many(stock: Any, ours: Any, logits: bool, **given: Any) -> Judged:
    steps = record_steps(ours) if logits else None
    made = serve(ours, MANY, **FEW_PAGES | given)
    sequences = [prompt + tokens for prompt, tokens in zip(MANY, made, strict=True)]
    return judge(stock, sequences, steps)


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


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_many_requests_get_the_stock_models_tokens(
    kind: str, pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, in which nothing is near enough to be decided by rounding."""
    if pages:
        monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    stock = make(kind, moe=False, **KINDS[kind])
    given = FEW_PAGES | ({"max_blocks_per_request": 8} if pages else {})
    assert serve(with_ours(stock, moe=False), MANY, **given) == alone(stock, MANY)
    assert hf.report().stock == 0


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_logits_of_many_requests_are_as_near_as_the_stock_models(kind: str) -> None:
    stock = make(kind, moe=False, **KINDS[kind]).to(torch.bfloat16)
    judged = serve_many(stock, with_ours(stock, moe=False), logits=True)
    assert_as_near_as_stock(judged)
    if kind == "llama":  # equal tokens are not to be asked for: bf16 has near-ties
        assert judged.apart > 0


def test_a_fault_in_serving_is_seen_in_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key of many left out is far beyond rounding."""
    real = _packed.attend

    def short(q: Any, k: Any, v: Any, where: Any, *others: Any) -> Any:
        if where.pages is not None:
            lengths = where.pages.lengths - (where.pages.lengths > 30).int()
            where = where._replace(pages=where.pages._replace(lengths=lengths))
        return real(q, k, v, where, *others)

    monkeypatch.setattr(_packed, "attend", short)
    stock = make("llama", moe=False).to(torch.bfloat16)
    judged = serve_many(stock, with_ours(stock, moe=False), logits=True)
    assert judged.ours > 2 * (2 * judged.stock + judged.ulp)


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


def _layers_of_steps_in_pages(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """How many tokens sequences have, for each layer's attention to pages that hold all keys."""
    found = []
    real = _packed._attend_to_written_pages

    def noting(q: Any, where: Any, *others: Any) -> Any:
        assert where.pages.k._base is not None  # a view of the cache
        assert where.pages.table.shape[1] * where.pages.k.shape[1] >= int(where.pages.lengths.max())
        found.append(where.starts_q.diff().tolist())
        return real(q, where, *others)

    monkeypatch.setattr(_packed, "_attend_to_written_pages", noting)
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_prompts_beside_requests_that_decode_are_read_in_pages(
    kind: str, monkeypatch: pytest.MonkeyPatch, kernels: list[str]
) -> None:
    found = _layers_of_steps_in_pages(monkeypatch)
    stock = make(kind, moe=False)
    assert serve(with_ours(stock, moe=False), MANY, **FEW_PAGES) == alone(stock, MANY)
    assert any(1 in step and max(step) > 1 for step in found)  # mixed
    assert any(max(step) == 1 and len(step) > 1 for step in found)  # all of them decode
    # Only what has no keys in the cache yet is not read there.
    assert len(found) > 0.8 * hf.report().ours
    assert hf.report().stock == 0


def test_layers_with_a_window_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pages are written over and over, by chunks that still see what was there."""
    found = _layers_of_steps_in_pages(monkeypatch)
    stock = make("mistral", moe=False, **KINDS["mistral"])
    assert serve(with_ours(stock, moe=False)) == alone(stock)
    assert found == []


# Windows that the layers themselves do not tell.
_FIRST_ALONE = {
    "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]
}  # fmt: skip
UNTOLD_WINDOWS = {
    # All layers have the attribute, one uses it.
    "exaone4": {"intermediate_size": 96, "sliding_window_pattern": 2} | _FIRST_ALONE,
    # In masks alone, with the attribute and without.
    "qwen2_moe": {"use_sliding_window": True} | _FIRST_ALONE,
    "phimoe": {"num_local_experts": 4, "intermediate_size": 40, "sliding_window": 5},
}


@pytest.mark.parametrize("kind", UNTOLD_WINDOWS)
def test_windows_are_those_of_the_configuration(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _layers_of_steps_in_pages(monkeypatch)
    stock = make(kind, moe=False, **UNTOLD_WINDOWS[kind])
    assert serve(with_ours(stock, moe=False)) == alone(stock)
    assert (hf.report().ours > 2 * NEW, hf.report().stock) == (True, 0)
    assert bool(found) == (kind != "phimoe")  # by the layers without a window


def _failed(model: Any) -> list[str]:
    """The errors of requests, of which a second step has keys in the cache."""
    made = model.generate_batch(
        PROMPTS,
        generation_config=HOW,
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            **{"num_blocks": 16, "max_batch_tokens": 24, PAGE_SIZE: 256}
        ),
    )
    assert all(x.error for x in made.values())
    return sorted({x.error for x in made.values()})


@pytest.mark.parametrize(
    ("kind", "layer", "reason"),
    [
        ("diffllama", "DiffLlamaAttention", "changes keys or values after they are cached"),
        ("doge", "DogeAttention", "makes a mask, which continuous batching has no place for"),
    ],
)
def test_layers_that_would_get_wrong_tokens_are_refused(
    kind: str, layer: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"intermediate_size": 96} | ({"keep_window_size": 2} if kind == "doge" else {})
    ours = with_ours(make(kind, moe=False, **given), moe=False)
    with caplog.at_level(logging.CRITICAL):
        [error] = _failed(ours)
    assert error.endswith(
        f'attn_implementation: got "flashmoe" for continuous batching, but {layer} {reason}; '
        'set another one for it, such as "sdpa"'
    )


def _sharing() -> Any:
    """A model whose third and fourth layers read the keys and values of the first and second."""
    kinds = ["sliding_attention", "full_attention"] * 2
    return make(
        "gemma3n_text", moe=False, intermediate_size=96, head_dim=16, sliding_window=5,
        num_hidden_layers=4, num_kv_shared_layers=2, layer_types=kinds,
        vocab_size_per_layer_input=99, hidden_size_per_layer_input=8, laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4, altup_num_inputs=2,
    )  # fmt: skip


def test_layers_that_share_keys_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _layers_of_steps_in_pages(monkeypatch)
    stock = _sharing()
    assert serve(with_ours(stock, moe=False)) == alone(stock)
    assert found == []
    assert (hf.report().ours > 4 * NEW, hf.report().stock) == (True, 0)


def test_a_block_table_without_pages_is_refused() -> None:
    """As a layer would get it that takes its keys from another."""
    q = torch.zeros(1, 2, 3, 16)
    starts = torch.arange(4, dtype=torch.int32)
    offsets = {"cu_seq_lens_q": starts, "cu_seq_lens_k": {"full_attention": starts},
               "max_length_q": 1, "max_length_k": {"full_attention": 1}}  # fmt: skip
    with pytest.raises(NotImplementedError, match="Module takes keys and values from another"):
        hf.attention(
            torch.nn.Module(), q, q, q, None, **offsets, write_index=[], block_table=starts[None]
        )


def test_models_whose_layers_share_keys_ask_for_no_block_tables() -> None:
    requested = initialization.is_flash_attention_requested
    config = with_ours(make("llama", moe=False).to(torch.float16), moe=False).config
    config.dtype = torch.float16
    assert requested(config, version=2)
    config.num_kv_shared_layers = 1
    assert not requested(config, version=2)


def test_what_is_refused_at_last_is_gathered_from_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attention, "_attention_refusal", lambda *_: "this is refused")
    found = _layers_of_steps_in_pages(monkeypatch)
    stock = make("llama", moe=False)
    assert serve(with_ours(stock, moe=False)) == alone(stock)
    assert (found, hf.report().ours) == ([], 0)
    assert hf.report().stock > 2 * NEW


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
    ours_alone = ("attention_forward_sm", "attention_combine_sm")
    assert all(kernel.startswith(ours_alone) for kernel in kernels), set(kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "qwen3"])
def test_logits_of_many_requests_are_as_near_as_the_stock_models_on_the_gpu(
    kind: str, dtype: Any, graphs: bool
) -> None:
    """In graphs, whose logits nobody sees, by the tokens: float64 prefers none by far."""
    stock = make(kind, moe=False, **KINDS[kind]).to("cuda", dtype)
    given = {"use_cuda_graph": graphs, "use_async_batching": False}
    judged = serve_many(stock, with_ours(stock, moe=False), logits=not graphs, **given)
    assert_as_near_as_stock(judged)
    assert (hf.report().ours > 0, hf.report().stock) == (True, 0)
