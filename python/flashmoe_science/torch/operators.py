"""The operators torch.ops.flashmoe.*, and the public functions on top of them.

An operator allocates its results only from the shapes of its arguments, as its fake does, so that
one graph serves every length. The functions use flashmoe_science's own, shorter path for tensors
with memory. They use the operators for stand-ins: under torch.compile, torch.export and fake
tensors.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

import flashmoe_science as fm
from flashmoe_science import _autograd, _core, _moe, _moe_autograd
from flashmoe_science._dispatch import (
    ATTENTION,
    ATTENTION_BACKWARD,
    NEGATED,
    NO_DERIVATIVE,
    Words,
    is_transformed,
    refuse_gradient,
    refuse_nested,
    refuse_tangent,
)
from flashmoe_science.attention import (
    BOUNDS,
    SCALES,
    SEQUENCES,
    AttentionGradients,
    _flash_attention_backward,
    parse_wanted,
)
from flashmoe_science.errors import (
    ArgumentTypeError,
    DeviceError,
    InvalidArgumentError,
    UnsupportedError,
    _TransformedError,
)
from flashmoe_science.moe import Activation, Gate, MoeRouting, Scoring

_Arguments = Sequence[Any]
_Library: Any = torch.library.Library
_LIBRARY = _Library("flashmoe", "DEF")
_TAGS = (
    # The kernels get the caller's strides. Results do not depend on them, but a change of order
    # would be a silent copy.
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
    torch.Tag.pt2_compliant_tag,
)
_MOE = _moe.WORDS
_IN_TRANSFORM = (
    "torch.ops.flashmoe.{0}: got a tensor that a transform of torch.func differentiates, accepted "
    "are others; "
)
_BY_FUNCTIONS = "outside of torch.compile, call the function of flashmoe_science of that name"


_RECORDS: dict[Any, Callable[..., Any]] = {}  # by overload


def _keys_below(key: Any) -> Any:
    """Every dispatch key that torch handles after this one. A set has a bit per key, in order,
    except PythonDispatcher, which stays in a set until torch removes it."""
    keys: Any = torch.DispatchKeySet
    below = keys.from_raw_repr(keys(key).raw_repr() - 1)
    return below | keys(torch.DispatchKey.PythonDispatcher)


_BELOW_AUTOGRAD = _keys_below(torch.DispatchKey.AutogradOther)


def _define(
    name: str,
    words: Words,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    fold: Callable[..., Any] | None = None,
    check: Callable[..., Any] | None = None,
    record: Callable[..., Any] | None = None,
) -> Any:
    """Registers flashmoe::name and returns its only overload.

    `fold` takes the dimensions and arguments of torch.func.vmap. It returns the arguments of one
    call for all entries and the first dimension of its outputs, or None. `check` raises what the
    kernel would raise. `record` takes a function that calls overloads below autograd, and the
    arguments; it makes the outputs if torch records gradients. Without `record` that is refused.
    """
    _LIBRARY.define(name + schema, tags=_TAGS)

    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, kernel, key)
    checked = fake if check is None else _checked(fake, check)
    torch.library.register_fake(f"flashmoe::{name}", checked, lib=_LIBRARY)
    packet: Any = getattr(torch.ops.flashmoe, name)
    overload = packet.default
    names = [argument.name for argument in overload._schema.arguments]

    def differentiate(keys: Any, *arguments: Any) -> Any:
        # torch.library.register_autograd would not do: it silently drops tangents and does not
        # support transforms of torch.func.
        tensors = []
        for argument, value in zip(names, arguments, strict=True):
            if isinstance(value, torch.Tensor):
                refuse_nested(argument, value)
                refuse_tangent(argument, value, words)
                if record is None:
                    refuse_gradient(argument, value, words)
                tensors.append(value)

        def below(overload: Any, *arguments: Any) -> Any:
            return overload.redispatch(keys & _BELOW_AUTOGRAD, *arguments)

        if record is not None and _autograd.is_recorded(*tensors):
            if any(map(is_transformed, tensors)):
                raise _TransformedError(_IN_TRANSFORM.format(name) + _BY_FUNCTIONS)
            return record(below, *arguments)
        return below(overload, *arguments)

    _LIBRARY.impl(name, differentiate, "Autograd", with_keyset=True)

    def refuse_negated(*arguments: Any) -> None:
        """Replaces torch's rule, which copies: Inductor would turn that into a copy of the raw
        memory."""
        for argument, value in zip(names, arguments, strict=False):
            if isinstance(value, torch.Tensor) and value.is_neg():
                raise InvalidArgumentError(NEGATED.format(argument))

    _LIBRARY.impl(name, refuse_negated, "Negative")
    rule = batching_rule(overload, fold)
    torch.library.register_vmap(f"flashmoe::{name}", rule, lib=_LIBRARY)
    if record is not None:
        _RECORDS[overload] = record
    return overload


def _checked(fake: Callable[..., Any], check: Callable[..., Any]) -> Callable[..., Any]:
    """The fake, which also raises what the kernel would raise."""

    def checked(*arguments: Any) -> Any:
        made = fake(*arguments)
        _check_early(check, *arguments)
        return made

    return checked


def _check_early(check: Callable[..., Any], *arguments: Any) -> None:
    """Calls check(*arguments) if all numbers and the device's limits are known: its errors are then
    right. Symbols are checked when the graph runs: reading one here would specialise the graph to
    its value."""
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    numbers = (n for x in tensors for n in (*x.shape, *x.stride()))
    known = not any(isinstance(n, torch.SymInt) for n in (*arguments, *numbers))
    if not known or len({x.device for x in tensors}) != 1:
        return
    try:
        check(*arguments)
    except DeviceError:  # the program may target another machine
        pass
    except UnsupportedError:
        first = tensors[0]
        # The device of meta tensors is unknown, and this build may lack GPUs.
        if not (first.is_meta or (first.is_cuda and _core.cuda_device_count() == 0)):
            raise


def _described(tensor: torch.Tensor | None) -> Any:
    """A description of a tensor for plans, where it need not exist."""
    if tensor is None:
        return None
    return _autograd.described(tensor.shape, tensor.dtype, tensor.device, tuple(tensor.stride()))


def _anywhere(overload: Any, inside: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the overload, or `inside` if a transform of torch.func differentiates it: only a
    torch.autograd.Function can serve that, not an operator."""

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return overload(*arguments)
        try:
            return overload(*arguments)
        except _TransformedError:
            return inside(*arguments)

    return call


def _call(overload: Any, *arguments: Any) -> Any:
    """The same for one defined with `record`, which defines its gradients."""
    if torch.compiler.is_dynamo_compiling():
        return overload(*arguments)
    try:
        return overload(*arguments)
    except _TransformedError:
        return _RECORDS[overload](_call, *arguments)


def batching_rule(call: Callable[..., Any], fold: Callable[..., Any] | None) -> Callable[..., Any]:
    """The rule of torch.func.vmap: one call if `fold` makes one from the arguments, else one per
    entry."""

    def rule(info: Any, in_dims: Any, *arguments: Any) -> Any:
        # Lists have lists of dimensions.
        in_dims = [d if isinstance(x, torch.Tensor) else None
                   for x, d in zip(arguments, in_dims, strict=True)]  # fmt: skip
        folded = None if fold is None else fold(in_dims, *arguments)
        if folded is not None:
            together, lead = folded
            made = call(*together)
            if isinstance(made, (tuple, list)):
                return tuple(x.unflatten(0, lead) for x in made), (0,) * len(made)
            return made.unflatten(0, lead), 0
        # Entries that interleave in memory would be refused.
        apart = [
            x.movedim(dim, 0).contiguous() if dim else x
            for x, dim in zip(arguments, in_dims, strict=True)
        ]
        each = [
            call(*(x if dim is None else x[i] for x, dim in zip(apart, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(each[0], torch.Tensor):
            return torch.stack(each), 0
        return tuple(map(torch.stack, zip(*each, strict=True))), (0,) * len(each[0])

    return rule


def _is_plain(tensor: Any) -> bool:
    """Whether this is a real tensor, in a call that no graph or mode intercepts. It may still
    belong to a transform of torch.func, which is found when it is read."""
    return (
        not torch.compiler.is_dynamo_compiling()
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not tensor.is_meta
        # torch has no public function for this thread's modes. An operator with a kernel for
        # PythonTLSSnapshot would also tell, but takes 2 us instead of 0.1.
        and torch._C._len_torch_dispatch_stack() == 0
    )


_TRACED = "{}: got one in a call that is traced, accepted is None: the graph makes its own"


def _first_given(given: dict[str, Any]) -> str | None:
    for name, value in given.items():
        if value is not None:
            return name
    return None


def _refuse_outputs(**given: Any) -> None:
    name = _first_given(given)
    if name is not None:
        raise InvalidArgumentError(_TRACED.format(name))


def _outside_of_graphs(name: str) -> Callable[[Any], bool]:
    """Like _is_plain, but breaks the graph for a call with such an argument."""
    reason = {"reason": _TRACED.format(name)}
    if "reason" not in inspect.signature(torch.compiler.disable).parameters:  # an older torch
        reason = {}
    disable: Any = torch.compiler.disable
    made: Callable[[Any], bool] = disable(_is_plain, **reason)
    return made


_OUTSIDE_OF_GRAPHS = {
    name: _outside_of_graphs(name)
    for name in ("out", "lse", "dq", "dk", "dv", "pre_activation", "stream")
}


def _leaves_graph(tensor: Any, **given: Any) -> bool:
    """For a call that is not plain: whether given outputs make it leave its torch.compile graph, to
    become plain. Raises if it cannot leave."""
    name = _first_given(given)
    if name is not None and torch.compiler.is_dynamo_compiling():
        return _OUTSIDE_OF_GRAPHS[name](tensor)
    _refuse_outputs(**given)
    return False


def _check_rank(name: str, tensor: torch.Tensor, *accepted: int) -> None:
    if tensor.dim() not in accepted:
        text = " or ".join(map(str, accepted))
        raise InvalidArgumentError(f"{name}: got {tensor.dim()} dimensions, accepted are {text}")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def cuda_devices() -> int:
    """flashmoe_science.cuda_device_count(), also for traced calls."""
    return fm.cuda_device_count()


# ---- attention -------------------------------------------------------------------------------


def _empty_out(q: torch.Tensor, v: torch.Tensor, layout: str) -> torch.Tensor:
    """Allocates token by token in memory in either layout, for the next reader."""
    _check_rank("q", q, 4)
    _check_rank("v", v, 4)
    order = (0, 2, 1, 3) if layout == "bhsd" else (0, 1, 2, 3)
    shape = (*q.shape[:3], v.shape[3])
    return torch.empty_permuted(shape, order, dtype=q.dtype, device=q.device)


def _empty_lse(q: torch.Tensor, layout: str) -> torch.Tensor:
    batch, seq, heads = q.shape[0], q.shape[1], q.shape[2]
    if layout == "bhsd":
        seq, heads = heads, seq
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((batch, heads, seq), dtype=dtype)


# Arguments of the operators, in the order of their schema. Optional tensors go before the options.
_ATTENTION_TENSORS = ("q", "k", "v", "sinks", "attn_bias", "attn_mask")
_DIFFERENTIABLE = 4  # the first of them
_ATTENTION_OPTIONS = (
    "causal", "window_left", "window_right", "scale", "softcap", "layout", "kernel"
)  # fmt: skip


def _attention_arguments(arguments: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and options by the names of flash_attention."""
    count = len(_ATTENTION_TENSORS)
    tensors = dict(zip(_ATTENTION_TENSORS, arguments[:count], strict=True))
    options = dict(zip(_ATTENTION_OPTIONS, arguments[count:], strict=True))
    return tensors, _with_window(options)


def _with_window(options: dict[str, Any]) -> dict[str, Any]:
    """The options of an operator in the form of the functions."""
    left, right = options.pop("window_left"), options.pop("window_right")
    options["window"] = None if left is None and right is None else (left, right)
    options["causal"] = False if options["causal"] == "none" else options["causal"]
    return options


def _attention_fake(return_lse: bool) -> Callable[..., Any]:
    def fake(*arguments: Any) -> Any:
        tensors, options = _attention_arguments(arguments)
        q, layout = tensors["q"], options["layout"]
        out = _empty_out(q, tensors["v"], layout)
        return (out, _empty_lse(q, layout)) if return_lse else out

    return fake


def _attention_kernel(return_lse: bool) -> Callable[..., Any]:
    def kernel(*arguments: Any) -> Any:
        tensors, options = _attention_arguments(arguments)
        out = _empty_out(tensors["q"], tensors["v"], options["layout"])
        call: Any = _core.flash_attention
        return call(**tensors, **options, return_lse=return_lse, out=out, lse=None, stream=None)

    return kernel


def _attention_check(return_lse: bool) -> Callable[..., None]:
    def check(*arguments: Any) -> None:
        tensors, options = _attention_arguments(arguments)
        described = {name: _described(tensor) for name, tensor in tensors.items()}
        _core.plan("attention_forward", described, options | {"return_lse": return_lse})

    return check


def _attention_fold(in_dims: Any, *arguments: Any) -> Any:
    if None in in_dims[:3] or any(dim is not None for dim in in_dims[3:]):
        return None  # data that the entries share would be copied
    pairs = arguments[_DIFFERENTIABLE : len(_ATTENTION_TENSORS)]
    if any(x is not None and x.shape[0] != 1 for x in pairs):
        return None  # nor would they have the larger batch
    tensors = [x.movedim(dim, 0) for x, dim in zip(arguments[:3], in_dims[:3], strict=True)]
    return (*(x.flatten(0, 1) for x in tensors), *arguments[3:]), tensors[0].shape[:2]


def _attention_differentiate(options: _Arguments) -> Callable[..., Any]:
    """The gradients of a call with these, for _autograd."""

    def differentiate(
        dout: Any, dlse: Any, q: Any, k: Any, v: Any, sinks: Any, attn_bias: Any, attn_mask: Any,
        out: Any, lse: Any, wanted: Any,
    ) -> Any:  # fmt: skip
        if wanted[_DIFFERENTIABLE]:
            raise UnsupportedError(_autograd.NO_BIAS_GRADIENT)
        wanted = wanted[:_DIFFERENTIABLE]
        # The kernel is for the forward call only.
        made = _call_attention_backward(
            dout.resolve_neg(), q, k, v, out, lse, dlse, sinks, attn_bias, attn_mask, *options[:-1],
            list(wanted), None,
        )  # fmt: skip
        return *_wanted_alone(made, wanted, sinks), None, None

    return differentiate


def _check_gradients(*arguments: Any) -> None:
    tensors, options = _attention_arguments(arguments)
    del options["kernel"]  # is of the forward call alone
    pairs = {name: tensors.pop(name) for name in _ATTENTION_TENSORS[_DIFFERENTIABLE:]}
    reason = _autograd.lacks_gradients(tensors, options, pairs)
    if reason:
        raise UnsupportedError(reason)


def _attention_record(return_lse: bool) -> Callable[..., Any]:
    count = len(_ATTENTION_TENSORS)

    def record(below: Callable[..., Any], *arguments: Any) -> Any:
        if _autograd.is_recorded(arguments[_DIFFERENTIABLE]):
            raise UnsupportedError(_autograd.NO_BIAS_GRADIENT)
        _check_early(_check_gradients, *arguments)
        options = arguments[count:]
        tensors = dict(zip(_ATTENTION_TENSORS, arguments[:count], strict=True))
        made = _autograd.attend(
            lambda *tensors: below(_attention_with_lse, *tensors, *options),
            _attention_differentiate(options), tensors,
        )  # fmt: skip
        return tuple(made) if return_lse else made[0]

    return record


def _attention_with_lse_inside(*arguments: Any) -> Any:
    apply: Any = _TransformedAttention.apply
    return apply(*arguments)


def _attention_inside(*arguments: Any) -> Any:
    return _attention_with_lse_inside(*arguments)[0]


def _refuse_tangents(names: Sequence[str], tangents: _Arguments, words: Words) -> NoReturn:
    """Like refuse_tangent, inside a transform of torch.func."""
    having = (name for name, x in zip(names, tangents, strict=False) if x is not None)
    raise InvalidArgumentError(NO_DERIVATIVE.format(next(having, names[0]), words.name))


_ATTENTION_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? attn_bias, Tensor? attn_mask, "
    "str causal, SymInt? window_left, SymInt? window_right, float? scale, float? softcap, "
    "str layout, str? kernel) -> "
)
_attention = _define(
    "attention", ATTENTION, _ATTENTION_SCHEMA + "Tensor", _attention_kernel(False),
    _attention_fake(False), _attention_fold, _attention_check(False), _attention_record(False),
)  # fmt: skip
_attention_with_lse = _define(
    "attention_with_lse", ATTENTION, _ATTENTION_SCHEMA + "(Tensor, Tensor)",
    _attention_kernel(True), _attention_fake(True), _attention_fold, _attention_check(True),
    _attention_record(True),
)  # fmt: skip
_call_attention = _anywhere(_attention, _attention_inside)

# The same for ragged, padded and paged batches.

_RAGGED = Words(
    "attention with sequences", ATTENTION.tensors, ATTENTION.outputs, "has no backward pass yet"
)
_RAGGED_IN_TRANSFORM = (
    "{}: got one in a call that a transform of torch.func differentiates, accepted is None: "
    "of ragged and padded batches torch's autograd alone takes gradients in this version"
)
_TABLES = len(SEQUENCES) - BOUNDS  # the first of them
_RAGGED_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? attn_bias, Tensor? attn_mask, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "Tensor? k_begin, Tensor? batch_index, "
    "Tensor? page_table, Tensor? q_offset, Tensor? k_scale, Tensor? v_scale, "
    "SymInt? max_seqlen_q, "
    "SymInt? max_seqlen_k, SymInt? split_size, str causal, SymInt? window_left, "
    "SymInt? window_right, float? scale, float? softcap, "
    "str layout, str? kernel) -> "
)


def _ragged_arguments(arguments: _Arguments) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of the operator of dense batches, and the sequences."""
    first = len(_ATTENTION_TENSORS)
    behind = first + len(SEQUENCES)
    return (*arguments[:first], *arguments[behind:]), tuple(arguments[first:behind])


def _ragged_fake(return_lse: bool) -> Callable[..., Any]:
    def fake(*arguments: Any) -> Any:
        dense, _ = _ragged_arguments(arguments)
        return _attention_fake(return_lse)(*dense)

    return fake


def _ragged_kernel(return_lse: bool) -> Callable[..., Any]:
    def kernel(*arguments: Any) -> Any:
        dense, sequences = _ragged_arguments(arguments)
        tensors, options = _attention_arguments(dense)
        out = _empty_out(tensors["q"], tensors["v"], options["layout"])
        call: Any = _core.flash_attention
        return call(**tensors, **options, return_lse=return_lse, out=out, lse=None, stream=None,
                    sequences=sequences)  # fmt: skip

    return kernel


def _ragged_check(return_lse: bool) -> Callable[..., None]:
    def check(*arguments: Any) -> None:
        dense, sequences = _ragged_arguments(arguments)
        tensors, options = _attention_arguments(dense)
        named = dict(zip(SEQUENCES, sequences, strict=True))
        bounds = {name: named.pop(name) for name in SEQUENCES[-BOUNDS:]}
        described = {name: _described(tensor) for name, tensor in (tensors | named).items()}
        _core.plan("attention_forward", described, options | bounds | {"return_lse": return_lse})

    return check


def _refuse_shared_keys(*arguments: Any) -> None:
    """Also for graphs with symbolic extents, which the library does not check."""
    dense, sequences = _ragged_arguments(arguments)
    named = dict(zip(SEQUENCES, sequences, strict=True))
    given = [n for n in ("batch_index", "page_table", *SCALES) if named[n] is not None]
    if given:
        tensors, _ = _attention_arguments(dense)
        recorded = next(n for n, x in tensors.items() if x is not None and x.requires_grad)
        lacking = _autograd.SCALED_KEYS if given[0] in SCALES else _autograd.SHARED_KEYS
        raise UnsupportedError(lacking.format(recorded, given[0]))


def _check_ragged_gradients(*arguments: Any) -> None:
    dense, sequences = _ragged_arguments(arguments)
    tensors, options = _attention_arguments(dense)
    del options["kernel"]  # is of the forward call alone
    pairs = {name: tensors.pop(name) for name in _ATTENTION_TENSORS[_DIFFERENTIABLE:]}
    tables, bounds = _autograd.split(sequences)
    reason = _autograd.lacks_gradients(tensors, options, pairs | tables, bounds)
    if reason:
        raise UnsupportedError(reason)


def _ragged_record(return_lse: bool) -> Callable[..., Any]:
    count = len(_ATTENTION_TENSORS) + _TABLES  # tensors

    def record(below: Callable[..., Any], *arguments: Any) -> Any:
        if _autograd.is_recorded(arguments[_DIFFERENTIABLE]):
            raise UnsupportedError(_autograd.NO_BIAS_GRADIENT)
        _refuse_shared_keys(*arguments)
        _check_early(_check_ragged_gradients, *arguments)
        *bounds, kernel = arguments[count:]  # and options

        def differentiate(
            dout: Any, dlse: Any, q: Any, k: Any, v: Any, sinks: Any, *others: Any
        ) -> Any:
            *tables, out, lse, wanted = others  # after the bias and the mask
            wanted = wanted[:_DIFFERENTIABLE]
            made = _ragged_backward(
                dout.resolve_neg(), q, k, v, out, lse, dlse, sinks, *tables, *bounds, list(wanted),
                None,
            )  # fmt: skip
            return *_wanted_alone(made, wanted, sinks), *(None for _ in tables)

        names = (*_ATTENTION_TENSORS, *SEQUENCES[:_TABLES])
        made = _autograd.attend(
            lambda *tensors: below(_ragged_attention_with_lse, *tensors, *bounds, kernel),
            differentiate, dict(zip(names, arguments[:count], strict=True)),
        )  # fmt: skip
        return tuple(made) if return_lse else made[0]

    return record


_ragged_attention = _define(
    "ragged_attention", _RAGGED, _RAGGED_SCHEMA + "Tensor", _ragged_kernel(False),
    _ragged_fake(False), check=_ragged_check(False), record=_ragged_record(False),
)  # fmt: skip
_ragged_attention_with_lse = _define(
    "ragged_attention_with_lse", _RAGGED, _RAGGED_SCHEMA + "(Tensor, Tensor)",
    _ragged_kernel(True), _ragged_fake(True), check=_ragged_check(True),
    record=_ragged_record(True),
)  # fmt: skip
_call_attention_with_lse = _anywhere(_attention_with_lse, _attention_with_lse_inside)


class _TransformedAttention(torch.autograd.Function):
    """attention_with_lse, differentiable by a transform of torch.func."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _call_attention_with_lse(*arguments)  # another transform may differentiate this

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        count = len(_ATTENTION_TENSORS)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:count], *output)
        ctx.options = inputs[count:]

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        wanted = ctx.needs_input_grad[: len(_ATTENTION_TENSORS)]
        differentiate = _attention_differentiate(ctx.options)
        made = _autograd.gradients(differentiate, dout, dlse, ctx.saved_tensors, wanted)
        return *made, *(None for _ in ctx.options)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return batching_rule(_call_attention_with_lse, _attention_fold)(info, in_dims, *arguments)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_tangents(_ATTENTION_TENSORS, tangents, ATTENTION)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    kernel: str | None = None,
    stream: object = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    k_begin: torch.Tensor | None = None,
    batch_index: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    q_offset: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    split_size: int | None = None,
    prior_out: torch.Tensor | None = None,
    prior_lse: torch.Tensor | None = None,
) -> Any:
    """Like flashmoe_science.flash_attention. In a graph, out, lse and stream are None, and results
    are token by token in memory in either layout."""
    sequences = (
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, k_begin, batch_index, page_table,
        q_offset, k_scale, v_scale, max_seqlen_q, max_seqlen_k, split_size,
    )  # fmt: skip
    if _is_plain(q) or _leaves_graph(q, out=out, lse=lse, stream=stream):
        try:
            return _core.flash_attention(
                q, k, v, causal, window, scale, softcap, sinks, layout, return_lse, out, lse,
                kernel, stream, sequences, attn_bias, attn_mask, prior_out, prior_lse,
            )  # fmt: skip
        except _TransformedError:
            _refuse_outputs(out=out, lse=lse, stream=stream)
    if prior_out is not None or prior_lse is not None:
        named: dict[str, Any] = dict(zip(SEQUENCES, sequences, strict=True))
        own = flash_attention(
            q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, sinks=sinks,
            attn_bias=attn_bias, attn_mask=attn_mask, layout=layout, return_lse=True,
            kernel=kernel, **named,
        )  # fmt: skip
        return _merged_in(prior_out, prior_lse, own, layout, return_lse)
    q, k, v = _autograd.autocast(q, k, v)
    if any(x is not None for x in sequences):
        ragged = _ragged_attention_with_lse if return_lse else _ragged_attention
        options = (*_seen(causal, window), scale, softcap, layout, kernel)
        return _outside_of_transforms(
            ragged, sequences, q, k, v, sinks, attn_bias, attn_mask, *sequences, *options
        )
    call = _call_attention_with_lse if return_lse else _call_attention
    options = (*_seen(causal, window), scale, softcap, layout, kernel)
    return call(q, k, v, sinks, attn_bias, attn_mask, *options)


def _merged_in(prior_out: Any, prior_lse: Any, own: Any, layout: str, return_lse: bool) -> Any:
    """Merges in two steps, as one untraced call does."""
    from flashmoe_science.torch import merge

    for name, given in (("prior_out", prior_out), ("prior_lse", prior_lse)):
        if given is None:
            raise InvalidArgumentError(f"{name}: got None, accepted is a tensor beside the other")
    lses = (prior_lse, own[1])
    return merge.merge_states((prior_out, own[0]), lses, layout=layout, return_lse=return_lse)


def _outside_of_transforms(overload: Any, sequences: Sequence[Any], *arguments: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return overload(*arguments)
    try:
        return overload(*arguments)
    except _TransformedError:
        name = next(name for name, x in zip(SEQUENCES, sequences, strict=True) if x is not None)
        raise UnsupportedError(_RAGGED_IN_TRANSFORM.format(name)) from None


def _seen(causal: bool | str, window: Sequence[int | None] | None) -> tuple[Any, ...]:
    """causal, window_left and window_right of an operator."""
    name = {True: "bottom_right", False: "none"}[causal] if isinstance(causal, bool) else causal
    return (name, None, None) if window is None else (name, *window)


# ---- its backward ----------------------------------------------------------------------------

_BACKWARD_TENSORS = (
    "dout", "q", "k", "v", "out", "lse", "dlse", "sinks", "attn_bias", "attn_mask"
)  # fmt: skip
_GRADIENTS = {"dq": "q", "dk": "k", "dv": "v", "dsinks": "sinks"}
_BACKWARD_OPTIONS = (*_ATTENTION_OPTIONS[:-1], "wanted", "kernel")


def _backward_arguments(arguments: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and options by the names of flash_attention_backward, dense."""
    count = len(_BACKWARD_TENSORS)
    tensors = dict(zip(_BACKWARD_TENSORS, arguments[:count], strict=True))
    options = dict(zip(_BACKWARD_OPTIONS, arguments[count:], strict=True))
    return tensors, _with_window(options)


def _empty_gradients(tensors: dict[str, Any], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Allocates token by token in memory, and empty if not wanted."""
    wanted, layout = parse_wanted(options["wanted"]), options["layout"]
    made = {}
    for (name, of), want in zip(_GRADIENTS.items(), wanted, strict=True):
        tensor = tensors[of]
        if tensor is None or not want:
            made[name] = tensors["q"].new_empty((tensors["q"].shape[0], 0))
        elif name == "dsinks":
            made[name] = tensor.new_empty(tensor.shape)
        else:
            made[name] = _empty_out(tensor, tensor, layout)
    return made


def _wanted_alone(made: Sequence[Any], wanted: Sequence[bool], sinks: Any) -> AttentionGradients:
    """The operator's outputs without the empty ones that are not wanted."""
    there = (*wanted[:3], wanted[3] and sinks is not None)
    return AttentionGradients(*(x if is_ else None for x, is_ in zip(made, there, strict=True)))


def _backward_fake(*arguments: Any) -> Any:
    return tuple(_empty_gradients(*_backward_arguments(arguments)).values())


def _backward_kernel(*arguments: Any) -> Any:
    return _compute_gradients(*_backward_arguments(arguments), {})


def _compute_gradients(
    tensors: dict[str, Any], options: dict[str, Any], sequences: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    made = _empty_gradients(tensors, options)
    wanted = [
        name
        for name, want in zip(made, options.pop("wanted"), strict=True)
        if want and tensors[_GRADIENTS[name]] is not None
    ]
    if wanted:
        tensors["dout"] = _autograd.readable(tensors["dout"])
        given: dict[str, Any] = tensors | options | {name: made[name] for name in wanted}
        given |= {name: x for name, x in sequences.items() if name not in SCALES}
        with torch.no_grad():
            fm.flash_attention_backward(**given, wanted=(False, False, False, False))
    return tuple(made.values())


def _backward_check(*arguments: Any) -> None:
    _check_backward_plan(*_backward_arguments(arguments))


def _check_backward_plan(tensors: dict[str, Any], options: dict[str, Any]) -> None:
    described = {name: _described(tensor) for name, tensor in tensors.items()}
    # Its kernel makes a contiguous copy if the library needs it.
    described["dout"] = _described(tensors["dout"].contiguous())
    _core.plan("attention_backward", described, options)


def _backward_fold(in_dims: Any, *arguments: Any) -> Any:
    count = len(_BACKWARD_TENSORS)
    pairs = list(zip(arguments[:count], in_dims[:count], strict=True))
    *_, sinks, attn_bias, attn_mask = arguments[:count]
    if sinks is not None:
        return None  # one call would add up the entries' dsinks
    if attn_bias is not None or attn_mask is not None:
        return None  # it may broadcast
    if any(x is not None and dim is None for x, dim in pairs):
        return None  # data that the entries share would be copied
    tensors = [None if x is None else x.movedim(dim, 0) for x, dim in pairs]
    lead = pairs[0][0].movedim(pairs[0][1], 0).shape[:2]
    return (*(x if x is None else x.flatten(0, 1) for x in tensors), *arguments[count:]), lead


def _backward_record(below: Callable[..., Any], *arguments: Any) -> Any:
    count = len(_BACKWARD_TENSORS)
    return _autograd.once(
        lambda *tensors: below(_attention_backward, *tensors, *arguments[count:]),
        *arguments[:count],
    )


def _backward_inside(*arguments: Any) -> Any:
    apply: Any = _TransformedBackward.apply
    return apply(*arguments)


_attention_backward = _define(
    "attention_backward", ATTENTION_BACKWARD,
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    "Tensor? sinks, Tensor? attn_bias, Tensor? attn_mask, str causal, SymInt? window_left, "
    "SymInt? window_right, float? scale, float? softcap, str layout, bool[] wanted, str? kernel) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    _backward_kernel, _backward_fake, _backward_fold, _backward_check, _backward_record,
)  # fmt: skip
_call_attention_backward = _anywhere(_attention_backward, _backward_inside)


class _TransformedBackward(torch.autograd.Function):
    """attention_backward in a transform of torch.func, which cannot differentiate it further."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _call_attention_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> Any:
        _autograd.refuse_second()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return batching_rule(_call_attention_backward, _backward_fold)(info, in_dims, *arguments)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_tangents(_BACKWARD_TENSORS, tangents, ATTENTION_BACKWARD)


# The same for ragged and padded batches.


def _ragged_backward_arguments(
    arguments: Sequence[Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Tensors, options and sequences by the names of flash_attention_backward."""
    first = len(_BACKWARD_TENSORS)
    behind = first + len(SEQUENCES)
    tensors, options = _backward_arguments((*arguments[:first], *arguments[behind:]))
    return tensors, options, dict(zip(SEQUENCES, arguments[first:behind], strict=True))


def _ragged_backward_fake(*arguments: Any) -> Any:
    tensors, options, _ = _ragged_backward_arguments(arguments)
    return tuple(_empty_gradients(tensors, options).values())


def _ragged_backward_kernel(*arguments: Any) -> Any:
    return _compute_gradients(*_ragged_backward_arguments(arguments))


def _ragged_backward_check(*arguments: Any) -> None:
    tensors, options, named = _ragged_backward_arguments(arguments)
    bounds = {name: named.pop(name) for name in SEQUENCES[_TABLES:]}
    _check_backward_plan(tensors | named, options | bounds)


def _ragged_backward_record(below: Callable[..., Any], *arguments: Any) -> Any:
    count = len(_BACKWARD_TENSORS) + _TABLES
    return _autograd.once(
        lambda *tensors: below(_ragged_backward, *tensors, *arguments[count:]),
        *arguments[:count],
    )


_ragged_backward = _define(
    "ragged_attention_backward", ATTENTION_BACKWARD,
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    "Tensor? sinks, Tensor? attn_bias, Tensor? attn_mask, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? k_begin, "
    "Tensor? batch_index, Tensor? page_table, Tensor? q_offset, "
    "Tensor? k_scale, Tensor? v_scale, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    "SymInt? split_size, str causal, "
    "SymInt? window_left, SymInt? window_right, float? scale, float? softcap, str layout, "
    "bool[] wanted, str? kernel) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    _ragged_backward_kernel, _ragged_backward_fake, check=_ragged_backward_check,
    record=_ragged_backward_record,
)  # fmt: skip


def flash_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    dlse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    causal: bool | str = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    layout: str = "bshd",
    wanted: Sequence[bool] = (True, True, True, True),
    accumulate: bool = False,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    dsinks: torch.Tensor | None = None,
    kernel: str | None = None,
    stream: object = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    k_begin: torch.Tensor | None = None,
    batch_index: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    q_offset: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    split_size: int | None = None,
) -> AttentionGradients:
    """Like flashmoe_science.flash_attention_backward. In a graph, dq, dk, dv, dsinks and stream are
    None, accumulate is False, and results are token by token in memory in either layout."""
    sequences = (
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, k_begin, batch_index, page_table,
        q_offset, None, None, max_seqlen_q, max_seqlen_k, split_size,
    )  # fmt: skip
    given = {"dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks, "stream": stream}
    if _is_plain(q) or _leaves_graph(q, **given):
        try:
            return _flash_attention_backward(  # type: ignore[no-any-return]
                dout, q, k, v, out, lse, dlse, sinks, causal, window, scale, softcap, layout,
                wanted, accumulate, dq, dk, dv, dsinks, kernel, stream, sequences, attn_bias,
                attn_mask,
            )  # fmt: skip
        except _TransformedError:
            _refuse_outputs(**given)
    if accumulate:
        raise InvalidArgumentError(_TRACED.format("accumulate").replace("None", "False"))
    tensors = (dout, q, k, v, out, lse, dlse, sinks, attn_bias, attn_mask)
    options = (*_seen(causal, window), scale, softcap, layout, wanted, kernel)
    if any(x is not None for x in sequences):
        made = _outside_of_transforms(_ragged_backward, sequences, *tensors, *sequences, *options)
    else:
        made = _call_attention_backward(*tensors, *options)
    return _wanted_alone(made, wanted, sinks)


# ---- gradients of the mixture of experts -----------------------------------------------------


def _record_once(overload: Callable[[], Any], tensors: int) -> Callable[..., Any]:
    """Records that a backward, whose first `tensors` arguments are tensors, has no derivative."""

    def record(below: Callable[..., Any], *arguments: Any) -> Any:
        options = arguments[tensors:]
        return _moe_autograd.once(
            lambda *given: below(overload(), *given, *options), *arguments[:tensors]
        )

    return record


def _none(like: torch.Tensor) -> torch.Tensor:
    """Stands for an unwanted gradient: an operator always has the same number of outputs."""
    return like.new_empty((0,))


def _gradient_like(of: torch.Tensor | None, wanted: bool, beside: torch.Tensor) -> torch.Tensor:
    """With the layout of its tensor, if that is dense."""
    return torch.empty_like(of) if wanted and of is not None else _none(beside)


def _readable_rows(dout: torch.Tensor) -> torch.Tensor:
    return _autograd.readable(dout) if dout.numel() > 0 else dout


_MOE_BACKWARD = _moe.BACKWARD
_LAYER_TENSORS = (
    "x", "w_gate_up", "w_down", "weights", "offsets", "pairs", "slots", "w_up", "b_gate_up", "b_up",
    "b_down",
)  # fmt: skip
# The operator's outputs, in the order of MoeGradients.
_LAYER_GRADIENTS = (
    "x", "w_gate_up", "w_up", "w_down", "b_gate_up", "b_up", "b_down", "weights"
)  # fmt: skip
_OUTPUTS_OF = {name: f"d{name}" for name in _LAYER_GRADIENTS}
_LAYER_OPTIONS = ("gate", "activation", "alpha", "limit", "up_offset", "weight_on_input")


def _layer_gradients(arguments: _Arguments) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Tensors by name, options, and the outputs."""
    dout, *rest = arguments
    count = len(_LAYER_TENSORS)
    tensors = {"dout": dout, **dict(zip(_LAYER_TENSORS, rest[:count], strict=True))}
    tensors["pre_activation"] = rest[count]
    *options, wanted, max_workspace_bytes = rest[count + 1 :]
    made = [
        _gradient_like(tensors[name], want, dout)
        for name, want in zip(_LAYER_GRADIENTS, wanted, strict=True)
    ]
    named = dict(zip(_LAYER_OPTIONS, options, strict=True))
    return tensors, named | {"max_workspace_bytes": max_workspace_bytes}, made


def _moe_backward_fake(*arguments: Any) -> Any:
    return tuple(_layer_gradients(arguments)[-1])


def _moe_backward_kernel(*arguments: Any, overwrites: bool = False) -> Any:
    tensors, options, made = _layer_gradients(arguments)
    wanted = arguments[-2]
    outputs = {
        _OUTPUTS_OF[name]: x
        for name, x, want in zip(_LAYER_GRADIENTS, made, wanted, strict=True)
        if want and tensors[name] is not None
    }
    if outputs:
        parts = (tensors.pop(name) for name in ("weights", "offsets", "pairs", "slots"))
        routing = MoeRouting(None, *parts)
        tensors["dout"] = _readable_rows(tensors["dout"])
        with torch.no_grad():
            fm.moe_backward(
                **tensors, routing=routing, **options, **outputs, wanted=(False,) * len(made),
                overwrite_pre_activation=overwrites,
            )  # fmt: skip
    return tuple(made)


_moe_backward: Any = _define(
    "moe_backward", _MOE_BACKWARD,
    "(Tensor dout, Tensor x, Tensor w_gate_up, Tensor w_down, Tensor weights, Tensor offsets, "
    "Tensor pairs, Tensor slots, Tensor? w_up, Tensor? b_gate_up, Tensor? b_up, Tensor? b_down, "
    "Tensor? pre_activation, str gate, str activation, float alpha, float? limit, "
    "float up_offset, bool weight_on_input, bool[] wanted, int? max_workspace_bytes) -> "
    "(Tensor dx, Tensor dw_gate_up, Tensor dw_up, Tensor dw_down, Tensor db_gate_up, Tensor db_up, "
    "Tensor db_down, Tensor dweights)",
    _moe_backward_kernel, _moe_backward_fake,
    record=_record_once(lambda: _moe_backward, len(_LAYER_TENSORS) + 2),
)  # fmt: skip


def _route_backward_fake(
    dweights: Any, ids: Any, logits: Any, given_weights: Any, *options: Any
) -> torch.Tensor:
    of = logits if logits is not None else given_weights
    return torch.empty(tuple(of.shape), dtype=of.dtype, device=of.device)


def _route_backward_kernel(
    dweights: Any, ids: Any, logits: Any, given_weights: Any, dlse: Any, scoring: Any,
    renormalize: bool, scale: float,
) -> Any:  # fmt: skip
    routing = MoeRouting(ids, None, None, None, None)
    with torch.no_grad():
        return fm.moe_route_backward(
            dweights.contiguous(), routing, logits=logits, given_weights=given_weights,
            dlse=None if dlse is None else dlse.contiguous(), scoring=scoring,
            renormalize=renormalize, scale=scale,
        )  # fmt: skip


_route_backward: Any = _define(
    "moe_route_backward", _MOE_BACKWARD,
    "(Tensor dweights, Tensor ids, Tensor? logits, Tensor? given_weights, Tensor? dlse, "
    "str scoring, bool renormalize, float scale) -> Tensor",
    _route_backward_kernel, _route_backward_fake,
    record=_record_once(lambda: _route_backward, 5),
)  # fmt: skip


def _product_gradients(arguments: _Arguments) -> list[torch.Tensor]:
    dout, x, w, _, _, bias, wanted = arguments
    return [_gradient_like(of, want, dout)
            for of, want in zip((x, w, bias), wanted, strict=True)]  # fmt: skip


def _product_backward_fake(*arguments: Any) -> Any:
    return tuple(_product_gradients(arguments))


def _product_backward_kernel(*arguments: Any) -> Any:
    dout, x, w, offsets, counts, bias, wanted = arguments
    made = _product_gradients(arguments)
    there = (wanted[0], wanted[1], wanted[2] and bias is not None)
    outputs: dict[str, Any] = {
        name: y for name, y, want in zip(("dx", "dw", "dbias"), made, there, strict=True) if want
    }
    if outputs:
        with torch.no_grad():
            fm.grouped_product_backward(
                _readable_rows(dout), x, w, offsets=offsets, counts=counts, **outputs,
                wanted=(False, False, False),
            )  # fmt: skip
    return tuple(made)


_product_backward: Any = _define(
    "grouped_product_backward", _MOE_BACKWARD,
    "(Tensor dout, Tensor x, Tensor w, Tensor? offsets, Tensor? counts, Tensor? bias, "
    "bool[] wanted) -> (Tensor dx, Tensor dw, Tensor dbias)",
    _product_backward_kernel, _product_backward_fake,
    record=_record_once(lambda: _product_backward, 6),
)  # fmt: skip


def _chosen(made: Sequence[Any], wanted: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(x if want else None for x, want in zip(made, wanted, strict=True))


# ---- routing ---------------------------------------------------------------------------------

_PARTS = "(Tensor ids, Tensor weights, Tensor offsets, Tensor pairs, Tensor slots"


def _numbers_of(scores: torch.Tensor | None) -> torch.dtype:
    """The dtype of a routing's weights and lse, from logits or given weights."""
    wide = scores is not None and scores.dtype == torch.float64
    return torch.float64 if wide else torch.float32


def _empty_routing(
    like: torch.Tensor, scores: torch.Tensor | None, tokens: Any, experts: Any, top_k: Any
) -> tuple[Any, ...]:
    def integers(*shape: Any) -> torch.Tensor:
        return like.new_empty(shape, dtype=torch.int32)

    weights = like.new_empty((tokens, top_k), dtype=_numbers_of(scores))
    pairs = integers(tokens * top_k)
    return integers(tokens, top_k), weights, integers(experts + 1), pairs, integers(tokens, top_k)


def _route_fake(
    logits: Any, top_k: int, scoring: str, renormalize: bool, selection_bias: Any, num_groups: int,
    top_groups: Any, scale: float,
) -> Any:  # fmt: skip
    _check_rank("logits", logits, 2)
    return _empty_routing(logits, logits, logits.shape[0], logits.shape[1], top_k)


def _route_with_lse_fake(logits: Any, *options: Any) -> Any:
    routing = _route_fake(logits, *options)
    return *routing, logits.new_empty((logits.shape[0],), dtype=_numbers_of(logits))


def _route_kernel(return_lse: bool) -> Callable[..., Any]:
    def kernel_of(
        logits: Any, top_k: int, scoring: Any, renormalize: bool, selection_bias: Any,
        num_groups: int, top_groups: Any, scale: float,
    ) -> Any:  # fmt: skip
        parts: Any = _core.moe_route(
            logits, top_k, scoring, renormalize, selection_bias, num_groups, top_groups, scale,
            return_lse, None, None,
        )  # fmt: skip
        return tuple(parts) if return_lse else parts[:-1]

    return kernel_of


def _route_check(
    logits: Any, top_k: int, scoring: Any, renormalize: bool, selection_bias: Any, num_groups: int,
    top_groups: Any, scale: float,
) -> None:  # fmt: skip
    fm.moe_route_plan(
        _described(logits), top_k, scoring=scoring, renormalize=renormalize,
        selection_bias=_described(selection_bias), num_groups=num_groups, top_groups=top_groups,
        scale=scale,
    )  # fmt: skip


def _routing_gradient(grads: _Arguments, ids: Any, logits: Any, weights: Any, *options: Any) -> Any:
    """The gradient of logits or of given weights, from those of a routing's parts."""
    dweights = grads[1]
    dlse = grads[5] if len(grads) > 5 else None
    if dweights is None:
        dweights = torch.zeros_like(ids, dtype=_numbers_of(weights if logits is None else logits))
    dlse = None if dlse is None else dlse.resolve_neg()
    return _call(
        _route_backward, dweights.resolve_neg(), ids, logits, weights, dlse, *options
    )  # fmt: skip


def _route_record(return_lse: bool) -> Callable[..., Any]:
    def record(below: Callable[..., Any], logits: Any, top_k: int, *options: Any) -> Any:
        scoring, renormalize, bias, num_groups, top_groups, scale = options
        overload = _route_with_lse if return_lse else _route

        def compute(logits: Any, bias: Any) -> tuple[Any, ...]:
            return tuple(
                below(overload, logits, top_k, scoring, renormalize, bias, num_groups, top_groups,
                      scale)
            )  # fmt: skip

        def differentiate(grads: Any, tensors: Any, made: Any, wanted: Any) -> Any:
            (ids,) = made
            options = (scoring, renormalize, scale)
            return _routing_gradient(grads, ids, tensors[0], None, *options), None

        names = ("logits", "selection_bias")
        differentiable = (1, 5) if return_lse else (1,)
        steps = _moe_autograd.Steps(names, compute, differentiate, differentiable, (0,))
        return _moe_autograd.recorded(steps, logits, bias)

    return record


_ROUTE_SCHEMA = (
    "(Tensor logits, int top_k, str scoring, bool renormalize, Tensor? selection_bias, "
    f"int num_groups, int? top_groups, float scale) -> {_PARTS}"
)
_route = _define(
    "moe_route", _MOE, _ROUTE_SCHEMA + ")", _route_kernel(False), _route_fake, check=_route_check,
    record=_route_record(False),
)  # fmt: skip
_route_with_lse = _define(
    "moe_route_with_lse", _MOE, _ROUTE_SCHEMA + ", Tensor lse)", _route_kernel(True),
    _route_with_lse_fake, check=_route_check, record=_route_record(True),
)  # fmt: skip


def _route_given_fake(
    given_ids: Any,
    given_weights: Any,
    num_experts: int,
    renormalize: bool,
    scale: float,
    expert_map: Any,
) -> Any:
    _check_rank("given_ids", given_ids, 2)
    tokens, top_k = given_ids.shape
    return _empty_routing(given_ids, given_weights, tokens, num_experts, top_k)


def _route_given_kernel(
    given_ids: Any,
    given_weights: Any,
    num_experts: int,
    renormalize: bool,
    scale: float,
    expert_map: Any,
) -> Any:
    parts: Any = _core.moe_route_given(
        given_ids, given_weights, num_experts, renormalize, scale, expert_map, None, None
    )
    return parts[:-1]


def _route_given_record(
    below: Callable[..., Any], given_ids: Any, given_weights: Any, num_experts: int,
    renormalize: bool, scale: float, expert_map: Any,
) -> Any:  # fmt: skip
    def compute(given_ids: Any, given_weights: Any, expert_map: Any) -> tuple[Any, ...]:
        return tuple(
            below(
                _route_given, given_ids, given_weights, num_experts, renormalize, scale, expert_map
            )
        )

    def differentiate(grads: Any, tensors: Any, made: Any, wanted: Any) -> Any:
        (chosen,) = made
        made_of_weights = _routing_gradient(
            grads, chosen, None, tensors[1], "softmax", renormalize, scale
        )
        return None, made_of_weights, None

    names = ("given_ids", "given_weights", "expert_map")
    steps = _moe_autograd.Steps(names, compute, differentiate, (1,), (0,))
    return _moe_autograd.recorded(steps, given_ids, given_weights, expert_map)


_route_given = _define(
    "moe_route_given", _MOE,
    "(Tensor given_ids, Tensor? given_weights, int num_experts, bool renormalize, float scale, "
    f"Tensor? expert_map) -> {_PARTS})",
    _route_given_kernel, _route_given_fake, record=_route_given_record,
)  # fmt: skip


def moe_route(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    selection_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int | None = None,
    scale: float = 1.0,
    return_lse: bool = False,
    out: MoeRouting | None = None,
    stream: object = None,
) -> MoeRouting:
    """Like flashmoe_science.moe_route. In a graph, out and stream are None."""
    if _is_plain(logits) or _leaves_graph(logits, out=out, stream=stream):
        try:
            return _core.moe_route(  # type: ignore[return-value]
                logits, top_k, scoring, renormalize, selection_bias, num_groups, top_groups, scale,
                return_lse, out, stream,
            )  # fmt: skip
        except _TransformedError:
            _refuse_outputs(out=out, stream=stream)
    return traced_moe_route(
        logits, top_k, scoring, renormalize, selection_bias, num_groups, top_groups, scale,
        return_lse,
    )  # fmt: skip


def traced_moe_route(logits: torch.Tensor, top_k: int, *options: Any) -> MoeRouting:
    """moe_route by its operator; return_lse comes last."""
    operator = _route_with_lse if options[-1] else _route
    return MoeRouting(*_call(operator, logits, top_k, *options[:-1]))


def moe_route_given(
    given_ids: torch.Tensor,
    given_weights: torch.Tensor | None = None,
    *,
    num_experts: int,
    renormalize: bool = False,
    scale: float = 1.0,
    expert_map: torch.Tensor | None = None,
    out: MoeRouting | None = None,
    stream: object = None,
) -> MoeRouting:
    """Like flashmoe_science.moe_route_given. In a graph, out and stream are None."""
    if _is_plain(given_ids) or _leaves_graph(given_ids, out=out, stream=stream):
        try:
            return _core.moe_route_given(  # type: ignore[return-value]
                given_ids, given_weights, num_experts, renormalize, scale, expert_map, out, stream
            )
        except _TransformedError:
            _refuse_outputs(out=out, stream=stream)
    return traced_moe_route_given(
        given_ids, given_weights, num_experts, renormalize, scale, expert_map
    )


def traced_moe_route_given(*arguments: Any) -> MoeRouting:
    """moe_route_given by its operator."""
    return MoeRouting(*_call(_route_given, *arguments))


# ---- the layer -------------------------------------------------------------------------------

_LAYER_SCHEMA = (
    "Tensor? w_up, str gate, str activation, Tensor? b_gate_up, Tensor? b_up, Tensor? b_down, "
    "float alpha, float? limit, float up_offset, bool weight_on_input, int? max_workspace_bytes, "
    "bool recompute, str? kernel)"
)


def _layer_options(
    w_up: Any, gate: Any, activation: Any, b_gate_up: Any, b_up: Any, b_down: Any, alpha: Any,
    limit: Any, up_offset: Any, weight_on_input: Any, max_workspace_bytes: Any, recompute: Any,
    kernel: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "w_up": w_up, "gate": gate, "activation": activation, "b_gate_up": b_gate_up, "b_up": b_up,
        "b_down": b_down, "alpha": alpha, "limit": limit, "up_offset": up_offset,
        "weight_on_input": weight_on_input, "max_workspace_bytes": max_workspace_bytes,
        "recompute": recompute, "kernel": kernel,
    }  # fmt: skip


def _forward_fake(
    x: Any, w_gate_up: Any, w_down: Any, weights: Any, offsets: Any, pairs: Any, slots: Any,
    *options: Any,
) -> Any:  # fmt: skip
    _check_rank("x", x, 2)
    return x.new_empty(x.shape)


def _forward_with_pre_activation_fake(
    x: Any, w_gate_up: Any, w_down: Any, weights: Any, offsets: Any, pairs: Any, slots: Any,
    *options: Any,
) -> Any:  # fmt: skip
    out = _forward_fake(x, w_gate_up, w_down, weights, offsets, pairs, slots, *options)
    _check_rank("w_gate_up", w_gate_up, 3)
    rows = w_gate_up.shape[1] * (2 if _layer_options(*options)["gate"] == "separate" else 1)
    return out, x.new_empty((pairs.shape[0], rows))


def _forward_kernel(return_pre_activation: bool) -> Callable[..., Any]:
    def kernel_of(
        x: Any, w_gate_up: Any, w_down: Any, weights: Any, offsets: Any, pairs: Any, slots: Any,
        *options: Any,
    ) -> Any:  # fmt: skip
        routing = MoeRouting(None, weights, offsets, pairs, slots)
        *layer, max_workspace_bytes, recompute, kernel = options
        call: Any = _core.moe_forward
        return call(
            x, w_gate_up, w_down, routing, *layer, None, None, return_pre_activation,
            max_workspace_bytes, recompute, kernel, None,
        )  # fmt: skip

    return kernel_of


def _forward_check(
    x: Any, w_gate_up: Any, w_down: Any, weights: Any, offsets: Any, pairs: Any, slots: Any,
    *options: Any,
) -> None:  # fmt: skip
    routing = MoeRouting(None, *map(_described, (weights, offsets, pairs, slots)))
    named = {
        name: _described(value) if isinstance(value, torch.Tensor) else value
        for name, value in _layer_options(*options).items()
    }
    for name in ("max_workspace_bytes", "recompute"):  # for the gradients
        del named[name]
    fm.moe_plan(_described(x), _described(w_gate_up), _described(w_down), routing, **named)


def _forward_record(return_pre_activation: bool) -> Callable[..., Any]:
    def record(below: Callable[..., Any], *arguments: Any) -> Any:
        given, options = arguments[:7], _layer_options(*arguments[7:])
        tensors = (*given, *(options[name] for name in _LAYER_TENSORS[7:]))
        # Only tensors known to autograd are saved.
        options.update(dict.fromkeys(_LAYER_TENSORS[7:]))

        kept = () if options["recompute"] else (1,)

        def compute(*tensors: Any) -> tuple[Any, ...]:
            layer = options | dict(zip(_LAYER_TENSORS[7:], tensors[7:], strict=True))
            if kept or return_pre_activation:
                return tuple(below(_forward_with_pre_activation, *tensors[:7], *layer.values()))
            return (below(_forward, *tensors[:7], *layer.values()),)

        def differentiate(
            grads: Any, tensors: Any, made: Any, wanted: Any, compute: Any = None
        ) -> Any:
            flags = dict(zip(_LAYER_TENSORS, wanted, strict=True))
            pre_activation = made[0] if made else None
            gradients = (compute or functools.partial(_call, _moe_backward))(
                grads[0].resolve_neg(), *tensors, pre_activation,
                *(options[name] for name in _LAYER_OPTIONS),
                [flags[name] for name in _LAYER_GRADIENTS], options["max_workspace_bytes"],
            )  # fmt: skip
            by_name = dict(zip(_LAYER_GRADIENTS, gradients, strict=True))
            return tuple(by_name[name] if flags[name] else None for name in _LAYER_TENSORS)

        def overwrite(grads: Any, tensors: Any, made: Any, wanted: Any) -> Any:
            given = [x for x in (grads[0], *tensors, *made) if x is not None]
            # A graph, a mode or a transform may use them again.
            if torch.is_grad_enabled() or not all(map(_is_plain, given)):
                return None
            if any(map(is_transformed, given)):
                return None
            kernel = functools.partial(_moe_backward_kernel, overwrites=True)
            # torch counts no write to x.data. A counted write would make it refuse a retained
            # graph.
            uncounted = tuple(x.data for x in made)
            return differentiate(grads, tensors, uncounted, wanted, kernel)

        steps = _moe_autograd.Steps(
            _LAYER_TENSORS, compute, differentiate, (0,), kept,
            None if return_pre_activation else overwrite,
        )  # fmt: skip
        made = _moe_autograd.recorded(steps, *tensors)
        return made if return_pre_activation else made[0]

    return record


_FORWARD_SCHEMA = (
    "(Tensor x, Tensor w_gate_up, Tensor w_down, Tensor weights, Tensor offsets, Tensor pairs, "
    f"Tensor slots, {_LAYER_SCHEMA} -> "
)
_forward = _define(
    "moe_forward", _MOE, _FORWARD_SCHEMA + "Tensor", _forward_kernel(False), _forward_fake,
    check=_forward_check, record=_forward_record(False),
)  # fmt: skip
_forward_with_pre_activation = _define(
    "moe_forward_with_pre_activation", _MOE, _FORWARD_SCHEMA + "(Tensor, Tensor)",
    _forward_kernel(True), _forward_with_pre_activation_fake, check=_forward_check,
    record=_forward_record(True),
)  # fmt: skip


def moe_forward(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    routing: MoeRouting,
    *,
    w_up: torch.Tensor | None = None,
    gate: Gate = "gate_up",
    activation: Activation = "silu",
    b_gate_up: torch.Tensor | None = None,
    b_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    weight_on_input: bool = False,
    out: torch.Tensor | None = None,
    pre_activation: torch.Tensor | None = None,
    return_pre_activation: bool = False,
    max_workspace_bytes: int | None = None,
    recompute: bool = False,
    kernel: str | None = None,
    stream: object = None,
) -> Any:
    """Like flashmoe_science.moe_forward. In a graph, out, pre_activation and stream are None."""
    if _is_plain(x) or _leaves_graph(x, out=out, pre_activation=pre_activation, stream=stream):
        try:
            return _core.moe_forward(
                x, w_gate_up, w_down, routing, w_up, gate, activation, b_gate_up, b_up, b_down,
                alpha, limit, up_offset, weight_on_input, out, pre_activation,
                return_pre_activation, max_workspace_bytes, recompute, kernel, stream,
            )  # fmt: skip
        except _TransformedError:
            _refuse_outputs(out=out, pre_activation=pre_activation, stream=stream)
    return traced_moe_forward(
        x, w_gate_up, w_down, routing, return_pre_activation, w_up, gate, activation, b_gate_up,
        b_up, b_down, alpha, limit, up_offset, weight_on_input, max_workspace_bytes, recompute,
        kernel,
    )  # fmt: skip


def traced_moe_forward(
    x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, routing: MoeRouting,
    return_pre_activation: bool, *options: Any,
) -> Any:  # fmt: skip
    """moe_forward by its operator."""
    operator = _forward_with_pre_activation if return_pre_activation else _forward
    _, weights, offsets, pairs, slots, _ = routing
    w_up, *others = options
    x, w_gate_up, w_down, w_up = _moe_autograd.cast(x, w_gate_up, w_down, w_up)
    return _call(operator, x, w_gate_up, w_down, weights, offsets, pairs, slots, w_up, *others)


# ---- products, and all in one ----------------------------------------------------------------


def _product_fake(x: Any, w: Any, offsets: Any, counts: Any, bias: Any, kernel: Any) -> Any:
    _check_rank("x", x, 2, 3)
    _check_rank("w", w, 3)
    return x.new_empty((*x.shape[:-1], w.shape[1]))


def _product_kernel(x: Any, w: Any, offsets: Any, counts: Any, bias: Any, kernel: Any) -> Any:
    return _core.grouped_product(x, w, offsets, counts, bias, None, kernel, None)


def _product_check(x: Any, w: Any, offsets: Any, counts: Any, bias: Any, kernel: Any) -> None:
    fm.grouped_product_plan(
        _described(x), _described(w), offsets=_described(offsets), counts=_described(counts),
        bias=_described(bias), kernel=kernel,
    )  # fmt: skip


def _product_record(
    below: Callable[..., Any], x: Any, w: Any, offsets: Any, counts: Any, bias: Any, kernel: Any
) -> Any:
    def compute(*tensors: Any) -> tuple[Any, ...]:
        return (below(_product, *tensors, kernel),)

    def differentiate(grads: Any, tensors: Any, made: Any, wanted: Any) -> Any:
        flags = [wanted[0], wanted[1], wanted[4]]
        made = _call(_product_backward, grads[0].resolve_neg(), *tensors, flags)
        dx, dw, dbias = _chosen(made, flags)
        return dx, dw, None, None, dbias

    names = ("x", "w", "offsets", "counts", "bias")
    steps = _moe_autograd.Steps(names, compute, differentiate, (0,))
    return _moe_autograd.recorded(steps, x, w, offsets, counts, bias)[0]


_product = _define(
    "grouped_product", _MOE,
    "(Tensor x, Tensor w, Tensor? offsets, Tensor? counts, Tensor? bias, str? kernel) -> Tensor",
    _product_kernel, _product_fake, check=_product_check, record=_product_record,
)  # fmt: skip


def grouped_product(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    offsets: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    kernel: str | None = None,
    stream: object = None,
) -> torch.Tensor:
    """Like flashmoe_science.grouped_product. In a graph, out and stream are None."""
    if _is_plain(x) or _leaves_graph(x, out=out, stream=stream):
        try:
            return _core.grouped_product(  # type: ignore[return-value]
                x, w, offsets, counts, bias, out, kernel, stream
            )
        except _TransformedError:
            _refuse_outputs(out=out, stream=stream)
    return traced_grouped_product(x, w, offsets, counts, bias, kernel)


def traced_grouped_product(*arguments: Any) -> torch.Tensor:
    """grouped_product by its operator."""
    x, w, *others = arguments
    made: torch.Tensor = _call(_product, *_moe_autograd.cast(x, w), *others)
    return made


def _fused_fake(tokens: Any, *arguments: Any) -> Any:
    return tokens.new_empty(tokens.shape)


def _fused_kernel(*arguments: Any) -> Any:
    *layer, max_workspace_bytes, recompute, kernel = arguments
    call: Any = _core.fused_moe
    return call(*layer, None, max_workspace_bytes, recompute, kernel, None)


def _fused_fold(
    in_dims: Any, tokens: Any, router_weights: Any, w_gate_up: Any, w_down: Any, top_k: int,
    logits: Any, *options: Any,
) -> Any:  # fmt: skip
    if logits is not None or in_dims[0] is None or any(dim is not None for dim in in_dims[1:]):
        return None
    moved = tokens.movedim(in_dims[0], 0)
    lead = moved.shape[:-1]  # leading dimensions of the rows, folded into one
    rows = moved.flatten(0, -2)
    return (rows, router_weights, w_gate_up, w_down, top_k, logits, *options), lead


_FUSED_TENSORS = (
    "tokens", "router_weights", "w_gate_up", "w_down", "logits", "router_bias", "selection_bias",
    "w_up", "b_gate_up", "b_up", "b_down",
)  # fmt: skip
_ROUTE_OPTIONS = (
    "scoring", "renormalize", "selection_bias", "num_groups", "top_groups", "scale"
)  # fmt: skip


def _router_logits(rows: torch.Tensor, router: torch.Tensor, bias: Any) -> torch.Tensor:
    """By the library's product, with fused_moe's bits; by torch if the library lacks it."""
    if router.shape[0] % _moe.ROUTER_MULTIPLE:
        logits = rows @ router.T
        return logits if bias is None else logits + bias
    every = torch.arange(2, dtype=torch.int32, device=rows.device) * torch.iinfo(torch.int32).max
    made: torch.Tensor = _call(
        _product, rows, router[None], every, None, None if bias is None else bias[None], None
    )
    return made


def _fused_check(
    tokens: Any, router_weights: Any, w_gate_up: Any, w_down: Any, top_k: int, logits: Any,
    router_bias: Any, *options: Any,
) -> None:  # fmt: skip
    routing = dict(zip(_ROUTE_OPTIONS, options, strict=False))
    named = {
        "tokens": tokens, "router_weights": router_weights, "w_gate_up": w_gate_up,
        "w_down": w_down, "logits": logits, "router_bias": router_bias, "top_k": top_k,
    } | routing | _layer_options(*options[len(routing) :])  # fmt: skip
    for name in ("max_workspace_bytes", "recompute"):  # for the gradients
        del named[name]
    tensors = {name: named.pop(name) for name in _FUSED_TENSORS}
    router = tensors["router_weights"]
    if router is not None and router.dim() == 2 and router.shape[0] % _moe.ROUTER_MULTIPLE:
        _moe.check_router(tokens, router, router_bias, w_gate_up)
        logits = tokens.new_empty((*tokens.shape[:-1], router.shape[0]))  # torch's product
        tensors |= {"router_weights": None, "router_bias": None, "logits": logits}
    for name in ("tokens", "logits"):
        tensors[name] = _as_rows(tensors[name])
    described = {name: _described(x) for name, x in tensors.items() if x is not None}
    _core.plan("fused_moe", described, named)


def _as_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or tensor.dim() == 0:
        return tensor
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _fused_record(below: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return _fused_in_parts(*arguments)
    except (ArgumentTypeError, InvalidArgumentError, UnsupportedError):
        # The parts' errors have other names; the whole has the caller's.
        with torch.no_grad():
            if below is _call:
                _check_early(_fused_check, *arguments)
            else:
                below(_fused, *arguments)
        raise


def _fused_in_parts(
    tokens: Any, router_weights: Any, w_gate_up: Any, w_down: Any, top_k: int, logits: Any,
    router_bias: Any, *options: Any,
) -> Any:  # fmt: skip
    """fused_moe in its three parts, each of which torch records."""
    if (router_weights is None) == (logits is None):
        got = "neither it nor logits" if logits is None else "both it and logits"
        raise InvalidArgumentError(f"router_weights: got {got}, accepted is one of the two")
    if logits is not None and router_bias is not None:
        raise InvalidArgumentError("router_bias: got a tensor, accepted is none with logits")
    count = len(_ROUTE_OPTIONS)
    routing_options, layer = options[:count], options[count:]
    rows: Any = _as_rows(tokens)
    if logits is None:
        logits = _router_logits(rows, router_weights, router_bias)
    else:
        logits = _as_rows(logits)
    _, weights, *order = _call(_route, logits, top_k, *routing_options)
    made = _call(_forward, rows, w_gate_up, w_down, weights, *order, *layer)
    return made.view(tokens.shape)


_fused = _define(
    "fused_moe", _MOE,
    "(Tensor tokens, Tensor? router_weights, Tensor w_gate_up, Tensor w_down, int top_k, "
    "Tensor? logits, Tensor? router_bias, str scoring, bool renormalize, Tensor? selection_bias, "
    f"int num_groups, int? top_groups, float scale, {_LAYER_SCHEMA} -> Tensor",
    _fused_kernel, _fused_fake, _fused_fold, check=_fused_check, record=_fused_record,
)  # fmt: skip


def fused_moe(
    tokens: torch.Tensor,
    router_weights: torch.Tensor | None,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    top_k: int,
    *,
    logits: torch.Tensor | None = None,
    router_bias: torch.Tensor | None = None,
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    selection_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int | None = None,
    scale: float = 1.0,
    w_up: torch.Tensor | None = None,
    gate: Gate = "gate_up",
    activation: Activation = "silu",
    b_gate_up: torch.Tensor | None = None,
    b_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    weight_on_input: bool = False,
    out: torch.Tensor | None = None,
    max_workspace_bytes: int | None = None,
    recompute: bool = False,
    kernel: str | None = None,
    stream: object = None,
) -> torch.Tensor:
    """Like flashmoe_science.fused_moe. In a graph, out and stream are None."""
    if _is_plain(tokens) or _leaves_graph(tokens, out=out, stream=stream):
        try:
            return _core.fused_moe(  # type: ignore[return-value]
                tokens, router_weights, w_gate_up, w_down, top_k, logits, router_bias, scoring,
                renormalize, selection_bias, num_groups, top_groups, scale, w_up, gate, activation,
                b_gate_up, b_up, b_down, alpha, limit, up_offset, weight_on_input, out,
                max_workspace_bytes, recompute, kernel, stream,
            )  # fmt: skip
        except _TransformedError:
            _refuse_outputs(out=out, stream=stream)
    return traced_fused_moe(
        tokens, router_weights, w_gate_up, w_down, top_k, logits, router_bias, scoring,
        renormalize, selection_bias, num_groups, top_groups, scale, w_up, gate, activation,
        b_gate_up, b_up, b_down, alpha, limit, up_offset, weight_on_input, max_workspace_bytes,
        recompute, kernel,
    )  # fmt: skip


def traced_fused_moe(*arguments: Any) -> torch.Tensor:
    """fused_moe by its operator."""
    made: torch.Tensor = _call(_fused, *_moe_autograd.cast_layer(arguments))
    return made
