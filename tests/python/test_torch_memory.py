"""What torch's tensors say of their memory beside its address: who has read what is written over,
and whether it holds the values or their negatives."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import flashmoe_science as fm
import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import flashmoe_science.torch as fmt  # noqa: E402
from flashmoe_science import _dispatch, _moe  # noqa: E402
from torch_calls import Call, assert_same, calls  # noqa: E402

TOKENS, EXPERTS, TOP_K, HIDDEN, INNER = 6, 8, 2, 16, 24

CHANGED = "has been modified by an inplace operation"
NEGATED = r"^\w+(\.\w+|\[\d\])?: its negative bit is set, accepted is a tensor without; pass "


def older_attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Attention of a torch without the exchange API: before 2.10."""
    outputs = {name: options.pop(name) for name in ("out", "lse") if name in options}
    tensors = {"q": q, "k": k, "v": v}
    return _dispatch.flash_attention(tensors, {"return_lse": False} | options, outputs, None)


def older_fused_moe(*tensors: Any, out: Any = None, **options: Any) -> Any:
    names = ("tokens", "router_weights", "w_gate_up", "w_down")
    *given, top_k = tensors
    return _moe.fused_moe(
        dict(zip(names, given, strict=True)), {"top_k": top_k} | options, out, None
    )


def attention_write(function: Any) -> Any:
    q = torch.randn(2, 8, 4, 16)

    def write(out: Any, lse: Any) -> None:
        function(q, q, q, out=out, lse=lse)

    return write, {"out": torch.zeros(2, 8, 4, 16), "lse": torch.zeros(2, 4, 8)}


def layer() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (TOKENS, HIDDEN), (EXPERTS, HIDDEN), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER),
    )  # fmt: skip
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def route_write(function: Any) -> Any:
    tokens, router, *_ = layer()
    logits = tokens @ router.T
    made = fm.moe_route(logits, TOP_K, return_lse=True)

    def write(**parts: Any) -> None:
        function(logits, TOP_K, return_lse=True, out=fm.MoeRouting(**parts))

    return write, {name: torch.zeros_like(part) for name, part in made._asdict().items()}


def route_given_write(function: Any) -> Any:
    tokens, router, *_ = layer()
    made = fm.moe_route(tokens @ router.T, TOP_K)

    def write(**parts: Any) -> None:
        function(made.ids, made.weights, num_experts=EXPERTS, out=fm.MoeRouting(**parts))

    outputs = {
        name: torch.zeros_like(part) for name, part in zip(made._fields[:5], made[:5], strict=True)
    }
    return write, outputs


def forward_write(function: Any) -> Any:
    tokens, router, w_up, w_down = layer()
    routing = fm.moe_route(tokens @ router.T, TOP_K)

    def write(out: Any, pre_activation: Any) -> None:
        function(tokens, w_up, w_down, routing, out=out, pre_activation=pre_activation)

    rows = torch.zeros(TOKENS * TOP_K, 2 * INNER)
    return write, {"out": torch.zeros_like(tokens), "pre_activation": rows}


def product_write(function: Any) -> Any:
    tokens, router, w_up, _ = layer()
    offsets = fm.moe_route(tokens @ router.T, 1).offsets

    def write(out: Any) -> None:
        function(tokens, w_up, offsets=offsets, out=out)

    return write, {"out": torch.zeros(TOKENS, 2 * INNER)}


def fused_write(function: Any) -> Any:
    tensors = layer()

    def write(out: Any) -> None:
        function(*tensors, TOP_K, out=out)

    return write, {"out": torch.zeros(TOKENS, HIDDEN)}


Make = Callable[[], tuple[Callable[..., None], dict[str, Any]]]
WRITES: dict[str, Make] = {
    f"{face}.{name}": functools.partial(make, getattr(module, name))
    for face, module in {"fm": fm, "torch": fmt}.items()
    for name, make in {
        "flash_attention": attention_write,
        "moe_route": route_write,
        "moe_route_given": route_given_write,
        "moe_forward": forward_write,
        "grouped_product": product_write,
        "fused_moe": fused_write,
    }.items()
}
WRITES["older.flash_attention"] = functools.partial(attention_write, older_attention)
WRITES["older.fused_moe"] = functools.partial(fused_write, older_fused_moe)
EVERY_WRITE = pytest.mark.parametrize("name", WRITES)


# ---- what is written to ----


def test_a_backward_pass_knows_what_was_written_over() -> None:
    q, x = torch.randn(1, 8, 2, 16), torch.randn(1, 8, 2, 16, requires_grad=True)
    out, lse = torch.randn(1, 8, 2, 16), torch.randn(1, 2, 8)
    y = x * out
    z = x[:, 0, 0, :8] * lse[:, 0]
    fm.flash_attention(q, q, q, out=out, lse=lse)
    for made in (y, z):
        with pytest.raises(RuntimeError, match=CHANGED):
            made.sum().backward()


def test_a_backward_pass_knows_what_a_layer_wrote_over() -> None:
    write, outputs = fused_write(fm.fused_moe)
    x = torch.randn_like(outputs["out"]).requires_grad_()
    made = x * outputs["out"]
    write(**outputs)
    with pytest.raises(RuntimeError, match=CHANGED):
        made.sum().backward()


@EVERY_WRITE
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_writes_are_counted(name: str, mode: Any) -> None:
    write, outputs = WRITES[name]()
    bases = {key: torch.stack([x, x]) for key, x in outputs.items()}
    given = {key: base[1] for key, base in bases.items()}  # what is written to may be a view
    before = {key: x._version for key, x in given.items()}
    with mode():
        write(**given)
    for key, x in given.items():
        assert x._version > before[key] and bases[key]._version == x._version, key
        assert not torch.equal(x.float(), torch.zeros(x.shape)), f"{key} was written to"


@EVERY_WRITE
def test_a_call_that_fails_counts_no_writes(name: str) -> None:
    write, outputs = WRITES[name]()
    last = next(reversed(outputs))
    wrong = outputs | {last: torch.zeros(1, 3, dtype=outputs[last].dtype)}
    with pytest.raises(ValueError, match=rf"^(out\.)?({'|'.join(outputs)})\b|^top_k: "):
        write(**wrong)
    assert all(x._version == 0 for x in wrong.values())


@EVERY_WRITE
def test_inference_tensors_are_written_to_in_inference_mode_alone(name: str) -> None:
    write, outputs = WRITES[name]()
    for key, x in outputs.items():
        with torch.inference_mode():
            frozen = torch.zeros_like(x)
        with pytest.raises(ValueError, match=rf"^(out\.)?{key}: it is an inference tensor, "):
            write(**outputs | {key: frozen})
        assert not frozen.any(), "nothing was written"
        with torch.inference_mode():
            write(**outputs | {key: frozen})
        assert frozen.any()


@pytest.mark.parametrize("name", [n for n in WRITES if "route" not in n])
def test_leaves_are_written_to_without_gradients_alone(name: str) -> None:
    write, outputs = WRITES[name]()
    for key, x in outputs.items():
        leaf = torch.zeros_like(x).requires_grad_()
        for given in (leaf, leaf[:], leaf * 1):
            with pytest.raises(ValueError, match=f"^{key}: requires grad"):
                write(**outputs | {key: given})
        with torch.no_grad():
            write(**outputs | {key: leaf})
        assert leaf._version > 0


# ---- the negative bit ----


def negated(x: Any) -> Any:
    """The same values by memory that holds their negatives."""
    return torch._neg_view(-x)


def test_what_torch_calls_the_imaginary_part_of_a_conjugate() -> None:
    """Its steps are those of complex numbers, but for what as_strided makes of them."""
    pairs = torch.randn(1, 8, 2, 16, dtype=torch.complex64)
    x = pairs.conj().imag.as_strided((1, 8, 2, 16), (512, 64, 32, 1))
    assert x.is_neg()
    with pytest.raises(ValueError, match=NEGATED + r"q\.resolve_neg\(\)$"):
        fm.flash_attention(x, x, x)
    plain = x.resolve_neg()
    assert not plain.is_neg() and fm.flash_attention(plain, plain, plain).isfinite().all()


PLAIN = {str(call): call for call in calls(fm)}


@pytest.mark.parametrize("call", calls(fmt), ids=str)
def test_negated_inputs_are_refused(call: Call) -> None:
    tensors = call.tensors(9, "cpu", torch.float32)
    for function in (call, PLAIN[str(call)]):
        for i, x in enumerate(tensors):
            if not x.is_floating_point():  # there are no complex integers
                continue
            given = [*tensors[:i], negated(x), *tensors[i + 1 :]]
            with pytest.raises(ValueError, match=NEGATED):
                function(*given)
            given[i] = given[i].resolve_neg()
            assert_same(function(*given), call(*tensors))


def test_negated_inputs_are_refused_by_plans_and_older_torch() -> None:
    q = torch.randn(1, 8, 2, 16)
    tensors = layer()
    for function in (fm.attention_plan, older_attention):
        with pytest.raises(ValueError, match=NEGATED.replace(r"\w+", "k", 1)):
            function(q, negated(q), q)
    with pytest.raises(ValueError, match=NEGATED.replace(r"\w+", "w_down", 1)):
        older_fused_moe(*tensors[:3], negated(tensors[3]), TOP_K)
    with pytest.raises(ValueError, match=NEGATED.replace(r"\w+", "logits", 1)):
        fm.moe_route_plan(negated(torch.randn(4, 8)), 2)


@EVERY_WRITE
def test_negated_outputs_are_refused(name: str) -> None:
    write, outputs = WRITES[name]()
    for key, x in outputs.items():
        if not x.is_floating_point():
            continue
        given = negated(x)
        with pytest.raises(ValueError, match=rf"^(out\.)?{key}: its negative bit is set"):
            write(**outputs | {key: given})
        assert not given.any()


@pytest.fixture
def fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("call", calls(fm), ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_negated_inputs_are_refused_by_graphs(mode: Any, call: Call, fresh_graphs: None) -> None:
    """Inductor takes their raw memory, even before torch's own operations."""
    tensors = call.tensors(9, "cpu", torch.float32)
    compiled = torch.compile(call.function, fullgraph=True, backend="aot_eager")
    with mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(compiled(*tensors), call(*tensors))
        for i, x in enumerate(tensors):
            given = [*tensors[:i], negated(x), *tensors[i + 1 :]]
            with pytest.raises(RuntimeError, match="its negative bit is set, accepted is"):
                compiled(*given)


def test_negated_inputs_are_refused_by_operators() -> None:
    q = torch.randn(1, 8, 2, 16)
    options = (None, None, None, "none", None, None, None, None, "bshd", None)
    assert torch.ops.flashmoe.attention(q, q, q, *options).isfinite().all()
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode(), pytest.raises(ValueError, match=NEGATED.replace(r"\w+", "v", 1)):
            torch.ops.flashmoe.attention(q, q, negated(q), *options)


def test_torchs_own_attention_serves_what_is_refused() -> None:
    q = torch.randn(1, 2, 8, 16)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    with fmt.sdpa_kernel():
        out = torch.nn.functional.scaled_dot_product_attention(negated(q), q, q)
    torch.testing.assert_close(out, wanted)
    with fmt.sdpa_kernel(strict=True), pytest.raises(NotImplementedError, match="negative bit"):
        torch.nn.functional.scaled_dot_product_attention(negated(q), q, q)
