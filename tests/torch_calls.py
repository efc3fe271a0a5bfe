"""Calls of every operator of torch.ops.flashmoe, for tests on any device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flashmoe_science as fm
import pytest
import torch
from flashmoe_science import _autograd, _core


@dataclasses.dataclass(frozen=True)
class Call:
    """One function of flashmoe_science with its options, on tensors for a number of tokens."""

    name: str
    function: Callable[..., Any]
    operator: str
    """Which of torch.ops.flashmoe it becomes."""
    tensors: Callable[[int, str, torch.dtype], tuple[Any, ...]]
    """Makes tensors from tokens, device and dtype."""

    def __str__(self) -> str:
        return self.name

    def __call__(self, *tensors: Any) -> Any:
        return self.function(*tensors)


HIDDEN, INNER, EXPERTS, TOP_K = 32, 24, 8, 2


def normal(shape: tuple[int, ...], device: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return values.to(device=device, dtype=dtype)


def _qkv(tokens: int, device: str, dtype: torch.dtype, heads_first: bool = False) -> Any:
    shapes = ((2, tokens, 4, 16), (2, tokens + 3, 2, 16), (2, tokens + 3, 2, 24))
    made = (normal(s, device, dtype, i) for i, s in enumerate(shapes))
    return tuple(x.transpose(1, 2) if heads_first else x for x in made)


def _qkv_and_sinks(tokens: int, device: str, dtype: torch.dtype) -> Any:
    return *_qkv(tokens, device, dtype), normal((4,), device, torch.float32, 3)


def _partials(tokens: int, device: str, dtype: torch.dtype) -> Any:
    outs = normal((3, 2, tokens, 4, 16), device, dtype)
    return outs, normal((3, 2, 4, tokens), device, torch.float32, 1)


def _two_partials(tokens: int, device: str, dtype: torch.dtype) -> Any:
    """In the other layout, the first of fp32 as what was merged before."""
    outs, lses = _partials(tokens, device, dtype)
    first, second = (x.transpose(1, 2) for x in outs[:2])
    return first.float(), lses[0], second, lses[1]


def _logits(tokens: int, device: str, dtype: torch.dtype) -> Any:
    return (normal((tokens, EXPERTS), device, torch.float32),)


def _biased_logits(tokens: int, device: str, dtype: torch.dtype) -> Any:
    return *_logits(tokens, device, dtype), normal((EXPERTS,), device, torch.float32, 1)


def _ids(tokens: int, device: str, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand((tokens, EXPERTS), generator=generator).argsort(1)[:, :TOP_K]
    weights = torch.rand((tokens, TOP_K), generator=generator)
    return ids.to(device=device, dtype=torch.int32), weights.to(device)


def weights(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    w_gate_up = normal((EXPERTS, 2 * INNER, HIDDEN), device, dtype, 2)
    return w_gate_up, normal((EXPERTS, HIDDEN, INNER), device, dtype, 3)


def _layer(tokens: int, device: str, dtype: torch.dtype) -> Any:
    routing = fm.moe_route_given(*_ids(tokens, device, dtype), num_experts=EXPERTS)
    x = normal((tokens, HIDDEN), device, dtype, 4)
    return (x, *weights(device, dtype), *routing[1:5])


def _gpt_oss(tokens: int, device: str, dtype: torch.dtype) -> Any:
    """Weights as transposed views, biases."""
    x, *rest = _layer(tokens, device, dtype)
    w_up = normal((EXPERTS, HIDDEN, 2 * INNER), device, dtype, 2).transpose(1, 2)
    w_down = normal((EXPERTS, INNER, HIDDEN), device, dtype, 3).transpose(1, 2)
    b_up = normal((EXPERTS, 2 * INNER), device, dtype, 5)
    return x, w_up, w_down, *rest[2:], b_up, normal((EXPERTS, HIDDEN), device, dtype, 6)


def _rows(tokens: int, device: str, dtype: torch.dtype) -> Any:
    offsets = torch.tensor([0, tokens // 2, tokens // 2, tokens], dtype=torch.int32, device=device)
    x = normal((tokens, HIDDEN), device, dtype)
    return x, normal((3, INNER, HIDDEN), device, dtype, 1), offsets


def _padded(tokens: int, device: str, dtype: torch.dtype) -> Any:
    x = normal((3, tokens, HIDDEN), device, dtype)
    counts = torch.full((3,), tokens, dtype=torch.int32, device=device)
    bias = normal((3, INNER), device, dtype, 2)
    return x, normal((3, INNER, HIDDEN), device, dtype, 1), counts, bias


def _whole(tokens: int, device: str, dtype: torch.dtype) -> Any:
    x = normal((2, tokens, HIDDEN), device, dtype, 4)
    return x, normal((EXPERTS, HIDDEN), device, dtype, 5), *weights(device, dtype)


def _of_logits(tokens: int, device: str, dtype: torch.dtype) -> Any:
    x, router, *experts = _whole(tokens, device, dtype)
    return x, x @ router.T, *experts


def _routing(*parts: Any) -> fm.MoeRouting:
    return fm.MoeRouting(None, *parts)


def calls(module: Any) -> tuple[Call, ...]:
    """Calls of the functions of flashmoe_science, or of flashmoe_science.torch."""
    attend, route, given = module.flash_attention, module.moe_route, module.moe_route_given
    merge = module.merge_states
    forward, product, fused = module.moe_forward, module.grouped_product, module.fused_moe
    oss = {"gate": "interleaved", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
    return (
        Call("attention", lambda q, k, v: attend(q, k, v, causal=True), "attention", _qkv),
        Call(
            "attention-with-sinks",
            lambda q, k, v, sinks: attend(q, k, v, sinks=sinks),
            "attention", _qkv_and_sinks,
        ),
        Call(
            "attention-with-lse",
            lambda q, k, v: attend(
                q, k, v, causal="top_left", window=(5, None), scale=0.3, softcap=2.0, layout="bhsd",
                return_lse=True,
            ),
            "attention_with_lse", lambda *a: _qkv(*a, heads_first=True),
        ),
        Call("merge", lambda outs, lses: merge(outs, lses), "merge_states", _partials),
        Call(
            "merge-of-two-with-lse",
            lambda a, lse_a, b, lse_b: merge(
                (a, b), [lse_a, lse_b], layout="bhsd", dtype=torch.float16, return_lse=True
            ),
            "merge_states_with_lse", _two_partials,
        ),
        Call("route", lambda z: tuple(route(z, TOP_K, renormalize=True))[:5], "moe_route", _logits),
        Call(
            "route-with-lse",
            lambda z, b: tuple(
                route(
                    z, TOP_K, scoring="sigmoid", selection_bias=b, num_groups=4, top_groups=2,
                    scale=2.5, return_lse=True,
                )
            ),
            "moe_route_with_lse", _biased_logits,
        ),
        Call(
            "route-given",
            lambda i, w: tuple(
                given(i, w, num_experts=EXPERTS - 2, renormalize=True, scale=2.5)
            )[:5],
            "moe_route_given", _ids,
        ),
        Call(
            "forward", lambda x, up, down, *r: forward(x, up, down, _routing(*r)), "moe_forward",
            _layer,
        ),
        Call(
            "forward-with-pre-activation",
            lambda x, up, down, w, o, p, s, b_up, b_down: forward(
                x, up, down, _routing(w, o, p, s), b_gate_up=b_up, b_down=b_down,
                return_pre_activation=True, **oss,
            ),
            "moe_forward_with_pre_activation", _gpt_oss,
        ),
        Call(
            "product", lambda x, w, o: product(x, w, offsets=o), "grouped_product", _rows
        ),
        Call(
            "product-of-padded", lambda x, w, c, b: product(x, w, counts=c, bias=b),
            "grouped_product", _padded,
        ),
        Call(
            "fused", lambda x, r, up, down: fused(x, r, up, down, TOP_K, renormalize=True),
            "fused_moe", _whole,
        ),
        Call(
            "fused-of-logits",
            lambda x, z, up, down: fused(x, None, up, down, TOP_K, logits=z), "fused_moe",
            _of_logits,
        ),
    )  # fmt: skip


def refuse_gradients(monkeypatch: pytest.MonkeyPatch, dim: int) -> list[tuple[int, ...]]:
    """Has the library compute no backward of a head dimension. Returned are the shapes of q that it
    has been asked about."""
    asked: list[tuple[int, ...]] = []
    real = _core.plan

    def plan(operation: str, tensors: Any, options: Any) -> Any:
        if operation == "attention_backward":
            asked.append(tensors["q"][0])
            if asked[-1][-1] == dim:
                raise fm.UnsupportedError(f"sm0: head dimension {dim}")
        return real(operation, tensors, options)

    monkeypatch.setattr(_core, "plan", plan)
    monkeypatch.setattr(_autograd, "_kept_reasons", {})
    return asked


def assert_same(got: Any, want: Any) -> None:
    """The same bits, shapes and dtypes."""
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.device == b.device
        assert torch.equal(a, b)


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps what reaches the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("flashmoe."):
            self.seen.append((func, args))
        return func(*args, **(kwargs or {}))
