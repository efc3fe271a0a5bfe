"""Attention with a bias or a mask of pairs on the GPU, forward and backward, against float64."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import numpy as np
import pairs
import pytest
import torch
from reference import assert_accurate
from reference_backward import assert_gradients_accurate

pytestmark = pytest.mark.gpu

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Case:
    """Random tensors of a call on the GPU."""

    def __init__(
        self, dtype: str, *, batch: int = 2, seq: tuple[int, int] = (200, 333),
        heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (64, 64), seed: int = 0,
        **options: Any,
    ) -> None:  # fmt: skip
        self.dtype = DTYPES[dtype]
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.q = self.normal(batch, seq[0], heads[0], dims[0])
        self.k = self.normal(batch, seq[1], heads[1], dims[0])
        self.v = self.normal(batch, seq[1], heads[1], dims[1])
        self.dout = self.normal(batch, seq[0], heads[0], dims[1])
        self.full = (batch, heads[0], seq[0], seq[1])
        self.options = options
        self.sinks: torch.Tensor | None = None
        self.backward_kernel: str | None = None

    def normal(self, *shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=self.generator, device="cuda", dtype=torch.float32)
        return x.to(self.dtype)

    def bias(self, kind: str, one: str, how: str = "ones") -> torch.Tensor:
        shape = pairs.extents(self.full, one)
        x = pairs.random_bias(self.rng, shape, np.dtype(np.float32))
        made = torch.from_numpy(np.ascontiguousarray(x)).cuda()
        return self.as_given(made.to(self.dtype) if kind == "q" else made, how)

    def mask(self, one: str, how: str = "ones", of: Any = np.bool_) -> torch.Tensor:
        x = pairs.random_mask(self.rng, pairs.extents(self.full, one), of)
        return self.as_given(torch.from_numpy(np.ascontiguousarray(x)).cuda(), how)

    def as_given(self, x: torch.Tensor, how: str) -> torch.Tensor:
        if how == "ones":
            return x
        if how == "strides":
            return x.expand(self.full)
        spread = torch.zeros([2 * n for n in x.shape], dtype=x.dtype, device=x.device)
        view = spread[1::2, 1::2, 1::2, 1::2]
        view.copy_(x)
        return view

    def run(self) -> tuple[Any, Any, Any]:
        """(out, lse, gradients) into poisoned outputs, by the kernels that are for them."""
        out = torch.full((*self.q.shape[:3], self.v.shape[3]), torch.nan, dtype=self.dtype,
                         device="cuda")  # fmt: skip
        lse = torch.full(self.full[:3], torch.nan, device="cuda")
        given = self.options | {"sinks": self.sinks}
        fm.flash_attention(self.q, self.k, self.v, **given, out=out, lse=lse, return_lse=True)
        assert "_sm89_" in fm.last_launches()[0].kernel
        assert fm.last_launches()[0].kernel.endswith("_biased")
        assert fm.last_launches()[0].local_bytes == 0
        made = {f"d{name}": torch.full_like(x, torch.nan)
                for name, x in zip("qkv", (self.q, self.k, self.v), strict=True)}  # fmt: skip
        made_by = given | {"kernel": self.backward_kernel}
        fm.flash_attention_backward(self.dout, self.q, self.k, self.v, out, lse, **made_by, **made)
        assert "_biased" in fm.last_launches()[1].kernel
        assert fm.last_launches()[1].local_bytes == 0
        return out, lse, (*made.values(), None)

    def check(self) -> tuple[Any, Any, Any]:
        out, lse, made = self.run()
        given = self.options | {"sinks": self.sinks}
        assert_accurate(out, lse, self.q, self.k, self.v, **given)
        sinks = given.pop("sinks")
        assert_gradients_accurate(made, self.dout, self.q, self.k, self.v, None, sinks, **given)
        return out, lse, made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 64), (40, 88), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_bias_and_mask(dtype: str, dims: tuple[int, int], causal: Any) -> None:
    case = Case(dtype, dims=dims, causal=causal)
    case.options["attn_bias"] = case.bias("fp32", "b")
    case.options["attn_mask"] = case.mask("h")
    case.check()


@pytest.mark.parametrize("kind", ["mask", "q", "fp32", "mask and q", "mask and fp32"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_numbers_side_by_side(kind: str, dim: int, causal: Any) -> None:
    """Rows that begin at multiples of 16 bytes are copied so many numbers at a time."""
    softcap = 3.0 if causal else None
    case = Case("bf16", seq=(150, 352), dims=(dim, dim), causal=causal, softcap=softcap)
    if "mask" in kind:
        case.options["attn_mask"] = case.mask("h")
    if kind != "mask":
        case.options["attn_bias"] = case.bias(kind.split()[-1], "")
    case.check()
    # Beside the kernel for GPUs of more shared memory.
    case.backward_kernel = f"attention_backward_sm89_bf16_d{dim}_dv{dim}_biased_ada"
    case.check()


@pytest.mark.parametrize("kind", ["mask", "q", "fp32"])
@pytest.mark.parametrize("begin", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("pitch", [320, 328, 331])
def test_rows_that_begin_anywhere(kind: str, begin: int, pitch: int) -> None:
    """Behind and ahead of each row of a view are numbers that hide nothing and make a NaN."""
    case = Case("fp16", batch=1, seq=(70, 312), heads=(2, 1))
    name, given = (
        ("attn_mask", case.mask("b")) if kind == "mask" else ("attn_bias", case.bias(kind, "b"))
    )
    fill = True if kind == "mask" else torch.nan
    around = torch.full((71 * 2 * pitch,), fill, dtype=given.dtype, device="cuda")
    view = around[begin:].as_strided(case.full, (0, 70 * pitch, pitch, 1))
    view.copy_(given)
    case.options[name] = view
    case.check()
    case.backward_kernel = "attention_backward_sm89_fp16_d64_dv64_biased_ada"
    case.check()


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_steps_that_a_mask_hides(dim: int) -> None:
    """Whole tiles are hidden, of some warps and of all, and whole tiles are not."""
    case = Case("bf16", seq=(256, 512), dims=(dim, dim), window=(300, None))
    mask = torch.ones(case.full, dtype=torch.bool, device="cuda")
    mask[0, :, :, 128:384] = False
    mask[1, :, :32, 64:320] = False
    mask[1, :, 64:80] = False
    case.options["attn_mask"] = mask
    case.check()


@pytest.mark.parametrize("one", pairs.BROADCASTS)
@pytest.mark.parametrize("how", ["ones", "strides", "gaps"])
@pytest.mark.parametrize("keys", [150, 160])
def test_broadcasts(one: str, how: str, keys: int) -> None:
    case = Case("bf16", seq=(70, keys))
    case.options["attn_bias"] = case.bias("q", one, how)
    case.options["attn_mask"] = case.mask(one[::-1][:1], how, np.uint8)
    case.check()


@pytest.mark.parametrize("seed", range(12))
def test_random_calls(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pick = lambda *given: given[rng.integers(len(given))]  # noqa: E731
    group, heads_kv = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    case = Case(
        pick("fp16", "bf16"), batch=int(rng.integers(1, 3)), seed=seed,
        seq=(pick(1, 3, 63, 130, 257), pick(1, 5, 64, 191, 400)),
        heads=(group * heads_kv, heads_kv),
        dims=pick((8, 8), (64, 64), (96, 128), (128, 64), (200, 256)),
        causal=pick(False, "bottom_right", "top_left"), softcap=pick(None, 2.0),
        window=pick(None, (40, None), (3, 0)),
    )  # fmt: skip
    kind = pick("none", "q", "fp32")
    ways = ("ones", "strides", "gaps")
    if kind != "none":
        case.options["attn_bias"] = case.bias(kind, pick(*pairs.BROADCASTS), pick(*ways))
    if kind == "none" or rng.random() < 0.5:
        case.options["attn_mask"] = case.mask(pick(*pairs.BROADCASTS), pick(*ways))
    case.check()


@pytest.mark.parametrize("by", ["attn_bias", "attn_mask"])
@pytest.mark.parametrize("dim", [64, 256])
def test_blind_rows_and_nan_of_hidden_keys(by: str, dim: int) -> None:
    case = Case("bf16", dims=(dim, dim))
    seen = torch.rand(case.full, generator=case.generator, device="cuda") < 0.7
    seen[0, :, :, ::7] = False  # hidden from every query
    seen[0, :, 1] = False  # sees none
    given = seen if by == "attn_mask" else torch.where(seen, 0.0, -torch.inf)
    case.options[by] = given
    case.k[0, ::7] = torch.nan
    case.v[0, ::7] = torch.inf
    case.q[0, 1] = case.dout[0, 1] = torch.nan
    out, lse, made = case.run()
    assert (out[0, 1] == 0).all() and torch.isneginf(lse[0, :, 1]).all()
    for x in (out, *made[:3]):
        assert x.isfinite().all()
    for x in (case.q, case.k, case.v, case.dout):
        x.nan_to_num_(0.0, 0.0)
    assert_accurate(out, lse, case.q, case.k, case.v, **case.options)
    assert_gradients_accurate(made, case.dout, case.q, case.k, case.v, **case.options)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_lowest_finite_bias_hides_nothing(dim: int) -> None:
    case = Case("bf16", dims=(dim, dim))
    lowest = torch.finfo(torch.float32).min
    seen = torch.rand(case.full, generator=case.generator, device="cuda") < 0.5
    seen[:, :, 3] = False
    case.options["attn_bias"] = torch.where(seen, 0.0, lowest)
    case.dout[:, 3] = 0  # as of padding
    out, _, made = case.run()
    flat = case.q.clone()
    flat[:, 3] = 0  # all logits alike
    seen[:, :, 3] = True
    assert_accurate(out, None, flat, case.k, case.v, attn_mask=seen)
    assert_gradients_accurate(made, case.dout, flat, case.k, case.v, attn_mask=seen)


def test_sinks() -> None:
    case = Case("bf16")
    case.options["attn_mask"] = case.mask("h")
    case.options["attn_mask"][0, :, 5] = False
    case.sinks = torch.tensor([-1.0, 0.5, 2.0, 60.0], device="cuda")
    _, lse, _ = case.check()
    assert torch.equal(lse[0, :, 5], case.sinks)


def test_the_same_bits_again() -> None:
    case = Case("fp16", seq=(513, 777), dims=(128, 128), causal="bottom_right")
    case.options["attn_mask"] = case.mask("h")
    first, again = case.run(), case.run()
    for a, b in zip((*first[:2], *first[2][:3]), (*again[:2], *again[2][:3]), strict=True):
        assert torch.equal(a, b)


def test_offsets_beyond_32_bits() -> None:
    case = Case("bf16", batch=1, heads=(2, 2), seq=(140, 64))
    stride = (1 << 31) // 100  # of queries: row 139 is beyond 2^31 bytes
    memory = torch.zeros(139 * stride + 2 * 64, dtype=torch.bool, device="cuda")
    mask = memory.as_strided(case.full, (0, 64, stride, 1))
    mask.copy_(case.mask("b"))
    case.options["attn_mask"] = mask
    case.check()


def test_capture_with_other_masks() -> None:
    case = Case("bf16")
    case.options["attn_mask"] = case.mask("h")
    call = lambda: fm.flash_attention(case.q, case.k, case.v, **case.options)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(2):
        case.options["attn_mask"].copy_(case.mask("h"))
        graph.replay()
        assert torch.equal(out, call())


@pytest.mark.parametrize("added", [False, True])
def test_torchs_scaled_dot_product_attention(added: bool) -> None:
    import flashmoe_science.torch as fmt
    from torch.nn import functional as F

    case = Case("bf16")
    q, k, v = (x.transpose(1, 2) for x in (case.q, case.k, case.v))
    mask = case.bias("q", "h") if added else case.mask("h")
    mask[..., 0] = 0 if added else True
    results = []
    for enter in (False, True):
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        if enter:
            with fmt.sdpa_kernel(strict=True):
                out = F.scaled_dot_product_attention(*tensors, mask, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(*tensors, mask, enable_gqa=True)
        out.backward(case.dout.transpose(1, 2))
        results.append((out.detach(), *(x.grad for x in tensors)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=4e-2, rtol=4e-2)


def test_jaxs_dot_product_attention(jax_gpu: Any) -> None:
    import jax
    import jax.numpy as jnp
    from flashmoe_science.jax import dot_product_attention

    case = Case("bf16", seq=(64, 100))
    to_jax = lambda x: jax.device_put(x.float().cpu().numpy(), jax_gpu)  # noqa: E731
    arrays = [to_jax(x).astype(jnp.bfloat16) for x in (case.q, case.k, case.v)]
    mask, bias = case.mask("h"), case.bias("fp32", "b")
    bias.clamp_(min=-50)
    given = {"mask": jax.device_put(mask.cpu().numpy(), jax_gpu), "bias": to_jax(bias)}

    def loss(*x: Any) -> Any:
        out = dot_product_attention(*x, **given)
        return jnp.sum(out.astype(jnp.float32) * to_jax(case.dout)), out

    made, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    options = {"attn_mask": mask, "attn_bias": bias}
    assert_accurate(np.asarray(out), None, case.q.cpu(), case.k.cpu(), case.v.cpu(),
                    **{n: x.cpu() for n, x in options.items()})  # fmt: skip
    assert_gradients_accurate(
        [*(np.asarray(x) for x in made), None], case.dout.cpu(), case.q.cpu(), case.k.cpu(),
        case.v.cpu(), **{n: x.cpu() for n, x in options.items()},
    )  # fmt: skip


def test_families_that_cannot_say_so() -> None:
    case = Case("bf16")
    mask = case.mask("h")
    for kernel in ("sm90", "sm89_few_rows"):
        with pytest.raises(NotImplementedError, match="attn_mask, which its kernels do not read"):
            fm.flash_attention(case.q, case.k, case.v, attn_mask=mask, kernel=kernel)
