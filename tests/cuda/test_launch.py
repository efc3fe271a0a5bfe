"""The host side of the GPU families, compiled with a made-up CUDA (tests/cuda/host/): this needs no
GPU, but CUDA's headers, which come with nvcc."""

from __future__ import annotations

from pathlib import Path

import pytest
from installations import ROOT, checked, require_cuda_headers, require_tool

# The kernels of each family, by its folder, that the programs know.
ENTRIES = {
    "attention/sm89_few_rows": ("fp16_d64_dv64_r8",),
    "attention/sm89": (*("fp16_d64_dv64", "fp16_d64_dv64_ragged", "fp16_d64_dv64_ragged_biased"),),
    "attention/sm89_decode": ("fp16_d64_dv64_r8", "fp16_d64_dv64_r16"),
    "attention/sm90_mla": ("fp16_d576_dv512",),
    "attention/sm90": (
        *("fp16_d64_dv64", "fp16_d64_dv64_ragged", "split_kv_fp16_d64_dv64"),
        *("fp16_d64_dv64_window", "fp16_d64_dv64_ragged_window"),
        "fp16_d64_dv64_ragged_packed",
    ),
    "attention/sm89_backward": (
        *("fp16_d64_dv64", "fp16_d64_dv64_ada", "bf16_d64_dv64", "bf16_d128_dv128"),
        *("bf16_d256_dv256", "bf16_d256_dv256_ada", "fp16_d64_dv64_ragged"),
        "fp16_d64_dv64_ragged_biased",
    ),
    "attention/sm90_backward": (
        *("fp16_d64_dv64", "fp16_d64_dv64_ragged", "bf16_d64_dv64"),
        *("bf16_d128_dv128", "bf16_d192_dv128", "bf16_d192_dv192", "bf16_d256_dv256"),
    ),
    "moe/route": ("key32_e128", "key64_e1024"),
    "moe/sm89": ("bf16_gated", "bf16_gated_t", "bf16", "bf16_t"),
    "moe/sm90": (
        *("bf16_gated_plain", "bf16_gated_narrow", "bf16_gated", "bf16_gated_t"),
        *("bf16_gated_interleaved", "bf16_up", "bf16_up_t", "bf16_down", "bf16_down_t"),
        *("bf16_down_short", "bf16_down_middle", "bf16_up_gradient", "bf16_up_gradient_t"),
    ),
    "moe/sm89_few_tokens": ("bf16_t1_n8", "bf16_t2_n16"),
    "moe/sm90_few_tokens": ("bf16_bulk",),
    "moe/sm90_backward": ("bf16",),
}
CORE = (
    *("checks", "choose", "dtype", "launch", "log", "operation", "overlap", "per_thread", "status"),
    *(f"ops/attention/{name}" for name in ("checks", "problem", "sequences")),
)
BASE = tuple(f"core/{name}.cpp" for name in ("dtype", "log", "per_thread", "status"))
MOE_CORE = (*BASE, *(f"core/{name}.cpp" for name in ("checks", "launch")))
MOE_CUDA = (
    *(f"cuda/{name}.cpp" for name in ("device", "gpu_models", "launch")),
    "tests/cuda/host/fake_cuda.cpp",
)
MOE_FAMILIES = (
    *(f"cuda/moe/{family}/family.cpp" for family in ("sm89", "sm90")),
    "cuda/moe/combine/stage.cpp",
    "cuda/tensor_map.cpp",
    "tests/cuda/host/made_up_moe.cpp",
)
MOE_FEW_TOKENS = ("cuda/moe/sm89_few_tokens/family.cpp", "tests/cuda/host/made_up_few_tokens.cpp")
ATTENTION_BASE = (
    *(f"core/{name}.cpp" for name in CORE),
    *(f"cuda/{name}.cpp" for name in ("device", "gpu_models", "launch", "tensor_map")),
    *(f"cuda/attention/{name}.cpp" for name in ("cost", "launch", "walkable")),
    "tests/cuda/host/fake_cuda.cpp",
)
MERGE = ("cuda/merge_states/family.cpp", "tests/cuda/host/made_up_merge.cpp")
ATTENTION = (
    *ATTENTION_BASE,
    *(f"core/ops/attention/{name}.cpp" for name in ("forward", "merge_in", "mixed")),
    *MERGE,
    *(f"cuda/attention/{family}/family.cpp" for family in ("sm89_few_rows", "sm89", "sm90")),
    "cuda/attention/sm89_decode/family.cpp",
    "cuda/attention/sm90_mla/family.cpp",
    "cuda/attention/lengths/launch.cpp",
    *(f"cuda/attention/sm90/{name}.cpp" for name in ("l2_swizzle", "split_kv", "split_kv_cost")),
    *(f"cuda/attention/sm90/{name}.cpp" for name in ("ragged", "stream_k", "whole_tiles")),
)
SOURCES = {
    "test_launch": ATTENTION,
    "test_choice": tuple(
        source
        for source in ATTENTION
        if not any(part in source for part in ("sm89_decode", "sm90_mla", "mixed", "lengths"))
    ),
    "test_backward": (
        *ATTENTION_BASE,
        "core/ops/attention/backward.cpp",
        *(f"cuda/attention/backward/{name}.cpp" for name in ("launches", "ragged_launches")),
        *(f"cuda/attention/{family}_backward/family.cpp" for family in ("sm89", "sm90")),
    ),
    "test_l2_swizzle": (*BASE, "cuda/attention/sm90/l2_swizzle.cpp"),
    "test_cost": (
        *BASE,
        "core/ops/attention/problem.cpp",
        *(f"cuda/attention/{name}.cpp" for name in ("cost", "sm90/split_kv_cost")),
    ),
    "test_divide": BASE,
    "test_ragged_order": BASE,
    "test_whole_tiles": BASE,
    "test_sequence_tables": (*BASE, "core/ops/attention/problem.cpp"),
    "test_stream_k": (
        *BASE,
        "core/ops/attention/problem.cpp",
        *(f"cuda/attention/{name}.cpp" for name in ("cost", "sm90/l2_swizzle")),
        *(f"cuda/attention/sm90/{name}.cpp" for name in ("split_kv_cost", "stream_k")),
    ),
    "test_kv_append": (*MOE_CORE, *MOE_CUDA, "cuda/kv_append/family.cpp"),
    "test_kv_gather": (*MOE_CORE, *MOE_CUDA, "cuda/kv_gather/family.cpp"),
    "test_merge_states": (*MOE_CORE, *MOE_CUDA, *MERGE),
    "test_moe": (
        *MOE_CORE,
        *MOE_CUDA,
        "cuda/moe/route/family.cpp",
        "cuda/moe/combine/stage.cpp",
    ),
    "test_moe_limits": (
        *MOE_CORE,
        *MOE_CUDA,
        *MOE_FAMILIES,
        *(f"cuda/moe/{family}_backward/family.cpp" for family in ("sm89", "sm90")),
        "cuda/moe/sm90_backward/gradient.cpp",
        "tests/cuda/host/made_up_moe_backward.cpp",
    ),
    "test_all_rows": (*MOE_CORE, *MOE_CUDA, "cuda/moe/all_rows.cu"),
    "test_moe_few": (*MOE_CORE, *MOE_CUDA, *MOE_FEW_TOKENS),
    "test_moe_calls": (
        *MOE_CORE,
        *(f"core/{name}.cpp" for name in ("choose", "ops/moe/grouped_product", "ops/moe/checks")),
        *(f"core/{name}.cpp" for name in ("ops/moe/forward", "operation", "overlap")),
        *MOE_CUDA,
        *MOE_FAMILIES,
        *MOE_FEW_TOKENS,
    ),
}
OPTIONS = (
    *("-std=c++17", "-g1", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror", "-pthread"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    *("-DFLASHMOE_WITH_CUDA=1", "-DFLASHMOE_WITH_SM90=1"),
    '-DFLASHMOE_CUDA_ARCHITECTURES="89-real 90a-real 89-virtual"',
)


# Programs that compute for longer than -O1 takes to compile.
OPTIMIZED = {f"tests/cuda/host/{name}.cpp" for name in ("test_ragged_order", "test_l2_swizzle")}


# Link options of programs that make memory run out.
LINK = {"test_launch": ("-Wl,--wrap=aligned_alloc",)}


# Those of test_choice, where they differ.
CHOICE_ENTRIES = {
    "attention/sm89_few_rows": (
        "bf16_d64_r8",
        "bf16_d64_r16",
        "bf16_d64_r32",
        "bf16_d128_r8",
        "bf16_d128_r16",
    ),
    "attention/sm89": ("bf16_d64", "bf16_d128"),
    "attention/sm90": ("bf16_d64", "bf16_d128", "split_kv_bf16_d64", "split_kv_bf16_d128"),
}


class _Programs:
    """Linked from objects that they share: most sources are of most programs."""

    def __init__(self, build: Path) -> None:
        self._build = build
        self._programs: set[Path] = set()
        self._objects: set[Path] = set()
        for choice, entries in enumerate((ENTRIES, ENTRIES | CHOICE_ENTRIES)):
            for family, names in entries.items():
                listed = self._includes(bool(choice)) / "cuda" / family / "entries.inc"
                listed.parent.mkdir(parents=True)
                listed.write_text("".join(f"FLASHMOE_ENTRY({name})\n" for name in names))

    def _includes(self, choice: bool) -> Path:
        return self._build / ("choice" if choice else "all")

    def _object(self, source: str, choice: bool) -> Path:
        """Compiled once; for test_choice anew where it depends on which kernels there are."""
        if choice:
            shared = self._object(source, choice=False)
            if "entries.inc" not in shared.with_suffix(".d").read_text():
                return shared
        made = self._includes(choice) / Path(source).with_suffix(".o")
        if made not in self._objects:
            made.parent.mkdir(parents=True, exist_ok=True)
            includes = (ROOT, ROOT / "include", ROOT / "tests", self._includes(choice))
            optimized = ["-O1"] if source in OPTIMIZED else []
            # By its language: sources of CUDA that have no kernel are C++, too.
            checked([require_tool("c++"), *OPTIONS, *optimized, *(f"-I{path}" for path in includes),
                     "-isystem", require_cuda_headers(), "-MMD", "-x", "c++", "-c", ROOT / source,
                     "-o", made])  # fmt: skip
            self._objects.add(made)
        return made

    def __call__(self, name: str) -> Path:
        made = self._build / name
        if made not in self._programs:
            sources = (*SOURCES[name], f"tests/cuda/host/{name}.cpp")
            objects = [self._object(source, name == "test_choice") for source in sources]
            checked([require_tool("c++"), *OPTIONS, *objects, *LINK.get(name, ()), "-o", made])
            self._programs.add(made)
        return made


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> _Programs:
    return _Programs(tmp_path_factory.mktemp("host"))


@pytest.mark.parametrize(
    "without", ["", "no-driver", "no-handles", "no-shared-attributes", "no-map-moves"]
)
def test_launch(programs: _Programs, without: str) -> None:
    checked([programs("test_launch"), *([without] if without else [])])


@pytest.mark.parametrize("without", ["", "no-driver", "no-map-moves"])
def test_backward(programs: _Programs, without: str) -> None:
    checked([programs("test_backward"), *([without] if without else [])])


def test_l2_swizzle(programs: _Programs) -> None:
    checked([programs("test_l2_swizzle")])


def test_attention_choice(programs: _Programs) -> None:
    checked([programs("test_choice")])


def test_divide(programs: _Programs) -> None:
    checked([programs("test_divide")])


def test_ragged_order(programs: _Programs) -> None:
    checked([programs("test_ragged_order")])


def test_ranges_of_whole_tiles(programs: _Programs) -> None:
    checked([programs("test_whole_tiles")])


def test_sequence_tables(programs: _Programs) -> None:
    checked([programs("test_sequence_tables")])


def test_cost(programs: _Programs) -> None:
    checked([programs("test_cost")])


def test_stream_k(programs: _Programs) -> None:
    checked([programs("test_stream_k")])


def test_appending_to_a_cache(programs: _Programs) -> None:
    checked([programs("test_kv_append")])


def test_gathering_from_a_cache(programs: _Programs) -> None:
    checked([programs("test_kv_gather")])


def test_merging_partial_results(programs: _Programs) -> None:
    checked([programs("test_merge_states")])


def test_routing_and_combining(programs: _Programs) -> None:
    checked([programs("test_moe")])


@pytest.mark.parametrize("without", ["", "no-driver"])
def test_offsets_of_all_rows(programs: _Programs, without: str) -> None:
    checked([programs("test_all_rows"), *([without] if without else [])])


def test_what_layers_and_products_refuse(programs: _Programs) -> None:
    checked([programs("test_moe_limits")])


@pytest.mark.parametrize("without", ["", "no-map-moves"])
def test_calls_of_experts(programs: _Programs, without: str) -> None:
    checked([programs("test_moe_calls"), *([without] if without else [])])


def test_who_serves_few_tokens(programs: _Programs) -> None:
    checked([programs("test_moe_few")])
