"""merge_states: merges the results of attention over separate parts of the keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, overload

from flashmoe_science import _core
from flashmoe_science._dtypes import parse_dtype, parse_flag
from flashmoe_science._tracing import is_traced
from flashmoe_science.errors import ArgumentTypeError, InvalidArgumentError, _naming
from flashmoe_science.plan import Plan

_T = TypeVar("_T")
_BFLOAT = 4  # DLPack's code


class Partials(NamedTuple):
    """Partials by the C ABI's names."""

    outs: Any
    lses: Any
    prior_out: Any
    prior_lse: Any


def parse_partials(outs: Any, lses: Any) -> tuple[Partials, list[tuple[Any, Any]]]:
    """Parses one tensor of partials, or tensors of one partial each. Returns those of the first
    call, and the pairs of out and lse that follow."""
    several = isinstance(outs, (tuple, list))
    if several != isinstance(lses, (tuple, list)):
        raise ArgumentTypeError(
            f"lses: got {type(lses).__name__}, accepted are as many tensors as outs has where outs "
            "is a sequence, and one where outs is one"
        )
    if not several:
        return Partials(outs, lses, None, None), []
    if len(outs) == 0:
        raise InvalidArgumentError(
            "outs: got a sequence of no tensors, accepted are one and more, or one tensor with an "
            "axis of partials in front; attention can write to its slices"
        )
    if len(lses) != len(outs):
        raise InvalidArgumentError(
            f"lses: got a sequence of {len(lses)} tensors, accepted are as many as outs has, "
            f"{len(outs)}"
        )
    for name, given in (("outs", outs), ("lses", lses)):
        for i, tensor in enumerate(given):
            if tensor is None:
                raise ArgumentTypeError(f"{name}[{i}]: got None, accepted is a tensor")
    if len(outs) == 1:
        return Partials(outs[0], lses[0], None, None), []
    return Partials(outs[1], lses[1], outs[0], lses[0]), list(zip(outs[2:], lses[2:], strict=True))


def one_after_another(
    merge: Callable[[int, Partials, str | None, bool, Any, Any], Any],
    partials: Partials,
    behind: list[tuple[Any, Any]],
    dtype: str | None,
    return_lse: bool,
    out: Any,
    lse: Any,
) -> Any:
    """Calls merge(number of the last partial, partials, dtype, return_lse, out, lse) once, and once
    more for each of `behind`, with an fp32 state (for fp64 fp64) in between."""
    if not behind:
        return merge(1, partials, dtype, return_lse, out, lse)
    of_first = name_of_dtype(partials.prior_out)
    if dtype is None and out is None:
        dtype = of_first
        if dtype is None:
            raise ArgumentTypeError(
                "dtype: got None, but outs[0] does not say its own, accepted is a name, as 'fp16'"
            )
    of_state = "float64" if of_first == "float64" else "float32"
    state = merge(1, partials, of_state, True, None, None)
    for number, (last_out, last_lse) in enumerate(behind[:-1], 2):
        partials = Partials(last_out, last_lse, *state)
        state = merge(number, partials, of_state, True, None, None)
    partials = Partials(*behind[-1], *state)
    return merge(1 + len(behind), partials, dtype, return_lse, out, lse)


def name_of_dtype(tensor: Any) -> str | None:
    """None if the tensor does not say."""
    dtype = getattr(tensor, "dtype", None)
    return None if dtype is None else parse_name(dtype)


def parse_name(dtype: object) -> str | None:
    """The name of a new out's dtype in array libraries."""
    if dtype is None:
        return None
    code, bits = parse_dtype(getattr(dtype, "__name__", dtype))  # for numpy.float32 and jnp.float32
    return f"{'bfloat' if code == _BFLOAT else 'float'}{bits}"


def _numbered(merge: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with errors that name each partial by its number."""

    def numbered(number: int, *arguments: Any) -> Any:
        names = {
            "outs": f"outs[{number}]", "lses": f"lses[{number}]",
            "prior_out": "outs[0]", "prior_lse": "lses[0]",
        }  # fmt: skip
        return _naming(names)(merge)(number, *arguments)

    return numbered


@overload
def merge_states(
    outs: _T | Sequence[_T],
    lses: _T | Sequence[_T],
    *,
    layout: Literal["bshd", "bhsd"] = "bshd",
    dtype: object = None,
    return_lse: Literal[False] = False,
    out: _T | None = None,
    lse: _T | None = None,
    kernel: str | None = None,
    stream: object = None,
) -> _T: ...


@overload
def merge_states(
    outs: _T | Sequence[_T],
    lses: _T | Sequence[_T],
    *,
    layout: Literal["bshd", "bhsd"] = "bshd",
    dtype: object = None,
    return_lse: Literal[True],
    out: _T | None = None,
    lse: _T | None = None,
    kernel: str | None = None,
    stream: object = None,
) -> tuple[_T, _T]: ...


def merge_states(
    outs: Any,
    lses: Any,
    *,
    layout: Literal["bshd", "bhsd"] = "bshd",
    dtype: object = None,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    kernel: str | None = None,
    stream: object = None,
) -> Any:
    """Merges partial results of flash_attention over parts of the keys into attention over all
    keys.

    For each row and head lse = log sum_i exp(lse_i) and out = sum_i exp(lse_i - lse) out_i, in the
    order of the partials: for prefixes that requests share, the shards of a ring, the splits of a
    long sequence. Sums are accumulated in fp32 (for fp64 in fp64), every partial is read once, and
    the same inputs give the same bits on every run and with any number of threads.

    Takes tensors as flash_attention does, and returns the same kind. It has no derivative: torch
    tensors that require grad and JAX's derivatives are refused.

    Args:
        outs: [partials, batch, seq, heads, dim] in layout "bshd", [partials, batch, heads, seq,
            dim] in "bhsd", with any number of partials; of rank 4: one partial. Slices of it can be
            the `out` of flash_attention. Or a sequence of tensors of rank 4, each with its own
            dtype: two take one call, and more are merged one after another, one call each, with an
            fp32 state (for fp64 fp64) in between. fp16, bf16, fp32, on the CPU also fp64. dim is a
            multiple of
            8. Here and below the last dimension is contiguous and rows begin on 16-byte
            boundaries; nothing is copied.
        lses: [partials, batch, heads, seq], or as many of [batch, heads, seq] as outs has: the
            natural log-sum-exp of each partial, fp32, with fp64 outs fp64; any strides.
        layout: "bshd" or "bhsd".
        dtype: Dtype of a new out: fp16, bf16 or fp32. None is that of the first partial.
        return_lse: Also return the log-sum-exp over all partials, for further merges.
        out: Where to write the result, [batch, seq, heads, dim]. It may be the first of several
            tensors, which is then updated in place; it must overlap no other. Not for JAX.
        lse: Where to write the log-sum-exp, [batch, heads, seq]; it may be the first of several.
            Not for JAX.
        kernel, stream: As in flash_attention.

    Returns:
        out, or (out, lse) with return_lse. A partial with an lse of -inf (its row saw no key) has
        weight 0, and its out is not read; if all are such, out is 0 and lse -inf. Partials with an
        lse of +inf share the row equally; of a list each pair does, one after another. NaN in an
        lse makes the row NaN.

        Sinks must count once: give them to the call of one partial only.

    Raises: What flash_attention raises. A message names the argument. With two tensors it calls the
        first prior_out and prior_lse, as the C ABI does, and the second outs and lses. With more it
        gives each one's number, such as outs[2].
    """
    if is_traced():
        from flashmoe_science.torch import merge

        return merge.merge_states(
            outs, lses, layout=layout, dtype=dtype, return_lse=return_lse, out=out, lse=lse,
            kernel=kernel, stream=stream,
        )  # fmt: skip
    partials, behind = parse_partials(outs, lses)

    def call(
        number: int, partials: Partials, dtype: str | None, return_lse: bool, out: Any, lse: Any
    ) -> Any:
        return _core.merge_states(*partials, layout, dtype, return_lse, out, lse, kernel, stream)

    return one_after_another(
        _numbered(call) if behind else call, partials, behind, parse_name(dtype), return_lse,
        out, lse,
    )  # fmt: skip


def merge_states_plan(
    outs: Any,
    lses: Any,
    *,
    layout: Literal["bshd", "bhsd"] = "bshd",
    dtype: object = None,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    kernel: str | None = None,
) -> Plan:
    """Plans what merge_states would do with these arguments. Reads no data and launches nothing.

    Raises what merge_states would raise for its arguments.
    """
    from flashmoe_science import _dispatch

    partials, behind = parse_partials(outs, lses)
    if behind:
        raise InvalidArgumentError(
            f"outs: got a sequence of {2 + len(behind)} tensors, accepted in a plan are at most "
            "two: more are merged one after another, by a plan of two each"
        )
    tensors = {**partials._asdict(), "out": out, "lse": lse}
    options = {
        "layout": layout, "kernel": kernel, "dtype": parse_name(dtype),
        "return_lse": parse_flag("return_lse", return_lse),
    }  # fmt: skip
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if any(_dispatch.is_jax(tensor) for tensor in given.values()):
        from flashmoe_science import jax

        return Plan.of(jax.plan("merge_states", given, options))
    return Plan.of(_core.plan("merge_states", given, options))
