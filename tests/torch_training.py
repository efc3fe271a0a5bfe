"""Training with attention through torch's autograd, on any device: tests/python runs these checks
on the CPU, tests/gpu on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flashmoe_science as fm
import flashmoe_science.torch as fmt
import pytest
import torch
from flashmoe_science import flash_attn
from reference_backward import assert_gradients_accurate
from torch.utils.checkpoint import checkpoint

F = torch.nn.functional
Check = Callable[[str, torch.dtype], None]


def normal(shape: tuple[int, ...], device: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device=device, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of attention, of which every input has a gradient."""

    name: str
    seq_q: int = 130
    seq_k: int = 130
    heads_q: int = 4
    heads_kv: int = 4
    dim: int = 64
    dim_v: int = 64
    sinks: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def layout(self) -> str:
        return str(self.options.get("layout", "bshd"))

    def shape(self, seq: int, heads: int, dim: int) -> tuple[int, ...]:
        return (2, heads, seq, dim) if self.layout == "bhsd" else (2, seq, heads, dim)

    def tensors(self, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        """q, k, v and, if there are some, sinks, which require grad."""
        shapes = (
            self.shape(self.seq_q, self.heads_q, self.dim),
            self.shape(self.seq_k, self.heads_kv, self.dim),
            self.shape(self.seq_k, self.heads_kv, self.dim_v),
        )
        made = [normal(shape, device, dtype, seed) for seed, shape in enumerate(shapes)]
        if self.sinks:
            made.append(normal((self.heads_q,), device, torch.float32, 3))
        return [x.requires_grad_() for x in made]

    def attend(self, *tensors: torch.Tensor, function: Any = fm.flash_attention) -> Any:
        """(out, lse)."""
        q, k, v, *rest = tensors
        sinks = rest[0] if rest else None
        return function(q, k, v, sinks=sinks, return_lse=True, **self.options)


CASES = (
    Case("plain"),
    Case("grouped-causal", seq_k=257, heads_q=8, heads_kv=2, options={"causal": True}),
    Case("top-left", seq_q=200, dim=128, dim_v=128, options={"causal": "top_left"}),
    Case("window-softcap", dim=40, dim_v=88, options={"window": (30, 9), "softcap": 2.0}),
    Case("sinks", heads_q=6, heads_kv=2, sinks=True, options={"causal": True, "layout": "bhsd"}),
    Case("blind-rows", seq_q=200, seq_k=90, dim=128, dim_v=64, options={"causal": True}),
)
GROUPED = CASES[1]


def needs_gradients(device: str, *cases: Case) -> None:
    """Skips where the library computes no backward of such calls on that device."""
    for case in cases:
        try:
            fm.attention_backward_plan_for(
                batch=2, seq_q=case.seq_q, seq_k=case.seq_k, heads_q=case.heads_q,
                heads_kv=case.heads_kv, dim=case.dim, dim_v=case.dim_v, device=device,
            )  # fmt: skip
        except fm.UnsupportedError as refusal:
            pytest.skip(f"gradients: {refusal}")


def strewn(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, the last axis far from contiguous."""
    return x.transpose(1, -1).contiguous().transpose(1, -1)


def weighed(case: Case, *tensors: torch.Tensor) -> torch.Tensor:
    """A number of both outputs."""
    out, lse = case.attend(*tensors)
    return out.float().sin().sum() + lse.where(lse > -torch.inf, 0.0).sum()


def gradients(case: Case, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(weighed(case, *tensors), tensors)


def assert_same_bits(got: Any, want: Any) -> None:
    assert len(got) == len(want)
    assert all(map(torch.equal, got, want))


def assert_follows(got: Any, usual: Any, exact: Any) -> None:
    """max|got - exact| <= 2 max|usual - exact| + 2 ulp, of each of several tensors."""
    for x, y, want in zip(got, usual, exact, strict=True):
        error, allowed = ((a.double() - want).abs().max() for a in (x, y))
        assert error <= 2 * allowed + 2 * torch.finfo(y.dtype).eps * want.abs().max()


# ---- calls -----------------------------------------------------------------------------------


def check_gradients(case: Case, device: str, dtype: torch.dtype) -> None:
    """Checks gradients from a dout in any layout, with the gradient of lse and without; twice, with
    equal bits."""
    tensors = case.tensors(device, dtype)
    out, lse = case.attend(*tensors)
    dout = strewn(normal(out.shape, device, dtype, 4))
    dlse = normal(lse.shape, device, torch.float32, 5).masked_fill(torch.isinf(lse), 0)
    sinks = tensors[3] if case.sinks else None
    for given in (None, dlse):
        outputs, douts = ((out,), (dout,)) if given is None else ((out, lse), (dout, given))
        got = torch.autograd.grad(outputs, tensors, douts, retain_graph=True)
        assert [(x.dtype, x.shape) for x in got] == [(x.dtype, x.shape) for x in tensors]
        assert_gradients_accurate(
            [*got, None][:4], dout, *tensors[:3], given, sinks, **case.options
        )
        again = torch.autograd.grad(outputs, tensors, douts, retain_graph=True)
        assert_same_bits(again, got)


def check_function(device: str, dtype: torch.dtype) -> None:
    """flash_attention_backward, into gradients of its own and of fp32 that are added to."""
    tensors = GROUPED.tensors(device, dtype)
    out, lse = GROUPED.attend(*tensors)
    dout = normal(out.shape, device, dtype, 4)
    want = torch.autograd.grad(out, tensors, dout)
    q, k, v, out, lse = (x.detach() for x in (*tensors, out, lse))
    call = functools.partial(
        fm.flash_attention_backward, dout, q, k, v, out, lse, **GROUPED.options
    )
    assert_same_bits(call()[:3], want)
    sums = {name: torch.ones(x.shape, device=device) for name, x in zip(("dq", "dk", "dv"), want,
                                                                       strict=True)}  # fmt: skip
    call(**sums, accumulate=True)
    for got, x in zip(sums.values(), want, strict=True):
        torch.testing.assert_close(got, x.float() + 1, atol=2e-2, rtol=2e-2)


def check_compiled(device: str, dtype: torch.dtype) -> None:
    """In one graph, for every length."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *t: weighed(GROUPED, *t), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for seq in (130, 77):
        tensors = dataclasses.replace(GROUPED, seq_q=seq).tensors(device, dtype)
        got = torch.autograd.grad(compiled(*tensors), tensors)
        assert_same_bits(got, gradients(GROUPED, tensors))


def check_checkpoints(device: str, dtype: torch.dtype) -> None:
    tensors = GROUPED.tensors(device, dtype)
    want = gradients(GROUPED, tensors)
    for reentrant in (False, True):
        loss: Any = checkpoint(functools.partial(weighed, GROUPED), *tensors,
                               use_reentrant=reentrant)  # fmt: skip
        for x in tensors:
            x.grad = None
        loss.backward()
        assert_same_bits([x.grad for x in tensors], want)


def check_autocast(device: str, dtype: torch.dtype) -> None:
    tensors = GROUPED.tensors(device, torch.float32)
    low = [x.detach().to(dtype).requires_grad_() for x in tensors]
    with torch.autocast(torch.device(device).type, dtype):
        out, _ = GROUPED.attend(*tensors)
    want, _ = GROUPED.attend(*low)
    assert torch.equal(out, want)
    got = torch.autograd.grad(out.float().sin().sum(), tensors)
    assert_same_bits(got, [x.float() for x in torch.autograd.grad(want.float().sin().sum(), low)])


def check_sdpa(device: str, dtype: torch.dtype) -> None:
    """torch's own calls, routed to ours."""
    shapes = ((2, 8, 130, 64), (2, 2, 130, 64), (2, 2, 130, 64))
    tensors = [normal(x, device, dtype, i).requires_grad_() for i, x in enumerate(shapes)]
    dout = normal((2, 8, 130, 64), device, dtype, 4)

    def of(tensors: list[torch.Tensor], function: Any, dout: torch.Tensor = dout) -> Any:
        out = function(*tensors, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, tensors, dout)

    exact = of([x.detach().double().requires_grad_() for x in tensors],
               F.scaled_dot_product_attention, dout.double())  # fmt: skip
    usual = of(tensors, F.scaled_dot_product_attention)
    got = of(tensors, fmt.scaled_dot_product_attention)
    assert_follows(got, usual, exact)
    with fmt.sdpa_kernel(strict=True):
        assert_same_bits(of(tensors, F.scaled_dot_product_attention), got)


def check_flash_attn(device: str, dtype: torch.dtype) -> None:
    """FlashAttention's names, with packed tensors and without."""
    q, k, v = (normal((2, 100, 4, 64), device, dtype, i).requires_grad_() for i in range(3))
    dout = normal((2, 100, 4, 64), device, dtype, 4)
    how: dict[str, Any] = {"causal": True, "window_size": (40, -1)}
    got = torch.autograd.grad(flash_attn.flash_attn_func(q, k, v, **how), (q, k, v), dout)
    known: dict[str, Any] = {"causal": True, "window": (40, None)}
    assert_gradients_accurate([*got, None], dout, q, k, v, **known)
    qkv = torch.stack([q, k, v], 2).detach().requires_grad_()
    out = flash_attn.flash_attn_qkvpacked_func(qkv, **how)
    (packed,) = torch.autograd.grad(out, qkv, dout)
    assert_same_bits(packed.unbind(2), got)
    kv = torch.stack([k, v], 2).detach().requires_grad_()
    out = flash_attn.flash_attn_kvpacked_func(q, kv, **how)
    dq, dkv = torch.autograd.grad(out, (q, kv), dout)
    assert_same_bits((dq, *dkv.unbind(2)), got)


def check_transforms(device: str, dtype: torch.dtype) -> None:
    """torch.func.grad, and vmap of it."""
    q, k, v = (x.detach() for x in GROUPED.tensors(device, dtype))

    def loss(*tensors: torch.Tensor) -> Any:
        return GROUPED.attend(*tensors)[0].float().sin().sum()

    want = torch.func.grad(loss, (0, 1, 2))(q, k, v)
    taped = [x.clone().requires_grad_() for x in (q, k, v)]
    assert_same_bits(want, torch.autograd.grad(loss(*taped), taped))
    one = torch.func.grad(lambda *t: loss(*(x[None] for x in t)), (0, 1, 2))
    assert_same_bits(torch.func.vmap(one)(q, k, v), want)


# ---- models ----------------------------------------------------------------------------------


def check_module(device: str, dtype: torch.dtype) -> None:
    """FlashMoE's MultiheadAttention, with torch's own weights and gradients."""
    torch.manual_seed(0)
    made = [kind(128, 2, batch_first=True, device=device, dtype=dtype)
            for kind in (torch.nn.MultiheadAttention, fmt.MultiheadAttention)]  # fmt: skip
    made[1].load_state_dict(made[0].state_dict())
    exact = torch.nn.MultiheadAttention(128, 2, batch_first=True, device=device).double()
    exact.load_state_dict(made[0].state_dict())

    def of(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
        module(x, x, x, need_weights=False)[0].square().sum().backward()
        return [parameter.grad for parameter in module.parameters()]

    x = normal((2, 99, 128), device, dtype)
    want = of(exact, x.double())
    assert_follows(of(made[1], x), of(made[0], x), want)


CHECKS: dict[str, Check] = {
    "function": check_function,
    "compiled": check_compiled,
    "checkpoints": check_checkpoints,
    "autocast": check_autocast,
    "sdpa": check_sdpa,
    "flash-attn": check_flash_attn,
    "transforms": check_transforms,
    "module": check_module,
}
