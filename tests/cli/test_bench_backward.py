"""`flashmoe bench` of attention's backward, alone and behind its forward: gradients that are
checked, rows that turn void, peers that differentiate."""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex
from pathlib import Path
from typing import Any

import bench_records
import flashmoe_science
import numpy as np
import pytest
import reference_backward
from flashmoe_science.cli import (
    bench,
    build_parser,
    environment,
    gradient_reference,
    main,
    measure_backward,
    records,
)
from flashmoe_science.cli.arrays import Arrays, choose_arrays
from flashmoe_science.cli.compare import compare_records
from flashmoe_science.cli.measure import OURS
from flashmoe_science.cli.measure_backward import make_backward_inputs
from flashmoe_science.cli.output import CommandError
from flashmoe_science.cli.peers import choose_peers, gradients, peer_names
from flashmoe_science.cli.plotting import record
from flashmoe_science.cli.shapes import (
    BACKWARD,
    TRAINING,
    BackwardShape,
    Shape,
    TrainingShape,
    of_pass,
    shape_from_options,
)
from flashmoe_science.cli.suites import load_suite, operation_of, shape_of
from flashmoe_science.cli.timing import Contender, CudaClock

SMALL = ["--seq", "32", "--heads", "2", "--dim", "64", "--device", "cpu", "--seconds", "0.01"]
GRADIENTS = ("dq", "dk", "dv")


def run_bench(
    capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    code = main(["bench", *SMALL, *options, "--json"])
    document = json.loads(capsys.readouterr().out)
    return code, document, document["cells"][0]


def void_reason(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    code, document, cell = run_bench(capsys, *(options or ("--backward",)))
    assert code == 1
    assert cell["status"] == "void"
    assert "contenders" not in cell
    assert document["summary"] == {}
    return str(cell["reason"])


def break_call(monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    """Every functional backward of ours gives what `damage` makes of its gradients."""
    real = flashmoe_science.flash_attention_backward

    def broken(*arguments: Any, **options: Any) -> Any:
        answer = real(*arguments, **options)
        damage(dict(zip(GRADIENTS, answer, strict=False)), options)
        return answer

    monkeypatch.setattr(flashmoe_science, "flash_attention_backward", broken)


# ---- rows ------------------------------------------------------------------------------------


def test_a_backward_is_checked_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    code, document, cell = run_bench(capsys, "--backward", "--kv-heads", "1", "--causal")
    assert code == 0
    assert document["operation"] == BACKWARD
    assert document["title"] == "Attention backward, one shape"
    assert cell["accuracy"]["passed"] is True
    assert cell["accuracy"]["tensor"] in GRADIENTS
    assert cell["accuracy"]["checked"] == "1 of 1 KV heads, all rows"
    assert cell["plan"]["launches"] == cell["launches"]
    assert cell["launches"][0]["kernel"].startswith("attention_backward_")
    assert cell["flops"] == cell["plan"]["flops"] == 2.5 * (4 * 2 * 64 * 32 * 33 / 2)
    assert cell["bytes"] == cell["plan"]["bytes"]
    root = Path(__file__).parents[2]
    if isinstance(document["source"]["kernels"], str) and document["source"]["kernels"]:
        assert document["source"]["kernels"] == environment.kernels_hash(BACKWARD, "cpu", root)


def test_the_table_says_what_it_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SMALL, "--backward", "--peer", "none"]) == 0
    assert "Speeds count five products: 2.5 times the forward's FLOPs" in capsys.readouterr().out
    assert main(["bench", *SMALL, "--peer", "none"]) == 0
    assert "five products" not in capsys.readouterr().out


@pytest.mark.parametrize("way", ["--backward", "--training"])
def test_the_record_keeps_its_schema(capsys: pytest.CaptureFixture[str], way: str) -> None:
    pytest.importorskip("jsonschema")
    if way == "--training":
        pytest.importorskip("torch")
    _, document, cell = run_bench(capsys, way)
    assert records.schema_violations(document) == []
    cell["accuracy"]["tensor"] = "dz"
    assert any("dz" in violation for violation in records.schema_violations(document))


def test_training_is_a_forward_and_its_backward(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    code, document, cell = run_bench(capsys, "--training")
    assert code == 0, cell.get("reason")
    assert document["operation"] == cell["plan"]["operation"] == TRAINING
    kernels = [launch["kernel"].partition("_cpu")[0] for launch in cell["launches"]]
    assert kernels == ["attention_forward", "attention_backward"]
    assert cell["flops"] == cell["plan"]["flops"] == 3.5 * (4 * 2 * 64 * 32 * 32)
    assert cell["bytes"] == cell["plan"]["bytes"]
    assert cell["contenders"]["torch-sdpa"]["status"] == "ok"


@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(7, 7), (9, 4), (4, 9)])
def test_work_and_traffic_are_the_librarys(causal: str, seq_q: int, seq_k: int) -> None:
    shape = BackwardShape(2, seq_q, seq_k, 4, 2, 64, 32, "fp32", causal, window_left=3)
    plan = flashmoe_science.attention_backward_plan_for(
        batch=2, seq_q=seq_q, seq_k=seq_k, heads_q=4, heads_kv=2, dim=64, dim_v=32, dtype="fp32",
        device="cpu", **shape.options,
    )  # fmt: skip
    assert (shape.flops, shape.bytes) == (plan.flops, plan.bytes)
    forward, both = Shape(**vars(shape)), TrainingShape(**vars(shape))
    assert both.flops == forward.flops + shape.flops
    assert both.bytes == forward.bytes + shape.bytes


# ---- the gate --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_wrong_gradient_has_no_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def damage(gradients: dict[str, Any], options: dict[str, Any]) -> None:
        gradients[name][0, 3, 1, 5] += 0.05

    break_call(monkeypatch, damage)
    assert f"max|{name} - float64| is 0.05, allowed is" in void_reason(capsys)


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_that_is_not_written_has_no_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def damage(gradients: dict[str, Any], options: dict[str, Any]) -> None:
        gradients[name][0, -1] = float("nan")

    break_call(monkeypatch, damage)
    assert void_reason(capsys).startswith(f"{name} holds NaN or infinity")


def test_a_call_that_is_right_only_when_it_is_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(gradients: dict[str, Any], options: dict[str, Any]) -> None:
        if options.get("dk") is None:
            gradients["dk"][0, 0, 0, 0] += 1e-6

    break_call(monkeypatch, damage)
    assert "the timed call gives other values than the one that was checked" in void_reason(capsys)


def test_gradients_of_autograd_that_were_not_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    real = flashmoe_science.flash_attention

    def other(q: Any, *rest: Any, **options: Any) -> Any:
        """Right within the rule, in other bits."""
        return real(q, *rest, **options) if not q.requires_grad else torch.mul(
            real(q, *rest, **options), 1 + 2**-22
        )  # fmt: skip

    monkeypatch.setattr(flashmoe_science, "flash_attention", other)
    reason = void_reason(capsys, "--training")
    assert "the timed call gives other values than the one that was checked" in reason


@pytest.mark.parametrize("way", ["--backward", "--training"])
@pytest.mark.parametrize("change", [{"grid": (1, 2, 3)}, {"kernel": "another"}])
def test_a_wrong_route(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    change: dict[str, Any],
) -> None:
    if way == "--training":
        pytest.importorskip("torch")
    real = flashmoe_science.last_launch
    monkeypatch.setattr(
        flashmoe_science, "last_launches", lambda: (dataclasses.replace(real(), **change),)
    )
    [field] = change
    words = f"the launched kernel is not the planned one: {field}: planned"
    assert words in void_reason(capsys, way)


def test_what_no_kernel_computes_is_void(capsys: pytest.CaptureFixture[str]) -> None:
    reason = void_reason(capsys, "--backward", "--kernel", "sm99")
    assert reason.startswith("the call failed: kernel: ")


# ---- the reference ---------------------------------------------------------------------------

SHAPES = (
    BackwardShape(2, 40, 40, 4, 2, 64, 64, "fp32"),
    BackwardShape(1, 24, 40, 3, 1, 64, 32, "fp32", "bottom_right"),
    BackwardShape(1, 40, 24, 2, 2, 64, 64, "fp32", "bottom_right"),  # rows without a key
    BackwardShape(2, 24, 40, 2, 1, 64, 64, "fp32", "top_left"),  # keys that nobody sees
    BackwardShape(1, 40, 40, 4, 2, 64, 64, "fp32", "bottom_right", 9, None, 0.8),
    BackwardShape(1, 24, 40, 2, 2, 64, 64, "fp32", "none", 9, 4),
)


def exact(shape: BackwardShape, inputs: Any) -> tuple[Any, Any, Any]:
    """By the reference of the kernels' tests, which is written apart."""
    q, k, v, dout = (np.asarray(x) for x in inputs)
    options = shape.options | {"causal": shape.causal}
    made = reference_backward.gradients_float64(dout, q, k, v, **options)
    return made.dq, made.dk, made.dv


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", [2**21, 100])
def test_the_reference_is_that_of_the_tests(
    monkeypatch: pytest.MonkeyPatch, shape: BackwardShape, block: int
) -> None:
    monkeypatch.setattr(gradient_reference, "SCORE_BLOCK", {"cpu": block})
    arrays = Arrays()
    inputs = make_backward_inputs(arrays, shape)
    right = exact(shape, inputs)
    verdict = gradient_reference.judge_gradients(arrays, shape, inputs, {OURS: right})[OURS]
    assert verdict.passed
    assert verdict.error < 1e-12
    assert verdict.bound < 1e-4
    for i, name in enumerate(GRADIENTS):
        wrong = [x.copy() for x in right]
        wrong[i][-1, -1, -1, -1] += 2e-4
        judged = gradient_reference.judge_gradients(arrays, shape, inputs, {OURS: tuple(wrong)})
        assert judged[OURS].reason.startswith(f"max|{name} - float64| is 0.0002, allowed is ")
        assert judged[OURS].tensor == name


def test_of_long_sequences_some_heads_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dataclasses.replace(SHAPES[0], heads_q=8, heads_kv=4)
    monkeypatch.setattr(gradient_reference, "SCORE_BUDGET", {"cpu": 2 * 2 * 40 * 40})
    arrays = Arrays()
    inputs = make_backward_inputs(arrays, shape)
    right = tuple(x.copy() for x in exact(shape, inputs))

    def verdict(out: Any) -> Any:
        return gradient_reference.judge_gradients(arrays, shape, inputs, {OURS: out})[OURS]

    assert verdict(right).checked == "2 of 8 KV heads, all rows"
    right[1][0, 0, 1, 0] += 1.0  # not among the heads, the first and the last
    assert verdict(right).passed
    right[1][0, 0, 1, 0] = float("nan")  # but finite is every element
    assert verdict(right).reason.startswith("dk holds NaN")


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_gradients_of_the_dtype_are_close(dtype: str) -> None:
    pytest.importorskip("torch")
    arrays = choose_arrays("cpu")
    for base in SHAPES:
        shape = dataclasses.replace(base, dtype=dtype)
        inputs = make_backward_inputs(arrays, shape)
        ours = measure_backward.call_ours(flashmoe_science, arrays, shape, inputs, None)
        judged = gradient_reference.judge_gradients(arrays, shape, inputs, {OURS: ours.out})
        assert judged[OURS].passed, judged[OURS]
        rounder = tuple(x * (1 + 2.0**-4) for x in ours.out)
        judged = gradient_reference.judge_gradients(arrays, shape, inputs, {OURS: rounder})
        assert not judged[OURS].passed


# ---- peers -----------------------------------------------------------------------------------

FLASH_ATTENTION = """
import torch

def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, {options}):
    assert {fair}
    q, k, v = (x.swapaxes(1, 2).float() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.swapaxes(2, 3) * q.shape[-1] ** -0.5
    rows, keys = scores.shape[-2:]
    ahead = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
    if causal:
        scores = scores.masked_fill(ahead > 0, -torch.inf)
    if window_size[0] not in (-1, None):
        scores = scores.masked_fill(ahead < -window_size[0], -torch.inf)
    return (scores.softmax(-1) @ v).swapaxes(1, 2)
"""


@pytest.mark.parametrize("operation", [BACKWARD, TRAINING])
@pytest.mark.parametrize("name", ["fa2", "fa3", "fa3-deterministic", "fa4"])
def test_flash_attention_is_differentiated(modules: Path, name: str, operation: str) -> None:
    pytest.importorskip("torch")
    if name == "fa2":
        (modules / "flash_attn_2_cuda.py").write_text("")
        (modules / "flash_attn").mkdir()
        file, options, fair = "flash_attn/__init__.py", "deterministic=False", "True"
    elif name == "fa4":
        (modules / "flash_attn" / "cute").mkdir(parents=True)
        file, options, fair = "flash_attn/cute/__init__.py", "deterministic=False", "True"
    else:
        file, options = "flash_attn_interface.py", "num_splits=1, deterministic=False"
        fair = f"num_splits == 1 and deterministic is {name != 'fa3'}"
    (modules / file).write_text(FLASH_ATTENTION.format(options=options, fair=fair))
    found = {p.name: p for p in gradients.PEERS if p.operation == operation}
    assert found[name].missing() is None
    arrays = choose_arrays("cpu")
    base = BackwardShape(2, 24, 24, 4, 2, 64, 32, "fp32", "bottom_right", window_left=9)
    shape: BackwardShape = TrainingShape(**vars(base)) if operation == TRAINING else base
    inputs = make_backward_inputs(arrays, shape)
    contender, first = found[name].contender(arrays, shape, inputs)
    for out in (first, contender.call()):  # what was saved serves more than one call
        judged = gradient_reference.judge_gradients(arrays, shape, inputs, {name: out})
        assert judged[name].passed, judged[name].reason
    assert contender.capturable == (operation == TRAINING)
    assert not any(x.requires_grad for x in inputs)


def test_a_backward_has_its_own_peers() -> None:
    pytest.importorskip("torch")
    names = ["torch-sdpa", "torch-flash", "torch-cudnn", "torch-efficient", "torch-math", "fa2",
             "fa3", "fa4", "fa3-deterministic"]  # fmt: skip
    assert peer_names(BACKWARD)[: len(names)] == peer_names(TRAINING)[: len(names)] == names
    assert "fa3-deterministic" not in peer_names()
    chosen = choose_peers(choose_arrays("cpu"), None, BACKWARD)
    assert [p.name for p in chosen] == ["torch-sdpa"]


def test_a_wrong_peer_is_void_and_we_are_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *a, **o: real(*a, **o) * 1.1,
    )
    code, document, cell = run_bench(capsys, "--backward")
    assert code == 0
    entry = cell["contenders"]["torch-sdpa"]
    assert entry["status"] == "void"
    assert " - float64| is " in entry["reason"]
    assert "median_s" not in entry
    assert "median_s" in cell["contenders"][OURS]
    assert document["summary"] == {}


def test_a_recorded_graph_of_autograd_is_not_captured() -> None:
    clock = CudaClock.__new__(CudaClock)  # no GPU is asked
    assert clock._capture(Contender("", lambda: None, capturable=False), 1) is None


# ---- the command -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--suite", "attention-backward-cpu", "--backward"], "--suite: a suite has its own"),
        ([*SMALL, "--training", "--kernel", "cpu"], "--kernel: a family is of one operation"),
        (["--suite", "attention-backward", "--device", "cpu"], "is for a GPU and would take hours"),
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


def test_a_backward_is_not_compared_with_a_forward() -> None:
    forward = bench_records.grid()
    backward = bench_records.grid(operation=BACKWARD)
    assert compare_records(backward, backward)["summary"]["rows"] == 3
    with pytest.raises(CommandError, match="no shape has times in both"):
        compare_records(forward, backward)


@pytest.mark.parametrize("operation", [BACKWARD, TRAINING])
def test_a_rows_command_gives_its_shape(operation: str) -> None:
    row = {"shape": bench_records.shape(32, "bottom_right", dim_v=128), "status": "ok"}
    words = shlex.split(record.row_command(bench_records.grid(operation=operation), row))
    arguments = build_parser().parse_args(words[1:])
    shape = of_pass(shape_from_options(arguments, "fp32"), arguments)
    assert shape == shape_of(row["shape"], operation)
    assert operation_of(shape) == operation


def test_the_suites_are_what_they_say() -> None:
    def in_backward(shapes: Any) -> list[Shape]:
        return [BackwardShape(**vars(s)) for s in shapes]

    grid = load_suite("attention-backward").shapes
    assert list(grid) == in_backward(load_suite("attention-forward").shapes)
    variants = load_suite("attention-backward-variants").shapes
    assert len(set(variants)) == len(variants) == 10
    assert {(s.heads_q, s.heads_kv, s.seq_q) for s in variants if s.heads_q != s.heads_kv} == {
        (h, 8, n) for h in (32, 64) for n in (4096, 8192)
    }
    assert sorted(s.seq_q for s in variants if s.dim_v != s.dim) == [2048, 4096, 8192, 16384]
    assert sorted(s.seq_q for s in variants if s.window == (1023, None)) == [8192, 16384]
    assert {s.causal for s in variants} == {"bottom_right"}
    assert {s.batch * s.seq_q for s in (*grid, *variants)} == {16384}
    of_grid = [s for s in grid if s.seq_q in (1024, 4096, 16384)]
    types = load_suite("attention-backward-fp16").shapes
    assert list(types[::2]) == of_grid
    assert [dataclasses.replace(s, dtype="bf16") for s in types[1::2]] == of_grid
    assert {s.dtype for s in types[1::2]} == {"fp16"}
    sustained = load_suite("attention-backward-sustained").shapes
    assert list(sustained) == [s for s in grid if s.seq_q == 4096]
    training = load_suite("attention-training").shapes
    assert in_backward(training) == [s for s in grid if s.seq_q <= 4096]
    assert {type(s) for s in training} == {TrainingShape}
    on_cpu = load_suite("attention-backward-cpu")
    assert (on_cpu.device, on_cpu.operation) == ("cpu", BACKWARD)
    assert list(on_cpu.shapes) == in_backward(load_suite("cpu").shapes)


def test_rows_of_a_backward_are_kept_on_resuming(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    rows = tuple(BackwardShape(1, n, n, 1, 1, 64, 64, "fp32") for n in (16, 24))
    suite = dataclasses.replace(load_suite("attention-backward-cpu"), shapes=rows)
    monkeypatch.setattr(bench, "load_suite", lambda name: suite)
    file = tmp_path / "record.json"
    command = ["bench", "--suite", suite.name, "--seconds", "0.01", "--peer", "none"]
    run = functools.partial(main, [*command, "--json", str(file), "--resume"])
    assert run() == 0
    before = json.loads(file.read_text())
    assert run() == 0
    after = json.loads(file.read_text())
    assert after["kept"]["rows"] == 2
    assert after["cells"] == before["cells"]
    capsys.readouterr()
