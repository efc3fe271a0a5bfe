"""Plans, device and build information, threads, log, last launch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import flashmoe_science as fm
import numpy as np
import producers
import pytest
from flashmoe_science import _core

Q = np.zeros((2, 16, 4, 32), np.float32)
K = np.zeros((2, 24, 2, 32), np.float32)
V = np.zeros((2, 24, 2, 64), np.float32)


def test_version_is_the_librarys() -> None:
    assert fm.__version__ == fm.build_info().version
    number = _core.version()
    assert fm.__version__ == f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def test_build_info() -> None:
    info = fm.build_info()
    assert "cpu" in info.kernel_families.split()
    assert bool(info.cuda_architectures) == bool(info.cuda_runtime_version)


def test_device_info_of_the_cpu() -> None:
    info = fm.device_info()
    assert info == fm.device_info("cpu")
    assert info.kernel_family == "cpu"
    assert info.compute_capability == 0
    assert info.multiprocessors == fm.get_num_threads()
    assert info.memory_bytes > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.name = "another"  # type: ignore[misc]


def test_devices_that_are_not_there() -> None:
    count = fm.cuda_device_count()
    with pytest.raises(RuntimeError, match=f"^device: .*cuda:{count}"):
        fm.device_info(f"cuda:{count}")
    for wrong in ("tpu", "cuda:-1", "cuda:x", 0, None):
        with pytest.raises(ValueError, match=r"^device: got .*, accepted are 'cpu', 'cuda', "):
            fm.device_info(wrong)


def test_threads() -> None:
    before = fm.get_num_threads()
    try:
        fm.set_num_threads(3)
        assert fm.get_num_threads() == 3
    finally:
        fm.set_num_threads(0)
    assert fm.get_num_threads() == before
    for wrong in (-1, 4097):
        with pytest.raises(ValueError, match=f"^n: got {wrong} threads, accepted are 0 to 4096$"):
            fm.set_num_threads(wrong)


@pytest.mark.parametrize("producer", producers.ON_CPU, ids=str)
def test_the_plan_is_the_launch(producer: producers.Producer) -> None:
    q, k, v = (producer.make(x, "fp32") for x in (Q, K, V))
    plan = fm.attention_plan(q, k, v, causal=True, return_lse=True)
    out = fm.flash_attention(q, k, v, causal=True)
    np.asarray(out)  # JAX computes on a thread of its own: last_launches() is that thread's
    assert plan.family == "cpu"
    assert "fp32_d32_dv64" in plan.kernel
    if producer.name != "jax":
        assert fm.last_launches() == plan.launches
        assert fm.last_launch() == plan.launches[-1]
        assert fm.last_launch().device == "cpu"


def test_attention_plans_have_the_attributes_of_their_first_launch() -> None:
    little = fm.attention_plan_for(batch=1, seq_q=16, heads_q=2, dim=8)
    assert little.block == (1, 1, 1)  # one thread's work
    assert little.grid[0] > 1
    plan = fm.attention_plan_for(batch=1, seq_q=64, heads_q=2, dim=32, dim_v=64)
    assert isinstance(plan, fm.AttentionPlan)
    assert isinstance(plan, fm.Plan)
    [first] = plan.launches
    for name in ("kernel", "grid", "block", "shared_bytes", "cluster", "stages", "dim", "dim_v"):
        assert getattr(plan, name) == getattr(first, name)
    assert (plan.tile_q, plan.tile_k) == (first.tile_m, first.tile_n)
    assert (plan.tile_q > 0, plan.dim, plan.dim_v) == (True, 32, 64)
    assert plan.operation == "attention_forward"
    assert plan.bytes == 2 * (64 * 2 * (2 * 32 + 2 * 64))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.family = "another"  # type: ignore[misc]


def test_launches_are_equal_but_for_what_the_loaded_code_says() -> None:
    [planned] = fm.attention_plan_for(batch=1, seq_q=64, heads_q=2, dim=32).launches
    read = dataclasses.replace(planned, registers=168, local_bytes=16, binary_arch=90)
    assert read == planned
    for name in ("cluster", "stages", "shared_bytes", "tile_m", "tile_n", "dim", "dim_v"):
        assert dataclasses.replace(planned, **{name: 7}) != planned
    for other in ({"kernel": "a"}, {"device": "h200"}, {"grid": (1, 2, 3)}, {"block": (1, 2, 3)}):
        assert dataclasses.replace(planned, **other) != planned  # type: ignore[arg-type]


def test_plans_of_shapes_equal_plans_of_tensors() -> None:
    for layout in ("bshd", "bhsd"):
        q, k, v = (x if layout == "bshd" else x.swapaxes(1, 2) for x in (Q, K, V))
        mask = {"causal": "top_left", "window": (5, None), "softcap": 30.0}
        of_tensors = fm.attention_plan(q, k, v, **mask, layout=layout)
        assert of_tensors.flops < fm.attention_plan(q, k, v, causal="top_left", layout=layout).flops
        of_shapes = fm.attention_plan_for(
            batch=2,
            seq_q=16,
            seq_k=24,
            heads_q=4,
            heads_kv=2,
            dim=32,
            dim_v=64,
            dtype="fp32",
            device="cpu",
            **mask,
            layout=layout,
        )
        assert of_shapes == of_tensors
    assert fm.attention_plan_for(batch=1, seq_q=8, heads_q=2, dim=16).dim_v == 16


def test_plans_read_and_allocate_nothing() -> None:
    plan = fm.attention_plan_for(batch=1, seq_q=1 << 17, heads_q=64, dim=128, causal=True)
    half = 64 * (1 << 17) * ((1 << 17) + 1) / 2
    assert plan.flops == pytest.approx(2 * half * 256)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("bf16", "bf16"),
        ("bfloat16", "bf16"),
        ("half", "fp16"),
        (np.dtype("float16"), "fp16"),
        ("fp32", "fp32"),
    ],
)
def test_dtype_names(dtype: Any, name: str) -> None:
    plan = fm.attention_plan_for(batch=1, seq_q=8, heads_q=1, dim=16, dtype=dtype)
    assert f"_{name}_" in plan.kernel


def test_torch_dtypes_and_devices_print_as_names() -> None:
    torch = pytest.importorskip("torch")
    plan = fm.attention_plan_for(
        batch=1, seq_q=8, heads_q=1, dim=16, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    assert "_bf16_" in plan.kernel


def test_bad_plans() -> None:
    good = {"batch": 1, "seq_q": 8, "heads_q": 4, "dim": 16}
    for change, kind, match in (
        (
            {"dtype": "int8"},
            TypeError,
            "^dtype: got dtype int8, accepted are fp16, bf16, fp32 and fp64$",
        ),
        ({"device": "tpu"}, ValueError, "^device: got 'tpu'"),
        ({"heads_kv": 3}, ValueError, "^k: got 3 heads, accepted are divisors of q's 4$"),
        (
            {"dim": 584},
            ValueError,
            "^q: its head dimension is 584, accepted are multiples of 8 from",
        ),
        ({"seq_q": -5}, ValueError, r"^seq_q: got -5, accepted are 0 to 2\^63 - 1$"),
        ({"seq_k": 1 << 80}, ValueError, "^seq_k: got 1208925819614629174706176, accepted are 0"),
        ({"dtype": "\ud800"}, TypeError, r"^dtype: got dtype \\ud800, accepted"),
        ({"device": "cuda:\u0663"}, ValueError, "^device: got 'cuda:\u0663'"),
        ({"return_lse": 1}, TypeError, "^return_lse: got 1 of type int, accepted are False and"),
        ({"layout": "x"}, ValueError, "^layout: got 'x'"),
        ({"kernel": "sm12"}, ValueError, '^kernel: got "sm12"'),
    ):
        with pytest.raises(kind, match=match):
            fm.attention_plan_for(**{**good, **change})


_PLANS: dict[Callable[..., Any], dict[str, int]] = {
    fm.attention_plan_for: {
        "batch": 1, "seq_q": 8, "heads_q": 4, "dim": 16, "seq_k": 8, "heads_kv": 4, "dim_v": 16,
    },
    fm.moe_plan_for: {"tokens": 4, "hidden": 16, "inner": 16, "experts": 8, "top_k": 2},
    fm.moe_route_plan_for: {"tokens": 4, "experts": 8, "top_k": 2},
    fm.moe_backward_plan_for: {"tokens": 4, "hidden": 16, "inner": 16, "experts": 8, "top_k": 2},
    fm.moe_route_backward_plan_for: {"tokens": 4, "experts": 8, "top_k": 2},
}  # fmt: skip


@pytest.mark.parametrize("plan", _PLANS)
def test_extents_are_integers(plan: Callable[..., Any]) -> None:
    good = _PLANS[plan]
    assert plan(**{name: np.int64(extent) for name, extent in good.items()}) == plan(**good)
    for name in good:
        for wrong in (1.5, 8.0, np.float32(8), float("nan"), "8", True, [8]):
            kind = type(wrong).__name__
            with pytest.raises(TypeError, match=rf"^{name}: got .* of type (numpy\.)?{kind}, "):
                plan(**good | {name: wrong})
        for wrong in (-1, 1 << 70):
            with pytest.raises(ValueError, match=rf"^{name}: got {wrong}, accepted are "):
                plan(**good | {name: wrong})


@pytest.mark.parametrize(
    ("plan", "name"),
    [(fm.moe_plan_for, name) for name in ("transposed", "bias", "return_pre_activation")]
    + [(fm.moe_backward_plan_for, name) for name in ("transposed", "bias", "pre_activation")],
)
def test_flags_of_plans_are_bools(plan: Callable[..., Any], name: str) -> None:
    for wrong in (1, "no", None):
        with pytest.raises(TypeError, match=rf"^{name}: got .*, accepted are False and True$"):
            plan(**_PLANS[plan], **{name: wrong})


@pytest.mark.parametrize(
    ("function", "name"), [(fm.set_num_threads, "n"), (fm.set_log, "level")], ids=["threads", "log"]
)
def test_settings_are_integers(function: Callable[[Any], None], name: str) -> None:
    for wrong in (1.5, None, True, [1]):
        with pytest.raises(
            fm.ArgumentTypeError, match=rf"^{name}: got .* of type .*, accepted are"
        ):
            function(wrong)
    for wrong in (-1, 1 << 20, 1 << 70):
        with pytest.raises(fm.InvalidArgumentError, match=rf"^{name}: got {wrong}.*, accepted are"):
            function(wrong)


def test_a_log_callback_is_a_function() -> None:
    with pytest.raises(
        fm.ArgumentTypeError, match=r"^callback: got int, accepted is a function of"
    ):
        fm.set_log("off", 1)  # type: ignore[arg-type]


_LOG = """
import numpy as np
import flashmoe_science as fm
lines = []
fm.set_log("info", lambda level, line: lines.append((level, line)))
q = np.zeros((1, 8, 2, 16), np.float32)
fm.flash_attention(q, q, q, causal=True)
assert lines[-1][0] == 2, lines
assert "seq_q=8" in lines[-1][1] and "attention_forward_cpu" in lines[-1][1], lines
try:
    fm.flash_attention(q[0], q, q)
except ValueError:
    pass
assert lines[-1] == (1, "FLASHMOE_ERROR_INVALID_ARGUMENT: q: got 3 dimensions, accepted are 4")
count = len(lines)
fm.set_log("off")
fm.flash_attention(q, q, q)
assert len(lines) == count
fm.set_log(2, lambda level, line: 1 / 0)  # reported, and the call goes on
fm.flash_attention(q, q, q)
for wrong in (7, -1, "loud"):
    try:
        fm.set_log(wrong)
    except ValueError as error:
        print(error)
"""


def test_log() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOG], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert done.stdout.splitlines() == [
        "level: got 7, accepted are 0 (off) to 3 (debug)",
        "level: got -1, accepted are 0 (off) to 3 (debug)",
        "level: got 'loud', accepted are 'off', 'error', 'info', 'debug' and 0 to 3",
    ]


_LOG_OF_EXPERTS = """
import numpy as np
import flashmoe_science as fm
fm.set_log("info", lambda level, line: print(line.partition(" device=")[0]))
logits = np.zeros((3, 8), np.float32)
routing = fm.moe_route(
    logits, 2, scoring="sigmoid", renormalize=True, selection_bias=logits[0], num_groups=4,
    top_groups=2, scale=2.5,
)
fm.moe_route(logits, 4, scoring="topk_softmax", return_lse=True)
ids = np.zeros((3, 2), np.int64)
fm.moe_route_given(ids, num_experts=8, expert_map=np.zeros(5, np.int32))
x, w = np.zeros((3, 16), np.float32), np.zeros((8, 24, 16), np.float32)
fm.moe_forward(x, w, w.transpose(0, 2, 1), routing, gate="none", activation="relu2")
fm.grouped_product(x, w, offsets=routing.offsets)
"""


def test_log_of_experts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOG_OF_EXPERTS], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "moe_route tokens=3 experts=8 top_k=2 logits=fp32 scoring=sigmoid renormalize=1 scale=2.5 "
        "groups=2/4 bias=yes map=no lse=no",
        "moe_route tokens=3 experts=8 top_k=4 logits=fp32 scoring=topk_softmax renormalize=0 "
        "scale=0 groups=1/1 bias=no map=no lse=yes",
        "moe_route tokens=3 experts=8 top_k=2 ids=int64 scoring=softmax renormalize=0 scale=0 "
        "groups=1/1 bias=no map=yes lse=no",
        "moe_forward tokens=3 hidden=16 inner=24 experts=8 top_k=2 fp32 gate=none activation=relu2 "
        "alpha=0 limit=0 up_offset=0 weight_on_input=0 bias=no pre_activation=no",
        "grouped_product rows=3 columns=16/24 experts=8 fp32 bias=no",
    ]


_NOTHING_YET = """
import flashmoe_science as fm
try:
    fm.last_launches()
except ValueError as error:
    print(error)
"""


def test_last_launches_before_any() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NOTHING_YET], capture_output=True, text=True, check=True
    )
    assert done.stdout == "launches: nothing was launched on this thread yet\n"
