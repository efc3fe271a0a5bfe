"""Plans for GPUs that are not here: those that such devices were given, from a table of facts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import flashmoe_science
import gpu_plans
import pytest
from flashmoe_science._dtypes import GPU_MODELS, parse_device, parse_dtype
from flashmoe_science.cli import main
from flashmoe_science.cli.environment import as_dict
from flashmoe_science.cli.suites import shape_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ARCHITECTURES = flashmoe_science.build_info().cuda_architectures
SHAPE = ["--seq", "4096", "--heads", "32", "--kv-heads", "8", "--dim", "128", "--causal"]
LAYER = ["--tokens", "64", "--hidden", "2048", "--inner", "768", "--experts", "128", "--top-k", "8"]

_CUT_TILE_BYTES = 13 * 4  # cuda/attention/decode/params.h

with_cuda = pytest.mark.skipif(not ARCHITECTURES, reason="built without CUDA")
without_cuda = pytest.mark.skipif(bool(ARCHITECTURES), reason="built with CUDA")


def recorded() -> list[Any]:
    """The suites that an H200 planned, by their names."""
    record = json.loads((RESULTS / "plans_h200.json").read_text())
    return [
        pytest.param(suite, id="@".join(filter(None, (suite["suite"], suite["kernel"]))))
        for suite in record["suites"]
    ]


@with_cuda
@pytest.mark.parametrize("suite", recorded())
def test_plans_are_those_that_an_h200_was_given(suite: dict[str, Any]) -> None:
    library = json.loads((RESULTS / "plans_h200.json").read_text())["library"]
    built = library["cuda_architectures"]
    if built.split() != ARCHITECTURES.replace(";", " ").split():
        pytest.skip(f"the record is of a build for {built}, this one is for {ARCHITECTURES}")
    for cell in suite["cells"]:
        shape = shape_of(cell["shape"], suite["operation"])
        found = json.loads(json.dumps(gpu_plans.plan_of(shape, "h200", suite["kernel"])))
        assert found["microseconds"] == pytest.approx(cell["plan"]["microseconds"], rel=0.03)
        found["rejected"] = of_families(found["rejected"], library["kernel_families"].split())
        assert anywhere(found) == anywhere(cell["plan"]), cell["shape"]


def of_families(rejected: str, families: list[str]) -> str:
    """What these families said: one that is newer than the record has no line in it."""
    lines = rejected.splitlines(keepends=True)
    return "".join(line for line in lines if line.partition(":")[0] in families)


def anywhere(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan less its device's name and estimated times: memory clocks differ a little."""
    text = json.dumps({name: value for name, value in plan.items() if name != "microseconds"})
    text = re.sub(r"\b(cuda:0|h200)\b", "there", text)
    same: dict[str, Any] = json.loads(re.sub(r"[\d.]+ us", "some us", text))
    return same


@with_cuda
@pytest.mark.parametrize("copies", [1, 2])  # how many times as many pages there are as are used
@pytest.mark.parametrize(
    ("queries", "keys", "family"),
    [([2048] + [1] * 64, [10240] + [4096] * 64, "mixed"),
     ([512] * 4 + [1] * 128, [8192] * 4 + [2048] * 128, "mixed"),
     ([4] * 64, [4096] * 64, "sm90"), ([16] * 32, [4096] * 32, "sm90"),
     ([2] * 64, [4096] * 64, "sm89_decode"), ([1] * 64, [4096] * 64, "sm89_decode"),
     ([2048] * 16, [2048] * 16, "sm90")],
    ids=["chunk2048+64", "4xchunk512+128", "speculation", "16", "2", "decode", "prefill"],
)  # fmt: skip
def test_families_of_batches_over_pages(
    queries: list[int], keys: list[int], family: str, copies: int
) -> None:
    """What is chosen took an H200 least: serving_h200.json, serving_several_h200.json."""
    batch, page = len(queries), 64
    where, bf16, int32 = parse_device("h200"), parse_dtype("bf16"), (0, 32)

    def tensor(*shape: int, dtype: Any = bf16) -> Any:
        return shape, dtype, where, None

    pages = tensor(copies * sum(-(-n // page) for n in keys), page, 8, 128)
    plan = flashmoe_science.attention_plan(
        tensor(1, sum(queries), 32, 128), pages, pages, causal=True,
        cu_seqlens_q=tensor(batch + 1, dtype=int32), seqused_k=tensor(batch, dtype=int32),
        page_table=tensor(batch, -(-max(keys) // page), dtype=int32),
        max_seqlen_q=max(queries), max_seqlen_k=max(keys),
    )  # fmt: skip
    assert plan.family == family


@with_cuda
@pytest.mark.parametrize(
    ("heads_q", "dim", "dim_v", "most"),
    [(16, 64, 64, 4), (128, 64, 64, 4), (32, 128, 128, 4),
     (128, 128, 128, 1), (128, 192, 128, 1), (16, 256, 256, 1)],
)  # fmt: skip
def test_tiles_of_decoding_have_as_many_heads_as_their_queries_have_room(
    heads_q: int, dim: int, dim_v: int, most: int
) -> None:
    """The workspace tells: a place has a part of each KV head of a tile."""
    where, bf16, int32 = parse_device("h200"), parse_dtype("bf16"), (0, 32)

    def tensor(*shape: int, dtype: Any = bf16) -> Any:
        return shape, dtype, where, None

    def bytes_of_parts(batch: int) -> int:
        k, v = (tensor(4 * batch, 64, 8, columns) for columns in (dim, dim_v))
        plan = flashmoe_science.attention_plan(
            tensor(batch, 1, heads_q, dim), k, v, seqused_k=tensor(batch, dtype=int32),
            page_table=tensor(batch, 4, dtype=int32), kernel="sm89_decode",
        )  # fmt: skip
        assert plan.launches[0].grid[0] == 132
        assert plan.launches[0].shared_bytes <= 99 << 10  # of a block of sm_89
        return int(plan.workspace_bytes) - 132 * _CUT_TILE_BYTES

    one = bytes_of_parts(28)
    assert bytes_of_parts(29) == min(most, 2) * one
    assert bytes_of_parts(58) == bytes_of_parts(1000) == most * one


@with_cuda
def test_an_h200_is_what_was_recorded() -> None:
    document = json.loads((RESULTS / "gqa_h200.json").read_text())
    info = as_dict(flashmoe_science.device_info("h200"))
    own = ("device", "driver_version")  # of the machine
    assert info | {"driver_version": 0} == {
        name: value for name, value in document["device"].items() if name not in own
    } | {"driver_version": 0}
    assert info["driver_version"] == 0


@with_cuda
@pytest.mark.parametrize(
    ("model", "capability", "multiprocessors", "block_kib", "l2_mib"),
    [("h100", 90, 132, 227, 50), ("h200", 90, 132, 227, 60),
     ("l4", 89, 58, 99, 48), ("rtx4090", 89, 128, 99, 72)],
)  # fmt: skip
def test_facts(
    model: str, capability: int, multiprocessors: int, block_kib: int, l2_mib: int
) -> None:
    info = flashmoe_science.device_info(model)
    assert (info.compute_capability, info.multiprocessors) == (capability, multiprocessors)
    assert (info.shared_bytes_per_block, info.l2_bytes) == (block_kib << 10, l2_mib << 20)


@with_cuda
@pytest.mark.parametrize("model", GPU_MODELS)
def test_the_command_plans_for_a_model(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    hopper = model.startswith("h")
    assert main(["plan", *SHAPE, "--gpu", model, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    plan = document["plan"]
    assert document["device"]["device"] == model
    assert plan["family"] == ("sm90" if hopper else "sm89")
    assert plan["isa"] == ("sm_90a" if hopper else "sm_89")
    assert plan["shared_bytes"] <= document["device"]["shared_bytes_per_block"]
    assert [launch["device"] for launch in plan["launches"]] == [model] * len(plan["launches"])
    assert "cpu: the tensors are on " + model in plan["rejected"]
    assert plan["microseconds"] > 0
    if not hopper:
        assert f"sm90: {model} has compute capability 8.9, accepted is 9.0" in plan["rejected"]
    assert main(["plan", *SHAPE, "--gpu", model]) == 0
    assert f"on {model} (NVIDIA " in capsys.readouterr().out


@with_cuda
@pytest.mark.parametrize("model", GPU_MODELS)
def test_the_command_plans_layers_for_a_model(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan-moe", *LAYER, "--gpu", model, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for part in ("routing", "layer"):
        for launch in document[part]["launches"]:
            assert launch["shared_bytes"] <= document["device"]["shared_bytes_per_block"]
            assert model.startswith("h") or launch["cluster"] <= 1
    kernels = [launch["kernel"] for launch in document["layer"]["launches"]]
    assert any("sm90" in name or "bulk" in name for name in kernels) == model.startswith("h")


@with_cuda
def test_few_tokens_are_routed_by_one_cluster_on_hopper() -> None:
    """What a device can run of the largest blocks is asked of the driver, where there is one."""
    for model, launches, cluster in (("h100", 1, 16), ("h200", 1, 16), ("l4", 2, 0)):
        plan = flashmoe_science.moe_route_plan_for(tokens=256, experts=128, top_k=8, device=model)
        assert len(plan.launches) == launches
        assert plan.launches[0].cluster == cluster


@with_cuda
def test_a_device_that_is_not_here_names_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["plan", *SHAPE], ["plan-moe", *LAYER]):
        assert main([*command, "--device", "cuda:59"]) == 1
        said = capsys.readouterr().err
        assert "device cuda:59 does not exist" in said
        assert "--gpu plans for one that is not here: h100, h200, l4, rtx4090" in said


def test_no_device_has_the_id_of_a_model() -> None:
    with pytest.raises(flashmoe_science.DeviceError, match="cuda:60"):
        flashmoe_science.device_info("cuda:60")


@without_cuda
def test_a_build_without_cuda_says_that_it_has_no_plans_of_gpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in (["plan", *SHAPE], ["plan-moe", *LAYER]):
        assert main([*command, "--gpu", "h200"]) == 1
        said = capsys.readouterr().err
        assert "got the GPU model h200, but this library was built without CUDA" in said
        assert main([*command, "--device", "cuda"]) == 1
        assert "cuda:0, but this library was built without CUDA" in capsys.readouterr().err
    with pytest.raises(flashmoe_science.UnsupportedError, match="was built without CUDA"):
        flashmoe_science.attention_plan_for(
            batch=1, seq_q=8, heads_q=1, dim=64, dtype="bf16", device="cuda"
        )


def test_a_model_and_a_device_are_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *SHAPE, "--gpu", "l4", "--device", "cpu"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_an_unknown_model_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *SHAPE, "--gpu", "b200"])
    assert "invalid choice: 'b200'" in capsys.readouterr().err
    with pytest.raises(flashmoe_science.InvalidArgumentError, match="models of GPUs 'h100', 'h200"):
        flashmoe_science.device_info("b200")


def test_the_version_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    build = flashmoe_science.build_info()
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert f"libflashmoe {build.version}, " in said
    assert said.endswith(f"kernel families: {build.kernel_families.replace(' ', ', ')}\n")
    assert ("without CUDA" in said) == (not ARCHITECTURES)


def test_the_version_of_a_broken_installation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Any:
        raise OSError("libflashmoe.so.1: cannot open shared object file")

    monkeypatch.setattr(flashmoe_science, "cuda_device_count", broken)
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 1
    assert "the package does not load: libflashmoe.so.1" in capsys.readouterr().err
