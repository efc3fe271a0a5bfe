"""`flashmoe bench` of a mixture of experts: inputs as they say, all checked, peers beside us."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import Any

import bench_records
import flashmoe_science
import numpy as np
import pytest
from flashmoe_science.cli import build_parser, main, moe_reference, records
from flashmoe_science.cli.arrays import Arrays, choose_arrays
from flashmoe_science.cli.bench import summarise
from flashmoe_science.cli.compare import compare_records
from flashmoe_science.cli.moe_inputs import make_logits, make_moe_inputs
from flashmoe_science.cli.moe_reference import judge_moe, loads, routing_fault, routing_of
from flashmoe_science.cli.moe_shapes import MoeShape, moe_shape_from_options
from flashmoe_science.cli.peers import choose_peers, peer_names, sonicmoe, torch_moe, vllm_moe
from flashmoe_science.cli.peers.peer import Peer
from flashmoe_science.cli.plotting import charts, record, theme
from flashmoe_science.cli.suites import MOE, load_suite, operation_of, shape_of

SMALL = ["--tokens", "9", "--hidden", "32", "--inner", "24", "--experts", "6", "--top-k", "2"]
ON_CPU = ["--device", "cpu", "--seconds", "0.01"]


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", *SMALL, *ON_CPU, *options, "--json"])
    return code, json.loads(capsys.readouterr().out)


# ---- shapes and suites -----------------------------------------------------------------------


def test_work_and_traffic() -> None:
    shape = MoeShape(5, 16, 24, 8, 2, "bf16", skew=1.5)
    assert shape.flops == 6 * 5 * 2 * 16 * 24
    assert shape.expert_bytes == 3 * 16 * 24 * 2
    assert shape.traffic(3) == 3 * shape.expert_bytes + 2 * (5 * 16 + 5 * 8 + 5 * 16)
    assert shape.bytes == shape.traffic(8)
    assert MoeShape(1, 16, 24, 8, 2).bytes == MoeShape(1, 16, 24, 8, 2).traffic(2)
    assert str(shape) == "bf16 T5 H16 I24 E8 K2 zipf 1.5"
    assert shape == dataclasses.replace(shape, model="mine")
    assert operation_of(shape) == MOE


def test_the_suites_are_what_they_say() -> None:
    training = load_suite("moe-training")
    assert training.operation == MOE
    found = [(s.tokens, s.hidden, s.inner, s.experts, s.top_k, s.skew) for s in training.shapes]
    assert len(set(found)) == len(found)
    for anchor in [
        (8192, 4096, 14336, 8, 2),
        (32768, 2048, 1024, 64, 8),
        (32768, 2048, 768, 128, 8),
        (32768, 4096, 1024, 128, 8),
        (32768, 1536, 256, 128, 8),
        (8192, 7168, 2048, 256, 8),
    ]:
        assert {(*anchor, 0), (*anchor, 1)} <= set(found)
    assert min(s.tokens for s in training.shapes) >= 8192
    models = {"moe-qwen3": (2048, 768, 128, 8), "moe-mixtral": (4096, 14336, 8, 2),
              "moe-olmoe": (2048, 1024, 64, 8)}  # fmt: skip
    for name, extents in models.items():
        shapes = load_suite(name).shapes
        assert {(s.hidden, s.inner, s.experts, s.top_k) for s in shapes} == {extents}
        for skew in (0, 1):
            assert [s.tokens for s in shapes if s.skew == skew] == [2**i for i in range(14)]
    every = [s for n in (*models, "moe-training") for s in load_suite(n).shapes]
    assert {s.dtype for s in every} == {"bf16"}
    # Weights and what a call of the grouped peer adds fit in an H200's memory.
    most = max(s.experts * s.expert_bytes + 2 * s.pairs * (2 * s.hidden + 3 * s.inner)
               for s in every)  # fmt: skip
    assert most < 60e9
    assert load_suite("moe-cpu").device == "cpu"


@pytest.mark.parametrize(
    "fields", [bench_records.moe_shape(7, 1.5), bench_records.moe_shape(7) | {"dtype": "fp16"}]
)
def test_a_rows_command_gives_its_shape(fields: dict[str, Any]) -> None:
    row = {"shape": fields, "status": "ok"}
    words = shlex.split(record.row_command(bench_records.moe_grid(), row))
    arguments = build_parser().parse_args(words[1:])
    assert moe_shape_from_options(arguments, "fp32") == shape_of(fields)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tokens", "4"], "--hidden is missing"),
        ([*SMALL, "--seq", "4"], "--seq: it is of attention, and --tokens of a mixture of experts"),
        ([*SMALL, "--top-k", "7"], "--top-k: got 7, accepted are at most the 6 experts"),
        ([*SMALL, "--tokens", "0"], "nothing to time in fp32 T0"),
        (["--suite", "moe-cpu", "--skew", "1"], "either it or --skew"),
        (["--suite", "moe-qwen3"], "--suite: moe-qwen3 is for a GPU"),
        ([*SMALL, "--peer", "fa3"], "--peer: got fa3, accepted are torch-grouped, torch-loop"),
    ],
)
def test_a_wrong_request_is_explained(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options, *ON_CPU]) == 1
    assert sentence in capsys.readouterr().err


def test_a_skew_has_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", *SMALL, "--skew", "-1"])
    assert "got -1, accepted is a number from 0 to 10" in capsys.readouterr().err


# ---- inputs ----------------------------------------------------------------------------------


@pytest.fixture(params=["numpy", "torch"])
def arrays(request: pytest.FixtureRequest) -> Arrays:
    if request.param == "numpy":
        return Arrays()
    pytest.importorskip("torch")
    return choose_arrays("cpu")


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_experts_are_liked_by_zipfs_law(arrays: Arrays, skew: float) -> None:
    """With one expert a token, the one of rank r has r^-skew of the tokens."""
    shape = MoeShape(20000, 8, 8, 5, 1, "fp32", skew)
    ids, _ = routing_of(arrays, shape, make_logits(arrays, shape, 3))
    counts = collections.Counter(ids.reshape((-1,)).tolist())
    expected = [(rank + 1) ** -skew for rank in range(5)]
    expected = [20000 * e / sum(expected) for e in expected]
    found = sorted(counts.values(), reverse=True)
    assert all(abs(f - e) < 5 * math.sqrt(e) for f, e in zip(found, expected, strict=True))


def test_no_choice_hangs_on_a_tie() -> None:
    """bf16 has few values: without care some tokens' second and third logits would be equal."""
    pytest.importorskip("torch")
    arrays = choose_arrays("cpu")
    shape = MoeShape(4096, 8, 8, 64, 2, "bf16")
    logits = arrays.sorted_down(make_logits(arrays, shape, 0).float())
    assert bool((logits[:, 0] == logits[:, 1]).any())  # within a choice ties stay
    assert not bool((logits[:, 1] == logits[:, 2]).any())


def test_calls_in_a_row_take_other_experts(arrays: Arrays) -> None:
    shape = MoeShape(1, 8, 8, 64, 4, "fp32")
    inputs = make_moe_inputs(arrays, shape)
    assert len(inputs.logits) == 20
    chosen = [tuple(sorted(routing_of(arrays, shape, x)[0][0].tolist())) for x in inputs.logits]
    assert len(set(chosen)) > 15
    seen: list[Any] = []
    call = inputs.rotation(seen.append)
    for _ in range(21):
        call()
    assert [id(x) for x in seen] == [id(x) for x in (*inputs.logits, inputs.logits[0])]
    assert len(make_moe_inputs(arrays, dataclasses.replace(shape, tokens=8192)).logits) == 1


# ---- the reference ---------------------------------------------------------------------------


def by_loops(shape: MoeShape, inputs: Any) -> Any:
    """One token and expert at a time, float64."""
    x, w_gate_up, w_down, logits = (
        np.asarray(v, np.float64)
        for v in (inputs.x, inputs.w_gate_up, inputs.w_down, inputs.logits[0])
    )
    out = np.zeros(shape.output_extents)
    for t in range(shape.tokens):
        chosen = sorted(range(shape.experts), key=lambda e: (-logits[t, e], e))[: shape.top_k]
        total = sum(math.exp(logits[t, e]) for e in chosen)
        for e in chosen:
            gate, up = np.split(w_gate_up[e] @ x[t], 2)
            y = w_down[e] @ (gate / (1 + np.exp(-gate)) * up)
            out[t] += math.exp(logits[t, e]) / total * y
    return out


SHAPES = [MoeShape(13, 24, 16, 6, 2, "fp32", 1.0), MoeShape(5, 8, 24, 3, 3, "fp32")]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_agrees_with_loops(arrays: Arrays, shape: MoeShape) -> None:
    inputs = make_moe_inputs(arrays, shape)
    out = arrays.array(by_loops(shape, inputs))
    verdict = judge_moe(arrays, shape, inputs, {"x": out})["x"]
    assert verdict.passed
    assert verdict.error < 1e-14
    assert 1e-9 < verdict.plain_error < 1e-5
    assert verdict.checked == f"{shape.tokens} of {shape.tokens} tokens"


@pytest.mark.parametrize(
    ("spoil", "reason"), [(math.nan, "never written"), (0.5, "max|out - float64|")]
)
def test_one_wrong_element_is_seen(spoil: float, reason: str) -> None:
    arrays, shape = Arrays(), SHAPES[0]
    inputs = make_moe_inputs(arrays, shape)
    out = by_loops(shape, inputs)
    out[12, 7] += spoil
    assert reason in judge_moe(arrays, shape, inputs, {"x": out})["x"].reason


def test_the_bound_is_twice_the_plain_error_and_an_ulp() -> None:
    arrays, shape = Arrays(), SHAPES[0]
    inputs = make_moe_inputs(arrays, shape)
    exact = by_loops(shape, inputs)
    plain_error = judge_moe(arrays, shape, inputs, {"x": exact})["x"].plain_error
    ulp = 2.0 ** (math.floor(math.log2(abs(exact).max())) - 23)
    for times, passes in ((0.9, True), (1.1, False)):
        out = exact.copy()
        out[12, 7] += times * (2 * plain_error + ulp)
        assert judge_moe(arrays, shape, inputs, {"x": out})["x"].passed == passes


def test_many_tokens_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, shape = Arrays(), SHAPES[0]
    monkeypatch.setattr(moe_reference, "_FLOP_BUDGET", {"cpu": 5 * shape.flops / shape.tokens})
    inputs = make_moe_inputs(arrays, shape)
    out = by_loops(shape, inputs)
    verdict = judge_moe(arrays, shape, inputs, {"x": out})["x"]
    assert verdict.passed
    assert verdict.checked == "5 of 13 tokens"
    out[1] = math.inf  # of no token that is looked at
    assert not judge_moe(arrays, shape, inputs, {"x": out})["x"].passed


def route(shape: MoeShape, logits: Any) -> Any:
    return flashmoe_science.moe_route(logits, shape.top_k, renormalize=True)


def swap_slots(routing: Any) -> None:
    routing.slots[0, 0], routing.slots[1, 0] = routing.slots[1, 0].copy(), routing.slots[0, 0]


def swap_pairs(routing: Any) -> None:
    routing.pairs[:] = routing.pairs[::-1].copy()


def shift_offsets(routing: Any) -> None:
    routing.offsets[1:-1] += 1


def change_id(routing: Any) -> None:
    routing.ids[3, 0] = (routing.ids[3, 0] + 1) % 6


def change_weight(routing: Any) -> None:
    routing.weights[4, 1] += 1e-3


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (None, ""),
        (change_id, "experts are not those of its greatest logits"),
        (change_weight, "max|weight - float64|"),
        (swap_pairs, "the pairs are not in the order"),
        (swap_slots, "the slots are not the inverse"),
        (shift_offsets, "the offsets are not"),
    ],
)
def test_a_wrong_routing_is_seen(damage: Any, reason: str) -> None:
    arrays, shape = Arrays(), SHAPES[0]
    logits = make_moe_inputs(arrays, shape).logits[0]
    routing = route(shape, logits)
    if damage is not None:
        damage(routing)
    found = routing_fault(arrays, shape, logits, routing)
    assert reason in found
    assert bool(found) == bool(reason)


# ---- rows ------------------------------------------------------------------------------------


def test_a_row_is_checked_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run(capsys, "--skew", "1")
    assert code == 0
    assert document["operation"] == "moe_forward"
    [cell] = document["cells"]
    assert cell["status"] == "ok"
    assert cell["shape"] == {"tokens": 9, "hidden": 32, "inner": 24, "experts": 6, "top_k": 2,
                             "dtype": "fp32", "skew": 1.0, "model": ""}  # fmt: skip
    assert cell["accuracy"]["checked"] == "9 of 9 tokens"
    assert cell["plan"]["launches"] == cell["launches"]
    assert len(cell["launches"]) == 3
    assert cell["plan"]["flops"] == cell["flops"]
    ours = cell["contenders"]["flashmoe"]
    assert len(ours["samples_s"]) >= 7
    assert ours["tokens_per_s"] == pytest.approx(9 / ours["median_s"])
    shape = shape_of(cell["shape"])
    assert isinstance(shape, MoeShape)
    inputs = make_moe_inputs(choose_arrays("cpu"), shape)
    spread = [loads(choose_arrays("cpu"), shape, x) for x in inputs.logits]
    assert cell["routing"] == spread[0]
    active = sum(s["active_experts"] for s in spread) / len(spread)
    weights = active * shape.expert_bytes
    assert ours["weight_bytes_per_s"] == pytest.approx(weights / ours["median_s"])
    assert cell["bytes"] == shape.traffic(round(active))
    assert "bound" not in cell


def test_the_record_keeps_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jsonschema")
    _, document = run(capsys)
    assert records.schema_violations(document) == []
    assert records.schema_violations(bench_records.moe_grid()) == []
    document["cells"][0]["shape"]["heads"] = 1
    assert records.schema_violations(document) != []


def test_many_tokens_have_a_dense_bound(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    _, document = run(capsys, "--tokens", "512", "--peer", "none")
    [cell] = document["cells"]
    assert list(cell["contenders"]) == ["flashmoe"]
    ours, bound = cell["contenders"]["flashmoe"], cell["bound"]
    assert ours["bound_fraction"] == pytest.approx(bound["median_s"] / ours["median_s"])
    assert bound["tflops"] == pytest.approx(cell["flops"] / bound["median_s"] * 1e-12)
    assert main(["bench", *SMALL, *ON_CPU, "--tokens", "512", "--peer", "none"]) == 0
    assert "of dense" in capsys.readouterr().out


def test_a_loop_of_torch_is_timed_beside_us(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    _, document = run(capsys)
    summary = document["summary"]["torch-loop"]
    assert summary["rows"] + summary["withheld"] == 1
    peer = document["cells"][0]["contenders"]["torch-loop"]
    assert peer["accuracy"]["passed"] is True
    assert peer["against"]["low"] <= peer["against"]["ratio"] <= peer["against"]["high"]


def void_reason(capsys: pytest.CaptureFixture[str]) -> str:
    code, document = run(capsys, "--peer", "none")
    [cell] = document["cells"]
    assert code == 1
    assert cell["status"] == "void"
    assert "contenders" not in cell
    return str(cell["reason"])


def break_layer(monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    real = flashmoe_science.moe_forward

    def broken(*arguments: Any, **options: Any) -> Any:
        out = real(*arguments, **options)
        damage(out, options)
        return out

    monkeypatch.setattr(flashmoe_science, "moe_forward", broken)


def test_a_wrong_result_is_void(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(out: Any, options: dict[str, Any]) -> None:
        out[3, 5] *= 1.5

    break_layer(monkeypatch, damage)
    assert "max|out - float64|" in void_reason(capsys)


def test_an_output_that_is_not_written_is_void(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = flashmoe_science.moe_forward

    def lazy(*arguments: Any, out: Any = None, **options: Any) -> Any:
        made = real(*arguments, **options)
        if out is None:
            return made
        out[:-1] = made[:-1]
        return out

    monkeypatch.setattr(flashmoe_science, "moe_forward", lazy)
    assert "some of it was never written" in void_reason(capsys)


def test_a_call_that_is_right_only_when_it_is_checked_is_void(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(out: Any, options: dict[str, Any]) -> None:
        if "out" not in options:
            out[0, 0] += 1e-6

    break_layer(monkeypatch, damage)
    assert "other values than the one that was checked" in void_reason(capsys)


def test_a_wrong_routing_is_void(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = flashmoe_science.moe_route

    def broken(logits: Any, *arguments: Any, **options: Any) -> Any:
        return real(-logits, *arguments, **options)

    monkeypatch.setattr(flashmoe_science, "moe_route", broken)
    assert "greatest logits" in void_reason(capsys)


@pytest.mark.parametrize("nth", [1, 2])
def test_another_kernel_is_void(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """In the checked call, and in the timed one."""
    real = flashmoe_science.last_launches
    calls: list[int] = []

    def another() -> Any:
        calls.append(1)
        first, *others = real()
        changed = {"kernel": "another"} if len(calls) == nth else {}
        return (dataclasses.replace(first, **changed), *others)

    monkeypatch.setattr(flashmoe_science, "last_launches", another)
    words = {1: "the launched kernel is not", 2: "the kernel launched by the timed call is not"}
    assert void_reason(capsys).startswith(f"{words[nth]} the planned one: kernel")


# ---- peers -----------------------------------------------------------------------------------


def test_peers_are_of_one_operation() -> None:
    pytest.importorskip("torch")
    names = peer_names(MOE)
    assert names[:4] == ["torch-grouped", "torch-loop", "sonicmoe", "vllm-triton"]
    assert "fa3" not in names
    assert not {"torch-grouped", "torch-loop"} & set(peer_names())
    chosen = choose_peers(choose_arrays("cpu"), None, MOE)
    assert [p.name for p in chosen] == ["torch-loop"]


def prepared(peer: Peer, shape: MoeShape) -> str:
    """Prepares the peer on the CPU and holds its first outputs, of one logits after the other, to
    the accuracy rule."""
    arrays = choose_arrays("cpu")
    inputs = make_moe_inputs(arrays, shape)
    contender, output = peer.contender(arrays, shape, inputs)
    reasons = []
    for logits in inputs.logits[:3]:
        here = dataclasses.replace(inputs, logits=(logits,))
        reasons.append(judge_moe(arrays, shape, here, {"peer": output})["peer"].reason)
        output = contender.call()
    return "; ".join(filter(None, reasons))


PEER_SHAPES = [
    MoeShape(33, 32, 24, 6, 2, "bf16"),
    MoeShape(7, 32, 24, 16, 3, "bf16", 2.0),
    MoeShape(5, 32, 24, 2, 2, "bf16"),
]


@pytest.mark.parametrize("shape", PEER_SHAPES, ids=str)
@pytest.mark.parametrize("peer", torch_moe.PEERS, ids=lambda p: p.name)
def test_torchs_layers_hold_the_rule(peer: Peer, shape: MoeShape) -> None:
    torch = pytest.importorskip("torch")
    if peer.name == "torch-grouped" and not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm on the CPU")
    assert prepared(peer, shape) == ""


LAYER = """
import torch

def experts(x, w_gate_up, w_down, weights, ids):
    out = torch.zeros_like(x, dtype=torch.float32)
    for t, k in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])):
        e = ids[t, k]
        gate, up = (x[t].float() @ w_gate_up[e].float().T).chunk(2)
        out[t] += weights[t, k] * ((torch.nn.functional.silu(gate) * up) @ w_down[e].float().T)
    return out.to(x.dtype)
"""

VLLM = """
from plain_layer import experts

def fused_topk(hidden_states, gating_output, topk, renormalize):
    weights, ids = gating_output.float().softmax(-1).topk(topk)
    assert renormalize
    return weights / weights.sum(-1, keepdim=True), ids, ids

def fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, inplace):
    assert not inplace
    return experts(hidden_states, w1, w2, topk_weights, topk_ids)
"""

SONIC = """
import torch
from plain_layer import experts
from sonicmoe.enums import ActivationType

state = {}

class TC_Softmax_Topk_Router_Function:
    @staticmethod
    def apply(logits, E, K, is_softmax_over_topk, norm_topk_probs):
        assert is_softmax_over_topk and not norm_topk_probs
        values, ids = logits.float().topk(K)
        return values.softmax(-1), ids.int()

def TC_topk_router_metadata_triton(ids, E, counts, offsets, gather, scatter, reverse):
    assert (len(counts), len(offsets)) == (E, E + 1)
    assert {len(t) for t in (gather, scatter, reverse)} == {ids.numel()}
    state["ids"] = ids.long()

class _UpProjection:
    @staticmethod
    def apply(x, w1, b1, offsets, total, K, gather, scatter, reverse, counts, variable,
              activation, inference, concat_layout=False):
        assert not torch.is_grad_enabled()
        assert (b1, counts, variable, activation) == (None, None, False, ActivationType.SWIGLU)
        assert inference and concat_layout and w1.stride(1) == 1
        state.update(x=x, w1=w1.permute(2, 0, 1))
        return x, None

class _DownProjection:
    @staticmethod
    def apply(a, h, w2, b2, scores, offsets, T, K, gather, scatter, reverse, counts, variable,
              activation):
        assert scores.shape == (T, K) and w2.stride(1) == 1
        return experts(state["x"], state["w1"], w2.permute(2, 0, 1), scores, state["ids"])
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes packages that promise what the real ones do, as plain mathematics."""
    import sys

    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def write(path: str, text: str = "") -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("plain_layer.py", LAYER)
    yield write
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("shape", PEER_SHAPES, ids=str)
def test_vllm_is_called_as_it_wants(packages: Any, shape: MoeShape) -> None:
    pytest.importorskip("torch")
    assert vllm_moe.PEERS[0].missing() is not None
    for folder in ("", "/model_executor", "/model_executor/layers"):
        packages(f"vllm{folder}/__init__.py")
    packages("vllm/model_executor/layers/fused_moe/__init__.py", VLLM)
    assert vllm_moe.PEERS[0].missing() is None
    assert prepared(vllm_moe.PEERS[0], shape) == ""


@pytest.mark.parametrize("shape", PEER_SHAPES, ids=str)
def test_sonicmoe_is_called_as_it_wants(packages: Any, shape: MoeShape) -> None:
    pytest.importorskip("torch")
    packages("sonicmoe/__init__.py")
    packages("sonicmoe/enums.py", "import enum\nActivationType = enum.Enum('A', ['SWIGLU'])\n")
    packages("sonicmoe/functional/__init__.py", SONIC)
    assert prepared(sonicmoe.PEERS[0], shape) == ""


# ---- what becomes of records -----------------------------------------------------------------


def test_what_counts_is_the_time_in_a_graph() -> None:
    document = bench_records.moe_grid()
    short, long = document["cells"][:2]
    peer = short["contenders"]["torch-grouped"]
    assert records.ratio_of(short, peer) == peer["graph_against"]
    assert summarise([short])["torch-grouped"]["geometric_mean"] == pytest.approx(1.25)
    assert summarise([long])["torch-grouped"]["geometric_mean"] == pytest.approx(1.5)
    ours = short["contenders"]["flashmoe"]
    assert record.times(short, ours)["tflops"] == pytest.approx(2 * ours["tflops"])
    assert record.times(long, long["contenders"]["flashmoe"])["tflops"] == 560.0
    attention = bench_records.a_list()["cells"][0]
    entry = attention["contenders"]["torch-flash"]
    assert records.ratio_of(attention, entry) == entry["against"]


def test_records_are_compared_by_that_time() -> None:
    before, after = bench_records.moe_grid(), bench_records.moe_grid()
    for cell in after["cells"]:
        ours = cell["contenders"]["flashmoe"]
        if "graph_samples_s" in ours:
            ours["graph_samples_s"] = [s / 2 for s in ours["graph_samples_s"]]
    found = compare_records(before, after)
    ratios = [cell["ratio"]["ratio"] for cell in found["cells"]]
    assert ratios == pytest.approx([2.0, 1.0, 2.0, 1.0])
    assert {cell["peer"] for cell in found["cells"]} == {"torch-grouped"}


def test_a_grid_over_tokens() -> None:
    cells = bench_records.moe_grid()["cells"]
    assert record.is_grid(cells)
    assert not record.is_grid(cells[:3])  # a line without one of the places
    assert record.place_name(cells) == ("T", "tokens")
    keys = [record.panel_key(c["shape"]) for c in cells]
    assert keys[0] == ("bf16", "uniform", "tiny")
    assert record.panel_name(keys[-1], {"bf16"}) == "tiny zipf 1"
    nobodys = bench_records.moe_shape(8, model="")
    assert record.panel_key(nobodys)[2] == "H256 I128 E16 K2"
    assert record.extents_text(record.extents(nobodys)) == "bf16 T8 H256 I128 E16 K2 uniform"


@pytest.mark.parametrize("chart", charts.CHARTS)
def test_pictures(tmp_path: Path, chart: str) -> None:
    pytest.importorskip("matplotlib")
    file = bench_records.write(tmp_path / "moe.json", bench_records.moe_grid())
    kept = record.read_record(file)
    assert charts.why_not(kept, chart) == ""
    picture = charts.draw(kept, chart, theme.LIGHT, "svg").decode()
    words = {"speed": "against tokens", "ratio": "over torch-grouped", "roofline": "experts"}
    assert words[chart] in picture
    assert main(["plot", str(file), "--html", str(tmp_path / "x.html")]) == 0
    assert "bf16 tiny T8 H256" in (tmp_path / "x.html").read_text()


def test_many_places_leave_room_for_their_labels() -> None:
    from flashmoe_science.cli.plotting.speed import _labels

    assert _labels([1, 2, 4]) == ["1", "2", "4"]
    labels = _labels([2**i for i in range(14)])
    assert labels[-1] == "8k"
    assert labels[-2] == ""
    assert labels.count("") == 7


@pytest.mark.gpu
@pytest.mark.alone  # only short calls are captured
@pytest.mark.parametrize(("tokens", "skew"), [("2", "0"), ("700", "1.5")])
def test_a_row_on_the_gpu(capsys: pytest.CaptureFixture[str], tokens: str, skew: str) -> None:
    pytest.importorskip("torch")
    layer = ["--hidden", "256", "--inner", "128", "--experts", "16", "--top-k", "2"]
    command = ["bench", "--tokens", tokens, *layer, "--skew", skew, "--device", "cuda"]
    assert main([*command, "--seconds", "0.05", "--peer", "torch-grouped", "--json"]) == 0
    [cell] = json.loads(capsys.readouterr().out)["cells"]
    ours, peer = (cell["contenders"][name] for name in ("flashmoe", "torch-grouped"))
    assert ours["graph_s"] > 0  # captured, so without a word to the host
    assert peer["graph_against"]["ratio"] > 0
    assert ours["peak_bytes"] > 0
    assert ("bound_fraction" in ours) == (int(tokens) >= 512)
