"""torch.ops.flashmoe on the GPU: opcheck, torch.compile, CUDA graphs, torch's own calls."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import flashmoe_science.torch as fmt
import pytest
import torch
from torch_calls import Call, Recorder, assert_same, calls, normal

pytestmark = pytest.mark.gpu

DEVICE, DTYPE = "cuda:0", torch.bfloat16
OURS = {str(call): call for call in calls(fmt)}
CALLS = pytest.mark.parametrize("call", calls(fm), ids=str)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


@CALLS
def test_opcheck(call: Call) -> None:
    with Recorder() as recorder:
        OURS[str(call)](*call.tensors(9, DEVICE, DTYPE))
    ((operator, arguments),) = recorder.seen
    torch.library.opcheck(operator, arguments)
    assert_same(operator(*arguments), call(*call.tensors(9, DEVICE, DTYPE)))


@CALLS
def test_compiles_without_breaks_for_every_length(call: Call) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(call.function, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (11, 16, 31, 250, 3000):
        tensors = call.tensors(tokens, DEVICE, DTYPE)
        assert_same(compiled(*tensors), call(*tensors))
    assert len(graphs) == 1


@CALLS
def test_cuda_graph(call: Call) -> None:
    """Captures the operators: inputs change, and the graph runs again."""
    ours = OURS[str(call)]
    tensors = call.tensors(64, DEVICE, DTYPE)
    with Recorder() as recorder:
        ours(*tensors)
    ((operator, arguments),) = recorder.seen
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        operator(*arguments)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = operator(*arguments)
    others = [x for x in tensors if x.is_floating_point()]
    others[0].copy_(others[0].flip(0))
    poison = [torch.full((2**20,), float("nan"), device=DEVICE) for _ in range(3)]
    graph.replay()
    assert_same(captured, operator(*arguments))
    del poison


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = fmt.MultiheadAttention(
            128, 4, batch_first=True, device=DEVICE, dtype=DTYPE
        )
        # Every token takes every expert: with fewer, other roundings may choose others.
        self.layer = fmt.FlashMoELayer(128, 64, 4, 4, device=DEVICE, dtype=DTYPE)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(x, x, x, is_causal=True)[0]
        return x + self.layer(torch.nn.functional.layer_norm(x, (128,)))


def test_compiled_into_cuda_graphs_by_torch() -> None:
    torch.manual_seed(0)
    block = _Block().eval()
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(4):
            x = normal((2, 77, 128), DEVICE, DTYPE, seed) * 11
            got = compiled(x).clone()
            want = block(x)
            torch.testing.assert_close(got, want, atol=5e-2, rtol=5e-2)
            assert torch.equal(got, compiled(x))


def test_export() -> None:
    torch.manual_seed(0)
    block = _Block().eval()
    x = normal((2, 10, 128), DEVICE, DTYPE)
    with torch.no_grad():
        program = torch.export.export(
            block, (x,), dynamic_shapes=({1: torch.export.Dim("seq", min=2, max=4096)},)
        ).module()
        for seq in (10, 333):
            x = normal((2, seq, 128), DEVICE, DTYPE, seq)
            assert torch.equal(program(x), block(x))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seq", [(100, 130), (130, 100), (1, 300)], ids=str)
def test_sdpa_is_torchs(seq: tuple[int, int], is_causal: bool) -> None:
    q = normal((2, 8, seq[0], 64), DEVICE, DTYPE) * 8
    k, v = (normal((2, 2, seq[1], 64), DEVICE, DTYPE, i) * 8 for i in (1, 2))
    options = {"is_causal": is_causal, "enable_gqa": True}
    attend = torch.nn.functional.scaled_dot_product_attention
    want = attend(*(x.double() for x in (q, k, v)), **options)
    plain = attend(q, k, v, **options)
    got = fmt.scaled_dot_product_attention(q, k, v, **options)
    error, theirs = ((x.double() - want).abs().max() for x in (got, plain))
    assert error <= 2 * theirs + torch.finfo(DTYPE).eps * want.abs().max()
    with fmt.sdpa_kernel(strict=True):
        assert torch.equal(attend(q, k, v, **options), got)


def test_torchs_calls_in_a_compiled_program() -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    compiled = torch.compile(lambda q: attend(q, q, q, is_causal=True), fullgraph=True)
    for seq in (64, 100):
        q = normal((2, 8, seq, 64), DEVICE, DTYPE)
        with fmt.sdpa_kernel(strict=True):
            assert torch.equal(
                compiled(q), fmt.scaled_dot_product_attention(q, q, q, None, 0, True)
            )


def test_modules_on_the_gpu_are_those_of_torch() -> None:
    torch.manual_seed(0)
    stock = torch.nn.MultiheadAttention(128, 2, batch_first=True, device=DEVICE, dtype=DTYPE).eval()
    ours = fmt.MultiheadAttention(128, 2, batch_first=True, device=DEVICE, dtype=DTYPE).eval()
    ours.load_state_dict(stock.state_dict())
    x = normal((2, 99, 128), DEVICE, DTYPE) * 11
    with torch.no_grad():
        want, _ = stock(x, x, x, need_weights=False)
        torch.testing.assert_close(ours(x, x, x)[0], want, atol=2e-2, rtol=2e-2)


def test_operators_work_on_their_tensors_device_and_stream() -> None:
    call = OURS["fused"]
    tensors = call.tensors(64, DEVICE, DTYPE)
    want = call(*tensors)
    with Recorder() as recorder:
        call(*tensors)
    ((operator, arguments),) = recorder.seen
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        tensors[0].mul_(2)
        doubled = operator(*arguments)
    stream.synchronize()
    tensors[0].div_(2)
    torch.cuda.synchronize()
    assert_same(operator(*arguments), want)
    assert not torch.equal(doubled, want)
