"""JAX and CuPy arrays, and objects with DLPack alone, on the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
import reference
import torch
from gpu import cases, memory, oracle
from torch_training import Case, needs_gradients

pytestmark = pytest.mark.gpu

GRADIENTS = Case("grouped", seq_q=130, seq_k=190, heads_q=6, heads_kv=2, options={"causal": True})
SHAPES = {"q": (2, 130, 6, 64), "k": (2, 190, 2, 64), "v": (2, 190, 2, 96)}


def _arrays(dtype: str, layout: str = "bshd") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) for shape in SHAPES.values()]
    if layout == "bhsd":
        arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
    return [x.astype(reference.DTYPES[dtype]) for x in arrays]


# ---- JAX ----


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_jax(jax_gpu: Any, dtype: str, causal: bool | str, layout: str, family: str) -> None:
    import jax

    q, k, v = (jax.device_put(x, jax_gpu) for x in _arrays(dtype, layout))
    out, lse = fm.flash_attention(
        q, k, v, causal=causal, layout=layout, return_lse=True, kernel=family
    )
    for result in (out, lse):
        assert isinstance(result, jax.Array)
        assert result.devices() == {jax_gpu}
    assert out.dtype == q.dtype
    reference.assert_accurate(
        np.asarray(out), np.asarray(lse), *map(np.asarray, (q, k, v)), causal or "none",
        layout=layout,
    )  # fmt: skip


def test_jax_under_jit(jax_gpu: Any) -> None:
    import jax
    import jax.numpy as jnp

    q, k, v = (jax.device_put(x, jax_gpu) for x in _arrays("bf16"))

    @jax.jit
    def layer(q: Any, k: Any, v: Any) -> Any:
        return fm.flash_attention(q * jnp.bfloat16(2), k, v, causal=True) + jnp.bfloat16(1)

    want = fm.flash_attention(q * jnp.bfloat16(2), k, v, causal=True) + jnp.bfloat16(1)
    got = layer(q, k, v)
    assert got.devices() == {jax_gpu}
    assert (np.asarray(got) == np.asarray(want)).all()
    again = [np.asarray(layer(q, k, v)) for _ in range(20)]
    assert all((x == again[0]).all() for x in again)


_IN_GRAPHS = """
import jax
import jax.numpy as jnp
import numpy as np
import flashmoe_science as fm

keys = jax.random.split(jax.random.key(0), 4)
shapes = (2, 256, 4, 64), (16, 256), (16, 128, 256), (16, 256, 64)
q, router, up, down = (
    jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(shape[-1] ** -0.5)
    for key, shape in zip(keys, shapes)
)

def block(q):
    x = fm.flash_attention(q * jnp.bfloat16(8), q, q, causal=True).reshape(512, 256)
    return x + fm.fused_moe(x, router, up, down, 4)

compiled = jax.jit(block)
for i in range(6):  # made at the second run or later, then run again
    got = compiled(q * jnp.bfloat16(1 + i % 3))
    want = block(q * jnp.bfloat16(1 + i % 3))  # call by call: no graph holds more than one of ours
    assert jnp.abs(want).max() > 0.1
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
"""


def test_jax_inside_cuda_graphs(jax_gpu: Any, tmp_path: Path) -> None:
    """XLA's command buffers: all of a program's calls in one, with the bits of calls outside."""
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={tmp_path} --xla_dump_hlo_as_text "
        "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=+CUSTOM_CALL"
    )
    done = subprocess.run(
        [sys.executable, "-c", _IN_GRAPHS],
        env=os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    dumped = list(tmp_path.glob("*.jit_block.thunk_sequence_after_thunk_passes.txt"))
    if not dumped:
        pytest.skip("this XLA does not say what it put into command buffers")
    lines = dumped[0].read_text().splitlines()
    calls = [line for line in lines if " kCustomCall " in line]
    assert len(calls) >= 2, lines  # attention, experts
    assert any(" kCommandBuffer " in line for line in lines), lines
    assert all(line.startswith(" ") for line in calls), lines  # indented: inside


def test_jax_refuses_the_cpu_kernel_on_a_gpu(jax_gpu: Any) -> None:
    import jax

    q, k, v = (jax.device_put(x, jax_gpu) for x in _arrays("fp16"))
    with pytest.raises(NotImplementedError, match="kernel: cannot be served: cpu"):
        fm.flash_attention(q, k, v, kernel="cpu")


# ---- CuPy ----


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
def test_cupy(cupy: Any, causal: bool | str, layout: str) -> None:
    q, k, v = (cupy.asarray(x) for x in _arrays("fp16", layout))
    out, lse = fm.flash_attention(q, k, v, causal=causal, layout=layout, return_lse=True)
    for result in (out, lse):
        assert type(result) is cupy.ndarray
        assert result.device == q.device
    assert (out.dtype, lse.dtype) == (q.dtype, np.float32)
    reference.assert_accurate(out, lse, q, k, v, causal or "none", layout=layout)
    given = cupy.full_like(out, np.nan)
    assert fm.flash_attention(q, k, v, causal=causal, layout=layout, out=given) is given
    assert (given == out).all()


def test_cupy_views(cupy: Any) -> None:
    """Slices and zero strides; negative ones, which CuPy cannot export, are refused."""
    rng = np.random.default_rng(1)
    packed = cupy.asarray(rng.standard_normal((2, 90, 8, 64)).astype(np.float16))
    q, k = packed[:, :, 2:6], packed[:, ::2, :2]
    v = cupy.broadcast_to(packed[:, ::2, 7:], (2, 45, 2, 64))
    assert 0 in v.strides
    out, lse = fm.flash_attention(q, k, v, causal="top_left", return_lse=True)
    reference.assert_accurate(out, lse, q, k, v, "top_left")
    with pytest.raises(
        ValueError, match=r"^k: got a CuPy array with strides .*; CuPy cannot export"
    ):
        fm.flash_attention(q, packed[:, ::-2, :2], v)


def test_cupy_runs_on_its_current_stream(cupy: Any) -> None:
    q, k, v = (cupy.asarray(x) for x in _arrays("fp16"))
    want = fm.flash_attention(q, k, v)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    late = cupy.zeros_like(q)
    cupy.cuda.Device().synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        torch.cuda._sleep(400_000_000)
    with stream:
        late[...] = q
        got = fm.flash_attention(late, k, v)
    assert not stream.done, "the call waited for its stream"
    stream.synchronize()
    assert (got == want).all()


def test_cupy_gradients(cupy: Any) -> None:
    needs_gradients("cuda:0", GRADIENTS)
    tensors = [x.detach() for x in GRADIENTS.tensors("cuda:0", torch.float16)]
    out, lse = GRADIENTS.attend(*tensors)
    dout = torch.ones_like(out)
    given = [dout, *tensors, out, lse]
    want = fm.flash_attention_backward(*given, causal=True)
    torch.cuda.synchronize()
    arrays = [cupy.asarray(x) for x in given]
    got = fm.flash_attention_backward(*arrays, causal=True)
    assert got.dsinks is None
    for x, y in zip(got[:3], want, strict=False):
        assert type(x) is cupy.ndarray
        assert (x == cupy.asarray(y)).all()
    into = cupy.full_like(arrays[1], np.nan)
    again = fm.flash_attention_backward(*arrays, causal=True, dq=into,
                                        wanted=(False, False, False, False))  # fmt: skip
    assert again.dq is into
    assert (into == got.dq).all()


# ---- DLPack alone ----


class Wrapped:
    """A tensor of a library unknown here. Orders its work on the stream that DLPack names."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_dlpack_objects(dtype: str) -> None:
    q, k, v = (torch.from_numpy(x.astype(np.float32)).to(cases.DTYPES[dtype]).cuda()
               for x in _arrays(dtype))  # fmt: skip
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = torch.empty((2, 6, 130), device="cuda")
    wrapped = [Wrapped(x) for x in (q, k, v, out, lse)]
    result = fm.flash_attention(
        *wrapped[:3], causal=True, return_lse=True, out=wrapped[3], lse=wrapped[4]
    )
    assert result[0] is wrapped[3]
    assert result[1] is wrapped[4]
    torch.cuda.synchronize()
    oracle.assert_accurate(out, lse, q, k, v, True)
    want = fm.flash_attention(q, k, v, causal=True)
    assert torch.equal(memory.bits(out), memory.bits(want))
    with pytest.raises(TypeError, match=r"^out: .* pass out"):
        fm.flash_attention(*wrapped[:3])


def test_gradients_of_dlpack_objects_need_a_workspace() -> None:
    needs_gradients("cuda:0", GRADIENTS)
    tensors = [x.detach() for x in GRADIENTS.tensors("cuda:0", torch.float16)]
    out, lse = GRADIENTS.attend(*tensors)
    given = [Wrapped(x) for x in (out, *tensors, out, lse)]
    into = {name: Wrapped(torch.empty_like(x)) for name, x in zip(("dq", "dk", "dv"), tensors,
                                                                 strict=True)}  # fmt: skip
    with pytest.raises(
        TypeError, match=r"^dout: this call needs \d+ bytes of workspace, but .*Wrap"
    ):
        fm.flash_attention_backward(*given, causal=True, **into)


def test_frameworks_are_not_mixed(cupy: Any) -> None:
    q, k, v = (torch.from_numpy(x).cuda() for x in _arrays("fp16"))
    with pytest.raises(TypeError, match=r"^k: got cupy"):
        fm.flash_attention(q, cupy.asarray(k), v)
