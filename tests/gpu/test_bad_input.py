"""Bad input on CUDA tensors: an error that names the argument, and outputs as they were."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from typing import Any

import capi
import flashmoe_science as fm
import pytest
import torch
from gpu import memory

pytestmark = pytest.mark.gpu

_CPU = "cpu"
_B, _SQ, _SK, _HQ, _HK, _D, _DV = 2, 33, 47, 4, 2, 64, 40


def _good() -> dict[str, Any]:
    def half(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda:0").half()

    return {
        "q": half(_B, _SQ, _HQ, _D),
        "k": half(_B, _SK, _HK, _D),
        "v": half(_B, _SK, _HK, _DV),
        "out": memory.poisoned(_B * _SQ * _HQ * _DV, torch.float16, "cuda:0").view(
            _B, _SQ, _HQ, _DV
        ),
        "lse": memory.poisoned(_B * _HQ * _SQ, torch.float32, "cuda:0").view(_B, _HQ, _SQ),
    }


def _misaligned(x: torch.Tensor) -> torch.Tensor:
    room = torch.empty(x.numel() + 8, dtype=x.dtype, device=x.device)
    return room[4 : 4 + x.numel()].view(x.shape)


def _odd_stride(x: torch.Tensor) -> torch.Tensor:
    room = torch.empty((*x.shape[:3], x.shape[3] + 4), dtype=x.dtype, device=x.device)
    return room[..., : x.shape[3]]


def _strided_columns(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((*x.shape[:3], 2 * x.shape[3]), dtype=x.dtype, device=x.device)[..., ::2]


def _cut(axis: int, size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.narrow(axis, 0, size)


def _resized(axis: int, size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def resize(x: torch.Tensor) -> torch.Tensor:
        shape = list(x.shape)
        shape[axis] = size
        return x.new_zeros(shape)

    return resize


# argument: what is done to it, the exception, and how its sentence begins.
BAD_TENSORS: list[tuple[str, Callable[[torch.Tensor], Any], type[Exception], str]] = [
    ("q", torch.Tensor.float, NotImplementedError, "q: it is on cuda:0 and of dtype fp32"),
    ("k", torch.Tensor.bfloat16, TypeError, "k: got dtype bf16"),
    ("v", torch.Tensor.float, TypeError, "v: got dtype fp32"),
    ("out", torch.Tensor.bfloat16, TypeError, "out: got dtype bf16"),
    ("lse", torch.Tensor.half, TypeError, "lse: got dtype fp16"),
    ("q", torch.Tensor.double, NotImplementedError, "q: it is on cuda:0 and of dtype fp64"),
    ("q", torch.Tensor.int, TypeError, "q: "),
    *((name, _CPU, ValueError, f"{name}: it is on cpu") for name in ("k", "v", "out", "lse")),
    ("q", _CPU, ValueError, "k: it is on cuda:0 but q is on cpu"),
    *((name, lambda x: x[0], ValueError, f"{name}: got 3 dimensions") for name in ("q", "k", "v")),
    ("lse", lambda x: x[0], ValueError, "lse: got 2 dimensions"),
    ("q", _cut(3, 12), ValueError, "q: its head dimension is 12"),
    ("q", _resized(3, 584), ValueError, "q: its head dimension is 584"),
    ("v", _resized(3, 0), ValueError, "v: its head dimension is 0"),
    ("k", _cut(3, 56), ValueError, "k: its head dimension is 56, but q has 64"),
    ("k", _resized(2, 3), ValueError, "v: its number of heads is 2, but k has 3"),
    ("q", _cut(2, 3), ValueError, "out: its number of heads is 4, but q has 3"),
    ("k", _cut(0, 1), ValueError, "k: its batch is 1, but q has 2"),
    ("v", _cut(1, 46), ValueError, "v: its sequence length is 46, but k has 47"),
    ("out", _cut(1, 32), ValueError, "out: its sequence length is 32, but q has 33"),
    ("out", _cut(3, 32), ValueError, "out: its head dimension is 32, but v has 40"),
    ("lse", _cut(2, 32), ValueError, "lse: its sequence length is 32, but q has 33"),
    ("lse", lambda x: x.transpose(1, 2), ValueError, "lse: its number of heads is 33"),
    *((name, _misaligned, ValueError, f"{name}: its data begins at") for name in ("q", "k", "v")),
    *((name, _odd_stride, ValueError, f"{name}: ") for name in ("q", "k", "v", "out")),
    *((name, _strided_columns, ValueError, f"{name}: its last dimension has stride 2")
      for name in ("q", "k", "v", "out")),
    ("out", lambda x: x[:1].expand(x.shape), ValueError, "out: "),
    ("out", lambda x: x[:, :, :1].expand(x.shape), ValueError, "out: "),
    ("lse", lambda x: x[:, :1].expand(x.shape), ValueError, "lse: "),
    ("q", lambda x: x.cpu().numpy(), TypeError, ""),
    ("k", lambda x: x.cpu().numpy(), TypeError, "k: "),
    ("v", lambda _: None, TypeError, "v: "),
    *((name, lambda x: x.clone().requires_grad_(), ValueError, "out: got one in a call that grad")
      for name in ("q", "v")),
]  # fmt: skip

BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"scale": float("nan")}, ValueError, "scale: "),
    ({"scale": float("inf")}, ValueError, "scale: "),
    ({"scale": -1.0}, ValueError, "scale: "),
    ({"scale": "big"}, TypeError, "scale: "),
    ({"layout": "sbhd"}, ValueError, "layout: "),
    ({"causal": "upper"}, ValueError, "causal: "),
    ({"kernel": "sm1"}, ValueError, "kernel: got \"sm1\""),
    ({"kernel": "cpu"}, NotImplementedError, "kernel: cannot be served: cpu: "),
    ({"layout": "bhsd"}, ValueError, ""),
]  # fmt: skip


def _expect(
    arguments: dict[str, Any], kept: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    """The call fails so, and what `kept` holds are the poisoned outputs, still poisoned."""
    before = {name: memory.bits(x).clone() for name, x in kept.items() if name in ("out", "lse")}
    with pytest.raises(kind) as caught:
        fm.flash_attention(**arguments, return_lse=True)
    assert isinstance(caught.value, fm.FlashMoEError)
    assert str(caught.value).startswith(sentence)
    torch.cuda.synchronize()
    for name, want in before.items():
        assert torch.equal(memory.bits(kept[name]), want), f"{name} was written to"


def _name_of(entry: tuple[Any, ...]) -> str:
    return f"{entry[0]}-{entry[-1]}"


@pytest.mark.parametrize("entry", BAD_TENSORS, ids=_name_of)
def test_bad_tensor(entry: tuple[str, Any, type[Exception], str], family: str) -> None:
    name, change, kind, sentence = entry
    kept = _good()
    given = kept[name]
    bad = given.cpu() if change is _CPU else change(given)
    _expect({**kept, name: bad, "kernel": family}, kept, kind, sentence)


@pytest.mark.parametrize("entry", BAD_TENSORS, ids=_name_of)
def test_bad_tensor_in_a_call_that_was_good_before(
    entry: tuple[str, Any, type[Exception], str], family: str
) -> None:
    """The library keeps what a good call came to for the next of its kind."""
    name, change, kind, sentence = entry
    for _ in range(2):
        fm.flash_attention(**_good(), return_lse=True, kernel=family)
    kept = _good()
    bad = kept[name].cpu() if change is _CPU else change(kept[name])
    _expect({**kept, name: bad, "kernel": family}, kept, kind, sentence)
    fm.flash_attention(**kept, return_lse=True, kernel=family)


@pytest.mark.parametrize("entry", BAD_OPTIONS, ids=lambda entry: str(entry[0]))
def test_bad_option(entry: tuple[dict[str, Any], type[Exception], str], family: str) -> None:
    options, kind, sentence = entry
    kept = _good()
    _expect({**kept, "kernel": family, **options}, kept, kind, sentence)


def test_fp32_on_a_gpu_names_what_is_accepted(family: str) -> None:
    x = torch.randn(1, 20, 2, 64, device="cuda:0")
    for kernel in (None, family):
        with pytest.raises(
            (TypeError, NotImplementedError), match=r"fp32, accepted.* fp16 and bf16"
        ):
            fm.flash_attention(x, x, x, kernel=kernel)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_sm90_by_name_refuses_a_stride_of_zero_along_the_sequence(name: str, sm90: str) -> None:
    kept = _good()
    broadcast = kept[name].narrow(1, 0, 1).expand(kept[name].shape)
    arguments = {**kept, name: broadcast, "kernel": sm90}
    _expect(arguments, kept, NotImplementedError, "kernel: cannot be served: sm90: a stride ")


def test_the_next_call_is_unharmed(family: str) -> None:
    kept = _good()
    want = fm.flash_attention(kept["q"], kept["k"], kept["v"], kernel=family)
    with pytest.raises(ValueError, match=r"^k: "):
        fm.flash_attention(kept["q"], kept["k"][:1], kept["v"], kernel=family)
    again = fm.flash_attention(kept["q"], kept["k"], kept["v"], kernel=family)
    assert torch.equal(again, want)
    torch.cuda.synchronize()


def _c_params(kept: dict[str, torch.Tensor]) -> capi.AttentionForwardParams:
    params = capi.AttentionForwardParams(struct_size=c.sizeof(capi.AttentionForwardParams))
    params.keep = {name: memory.Placed(x, x, ()).raw() for name, x in kept.items()}
    for name, view in params.keep.items():
        setattr(params, name, c.pointer(view))
    return params


def _far_device(params: capi.AttentionForwardParams) -> None:
    for view in params.keep.values():
        view.device = capi.Device(capi.CUDA, 99)


def _set(path: str, value: Any) -> Callable[[capi.AttentionForwardParams], None]:
    def change(params: capi.AttentionForwardParams) -> None:
        name, _, part = path.partition(".")
        if part:
            setattr(params.keep[name], part, value)
        else:
            setattr(params, name, value)

    return change


BAD_PARAMS: list[tuple[str, Callable[[capi.AttentionForwardParams], None], int, str]] = [
    ("future", _set("struct_size", 4096), 1, "struct_size"),
    ("no q", _set("q", None), 1, "q: got a null tensor"),
    ("no out", _set("out", None), 1, "out: got a null tensor"),
    ("null k", _set("k.data", None), 1, "k: its data is a null pointer"),
    ("null shape", _set("v.shape", None), 1, "v: its shape is a null pointer"),
    ("reserved", _set("reserved", 1), 1, "reserved"),
    ("layout", _set("layout", 7), 1, "layout: got 7"),
    ("causal", _set("causal", -1), 1, "causal: got -1"),
    ("scale", _set("scale", float("nan")), 1, "scale: "),
    ("device type", _set("q.device", capi.Device(10, 0)), 1, "q: got device type 10"),
    ("one device", _set("v.device", capi.Device(capi.CUDA, 99)), 1, "v: it is on cuda:99"),
    ("no device", _far_device, 4, "cuda:99 does not exist"),
    ("negative", _set("q.shape", (c.c_int64 * 4)(_B, -1, _HQ, _D)), 1, "q: got shape"),
    ("vast", _set("k.shape", (c.c_int64 * 4)(2, 2**40, 2**30, _D)), 1, "k: got shape"),
    ("lanes", _set("k.dtype", capi.DType(2, 16, 2)), 1, "k: "),
]


@pytest.mark.parametrize("entry", BAD_PARAMS, ids=lambda entry: entry[0])
def test_bad_params_of_the_c_abi(entry: tuple[str, Any, int, str], family: str) -> None:
    _, change, status, sentence = entry
    kept = _good()
    params = _c_params(kept)
    params.kernel = family.encode()
    before = {name: memory.bits(kept[name]).clone() for name in ("out", "lse")}
    change(params)
    lib = capi.load()
    assert lib.flashmoe_attention_forward(params, None, 0, None) == status
    assert sentence in lib.flashmoe_last_error().decode()
    plan = capi.Plan(struct_size=c.sizeof(capi.Plan))
    assert lib.flashmoe_attention_forward_plan(params, plan) == status
    torch.cuda.synchronize()
    for name, want in before.items():
        assert torch.equal(memory.bits(kept[name]), want), f"{name} was written to"
