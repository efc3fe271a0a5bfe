"""Whole training steps with attention as one graph: forward, loss, backward and update, for every
length, by make_fx, AOTAutograd's joint graph and torch.export of forward and backward."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import flashmoe_science.torch as fmt  # noqa: E402
from torch._functorch.aot_autograd import aot_export_joint_simple  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch_training import assert_same_bits, normal  # noqa: E402

H = 32
WAYS = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
OURS = {
    False: {"flashmoe.attention_with_lse.default", "flashmoe.attention_backward.default"},
    True: {
        "flashmoe.ragged_attention_with_lse.default",
        "flashmoe.ragged_attention_backward.default",
    },
}


class Model(torch.nn.Module):
    """A block and its loss, on rows of a batch or on packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = fmt.FlashMoEScienceAttention(
            H, 4, 2, causal=True, window=(7, None), sinks=True
        )

    def forward(self, x: Any, y: Any, starts: Any = None) -> Any:
        return (x + self.attention(x, cu_seqlens=starts) - y).square().mean()


def batch(packed: bool, rows: int, count: int = 3) -> tuple[Any, ...]:
    count = 1 if packed else count
    x, y = (normal((count, rows, H), "cpu", torch.float32, rows + i) for i in range(2))
    return (x, y, torch.tensor([0, rows // 3, rows], dtype=torch.int32)) if packed else (x, y)


def loss_and_gradients(model: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    loss = model(*given)
    return loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))


def targets(graph: Any) -> set[str]:
    named = {str(node.target) for node in graph.nodes}
    return {name for name in named if name.startswith("flashmoe.")}


@WAYS
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_step_with_its_update(mode: str, packed: bool) -> None:
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]

    def step(given: tuple[Any, ...], parameters: Any) -> tuple[Any, ...]:
        loss = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), given)
        gradients = torch.autograd.grad(loss, parameters)
        return (loss, *(p - 0.1 * g for p, g in zip(parameters, gradients, strict=True)))

    graph = make_fx(step, tracing_mode=mode)(batch(packed, 10), parameters)
    assert targets(graph.graph) == OURS[packed]
    for rows in (10, 31, 64) if mode == "symbolic" else (10,):
        given = batch(packed, rows)
        assert_same_bits(graph(given, parameters), step(given, parameters))


@WAYS
def test_the_joint_graph_of_aot_autograd(packed: bool) -> None:
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    given = batch(packed, 10)

    def loss(*arguments: Any) -> tuple[Any]:
        parameters = dict(zip(names, arguments[: len(names)], strict=True))
        return (torch.func.functional_call(model, parameters, arguments[len(names) :]),)

    arguments = (*model.parameters(), *given)
    joint = aot_export_joint_simple(loss, arguments, trace_joint=True)
    assert targets(joint.graph) == OURS[packed]
    (made,), gradients = joint(arguments, (torch.ones(()),))
    assert_same_bits((made, *gradients[: len(names)]), loss_and_gradients(model, given))


@WAYS
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_exported_forward_and_backward(dynamic: bool, strict: bool, packed: bool) -> None:
    experimental = pytest.importorskip("torch.export.experimental")
    export = getattr(experimental, "_export_forward_backward", None)
    if export is None:
        pytest.skip("this torch does not export a backward")
    model = Model()
    rows = torch.export.Dim("rows", min=4, max=4096)
    sizes: Any = {1: rows} if packed else {0: torch.export.Dim("batch", max=64), 1: rows}
    shapes: Any = (sizes, sizes, None) if packed else (sizes, sizes)
    exported = torch.export.export(
        model, batch(packed, 10), dynamic_shapes=shapes if dynamic else None, strict=strict
    )
    joint = export(exported)
    assert targets(joint.graph) == OURS[packed]
    for count, length in ((3, 10), (2, 31), (5, 64)) if dynamic else ((3, 10),):
        given = batch(packed, length, count)
        named, users = dict(model.named_parameters()), iter(given)
        arguments = [named[spec.target] if spec.target is not None else next(users)
                     for spec in joint.graph_signature.input_specs]  # fmt: skip
        with torch.no_grad():
            made = joint.graph_module(*arguments)
        specs = joint.graph_signature.output_specs
        got = {spec.target: x for spec, x in zip(specs, made, strict=True)}
        want = dict(zip([None, *named], loss_and_gradients(model, given), strict=True))
        assert got.keys() == want.keys()
        assert_same_bits([got[name] for name in want], list(want.values()))
