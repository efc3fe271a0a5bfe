"""scaled_dot_product_attention of flashmoe_science.torch against torch's own, and torch's own calls
routed to it."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

import flashmoe_science as fm
import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import flashmoe_science.torch as fmt  # noqa: E402
from flashmoe_science import _warn_once  # noqa: E402
from flashmoe_science.torch import sdpa  # noqa: E402
from torch_calls import refuse_gradients  # noqa: E402

F = torch.nn.functional


def normal(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(*lead: int, seq: tuple[int, int] = (13, 21), dims: tuple[int, int] = (16, 24)) -> Any:
    q, k = seq
    return (
        normal(*lead, q, dims[0]), normal(*lead, k, dims[0], seed=1),
        normal(*lead, k, dims[1], seed=2),
    )  # fmt: skip


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the calls that reach our attention; what was said once is forgotten."""
    calls: list[tuple[int, ...]] = []
    real = sdpa.flash_attention

    def spy(q: Any, *rest: Any, **options: Any) -> Any:
        calls.append(tuple(q.shape))
        return real(q, *rest, **options)

    monkeypatch.setattr(sdpa, "flash_attention", spy)
    _warn_once.forget()
    yield calls
    _warn_once.forget()


# ---- the function ----


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("lead", [(2, 3), (2,), (), (2, 2, 3), (1, 2, 1, 3)], ids=str)
@pytest.mark.parametrize("seq", [(13, 21), (21, 13), (1, 9)], ids=str)
def test_is_torchs(
    seq: tuple[int, int], lead: tuple[int, ...], scale: float | None, is_causal: bool
) -> None:
    tensors = qkv(*lead, seq=seq)
    got = fmt.scaled_dot_product_attention(*tensors, is_causal=is_causal, scale=scale)
    want = F.scaled_dot_product_attention(*tensors, is_causal=is_causal, scale=scale)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want)


def test_grouped_heads() -> None:
    q, k, v = normal(2, 6, 9, 16), normal(2, 2, 12, 16), normal(2, 2, 12, 16, seed=1)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    got = fmt.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(got, want)
    v = normal(2, 3, 12, 16, seed=1)  # in groups of its own
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(fmt.scaled_dot_product_attention(q, k, v, enable_gqa=True), want)
    with pytest.raises(
        ValueError, match=r"^key: got 2 heads, but query has 6; with enable_gqa=True"
    ):
        fmt.scaled_dot_product_attention(q, k, v)


# Leading dimensions of query, key and value, and of the result; None where torch raises.
LEADS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]] = [
    ((2, 3, 4), (3, 2, 4), (3, 2, 4), None),
    ((2, 3, 4), (2, 3, 4), (3, 2, 4), None),
    ((2, 3, 4), (6, 4), (6, 4), None),
    ((2, 4), (3, 4), (3, 4), None),
    ((2, 4), (2, 2), (2, 2), None),
    ((2, 4), (2, 4), (2, 2), None),
    ((2, 2), (2, 4), (2, 4), None),
    ((2,), (3,), (3,), None),
    ((2, 3, 4), (1, 3, 4), (1, 3, 4), (2, 3, 4)),
    ((2, 3, 4), (2, 3, 4), (1, 1, 1), (2, 3, 4)),
    ((1, 1, 1), (1, 1, 1), (2, 3, 4), (2, 3, 4)),
    ((1, 3, 4), (2, 1, 4), (1, 1, 1), (2, 3, 4)),
    ((2, 1, 2, 2), (1, 3, 2, 2), (2, 3, 1, 1), (2, 3, 2, 2)),
    ((2, 4), (1, 4), (1, 4), (2, 4)),
    ((1, 4), (2, 4), (2, 4), (2, 4)),
    ((2, 4), (1, 4), (2, 4), (2, 4)),
    ((2, 4), (2, 1), (2, 1), (2, 4)),
    ((2, 4), (2, 4), (2, 1), (2, 4)),
    ((2, 1), (2, 4), (2, 4), (2, 4)),
    ((2,), (1,), (1,), (2,)),
    ((1,), (3,), (3,), (3,)),
    ((2, 4), (4,), (4,), (2, 4)),
    ((4,), (2, 4), (2, 4), (2, 4)),
    ((2, 4), (), (), (2, 4)),
    ((), (3,), (3,), (3,)),
    ((0, 4), (0, 4), (0, 4), (0, 4)),
    ((2, 0), (2, 0), (2, 0), (2, 0)),
    ((2, 0, 3), (2, 0, 3), (2, 0, 3), (2, 0, 3)),
]
GROUPED: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]] = [
    ((2, 4), (2, 2), (2, 1), (2, 4)),
    ((2, 4), (2, 4), (2, 2), (2, 4)),
    ((2, 4), (1, 2), (1, 2), (2, 4)),
    ((4,), (2,), (2,), (4,)),
    ((2, 4), (2,), (2,), (2, 4)),
    ((2, 2, 4), (1, 2, 2), (2, 1, 2), (2, 2, 4)),
    ((2, 4), (2, 3), (2, 3), None),
    ((2, 2), (2, 4), (2, 4), None),
    ((3, 4), (2, 2), (2, 2), None),
    ((), (), (), None),
]


@pytest.mark.parametrize(
    ("lead_q", "lead_k", "lead_v", "lead", "enable_gqa"),
    [(*leads, False) for leads in LEADS] + [(*leads, True) for leads in GROUPED],
)
def test_leading_dimensions_broadcast_as_torchs(
    lead_q: tuple[int, ...], lead_k: tuple[int, ...], lead_v: tuple[int, ...],
    lead: tuple[int, ...] | None, enable_gqa: bool,
) -> None:  # fmt: skip
    tensors = (
        normal(*lead_q, 5, 16), normal(*lead_k, 7, 16, seed=1), normal(*lead_v, 7, 24, seed=2),
    )  # fmt: skip
    options = {"is_causal": True, "enable_gqa": enable_gqa}
    if lead is None:
        with pytest.raises((RuntimeError, IndexError)) as torchs:
            F.scaled_dot_product_attention(*tensors, **options)
        with pytest.raises(ValueError, match=r"^(query|key|value): (got|dimension) "):
            fmt.scaled_dot_product_attention(*tensors, **options)
        with fmt.sdpa_kernel(), pytest.raises(type(torchs.value)) as routed:
            F.scaled_dot_product_attention(*tensors, **options)
        assert str(routed.value) == str(torchs.value)
        return
    want = F.scaled_dot_product_attention(*tensors, **options)
    assert want.shape == (*lead, 5, 24)
    for function in (fmt.scaled_dot_product_attention, F.scaled_dot_product_attention):
        with fmt.sdpa_kernel(strict=True):
            got = function(*tensors, **options)
        assert got.shape == want.shape
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        (((8,), (7, 8), (7, 8)), "query: got 1 dimensions, accepted are 2 or more"),
        (((5, 8), (7, 16), (7, 8)), "key: its head dimension is 16, but query has 8"),
        (((5, 8), (7, 8), (6, 8)), "value: its sequence length is 6, but key has 7"),
        (
            ((2, 3, 4, 5, 8), (3, 2, 4, 7, 8), (3, 2, 4, 7, 8)),
            "key: dimension -4 is 2, but query has 3; accepted are equal ones and 1",
        ),
        (
            ((1, 4, 5, 8), (2, 4, 7, 8), (3, 4, 7, 8)),
            "value: dimension -4 is 3, but key has 2; accepted are equal ones and 1",
        ),
    ],
)
def test_shapes_that_do_not_go_together_are_named(
    shapes: tuple[tuple[int, ...], ...], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        fmt.scaled_dot_product_attention(*(normal(*shape) for shape in shapes))


def test_views_are_read_where_they_lie() -> None:
    packed = normal(2, 13, 3, 4, 16)
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    got = fmt.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v))


def test_arguments_are_torchs() -> None:
    doc = F.scaled_dot_product_attention.__doc__.strip().partition(")")[0]
    theirs = [part.split("=")[0].split(":")[0].strip() for part in doc.partition("(")[2].split(",")]
    assert list(inspect.signature(fmt.scaled_dot_product_attention).parameters) == theirs


def test_what_is_not_there_is_refused_with_a_sentence() -> None:
    q, k, v = qkv(2, 3)
    bias = torch.zeros(13, 21, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"^attn_mask: requires grad, but no kernel"):
        fmt.scaled_dot_product_attention(q, k, v, bias)
    with pytest.raises(NotImplementedError, match=r"^dropout_p: got 0.1, accepted is 0"):
        fmt.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    for name in ("query", "key", "value", "attn_mask"):
        given = {"query": q, "key": k, "value": v, name: q.numpy()}
        with pytest.raises(TypeError, match=rf"^{name}: got ndarray, accepted is a torch\.Tensor"):
            fmt.scaled_dot_product_attention(**given)
    with pytest.raises(TypeError, match=r"^dropout_p: got a torch\.Tensor, accepted is the number"):
        fmt.scaled_dot_product_attention(q, k, v, dropout_p=torch.zeros(2))  # type: ignore[arg-type]
    for name in ("is_causal", "enable_gqa"):
        wrong: Any = {name: torch.ones(2)}
        with pytest.raises(TypeError, match=rf"^{name}: got tensor.*, accepted are False and True"):
            fmt.scaled_dot_product_attention(q, k, v, **wrong)
    narrow = (x[..., :4] for x in (q, k, v))
    with pytest.raises(ValueError, match=r"^query: its head dimension is 4, accepted are multiple"):
        fmt.scaled_dot_product_attention(*narrow)


def test_compiles_for_every_length() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: fmt.scaled_dot_product_attention(q, k, v, is_causal=True),
        fullgraph=True, dynamic=True, backend=backend,
    )  # fmt: skip
    for seq in ((5, 7), (9, 9), (40, 11)):
        tensors = qkv(2, 3, seq=seq)
        torch.testing.assert_close(
            compiled(*tensors), F.scaled_dot_product_attention(*tensors, is_causal=True)
        )
    assert len(graphs) == 1
    assert "flashmoe.attention.default" in graphs[0]


# ---- torch's own calls ----


def test_routes_torchs_calls(ours: list[tuple[int, ...]]) -> None:
    tensors = qkv(2, 3)
    want = F.scaled_dot_product_attention(*tensors, is_causal=True)
    with fmt.sdpa_kernel():
        got = F.scaled_dot_product_attention(*tensors, is_causal=True)
        by_name = torch.nn.functional.scaled_dot_product_attention(
            query=tensors[0], key=tensors[1], value=tensors[2], is_causal=True
        )
    assert ours == [(2, 3, 13, 16)] * 2
    torch.testing.assert_close(got, want)
    assert torch.equal(by_name, got)
    F.scaled_dot_product_attention(*tensors)
    assert len(ours) == 2


def test_routes_the_calls_of_modules(ours: list[tuple[int, ...]]) -> None:
    module = torch.nn.MultiheadAttention(32, 2, batch_first=True).eval()
    x = normal(2, 9, 32)
    with torch.no_grad():
        want, _ = module(x, x, x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with fmt.sdpa_kernel(strict=True):
                got, _ = module(x, x, x, need_weights=False)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert ours == [(2, 2, 9, 16)]
    torch.testing.assert_close(got, want)
    with torch.no_grad(), fmt.sdpa_kernel():
        weighted, weights = module(x, x, x)  # for which torch stores them
    torch.testing.assert_close(weighted, want)
    assert weights.shape == (2, 9, 9)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"attn_mask": torch.zeros(13, 21, requires_grad=True)}, "attn_mask: requires grad"),
        ({"scale": -1.0}, "scale: got -1.0, accepted are positive numbers"),
        ({"query": normal(2, 3, 13, 12), "key": normal(2, 3, 21, 12)}, "its head dimension is 12"),
        ({"query": normal(2, 3, 16, 13).mT}, "its last dimension is not contiguous"),
        (
            {"query": normal(0, 3, 13, 16), "key": normal(1, 3, 21, 16), "value": normal(21, 24)},
            "an empty batch is broadcast",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_not_ours_goes_to_torch_and_is_said_once(
    given: dict[str, Any], reason: str, ours: list[tuple[int, ...]],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    arguments = dict(zip(("query", "key", "value"), qkv(2, 3), strict=True)) | given
    want = F.scaled_dot_product_attention(**arguments)
    with caplog.at_level(logging.WARNING, "flashmoe_science.torch"), fmt.sdpa_kernel():
        for _ in range(2):
            got = F.scaled_dot_product_attention(**arguments)
            assert torch.equal(got, want)
    assert len(caplog.records) == 1
    assert reason in caplog.text
    with fmt.sdpa_kernel(strict=True), pytest.raises(fm.UnsupportedError, match=reason):
        F.scaled_dot_product_attention(**arguments)


def test_one_reason_at_two_addresses_is_said_once(
    ours: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    between = normal(4 * 3 * 8 * 16 + 1)[1:].view(4, 3, 8, 16)  # two multiples of 16 bytes
    for x in (between, between[1:]):
        want = F.scaled_dot_product_attention(x, x, x)
        with caplog.at_level(logging.WARNING, "flashmoe_science.torch"), fmt.sdpa_kernel():
            assert torch.equal(F.scaled_dot_product_attention(x, x, x), want)
    assert len(caplog.records) == 1
    assert "q: its data begins at address …, which is not a multiple of 16 bytes" in caplog.text


def test_gradients_of_torchs_own_calls_are_right_inside(ours: list[tuple[int, ...]]) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 2))
    want = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
    with fmt.sdpa_kernel():
        got = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
    assert len(ours) == 1
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_wrong_calls_have_torchs_own_words() -> None:
    q, k, v = qkv(2, 3)
    with fmt.sdpa_kernel(), pytest.raises(RuntimeError) as ours_raised:
        F.scaled_dot_product_attention(q, k[..., :8], v)
    with pytest.raises(RuntimeError) as torchs:
        F.scaled_dot_product_attention(q, k[..., :8], v)
    assert str(ours_raised.value) == str(torchs.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda q, k, v: (q,), {}),
        (lambda q, k, v: (q, k, v), {"extra": 1}),
        (lambda q, k, v: (q, k, v, None, 0.0, False, 1.0), {}),
        (lambda q, k, v: (1, 2, 3), {}),
        (lambda q, k, v: (q, k.bfloat16(), v), {}),
        (lambda q, k, v: (q.int(), k.int(), v.int()), {}),
        (lambda q, k, v: (q[0, 0, 0], k, v), {}),
    ],
)
def test_calls_of_the_wrong_kind_have_torchs_own_words(given: Any, words: dict[str, Any]) -> None:
    arguments = given(*qkv(2, 3))
    with pytest.raises((TypeError, RuntimeError)) as torchs:
        F.scaled_dot_product_attention(*arguments, **words)
    with fmt.sdpa_kernel(), pytest.raises(type(torchs.value)) as routed:
        F.scaled_dot_product_attention(*arguments, **words)
    assert str(routed.value) == str(torchs.value)


# ---- autocast ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "given",
    [
        (torch.float32,) * 3, (torch.bfloat16,) * 3, (torch.float16,) * 3,
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float16),
    ],
    ids=str,
)  # fmt: skip
def test_autocast_is_torchs(
    given: tuple[Any, ...], dtype: Any, ours: list[tuple[int, ...]]
) -> None:
    tensors = [x.to(d) for x, d in zip(qkv(2, 3), given, strict=True)]
    with torch.autocast("cpu", dtype=dtype):
        want = F.scaled_dot_product_attention(*tensors, is_causal=True)
        got = fmt.scaled_dot_product_attention(*tensors, is_causal=True)
        with fmt.sdpa_kernel(strict=True):
            routed = F.scaled_dot_product_attention(*tensors, is_causal=True)
        with torch.autocast("cpu", enabled=False):
            within = fmt.scaled_dot_product_attention(*(x.float() for x in tensors))
    assert want.dtype == got.dtype == routed.dtype == dtype
    assert within.dtype == torch.float32
    assert len(ours) == 3
    exact = F.scaled_dot_product_attention(*(x.to(dtype).double() for x in tensors), is_causal=True)
    worst = (want - exact).abs().max()
    assert (got - exact).abs().max() <= 2 * worst + torch.finfo(dtype).eps
    assert torch.equal(got, routed)
    if len(set(given)) > 1:
        with pytest.raises(TypeError, match=r"^(key|value): got dtype"):
            fmt.scaled_dot_product_attention(*tensors)


def test_autocast_leaves_float64_and_other_devices_alone() -> None:
    doubles = [x.double() for x in qkv(2, 3)]
    want = F.scaled_dot_product_attention(*doubles)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(fmt.scaled_dot_product_attention(*doubles), want)
        with pytest.raises(RuntimeError) as torchs:
            F.scaled_dot_product_attention(doubles[0], *qkv(2, 3)[1:])
        with fmt.sdpa_kernel(), pytest.raises(RuntimeError) as routed:
            F.scaled_dot_product_attention(doubles[0], *qkv(2, 3)[1:])
        assert str(routed.value) == str(torchs.value)
        meta = torch.empty(2, 3, 8, 16, device="meta")
        assert fmt.scaled_dot_product_attention(meta, meta, meta).dtype == torch.float32


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("routed", [False, True])
def test_autocast_of_compiled_calls(routed: bool, where: str, ours: list[tuple[int, ...]]) -> None:
    tensors = qkv(2, 3)

    def attend(*tensors: Any) -> Any:
        if routed:
            return F.scaled_dot_product_attention(*tensors)
        return fmt.scaled_dot_product_attention(*tensors)

    def program(*tensors: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attend(*tensors)

    torch._dynamo.reset()
    inside = where == "inside"
    function = program if inside else attend
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    mode = fmt.sdpa_kernel(strict=True) if routed else contextlib.nullcontext()
    on = contextlib.nullcontext() if inside else torch.autocast("cpu", dtype=torch.bfloat16)
    with mode, on:
        got = compiled(*tensors)
        want = function(*tensors)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)
    if not inside:  # autocast is in the guards
        with mode:
            assert compiled(*tensors).dtype == torch.float32


# ---- the mode ----


def modes() -> int:
    count: int = torch._C._len_torch_function_stack()
    return count


def test_one_mode_entered_twice_and_left_by_exceptions(ours: list[tuple[int, ...]]) -> None:
    tensors = qkv(2, 3)
    mode = fmt.sdpa_kernel()
    for _ in range(2):
        with mode, mode:
            F.scaled_dot_product_attention(*tensors)
        F.scaled_dot_product_attention(*tensors)
    assert len(ours) == 2
    with pytest.raises(KeyError), mode:
        raise KeyError
    for strict in (False, True):
        with fmt.sdpa_kernel(strict=strict):
            with pytest.raises((RuntimeError, NotImplementedError)):
                F.scaled_dot_product_attention(tensors[0], tensors[1][..., :8], tensors[2])
            assert modes() == 1
            F.scaled_dot_product_attention(*tensors)
    assert len(ours) == 4
    assert modes() == 0


@pytest.mark.parametrize(("outer", "inner"), [(False, True), (True, False), (False, False)])
def test_nested_modes(outer: bool, inner: bool, ours: list[tuple[int, ...]]) -> None:
    tensors = qkv(2, 3)
    want = F.scaled_dot_product_attention(*tensors, dropout_p=1.0)
    with fmt.sdpa_kernel(strict=outer), fmt.sdpa_kernel(strict=inner):
        F.scaled_dot_product_attention(*tensors)
        assert len(ours) == 1
        if inner or outer:
            with pytest.raises(NotImplementedError, match=r"dropout_p: got 1\.0"):
                F.scaled_dot_product_attention(*tensors, dropout_p=1.0)
        else:
            assert torch.equal(F.scaled_dot_product_attention(*tensors, dropout_p=1.0), want)


def test_other_modes_see_what_is_left_to_torch() -> None:
    seen = []

    class Outer(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func is sdpa._STOCK)
            return func(*args, **(kwargs or {}))

    tensors = qkv(2, 3)
    with Outer(), fmt.sdpa_kernel():
        F.scaled_dot_product_attention(*tensors, scale=-1.0)
    assert any(seen)


def test_a_mode_is_a_decorator(ours: list[tuple[int, ...]]) -> None:
    tensors = qkv(2, 3)

    @fmt.sdpa_kernel(strict=True)
    def attend(*tensors: Any) -> Any:
        """Attends."""
        return F.scaled_dot_product_attention(*tensors)

    assert attend.__doc__ == "Attends."
    for _ in range(2):
        attend(*tensors)
        F.scaled_dot_product_attention(*tensors)
    assert len(ours) == 2
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), attend(*tensors))
    assert modes() == 0


def test_threads_with_one_mode(ours: list[tuple[int, ...]]) -> None:
    tensors = qkv(1, 2)
    mode = fmt.sdpa_kernel(strict=True)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                with mode:
                    F.scaled_dot_product_attention(*tensors)
                assert modes() == 0
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(ours) == 80


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["encoder", "decoder", "transformer"])
def test_routes_transformers_in_eval_mode(
    kind: str, grad_mode: Any, ours: list[tuple[int, ...]]
) -> None:
    nn = torch.nn
    torch.manual_seed(0)
    options: dict[str, Any] = {"dim_feedforward": 64, "dropout": 0.0, "batch_first": True}
    x = normal(2, 9, 32)
    if kind == "encoder":
        module = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, **options), 2)
        inputs, attentions = (x,), 2
    elif kind == "decoder":
        module, inputs, attentions = nn.TransformerDecoderLayer(32, 2, **options), (x, x), 2
    else:
        module, inputs, attentions = nn.Transformer(32, 2, 1, 1, **options), (x, x), 3
    module = module.eval()
    with grad_mode():
        want = module(*inputs)
        with fmt.sdpa_kernel(strict=True):
            got = module(*inputs)
    torch.testing.assert_close(got, want)
    assert ours == [(2, 2, 9, 16)] * attentions


def test_what_a_graph_leaves_to_torch_is_said_while_it_is_compiled(
    ours: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """And the graph is whole: reasons that the library gives, too late then, are seen before."""
    misaligned = normal(2, 3, 13, 18)[..., :16]
    q, k, v = qkv(2, 3, dims=(16, 16))
    rows = "query: its rows do not begin at multiples of 16 bytes"
    for given, options, reason in (
        ((q[..., :12], k[..., :12], v), {}, "query: its head dimension is 12"),
        ((misaligned, k, v), {}, rows),
        ((q, k, v), {"scale": -0.5}, "scale: accepted are positive numbers"),
        ((q, k, v), {"dropout_p": 1e-9}, "dropout_p: accepted is 0: attention has no dropout yet"),
        ((q.mT.contiguous().mT, k, v), {}, "query: its last dimension is not contiguous"),
    ):
        caplog.clear()
        torch._dynamo.reset()

        def attend(q: Any, k: Any, v: Any, options: dict[str, Any] = options) -> Any:
            return F.scaled_dot_product_attention(q, k, v, **options)

        compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
        with caplog.at_level(logging.WARNING), fmt.sdpa_kernel():
            got = compiled(*given)
        torch.testing.assert_close(got, attend(*given))
        said = [r.getMessage() for r in caplog.records if r.name == "flashmoe_science.torch"]
        assert len(said) == 1
        assert f"implementation: {reason}" in said[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_that_no_kernel_computes_are_left_to_torch(
    compiled: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _warn_once.forget()
    refuse_gradients(monkeypatch, dim=24)
    torch._dynamo.reset()
    attend = F.scaled_dot_product_attention
    if compiled:
        attend = torch.compile(lambda *t: F.scaled_dot_product_attention(*t), fullgraph=True,
                               dynamic=True, backend="aot_eager")  # fmt: skip
    for dim in (24, 32):
        q, k, v = (x.requires_grad_() for x in qkv(2, 3, dims=(dim, dim)))
        with caplog.at_level(logging.WARNING), fmt.sdpa_kernel(strict=dim == 32):
            got = torch.autograd.grad(attend(q, k, v).sin().sum(), (q, k, v))
        stock = F.scaled_dot_product_attention(q, k, v)
        for x, y in zip(got, torch.autograd.grad(stock.sin().sum(), (q, k, v)), strict=True):
            torch.testing.assert_close(x, y)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "flashmoe_science.torch"]
    assert "requires grad, but no kernel computes the gradients of this call (sm0: head" in said
    with torch.no_grad(), fmt.sdpa_kernel(strict=True):
        attend(*(x.detach() for x in qkv(2, 3, dims=(24, 24))))
    strict = pytest.raises((NotImplementedError, torch._dynamo.exc.TorchDynamoException),
                           match="sm0: head dimension 24")  # fmt: skip
    with fmt.sdpa_kernel(strict=True), strict:
        attend(*(x.requires_grad_() for x in qkv(2, 3, dims=(24, 24))))


def test_a_graph_of_float64_is_ours(ours: list[tuple[int, ...]]) -> None:
    tensors = [x.double() for x in qkv(2, 3, dims=(16, 16))]
    torch._dynamo.reset()
    attend = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    with fmt.sdpa_kernel(strict=True):
        got = attend(*tensors)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, F.scaled_dot_product_attention(*tensors), atol=1e-13, rtol=0)
    assert len(ours) == 1


def test_other_threads_are_left_alone(ours: list[tuple[int, ...]]) -> None:
    tensors = qkv(1, 2)
    with fmt.sdpa_kernel():
        thread = threading.Thread(target=F.scaled_dot_product_attention, args=tensors)
        thread.start()
        thread.join()
    assert ours == []


def test_routes_compiled_modules() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    module = torch.nn.MultiheadAttention(32, 2).train()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for seq in (7, 11, 40):
            x = normal(seq, 3, 32)
            want, _ = module(x, x, x, need_weights=False)
            with fmt.sdpa_kernel():
                got, _ = compiled(x, x, x, need_weights=False)
            torch.testing.assert_close(got, want)
    assert len(graphs) == 1
    assert "flashmoe.attention.default" in graphs[0]


@pytest.mark.parametrize("inside", [False, True])
def test_routes_compiled_calls(inside: bool) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    def attend(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    def program(*tensors: Any) -> Any:
        with fmt.sdpa_kernel():
            return attend(*tensors)

    torch._dynamo.reset()
    options: dict[str, Any] = {"fullgraph": True, "dynamic": True, "backend": backend}
    compiled = torch.compile(program if inside else attend, **options)
    for seq in ((5, 7), (9, 9), (40, 11)):
        tensors = qkv(2, 3, seq=seq)
        want = attend(*tensors)
        if inside:
            got = compiled(*tensors)
        else:
            with fmt.sdpa_kernel():
                got = compiled(*tensors)
        torch.testing.assert_close(got, want)
    assert len(graphs) == 1
    assert "flashmoe.attention.default" in graphs[0]
