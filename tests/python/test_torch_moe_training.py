"""Training experts with torch: derivatives by differences, autocast, adapters, graphs, and several
processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import flashmoe_science as fm  # noqa: E402
import flashmoe_science.torch as fmt  # noqa: E402
import moe_gradients  # noqa: E402
from flashmoe_science.moe import Activation, Gate, Scoring  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

T, H, INNER, E, K = 24, 32, 24, 8, 2
ACTIVATIONS, SCORINGS = get_args(Activation), get_args(Scoring)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


class Gradients(TorchDispatchMode):
    """The flags by which backward passes of layers said which gradients they want."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[list[bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.flashmoe.moe_backward.default:
            self.wanted.append(list(args[-2]))
        return func(*args, **kwargs or {})


# ---- derivatives by differences, in float64 ----

IDS = torch.tensor([[0, 1], [1, 0], [1, -1]], dtype=torch.int32)
LIMIT = 1.5


def by_differences(function: Any, *tensors: Any) -> bool:
    inputs = [x.double().requires_grad_() for x in tensors]
    result: bool = torch.autograd.gradcheck(function, inputs, fast_mode=True)
    return result


def layer_of_tensors(gate: str, seed: int = 0) -> dict[str, Any]:
    """By moe_forward's names, beside the weights of IDS."""
    rows = 8 if gate in ("none", "separate") else 16
    made = {
        "x": normal(3, 8, seed=seed), "weights": normal(3, 2, seed=seed + 1),
        "w_gate_up": normal(2, rows, 8, seed=seed + 2, scale=0.5),
        "w_down": normal(2, 8, 8, seed=seed + 3, scale=0.5),
        "b_gate_up": normal(2, rows, seed=seed + 4), "b_down": normal(2, 8, seed=seed + 5),
    }  # fmt: skip
    if gate == "separate":
        made |= {"w_up": normal(2, 8, 8, seed=seed + 6, scale=0.5), "b_up": normal(2, 8, seed=7)}
    return made


def run_layer(tensors: dict[str, Any], **options: Any) -> Any:
    weights, *rest = (tensors[name] for name in ("weights", "x", "w_gate_up", "w_down"))
    routing = fm.moe_route_given(IDS, weights, num_experts=2)
    others = {name: x for name, x in tensors.items() if name.startswith("b_") or name == "w_up"}
    return fm.moe_forward(*rest, routing, **others, **options)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gate", get_args(Gate))
@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("limit", [None, LIMIT])
def test_layers_by_differences(
    activation: Any, gate: Any, weight_on_input: bool, limit: float | None
) -> None:
    """As gpt-oss has them, in every layout of gate and up: biases, a limit, alpha, an offset."""
    options: dict[str, Any] = {
        "gate": gate, "activation": activation, "limit": limit, "weight_on_input": weight_on_input,
        "alpha": 1.7 if activation == "silu" else 1.0, "up_offset": 0.0 if gate == "none" else 1.0,
    }  # fmt: skip
    tensors = layer_of_tensors(gate)
    before = run_layer(tensors, return_pre_activation=True, **options)[1][:5]
    assert (before > LIMIT).any() and (before < -LIMIT).any(), "choose another seed"

    def call(*given: Any) -> Any:
        return run_layer(dict(zip(tensors, given, strict=True)), **options)

    assert by_differences(call, *tensors.values())


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("scoring", "groups"),
    [*((scoring, {}) for scoring in SCORINGS), ("sigmoid", {"num_groups": 4, "top_groups": 2})],
)
def test_routing_by_differences(scoring: Any, groups: Any, renormalize: bool) -> None:
    lse = scoring == "softmax"

    def call(logits: Any) -> Any:
        made = fm.moe_route(logits, 3, scoring=scoring, renormalize=renormalize, scale=1.5,
                            return_lse=lse, **groups)  # fmt: skip
        return (made.weights, made.lse) if lse else made.weights

    assert by_differences(call, normal(5, E))


@pytest.mark.parametrize("renormalize", [False, True])
def test_given_weights_by_differences(renormalize: bool) -> None:
    ids = torch.tensor([[0, 3, 1], [2, -1, 0]], dtype=torch.int32)

    def call(weights: Any) -> Any:
        return fm.moe_route_given(ids, weights, num_experts=4, renormalize=renormalize).weights

    assert by_differences(call, normal(2, 3).abs() + 0.1)


@pytest.mark.parametrize("counted", [False, True], ids=["offsets", "counts"])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products_by_differences(counted: bool, transposed: bool) -> None:
    bounds = torch.tensor([2, 0, 3] if counted else [0, 2, 2, 5], dtype=torch.int32)
    rows = {"counts" if counted else "offsets": bounds}

    def call(x: Any, w: Any, bias: Any) -> Any:
        made = fm.grouped_product(x, w.mT if transposed else w, bias=bias, **rows)
        # Rows that no expert has are left as they are.
        return torch.cat([made[0, :2], made[2, :3]]) if counted else made

    shape = (3, 16, 8) if transposed else (3, 8, 16)
    x = normal(3, 3, 16, seed=1) if counted else normal(5, 16, seed=1)
    assert by_differences(call, x, normal(*shape, seed=2), normal(3, 8, seed=3))


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_whole_layers_by_differences(scoring: Any, activation: Any) -> None:
    """Through the router's product, and its bias."""

    def call(tokens: Any, router: Any, w_gate_up: Any, w_down: Any, bias: Any) -> Any:
        return fm.fused_moe(tokens, router, w_gate_up, w_down, top_k=2, scoring=scoring,
                            renormalize=True, activation=activation, router_bias=bias)  # fmt: skip

    matrices = (normal(8, 16, 8, seed=1, scale=0.5), normal(8, 8, 8, seed=2, scale=0.5))
    assert by_differences(call, normal(3, 8), normal(8, 8, seed=5), *matrices, normal(8, seed=6))


@pytest.mark.parametrize("experts", [8, 6])  # whose product with the router torch makes
@pytest.mark.parametrize("scoring", SCORINGS)
def test_modules_by_differences(experts: int, scoring: Any) -> None:
    torch.manual_seed(0)
    layer = fmt.FlashMoELayer(
        8, 8, experts, 2, scoring=scoring, expert_bias=True, router_bias=True,
        selection_bias=scoring == "sigmoid", dtype=torch.float64,
    )  # fmt: skip
    names, given = zip(*layer.named_parameters(), strict=True)

    def call(tokens: Any, *parameters: Any) -> Any:
        return torch.func.functional_call(
            layer, dict(zip(names, parameters, strict=True)), (tokens,)
        )

    assert by_differences(call, normal(3, 8, seed=1), *(x.detach() for x in given))


def test_a_graph_of_routing_in_float64() -> None:
    """Knows what the calls will give: weights, and a log-sum-exp, of fp64."""
    logits = normal(5, E).double()
    routed = (logits, 2, "softmax", True, None, 1, None, 1.0)
    torch.library.opcheck(torch.ops.flashmoe.moe_route_with_lse.default, routed)
    given = (IDS, normal(3, 2).double(), 2, False, 1.0, None)
    torch.library.opcheck(torch.ops.flashmoe.moe_route_given.default, given)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_the_reference_by_differences_in_float64(activation: str, gated: bool) -> None:
    """What all tests of gradients hold ours to."""
    given = layer_of_tensors("separate")
    x, weights = given["x"], given["weights"]
    w = {name: given[name] for name in ("w_up", "w_down", "b_up", "b_down")}
    if gated:
        w |= {"w_gate": given["w_gate_up"], "b_gate": given["b_gate_up"]}
    names = list(w)

    def call(x: Any, weights: Any, *matrices: Any) -> Any:
        of = dict(zip(names, matrices, strict=True))
        return moe_gradients.layer(x, IDS.numpy(), weights, of, activation=activation, limit=LIMIT)

    inputs = [t.double().requires_grad_() for t in (x, weights, *w.values())]
    assert torch.autograd.gradcheck(call, inputs)


# ---- autocast ----


def layer_of(dtype: Any = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    made = fmt.FlashMoELayer(H, INNER, E, K, expert_bias=True, router_bias=True, **options)
    return made.to(dtype)


@pytest.mark.parametrize("function", ["fused_moe", "moe_forward", "grouped_product"])
@pytest.mark.parametrize("module", [fm, fmt], ids=["package", "torch"])
@pytest.mark.parametrize("recorded", [False, True])
def test_autocast_is_that_of_cast_tensors(function: str, module: Any, recorded: bool) -> None:
    """Outputs of bf16, from fp32 or from a bf16 that meets fp32 weights; gradients of fp32."""
    given = {"x": normal(T, H), "router": normal(E, H), "up": normal(E, 2 * INNER, H, scale=0.2),
             "down": normal(E, H, INNER, scale=0.2), "bias": normal(E, 2 * INNER)}  # fmt: skip
    torch._dynamo.reset()
    routing = fm.moe_route(normal(T, E), K)
    offsets = torch.tensor([0, *[T] * E], dtype=torch.int32)

    def call(x: Any, router: Any, up: Any, down: Any, bias: Any) -> Any:
        if function == "fused_moe":
            return module.fused_moe(x, router, up, down, top_k=K, b_gate_up=bias)
        if function == "moe_forward":
            return module.moe_forward(x, up, down, routing, b_gate_up=bias)
        return module.grouped_product(x, up, offsets=offsets, bias=bias)

    low = {name: x.clone() if name == "bias" else x.bfloat16() for name, x in given.items()}
    for tensors in (given, given | {"x": given["x"].bfloat16()}):
        for x in (*tensors.values(), *low.values()):
            x.requires_grad_(recorded)
            x.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            out = call(**tensors)
            compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(**tensors)
        want = call(**low)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, want)
        assert torch.equal(compiled, want)
        if not recorded:
            continue
        out.float().sin().sum().backward()
        want.float().sin().sum().backward()
        for name, x in tensors.items():
            if x.grad is None:
                assert low[name].grad is None
                continue
            assert x.grad.dtype == x.dtype, name
            torch.testing.assert_close(x.grad.float(), low[name].grad.float(), msg=name)


def test_autocast_leaves_what_is_not_fp32() -> None:
    low = layer_of(torch.bfloat16).requires_grad_(False)
    x = normal(T, H).bfloat16()
    want = low(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.empty_like(x)
        assert torch.equal(low(x), want)
        routing = fm.moe_route(normal(T, E), K)
        up, down = low.experts.gate_up_proj, low.experts.down_proj
        assert fm.moe_forward(x, up, down, routing, out=out) is out
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert layer_of()(x.float()).dtype == torch.float32
    # NumPy's arrays are nobody's to cast.
    with torch.autocast("cpu", torch.bfloat16):
        made = fm.grouped_product(
            normal(4, 8).numpy(), normal(1, 8, 8).numpy(), counts=None,
            offsets=torch.tensor([0, 4], dtype=torch.int32).numpy(),
        )  # fmt: skip
    assert made.dtype == "float32"


def test_autocast_leaves_a_router_that_is_not_fp32() -> None:
    """Whose product is the library's, or with this number of experts torch's."""
    for experts in (E, E - 2):
        x, router = normal(T, H).bfloat16(), normal(experts, H).bfloat16()
        up = normal(experts, 2 * INNER, H, scale=0.2).bfloat16()
        down = normal(experts, H, INNER, scale=0.2).bfloat16()
        want = fm.fused_moe(x, router, up, down, top_k=K)
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(fm.fused_moe(x, router, up, down, top_k=K), want)


# ---- adapters ----


def test_adapters_of_frozen_experts() -> None:
    """Weights that are given, w + b a: the gradients of a and b are of what autograd makes of the
    sum's, of frozen matrices none are computed."""
    base_up, base_down = normal(E, 2 * INNER, H, scale=0.2), normal(E, H, INNER, scale=0.2)
    a = normal(E, 4, H, seed=1).requires_grad_()
    b = normal(E, 2 * INNER, 4, seed=2, scale=0.1).requires_grad_()
    x = normal(T, H).requires_grad_()
    routing = fm.moe_route(normal(T, E), K)
    with Gradients() as seen:
        fm.moe_forward(x, base_up + b @ a, base_down, routing).sin().sum().backward()
    assert seen.wanted == [[True, True, False, False, False, False, False, False]]
    whole = (base_up + b @ a).detach().requires_grad_()
    (dw,) = torch.autograd.grad(fm.moe_forward(x, whole, base_down, routing).sin().sum(), whole)
    torch.testing.assert_close(a.grad, b.detach().transpose(1, 2) @ dw)
    torch.testing.assert_close(b.grad, dw @ a.detach().transpose(1, 2))


def test_adapters_beside_frozen_products() -> None:
    """x goes through w, and through a and b, of few columns: w's product computes its dx alone."""
    w, bounds = normal(E, 40, H), torch.tensor([0, 5, 5, 9, 12, 12, 20, 22, T], dtype=torch.int32)
    a, b = normal(E, 8, H, seed=1).requires_grad_(), normal(E, 40, 8, seed=2).requires_grad_()
    x = normal(T, H).requires_grad_()

    def call(x: Any, a: Any, b: Any) -> Any:
        thin = fm.grouped_product(fm.grouped_product(x, a, offsets=bounds), b, offsets=bounds)
        return fm.grouped_product(x, w, offsets=bounds) + thin

    call(x, a, b).sin().sum().backward()
    again = [t.detach().double().requires_grad_() for t in (x, a, b)]
    expert = torch.repeat_interleave(torch.arange(E), bounds.diff())
    thin = torch.einsum("th,tnh->tn", again[0], again[1][expert])
    out = torch.einsum("th,tnh->tn", again[0], w.double()[expert])
    (out + torch.einsum("th,tnh->tn", thin, again[2][expert])).sin().sum().backward()
    for got, want in zip((x, a, b), again, strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-4, atol=1e-4)
    stages = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            if func is torch.ops.flashmoe.grouped_product_backward.default:
                stages.append((args[2].shape[1], list(args[-1])))
            return func(*args, **kw or {})

    with Products():
        call(x, a, b).sum().backward()
    assert (40, [True, False, False]) in stages  # w
    assert sorted(stages)[:1] == [(8, [True, True, False])]  # a
    assert len(stages) == 3


# ---- graphs ----


def step(layer: Any, x: Any) -> Any:
    return layer(x).square().mean()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_layer_compiles_for_any_number_of_tokens(transposed: bool) -> None:
    torch._dynamo.reset()
    layer = layer_of(transposed=transposed)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (T, 7, 31):
        x = normal(tokens, H)
        made = []
        for run in (step, compiled):
            layer.zero_grad()
            run(layer, x).backward()
            made.append([p.grad.clone() for p in layer.parameters()])
        for got, want in zip(*made, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_layers_train(strict: bool) -> None:
    layer, x = layer_of(), normal(2, T, H)
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(layer, (x,), dynamic_shapes=({1: rows},), strict=strict)
    trained = program.module()
    for module in (layer, trained):
        for data in (x, normal(2, 9, H)):
            step(module, data).backward()
    made = dict(trained.named_parameters())
    for name, want in layer.named_parameters():
        torch.testing.assert_close(made[name].grad, want.grad, msg=name)


def test_a_training_step_is_one_graph() -> None:
    """Forward, backward and update, traced by make_fx, of which the operators are ours."""
    from torch.fx.experimental.proxy_tensor import make_fx

    layer, x = layer_of(), normal(T, H)
    names = [name for name, _ in layer.named_parameters()]

    def train(x: Any, *parameters: Any) -> tuple[Any, ...]:
        given = dict(zip(names, parameters, strict=True))
        loss = torch.func.functional_call(layer, given, (x,)).square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        return (loss, *(p - 0.1 * g for p, g in zip(parameters, gradients, strict=True)))

    parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    graph = make_fx(train)(x, *parameters)
    targets = {str(node.target) for node in graph.graph.nodes}
    assert {"flashmoe.moe_backward.default", "flashmoe.moe_route_backward.default"} <= targets
    for got, want in zip(graph(x, *parameters), train(x, *parameters), strict=True):
        torch.testing.assert_close(got, want)


def test_vmap_of_a_frozen_layer() -> None:
    layer, x = layer_of().requires_grad_(False), normal(3, T, H)
    assert torch.equal(torch.func.vmap(layer)(x), layer(x))


# ---- transforms of torch.func ----

SCORING = {"scoring": "sigmoid", "num_groups": 2, "top_groups": 1, "scale": 2.5}


def functional(fm: Any, parameters: dict[str, Any], x: Any) -> Any:
    """A layer of functions, with what each of them may be given."""
    p = parameters
    every = torch.tensor([0, x.shape[0]], dtype=torch.int32)
    logits = fm.grouped_product(x, p["router"][None], offsets=every, bias=p["router_bias"][None])
    routing = fm.moe_route(
        logits, K, selection_bias=p["selection_bias"], return_lse=True, **SCORING
    )
    again = fm.moe_route_given(routing.ids, routing.weights, num_experts=E)
    out = fm.moe_forward(x, p["w_gate_up"], p["w_down"], again, b_gate_up=p["b_gate_up"])
    return out + routing.lse[:, None]


def at_once(fm: Any, parameters: dict[str, Any], x: Any) -> Any:
    p = parameters
    return fm.fused_moe(
        x, p["router"], p["w_gate_up"], p["w_down"], K, router_bias=p["router_bias"],
        selection_bias=p["selection_bias"], b_gate_up=p["b_gate_up"], **SCORING,
    )  # fmt: skip


def parameters_of() -> dict[str, Any]:
    return {
        "router": normal(E, H), "router_bias": normal(E), "selection_bias": 0.1 * normal(E),
        "w_gate_up": normal(E, 2 * INNER, H) / 8, "w_down": normal(E, H, INNER) / 8,
        "b_gate_up": normal(E, 2 * INNER),
    }  # fmt: skip


FUNCTIONS = pytest.mark.parametrize("layer", [functional, at_once])
MODULES = pytest.mark.parametrize("fm", [fm, fmt], ids=["package", "torch"])


def of_autograd(layer: Any, parameters: dict[str, Any], x: Any, dout: Any) -> Any:
    """The gradients of parameters and x, None of what has none."""
    leaves = {n: p.clone().requires_grad_() for n, p in parameters.items()}
    x = x.clone().requires_grad_()
    out = layer(fm, leaves, x)
    *made, dx = torch.autograd.grad(out, [*leaves.values(), x], dout, allow_unused=True)
    return dict(zip(leaves, made, strict=True)), dx


def assert_gradients(made: Any, want: Any, equal: bool = True) -> None:
    for name, gradient in made.items():
        expected = want[name] if want[name] is not None else torch.zeros_like(gradient)
        if equal:
            assert torch.equal(gradient, expected), name
        else:
            torch.testing.assert_close(gradient, expected, msg=name)


@MODULES
@FUNCTIONS
def test_grad_and_vjp_of_functions(fm: Any, layer: Any) -> None:
    """To the bits of Tensor.backward; a selection bias has a gradient of 0."""
    parameters, x, dout = parameters_of(), normal(T, H), normal(T, H)
    want, dx = of_autograd(layer, parameters, x, dout)

    def loss(parameters: Any, x: Any) -> Any:
        return (layer(fm, parameters, x) * dout).sum()

    made, by_x = torch.func.grad(loss, (0, 1))(parameters, x)
    assert_gradients(made, want)
    assert torch.equal(by_x, dx)
    out, pull = torch.func.vjp(lambda *given: layer(fm, *given), parameters, x)
    assert torch.equal(out, layer(fm, parameters, x))
    made, by_x = pull(dout)
    assert_gradients(made, want)
    assert torch.equal(by_x, dx)


@MODULES
@FUNCTIONS
def test_vmap_of_grad_is_a_gradient_for_each_sample(fm: Any, layer: Any) -> None:
    parameters, x, dout = parameters_of(), normal(3, T, H), normal(T, H)

    def loss(parameters: Any, x: Any) -> Any:
        return (layer(fm, parameters, x) * dout).sum()

    made, by_x = torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, 0))(parameters, x)
    for i in range(3):
        want, dx = of_autograd(layer, parameters, x[i], dout)
        assert_gradients({name: gradient[i] for name, gradient in made.items()}, want, equal=False)
        torch.testing.assert_close(by_x[i], dx)


@MODULES
@FUNCTIONS
def test_grad_of_vmap_is_their_sum(fm: Any, layer: Any) -> None:
    parameters, x, dout = parameters_of(), normal(3, T, H), normal(T, H)

    def loss(parameters: Any) -> Any:
        return (torch.func.vmap(lambda x: layer(fm, parameters, x))(x) * dout).sum()

    made = torch.func.grad(loss)(parameters)
    each = [of_autograd(layer, parameters, one, dout)[0] for one in x]
    want = {n: None if each[0][n] is None else sum(g[n] for g in each) for n in parameters}
    assert_gradients(made, want, equal=False)


def test_functional_call_of_a_module() -> None:
    layer, x, dout = layer_of(), normal(T, H), normal(T, H)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters: Any) -> Any:
        return (torch.func.functional_call(layer, parameters, (x,)) * dout).sum()

    made = torch.func.grad(loss)(parameters)
    layer(x).backward(dout)
    assert_gradients(made, {name: p.grad for name, p in layer.named_parameters()})


def test_jacobians() -> None:
    parameters, x = parameters_of(), normal(4, H)
    made = torch.func.jacrev(lambda x: at_once(fmt, parameters, x).sum(-1))(x)
    for t in range(4):
        dout = torch.zeros(4, H)
        dout[t] = 1
        torch.testing.assert_close(made[t], of_autograd(at_once, parameters, x, dout)[1])


@FUNCTIONS
def test_second_derivatives_by_transforms_are_refused(layer: Any) -> None:
    parameters, x = parameters_of(), normal(T, H)

    def loss(x: Any) -> Any:
        return layer(fmt, parameters, x).square().sum()

    with pytest.raises(NotImplementedError, match="its gradients are differentiated again"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x)
    with pytest.raises((ValueError, NotImplementedError), match="no derivative yet"):
        torch.func.hessian(loss)(x)


# ---- dx now, gradients of weights later ----


def test_gradients_of_weights_may_wait_for_all_micro_batches() -> None:
    """As pipeline schedules without bubbles have them: dx and what the routing needs at once, then
    weights' gradients in calls of their own, added to main_grad in fp32."""
    given = {name: x.bfloat16() for name, x in parameters_of().items()}
    w_gate_up, w_down, b_gate_up = (given[n] for n in ("w_gate_up", "w_down", "b_gate_up"))
    batches, douts = (normal(3, T, H, seed=seed).bfloat16() for seed in (1, 2))
    main_grad = {f"d{name}": torch.zeros(given[name].shape) for name in
                 ("w_gate_up", "w_down", "b_gate_up")}  # fmt: skip
    waiting, at_once_dx = [], []
    for x, dout in zip(batches, douts, strict=True):
        routing = fm.moe_route(x @ given["router"].T, K)
        _, before = fm.moe_forward(x, w_gate_up, w_down, routing, b_gate_up=b_gate_up,
                                   return_pre_activation=True)  # fmt: skip
        call = (dout, x, w_gate_up, w_down, routing)
        wanted = (True, *(False,) * 6, True)  # x and weights
        made = fm.moe_backward(*call, b_gate_up=b_gate_up, pre_activation=before, wanted=wanted)
        at_once_dx.append((made.x, made.weights))
        waiting.append((call, before))
    for call, before in waiting:
        fm.moe_backward(*call, b_gate_up=b_gate_up, pre_activation=before, accumulate=True,
                        overwrite_pre_activation=True, **main_grad)  # fmt: skip
    want = {name: torch.zeros_like(x) for name, x in main_grad.items()}
    for (call, _), (dx, dweights) in zip(waiting, at_once_dx, strict=True):
        outputs = {name: torch.empty_like(x) for name, x in want.items()}
        every = (True, *(False,) * 6, True)
        made = fm.moe_backward(*call, b_gate_up=b_gate_up, wanted=every, **outputs)
        assert torch.equal(made.x, dx)
        assert torch.equal(made.weights, dweights)
        for name, gradient in outputs.items():
            want[name] += gradient
    for name, gradient in main_grad.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-6, atol=1e-6)


# ---- processes ----


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(H, H)
        self.experts = fmt.FlashMoELayer(H, INNER, E, K, router_bias=True, expert_bias=True)

    def forward(self, x: Any) -> Any:
        return x + self.experts(self.project(x))


def train(wrap: Any, rank: int, ranks: int) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    model = wrap(torch.nn.Sequential(Block(), Block()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = normal(2, 4, 9, H)
    losses = []
    for part in data:
        optimizer.zero_grad()
        loss = step(model, part.chunk(ranks)[rank])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = [x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad
                 for x in model.parameters()]  # fmt: skip
    return losses, gradients


def train_one_of_two(rank: int, folder: str) -> None:
    from torch import distributed
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))

    def shard(model: Any) -> Any:
        for block in model:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    made = [train(wrap, rank, 2) for wrap in (DistributedDataParallel, shard)]
    torch.save(made, Path(folder) / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def pipeline(rank: int, folder: str) -> None:
    """One of two processes, with every other of four blocks."""
    from torch import distributed
    from torch.distributed import pipelining

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/pipeline", rank=rank, world_size=2
    )
    made = {}
    for schedule in SCHEDULES:
        blocks = blocks_of()
        own = {i: blocks[i] for i in range(rank, 4, 2)}
        stages = [
            pipelining.PipelineStage(block, i, 4, torch.device("cpu")) for i, block in own.items()
        ]
        kind: Any = getattr(pipelining, schedule)
        run = kind(stages, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
        data, target = normal(2, 16, H, seed=8)
        run.step(*([data] if rank == 0 else []), target=target if rank == 1 else None)
        made[schedule] = {
            f"{i}.{name}": p.grad for i, b in own.items() for name, p in b.named_parameters()
        }
    torch.save(made, Path(folder) / f"pipeline {rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


SCHEDULES = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")


def blocks_of() -> list[Any]:
    torch.manual_seed(3)
    return [Block() for _ in range(4)]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.skipif(os.name != "posix", reason="gloo")
def test_pipelines_train_as_one_process(tmp_path: Path) -> None:
    """By schedules of torch, of which one has gradients of weights wait."""
    torch.multiprocessing.spawn(pipeline, (str(tmp_path),), nprocs=2)
    blocks = blocks_of()
    data, target = normal(2, 16, H, seed=8)
    for x, y in zip(data.chunk(4), target.chunk(4), strict=True):
        (torch.nn.functional.mse_loss(torch.nn.Sequential(*blocks)(x), y) / 4).backward()
    want = {f"{i}.{name}": p.grad for i, b in enumerate(blocks) for name, p in b.named_parameters()}
    ranks = [torch.load(tmp_path / f"pipeline {rank}.pt") for rank in range(2)]
    for schedule in SCHEDULES:
        made = ranks[0][schedule] | ranks[1][schedule]
        assert made.keys() == want.keys()
        for name, gradient in want.items():
            torch.testing.assert_close(made[name], gradient, msg=f"{schedule}, {name}")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.skipif(os.name != "posix", reason="gloo")
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """By DDP and by FSDP2, which shards the stacks of experts."""
    torch.multiprocessing.spawn(train_one_of_two, (str(tmp_path),), nprocs=2)
    losses, gradients = train(lambda model: model, 0, 1)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for made in zip(*ranks, strict=True):
        mean = [sum(each) / 2 for each in zip(*(of_rank[0] for of_rank in made), strict=True)]
        torch.testing.assert_close(mean, losses)
        for of_rank in made:
            torch.testing.assert_close(of_rank[1], gradients)
