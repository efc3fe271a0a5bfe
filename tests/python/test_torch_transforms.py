"""torch.func and forward-mode differentiation: no derivative is left out silently, and vmap is a
loop of calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import flashmoe_science as fm
import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import flashmoe_science.torch as fmt  # noqa: E402
from flashmoe_science import _dispatch  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch_calls import Call, Recorder, assert_same, calls, normal  # noqa: E402

F = torch.nn.functional
PLAIN = {str(call): call for call in calls(fm)}
CALLS = pytest.mark.parametrize("call", calls(fmt), ids=str)
TANGENT = (
    r"^\w+(\.\w+|\[\d\])?: has a tangent of forward-mode differentiation, but "
    r"(attention|the m[a-z]+ of [a-z ]+) has no derivative yet; "
    r"pass \w+(\.\w+|\[\d\])?\.detach\(\)$"
)
BACKWARD = (
    r"^\w+(\[\d\])?: requires grad, but (attention|the m[a-z]+ of [a-z ]+) has no backward pass yet"
)
INSIDE = (
    r"^\w+(\.\w+|\[\d\])?: got a tensor of a transform of torch.func, accepted is one with memory"
)


def floats(tensors: tuple[Any, ...]) -> list[int]:
    return [i for i, x in enumerate(tensors) if x.is_floating_point()]


def summed(function: Callable[..., Any], *tensors: Any) -> Any:
    made = function(*tensors)
    made = made if isinstance(made, tuple) else (made,)
    return sum(x.sum() for x in made if x.is_floating_point())


# ---- derivatives ----


@CALLS
def test_a_tangent_of_any_argument_is_refused(call: Call) -> None:
    plain = PLAIN[str(call)]
    tensors = call.tensors(9, "cpu", torch.float32)
    for i in floats(tensors):
        for function in (call, plain):
            with forward_ad.dual_level():
                given = list(tensors)
                given[i] = forward_ad.make_dual(given[i], torch.ones_like(given[i]))
                with pytest.raises(ValueError, match=TANGENT):
                    function(*given)
                with torch.no_grad(), pytest.raises(ValueError, match=TANGENT):
                    function(*given)
                with Recorder(), pytest.raises(ValueError, match=TANGENT):
                    call(*given)
                given[i] = given[i].detach()
                assert_same(function(*given), call(*tensors))
                with torch.inference_mode():
                    assert_same(function(*tensors), call(*tensors))


def test_inference_tensors_have_no_tangents() -> None:
    with torch.inference_mode():
        q = normal((1, 8, 2, 16), "cpu", torch.float32)
    with forward_ad.dual_level():
        for function in (fm.flash_attention, fmt.flash_attention):
            assert torch.equal(function(q, q, q), fm.flash_attention(q, q, q))
        with Recorder():
            assert torch.equal(fmt.flash_attention(q, q, q), fm.flash_attention(q, q, q))


@CALLS
@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "linearize", "grad", "jacrev", "vjp"])
def test_transforms_of_forward_mode_are_refused(call: Call, transform: str) -> None:
    """And those of reverse mode where there is no backward."""
    plain = PLAIN[str(call)]
    tensors = call.tensors(9, "cpu", torch.float32)
    first = floats(tensors)[0]
    rest = list(tensors)

    def differentiate(function: Callable[..., Any]) -> Any:
        def of_one(x: Any) -> Any:
            return summed(function, *rest[:first], x, *rest[first + 1 :])

        x = tensors[first]
        if transform == "jvp":
            return torch.func.jvp(of_one, (x,), (torch.ones_like(x),))
        if transform in ("linearize", "vjp"):
            return getattr(torch.func, transform)(of_one, x)
        return getattr(torch.func, transform)(of_one)(x)

    forward = transform in ("jvp", "jacfwd", "linearize")
    if not call.operator.startswith("merge"):
        for function in (call, plain):
            if forward:
                with pytest.raises(ValueError, match=TANGENT):
                    differentiate(function)
            else:
                differentiate(function)
        return
    with pytest.raises(ValueError, match=TANGENT if forward else BACKWARD):
        differentiate(call)
    with pytest.raises(ValueError, match=f"{INSIDE}|{TANGENT}"):
        differentiate(plain)


def test_older_torch_refuses_tangents_too() -> None:
    """Whose tensors have no exchange API: the Python half looks at them."""
    words = _dispatch.ATTENTION
    x = normal((1, 8, 2, 16), "cpu", torch.float32)
    torchs = _dispatch.Torch("torch")
    with forward_ad.dual_level():
        torchs.check("q", x, words)
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(ValueError, match=TANGENT):
            torchs.check("q", dual, words)
        with torch.inference_mode():
            torchs.check("q", dual, words)
        torchs.check("q", dual.detach(), words)


@pytest.mark.parametrize("strict", [False, True])
def test_torchs_own_attention_differentiates_inside(strict: bool) -> None:
    q, k, v = (normal((1, 2, 5, 16), "cpu", torch.float64, seed) for seed in range(3))

    def attend(q: Any) -> Any:
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float()).sum()

    want = torch.func.grad(attend)(q)
    with fmt.sdpa_kernel(strict=strict):
        torch.testing.assert_close(torch.func.grad(attend)(q), want)
        if strict:
            return
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            value, tangent = torch.func.jvp(attend, (q,), (torch.ones_like(q),))
    torch.testing.assert_close(tangent, want.sum().float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(value, attend(q))


# ---- vmap ----


@CALLS
@pytest.mark.parametrize("which", ["all", "first", "last"])
def test_vmap_is_a_loop_of_calls(call: Call, which: str) -> None:
    entries = [call.tensors(tokens, "cpu", torch.float32) for tokens in (9, 9, 9)]
    entries = [
        tuple(x * (1 + i) if x.is_floating_point() else x for x in tensors)
        for i, tensors in enumerate(entries)
    ]
    batched = {"all": range(len(entries[0])), "first": [0], "last": [len(entries[0]) - 1]}[which]
    given = list(entries[0])
    for n, i in enumerate(batched):
        given[i] = torch.stack([tensors[i] for tensors in entries], n % 2)
    in_dims = [None] * len(given)
    for n, i in enumerate(batched):
        in_dims[i] = n % 2

    pairs = list(zip(given, in_dims, strict=True))
    each = [
        call(*(x if d is None else x.select(d, i).contiguous() for x, d in pairs)) for i in range(3)
    ]
    each = [x if isinstance(x, tuple) else (x,) for x in each]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = torch.func.vmap(call.function, tuple(in_dims))(*given)
    made = made if isinstance(made, tuple) else (made,)
    for got, *want in zip(made, *each, strict=True):
        torch.testing.assert_close(got, torch.stack(want), atol=1e-5, rtol=1e-5)


def test_vmap_of_attention_and_of_layers_is_one_call() -> None:
    by_name = {str(call): call for call in calls(fmt)}
    q, k, v = (normal((3, 2, 9, 2, 16), "cpu", torch.float32, seed) for seed in range(3))
    with Recorder() as recorder:
        torch.func.vmap(lambda q, k, v: fmt.flash_attention(q, k, v))(q, k, v)
    ((_, arguments),) = recorder.seen
    assert arguments[0].shape == (6, 9, 2, 16)
    x, *weights = by_name["fused"].tensors(9, "cpu", torch.float32)
    with Recorder() as recorder:
        torch.func.vmap(lambda x: by_name["fused"].function(x, *weights))(
            x[None].expand(3, -1, -1, -1)
        )
    ((_, arguments),) = recorder.seen
    assert arguments[0].shape == (3 * x[..., 0].numel(), x.shape[-1])


def test_vmap_of_vmap_and_of_attention_by_torchs_semantics() -> None:
    q, k, v = (normal((2, 3, 4, 9, 16), "cpu", torch.float32, seed) for seed in range(3))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return fmt.scaled_dot_product_attention(q, k, v, is_causal=True)

    torch.testing.assert_close(torch.func.vmap(torch.func.vmap(attend))(q, k, v), want)
    compiled = torch.compile(torch.func.vmap(attend), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), want)


def test_vmap_of_the_packages_own_functions() -> None:
    q = normal((3, 1, 8, 2, 16), "cpu", torch.float32)
    made = torch.func.vmap(lambda q: fm.flash_attention(q, q, q))(q)
    assert torch.equal(made[:, 0], fm.flash_attention(*[q[:, 0]] * 3))
    x, *weights = PLAIN["product"].tensors(9, "cpu", torch.float32)
    made = torch.func.vmap(lambda x: PLAIN["product"](x, *weights))(x[None])
    assert torch.equal(made[0], PLAIN["product"](x, *weights))
    outs, lses = PLAIN["merge"].tensors(9, "cpu", torch.float32)
    with pytest.raises(ValueError, match=INSIDE + ".*flashmoe_science.torch$"):
        torch.func.vmap(lambda x: PLAIN["merge"](x, lses))(outs[None])


def test_functionalize() -> None:
    q = normal((1, 8, 2, 16), "cpu", torch.float32)
    made = torch.func.functionalize(lambda q: fmt.flash_attention(q, q, q))(q)
    assert torch.equal(made, fm.flash_attention(q, q, q))
