"""Attention in torch's autograd: gradients, what saves and recomputes them, who trains."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flashmoe_science as fm
import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import flashmoe_science.torch as fmt  # noqa: E402
from flashmoe_science import _autograd  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_calls import Recorder, normal, refuse_gradients  # noqa: E402
from torch_training import Case, needs_gradients  # noqa: E402

F = torch.nn.functional
TWICE = "attention: its gradients are differentiated again"


def qkv(dtype: Any = torch.float32, layout: str = "bhsd", heads: int = 2) -> list[Any]:
    shapes = [(2, 5, 4, 8), (2, 7, heads, 8), (2, 7, heads, 16)]
    made = [normal(shape, "cpu", dtype, seed) for seed, shape in enumerate(shapes)]
    return [(x.transpose(1, 2) if layout == "bhsd" else x).contiguous().requires_grad_()
            for x in made]  # fmt: skip


def attend(q: Any, k: Any, v: Any) -> Any:
    return fm.flash_attention(q, k, v, layout="bhsd", causal="top_left")


def stock(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def assert_close(got: Any, want: Any, **tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    "how", [{"causal": True, "window": (3, None)}, {"softcap": 2.0, "scale": 0.5}], ids=str
)
def test_gradcheck_of_out_and_lse(layout: str, how: dict[str, Any]) -> None:
    for function in (fm.flash_attention, fmt.flash_attention):
        for return_lse in (False, True):
            assert torch.autograd.gradcheck(
                lambda *t, f=function, r=return_lse: f(*t, layout=layout, return_lse=r, **how),
                qkv(torch.float64, layout), fast_mode=True,
            )  # fmt: skip


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("seq_q", "how"),
    [
        (5, {"softcap": 1.5, "window": (2, 1)}),
        (5, {"causal": "top_left", "window": (3, None)}),
        (9, {"causal": "top_left", "scale": 0.7}),
        (9, {"causal": True}),  # the first two rows see no key
        (9, {"causal": True, "window": (1, None), "softcap": 0.8}),
        (12, {"window": (0, 0), "softcap": 3.0}),  # nor do the first five
    ],
    ids=str,
)
def test_gradcheck_of_every_option(
    seq_q: int, how: dict[str, Any], sinks: bool, layout: str
) -> None:
    """In float64, of out and lse where that is finite, by q, k, v and sinks."""
    shapes = [(1, seq_q, 2, 8), (1, 7, 1, 8), (1, 7, 1, 16)]
    tensors = [normal(shape, "cpu", torch.float64, seed) for seed, shape in enumerate(shapes)]
    if layout == "bhsd":
        tensors = [x.transpose(1, 2).contiguous() for x in tensors]
    if sinks:
        tensors.append(torch.tensor([0.5, 3.0], dtype=torch.float64))

    for function in (fm.flash_attention, fmt.flash_attention):

        def outputs(
            q: Any, k: Any, v: Any, sinks: Any = None, function: Any = function
        ) -> tuple[Any, Any]:
            out, lse = function(q, k, v, sinks=sinks, layout=layout, return_lse=True, **how)
            return out, lse.where(lse > -torch.inf, 0.0)

        fast = function is fmt.flash_attention
        given = [x.requires_grad_() for x in tensors]
        assert torch.autograd.gradcheck(outputs, given, fast_mode=fast)
    _, lse = fm.flash_attention(*tensors[:3], layout=layout, return_lse=True, **how)
    blind = 2 if how.get("causal") is True and seq_q == 9 else 5 if seq_q == 12 else 0
    assert int((lse[0, 0] == -torch.inf).sum()) == blind


def test_only_what_is_wanted_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = _autograd.flash_attention_backward

    def spy(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return real(*arguments, **options)

    monkeypatch.setattr(_autograd, "flash_attention_backward", spy)
    q, k, v = qkv()
    out, lse = fm.flash_attention(q, k.detach(), v, layout="bhsd", return_lse=True)
    out.sum().backward(retain_graph=True)
    assert tuple(calls[-1]["wanted"])[:3] == (True, False, True)
    assert calls[-1]["dlse"] is None
    lse.sum().backward()
    assert calls[-1]["dlse"] is not None
    with torch.no_grad():
        assert not attend(q, k, v).requires_grad


def test_gradients_of_any_strides_and_alignment() -> None:
    q, k, v = qkv()
    out = attend(q, k, v)
    dout = torch.randn(out.numel() + 1)[1:].view(out.shape)
    for given in (torch.ones(()).expand(out.shape), dout, dout.mT.contiguous().mT):
        got = torch.autograd.grad(out, (q, k, v), given, retain_graph=True)
        assert_close(got, torch.autograd.grad(stock(q, k, v), (q, k, v), given))
        assert [x.stride() for x in got] == [x.stride() for x in (q, k, v)]


def test_saved_tensors_are_torchs() -> None:
    q, k, v = qkv()
    want = torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(force=True).copy(),
                                                  torch.from_numpy):  # fmt: skip
        out = attend(q, k, v)
    assert_close(torch.autograd.grad(out.sum(), (q, k, v)), want)
    out = attend(q, k, v)
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_bits(reentrant: bool) -> None:
    tensors = qkv()
    want = torch.autograd.grad(attend(*tensors).sin().sum(), tensors)
    checkpoint(attend, *tensors, use_reentrant=reentrant).sin().sum().backward()
    assert all(torch.equal(x.grad, y) for x, y in zip(tensors, want, strict=True))


def test_a_second_differentiation_is_refused() -> None:
    q, k, v = qkv()
    for made in (attend(q, k, v), attend(q, k, v) ** 2):  # dout is a constant, or is not
        (dq,) = torch.autograd.grad(made.sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match=TWICE):
            dq.sum().backward()

    def loss(q: Any) -> Any:
        return attend(q, k, v).sum()

    q = q.detach()
    with pytest.raises(NotImplementedError, match=TWICE):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q)
    with pytest.raises(ValueError, match="q: has a tangent"):
        torch.func.jvp(torch.func.grad(loss), (q,), (q,))


def test_gradients_that_no_kernel_computes_are_refused_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = refuse_gradients(monkeypatch, dim=8)
    tensors = qkv()
    sentence = (
        r"^{0}: requires grad, but no kernel computes the gradients of this call \(sm0: head "
        r"dimension 8\); call under torch\.no_grad\(\) or pass {0}\.detach\(\)$"
    )
    operator = torch.ops.flashmoe.attention
    options = (None, None, None, "none", None, None, None, None, "bhsd", None)
    functions = (attend, lambda *t: fmt.flash_attention(*t, layout="bhsd"),
                 lambda *t: operator(*t, *options))  # fmt: skip
    for function in functions:
        with pytest.raises(NotImplementedError, match=sentence.format("q")):
            function(*tensors)
        with pytest.raises(NotImplementedError, match=sentence.format("v")):
            function(*(x.detach() for x in tensors[:2]), tensors[2])
        with torch.no_grad():
            function(*tensors)
    del asked[:]
    for _ in range(3):
        with pytest.raises(NotImplementedError, match=sentence.format("q")):
            attend(*tensors)
    assert asked == []  # of a problem the library is asked once
    wide = [torch.cat([x, x], -1).detach().requires_grad_() for x in tensors]
    attend(*wide).sum().backward()
    assert asked == [tuple(wide[0].shape)]
    # What is wrong with a call is said of the call.
    with pytest.raises(ValueError, match=r"^k: its head dimension is 8"):
        attend(wide[0], tensors[1], tensors[2])


@pytest.mark.parametrize("name", ["q", "v"])
def test_head_dimensions_without_gradients_are_refused_before_anything_is_computed(
    name: str,
) -> None:
    dims = {"q": 64, "k": 64, "v": 64} | ({"q": 264, "k": 264} if name == "q" else {"v": 264})
    tensors = [torch.randn(1, 5, 2, dim) for dim in dims.values()]
    fm.flash_attention(*tensors)
    sentence = (
        r"^k: requires grad, but no kernel computes the gradients of this call \("
        rf"{name}: its head dimension is 264, accepted are multiples of 8 from 8 to 256\); call "
    )
    tensors[1].requires_grad_()
    for function in (fm.flash_attention, fmt.flash_attention):
        with pytest.raises(NotImplementedError, match=sentence):
            function(*tensors)


def test_gradients_of_strides_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the copy engine of a GPU cannot walk all that the forward can."""
    refuse_gradients(monkeypatch, dim=8)
    plan, q = _autograd._core.plan, qkv()[0].detach()
    repeated = torch.cat([q, q], -1)[:, :, :1].expand(-1, -1, 5, -1).requires_grad_()

    def check(operation: str, tensors: Any, options: Any) -> Any:
        if 0 in tensors["q"][3]:
            raise fm.UnsupportedError("sm0: a stride of 0")
        return plan(operation, tensors, options)

    monkeypatch.setattr(_autograd._core, "plan", check)
    attend(*(repeated.contiguous() for _ in range(3)))
    with pytest.raises(NotImplementedError, match=r"sm0: a stride of 0\)"):
        attend(*(repeated for _ in range(3)))


@pytest.mark.parametrize("attend", [fm.flash_attention, fmt.flash_attention])
def test_sinks(attend: Callable[..., Any]) -> None:
    """Like a separate key that has no value."""
    q, k, v = (x.detach().double().requires_grad_() for x in qkv(layout="bshd"))
    sinks = torch.tensor([0.5, -1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    heads = sinks.shape[0]
    assert q.shape[2] == heads

    def plain() -> torch.Tensor:
        each = [x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v)]
        logits = torch.einsum("bihd,bjhd->bhij", q, each[0]) * q.shape[-1] ** -0.5
        column = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
        weights = torch.cat([logits, column], -1).softmax(-1)[..., :-1]
        return torch.einsum("bhij,bjhd->bihd", weights, each[1])

    got = torch.autograd.grad(attend(q, k, v, sinks=sinks).square().sum(), (q, k, v, sinks))
    want = torch.autograd.grad(plain().square().sum(), (q, k, v, sinks))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)
    alone = torch.autograd.grad(attend(q.detach(), k, v, sinks=sinks).square().sum(), sinks)
    assert torch.equal(alone[0], got[3])
    compiled = torch.compile(
        lambda *x: attend(*x[:3], sinks=x[3]).square().sum(), backend="aot_eager", fullgraph=True
    )
    again = torch.autograd.grad(compiled(q, k, v, sinks), (q, k, v, sinks))
    for x, y in zip(again, got, strict=True):
        assert torch.equal(x, y)


# ---- graphs and transforms ----


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_forward_and_backward(dynamic: bool) -> None:
    torch._dynamo.reset()

    def program(q: Any, k: Any, v: Any) -> Any:
        out, lse = fm.flash_attention(q * 2, k, v, layout="bhsd", return_lse=True)
        return out.sin().sum() + lse.sum()

    compiled = torch.compile(program, fullgraph=True, dynamic=dynamic)
    for _ in range(2):
        tensors = qkv()
        got = torch.autograd.grad(compiled(*tensors), tensors)
        assert_close(got, torch.autograd.grad(program(*tensors), tensors))


def test_opcheck_of_the_operators() -> None:
    tensors = qkv(torch.float32, "bshd")
    with Recorder() as recorder:
        out = fmt.flash_attention(*tensors)
        out.sum().backward()
    assert [str(operator) for operator, _ in recorder.seen] == [
        "flashmoe.attention_with_lse.default", "flashmoe.attention_backward.default"
    ]  # fmt: skip
    for operator, arguments in recorder.seen:
        if operator is torch.ops.flashmoe.attention_backward.default:  # has no derivative itself
            arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
        torch.library.opcheck(operator, arguments)
    _, given = recorder.seen[0]
    torch.library.opcheck(torch.ops.flashmoe.attention, given)


def test_exported_modules_train() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(32, 32)

        def forward(self, x: Any) -> Any:
            heads = self.project(x).unflatten(-1, (2, 16))
            return fmt.flash_attention(heads, heads, heads, causal=True).flatten(2)

    block, x = Block(), normal((2, 10, 32), "cpu", torch.float32)
    program = torch.export.export(block, (x,)).module()
    for module in (block, program):
        module(x).sin().sum().backward()
    (want, _), (got, _) = block.parameters(), program.parameters()
    assert torch.equal(got.grad, want.grad)


def test_transforms_that_take_gradients() -> None:
    tensors = [x.detach() for x in qkv()]

    def loss(q: Any, k: Any, v: Any) -> Any:
        return attend(q[None], k[None], v[None]).sin().sum()

    want = torch.func.grad(lambda *t: stock(*t).sin().sum(), (0, 1, 2))(*tensors)
    assert_close(torch.func.grad(lambda *t: attend(*t).sin().sum(), (0, 1, 2))(*tensors), want)
    assert_close(torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*tensors), want)
    summed = torch.func.grad(lambda *t: torch.func.vmap(loss)(*t).sum(), (0, 1, 2))(*tensors)
    assert_close(summed, want)
    options = (None, None, None, "none", None, None, None, None, "bhsd", None)
    attention = torch.ops.flashmoe.attention
    with pytest.raises(ValueError, match=r"a transform of torch\.func differentiates"):
        torch.func.grad(lambda q: attention(q, q, q, *options).sum())(tensors[0])


# ---- training ----


def test_autocast_is_torchs() -> None:
    tensors = qkv()
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for function in (attend, compiled):
        with torch.autocast("cpu", torch.bfloat16):
            out, want = function(*tensors), stock(*tensors)
        assert out.dtype == want.dtype == torch.bfloat16
        got = torch.autograd.grad(out.float().sin().sum(), tensors)
        exact = torch.autograd.grad(stock(*tensors).sin().sum(), tensors)
        for a, b in zip(got, exact, strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a, b, atol=3e-2, rtol=3e-2)
    doubles = qkv(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(*doubles).dtype == torch.float64


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(32, 96)

    def forward(self, x: Any) -> Any:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).unbind(2)
        return x + fm.flash_attention(q, k, v, causal=True).flatten(2)


def train(wrap: Any, device: str, rank: int, ranks: int) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = wrap(torch.nn.Sequential(Layer(), Layer()).to(device, dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = normal((2, 4, 9, 32), device, dtype)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        loss = model(data[step].chunk(ranks)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    gradients = [x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad
                 for x in model.parameters()]  # fmt: skip
    return losses, [x.cpu() for x in gradients]


def train_one_of_some(rank: int, folder: str, kind: str, ranks: int) -> None:
    from torch import distributed
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    device = "cpu" if kind == "cpu" else f"cuda:{rank}"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "gloo" if kind == "cpu" else "nccl", init_method=f"file://{folder}/meeting", rank=rank,
        world_size=ranks,
    )  # fmt: skip

    def shard(model: Any) -> Any:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    mesh = torch.distributed.device_mesh.init_device_mesh(kind, (ranks,))
    made = [train(wrap, device, rank, ranks) for wrap in (DistributedDataParallel, shard)]
    torch.save(made, Path(folder) / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.skipif(os.name != "posix", reason="gloo")
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_processes_train_as_one(kind: str, tmp_path: Path) -> None:
    """Two, or as many as there are GPUs."""
    needs_gradients(kind, Case("layers", dim=16, dim_v=16))
    rounding = {} if kind == "cpu" else {"atol": 4e-3, "rtol": 3e-2}
    count = 2 if kind == "cpu" else min(2, torch.cuda.device_count())
    torch.multiprocessing.spawn(train_one_of_some, (str(tmp_path), kind, count), nprocs=count)
    losses, gradients = train(lambda model: model, kind, 0, 1)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(count)]
    for made in zip(*ranks, strict=True):
        mean = [sum(each) / count for each in zip(*(of_rank[0] for of_rank in made), strict=True)]
        assert_close(mean, losses, **rounding)
        for of_rank in made:
            assert_close(of_rank[1], gradients, **rounding)
