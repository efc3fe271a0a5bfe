"""JAX: what a program is compiled for. Refusals for a platform, and programs that are exported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
from flashmoe_science import _core
from flashmoe_science._dtypes import Device
from reference import assert_accurate

jax = pytest.importorskip("jax")
jnp = jax.numpy
export = pytest.importorskip("jax.export")

from flashmoe_science import jax as ours  # noqa: E402

TARGETS = (
    "flashmoe_attention_forward_v1",
    "flashmoe_attention_backward_v1",
    "flashmoe_merge_states_v1",
    "flashmoe_moe_route_v1",
    "flashmoe_moe_forward_v1",
    "flashmoe_grouped_product_v1",
    "flashmoe_fused_moe_v1",
)
ALLOWED = [export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]
needs_cuda_build = pytest.mark.skipif(
    not fm.build_info().cuda_architectures, reason="built without CUDA"
)


def attend(q: Any, k: Any, v: Any) -> Any:
    return fm.flash_attention(q, k, v, causal=True, return_lse=True)


def block(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Attention of one head, then experts in one call and in steps: each target once."""
    x = x + fm.flash_attention(x[:, :, None], x[:, :, None], x[:, :, None], causal=True)[:, :, 0]
    rows = x.reshape((x.shape[0] * x.shape[1], x.shape[2]))
    all_rows = jnp.asarray([0, 2**31 - 1], jnp.int32)
    routing = fm.moe_route(fm.grouped_product(rows, router[None], offsets=all_rows), 2)
    steps = fm.moe_forward(rows, up, down, routing)
    return fm.fused_moe(x, router, up, down, 2) + steps.reshape(x.shape)


def qkv(batch: int, seq: int, dtype: Any = "float32") -> list[Any]:
    rng = np.random.default_rng(0)
    shapes = ((batch, seq, 4, 32), (batch, seq, 2, 32), (batch, seq, 2, 48))
    return [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]


def layer(batch: int, seq: int, dtype: Any = "float32") -> list[Any]:
    rng = np.random.default_rng(0)
    shapes = ((batch, seq, 32), (8, 32), (8, 48, 32), (8, 32, 24))
    return [
        jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5, dtype)
        for shape in shapes
    ]


def lower(function: Any, *arrays: Any, platforms: tuple[str, ...]) -> Any:
    return export.export(jax.jit(function), platforms=platforms, disabled_checks=ALLOWED)(*arrays)


# ---- refusals ----


def test_fp32_is_refused_for_gpus_alone() -> None:
    for function, arrays in ((attend, qkv(1, 8)), (block, layer(1, 8))):
        assert lower(function, *arrays, platforms=("cpu",)).platforms == ("cpu",)
        for platforms in (("cuda",), ("cpu", "cuda")):
            with pytest.raises(
                NotImplementedError, match=r"it computes on|dtype fp32, accepted on"
            ):
                lower(function, *arrays, platforms=platforms)


@needs_cuda_build
def test_the_sentence_of_fp32_on_gpus() -> None:
    sentence = "dtype fp32, accepted on a GPU are fp16 and bf16"
    with pytest.raises(NotImplementedError, match=sentence):
        lower(attend, *qkv(1, 8), platforms=("cuda",))
    x, router, up, down = layer(1, 8)
    routing = fm.moe_route(x[0] @ router.T, 2)
    with pytest.raises(NotImplementedError, match=sentence):
        lower(lambda x: fm.moe_forward(x[0], up, down, routing), x, platforms=("cuda",))
    with pytest.raises(NotImplementedError, match=sentence):
        lower(
            lambda x: fm.grouped_product(x[0], up, offsets=routing.offsets), x, platforms=("cuda",)
        )
    lower(lambda z: fm.moe_route(z, 2), x[0], platforms=("cuda",))  # takes fp32 everywhere


@needs_cuda_build
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_compiled_for_gpus(dtype: str) -> None:
    for function, arrays in ((attend, qkv(1, 8, dtype)), (block, layer(1, 8, dtype))):
        made = lower(function, *arrays, platforms=("cpu", "cuda"))
        assert made.platforms == ("cpu", "cuda")
        got = jax.jit(made.call)(*arrays)
        jax.tree.map(np.testing.assert_array_equal, got, function(*arrays))


def test_gradients_are_compiled_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the workspace of their plan as a result, unless a length is a symbol."""
    real = _core.plan

    def plan(operation: str, tensors: Any, options: Any) -> Any:
        on_cpu = {name: (*x[:2], Device(1, 0), None) for name, x in tensors.items()}
        on_gpu = any(x[2] != Device(1, 0) for x in tensors.values())
        made = real(operation, on_cpu if on_gpu else tensors, options)
        return made | {"workspace_bytes": 4096 if operation == "attention_backward" else 0}

    monkeypatch.setattr(_core, "plan", plan)
    ours._kept_plan.cache_clear()
    loss = jax.grad(lambda *qkv: fm.flash_attention(*qkv).astype("float32").sum(), (0, 1, 2))
    types = qkv(1, 8, "bfloat16")
    scope = export.SymbolicScope()
    symbols = [export.symbolic_args_specs(x, "b, ...", scope=scope) for x in types]
    for given, workspace in ((types, True), (symbols, False)):
        (text,) = [
            line
            for line in str(lower(loss, *given, platforms=("cuda",)).mlir_module()).splitlines()
            if "custom_call @flashmoe_attention_backward" in line
        ]
        assert ('outputs = "dq dk dv workspace "' in text) == workspace
        assert ("tensor<4352xui8>" in text) == workspace
    ours._kept_plan.cache_clear()


def test_a_programs_own_workspace() -> None:
    """On the CPU it is there to be told from an output."""
    q, k, v = qkv(1, 8)
    options = _core.pack_options("attention_forward", {})

    def call(outputs: str, *types: Any) -> Any:
        made = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
        return jax.ffi.ffi_call("flashmoe_attention_forward_v1", made)(
            q, k, v, inputs="q k v ", outputs=outputs, options=options
        )

    out, scratch = ((*q.shape[:3], v.shape[3]), q.dtype), ((300,), "uint8")
    made, _ = call("out workspace ", out, scratch)
    np.testing.assert_array_equal(made, fm.flash_attention(q, k, v))
    for outputs, types in (
        ("workspace out ", (scratch, out)),
        ("out workspace ", (out,)),
        ("out workspace ", (out, ((300,), "int32"))),
        ("out ", (out, scratch)),
        ("outworkspace ", (out, scratch)),
    ):
        with pytest.raises(Exception, match="call this target through flashmoe_science"):
            call(outputs, *types)


@pytest.mark.parametrize("platforms", [("tpu",), ("cpu", "tpu"), ("rocm",)])
def test_other_platforms_are_refused(platforms: tuple[str, ...]) -> None:
    with pytest.raises(NotImplementedError, match="has kernels for cpu and cuda alone") as caught:
        lower(attend, *qkv(1, 8), platforms=platforms)
    assert platforms[-1] in str(caught.value)


def test_kernels_are_looked_for_when_the_platform_is_known() -> None:
    def named(kernel: str) -> Any:
        return lambda *qkv: fm.flash_attention(*qkv, kernel=kernel)

    lower(named("cpu"), *qkv(1, 8), platforms=("cpu",))
    with pytest.raises(NotImplementedError, match="kernel: cannot be served: cpu"):
        lower(named("cpu"), *qkv(1, 8, "bfloat16"), platforms=("cuda",))
    for platforms in (("cpu",), ("cuda",)):
        with pytest.raises(ValueError, match=r'^kernel: got "sm12", built in are '):
            lower(named("sm12"), *qkv(1, 8, "bfloat16"), platforms=platforms)
    with pytest.raises(ValueError, match=r'^kernel: got "sm12", built in are '):
        jax.jit(named("sm12")).lower(*qkv(1, 8))
    x, router, up, down = layer(1, 8)
    with pytest.raises(ValueError, match=r'^kernel: got "sm12", built in are '):
        jax.jit(lambda x: fm.fused_moe(x, router, up, down, 2, kernel="sm12")).lower(x)


@needs_cuda_build
def test_a_kernel_of_gpus_is_refused_for_the_cpu_when_it_is_compiled() -> None:
    attend = jax.jit(lambda *qkv: fm.flash_attention(*qkv, kernel="sm89"))
    with pytest.raises(NotImplementedError, match="kernel: cannot be served: sm89: the tensors"):
        attend.trace(*qkv(1, 8, "bfloat16")).lower(lowering_platforms=("cpu",))


# ---- jax.export ----


def test_targets_are_allowed_by_name() -> None:
    for function, arrays in ((attend, qkv(1, 8)), (block, layer(1, 8))):
        with pytest.raises(ValueError, match="custom calls whose targets have no compat"):
            export.export(jax.jit(function), platforms=("cpu",))(*arrays)


def _through_bytes(exported: Any) -> Any:
    """As another process reads it, where the package that JAX writes it with is installed."""
    if importlib.util.find_spec("flatbuffers") is None:
        return exported
    return export.deserialize(exported.serialize())


def test_exported_with_fixed_shapes() -> None:
    for function, arrays in ((attend, qkv(2, 9)), (block, layer(2, 9))):
        made = _through_bytes(lower(function, *arrays, platforms=("cpu",)))
        jax.tree.map(np.testing.assert_array_equal, made.call(*arrays), function(*arrays))


_IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path

import flashmoe_science.jax
import jax.export
import numpy as np

folder = Path(sys.argv[1])
program = jax.export.deserialize((folder / "program").read_bytes())
np.save(folder / "out.npy", program.call(*np.load(folder / "arrays.npz").values()))
"""


def test_exported_to_another_process(tmp_path: Path) -> None:
    """Which has called nothing of ours before."""
    pytest.importorskip("flatbuffers")
    arrays = layer(2, 9)
    (tmp_path / "program").write_bytes(lower(block, *arrays, platforms=("cpu",)).serialize())
    np.savez(tmp_path / "arrays.npz", *map(np.asarray, arrays))
    done = subprocess.run(
        [sys.executable, "-c", _IN_ANOTHER_PROCESS, tmp_path], env=os.environ, text=True,
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), block(*arrays))


def _symbolic(arrays: list[Any], dims: str) -> list[Any]:
    """Types of the arrays, with those names for the first dimensions of activations."""
    scope = export.SymbolicScope()
    made = []
    for x in arrays:
        names = ", ".join([dims, *map(str, x.shape[2:])]) if x.shape[:2] == (2, 9) else "..."
        made.append(export.symbolic_args_specs(x, names, scope=scope))
    return made


@pytest.mark.parametrize("dims", ["b, 9", "2, s", "b, s", "2*b, s+1"])
def test_exported_with_symbolic_batches_and_sequences(dims: str) -> None:
    for function, make in ((attend, qkv), (block, layer)):
        types = _symbolic(make(2, 9), dims)
        made = _through_bytes(lower(function, *types, platforms=("cpu",)))
        for batch, seq in ((2, 9), (4, 9), (2, 33), (6, 100)):
            if ("b" in dims or batch == 2) and ("s" in dims or seq == 9):
                arrays = make(batch, seq)
                got = jax.jit(made.call)(*arrays)
                jax.tree.map(np.testing.assert_array_equal, got, function(*arrays))


def test_vmap_of_symbolic_dimensions() -> None:
    arrays = [jnp.stack([x, x + 1, x * 2]) for x in qkv(2, 9)]
    scope = export.SymbolicScope()
    types = [
        export.symbolic_args_specs(x, f"n, b, s, {x.shape[3]}, {x.shape[4]}", scope=scope)
        for x in arrays
    ]
    made = lower(jax.vmap(attend), *types, platforms=("cpu",))
    got = made.call(*arrays)
    for i in range(3):
        want = attend(*(x[i] for x in arrays))
        jax.tree.map(np.testing.assert_array_equal, [x[i] for x in got], list(want))
    assert_accurate(got[0][2], got[1][2], *(x[2] for x in arrays), causal=True)


def test_wrong_symbolic_shapes_fail_while_tracing() -> None:
    def types(*shapes: str) -> list[Any]:
        scope = export.SymbolicScope()
        return [
            jax.ShapeDtypeStruct(export.symbolic_shape(x, scope=scope), jnp.float32) for x in shapes
        ]

    def fails(sentence: str, *shapes: str) -> None:
        with pytest.raises(ValueError, match=sentence):
            lower(attend, *types(*shapes), platforms=("cpu",))

    fails(
        r"^v: its sequence length is 96, but k has 72; this is with b = 48, s = 72, t = 96(\n|$)",
        "b, s, 4, 32", "b, s, 2, 32", "b, t, 2, 32",
    )  # fmt: skip
    fails(
        r"^q: its head dimension is 300, accepted are .*; this is with b = 48, d = 72(\n|$)",
        "b, 9, 4, 4*d+12", "b, 9, 2, 32", "b, 9, 2, 32",
    )  # fmt: skip
