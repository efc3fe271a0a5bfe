"""JAX's transformations of the mixture of experts, and jax.lax.ragged_dot by our products.

The rules belong to primitives, because jax.custom_vjp would know too little. A transposition knows
which gradients are wanted, so frozen tensors cost nothing, and a call that vmap folds into one is
differentiated as one.

The derivatives of a product of grouped rows are products, too. With rows r of expert e

    P   out[r] = w[e] x[r]               grouped_product
    Q   dx[r]  = w[e]^T dout[r]          grouped_product_backward; 0 in rows of no expert
    R   dw[e]  = sum of dout[r] x[r]^T   the same

each is linear in both of its factors, and the transpose of each is another of them. So they have
derivatives of every order, in both modes. Layers, routing and biases have first derivatives in
reverse mode, by the operations of the C ABI.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.interpreters.ad
import jax.interpreters.batching
import jax.interpreters.mlir
import jax.numpy as jnp
import numpy as np

from flashmoe_science import jax as calls
from flashmoe_science.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError

_Arrays = dict[str, Any]
"""By the C ABI's names."""

ad: Any = jax.interpreters.ad  # without types

_W_TURNED = "w.T"
_BOUNDS = ("offsets", "counts")
_FORWARD_MODE = (
    "a derivative of forward mode of the mixture of experts is asked for, accepted are those of "
    "reverse mode, as jax.grad and jax.vjp have them, and of products without biases both"
)


def _call(operation: str, arrays: _Arrays, **options: Any) -> _Arrays:
    call = calls._Call(operation, tuple(arrays), tuple(options.items()))
    return calls._bind(call, *arrays.values())


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero


def _zero(primal: Any) -> Any:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _perturbed(call: Any, tangents: Sequence[Any]) -> _Arrays:
    """The existing tangents, by name."""
    return {n: t for n, t in zip(call.names, tangents, strict=True) if not _is_zero(t)}


def _without(arrays: _Arrays, *names: str) -> _Arrays:
    return {name: x for name, x in arrays.items() if name not in names}


# ---- vmap ------------------------------------------------------------------------------------


def _in_front(arrays: Sequence[Any], axes: Sequence[Any]) -> list[Any]:
    """The arrays, those with vmap's axis with it in front."""
    return [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays, axes, strict=True)
    ]


def _batch(arrays: Sequence[Any], axes: Sequence[Any], *, call: Any, **_: Any) -> Any:
    batched = [axis is not None for axis in axes]
    apart = _in_front(arrays, axes)
    whole = calls._whole(apart)
    made = _folded(call, batched, whole) if call.operation == "fused_moe" else None
    if made is None:
        made = calls._one_after_another(functools.partial(_outputs, call), batched, whole)
    return calls._mapped_alike(made, batched, apart), [0] * len(made)


def _outputs(call: Any, *arrays: Any) -> list[Any]:
    """In the order of the primitive's outputs, which a dict would lose on its way through JAX."""
    return list(calls._bind(call, *arrays).values())


def _folded(call: Any, batched: Sequence[bool], arrays: Sequence[Any]) -> list[Any] | None:
    """Folds tokens of an outer batch into the tokens. None if something else is batched, too."""
    size = next(x.shape[0] for x, b in zip(arrays, batched, strict=True) if b)
    wide = calls._widened(call.names, ("tokens", "logits"), size, batched, arrays)
    if wide is None:
        return None
    tokens = wide[call.names.index("tokens")].shape[1]
    rows = [
        x.reshape((size * tokens, x.shape[-1])) if name in ("tokens", "logits") else x
        for name, x in zip(call.names, wide, strict=True)
    ]
    out = calls._bind(call, *rows)["out"]
    return [out.reshape((size, tokens, out.shape[-1]))]


# ---- tangents that only have a transpose -----------------------------------------------------

# bind(*tangents, *kept, wanted=, kept=, call=, results=): what a call's first output gets from the
# tangents of its tensors `wanted`, with the arrays `kept` by name. `results` has its types.
_tangent: Any = jax.extend.core.Primitive("flashmoe_moe_tangent")
_tangent.multiple_results = True
_tangent.def_abstract_eval(lambda *_, results, **__: results)


def _refuse(*_: Any, **__: Any) -> Any:
    raise InvalidArgumentError(_FORWARD_MODE)


def _batch_tangent(arrays: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
    batched = [axis is not None for axis in axes]
    apart = _in_front(arrays, axes)
    one = functools.partial(_tangent.bind, **params)
    made = calls._one_after_another(one, batched, calls._whole(apart))
    return calls._mapped_alike(made, batched, apart), [0] * len(made)


_Gradients = Callable[[Any, _Arrays, Sequence[Any], dict[str, Any]], _Arrays]
"""For a call: the kept arrays, the existing cotangents of outputs, and the types of the requested
results, by name."""


def _tangents(
    call: Any, dots: _Arrays, kept: _Arrays, outputs: Sequence[Any]
) -> list[Any]:  # fmt: skip
    types = tuple(jax.typeof(x).to_tangent_aval() for x in outputs)
    made: list[Any] = _tangent.bind(
        *dots.values(), *kept.values(), wanted=tuple(dots), kept=tuple(kept), call=call,
        results=types,
    )  # fmt: skip
    return made


def _transpose_tangent(
    cotangents: Sequence[Any], *arrays: Any, wanted: Any, kept: Any, call: Any, results: Any
) -> Any:
    dots = dict(zip(wanted, arrays, strict=False))
    asked = {name: x.aval for name, x in dots.items() if ad.is_undefined_primal(x)}
    made: _Arrays = {}
    if asked and not all(map(_is_zero, cotangents)):
        named = dict(zip(kept, arrays[len(wanted) :], strict=True))
        made = _GRADIENTS[call.operation](call, named, cotangents, asked)
    return [made.get(name) for name in wanted] + [None] * len(kept)


# ---- layers ----------------------------------------------------------------------------------


def _differentiate_layer(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: Any, **_: Any
) -> Any:
    named = dict(zip(call.names, primals, strict=True))
    options = dict(call.options)
    saved = () if options["recompute"] else ("pre_activation",)
    if saved:
        options["return_pre_activation"] = True
    made = _call(call.operation, named, **options)
    outs = [made[name] for name in calls._outputs(call, named)]
    dots = _perturbed(call, tangents)
    kept = named | {name: made[name] for name in saved}
    out_dots = _tangents(call, dots, kept, outs[:1]) if dots else [_zero(outs[0])]
    return outs, [*out_dots, *map(_zero, outs[1:])]


_LAYER_OPTIONS = ("gate", "activation", "alpha", "limit", "up_offset", "weight_on_input")
_ROUTE_OPTIONS = ("top_k", "scoring", "renormalize", "num_groups", "top_groups", "scale")


def _options(call: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: x for name, x in call.options if name in names}


def _layer_gradients(
    call: Any, kept: _Arrays, cotangents: Sequence[Any], wanted: dict[str, Any]
) -> _Arrays:
    flags = tuple(name in wanted for name in calls.LAYER_GRADIENTS)
    options = _options(call, (*_LAYER_OPTIONS, "max_workspace_bytes")) | {"wanted": flags}
    made = calls.run("moe_backward", {"dout": cotangents[0]} | kept, options)
    return {name: made[f"d{name}"] for name in wanted}


# ---- routing ---------------------------------------------------------------------------------


def _differentiate_route(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: Any, **_: Any
) -> Any:
    """Differentiates by logits or given weights. The choice of experts has no derivative."""
    named = dict(zip(call.names, primals, strict=True))
    made = calls._bind(call, *primals)
    dots = {
        name: t for name, t in _perturbed(call, tangents).items()
        if name in ("logits", "given_weights")
    }  # fmt: skip
    out_dots = {name: _zero(x) for name, x in made.items()}
    if dots:
        (of,) = dots
        outs = {name: made[name] for name in ("weights", "lse") if name in made}
        kept = {"ids": made["ids"], of: named[of]}
        out_dots.update(zip(outs, _tangents(call, dots, kept, list(outs.values())), strict=True))
    return list(made.values()), list(out_dots.values())


def _route_gradients(
    call: Any, kept: _Arrays, cotangents: Sequence[Any], wanted: dict[str, Any]
) -> _Arrays:
    dweights, *rest = (
        ad.instantiate_zeros(ct) if i == 0 else ct for i, ct in enumerate(cotangents)
    )
    given = {"dweights": dweights} | kept
    if rest and not _is_zero(rest[0]):
        given["dlse"] = rest[0]
    options = _options(call, ("scoring", "renormalize", "scale"))
    made = calls.run("moe_route_backward", given, options)
    return {name: made[f"d{name}"] for name in wanted}


# ---- products --------------------------------------------------------------------------------


def _product(x: Any, w: Any, bounds: _Arrays, **options: Any) -> Any:
    """P."""
    return _call("grouped_product", {"x": x, "w": w} | bounds, **options)["out"]


def _times_transpose(dout: Any, w: Any, bounds: _Arrays, turned: bool = False) -> Any:
    """Q; with `turned` the array has w's last two axes swapped."""
    arrays = {"dout": dout, _W_TURNED if turned else "w": w} | bounds
    return _call("grouped_product_backward", arrays, wanted=(True, False, False))["dx"]


def _outer(dout: Any, x: Any, bounds: _Arrays) -> Any:
    """R."""
    arrays = {"dout": dout, "x": x} | bounds
    return _call("grouped_product_backward", arrays, wanted=(False, True, False))["dw"]


def _row_sums(dout: Any, bounds: _Arrays, dtype: Any) -> Any:
    """Sums of each expert's rows: the gradient of a bias."""
    options = {"wanted": (False, False, True), "dbias": np.dtype(dtype).name}
    return _call("grouped_product_backward", {"dout": dout} | bounds, **options)["dbias"]


def _bounds_of(arrays: _Arrays) -> _Arrays:
    return {name: x for name, x in arrays.items() if name in _BOUNDS}


def _differentiate_product(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: Any, **params: Any
) -> Any:
    (out,) = calls._CALLS[call.operation].bind(*primals, call=call, **params)
    named, dots = dict(zip(call.names, primals, strict=True)), _perturbed(call, tangents)
    bounds, kernel = _bounds_of(named), _options(call, ("kernel",))
    parts = []
    if "x" in dots:
        parts.append(_product(dots["x"], named["w"], bounds, **kernel))
    if "w" in dots:
        parts.append(_product(named["x"], dots["w"], bounds, **kernel))
    if "bias" in dots:
        parts += _tangents(call, {"bias": dots["bias"]}, bounds, [out])
    return [out], [functools.reduce(jnp.add, parts) if parts else _zero(out)]


def _bias_gradient(
    call: Any, kept: _Arrays, cotangents: Sequence[Any], wanted: dict[str, Any]
) -> _Arrays:
    return {"bias": _row_sums(cotangents[0], kept, wanted["bias"].dtype)}


def _transpose_product(cotangents: Sequence[Any], *arrays: Any, call: Any, **_: Any) -> Any:
    (ct,) = cotangents
    named = dict(zip(call.names, arrays, strict=True))
    made: _Arrays = {}
    if not _is_zero(ct) and ad.is_undefined_primal(named["x"]):
        made["x"] = _times_transpose(ct, named["w"], _bounds_of(named))
    elif not _is_zero(ct):
        made["w"] = _outer(ct, named["x"], _bounds_of(named))
    return [made.get(name) for name in call.names]


def _differentiate_gradients(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: Any, **params: Any
) -> Any:
    """Differentiates Q, R and sums; one call can be several of these."""
    outs = calls._CALLS[call.operation].bind(*primals, call=call, **params)
    named, dots = dict(zip(call.names, primals, strict=True)), _perturbed(call, tangents)
    names, bounds = tuple(calls._outputs(call, named)), _bounds_of(named)
    w = _W_TURNED if _W_TURNED in named else "w"
    made: dict[str, list[Any]] = {name: [] for name in names}
    if "dx" in names:
        one = functools.partial(_times_transpose, bounds=bounds, turned=w == _W_TURNED)
        made["dx"] += [one(dots["dout"], named[w])] if "dout" in dots else []
        made["dx"] += [one(named["dout"], dots[w])] if w in dots else []
    if "dw" in names:
        made["dw"] += [_outer(dots["dout"], named["x"], bounds)] if "dout" in dots else []
        made["dw"] += [_outer(named["dout"], dots["x"], bounds)] if "x" in dots else []
    if "dbias" in names and "dout" in dots:
        made["dbias"].append(_row_sums(dots["dout"], bounds, outs[-1].dtype))
    return outs, [
        functools.reduce(jnp.add, made[name]) if made[name] else _zero(out)
        for name, out in zip(names, outs, strict=True)
    ]


def _transpose_gradients(cotangents: Sequence[Any], *arrays: Any, call: Any, **_: Any) -> Any:
    """Transposes what the rule above makes: one gradient, in one factor."""
    (ct,) = cotangents
    if _is_zero(ct):
        return [None] * len(arrays)
    named = dict(zip(call.names, arrays, strict=True))
    bounds = _bounds_of(named)
    linear = next(name for name, x in named.items() if ad.is_undefined_primal(x))
    by_x, by_w, _by_bias = dict(call.options)["wanted"]
    if by_x and linear == "dout":
        turned = _W_TURNED in named
        made = _times_transpose(ct, named[_W_TURNED if turned else "w"], bounds, not turned)
    elif by_x:
        left, right = (ct, named["dout"]) if linear == _W_TURNED else (named["dout"], ct)
        made = _outer(left, right, bounds)
    elif by_w and linear == "dout":
        made = _times_transpose(named["x"], ct, bounds, turned=True)
    elif by_w:
        made = _times_transpose(named["dout"], ct, bounds)
    else:
        made = _rows_of(ct, bounds, named["dout"].aval)
    return [made if name == linear else None for name in call.names]


def _rows_of(sums: Any, bounds: _Arrays, like: Any) -> Any:
    """For every row its expert's row of `sums`, 0 without an expert."""
    row = jnp.arange(like.shape[-2])
    if "counts" in bounds:
        taken = row[None] < bounds["counts"][:, None]
        rows = jnp.where(taken[..., None], sums[:, None], 0)
    else:
        expert = jnp.searchsorted(bounds["offsets"], row, side="right") - 1
        taken = (expert >= 0) & (expert < len(sums))
        rows = jnp.where(taken[:, None], sums[expert.clip(0, len(sums) - 1)], 0)
    return rows.astype(like.dtype)


# ---- all in one ------------------------------------------------------------------------------


def _in_parts(call: Any, named: _Arrays) -> Any:
    """fused_moe by its three operations, with the same bits if the same kernels serve them."""
    tokens, logits = named["tokens"], named.get("logits")
    if logits is None:
        every = jnp.asarray([0, np.iinfo(np.int32).max], jnp.int32)
        router = {"x": tokens, "w": named["router_weights"][None], "offsets": every}
        if "router_bias" in named:
            router["bias"] = named["router_bias"][None]
        logits = _call("grouped_product", router)["out"]
    given = {"logits": logits} | _options_of(named, ("selection_bias",))
    routing = _call("moe_route", given, **_options(call, _ROUTE_OPTIONS), return_lse=False)
    order = {name: routing[name] for name in ("weights", "offsets", "pairs", "slots")}
    layer = {"x": tokens} | _options_of(named, calls.LAYER_GRADIENTS) | order
    names = (*_LAYER_OPTIONS, "max_workspace_bytes", "recompute", "kernel")
    options = _options(call, names) | {"return_pre_activation": False}
    return _call("moe_forward", layer, **options)["out"]


def _options_of(named: _Arrays, names: Sequence[str]) -> _Arrays:
    return {name: named[name] for name in names if name in named}


def _differentiate_fused(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: Any, **_: Any
) -> Any:
    named, dots = dict(zip(call.names, primals, strict=True)), _perturbed(call, tangents)
    if not dots:
        out = calls._bind(call, *primals)["out"]
        return [out], [_zero(out)]

    def compute(*perturbed: Any) -> Any:
        return _in_parts(call, named | dict(zip(dots, perturbed, strict=True)))

    out, dot = jax.jvp(compute, tuple(named[name] for name in dots), tuple(dots.values()))
    return [out], [dot]


# ---- the rules, of each primitive ------------------------------------------------------------

_GRADIENTS: dict[str, _Gradients] = {
    "moe_forward": _layer_gradients,
    "moe_route": _route_gradients,
    "grouped_product": _bias_gradient,
}
_JVPS = {
    "moe_route": _differentiate_route,
    "moe_forward": _differentiate_layer,
    "grouped_product": _differentiate_product,
    "grouped_product_backward": _differentiate_gradients,
    "fused_moe": _differentiate_fused,
}
_TRANSPOSES = {
    "grouped_product": _transpose_product,
    "grouped_product_backward": _transpose_gradients,
}

for _operation, _rule in _JVPS.items():
    ad.primitive_jvps[calls._CALLS[_operation]] = _rule
    jax.interpreters.batching.primitive_batchers[calls._CALLS[_operation]] = _batch
for _operation, _transpose in _TRANSPOSES.items():
    ad.primitive_transposes[calls._CALLS[_operation]] = _transpose
_tangent.def_impl(_refuse)
jax.interpreters.mlir.register_lowering(_tangent, _refuse)
jax.interpreters.batching.primitive_batchers[_tangent] = _batch_tangent
ad.primitive_transposes[_tangent] = _transpose_tangent


# ---- functions -------------------------------------------------------------------------------

_MULTIPLE = 8  # of matrices' extents
_MOST_GROUPS = 1024
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: None = None,
) -> Any:
    """jax.lax.ragged_dot, computed only by FlashMoE: rows in consecutive groups, each group with
    its own matrix.

    Neither rhs nor its gradient is copied or transposed. Differentiable in lhs and rhs, in both
    modes and to any order. jax.vmap makes one call after another.

    Args:
        lhs: [m, k], fp16 or bf16, on the CPU also fp32 and fp64. k is a multiple of 8.
        rhs: [groups, k, n], lhs's dtype; n is a multiple of 8. At most 1024 groups.
        group_sizes: [groups], integers: the number of rows of lhs in each group, in order. They are
            read when the program runs. Rows after the last group give 0.
        precision: As in jax.lax.dot. Sums are always fp32, for fp64 fp64, which satisfies any named
            precision; an algorithm is refused.
        preferred_element_type: lhs's dtype, or None, which means the same.
        group_offset: None.

    Returns:
        [m, n], lhs's dtype.

    Raises:
        ValueError, TypeError, NotImplementedError: A shape, a dtype or an option is wrong or not
            supported.
    """
    calls._refuse_descriptions({"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes})
    lhs, rhs, group_sizes = map(jnp.asarray, (lhs, rhs, group_sizes))
    _check_ragged(lhs, rhs, group_sizes)
    _check_options(lhs, precision, preferred_element_type, group_offset)
    (group_sizes,) = calls._whole([group_sizes])
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    offsets = jnp.pad(ends, (1, 0))
    arrays = {"dout": lhs, "w": rhs, "offsets": offsets}
    options = {"wanted": (True, False, False)}
    return calls.run("grouped_product_backward", arrays, options)["dx"]


def _check_ragged(lhs: Any, rhs: Any, group_sizes: Any) -> None:
    for name, array, rank in (("lhs", lhs, 2), ("rhs", rhs, 3), ("group_sizes", group_sizes, 1)):
        if array.ndim != rank:
            raise InvalidArgumentError(f"{name}: got {array.ndim} dimensions, accepted are {rank}")
    if str(lhs.dtype) not in _FLOATS:
        raise ArgumentTypeError(
            f"lhs: got dtype {lhs.dtype}, accepted are fp16, bf16 and, on the CPU, fp32 and fp64"
        )
    if rhs.dtype != lhs.dtype:
        raise ArgumentTypeError(f"rhs: got dtype {rhs.dtype}, but lhs has {lhs.dtype}")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ArgumentTypeError(f"group_sizes: got dtype {group_sizes.dtype}, accepted is int32")
    groups, rows, columns = rhs.shape
    if rows != lhs.shape[1]:
        raise InvalidArgumentError(
            f"rhs: its number of rows is {rows}, but lhs has {lhs.shape[1]} columns"
        )
    if group_sizes.shape[0] != groups:
        raise InvalidArgumentError(
            f"group_sizes: got {group_sizes.shape[0]} groups, but rhs has {groups}"
        )
    if not 1 <= groups <= _MOST_GROUPS:
        raise InvalidArgumentError(f"rhs: got {groups} groups, accepted are 1 to {_MOST_GROUPS}")
    for name, extent in (("lhs", rows), ("rhs", columns)):
        if extent < 1 or extent % _MULTIPLE:
            raise InvalidArgumentError(
                f"{name}: its number of columns is {extent}, accepted are multiples of "
                f"{_MULTIPLE} from {_MULTIPLE} on"
            )


def _check_options(lhs: Any, precision: Any, preferred: Any, group_offset: Any) -> None:
    each = precision if isinstance(precision, (tuple, list)) else (precision,)
    for given in each:
        try:
            known = given is None or jax.lax.Precision(given) is not None
        except ValueError:
            known = False
        if not known:
            raise UnsupportedError(
                f"precision: got {given!r}, accepted are None and jax.lax.Precision's: sums are "
                "fp32, of fp64 fp64, by no other algorithm"
            )
    if preferred is not None and jnp.dtype(preferred) != lhs.dtype:
        raise UnsupportedError(
            f"preferred_element_type: got {jnp.dtype(preferred)}, accepted are None and lhs's "
            f"dtype, {lhs.dtype}, to which sums are rounded once"
        )
    if group_offset is not None:
        raise UnsupportedError(
            "group_offset: got one, accepted is None: pass the groups that are here, and of lhs "
            "their rows"
        )
