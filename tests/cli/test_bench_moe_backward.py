"""`flashmoe bench` of the backward of a mixture of experts, alone and behind its forward: gradients
that are checked, rows that turn void, peers that differentiate."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shlex
from pathlib import Path
from typing import Any

import bench_records
import flashmoe_science
import gpu_plans
import numpy as np
import pytest
from flashmoe_science.cli import (
    bench,
    build_parser,
    environment,
    main,
    measure_moe_backward,
    moe_gradient_reference,
    records,
)
from flashmoe_science.cli.arrays import Arrays, choose_arrays
from flashmoe_science.cli.compare import compare_records
from flashmoe_science.cli.measure import OURS
from flashmoe_science.cli.moe_gradient_inputs import NAMES, make_moe_gradient_inputs
from flashmoe_science.cli.moe_gradient_reference import judge_moe_gradients
from flashmoe_science.cli.moe_reference import counts_of
from flashmoe_science.cli.moe_shapes import (
    MOE,
    MOE_BACKWARD,
    MOE_SHAPES,
    MOE_TRAINING,
    MoeBackwardShape,
    MoeShape,
    MoeTrainingShape,
    moe_shape_from_options,
)
from flashmoe_science.cli.output import CommandError
from flashmoe_science.cli.peers import choose_peers, moe_gradients, peer_names, quack_ahead
from flashmoe_science.cli.plotting import charts, record, theme
from flashmoe_science.cli.suites import load_suite, operation_of, shape_of

LAYER = ["--tokens", "9", "--hidden", "32", "--inner", "24", "--experts", "6", "--top-k", "2"]
SMALL = [*LAYER, "--device", "cpu", "--seconds", "0.01"]
WAYS = ["--backward", "--training"]


def run_bench(
    capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    code = main(["bench", *SMALL, *options, "--json"])
    document = json.loads(capsys.readouterr().out)
    return code, document, document["cells"][0]


def void_reason(capsys: pytest.CaptureFixture[str], way: str = "--backward", *more: str) -> str:
    code, document, cell = run_bench(capsys, way, "--peer", "none", *more)
    assert code == 1
    assert cell["status"] == "void"
    assert "contenders" not in cell
    assert document["summary"] == {}
    return str(cell["reason"])


def by_name(answer: Any) -> dict[str, Any]:
    """The gradients of moe_backward as the rule names them."""
    return {"dx": answer.x, "dw_gate_up": answer.w_gate_up, "dw_down": answer.w_down}


def break_calls(monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    """Both of our functions give what `damage` makes of their gradients; it is told whether they
    were to be written into given ones."""
    real, real_route = flashmoe_science.moe_backward, flashmoe_science.moe_route_backward

    def layer(*arguments: Any, **options: Any) -> Any:
        answer = real(*arguments, **options)
        damage(by_name(answer), options.get("dx") is not None)
        return answer

    def route(*arguments: Any, **options: Any) -> Any:
        answer = real_route(*arguments, **options)
        damage({"dlogits": answer}, options.get("dlogits") is not None)
        return answer

    monkeypatch.setattr(flashmoe_science, "moe_backward", layer)
    monkeypatch.setattr(flashmoe_science, "moe_route_backward", route)


# ---- shapes and suites -----------------------------------------------------------------------


def test_work_and_traffic() -> None:
    forward = MoeShape(5, 16, 24, 8, 2)
    backward, both = MoeBackwardShape(**vars(forward)), MoeTrainingShape(**vars(forward))
    assert backward.flops == 12 * 5 * 2 * 16 * 24 == 2 * forward.flops
    assert both.flops == forward.flops + backward.flops
    saved = 5 * 2 * 2 * 24 * 2
    weights, dweights = 3 * forward.expert_bytes, 8 * forward.expert_bytes
    assert backward.traffic(3) == weights + dweights + saved + 2 * (3 * 5 * 16 + 2 * 5 * 8)
    assert both.traffic(3) == forward.traffic(3) + saved + backward.traffic(3)
    assert both.bytes == both.traffic(8)
    assert backward.output_extents == both.output_extents == (
        (5, 16), (5, 8), (3, 48, 16), (3, 16, 24),
    )  # fmt: skip
    assert MoeBackwardShape(5, 16, 24, 2, 2).output_extents[3] == (2, 16, 24)
    assert [operation_of(s) for s in (forward, backward, both)] == [MOE, MOE_BACKWARD, MOE_TRAINING]
    assert len({forward, backward, both}) == 3  # of dataclasses' equality each is of its own class


def test_the_work_is_the_librarys() -> None:
    extents = {"tokens": 33, "hidden": 48, "inner": 40, "experts": 5, "top_k": 2}
    plan = flashmoe_science.moe_backward_plan_for(**extents, dtype="fp32", device="cpu")
    assert plan.flops == MoeBackwardShape(**extents, dtype="fp32").flops
    again = flashmoe_science.moe_backward_plan_for(
        **extents, dtype="fp32", device="cpu", pre_activation=False
    )
    assert again.flops == plan.flops + 4 * 33 * 2 * 48 * 40
    some = flashmoe_science.moe_backward_plan_for(
        **extents, dtype="fp32", device="cpu", wanted=[n == 3 for n in range(8)]
    )
    assert some.flops == 2 * 33 * 2 * 48 * 40


def test_plans_are_those_of_calls() -> None:
    shape = MoeTrainingShape(33, 48, 40, 5, 2, "fp32")
    arrays = Arrays()
    ours = measure_moe_backward.call_ours(
        flashmoe_science, arrays, shape, make_moe_gradient_inputs(arrays, shape), None
    )
    assert gpu_plans.plan_of(shape, "cpu") == ours.plan
    alone = gpu_plans.plan_of(MoeBackwardShape(**vars(shape)), "cpu")
    assert alone["launches"] == ours.launches[-len(alone["launches"]) :]
    assert (alone["flops"], ours.plan["flops"]) == (shape.flops * 2 / 3, shape.flops)


@pytest.mark.parametrize("plan", ["moe_backward_plan", "moe_route_backward_plan"])
def test_a_plan_of_no_routing_is_refused(plan: str) -> None:
    tensors = [np.zeros((2, 8), np.float32)] * (4 if plan == "moe_backward_plan" else 1)
    with pytest.raises(flashmoe_science.ArgumentTypeError, match="routing: got str, accepted is"):
        getattr(flashmoe_science, plan)(*tensors, "mine")


def test_a_plan_refuses_what_its_call_refuses() -> None:
    arrays, shape = Arrays(), MoeBackwardShape(4, 16, 8, 3, 2, "fp32")
    inputs = make_moe_gradient_inputs(arrays, shape)
    layer = inputs.layer
    routing = flashmoe_science.moe_route(layer.logits[0], 2)
    given = (layer.x, layer.w_gate_up, layer.w_down, routing)
    with pytest.raises(ValueError, match="dout: "):
        flashmoe_science.moe_backward_plan(inputs.dout[:, :8], *given)
    with pytest.raises(TypeError, match="wanted: got \\[True\\]"):
        flashmoe_science.moe_backward_plan(inputs.dout, *given, wanted=[True])
    with pytest.raises(ValueError, match="scoring: "):
        flashmoe_science.moe_route_backward_plan(
            routing.weights, routing, logits=layer.logits[0], scoring="mine"
        )


def test_the_suites_are_those_of_the_forward() -> None:
    forward = load_suite("moe-training")
    for name, operation in (("moe-backward", MOE_BACKWARD), ("moe-training-step", MOE_TRAINING)):
        suite = load_suite(name)
        assert (suite.operation, suite.device) == (operation, "cuda")
        assert suite.title != forward.title
        assert len(suite.shapes) == 21
        assert {type(s) for s in suite.shapes} == {MOE_SHAPES[operation]}
        assert [vars(s) for s in suite.shapes] == [vars(s) for s in forward.shapes]
    # Weights, their gradients twice and what a call of the grouped peer adds fit in an H200's
    # memory.
    most = max(3 * s.experts * s.expert_bytes + 4 * s.pairs * (2 * s.hidden + 5 * s.inner)
               for s in forward.shapes)  # fmt: skip
    assert most < 90e9


@pytest.mark.parametrize("operation", [MOE_BACKWARD, MOE_TRAINING])
def test_a_rows_command_gives_its_shape(operation: str) -> None:
    row = {"shape": bench_records.moe_shape(7, 1.5), "status": "ok"}
    words = shlex.split(record.row_command(bench_records.moe_grid(operation=operation), row))
    arguments = build_parser().parse_args(words[1:])
    shape = moe_shape_from_options(arguments, "fp32")
    assert shape == shape_of(row["shape"], operation)
    assert operation_of(shape) == operation


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--suite", "moe-cpu", "--backward"], "--suite: a suite has its own"),
        (["--suite", "moe-backward", "--device", "cpu"], "is for a GPU and would take hours"),
        ([*SMALL, "--training", "--kernel", "cpu"], "--kernel: a family is of one operation"),
        ([*SMALL, "--backward", "--peer", "vllm-triton"], "got vllm-triton, accepted are torch-gr"),
        ([*LAYER[:2], "--backward"], "--hidden is missing"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--kernel" in options:
        pytest.importorskip("torch")
    assert main(["bench", *options]) == 1
    assert sentence in capsys.readouterr().err


def test_training_needs_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "choose_arrays", lambda device: Arrays())
    assert main(["bench", *SMALL, "--training"]) == 1
    assert "--training: forward and backward by autograd need torch" in capsys.readouterr().err
    assert main(["bench", *SMALL, "--backward", "--peer", "none"]) == 0  # NumPy's is enough


# ---- rows ------------------------------------------------------------------------------------


def test_a_backward_is_checked_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    code, document, cell = run_bench(capsys, "--backward", "--skew", "1")
    assert code == 0, cell.get("reason")
    assert document["operation"] == MOE_BACKWARD
    assert document["title"] == "Mixture of experts backward, one shape"
    assert cell["accuracy"]["passed"] is True
    assert cell["accuracy"]["tensor"] in NAMES
    assert cell["accuracy"]["checked"] == "9 of 9 tokens, 3 of 6 experts"
    assert cell["plan"]["launches"] == cell["launches"]
    kernels = [launch["kernel"] for launch in cell["launches"]]
    assert kernels[-1] == "moe_route_backward_cpu"
    assert all(name.startswith("moe_backward_") for name in kernels[:-1])
    assert cell["flops"] == cell["plan"]["flops"] == 12 * 9 * 2 * 32 * 24
    shape = shape_of(cell["shape"], MOE_BACKWARD)
    assert isinstance(shape, MoeBackwardShape)
    assert cell["bytes"] == shape.traffic(cell["routing"]["active_experts"])
    assert "weight_bytes_per_s" not in cell["contenders"][OURS]
    root = Path(__file__).parents[2]
    if isinstance(document["source"]["kernels"], str) and document["source"]["kernels"]:
        assert document["source"]["kernels"] == environment.kernels_hash(MOE_BACKWARD, "cpu", root)


def test_training_is_a_forward_and_its_backward(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    code, document, cell = run_bench(capsys, "--training")
    assert code == 0, cell.get("reason")
    assert document["operation"] == cell["plan"]["operation"] == MOE_TRAINING
    assert cell["plan"]["launches"] == cell["launches"]
    kernels = [launch["kernel"] for launch in cell["launches"]]
    assert kernels[0].startswith("moe_route_cpu")
    layer = [i for i, name in enumerate(kernels) if name.startswith("moe_backward_")]
    assert 1 < layer[0] <= layer[-1] == len(kernels) - 2
    assert kernels[-1] == "moe_route_backward_cpu"
    assert cell["flops"] == cell["plan"]["flops"] == 18 * 9 * 2 * 32 * 24
    peer = cell["contenders"]["torch-loop"]
    assert (peer["status"], peer["accuracy"]["passed"]) == ("ok", True)


@pytest.mark.parametrize("way", WAYS)
def test_the_record_keeps_its_schema(capsys: pytest.CaptureFixture[str], way: str) -> None:
    pytest.importorskip("jsonschema")
    pytest.importorskip("torch")
    _, document, cell = run_bench(capsys, way)
    assert records.schema_violations(document) == []
    cell["accuracy"]["tensor"] = "dweights"
    assert any("dweights" in violation for violation in records.schema_violations(document))


@pytest.mark.parametrize(("way", "products"), [("--backward", 12), ("--training", 18)])
def test_many_tokens_have_a_dense_bound(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, way: str, products: int
) -> None:
    torch = pytest.importorskip("torch")
    real, counted = torch.matmul, []

    def counting(a: Any, b: Any, **options: Any) -> Any:
        counted.append(2 * a.shape[0] * a.shape[1] * b.shape[1])
        return real(a, b, **options)

    monkeypatch.setattr(torch, "matmul", counting)
    from flashmoe_science.cli import measure_moe

    shape = MOE_SHAPES[MOE_BACKWARD if way == "--backward" else MOE_TRAINING](
        512, 32, 24, 6, 2, "fp32"
    )
    bound = measure_moe.dense_bound(choose_arrays("cpu"), shape, 0)
    counted.clear()
    bound.call()
    assert sum(counted) == shape.flops == products * 512 * 2 * 32 * 24
    monkeypatch.undo()
    _, _, cell = run_bench(capsys, way, "--tokens", "512", "--peer", "none")
    ours = cell["contenders"][OURS]
    assert list(cell["contenders"]) == [OURS]
    assert ours["bound_fraction"] == pytest.approx(cell["bound"]["median_s"] / ours["median_s"])


def test_the_table_says_what_it_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SMALL, "--backward", "--peer", "none"]) == 0
    text = capsys.readouterr().out
    assert "12 T K H I" in text
    assert "of dense" in text
    assert "weights:" not in text
    assert main(["bench", *SMALL, "--peer", "none"]) == 0
    text = capsys.readouterr().out
    assert "12 T K H I" not in text
    assert "weights:" in text


def test_rows_of_a_backward_are_kept_on_resuming(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    rows = tuple(MoeBackwardShape(n, 16, 8, 4, 2, "fp32") for n in (3, 5))
    suite = dataclasses.replace(load_suite("moe-backward"), shapes=rows, device="any")
    monkeypatch.setattr(bench, "load_suite", lambda name: suite)
    file = tmp_path / "record.json"
    command = ["bench", "--suite", suite.name, "--device", "cpu", "--seconds", "0.01"]
    run = functools.partial(main, [*command, "--peer", "none", "--json", str(file), "--resume"])
    assert run() == 0
    before = json.loads(file.read_text())
    assert run() == 0
    after = json.loads(file.read_text())
    assert after["kept"]["rows"] == 2
    assert after["cells"] == before["cells"]
    capsys.readouterr()


# ---- the gate --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_gradient_has_no_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def damage(gradients: dict[str, Any], given: bool) -> None:
        if name in gradients:
            gradients[name][(...,) if name in NAMES[2:] else (3, 1)] += 0.05

    break_calls(monkeypatch, damage)
    assert f"max|{name} - float64| is 0.05, allowed is" in void_reason(capsys)


@pytest.mark.parametrize("name", NAMES)
def test_one_element_that_is_not_written_has_no_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In any expert, whether its gradients are compared or not."""
    shape = MoeBackwardShape(9, 32, 24, 6, 2, "fp32")
    held = make_moe_gradient_inputs(choose_arrays("cpu"), shape).held
    other = next(expert for expert in range(6) if expert not in held)

    def damage(gradients: dict[str, Any], given: bool) -> None:
        if name in gradients and given:
            gradients[name][(other, 7, 5) if name in NAMES[2:] else (8, 2)] = math.nan

    break_calls(monkeypatch, damage)
    assert void_reason(capsys).startswith(f"{name} holds NaN or infinity")


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_is_right_only_when_it_is_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def damage(gradients: dict[str, Any], given: bool) -> None:
        if name in gradients and not given:
            gradients[name] *= 1 + 2.0**-22

    break_calls(monkeypatch, damage)
    assert "the timed call gives other values than the one that was checked" in void_reason(capsys)


def test_gradients_of_autograd_that_were_not_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    real = flashmoe_science.moe_forward

    def other(x: Any, *rest: Any, **options: Any) -> Any:
        """Right within the rule, in other bits."""
        made = real(x, *rest, **options)
        return made * (1 + 2**-22) if x.requires_grad else made

    monkeypatch.setattr(flashmoe_science, "moe_forward", other)
    reason = void_reason(capsys, "--training")
    assert "the timed call gives other values than the one that was checked" in reason


def test_a_wrong_routing_is_void(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = flashmoe_science.moe_route

    def broken(logits: Any, *arguments: Any, **options: Any) -> Any:
        return real(-logits, *arguments, **options)

    monkeypatch.setattr(flashmoe_science, "moe_route", broken)
    assert "greatest logits" in void_reason(capsys)


# Launches are read back behind the route, the layer, its backward and the routing's; the timed
# call's are the last two.
@pytest.mark.parametrize(
    ("way", "nth"),
    [("--backward", n) for n in (3, 4, 5, 6)] + [("--training", n) for n in (1, 2, 3, 4)],
)
def test_another_kernel_is_void(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, way: str, nth: int
) -> None:
    if way == "--training":
        pytest.importorskip("torch")
    real = flashmoe_science.last_launches
    calls: list[int] = []

    def another() -> Any:
        calls.append(1)
        first, *others = real()
        changed = {"kernel": "another"} if len(calls) == nth else {}
        return (dataclasses.replace(first, **changed), *others)

    monkeypatch.setattr(flashmoe_science, "last_launches", another)
    words = "the kernel launched by the timed call" if nth > 4 else "the launched kernel"
    assert void_reason(capsys, way).startswith(f"{words} is not the planned one: kernel: planned")


def test_what_no_kernel_computes_is_void(capsys: pytest.CaptureFixture[str]) -> None:
    assert void_reason(capsys, "--backward", "--kernel", "sm99").startswith("the call failed: kern")


# ---- inputs and the reference ----------------------------------------------------------------

SHAPES = (
    MoeBackwardShape(13, 24, 16, 6, 2, "fp32", 1.0),
    MoeBackwardShape(5, 8, 24, 3, 3, "fp32"),
    MoeBackwardShape(7, 16, 8, 4, 1, "fp32"),  # the weight of one expert is 1
    MoeBackwardShape(3, 16, 8, 16, 2, "fp32"),  # experts without tokens
)


@pytest.fixture(params=["numpy", "torch"])
def arrays(request: pytest.FixtureRequest) -> Arrays:
    if request.param == "numpy":
        return Arrays()
    pytest.importorskip("torch")
    return choose_arrays("cpu")


def test_experts_from_the_fewest_tokens_to_the_most_are_held(arrays: Arrays) -> None:
    shape = MoeBackwardShape(200, 8, 8, 9, 2, "fp32", 1.0)
    inputs = make_moe_gradient_inputs(arrays, shape)
    counts = counts_of(arrays, shape, inputs.layer.logits[0])
    assert len(inputs.layer.logits) == 1
    by_load = sorted(counts)
    assert [counts[e] for e in inputs.held] == [by_load[0], by_load[4], by_load[8]]
    assert len(set(inputs.held)) == 3


def exact(shape: MoeShape, inputs: Any) -> list[Any]:
    """By loops over tokens and their experts, and numerical mathematics of the routing, float64:
    of all experts."""
    layer = inputs.layer
    x, w_gate_up, w_down, logits, dout = (
        np.asarray(v, np.float64)
        for v in (layer.x, layer.w_gate_up, layer.w_down, layer.logits[0], inputs.dout)
    )
    dx, dlogits = np.zeros_like(x), np.zeros_like(logits)
    dw_gate_up, dw_down = np.zeros_like(w_gate_up), np.zeros_like(w_down)
    for t in range(shape.tokens):
        chosen = sorted(range(shape.experts), key=lambda e: (-logits[t, e], e))[: shape.top_k]
        exponents = np.exp(logits[t, chosen])
        weights = exponents / exponents.sum()
        through = []
        for e, weight in zip(chosen, weights, strict=True):
            gate, up = np.split(w_gate_up[e] @ x[t], 2)
            sigmoid = 1 / (1 + np.exp(-gate))
            activation = gate * sigmoid * up
            through.append(dout[t] @ (w_down[e] @ activation))
            dw_down[e] += weight * np.outer(dout[t], activation)
            back = weight * (dout[t] @ w_down[e])
            slope = sigmoid + gate * sigmoid * (1 - sigmoid)
            both = np.concatenate([back * up * slope, back * gate * sigmoid])
            dw_gate_up[e] += np.outer(both, x[t])
            dx[t] += both @ w_gate_up[e]
        jacobian = np.diag(weights) - np.outer(weights, weights)
        dlogits[t, chosen] = jacobian @ through
    return [dx, dlogits, dw_gate_up, dw_down]


def judged(arrays: Arrays, shape: Any, inputs: Any, gradients: list[Any]) -> Any:
    out = inputs.checked(tuple(arrays.array(x) for x in gradients))
    return judge_moe_gradients(arrays, shape, inputs, {OURS: out})[OURS]


@pytest.mark.parametrize("block", [2**22, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_agrees_with_loops(
    monkeypatch: pytest.MonkeyPatch, arrays: Arrays, shape: MoeBackwardShape, block: int
) -> None:
    monkeypatch.setattr(moe_gradient_reference, "_BLOCK", {"cpu": block})
    inputs = make_moe_gradient_inputs(arrays, shape)
    right = exact(shape, inputs)
    verdict = judged(arrays, shape, inputs, right)
    assert verdict.passed, verdict.reason
    assert verdict.error < 1e-12
    assert verdict.bound < 1e-4
    for i, name in enumerate(NAMES):
        wrong = [x.copy() for x in right]
        wrong[i][inputs.held[-1] if i > 1 else -1, ..., -1] += 2e-4
        found = judged(arrays, shape, inputs, wrong)
        assert found.reason.startswith(f"max|{name} - float64| is 0.0002, allowed is ")
        assert found.tensor == name


def test_an_expert_without_tokens_has_gradients_of_zero() -> None:
    arrays, shape = Arrays(), SHAPES[3]
    inputs = make_moe_gradient_inputs(arrays, shape)
    assert counts_of(arrays, shape, inputs.layer.logits[0])[inputs.held[0]] == 0
    right = exact(shape, inputs)
    assert judged(arrays, shape, inputs, right).passed
    right[2][inputs.held[0], 0, 0] = 1e-30
    assert judged(arrays, shape, inputs, right).reason == (
        "max|dw_gate_up - float64| is 1e-30, allowed is 0"
    )


def test_each_expert_has_its_own_bound() -> None:
    """An error that drowns in the gradients of the one with the most tokens does not pass in those
    of another."""
    arrays, shape = Arrays(), MoeBackwardShape(400, 24, 16, 6, 1, "fp16", 3.0)
    inputs = make_moe_gradient_inputs(arrays, shape)
    right = exact(shape, inputs)
    few, _, most = inputs.held
    error = float(abs(right[3][few]).max()) / 100
    for expert, passed in ((most, True), (few, False)):
        wrong = [x.copy() for x in right]
        wrong[3][expert, 0, 0] += error
        assert judged(arrays, shape, inputs, wrong).passed == passed


def test_the_bound_is_twice_the_plain_error_and_two_ulps() -> None:
    arrays, shape = Arrays(), SHAPES[0]
    inputs = make_moe_gradient_inputs(arrays, shape)
    right = exact(shape, inputs)
    wrong = [x.copy() for x in right]
    wrong[0][-1, -1] += 1.0
    found = judged(arrays, shape, inputs, wrong)  # is of dx, which failed
    ulp = 2.0 ** (math.floor(math.log2(abs(right[0]).max())) - 23)
    assert found.bound == pytest.approx(2 * found.plain_error + 2 * ulp)
    for times, passes in ((0.99, True), (1.01, False)):
        wrong[0][-1, -1] = right[0][-1, -1] + times * found.bound
        assert judged(arrays, shape, inputs, wrong).passed == passes


def test_of_much_work_a_part_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, shape = Arrays(), MoeBackwardShape(40, 24, 16, 6, 2, "fp32", 1.0)
    inputs = make_moe_gradient_inputs(arrays, shape)
    counts = counts_of(arrays, shape, inputs.layer.logits[0])
    of_token, of_row = 12 * 2 * 24 * 16, 18 * 24 * 16
    monkeypatch.setattr(moe_gradient_reference, "_TOKEN_FLOPS", {"cpu": 5 * of_token})
    both = sum(counts[e] for e in inputs.held[:2])
    monkeypatch.setattr(moe_gradient_reference, "_EXPERT_FLOPS", {"cpu": both * of_row})
    right = exact(shape, inputs)
    found = judged(arrays, shape, inputs, right)
    assert (found.passed, found.checked) == (True, "5 of 40 tokens, 2 of 6 experts")
    monkeypatch.setattr(moe_gradient_reference, "_EXPERT_FLOPS", {"cpu": 0})
    assert counts[inputs.held[0]] > 0
    assert judged(arrays, shape, inputs, right).checked == "5 of 40 tokens, 1 of 6 experts"
    right[0][1] = math.inf  # of no token that is looked at
    assert judged(arrays, shape, inputs, right).reason.startswith("dx holds NaN or infinity")


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_gradients_of_the_dtype_are_close(dtype: str) -> None:
    pytest.importorskip("torch")
    arrays = choose_arrays("cpu")
    for base in (*SHAPES, MoeBackwardShape(150, 64, 48, 5, 2)):
        shape = dataclasses.replace(base, dtype=dtype)
        inputs = make_moe_gradient_inputs(arrays, shape)
        ours = measure_moe_backward.call_ours(flashmoe_science, arrays, shape, inputs, None)
        assert ours.unwritten == ""
        found = judge_moe_gradients(arrays, shape, inputs, {OURS: ours.out})[OURS]
        assert found.passed, (shape, found)
        rounder = tuple(x * (1 + 2.0**-4) for x in ours.out)
        assert not judge_moe_gradients(arrays, shape, inputs, {OURS: rounder})[OURS].passed


# ---- peers -----------------------------------------------------------------------------------


def test_a_backward_has_its_own_peers() -> None:
    pytest.importorskip("torch")
    names = ["torch-grouped", "torch-loop", "sonicmoe"]
    assert peer_names(MOE_BACKWARD)[:3] == peer_names(MOE_TRAINING)[:3] == names
    assert "vllm-triton" not in peer_names(MOE_BACKWARD)
    for operation in (MOE_BACKWARD, MOE_TRAINING):
        chosen = choose_peers(choose_arrays("cpu"), None, operation)
        assert [p.name for p in chosen] == ["torch-loop"]


PEER_SHAPES = [
    MoeBackwardShape(33, 32, 24, 6, 2, "bf16"),
    MoeBackwardShape(7, 32, 24, 16, 3, "bf16", 2.0),
    MoeBackwardShape(5, 32, 24, 2, 2, "bf16"),
]


def differentiated(name: str, operation: str, base: MoeShape) -> str:
    """What is wrong with the gradients of a peer on the CPU, of two calls from what was saved."""
    arrays = choose_arrays("cpu")
    peer = next(p for p in moe_gradients.PEERS if (p.name, p.operation) == (name, operation))
    shape = MOE_SHAPES[operation](**vars(base))
    assert isinstance(shape, MoeBackwardShape)
    inputs = make_moe_gradient_inputs(arrays, shape)
    contender, first = peer.contender(arrays, shape, inputs)
    assert contender.capturable == (operation == MOE_TRAINING)
    layer = inputs.layer
    assert not any(t.requires_grad for t in (layer.x, layer.w_gate_up, layer.logits[0]))
    reasons = []
    for out in (first, contender.output(contender.call())):
        reasons.append(judge_moe_gradients(arrays, shape, inputs, {name: out})[name].reason)
    return "; ".join(filter(None, reasons))


@pytest.mark.parametrize("operation", [MOE_BACKWARD, MOE_TRAINING])
@pytest.mark.parametrize("shape", PEER_SHAPES, ids=str)
@pytest.mark.parametrize("name", ["torch-grouped", "torch-loop"])
def test_torchs_layers_are_differentiated(name: str, shape: MoeShape, operation: str) -> None:
    torch = pytest.importorskip("torch")
    if name == "torch-grouped" and not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm on the CPU")
    assert differentiated(name, operation, shape) == ""


SONIC = """
import torch
from sonicmoe.enums import ActivationType

state = {}

class TC_Softmax_Topk_Router_Function:
    @staticmethod
    def apply(logits, E, K, is_softmax_over_topk, norm_topk_probs):
        assert is_softmax_over_topk and not norm_topk_probs
        values, ids = logits.float().topk(K)
        return values.softmax(-1), ids.int()

def TC_topk_router_metadata_triton(ids, E, counts, offsets, gather, scatter, reverse):
    state["ids"] = ids.long()

def of_experts(pairs, ids, count):  # [T, K, n] as [T, count, n], elsewhere 0
    made = pairs.new_zeros(len(ids), count, pairs.shape[-1])
    return made.index_put((torch.arange(len(ids))[:, None], ids), pairs)

class _UpProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, b1, offsets, total, K, gather, scatter, reverse, counts, variable,
                activation, inference, concat_layout=False):
        assert not inference and concat_layout, "a backward reads h, of gate rows before up rows"
        assert activation is ActivationType.SWIGLU and w1.stride(1) == 1
        ids = state["ids"]
        h = torch.einsum("th,ihe->tei", x.float(), w1.float())
        h = h[torch.arange(len(ids))[:, None], ids]
        ctx.save_for_backward(x, w1, ids)
        return x.new_empty(total, w1.shape[0] // 2), h.to(x.dtype).flatten(0, 1)

    @staticmethod
    def backward(ctx, _, dh):
        x, w1, ids = ctx.saved_tensors
        dh = of_experts(dh.view(*ids.shape, -1).float(), ids, w1.shape[2])
        dx = torch.einsum("tei,ihe->th", dh, w1.float())
        dw = torch.einsum("tei,th->eih", dh, x.float())
        return dx.to(x.dtype), dw.to(x.dtype).permute(1, 2, 0), *[None] * 12

class _DownProjection:
    @staticmethod
    def apply(a, h, w2, b2, scores, offsets, T, K, gather, scatter, reverse, counts, variable,
              activation):
        assert h is not None and scores.shape == (T, K) and w2.stride(1) == 1
        gate, up = h.view(T, K, -1).float().chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        inner = of_experts(inner * scores[..., None], state["ids"], w2.shape[2])
        return torch.einsum("tei,hie->th", inner, w2.float()).to(h.dtype)
"""


@pytest.mark.parametrize("operation", [MOE_BACKWARD, MOE_TRAINING])
@pytest.mark.parametrize("shape", PEER_SHAPES, ids=str)
def test_sonicmoe_is_differentiated(modules: Path, shape: MoeShape, operation: str) -> None:
    pytest.importorskip("torch")
    folder = modules / "sonicmoe" / "functional"
    folder.mkdir(parents=True)
    (modules / "sonicmoe" / "__init__.py").write_text("")
    (modules / "sonicmoe" / "enums.py").write_text(
        "import enum\nActivationType = enum.Enum('A', ['SWIGLU'])\n"
    )
    (folder / "__init__.py").write_text(SONIC)
    assert differentiated("sonicmoe", operation, shape) == ""


TUNER = """
import os

class Autotuner:
    def __init__(self, fn, count):
        self.fn, self.configs, self.cache_results = fn, list(range(count)), True
        self.early_config_prune = lambda configs, named, **options: [c for c in configs if c % 2]
        self.do_bench = None

    def __call__(self, x):
        for config in self.early_config_prune(self.configs, {"A": x}, dynamic_scheduler=False):
            assert not self.cache_results, "what is not timed must not be kept"
            assert os.environ["QUACK_COMPILE_WORKERS"] == "1"
            self.do_bench(lambda: self.fn(config), quantiles=(0.5, 0.2, 0.8))
"""
TUNED = """
import os
from quack.autotuner import Autotuner

def compile(config):
    with open(f"{os.environ['COMPILED']}/{os.getpid()}", "a") as file:
        file.write(f"{config} ")

gemm_tuned = Autotuner(compile, 22)
gemm_gated_tuned = Autotuner(lambda config: compile(100 + config), 6)
"""


def test_what_quack_tunes_is_compiled_once_by_processes_together(
    modules: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    for folder in ("sonicmoe/functional", "quack", "compiled"):
        (modules / folder).mkdir(parents=True)
    for file, text in {
        "sonicmoe/__init__.py": "",
        "sonicmoe/enums.py": "import enum\nActivationType = enum.Enum('A', ['SWIGLU'])\n",
        "sonicmoe/functional/__init__.py": SONIC.replace(
            "assert not inference and",
            "gemm_tuned(x), gemm_gated_tuned(x)\n        assert not inference and",
        ).replace("import torch\n", "import torch\nfrom quack.gemm_interface import *\n", 1),
        "quack/__init__.py": "",
        "quack/autotuner.py": TUNER,
        "quack/gemm_interface.py": TUNED,
    }.items():
        (modules / file).write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{modules}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("COMPILED", str(modules / "compiled"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4))
    monkeypatch.delenv(quack_ahead.WORKERS, raising=False)
    quack_ahead.compile_ahead.cache_clear()
    try:
        quack_ahead.compile_ahead("cpu")
        said = capfd.readouterr().err
        quack_ahead.compile_ahead("cpu")  # of no effect: once is enough
        assert capfd.readouterr().err == ""
        assert os.environ.pop(quack_ahead.WORKERS) == "1"  # the tuner itself starts none
    finally:
        quack_ahead.compile_ahead.cache_clear()
    assert "3 processes compile" in said
    assert "failed" not in said
    shares = [
        sorted(map(int, file.read_text().split())) for file in (modules / "compiled").iterdir()
    ]
    of_both = [*range(1, 22, 2), 101, 103, 105]
    assert sorted(config for share in shares for config in share) == of_both
    assert sorted(map(len, shares)) == [4, 5, 5]


@pytest.mark.parametrize("tuner", [True, False])
def test_compiling_is_left_to_who_asked_for_it(
    modules: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tuner: bool
) -> None:
    if tuner:
        (modules / "quack").mkdir()
        (modules / "quack" / "autotuner.py").write_text(TUNER)
        monkeypatch.setenv(quack_ahead.WORKERS, "4")
    else:
        monkeypatch.delenv(quack_ahead.WORKERS, raising=False)
    quack_ahead.compile_ahead.cache_clear()
    try:
        quack_ahead.compile_ahead("cpu")
    finally:
        quack_ahead.compile_ahead.cache_clear()
    assert capfd.readouterr().err == ""
    assert os.environ.get(quack_ahead.WORKERS) == ("4" if tuner else None)


def test_a_share_is_never_empty() -> None:
    assert quack_ahead.share_of(None, 5, 8, [1, 2, 3]) == [1]
    assert quack_ahead.share_of(None, 1, 2, [1, 2, 3, 4]) == [2, 4]


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_peer_is_void_and_we_are_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    torch = pytest.importorskip("torch")
    real = torch.nn.functional.silu
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x: 1.1 * real(x))
    code, document, cell = run_bench(capsys, way)
    assert code == 0, cell.get("reason")
    entry = cell["contenders"]["torch-loop"]
    assert entry["status"] == "void"
    assert " - float64| is " in entry["reason"]
    assert "median_s" not in entry
    assert "median_s" in cell["contenders"][OURS]
    assert document["summary"] == {}


# ---- what becomes of records -----------------------------------------------------------------


def test_a_backward_is_not_compared_with_a_forward() -> None:
    forward = bench_records.moe_grid()
    backward = bench_records.moe_grid(operation=MOE_BACKWARD)
    assert compare_records(backward, backward)["summary"]["rows"] == 4
    with pytest.raises(CommandError, match="no shape has times in both"):
        compare_records(forward, backward)


@pytest.mark.parametrize("operation", [MOE_BACKWARD, MOE_TRAINING])
@pytest.mark.parametrize("chart", charts.CHARTS)
def test_pictures(tmp_path: Path, chart: str, operation: str) -> None:
    pytest.importorskip("matplotlib")
    made = bench_records.moe_grid(operation=operation)
    for cell in made["cells"]:
        for entry in cell["contenders"].values():
            del entry["weight_bytes_per_s"]
    file = bench_records.write(tmp_path / "moe.json", made)
    picture = charts.draw(record.read_record(file), chart, theme.LIGHT, "svg").decode()
    traffic = "saved" if operation == MOE_BACKWARD else "both calls"  # lines break behind words
    words = {"speed": "against tokens", "ratio": "over torch-grouped", "roofline": traffic}
    assert words[chart] in picture


@pytest.mark.gpu
@pytest.mark.alone  # only short calls are captured
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("tokens", "skew"), [("2", "0"), ("700", "1.5")])
def test_a_row_on_the_gpu(
    capsys: pytest.CaptureFixture[str], way: str, tokens: str, skew: str
) -> None:
    pytest.importorskip("torch")
    layer = ["--hidden", "256", "--inner", "128", "--experts", "16", "--top-k", "2"]
    command = ["bench", "--tokens", tokens, *layer, "--skew", skew, "--device", "cuda", way]
    code = main([*command, "--seconds", "0.05", "--peer", "torch-grouped", "--json"])
    [cell] = json.loads(capsys.readouterr().out)["cells"]
    assert code == 0, cell.get("reason")
    ours, peer = (cell["contenders"][name] for name in ("flashmoe", "torch-grouped"))
    if way == "--backward":
        assert ours["graph_s"] > 0  # captured, so without a word to the host
    assert peer["against"]["ratio"] > 0
    assert ours["peak_bytes"] > 0
    assert ("bound_fraction" in ours) == (int(tokens) >= 512)
