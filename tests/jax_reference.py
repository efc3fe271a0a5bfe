"""Attention on JAX arrays beside JAX's own, jax.nn.dot_product_attention, on the same device.

The rule is that of tests/reference.py, where `ref` is JAX's in fp32 with exact products, and
`plain` JAX's in the inputs' dtype:

    max|ours - ref| <= 2 max|plain - ref| + ulp

In fp32 both are of one precision and differ by the order of their sums.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import reference

_FP32_SUMS = 1e-5


class Case(NamedTuple):
    batch: int = 2
    seq_q: int = 130
    seq_k: int = 130
    heads_q: int = 4
    heads_kv: int = 4
    dim: int = 64
    causal: bool = False
    window: tuple[int, int] | None = None
    """Where seq_q is seq_k: JAX's stands at the first key, ours at the last."""
    scale: float | None = None

    def __str__(self) -> str:
        changed = (f"{n}={x}" for n, x in self._asdict().items() if x != self._field_defaults[n])
        return ",".join(changed) or "plain"

    @property
    def ours(self) -> dict[str, Any]:
        """Options of flash_attention. JAX's causal mask is ours from the top left."""
        causal = "top_left" if self.causal else False
        return {"causal": causal, "window": self.window, "scale": self.scale}

    @property
    def jaxs(self) -> dict[str, Any]:
        # In JAX 0.7 a window counts beside a mask alone.
        mask = None if self.window is None else np.ones((1, 1, self.seq_q, self.seq_k), bool)
        return {
            "is_causal": self.causal, "local_window_size": self.window, "scale": self.scale,
            "mask": mask, "implementation": "xla",
        }  # fmt: skip

    def arrays(self, dtype: str, device: Any, *outer: int) -> list[Any]:
        """q, k and v, with outer dimensions if there are any."""
        import jax

        rng = np.random.default_rng(0)
        shapes = (
            (*outer, self.batch, self.seq_q, self.heads_q, self.dim),
            (*outer, self.batch, self.seq_k, self.heads_kv, self.dim),
            (*outer, self.batch, self.seq_k, self.heads_kv, self.dim),
        )
        arrays = (rng.standard_normal(shape, np.float32) for shape in shapes)
        return [jax.device_put(x.astype(reference.DTYPES[dtype]), device) for x in arrays]


CASES = [
    Case(),
    Case(causal=True),
    Case(seq_q=70, causal=True),
    Case(seq_q=1, seq_k=300),
    Case(heads_q=8, heads_kv=2, causal=True),
    Case(heads_q=6, heads_kv=1, dim=128),
    Case(window=(20, 5)),
    Case(heads_kv=2, window=(33, 0), causal=True),
    Case(dim=80, scale=0.3),
    Case(batch=1, seq_q=500, seq_k=500, dim=256, heads_kv=2, causal=True),
]


@functools.cache
def _attention(case: Case) -> Any:
    """JAX's, compiled once: operation by operation each is a compilation of its own."""
    import jax
    import jax.numpy as jnp

    def attention(q: Any, k: Any, v: Any) -> Any:
        # A product of fp16 with one row, which XLA turns into a sum, it then refuses on a GPU.
        many = jnp.repeat(q, 2, axis=1) if case.seq_q == 1 else q
        return jax.nn.dot_product_attention(many, k, v, **case.jaxs)[:, : case.seq_q]

    return jax.jit(attention)


def assert_as_jax(out: Any, q: Any, k: Any, v: Any, case: Case) -> None:
    import jax
    import jax.numpy as jnp

    attention = _attention(case)
    with jax.default_matmul_precision("highest"):
        ref = np.asarray(attention(*(x.astype(jnp.float32) for x in (q, k, v))))
    plain = np.asarray(attention(q, k, v)).astype(np.float32)
    assert (out.shape, out.dtype, out.devices()) == (ref.shape, q.dtype, q.devices())
    spacing = reference.ulp(np.dtype(q.dtype), float(np.abs(ref).max()))
    allowed = 2 * np.abs(plain - ref).max() + spacing
    if q.dtype == np.float32:
        allowed = _FP32_SUMS * np.abs(ref).max()
    error = np.abs(np.asarray(out).astype(np.float32) - ref).max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
    assert np.abs(ref).max() > 10 * allowed  # or it would say nothing
