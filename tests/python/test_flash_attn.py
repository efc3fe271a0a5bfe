"""flashmoe_science.flash_attn: FlashAttention 2's functions, results and gradients."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pytest
from reference import assert_accurate
from reference_backward import assert_gradients_accurate

torch = pytest.importorskip("torch", minversion="2.6")

from flashmoe_science import flash_attn  # noqa: E402
from flashmoe_science.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)

OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
TENSORS = {
    "flash_attn_func": ["q", "k", "v"],
    "flash_attn_qkvpacked_func": ["qkv"],
    "flash_attn_kvpacked_func": ["q", "kv"],
}
# What is said, and what it means as flash_attention and the reference have it.
MEANINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"softmax_scale": 0.3, "softcap": 2.0}, {"scale": 0.3, "softcap": 2.0}),
    ({"softcap": -1.0, "deterministic": True}, {}),
    ({"window_size": (5, 3)}, {"window": (5, 3)}),
    ({"window_size": (-1, 0)}, {"window": (None, 0)}),
    ({"window_size": (0, -1)}, {"window": (0, None)}),
    ({"window_size": (4, 9), "causal": True}, {"window": (4, None), "causal": True}),
]


def normal(*shape: int, seed: int = 0, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(dtype: Any = torch.float32) -> list[Any]:
    """q, k, v and dout: grouped heads, fewer queries than keys."""
    shapes = [(2, 17, 4, 16), (2, 29, 2, 16), (2, 29, 2, 16), (2, 17, 4, 16)]
    return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def leaves(*tensors: Any) -> list[Any]:
    return [x.clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("name", TENSORS)
def test_arguments_are_flash_attentions(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    required = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty]
    assert required == TENSORS[name]
    options = {n: p.default for n, p in parameters.items() if n not in required}
    assert list(options.items()) == list(OPTIONS.items())
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


def test_what_is_not_there_is_no_name() -> None:
    assert sorted(TENSORS) == flash_attn.__all__
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        with pytest.raises(ImportError, match=f"cannot import name '{name}'"):
            exec(f"from flashmoe_science.flash_attn import {name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("said", "meant"), MEANINGS, ids=str)
def test_results_and_gradients(said: dict[str, Any], meant: dict[str, Any], dtype: Any) -> None:
    q, k, v, dout = inputs(dtype)
    given = leaves(q, k, v)
    out, lse, probabilities = flash_attn_func(*given, **said, return_attn_probs=True)
    assert_accurate(out, lse, q, k, v, **meant)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    # As FlashAttention 2.7 and newer without dropout.
    assert probabilities.shape == (0,)
    assert probabilities.dtype == dtype
    assert torch.equal(flash_attn_func(q, k, v, **said), out)
    gradients = torch.autograd.grad(out, given, dout)
    assert_gradients_accurate(gradients, dout, q, k, v, **meant)


def test_options_by_position() -> None:
    q, k, v, _ = inputs()
    how = (0.0, 0.3, True, (6, -1), 3.0, None, True, True)
    out, lse, _ = flash_attn_func(q, k, v, *how)
    assert_accurate(out, lse, q, k, v, True, window=(6, None), scale=0.3, softcap=3.0)
    kv = torch.stack([k, v], 2)
    assert torch.equal(flash_attn_kvpacked_func(q, kv, *how)[0], out)
    alone = flash_attn_func(k, k, v, *how)
    packed = flash_attn_qkvpacked_func(torch.stack([k, k, v], 2), *how)
    assert all(map(torch.equal, alone, packed))


def test_a_query_that_sees_nothing() -> None:
    q, k, *_ = inputs()
    out, lse, _ = flash_attn_func(k, q[:, :, :2], q[:, :, 2:], causal=True, return_attn_probs=True)
    assert (out[:, :12] == 0).all()
    assert (lse[:, :, :12] == -torch.inf).all()


def test_the_log_sum_exp_has_a_gradient() -> None:
    q, k, v, dout = inputs()
    dlse = normal(2, 4, 17, seed=9)
    given = leaves(q, k, v)
    out, lse, _ = flash_attn_func(*given, causal=True, return_attn_probs=True)
    gradients = torch.autograd.grad((out, lse), given, (dout, dlse))
    assert_gradients_accurate(gradients, dout, q, k, v, dlse, causal=True)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_a_packed_gradient_of_keys_and_values(wanted: tuple[bool, bool]) -> None:
    q, k, v, dout = inputs(torch.bfloat16)
    given = leaves(q, torch.stack([k, v], 2))
    for x, needed in zip(given, wanted, strict=True):
        x.requires_grad_(needed)
    flash_attn_kvpacked_func(*given, causal=True).backward(dout)
    dq, dkv = (x.grad for x in given)
    assert [x is not None for x in (dq, dkv)] == list(wanted)
    dk, dv = (None, None) if dkv is None else (dkv[:, :, 0], dkv[:, :, 1])
    assert_gradients_accurate((dq, dk, dv), dout, q, k, v, causal=True)


def test_a_packed_gradient_of_all_three() -> None:
    qkv = normal(2, 21, 3, 4, 24).requires_grad_()
    dout = normal(2, 21, 4, 24, seed=1)
    out = flash_attn_qkvpacked_func(qkv, window_size=(7, 7))
    q, k, v = qkv.detach().unbind(2)
    assert_accurate(out, None, q, k, v, window=(7, 7))
    (dqkv,) = torch.autograd.grad(out, qkv, dout)
    assert dqkv.shape == qkv.shape
    assert dqkv.is_contiguous()
    assert_gradients_accurate(dqkv.unbind(2), dout, q, k, v, window=(7, 7))


def test_packed_tensors_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    real = flash_attn.flash_attention

    def noting(*tensors: Any, **options: Any) -> Any:
        found.append([x.data_ptr() for x in tensors])
        return real(*tensors, **options)

    monkeypatch.setattr(flash_attn, "flash_attention", noting)
    qkv = normal(2, 5, 3, 4, 16)
    flash_attn_qkvpacked_func(qkv)
    q, kv = normal(2, 5, 4, 16), normal(2, 5, 2, 4, 16)
    flash_attn_kvpacked_func(q, kv)
    assert found == [
        [qkv[:, :, i].data_ptr() for i in range(3)],
        [q.data_ptr(), *(kv[:, :, i].data_ptr() for i in range(2))],
    ]


def test_double_precision() -> None:
    """FlashAttention has none; here torch's own check of gradients can be used."""
    qkv = normal(1, 5, 3, 2, 8, dtype=torch.float64).requires_grad_()

    def call(packed: Any) -> Any:
        return flash_attn_qkvpacked_func(packed, causal=True, return_attn_probs=True)[:2]

    assert torch.autograd.gradcheck(call, [qkv])


def test_compiled_in_one_graph() -> None:
    def loss(q: Any, kv: Any) -> Any:
        return flash_attn_kvpacked_func(q, kv, causal=True, window_size=(6, 0)).square().sum()

    q, k, v, _ = inputs()
    given = leaves(q, torch.stack([k, v], 2))
    want = torch.autograd.grad(loss(*given), given)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for x, y in zip(torch.autograd.grad(compiled(*given), given), want, strict=True):
        torch.testing.assert_close(x, y)


def test_what_is_not_there_is_refused_with_a_sentence() -> None:
    q, k, v, _ = inputs()
    kv, qkv = torch.stack([k, v], 2), torch.stack([k, k, v], 2)
    with pytest.raises(NotImplementedError, match=r"^dropout_p: got 0\.1, accepted is 0\.0"):
        flash_attn_func(q, k, v, 0.1)
    with pytest.raises(NotImplementedError, match=r"^alibi_slopes: got slopes, accepted is None"):
        flash_attn_kvpacked_func(q, kv, alibi_slopes=torch.ones(4))
    with pytest.raises(ValueError, match=r"^qkv: got shape \(2, 29, 2, 2, 16\), accepted is \[bat"):
        flash_attn_qkvpacked_func(kv)
    with pytest.raises(ValueError, match=r"^kv: got shape .*accepted is \[batch, seq, 2, heads, d"):
        flash_attn_kvpacked_func(q, qkv)
    with pytest.raises(TypeError, match=r"^qkv: got ndarray, accepted is a torch\.Tensor"):
        flash_attn_qkvpacked_func(np.zeros((1, 2, 3, 4, 8)))
    with pytest.raises(
        ValueError, match=r"^q: its head dimension is 12, accepted are multiples of 8"
    ):
        flash_attn_func(q[..., :12], k[..., :12], v[..., :12])
