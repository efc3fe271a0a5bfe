"""Training with attention through torch's autograd on the GPU: gradients, graphs, streams."""

from __future__ import annotations

import functools
from typing import Any

import flashmoe_science as fm
import flashmoe_science.torch as fmt
import pytest
import torch
from flashmoe_science import _dispatch
from torch_training import (
    CASES,
    CHECKS,
    GROUPED,
    Case,
    assert_follows,
    assert_same_bits,
    check_gradients,
    gradients,
    needs_gradients,
    normal,
    weighed,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _gradients_are_computed_here() -> None:
    torch._dynamo.reset()
    needs_gradients(DEVICE, *CASES)


@DTYPES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case, dtype: torch.dtype) -> None:
    check_gradients(case, DEVICE, dtype)


@DTYPES
@pytest.mark.parametrize("name", CHECKS)
def test_training(name: str, dtype: torch.dtype) -> None:
    CHECKS[name](DEVICE, dtype)


def test_many_runs_give_the_same_bits() -> None:
    case = Case("long", 1000, 1000, 16, 4, 128, 128, options={"causal": True})
    tensors = case.tensors(DEVICE, torch.bfloat16)
    want = gradients(case, tensors)
    other, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE)
    for _ in range(50):
        with torch.cuda.stream(other):  # takes multiprocessors away, another number each time
            noise @ noise
        assert_same_bits(gradients(case, tensors), want)


# ---- graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [GROUPED, CASES[4]], ids=str)
def test_a_cuda_graph_of_forward_and_backward(case: Case) -> None:
    """Replayed with other numbers in the same tensors."""
    tensors = case.tensors(DEVICE, torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(case, tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(case, tensors)
    poison = [torch.full((2**20,), float("nan"), device=DEVICE) for _ in range(8)]
    for seed in (10, 20, 30):
        with torch.no_grad():
            for i, x in enumerate(tensors):
                x.copy_(normal(tuple(x.shape), DEVICE, x.dtype, seed + i))
        graph.replay()
        got = [x.clone() for x in captured]
        assert_same_bits(got, gradients(case, tensors))
    del poison


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_inductor(mode: str) -> None:
    compiled = torch.compile(functools.partial(weighed, GROUPED), fullgraph=True, mode=mode)
    for seed in range(3):
        tensors = GROUPED.tensors(DEVICE, torch.bfloat16)
        with torch.no_grad():
            for x in tensors:
                x.mul_(1 + seed)
        got = [x.clone() for x in torch.autograd.grad(compiled(*tensors), tensors)]
        exact = [x.detach().double().cpu().requires_grad_() for x in tensors]
        assert_follows([x.cpu() for x in got], [x.cpu() for x in gradients(GROUPED, tensors)],
                       gradients(GROUPED, exact))  # fmt: skip


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = fmt.MultiheadAttention(128, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return x + self.attention(x, x, x, is_causal=True)[0]


def test_graphed_modules() -> None:
    """torch.cuda.make_graphed_callables: a graph of the forward and one of the backward."""
    torch.manual_seed(0)
    block = _Block().to(DEVICE, torch.bfloat16)
    x = normal((2, 99, 128), DEVICE, torch.bfloat16).requires_grad_()
    graphed = torch.cuda.make_graphed_callables(_copy(block), (x,))
    for seed in range(3):
        x = normal((2, 99, 128), DEVICE, torch.bfloat16, seed).requires_grad_()
        made = []
        for module in (graphed, block):
            module.zero_grad()
            (dx,) = torch.autograd.grad(module(x).float().sin().sum(), x, retain_graph=True)
            dx = dx.clone()  # of memory that the graph writes again
            module(x).float().sin().sum().backward()
            made.append([dx, *(p.grad.clone() for p in module.parameters())])
        for got, want in zip(*made, strict=True):
            torch.testing.assert_close(got, want, atol=1e-2, rtol=2e-2)


def _copy(block: _Block) -> _Block:
    copy = _Block().to(DEVICE, torch.bfloat16)
    copy.load_state_dict(block.state_dict())
    return copy


# ---- streams ---------------------------------------------------------------------------------


def test_work_goes_on_the_current_stream() -> None:
    tensors = GROUPED.tensors(DEVICE, torch.bfloat16)
    before = gradients(GROUPED, tensors)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        with torch.no_grad():
            for x in tensors:
                x.mul_(2)
        got = gradients(GROUPED, tensors)
    stream.synchronize()
    assert_same_bits(got, gradients(GROUPED, tensors))
    assert not torch.equal(got[0], before[0])


def test_named_streams() -> None:
    """The workspace is memory for work on the stream that is named, were it the default one."""
    tensors = GROUPED.tensors(DEVICE, torch.bfloat16)
    out, lse = (x.detach() for x in GROUPED.attend(*tensors))
    q, k, v = (x.detach() for x in tensors)
    call = functools.partial(fm.flash_attention_backward, out, q, k, v, out, lse)
    want = call(**GROUPED.options)[:3]
    torch.cuda.synchronize()
    side, current = torch.cuda.Stream(), torch.cuda.Stream()
    default = torch.cuda.default_stream()
    for named in (None, default, 0, side, side.cuda_stream, current):
        with torch.cuda.stream(current):
            got = call(**GROUPED.options, stream=named)[:3]
        torch.cuda.synchronize()
        assert_same_bits(got, want)
    with torch.cuda.stream(current):
        for handle, stream in ((0, default), (1, default), (side.cuda_stream, side)):
            with _dispatch.on_stream(q, handle):
                assert torch.cuda.current_stream().cuda_stream == stream.cuda_stream
        assert torch.cuda.current_stream() == current


# ---- what no kernel computes -----------------------------------------------------------------


def _refused_dim() -> int:
    for dim in range(8, 257, 8):
        try:
            fm.attention_backward_plan_for(batch=1, seq_q=64, heads_q=1, dim=dim, device=DEVICE)
        except fm.UnsupportedError:
            return dim
    pytest.skip("the library computes gradients of every head dimension here")


@pytest.mark.parametrize("compiled", [False, True])
def test_what_no_kernel_differentiates_is_refused_or_torchs(compiled: bool) -> None:
    dim = _refused_dim()
    stock: Any = torch.nn.functional.scaled_dot_product_attention
    attend: Any = stock
    if compiled:
        attend = torch.compile(stock, fullgraph=True, backend="aot_eager")
    q, k, v = (normal((2, 4, 100, dim), DEVICE, torch.bfloat16, i).requires_grad_()
               for i in range(3))  # fmt: skip
    with fmt.sdpa_kernel():
        got = torch.autograd.grad(attend(q, k, v).float().sum(), (q, k, v))
    want = torch.autograd.grad(stock(q, k, v).float().sum(), (q, k, v))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)
    with pytest.raises(fm.UnsupportedError, match=r"^q: requires grad, but no kernel computes"):
        fm.flash_attention(q, k, v, layout="bhsd")
    with torch.no_grad():
        fm.flash_attention(q, k, v, layout="bhsd")
