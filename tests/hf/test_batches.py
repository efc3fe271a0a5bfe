"""Batches as training and generation have them: rows whose offsets are told, beams, and on a GPU
padding, packed rows and static caches, by our attention as by the stock one."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

import flashmoe_science  # noqa: E402
from flashmoe_science import hf  # noqa: E402
from hf_models import STOCK_ATTENTION, TOKENS, logits, make, said, with_ours  # noqa: E402

WINDOW = {"mistral": {"sliding_window": 5}, "gemma2": {"sliding_window": 5}}
GPU = pytest.param("cuda", torch.float16, marks=pytest.mark.gpu)
DEVICES = pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float32), GPU], ids=["cpu", "cuda"]
)
KINDS = pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss"])
# Which tokens are padding, of two rows of 11.
PADDINGS = {"left": ((0, slice(0, 4)),), "right": ((1, slice(7, 11)),),
            "both": ((0, slice(0, 3)), (1, slice(6, 11)))}  # fmt: skip


def models(kind: str, device: str, dtype: Any) -> tuple[Any, Any, Any]:
    """Ours, the stock one, and that in fp32 on the CPU."""
    made = make(kind, moe=False, **WINDOW.get(kind, {}))
    stock = make(kind, moe=False, **WINDOW.get(kind, {})).to(device, dtype)
    return with_ours(stock, moe=False), stock, made


def assert_near(ours: Any, stock: Any, reference: Any) -> None:
    """No farther from fp32 than twice what the stock model is, and some rounding."""
    error, usual = ((x - reference).abs().max() for x in (ours, stock))
    assert error <= 2 * usual + 1e-3 * reference.abs().max(), (error, usual)


def masked(padding: str) -> Any:
    mask = torch.ones_like(TOKENS)
    for row, hidden in PADDINGS[padding]:
        mask[row, hidden] = 0
    return mask


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of our calls of attention, read back."""
    found: list[str] = []
    real = flashmoe_science.flash_attention

    def call(*arguments: Any, **options: Any) -> Any:
        out = real(*arguments, **options)
        found.extend(x.kernel for x in flashmoe_science.last_launches())
        return out

    monkeypatch.setattr(flashmoe_science, "flash_attention", call)
    return found


# ---- offsets ----------------------------------------------------------------------------------


def flattened(lengths: tuple[int, ...] = (4, 1, 6)) -> dict[str, Any]:
    """Documents in one row, as transformers' collator passes them to flash attentions."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    documents = TOKENS.flatten()[: sum(lengths)].split(lengths)
    return dict(collate([{"input_ids": x.tolist()} for x in documents]))


@KINDS
def test_rows_with_offsets_are_one_call(
    kind: str, launches: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Also for gpt-oss, which without this takes them for one sequence."""
    ours, stock, _ = models(kind, "cpu", torch.float32)
    batch = flattened()
    with torch.no_grad():
        made = ours(**batch).logits.double()
    for first, last in ((0, 4), (4, 5), (5, 11)):
        alone = logits(stock, input_ids=batch["input_ids"][:, first:last])
        torch.testing.assert_close(made[:, first:last], alone, atol=1e-4, rtol=1e-4)
    assert len(launches) == 2
    assert said(caplog) == []


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_rows_with_offsets_are_trained(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    ours, stock, _ = models(kind, "cpu", torch.float32)
    batch = flattened()
    ours(**batch, use_cache=False).loss.backward()
    told = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    stock(**{n: x for n, x in batch.items() if n not in told}, use_cache=False).loss.backward()
    for (name, a), b in zip(ours.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4, msg=name)
    assert said(caplog) == []
    assert (hf.report().ours, hf.report().stock) == (2, 0)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_rows_with_offsets_that_ours_refuses(
    kind: str, launches: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    ours, stock, _ = models(kind, "cpu", torch.float64)
    batch = flattened()
    with torch.no_grad():
        made = ours(**batch).logits.double()
    for first, last in ((0, 4), (4, 5), (5, 11)):
        alone = logits(stock, input_ids=batch["input_ids"][:, first:last])
        torch.testing.assert_close(made[:, first:last], alone, atol=1e-5, rtol=1e-5)
    assert launches == []
    assert said(caplog) == [f"{STOCK_ATTENTION}tensors are of float64 on cpu"]


def test_rows_with_offsets_are_one_graph_for_all_lengths() -> None:
    """With a cache: without, transformers makes a mask of the positions, which a graph cannot look
    into."""
    ours, _, _ = models("llama", "cpu", torch.float32)
    graphs: list[list[str]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend=backend)
    for lengths in ((4, 1, 6), (3, 9), (2, 2, 2, 2)):
        batch = flattened(lengths)
        del batch["labels"]
        with torch.no_grad():
            want = ours(**batch, use_cache=True).logits
            torch.testing.assert_close(compiled(**batch, use_cache=True).logits, want)
    assert [graph.count("flashmoe.ragged_attention.default") for graph in graphs] == [2]


def test_a_mask_of_padding_comes_before_offsets(launches: list[str]) -> None:
    ours, stock, _ = models("llama", "cpu", torch.float32)
    starts = torch.tensor([0, 4, 11], dtype=torch.int32)
    offsets = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    mask = masked("left")
    made = logits(ours, attention_mask=mask, **offsets)
    expected = logits(stock, attention_mask=mask)
    torch.testing.assert_close(made[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)
    assert len(launches) == 2


# ---- padding, packed rows, caches, beams ------------------------------------------------------


@DEVICES
@KINDS
@pytest.mark.parametrize("padding", PADDINGS)
def test_padding(
    padding: str, kind: str, device: str, dtype: Any, launches: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    ours, stock, exact = models(kind, device, dtype)
    mask = masked(padding)
    made, plain, reference = (logits(m, attention_mask=mask) for m in (ours, stock, exact))
    seen = mask.bool()
    assert_near(made[seen], plain[seen], reference[seen])
    assert made.isfinite().all()
    family = "cpu" if device == "cpu" else "sm"
    assert len(launches) >= 2
    assert all(kernel.startswith(f"attention_forward_{family}") for kernel in launches)
    assert said(caplog) == []


@DEVICES
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_packed_rows(
    kind: str, device: str, dtype: Any, launches: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    ours, stock, exact = models(kind, device, dtype)
    at = torch.arange(11)
    places = torch.stack([at.where(at < 4, at - 4), at.where(at < 9, at - 9)])
    with torch.no_grad():
        made, plain, reference = (
            m(TOKENS.to(device if m is not exact else "cpu"), use_cache=False,
              position_ids=places.to(device if m is not exact else "cpu")).logits.double().cpu()
            for m in (ours, stock, exact)
        )  # fmt: skip
    assert_near(made, plain, reference)
    assert len(launches) >= 2 * 2  # a call for each row
    assert said(caplog) == []


@DEVICES
@pytest.mark.parametrize("inputs", ["left", "right", "packed"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_gradients(
    inputs: str, kind: str, device: str, dtype: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ours, stock, exact = models(kind, device, dtype)
    at = torch.arange(11)
    places = torch.stack([at.where(at < 4, at - 4), at.where(at < 9, at - 9)])
    given = {"position_ids": places} if inputs == "packed" else {"attention_mask": masked(inputs)}
    counts = places > 0 if inputs == "packed" else masked(inputs).bool()
    labels = TOKENS.where(counts, -100)
    if inputs == "left":  # of a first token padding is no context
        labels[0, 4] = -100
    for model in (ours, stock, exact):
        where = "cpu" if model is exact else device
        moved = {n: x.to(where) for n, x in (given | {"labels": labels}).items()}
        model(TOKENS.to(where), use_cache=False, **moved).loss.backward()
    for (name, a), b, c in zip(
        ours.named_parameters(), stock.parameters(), exact.parameters(), strict=True
    ):
        error, usual = ((x.grad.cpu().float() - c.grad).abs().max() for x in (a, b))
        assert error <= 2 * usual + 1e-3 * c.grad.abs().max() + 1e-6, (name, error, usual)
    assert said(caplog) == []
    assert (hf.report().ours, hf.report().stock) == (2, 0)


@DEVICES
@KINDS
@pytest.mark.parametrize("how", ["dynamic", "static", "beams"])
def test_generation_from_a_padded_batch(
    how: str, kind: str, device: str, dtype: Any, launches: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Greedy tokens and those of beams are the stock model's. A static cache is not compiled here,
    as transformers does on GPUs unless it is told not to."""
    ours, stock, _ = models(kind, device, dtype)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0,
                "attention_mask": masked("left").to(device)}  # fmt: skip
    settings |= {"dynamic": {}, "beams": {"num_beams": 3}, "static": {
        "cache_implementation": "static", "disable_compile": True}}[how]  # fmt: skip
    made, expected = (m.generate(TOKENS.to(device), **settings) for m in (ours, stock))
    assert torch.equal(made, expected)
    assert len(launches) >= 2 * 8
    assert said(caplog) == []
    assert (hf.report().ours, hf.report().stock) == (2 * 8, 0)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_decoding_that_inductor_compiles(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """From a padded batch into a static cache: one graph of all steps, whose launches are ours."""
    ours, stock, _ = models(kind, "cpu", torch.float32)
    kernels: list[str] = []
    other = torch.zeros(1, 1, 1, 8)

    def read_back(_: Any, scores: Any) -> Any:
        kernels.extend(launch.kernel for launch in flashmoe_science.last_launches())
        flashmoe_science.flash_attention(other, other, other)  # what is not ours leaves this one
        return scores

    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0,
                "attention_mask": masked("left")}  # fmt: skip
    compiling = transformers.CompileConfig(fullgraph=True, backend="inductor", mode="default")
    compiling._compile_all_devices = True  # the CPU as well
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    made = ours.generate(TOKENS, **settings, logits_processor=[read_back],
                         cache_implementation="static", compile_config=compiling)  # fmt: skip
    assert torch.equal(made, stock.generate(TOKENS, **settings))
    assert torch._dynamo.utils.counters["inductor"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert len(kernels) == 6
    assert all(kernel.endswith("_d16_dv16") for kernel in kernels), kernels
    assert said(caplog) == []
    assert sum(layer.ours for layer in hf.report().compiled) >= 2
