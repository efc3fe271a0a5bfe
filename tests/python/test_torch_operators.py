"""torch.ops.flashmoe: opcheck, torch.compile, torch.export, fake tensors, gradients."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import flashmoe_science as fm
import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import flashmoe_science.torch as fmt  # noqa: E402
from flashmoe_science import _core  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch_calls import Call, Recorder, assert_same, calls, normal  # noqa: E402
from torch_calls import weights as layer_weights  # noqa: E402

CALLS = pytest.mark.parametrize("call", calls(fm), ids=str)
OPTIONS = (None, None, None, "none", None, None, None, None, "bshd", None)  # of the operator
OURS = {str(call): call for call in calls(fmt)}


class Counted:
    """A backend of torch.compile that counts its graphs, and keeps the last one's operators."""

    def __init__(self) -> None:
        self.graphs = 0
        self.targets: list[str] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        self.targets = [str(node.target) for node in graph.graph.nodes]
        return graph.forward


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


@CALLS
def test_opcheck(call: Call) -> None:
    ours = OURS[str(call)]
    with Recorder() as recorder:
        ours(*call.tensors(9, "cpu", torch.float32))
    ((operator, arguments),) = recorder.seen
    assert str(operator) == f"flashmoe.{call.operator}.default"
    torch.library.opcheck(operator, arguments)
    assert_same(operator(*arguments), call(*call.tensors(9, "cpu", torch.float32)))


def test_every_operator_is_checked() -> None:
    listed = {name.removeprefix("flashmoe::") for name in torch._C._dispatch_get_all_op_names()
              if name.startswith("flashmoe::")}  # fmt: skip
    ragged = {"ragged_attention", "ragged_attention_with_lse",
              "ragged_attention_backward"}  # by test_sequences.py  # fmt: skip
    # By test_kv_append.py, test_kv_gather.py and tests/cpu/test_check_sequences.py.
    ragged |= {"kv_append", "kv_append_with_q", "kv_gather", "kv_gather_keys", "check_sequences"}
    # By test_torch_autograd.py and test_torch_moe_autograd.py.
    backward = {"attention_backward", "moe_backward", "moe_route_backward",
                "grouped_product_backward"}  # fmt: skip
    assert listed == {call.operator for call in calls(fm)} | backward | ragged


@CALLS
@pytest.mark.parametrize("module", ["package", "torch"])
def test_compiles_without_breaks_for_every_length(call: Call, module: str) -> None:
    if module == "torch":
        call = OURS[str(call)]
    backend = Counted()
    compiled = torch.compile(call.function, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (11, 16, 31, 250):  # the first is no other extent, which torch would tie it to
        tensors = call.tensors(tokens, "cpu", torch.float32)
        assert_same(compiled(*tensors), call(*tensors))
    assert backend.graphs == 1
    assert f"flashmoe.{call.operator}.default" in backend.targets


def test_lengths_that_turn_out_to_vary_are_compiled_twice_at_most() -> None:
    call = OURS["fused"]
    backend = Counted()
    compiled = torch.compile(call.function, fullgraph=True, backend=backend)
    for tokens in (9, 16, 31, 250):
        tensors = call.tensors(tokens, "cpu", torch.float32)
        assert_same(compiled(*tensors), call(*tensors))
    assert backend.graphs == 2


def test_inductor_keeps_strides_as_they_are() -> None:
    """Transposed weights, and activations between fused pointwise code."""
    call = OURS["forward-with-pre-activation"]
    tensors = call.tensors(20, "cpu", torch.float32)

    def program(x: Any, *rest: Any) -> Any:
        out, before = call.function((x * 2).relu(), *rest)
        return out.t().sin(), before

    want = program(*tensors)
    got = torch.compile(program, fullgraph=True)(*tensors)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


def test_inductor_on_a_block() -> None:
    q = normal((2, 33, 64), "cpu", torch.float32)

    def block(x: Any) -> Any:
        heads = (x.sin() + 1).view(2, -1, 4, 16).transpose(1, 2)
        out = fm.flash_attention(heads, heads, heads, causal=True, layout="bhsd")
        return x + out.transpose(1, 2).flatten(2).cos()

    torch.testing.assert_close(torch.compile(block, fullgraph=True)(q), block(q))


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_dynamic_sizes_saved_and_loaded(strict: bool, tmp_path: Path) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = fmt.FlashMoELayer(32, 24, 8, 2)

        def forward(self, x: Any) -> Any:
            heads = x.unflatten(-1, (2, 16))
            return self.layer(x + fmt.flash_attention(heads, heads, heads, causal=True).flatten(2))

    block = Block().eval()
    x = normal((2, 10, 32), "cpu", torch.float32)
    with torch.no_grad():
        program = torch.export.export(
            block, (x,), strict=strict,
            dynamic_shapes=({0: torch.export.Dim("batch", max=64),
                             1: torch.export.Dim("seq", min=2, max=4096)},),
        )  # fmt: skip
        targets = [str(node.target) for node in program.graph.nodes]
        assert "flashmoe.attention.default" in targets
        assert "flashmoe.fused_moe.default" in targets
        torch.export.save(program, tmp_path / "block.pt2")
        for loaded in (program, torch.export.load(tmp_path / "block.pt2")):
            for batch, seq in ((2, 10), (3, 77), (1, 2)):
                x = normal((batch, seq, 32), "cpu", torch.float32, seq)
                assert torch.equal(loaded.module()(x), block(x))


@CALLS
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(call: Call) -> None:
    call = OURS[str(call)]
    tensors = call.tensors(9, "cpu", torch.float32)
    with FakeTensorMode() as mode:
        made = call(*(mode.from_tensor(x) for x in tensors))
    with Recorder():  # has the operators called, whose allocations are these
        real = call(*tensors)
    made, real = (x if isinstance(x, tuple) else (x,) for x in (made, real))
    for a, b in zip(made, real, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


# ---- what is refused ----


@pytest.mark.parametrize("call", [c for c in calls(fm) if "merge" in c.name], ids=str)
def test_a_gradient_is_a_clear_error(call: Call) -> None:
    tensors = call.tensors(9, "cpu", torch.float32)
    tensors[0].requires_grad_()
    sentence = (
        r"^[\w\[\]]+: requires grad, but the merge of attention states has no backward pass yet"
    )
    for function in (call.function, OURS[str(call)].function):
        with pytest.raises(ValueError, match=sentence):
            function(*tensors)
    with Recorder(), pytest.raises(ValueError, match=sentence):
        OURS[str(call)].function(*tensors)
    compiled = torch.compile(OURS[str(call)].function, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="requires grad, but"):
        compiled(*tensors)
    with torch.no_grad():
        assert_same(compiled(*tensors), call(*tensors))


def test_outputs_are_the_graphs_own() -> None:
    q = normal((1, 8, 2, 16), "cpu", torch.float32)

    def call(q: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = fmt.flash_attention(q, q, q, out=torch.empty_like(q))
        return made

    with pytest.raises(Exception, match="out: got one in a call that is traced, accepted is None"):
        torch.compile(call, backend="eager", fullgraph=True)(q)
    assert torch.equal(torch.compile(call, backend="eager")(q), call(q)), "after a graph break"
    out = torch.empty_like(q)
    assert fmt.flash_attention(q, q, q, out=out) is out


@pytest.mark.parametrize(
    "name",
    [
        "flash_attention",
        "flash_attention_backward",
        "check_sequences",
        "kv_append",
        "kv_gather",
        "merge_states",
        "moe_route",
        "moe_route_given",
        "moe_forward",
        "grouped_product",
        "fused_moe",
    ],
)
def test_functions_have_the_parameters_of_the_packages(name: str) -> None:
    ours, plain = getattr(fmt, name), getattr(fm, name)
    assert ours is not plain
    ours, plain = (inspect.signature(f).parameters.values() for f in (ours, plain))
    assert [(p.name, p.kind, p.default) for p in ours] == [
        (p.name, p.kind, p.default) for p in plain
    ]


def test_parameters_and_tensors_that_have_no_memory() -> None:
    q = normal((1, 8, 2, 16), "cpu", torch.float32)
    want = fm.flash_attention(q, q, q)
    parameter = torch.nn.Parameter(q)
    with torch.no_grad():
        assert torch.equal(fmt.flash_attention(parameter, q, q), want)
    assert fmt.flash_attention(parameter, q, q).requires_grad
    with FakeTensorMode() as mode:
        fake = fmt.flash_attention(*(mode.from_tensor(q) for _ in range(3)))
    assert fake.shape == q.shape and type(fake) is not torch.Tensor


def test_wrong_calls_have_the_librarys_sentence() -> None:
    q = normal((1, 8, 2, 16), "cpu", torch.float32)
    attend = torch.compile(lambda q, k: fm.flash_attention(q, k, k), backend="eager")
    sentence = "k: its head dimension is 8, but q has 16"
    with pytest.raises(Exception, match=sentence):  # torch's own, while it traces
        attend(q, q[..., :8].contiguous())
    with pytest.raises(Exception, match="q: got 3 dimensions, accepted are 4"):
        attend(q[0], q)
    torch._dynamo.reset()
    dynamic = torch.compile(
        lambda q, k: fm.flash_attention(q, k, k), backend="eager", dynamic=True, fullgraph=True
    )
    with pytest.raises(ValueError, match=f"^{sentence}"):  # when the graph runs
        dynamic(q, q[..., :8].contiguous())
    with pytest.raises(ValueError, match=r"^q: got 3 dimensions"):
        torch.ops.flashmoe.attention(q[0], q, q, *OPTIONS)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("attention", lambda q, k, v: (q[0], k, v)),
        ("attention", lambda q, k, v: (q, k[..., :8], v)),
        ("attention", lambda q, k, v: (q, k[:, :5], v)),
        ("attention", lambda q, k, v: (q, k[:1], v)),
        ("attention", lambda q, k, v: (q[:, :, :3], k, v)),
        ("attention", lambda q, k, v: (q[..., :12], k[..., :12], v)),
        ("attention", lambda q, k, v: (q, k.half(), v)),
        ("attention", lambda q, k, v: (q.int(), k.int(), v.int())),
        ("attention-with-lse", lambda q, k, v: (q, k, v[:, :1])),
        ("route", lambda z: (z.int(),)),
        ("route", lambda z: (z[:, :1].contiguous(),)),
        ("route-with-lse", lambda z, b: (z, b[:4])),
        ("route-with-lse", lambda z, b: (z[:, :6].contiguous(), b[:6])),
        ("forward", lambda x, u, d, *r: (x[:, :16].contiguous(), u, d, *r)),
        ("forward", lambda x, u, d, *r: (x, u.half(), d, *r)),
        ("forward", lambda x, u, d, *r: (x, u[:4], d, *r)),
        ("forward", lambda x, u, d, w, *r: (x, u, d, w[:4], *r)),
        ("forward-with-pre-activation", lambda *a: (*a[:-1], a[-1][:, :8].contiguous())),
        ("product", lambda x, w, o: (x, w[:, :, :16].contiguous(), o)),
        ("product", lambda x, w, o: (x, w, o[:2])),
        ("product-of-padded", lambda x, w, c, b: (x[:2], w, c, b)),
    ],
)  # fmt: skip
def test_wrong_calls_of_tensors_without_memory_have_the_sentences_of_real_ones(
    name: str, spoil: Any
) -> None:
    call = OURS[name]
    tensors = spoil(*call.tensors(9, "cpu", torch.float32))
    with pytest.raises(fm.FlashMoEError) as real, Recorder():
        call(*tensors)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in tensors]
        with pytest.raises(type(real.value), match=f"^{re.escape(str(real.value))}$"):
            call(*fake)
    if not isinstance(real.value, fm.UnsupportedError):
        with pytest.raises(type(real.value), match=f"^{re.escape(str(real.value))}$"):
            call(*(x.to("meta") for x in tensors))


def test_fake_tensors_of_another_machine_have_shapes() -> None:
    mode, device = FakeTensorMode(), torch.device("cuda:7")

    def fake(*shape: int) -> Any:
        meta = torch.empty(shape, dtype=torch.float16, device="meta")
        return FakeTensor(mode, meta, device)

    with mode:
        q = fake(1, 8, 2, 16)
        made = torch.ops.flashmoe.attention(q, q, q, *OPTIONS)
        assert (made.shape, made.device) == (q.shape, device)
        with pytest.raises(ValueError, match=r"^q: got 3 dimensions"):
            torch.ops.flashmoe.attention(fake(8, 2, 16), q, q, *OPTIONS)
        out, lse = torch.ops.flashmoe.attention_with_lse(q, q, q, *OPTIONS)
        *gradients, dsinks = fmt.flash_attention_backward(out, q, q, q, out, lse)
        assert [(x.shape, x.device) for x in gradients] == [(q.shape, device)] * 3
        assert dsinks is None


@CALLS
def test_meta_tensors_have_the_shapes_and_strides_of_real_ones(call: Call) -> None:
    plain, call = call, OURS[str(call)]
    tensors = call.tensors(9, "cpu", torch.float32)
    on_meta = [x.to("meta") for x in tensors]
    made = call(*on_meta)
    with Recorder():
        real = call(*tensors)
    made, real = (x if isinstance(x, tuple) else (x,) for x in (made, real))
    for a, b in zip(made, real, strict=True):
        assert a.is_meta
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    with pytest.raises(TypeError, match=r"gives no view of its memory: .*meta"):
        plain(*on_meta)


def test_importing_the_package_registers_nothing() -> None:
    program = (
        "import torch, flashmoe_science as f; f.flash_attention(*[torch.zeros(1, 8, 1, 8)] * 3); "
        "assert 'flashmoe_science.torch' not in __import__('sys').modules; "
        "assert not any(n.startswith('flashmoe::') for n in torch._C._dispatch_get_all_op_names())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_gpt_oss_weights_reach_the_operator_as_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a compiled program transposed weights are not copied first."""
    x = normal((5, 32), "cpu", torch.float32)
    w_up, w_down = layer_weights("cpu", torch.float32)
    stored = w_up.transpose(1, 2).contiguous()
    router = normal((8, 32), "cpu", torch.float32)
    pointers = []
    real = _core.fused_moe

    def program(x: Any, stored: Any) -> Any:
        return fmt.fused_moe(x, router, stored.transpose(1, 2), w_down, 2)

    def spy(tokens: Any, router: Any, w: Any, *rest: Any) -> Any:
        pointers.append((w.data_ptr(), w.stride()))
        return real(tokens, router, w, *rest)

    compiled = torch.compile(program, fullgraph=True)
    monkeypatch.setattr(_core, "fused_moe", spy)
    compiled(x, stored)
    assert pointers == [(stored.data_ptr(), stored.transpose(1, 2).stride())]
