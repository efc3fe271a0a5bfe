"""The machine code of the attention kernels, as it is in the library: no GPU needed.

cuobjdump and nvdisasm come with the CUDA toolkit or with the PyPI packages
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm. Without them, or with a library built without CUDA,
these tests skip; where FLASHMOE_TEST_REQUIRE is set, which is continuous integration, they fail.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import kernels
import pytest
import sass
from kernels import Kernel

_FUNCTION = re.compile(
    r"\d(sm\d\d(?:_few_rows|_decode)?)\d\dattention_forward_kernelI.*?Traits"
    r"I(6__half|13__nv_bfloat16)Li(\d+)ELi(\d+)E(?:NS\w*?_\d+([A-Za-z]\w*?)ILi|Li(\d+)E(Lb1E)?)"
)
# The second kernel of the families that split keys.
_SUM = re.compile(
    r"\dattention_combine_kernelINS_\d+?(sm\d\d(?:_few_rows)?)8SplitRowI.*?Traits"
    r"I(6__half|13__nv_bfloat16)Li(\d+)ELi(\d+)E(?:NS\w*?_\d+([A-Za-z]\w*?)ILi|Li(\d+)E)"
)
_DECODE_SUM = re.compile(
    r"16attention_decode\d\dattention_combine_kernelI(6__half|13__nv_bfloat16)Li256EE"
)
_FEW_ROWS = ("sm89_few_rows", "sm89_decode")
_ANYWHERE = ("sm89", *_FEW_ROWS)  # families that are compiled for every architecture


@pytest.fixture(scope="module")
def architectures() -> list[str]:
    """What the library says it holds, such as ["89-real", "90a-real", "89-virtual"]."""
    return sass.architectures()


def _kernel_of(function: str) -> Kernel | None:
    found = _FUNCTION.search(function)
    if found is None:
        return None
    return _kernel(*found.groups())


def _kernel(
    family: str, element: str, dim: str, dim_v: str, tuning: str | None, rows: str | None,
    fp8: str | None = None,
) -> Kernel:  # fmt: skip
    if family == "sm90":
        family = "sm90_split_kv" if "Split" in (tuning or "") else "sm90_whole_tiles"
    tuning = tuning or rows or ""
    tuning += "_fp8" if fp8 else ""
    return Kernel(family, sass.ELEMENTS[element], int(dim), int(dim_v), tuning)


def _kernel_of_sum(function: str) -> Kernel | None:
    """Whose parts it adds up, of those of as many columns of values."""
    found = _SUM.search(function)
    if found is None:
        return None
    return _kernel(*found.groups())


class Code(NamedTuple):
    """One kernel's code for one architecture."""

    arch: str
    kernel: Kernel


@pytest.fixture(scope="module")
def instructions(architectures: list[str]) -> dict[Code, Counter[str]]:
    """How often each opcode occurs."""
    found = sass.instructions(_kernel_of)
    return {Code(*code): opcodes for code, opcodes in found.items()}


@pytest.fixture(scope="module")
def resources(architectures: list[str]) -> dict[Code, dict[str, int]]:
    """Registers, stack, local and shared memory of each kernel."""
    return {Code(*code): used for code, used in sass.resources(_kernel_of).items()}


@pytest.fixture(scope="module")
def sums(architectures: list[str]) -> dict[Code, Counter[str]]:
    """The same of the kernels that add up parts, by whose parts they add up."""
    return {Code(*code): opcodes for code, opcodes in sass.instructions(_kernel_of_sum).items()}


def _expected() -> set[Code]:
    """The families of every architecture; the kernels of sm_90a's own instructions for it alone."""
    codes = {Code(arch, kernel) for arch in sass.real_architectures() for kernel in _anywhere()}
    if "sm_90a" in sass.real_architectures():
        codes |= {Code("sm_90a", kernel) for family in kernels.COPY_ENGINE
                  for kernel in kernels.attention(family)}  # fmt: skip
    return codes


def _anywhere() -> set[Kernel]:
    return {kernel for family in _ANYWHERE for kernel in kernels.attention(family)}


def _of(instructions: dict[Code, Counter[str]], family: str) -> dict[Code, Counter[str]]:
    """The code of one family, of which there must be some."""
    found = {
        code: opcodes for code, opcodes in instructions.items() if code.kernel.family == family
    }
    if not found:
        sass.cannot(f"built without the {family} kernels")
    return found


def test_every_shipped_architecture_is_built_in(architectures: list[str]) -> None:
    missing = sorted(set(kernels.shipped_architectures()) - set(architectures))
    if missing:
        sass.cannot(f"built for {' '.join(architectures)} only, not {' '.join(missing)}")


def test_every_kernel_is_there_for_every_architecture(
    instructions: dict[Code, Counter[str]],
) -> None:
    assert set(instructions) == _expected()


def test_ptx_is_there_for_what_is_newer(architectures: list[str]) -> None:
    virtual = {f"sm_{name.removesuffix('-virtual')}" for name in architectures if "virtual" in name}
    if not virtual:
        sass.cannot("built without PTX")
    found: dict[str, set[Kernel]] = {}
    target = ""
    for line in sass.dump("-ptx"):
        if line.startswith(".target"):
            target = line.split()[1].rstrip(",")
        elif ".entry" in line:
            kernel = _kernel_of(line)
            if kernel is not None:
                found.setdefault(target, set()).add(kernel)
    assert found == {target: _anywhere() for target in virtual}


def test_sm89_products_are_mma_sync(instructions: dict[Code, Counter[str]]) -> None:
    for code, opcodes in _of(instructions, "sm89").items():
        sass.check_mma_sync(code, opcodes, code.kernel.dtype)


def test_sm89_fragments_come_by_ldmatrix(instructions: dict[Code, Counter[str]]) -> None:
    for code, opcodes in _of(instructions, "sm89").items():
        transposed = sass.transposing_loads(opcodes)
        assert sass.count(opcodes, "LDSM") > transposed > 0, f"{code}: {opcodes}"


def test_sm89_tiles_come_by_cp_async(instructions: dict[Code, Counter[str]]) -> None:
    for code, opcodes in _of(instructions, "sm89").items():
        # Biases and masks come by as many bytes as they are aligned to.
        biased = "Biased" in code.kernel.tuning
        shorter = ("LDGSTS.E.64", "LDGSTS.E") if biased else ()
        sass.check_cp_async(code, opcodes, shorter=shorter)


@pytest.mark.parametrize("family", kernels.COPY_ENGINE)
def test_products_are_wgmma(family: str, instructions: dict[Code, Counter[str]]) -> None:
    for code, opcodes in _of(instructions, family).items():
        products = sum(sass.check_wgmma(code, opcodes, code.kernel.dtype).values())
        # The scores of a step whose offsets did not hold, again: one slice of at most 128 keys.
        assert sass.count(opcodes, "HMMA") <= 16, f"{code}: products of one warp"
        # Where ptxas gives a group of products up, each is begun and awaited by itself.
        for name in ("WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR.LE"):
            assert 0 < 2 * opcodes[name] <= products, f"{code}: products are serialised"


@pytest.mark.parametrize("family", kernels.COPY_ENGINE)
def test_tiles_come_and_go_by_tma(family: str, instructions: dict[Code, Counter[str]]) -> None:
    """Those of split KV go as rows and parts of rows: their output is no box."""
    for code, opcodes in _of(instructions, family).items():
        sass.check_tma(code, opcodes, stores=family == "sm90_whole_tiles")
        assert sass.count(opcodes, "LDGSTS") == 0, f"{code}: copies of a thread's own"


@pytest.mark.parametrize("family", kernels.COPY_ENGINE)
def test_first_products_may_be_narrow(family: str, instructions: dict[Code, Counter[str]]) -> None:
    """A tile's first step has 64 keys instead of 128 if no row of a group sees more."""
    for code, opcodes in _of(instructions, family).items():
        kernel = code.kernel
        if kernel.dim not in (96, 128) and (kernel.dim, kernel.dim_v) != (192, 128):
            continue  # at 64 P V is as wide; the others' steps are not of 128 keys
        narrow = sum(n for name, n in opcodes.items() if name.startswith("HGMMA.64x64x16."))
        # In whole tiles with and without the last P V of the tile before it. Split KV has none at
        # 192.
        copies = 2 if family == "sm90_whole_tiles" else 1 if kernel.dim <= 128 else 0
        copies = 0 if kernel.capped else copies
        assert narrow == copies * kernel.dim // 16, f"{code}: {opcodes}"


def test_loads_come_first(instructions: dict[Code, Counter[str]]) -> None:
    for code, opcodes in _of(instructions, "sm90_whole_tiles").items():
        sass.check_loads_come_first(code, opcodes)


@pytest.mark.parametrize("family", kernels.COPY_ENGINE)
def test_roles_divide_the_registers(family: str, instructions: dict[Code, Counter[str]]) -> None:
    for code, opcodes in _of(instructions, family).items():
        sass.check_roles_divide_the_registers(code, opcodes)


@pytest.mark.parametrize("family", _FEW_ROWS)
def test_few_rows_products_are_mma_sync(
    family: str, instructions: dict[Code, Counter[str]]
) -> None:
    for code, opcodes in _of(instructions, family).items():
        sass.check_mma_sync(code, opcodes, code.kernel.dtype)
        # Its K and V fragments need nothing but pairing, and its probabilities a transposition.
        assert sass.count(opcodes, "MOVM") > 0, f"{code}: probabilities are not transposed"


@pytest.mark.parametrize("family", _FEW_ROWS)
def test_few_rows_keys_and_values_go_straight_to_registers(
    family: str, instructions: dict[Code, Counter[str]]
) -> None:
    for code, opcodes in _of(instructions, family).items():
        for name in ("LDSM", "UTMALDG", "UBLKCP"):
            assert sass.count(opcodes, name) == 0, f"{code}: {name}"
        # 16 bytes each; smaller ones are of masked_row_fallback, an element at a time.
        loads = {name: n for name, n in opcodes.items() if name.startswith("LDG.")}
        streamed = sum(n for name, n in loads.items() if ".NA." in name)
        kernel = code.kernel
        # For fp8 also 8 bytes, where rows are short or have fewer columns.
        widths = (".128", ".64") if kernel.fp8 else (".128",)
        keys = sum(n for name, n in loads.items() if name.endswith(widths))
        bytes_of_number = 1 if kernel.fp8 else 2
        least = 2 * bytes_of_number * (kernel.dim + kernel.dim_v) / 32
        assert streamed > 0, f"{code}: {loads}"
        assert keys >= streamed > least, f"{code}: {loads}"
        # Queries of a next tile alone are copied to shared memory; of the only tile of a block
        # they are loaded as keys are.
        copied = sass.count(opcodes, "LDGSTS")
        of_many_tiles = kernel.family == "sm89_decode"
        assert (copied > 0, keys == streamed) == (of_many_tiles, of_many_tiles), (
            f"{code}: {opcodes}"
        )
        assert copied < streamed / 4, f"{code}: {opcodes}"
        assert all(name.endswith(widths) for name in loads if ".NA." in name), f"{code}: {loads}"


def test_decoding_over_fp8_computes_while_keys_are_on_their_way(
    instructions: dict[Code, Counter[str]],
) -> None:
    """What is loaded is neither copied nor merged with what was there. Behind a step's last loads
    something may wait for them, where values are loaded last."""
    found = {Code(*code): count for code, count in sass.early_waits(_kernel_of).items()}
    assert set(found) == set(_of(instructions, "sm89_decode"))
    of_fp8 = {code: count for code, count in found.items() if code.kernel.fp8}
    assert of_fp8
    assert {code: count for code, count in of_fp8.items() if count > 2} == {}


def test_few_rows_blocks_share_keys_where_there_are_clusters(
    instructions: dict[Code, Counter[str]],
) -> None:
    """Their barrier, and stores to one another."""
    for code, opcodes in _of(instructions, "sm89_few_rows").items():
        for name in ("UCGABAR_ARV", "UCGABAR_WAIT", "STAS"):
            assert (sass.count(opcodes, name) > 0) == sass.is_hopper(code.arch), (
                f"{code}: {name}: {opcodes}"
            )


def test_kernels_that_split_keys_have_another_for_the_parts(
    instructions: dict[Code, Counter[str]], sums: dict[Code, Counter[str]]
) -> None:
    """Parts of 16 bytes, several on their way at a time; no product but of rows computed again."""
    split = {code for code in instructions if code.kernel.family == "sm90_split_kv"}
    assert set(sums) == {
        Code(arch, kernel._replace(dim=kernel.dim_v, tuning=kernel.tuning.removeprefix("Capped")))
        for arch, kernel in split | set(_of(instructions, "sm89_few_rows"))
    }
    for code, opcodes in sums.items():
        parts = sum(n for name, n in opcodes.items() if re.match(r"LDG\.E\..*128", name))
        assert parts >= 4, f"{code}: {opcodes}"
        for name in ("HMMA", "ATOM", "ATOMG", "RED", "LDL", "STL"):
            assert sass.count(opcodes, name) == 0, f"{code}: {name}"


def _runs_beside_decoding(code: Code) -> bool:
    return code.kernel.family == "sm90_whole_tiles" and "Ragged" in code.kernel.tuning


@pytest.mark.parametrize("family", [*kernels.FAMILIES, "sm89_decode", "combine"])
def test_launches_wait_for_what_is_ahead_of_them(
    family: str, instructions: dict[Code, Counter[str]], sums: dict[Code, Counter[str]]
) -> None:
    codes = sums if family == "combine" else _of(instructions, family)
    for code, opcodes in codes.items():
        # Beside decoding, which has waited before it let them start, prompts do so last of all.
        places = 2 if family != "combine" and _runs_beside_decoding(code) else 1
        sass.check_launches_wait(code, opcodes, places, places)


def test_nothing_is_in_local_memory(
    instructions: dict[Code, Counter[str]], resources: dict[Code, dict[str, int]]
) -> None:
    assert set(resources) == set(instructions)
    for code, opcodes in instructions.items():
        sass.check_no_local_memory(code, opcodes, resources[code])


def test_no_atomics_and_no_fences(instructions: dict[Code, Counter[str]]) -> None:
    """Blocks share nothing: results do not depend on their order, and none waits for another.
    Beside decoding they take tiles of prompts by one counter: whose a tile is makes no bit."""
    for code, opcodes in instructions.items():
        if _runs_beside_decoding(code):
            sass.check_atomics_count_blocks(code, opcodes, counts=True)
        else:
            sass.check_no_atomics(code, opcodes)
        # Within a block, what was written to shared memory is shown to the copy engine; and sm90
        # reads what its copy engine wrote, once, where causal rows came out non-finite.
        fences = [name for name in opcodes if name.startswith("MEMBAR") and name[-4:] != ".CTA"]
        assert sum(opcodes[name] for name in fences) <= (
            code.kernel.family == "sm90_whole_tiles"
        ), f"{code}: {fences}"


_MODELS = (Path(__file__).parents[2] / "cuda/gpu_models.cpp").read_text(encoding="utf-8")


def _stated(kernel: str) -> tuple[int, int]:
    """What cuda/gpu_models.cpp has of a kernel, for plans without a driver: static shared memory
    and registers, of the first row whose name its own begins with."""
    table = _MODELS[_MODELS.index("kCompiled[] = {") :]
    rows = re.findall(r'{"(\w*)", (\d+), (\w+)}', table[: table.index("};")])
    most = re.search(r"kMostRegisters = (\d+);", _MODELS)
    assert most is not None and len(rows) > 5
    shared, registers = next(row[1:] for row in rows if kernel.startswith(row[0]))
    return int(shared), int(most[1] if registers == "kMostRegisters" else registers)


# Names of those kernels, by that of their function.
_MOE_KERNELS = {
    "route_once_kernel": ["moe_route_once_key32_e128"],
    "route_choose_kernel": ["moe_route_choose_key32_e128"],
    "route_place_kernel": ["moe_route_place"],
    "moe_up_kernel": ["moe_up_sm89_few_tokens_fp16_gated", "moe_up_sm89_few_tokens_bf16_gated"],
    "moe_down_kernel": ["moe_down_sm89_few_tokens_fp16", "moe_down_sm89_few_tokens_bf16"],
    "moe_up_bulk_kernel": [
        "moe_up_sm90_few_tokens_fp16_bulk_gated",
        "moe_up_sm90_few_tokens_bf16_bulk_gated",
    ],
    "moe_down_bulk_kernel": [
        "moe_down_sm90_few_tokens_fp16_bulk",
        "moe_down_sm90_few_tokens_bf16_bulk",
    ],
    "kv_append_kernel": ["kv_append_sm89_fp16"],
    "kv_append_packed_kernel": ["kv_append_sm89_packed_fp16"],
    "kv_gather_kernel": ["kv_gather_sm89_fp16"],
    "merge_states_kernel": ["merge_states_sm89_fp16"],
    "moe_combine_kernel": ["moe_combine_fp16"],
    "sums_kernel": ["moe_backward_sums_fp16"],
    "weight_gradients_kernel": ["moe_backward_sm89_fp16"],
    "route_backward_kernel": ["moe_route_backward"],
    "grouped_product_kernel": ["grouped_product_sm89_fp16"],
}
# On Hopper cuobjdump counts what the system reserves as well.
_RESERVED = 1024
_MOE_FUNCTION = re.compile(rf"\d({'|'.join(_MOE_KERNELS)})")


def _moe_kernel_of(function: str) -> str | None:
    found = _MOE_FUNCTION.search(function)
    return found[1] if found else None


def test_plans_for_models_know_the_static_shared_memory(architectures: list[str]) -> None:
    resources = sass.resources(_moe_kernel_of)
    assert {kernel for _, kernel in resources} == set(_MOE_KERNELS)
    for (arch, kernel), used in resources.items():
        reserved = _RESERVED if sass.is_hopper(arch) else 0
        static = max(0, used["SHARED"] - reserved)  # nothing is reserved where there is none
        assert {_stated(name)[0] for name in _MOE_KERNELS[kernel]} == {static}, (arch, kernel)


def test_plans_for_models_know_the_shared_memory_of_combining(architectures: list[str]) -> None:
    resources = sass.resources(_kernel_of_sum)
    assert resources
    for (arch, kernel), used in resources.items():
        name = kernel.table_name.replace("_forward_", "_combine_")
        reserved = _RESERVED if sass.is_hopper(arch) else 0
        assert _stated(name)[0] == used["SHARED"] - reserved, (arch, name)


def test_plans_for_models_know_the_second_kernel_of_decoding(architectures: list[str]) -> None:
    def element_of(function: str) -> str | None:
        found = _DECODE_SUM.search(function)
        return sass.ELEMENTS[found[1]] if found else None

    resources = sass.resources(element_of)
    assert {element for _, element in resources} == set(sass.ELEMENTS.values())
    for (arch, element), used in resources.items():
        reserved = _RESERVED if sass.is_hopper(arch) else 0
        stated = _stated(f"attention_combine_sm89_decode_{element}")[0]
        assert stated == used["SHARED"] - reserved, (arch, element)
        assert used["STACK"] == used["LOCAL"] == 0


def test_plans_for_models_know_how_many_few_row_blocks_fit(
    resources: dict[Code, dict[str, int]],
) -> None:
    """Per quarter of a multiprocessor, whose registers suffice for that many warps."""

    def warps(registers: int) -> int:
        return 16384 // (-(-registers * 32 // 256) * 256)

    for code, used in resources.items():
        kernel = code.kernel
        if kernel.family == "sm89_few_rows":
            name = f"attention_forward_sm89_few_rows_{kernel.dtype}_d{kernel.dim}_dv{kernel.dim_v}"
            assert warps(used["REG"]) == warps(_stated(f"{name}_r{kernel.tuning}")[1]), code
