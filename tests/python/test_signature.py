"""How flash_attention is called, and what it asks of torch."""

from __future__ import annotations

import gc
import inspect
import itertools
import pickle
import sys
from collections.abc import Callable
from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
from flashmoe_science import _core
from flashmoe_science.attention import SEQUENCES

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((1, 6, 2, 16), np.float32)
K = RNG.standard_normal((1, 9, 2, 16), np.float32)
V = RNG.standard_normal((1, 9, 2, 16), np.float32)
OPTIONS = {
    name: parameter
    for name, parameter in inspect.signature(fm.flash_attention).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
# The native function has those of ragged, padded and paged batches in one tuple, and these behind.
PAIRS = ("attn_bias", "attn_mask", "prior_out", "prior_lse")
DENSE = {name: parameter for name, parameter in OPTIONS.items() if name not in (*SEQUENCES, *PAIRS)}


def test_it_looks_like_a_function_of_the_package() -> None:
    function: Any = fm.flash_attention
    parameters = inspect.signature(function).parameters
    assert ", ".join(str(p.replace(annotation=p.empty)) for p in parameters.values()) == (
        "q, k, v, causal=False, window=None, scale=None, softcap=None, sinks=None, "
        "attn_bias=None, attn_mask=None, layout='bshd', return_lse=False, out=None, lse=None, "
        "kernel=None, stream=None, "
        "cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, k_begin=None, "
        "batch_index=None, page_table=None, q_offset=None, k_scale=None, v_scale=None, "
        "max_seqlen_q=None, max_seqlen_k=None, split_size=None, prior_out=None, prior_lse=None"
    )
    assert {*DENSE, *PAIRS, *SEQUENCES} == set(OPTIONS)
    assert list(OPTIONS) == list(parameters)[3:]
    assert (function.__name__, function.__module__) == (
        "flash_attention", "flashmoe_science.attention",
    )  # fmt: skip
    assert function.__doc__.startswith("Exact attention: out = softmax(scale * q k^T) v")
    assert pickle.loads(pickle.dumps(function)) is function


# All of the same call.
def ways_to_call() -> list[Callable[[Callable[..., Any]], Any]]:
    plain = {"causal": "top_left"}
    composed = {"".join(("cau", "sal")): "top_left"}  # a name that is not interned

    class Name(str):
        __slots__ = ()

    return [
        lambda f: f(Q, K, V, causal="top_left"),
        lambda f: f(Q, K, v=V, causal="top_left"),
        lambda f: f(v=V, causal="top_left", k=K, q=Q),
        lambda f: f(*(Q, K, V), **plain),
        lambda f: f(Q, K, V, **composed),
        lambda f: f(Q, K, V, **{Name("causal"): "top_left"}),
        lambda f: f(Q, K, V, stream=None, kernel=None, lse=None, out=None, return_lse=False,
                    layout="bshd", sinks=None, softcap=None, scale=None, window=None,
                    causal="top_left"),
    ]  # fmt: skip


@pytest.mark.parametrize("call", ways_to_call())
def test_every_way_to_pass_an_argument(call: Callable[..., Any]) -> None:
    options = (parameter.default for parameter in DENSE.values())
    want = _core.flash_attention(Q, K, V, "top_left", *itertools.islice(options, 1, None))
    assert not np.array_equal(want, fm.flash_attention(Q, K, V))
    np.testing.assert_array_equal(call(fm.flash_attention), want)


def test_every_option_reaches_its_parameter() -> None:
    out, lse = np.empty_like(Q), np.empty((1, 2, 6), np.float32)
    options: dict[str, Any] = {
        "causal": "top_left", "window": (2, 0), "scale": 0.3, "softcap": 9.0,
        "sinks": np.array([0.5, -1.0], np.float32), "layout": "bshd",
        "return_lse": True, "out": out, "lse": lse, "kernel": "cpu", "stream": 0,
    }  # fmt: skip
    assert options.keys() == DENSE.keys()
    pairs = {"attn_bias": RNG.standard_normal((1, 2, 6, 9), np.float32),
             "attn_mask": RNG.random((1, 1, 6, 9)) < 0.9}  # fmt: skip
    want = _core.flash_attention(Q, K, V, *options.values(), **pairs)
    options |= pairs
    assert want[0] is out
    assert want[1] is lse
    kept = out.copy(), lse.copy()
    rng = np.random.default_rng(1)
    for _ in range(30):
        names = rng.permutation(list(options))
        out.fill(np.nan)
        lse.fill(np.nan)
        got = fm.flash_attention(Q, K, V, **{str(name): options[name] for name in names})
        assert got[0] is out
        assert got[1] is lse
        np.testing.assert_array_equal(out, kept[0])
        np.testing.assert_array_equal(lse, kept[1])
    wrong: dict[str, Any] = {
        "causal": 7, "window": 3, "scale": "big", "softcap": -1.0, "sinks": 3, "layout": "sbhd",
        "return_lse": 1, "out": 3, "lse": 3, "kernel": "sm1", "stream": "now", "attn_bias": 3,
        "attn_mask": 3,
    }  # fmt: skip
    assert wrong.keys() == options.keys()
    for name in SEQUENCES:
        wrong[name] = "many"
    for name, value in wrong.items():
        with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
            fm.flash_attention(Q, K, V, **{name: value})


def test_nothing_leaks() -> None:
    scale = 0.123456
    fm.flash_attention(Q, K, V, scale=scale)
    before = [sys.getrefcount(x) for x in (Q, K, V, scale)]
    for _ in range(100):
        fm.flash_attention(Q, K, V, scale=scale)
    gc.collect()
    assert [sys.getrefcount(x) for x in (Q, K, V, scale)] == before
    with pytest.raises(ValueError, match=r"^scale: "):
        fm.flash_attention(Q, K, V, scale=-1.0)
    references = sys.getrefcount(Q)
    for _ in range(100):
        with pytest.raises(ValueError, match=r"^scale: "):
            fm.flash_attention(Q, K, V, scale=-1.0)
        with pytest.raises(TypeError):
            fm.flash_attention(Q, K, V, Q)
    gc.collect()
    assert sys.getrefcount(Q) == references


def test_gradients_are_recorded_whatever_the_calls_before_found() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x.copy()) for x in (Q, K, V))
    graded = {"q": q.clone().requires_grad_(), "k": k.clone().requires_grad_(),
              "v": torch.nn.Parameter(v.clone())}  # fmt: skip
    want = fm.flash_attention(q, k, v)
    for calls_between in (0, 1, 2, 16):
        for name, tensor in graded.items():
            tensors = {"q": q, "k": k, "v": v, name: tensor}
            for mode in (torch.no_grad(), torch.inference_mode()):
                with mode:
                    for _ in range(calls_between + 1):
                        made = fm.flash_attention(**tensors)
                        assert torch.equal(made, want) and not made.requires_grad
                assert fm.flash_attention(**tensors).requires_grad
            for _ in range(calls_between):
                assert not fm.flash_attention(q, k, v).requires_grad
            assert fm.flash_attention(**tensors).requires_grad
    out = torch.empty_like(q).requires_grad_()
    with pytest.raises(ValueError, match=r"^out: requires grad"):
        fm.flash_attention(q, k, v, out=out)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1]).requires_grad_()
    with pytest.raises(ValueError, match=r"^lse: requires grad"):
        fm.flash_attention(q, k, v, return_lse=True, lse=lse)
    with torch.no_grad():
        assert fm.flash_attention(q, k, v, out=out) is out
    assert torch.equal(out.detach(), want)


def test_a_subclass_says_itself_whether_it_requires_grad() -> None:
    torch = pytest.importorskip("torch")

    class Own(torch.Tensor):  # type: ignore[misc, name-defined]
        answer: Any = True

        @property
        def requires_grad(self) -> Any:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    q, k, v = (torch.from_numpy(x.copy()) for x in (Q, K, V))
    own = k.as_subclass(Own)
    with pytest.raises(ValueError, match=r"^out: got one in a call that gradients are recorded of"):
        fm.flash_attention(q, own, v, out=torch.empty_like(q))
    Own.answer = False
    assert torch.equal(fm.flash_attention(q, own, v), fm.flash_attention(q, k, v))
    Own.answer = RuntimeError("no answer")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no answer"):
            fm.flash_attention(q, own, v)
