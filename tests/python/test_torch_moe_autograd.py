"""The mixture of experts under torch's autograd on the CPU, held to a loop over experts in
float64."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashmoe_science as fm  # noqa: E402
import flashmoe_science.torch as fmt  # noqa: E402
import moe_gradients  # noqa: E402
import numpy as np  # noqa: E402
import torch_moe_training  # noqa: E402
from flashmoe_science import UnsupportedError  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_moe_training import Extents, fresh, reference  # noqa: E402

T, H, INNER, E, K = 45, 64, 40, 8, 3
MODULES = pytest.mark.parametrize("fm", [fm, fmt], ids=["package", "torch"])


def leaves(dtype: Any, *, transposed: bool = False) -> dict[str, Any]:
    return torch_moe_training.leaves(Extents(T, H, INNER, E), dtype, transposed=transposed)


def grads(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.grad for name, x in given.items()}


def reordered(seed: int, given: dict[str, Any], dout: Any, ids: Any, how: str, dtype: Any) -> Any:
    """reference() with its sums in orders of their own."""
    rng = np.random.default_rng(seed)
    t, h, i = (rng.permutation(n) for n in (T, H, INNER))
    both = np.concatenate([i, i + INNER])
    axes = {"tokens": (t, h), "router_weights": (None, h), "router_bias": (),
            "w_gate_up": (None, both, h), "w_down": (None, h, i), "b_gate_up": (None, both),
            "b_down": (None, h)}  # fmt: skip

    def turned(x: Any, orders: Any) -> Any:
        return torch.from_numpy(moe_gradients.turned(x.detach().numpy(), orders))

    other = {name: turned(x, axes[name]) for name, x in given.items()}
    made = reference(other, turned(dout, axes["tokens"]), turned(ids, (t,)), how, dtype)
    return {name: moe_gradients.turned(x, axes[name], back=True) for name, x in made.items()}


@pytest.fixture
def torch_in_one_thread() -> Iterator[None]:
    """The errors of torch's sums depend on how many threads share one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@MODULES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scoring", ["softmax", "topk_softmax", "sigmoid"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.usefixtures("torch_in_one_thread")
def test_a_layer(fm: Any, dtype: Any, scoring: str, transposed: bool) -> None:
    given = leaves(dtype, transposed=transposed)
    dout = torch.randn(T, H, generator=torch.Generator().manual_seed(3)).to(dtype)
    options: dict[str, Any] = {"scoring": scoring, "renormalize": True, "scale": 1.5}
    out = fm.fused_moe(**given, top_k=K, **options)
    out.backward(dout)
    with torch.no_grad():
        assert torch.equal(out, fm.fused_moe(**given, top_k=K, **options))
        every = torch.tensor([0, T], dtype=torch.int32)
        logits = fm.grouped_product(given["tokens"], given["router_weights"][None], offsets=every,
                                    bias=given["router_bias"][None])  # fmt: skip
        ids = fm.moe_route(logits, K, scoring=scoring).ids.long()
    ref = reference(given, dout, ids, scoring, torch.float64)
    plain = reference(given, dout, ids, scoring, dtype)
    import capi

    kind = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    for seed in range(1, moe_gradients.ORDERS[capi.DTYPES[kind].name]):
        other = reordered(seed, given, dout, ids, scoring, dtype)
        plain = moe_gradients.furthest(ref, plain, other)
    for name, gradient in grads(given).items():
        assert gradient.dtype == dtype, name
        assert gradient.stride() == given[name].stride(), name
        low = gradient.float().numpy()
        moe_gradients.assert_near(name, low, ref[name], plain[name], capi.DTYPES[kind])


def test_the_parts_are_the_whole() -> None:
    """fused_moe's gradients are those of its three functions, and of fused_moe_backward."""
    given = leaves(torch.float32)
    dout = torch.randn(T, H)
    fm.fused_moe(**given, top_k=K, renormalize=True).backward(dout)
    with torch.no_grad():
        made = fm.fused_moe_backward(dout, **given, top_k=K, renormalize=True)
    for name, gradient in grads(given).items():
        other = getattr(made, name)
        if name == "tokens":  # a sum of two, of which one was rounded before
            torch.testing.assert_close(other, gradient)
        else:
            assert torch.equal(other, gradient), name


@MODULES
def test_auxiliary_losses_and_given_weights(fm: Any) -> None:
    """Through lse, through a loss by the weights, and through weights that were given."""
    logits = torch.randn(T, E, requires_grad=True)
    routing = fm.moe_route(logits, K, scoring="softmax", return_lse=True)
    (routing.lse**2).mean().backward()
    got, logits.grad = logits.grad, None
    (logits.double().logsumexp(-1) ** 2).mean().backward()
    torch.testing.assert_close(got, logits.grad)
    weights = torch.rand(T, K, requires_grad=True)
    ids = routing.ids.clone()
    ids[3, 1] = -1
    made = fm.moe_route_given(ids, weights, num_experts=E, renormalize=True, scale=2.0)
    factor = torch.randn(T, K)
    (made.weights * factor).sum().backward()
    got, weights.grad = weights.grad, None
    plain = weights / weights.sum(-1, keepdim=True) * 2.0 * (ids >= 0)
    (plain * factor).sum().backward()
    torch.testing.assert_close(got, weights.grad)
    assert not made.ids.requires_grad
    assert not made.slots.requires_grad


@MODULES
@pytest.mark.parametrize("counted", [False, True])
def test_grouped_product(fm: Any, counted: bool) -> None:
    bounds = torch.tensor([3, 0, 7] if counted else [1, 4, 4, 11], dtype=torch.int32)
    rows = (3, 7) if counted else (12,)
    x = torch.randn(*rows, 24, requires_grad=True)
    w = torch.randn(3, 16, 24, requires_grad=True)
    bias = torch.randn(3, 16, requires_grad=True)
    given = {"counts": bounds} if counted else {"offsets": bounds}
    out = fm.grouped_product(x, w, bias=bias, **given)
    dout = torch.randn_like(out)
    out.backward(dout)
    want = [torch.zeros_like(t) for t in (x, w, bias)]
    for e in range(3):
        at: Any = (e, slice(0, int(bounds[e]))) if counted else slice(*bounds[e : e + 2].tolist())
        want[0][at] = dout[at] @ w[e].detach()
        want[1][e] = dout[at].T @ x[at].detach()
        want[2][e] = dout[at].sum(0)
    for got, ref in zip((x.grad, w.grad, bias.grad), want, strict=True):
        torch.testing.assert_close(got, ref)


def test_frozen_experts_cost_no_products() -> None:
    given = {name: x.detach() for name, x in leaves(torch.float32).items()}
    given["tokens"].requires_grad_()
    fm.fused_moe(**given, top_k=K).sum().backward()
    kernels = [launch.kernel for launch in fm.last_launches()]
    # The router's backward comes last.
    assert [k.partition("_cpu_")[0] for k in kernels] == ["grouped_product_backward_dx"]
    routing = fm.moe_route(torch.randn(T, E), K)
    out = fm.moe_forward(given["tokens"], given["w_gate_up"], given["w_down"], routing)
    out.sum().backward()
    stages = [launch.kernel.partition("_cpu_")[0] for launch in fm.last_launches()]
    assert stages == [f"moe_backward_{s}" for s in ("down", "activation", "dx", "combine")]


def test_what_is_frozen_is_not_computed() -> None:
    given = leaves(torch.float32)
    dout = torch.randn(T, H)
    fm.fused_moe(**given, top_k=K).backward(dout)
    want = grads(given)
    for name in given:
        alone = {other: x.detach() for other, x in given.items()}
        alone[name] = given[name].detach().clone().requires_grad_()
        fm.fused_moe(**alone, top_k=K).backward(dout)
        assert torch.equal(alone[name].grad, want[name]), name
        assert all(x.grad is None for other, x in alone.items() if other != name)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_breaks(backend: str) -> None:
    torch._dynamo.reset()
    given = leaves(torch.float32)
    dout = torch.randn(T, H)

    def call(**tensors: Any) -> Any:
        return fm.fused_moe(**tensors, top_k=K, renormalize=True)

    call(**given).backward(dout)
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    again = fresh(given)
    compiled(**again).backward(dout)
    for name, gradient in grads(given).items():
        torch.testing.assert_close(again[name].grad, gradient)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    given, dout = leaves(torch.bfloat16), torch.randn(T, H).bfloat16()
    fm.fused_moe(**given, top_k=K).backward(dout)
    again = fresh(given)
    names = list(again)

    def call(*tensors: Any) -> Any:
        return fm.fused_moe(**dict(zip(names, tensors, strict=True)), top_k=K)

    checkpoint(call, *again.values(), use_reentrant=reentrant).backward(dout)
    for name, gradient in grads(given).items():
        assert torch.equal(again[name].grad, gradient), name


def test_operators_are_sound() -> None:
    given = leaves(torch.float32)
    tokens, w_gate_up, w_down = (given[n].detach() for n in ("tokens", "w_gate_up", "w_down"))
    routing = fm.moe_route(torch.randn(T, E), K)
    parts = routing[1:5]
    layer = ("gate_up", "silu", 1.0, None, 0.0, False)
    ops = torch.ops.flashmoe
    every = [True] * 8
    torch.library.opcheck(
        ops.moe_backward.default,
        (torch.randn(T, H), tokens, w_gate_up, w_down, *parts, None, None, None, None, None,
         *layer, every, 1 << 30),
    )  # fmt: skip
    torch.library.opcheck(
        ops.moe_route_backward.default,
        (torch.randn(T, K), routing.ids, torch.randn(T, E), None, None, "softmax", True, 1.0),
    )
    offsets = torch.tensor([0, 9, T], dtype=torch.int32)
    torch.library.opcheck(
        ops.grouped_product_backward.default,
        (torch.randn(T, 16), tokens, torch.randn(2, 16, H), offsets, None, None,
         [True, True, False]),
    )  # fmt: skip


def test_refusals() -> None:
    given = leaves(torch.float32)
    out = fm.fused_moe(**given, top_k=K)
    (dtokens,) = torch.autograd.grad(out.sum(), given["tokens"], create_graph=True)
    with pytest.raises(fm.UnsupportedError, match=r"^the mixture of experts: its gradients are"):
        dtokens.sum().backward()
    with pytest.raises(ValueError, match=r"^out: got one in a call that gradients are recorded of"):
        fm.fused_moe(**given, top_k=K, out=torch.empty(T, H))
    with pytest.raises(ValueError, match=r"^router_weights: got neither it nor logits"):
        fm.fused_moe(**given | {"router_weights": None}, top_k=K)


WRONG = {
    "router-columns": {"router_weights": torch.zeros(E, H + 8)},
    "router-experts": {"router_weights": torch.zeros(2 * E, H), "router_bias": None},
    "router-no-product": {"router_weights": torch.zeros(E - 2, H), "router_bias": None},
    "router-rank": {"router_weights": torch.zeros(E, H, 1)},
    "router-dtype": {"router_weights": torch.zeros(E, H, dtype=torch.bfloat16)},
    "bias-experts": {"router_bias": torch.zeros(E + 1)},
    "tokens-columns": {"tokens": torch.zeros(T, H + 8)},
    "tokens-dtype": {"tokens": torch.zeros(T, H, dtype=torch.float64)},
    "tokens-address": {"tokens": torch.zeros(T, 2 * H)[:, 1 : H + 1]},
    "logits-and-bias": {"router_weights": None, "logits": torch.zeros(T, E)},
    "logits-rows": {"router_weights": None, "router_bias": None, "logits": torch.zeros(T + 1, E)},
    "logits-experts": {
        "router_weights": None, "router_bias": None, "logits": torch.zeros(T, E + 8)
    },
}  # fmt: skip


def said(call: Any, given: dict[str, Any]) -> str:
    with pytest.raises(fm.FlashMoEError) as refused:
        call(**given, top_k=K)
    return re.sub("0x[0-9a-f]+", "", str(refused.value))


@pytest.mark.parametrize("case", WRONG)
@MODULES
def test_errors_of_a_recorded_layer_are_those_of_one_that_is_not(fm: Any, case: str) -> None:
    """A layer that torch records is computed in parts, whose arguments have other names."""
    given = leaves(torch.float32) | WRONG[case]
    want = said(fm.fused_moe, {n: None if x is None else x.detach() for n, x in given.items()})
    assert said(fm.fused_moe, given) == want

    def of_transform(tokens: Any, **others: Any) -> Any:
        return torch.func.vjp(lambda tokens: fm.fused_moe(tokens, **others), tokens)

    if case != "tokens-address":  # a transform's tensor has none
        assert said(of_transform, given) == want


@pytest.mark.parametrize("case", sorted(WRONG.keys() - {"router-no-product", "tokens-address"}))
def test_errors_of_the_functional_gradients_have_the_layers_names(case: str) -> None:
    given = {n: None if x is None else x.detach() for n, x in leaves(torch.float32).items()}
    given |= WRONG[case]
    want = said(fm.fused_moe, given)
    assert said(lambda **a: fm.fused_moe_backward(torch.zeros(T, H), **a), given) == want


def test_what_the_functional_gradients_alone_do_not_take() -> None:
    given = {n: x.detach() for n, x in leaves(torch.float32).items()}
    dout = torch.zeros(5, 9, H)
    with pytest.raises(ValueError, match=r"^tokens: got 3 dimensions, accepted are 2$"):
        fm.fused_moe_backward(dout, **given | {"tokens": dout}, top_k=K)
    few = {n: x[: E - 2] for n, x in given.items() if n != "tokens"}
    with pytest.raises(
        ValueError, match=r"^router_weights: its number of experts is 6, accepted are multiples of"
    ):
        fm.fused_moe_backward(torch.zeros(T, H), given["tokens"], **few, top_k=K)


@pytest.mark.parametrize(
    ("dout", "sentence"),
    [
        (torch.zeros(T + 1, H), f"dout: its number of tokens is {T + 1}, but tokens has {T}"),
        (torch.zeros(T, H + 8), f"dout: its hidden size is {H + 8}, but tokens has {H}"),
        (torch.zeros(T, H).bfloat16(), "dout: got dtype bf16, accepted is fp32 as tokens's"),
    ],
    ids=["rows", "columns", "dtype"],
)
def test_dout_of_the_functional_gradients_is_compared_with_tokens(
    dout: torch.Tensor, sentence: str
) -> None:
    given = {n: x.detach() for n, x in leaves(torch.float32).items()}
    assert said(lambda **a: fm.fused_moe_backward(dout, **a), given) == sentence


@pytest.mark.parametrize("name", sorted(leaves(torch.float32)))
@MODULES
def test_a_tangent_of_any_tensor_of_the_layer_is_refused_by_its_name(fm: Any, name: str) -> None:
    given = {n: x.detach() for n, x in leaves(torch.float32).items()}

    def of_one(x: Any) -> Any:
        return fm.fused_moe(**given | {name: x}, top_k=K)

    def along(tangent: Any) -> Any:
        return torch.func.jvp(of_one, (given[name],), (tangent,))

    # As jacfwd, which has a tangent for every element: of a weight gigabytes.
    tangents = torch.ones(2, *given[name].shape)
    with pytest.raises(ValueError, match=rf"^{name}: has a tangent of forward-mode"):
        torch.func.vmap(along)(tangents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_without_tokens(dtype: torch.dtype) -> None:
    """torch's tensors without elements have no address."""
    given = {n: x.detach() for n, x in leaves(dtype).items()} | {
        "tokens": torch.zeros(0, H).to(dtype)
    }
    made = fm.fused_moe_backward(given["tokens"], **given, top_k=K)
    for name, x in given.items():
        gradient = getattr(made, name)
        assert gradient.shape == x.shape and gradient.dtype == dtype, name
        assert not gradient.any(), name
    routing = fm.moe_route(torch.zeros(0, E, dtype=dtype), K)
    layer = given["tokens"], given["w_gate_up"], given["w_down"], routing
    dweights = fm.moe_backward(given["tokens"], *layer).weights
    assert dweights.shape == (0, K) and dweights.dtype == dtype


def test_a_module_learns() -> None:
    torch.manual_seed(0)
    layer = fmt.FlashMoELayer(32, 24, 8, 2, router_bias=True, expert_bias=True, transposed=True)
    x, y = torch.randn(64, 32), torch.randn(64, 32) * 0.1
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = ((layer(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


# ---- what is overwritten ----


def layer_call(gate: str = "gate_up", **options: Any) -> tuple[Any, dict[str, Any], Any]:
    """A layer of leaves, and dout."""
    given = {name: leaves(torch.float32)[name] for name in ("tokens", "w_gate_up", "w_down")}
    routing = fm.moe_route(torch.randn(T, E, generator=torch.Generator().manual_seed(8)), K)

    def call(tokens: Any, w_gate_up: Any, w_down: Any) -> Any:
        return fm.moe_forward(tokens, w_gate_up, w_down, routing, gate=gate, **options)

    return call, given, torch.randn(T, H, generator=torch.Generator().manual_seed(9))


def kept_before(call: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """The output, and the pre-activations that the graph keeps for itself."""
    kept: list[Any] = []

    def pack(x: Any) -> Any:
        if x.shape == (T * K, 2 * INNER):
            kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = call(**given)
    (before,) = kept
    return out, before


@pytest.mark.parametrize("gate", ["gate_up", "up_gate", "interleaved"])
def test_what_a_graph_keeps_for_itself_is_overwritten(gate: str) -> None:
    call, given, dout = layer_call(gate)
    out, before = kept_before(call, given)
    held = before.clone()
    out.backward(dout)
    assert torch.equal(before, held) == (gate == "interleaved")
    want = grads(given)
    again = fresh(given)
    out, shown = layer_call(gate, return_pre_activation=True)[0](**again)
    out.backward(dout)
    assert torch.equal(shown, held)  # which is the caller's, too
    for name, gradient in want.items():
        assert torch.equal(again[name].grad, gradient), name


@pytest.mark.parametrize("seen", [False, True])
def test_a_graph_that_is_retained(seen: bool) -> None:
    """Its second gradients are those of other pre-activations than it had, which it computes."""
    call, given, dout = layer_call()
    call(**given).backward(dout)
    want = grads(given)
    again = fresh(given)
    out, before = kept_before(call, again) if seen else (call(**again), torch.zeros(0))
    held = before.clone()
    for times in (1, 2, 3):
        for leaf in again.values():
            leaf.grad = None
        out.backward(dout, retain_graph=times < 3)
        assert not (seen and torch.equal(before, held))
        for name, gradient in want.items():
            assert torch.equal(again[name].grad, gradient), (times, name)


def test_gradients_of_several_outputs_at_once() -> None:
    """Entry by entry, from the same pre-activations."""
    call, given, _ = layer_call()
    douts = torch.randn(3, T, H)
    out, before = kept_before(call, given)
    held = before.clone()
    made = torch.autograd.grad(out, list(given.values()), douts, is_grads_batched=True)
    assert torch.equal(before, held)
    for i, dout in enumerate(douts):
        again = fresh(given)
        call(**again).backward(dout)
        for leaf, entries in zip(again.values(), made, strict=True):
            assert torch.equal(leaf.grad, entries[i])


def test_memory_that_a_hook_makes_is_overwritten_in_its_place() -> None:
    """As with torch.autograd.graph.save_on_cpu: what a hook keeps stays."""
    call, given, dout = layer_call()
    call(**given).backward(dout)
    again = fresh(given)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        out = call(**again)
    for times in (1, 2):
        for leaf in again.values():
            leaf.grad = None
        out.backward(dout, retain_graph=times < 2)
        for name, leaf in given.items():
            assert torch.equal(again[name].grad, leaf.grad), name


def test_gradients_that_may_be_differentiated_overwrite_nothing() -> None:
    call, given, dout = layer_call()
    out, before = kept_before(call, given)
    held = before.clone()
    made = torch.autograd.grad(out, list(given.values()), dout, create_graph=True)
    assert torch.equal(before, held)
    again = fresh(given)
    call(**again).backward(dout)
    for leaf, gradient in zip(again.values(), made, strict=True):
        assert torch.equal(leaf.grad, gradient)


# ---- what is saved ----


def saved(call: Any) -> tuple[Any, dict[int, int]]:
    """What the call returns, and the bytes of each memory that it saved for gradients."""
    kept: dict[int, int] = {}

    def pack(x: Any) -> Any:
        kept[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        return call(), kept


def addresses(*tensors: Any) -> set[int]:
    return {x.data_ptr() for x in tensors}


@MODULES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_layer_saves_its_inputs_and_pre_activations(fm: Any, dtype: Any) -> None:
    given = leaves(dtype)
    x, *layer = (given[n] for n in ("tokens", "w_gate_up", "w_down"))
    with torch.no_grad():
        routing = fm.moe_route(torch.randn(T, E), K)
    inputs = (x, *layer, *routing[1:5])
    out, kept = saved(lambda: fm.moe_forward(x, *layer, routing))
    rest = {address: size for address, size in kept.items() if address not in addresses(*inputs)}
    assert addresses(*inputs) <= kept.keys()
    assert list(rest.values()) == [2 * INNER * T * K * dtype.itemsize]
    assert out.data_ptr() not in kept
    out.relu_().sum().backward()  # in place of what nobody saved
    (out, pre_activation), kept = saved(
        lambda: fm.moe_forward(x, *layer, routing, return_pre_activation=True)
    )
    assert kept.keys() == addresses(*inputs, pre_activation)


@MODULES
def test_products_and_routings_save_no_result_but_ids(fm: Any) -> None:
    x, w = torch.randn(9, 16, requires_grad=True), torch.randn(2, 8, 16, requires_grad=True)
    bias, offsets = torch.randn(2, 8, requires_grad=True), torch.tensor([0, 4, 9]).int()
    _, kept = saved(lambda: fm.grouped_product(x, w, offsets=offsets, bias=bias))
    assert kept.keys() == addresses(x, w, offsets, bias)
    logits = torch.randn(T, E, requires_grad=True)
    routing, kept = saved(lambda: fm.moe_route(logits, K, return_lse=True))
    assert kept.keys() == addresses(logits, routing.ids)
    weights = torch.rand(T, K, requires_grad=True)
    made, kept = saved(lambda: fm.moe_route_given(routing.ids, weights, num_experts=E))
    assert kept.keys() == addresses(routing.ids, weights, made.ids)


# ---- the workspace of gradients ----


def wide_leaves() -> dict[str, Any]:
    """Leaves with more columns than one block of chunks has."""
    g = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Any:
        return (torch.randn(shape, generator=g) * shape[-1] ** -0.5).requires_grad_()

    return {"tokens": normal(20, 264), "router_weights": normal(8, 264),
            "w_gate_up": normal(8, 1040, 264), "w_down": normal(8, 264, 520)}  # fmt: skip


def by_parts(
    fm: Any, given: dict[str, Any], max_workspace_bytes: int | None, recompute: bool = False
) -> Any:
    logits = given["tokens"] @ given["router_weights"].T
    return fm.moe_forward(
        given["tokens"],
        given["w_gate_up"],
        given["w_down"],
        fm.moe_route(logits, 2),
        max_workspace_bytes=max_workspace_bytes,
        recompute=recompute,
    )


def at_once(
    fm: Any, given: dict[str, Any], max_workspace_bytes: int | None, recompute: bool = False
) -> Any:
    return fm.fused_moe(
        **given, top_k=2, max_workspace_bytes=max_workspace_bytes, recompute=recompute
    )


def by_module(
    fm: Any, given: dict[str, Any], max_workspace_bytes: int | None, recompute: bool = False
) -> Any:
    layer = fmt.FlashMoELayer(264, 520, 8, 2, renormalize=False, recompute=recompute,
                              max_workspace_bytes=max_workspace_bytes)  # fmt: skip
    state = {"gate.weight": given["router_weights"], "experts.gate_up_proj": given["w_gate_up"],
             "experts.down_proj": given["w_down"]}  # fmt: skip
    return torch.func.functional_call(layer, state, (given["tokens"],))


LAYERS = [(by_parts, None), (at_once, None), (by_module, None), (by_parts, "aot_eager"),
          (at_once, "aot_eager")]  # fmt: skip


@MODULES
@pytest.mark.parametrize(("layer", "backend"), LAYERS)
def test_the_workspace_of_gradients_is_bounded(fm: Any, layer: Any, backend: str | None) -> None:
    """To the same bits; one that is too low is told of when gradients are computed."""
    torch._dynamo.reset()
    given = wide_leaves()
    call = torch.compile(layer, backend=backend, fullgraph=True) if backend else layer
    dout = torch.randn(20, 264)

    def gradients(bound: int | None) -> Any:
        return torch.autograd.grad(call(fm, given, bound), list(given.values()), dout)

    want = gradients(None)
    with pytest.raises(UnsupportedError, match="max_workspace_bytes: got 1, acc") as refusal:
        gradients(1)
    told = re.search(r"and from (\d+) on", str(refusal.value))
    assert told is not None
    for made, gradient in zip(gradients(int(told[1])), want, strict=True):
        assert torch.equal(made, gradient)
    with torch.no_grad():  # which computes none
        assert torch.equal(layer(fm, given, 1), layer(fm, given, None))
    with torch.no_grad():
        layer(fm, given, (1 << 63) - 1)
    for bound in (0, 1 << 63, 1 << 70):
        told = rf"^max_workspace_bytes: got {bound}, accepted are 1 to 2\*\*63 - 1, or None"
        with pytest.raises(ValueError, match=told):
            layer(fm, given, bound)


@MODULES
@pytest.mark.parametrize(("layer", "backend"), LAYERS)
def test_recomputed_gradients_save_less(fm: Any, layer: Any, backend: str | None) -> None:
    """By the pre-activations alone, and have the same bits."""
    torch._dynamo.reset()
    given = wide_leaves()
    call = torch.compile(layer, backend=backend, fullgraph=True) if backend else layer
    dout = torch.randn(20, 264)
    outs, sizes = {}, {}
    for recompute in (False, True):
        out, kept = saved(lambda r=recompute: call(fm, given, None, r))
        sizes[recompute] = sum(kept.values())
        outs[recompute] = [out, *torch.autograd.grad(out, list(given.values()), dout)]
    assert sizes[False] - sizes[True] == 2 * 520 * 20 * 2 * 4
    for made, gradient in zip(outs[True], outs[False], strict=True):
        assert torch.equal(made, gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight_on_input", [False, True])
def test_recomputed_gradients_have_the_same_bits(dtype: Any, weight_on_input: bool) -> None:
    """With biases, a clamp, and what the activation is applied to as a result of its own."""
    given = leaves(dtype)
    tensors = {("x" if name == "tokens" else name): x for name, x in given.items()
               if not name.startswith("router")}  # fmt: skip
    routing = fm.moe_route(torch.randn(T, E, requires_grad=True), K)
    made = {}
    for recompute in (False, True):
        options: dict[str, Any] = {
            "alpha": 1.7, "limit": 1.5, "up_offset": 1.0, "weight_on_input": weight_on_input,
            "return_pre_activation": True, "recompute": recompute,
        }  # fmt: skip
        (out, _), kept = saved(
            lambda options=options: fm.moe_forward(**tensors, routing=routing, **options)
        )
        if recompute:
            assert kept.keys() == addresses(*tensors.values(), *routing[1:5])
        wanted = [*tensors.values(), routing.weights]
        made[recompute] = torch.autograd.grad(out, wanted, torch.ones_like(out))
    for ours, want in zip(made[True], made[False], strict=True):
        assert torch.equal(ours, want)


@MODULES
@pytest.mark.parametrize("layer", [by_parts, at_once, by_module])
def test_recompute_is_a_flag(fm: Any, layer: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^recompute: got 'all' of type str, acc"):
        layer(fm, wide_leaves(), None, "all")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("wanted", [None, "tokens", "router_weights", "w_gate_up", "b_down"])
def test_no_tokens(wanted: str | None, recompute: bool) -> None:
    given = {name: x.detach() for name, x in leaves(torch.float32).items()}
    given["tokens"] = torch.empty(0, H)
    learned = [name for name in given if wanted in (None, name)]
    for name in learned:
        given[name].requires_grad_()
    fm.fused_moe(**given, top_k=K, recompute=recompute).sum().backward()
    for name in learned:
        assert given[name].grad.shape == given[name].shape
        assert (given[name].grad == 0).all()


@pytest.mark.parametrize("counted", [False, True])
def test_no_rows_of_a_product_whose_weights_are_frozen(counted: bool) -> None:
    x = torch.empty((E, 0, H) if counted else (0, H), requires_grad=True)
    bounds = {"counts": torch.zeros(E).int()} if counted else {"offsets": torch.zeros(E + 1).int()}
    fm.grouped_product(x, torch.ones(E, INNER, H), **bounds).sum().backward()
    assert x.grad.shape == x.shape


def test_no_tokens_whose_weights_are_given() -> None:
    given = leaves(torch.float32)
    weights = torch.empty(0, K, requires_grad=True)
    routing = fm.moe_route_given(torch.empty(0, K).int(), weights, num_experts=E)
    layer = [given[name].detach() for name in ("w_gate_up", "w_down")]
    fm.moe_forward(torch.empty(0, H), *layer, routing).sum().backward()
    assert weights.grad.shape == (0, K)
