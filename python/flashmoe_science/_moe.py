"""The mixture of experts for tensors whose type has no DLPack exchange API: see _dispatch.

The native functions call those of the same names with everything by name, and only with optional
tensors that are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from flashmoe_science import _core, _dispatch
from flashmoe_science._dispatch import NUMPY, Framework, Words
from flashmoe_science._dtypes import CPU, CUDA, Device, parse_dtype
from flashmoe_science.errors import (
    ArgumentTypeError,
    InvalidArgumentError,
)
from flashmoe_science.moe import MoeRouting

WORDS = Words(
    "the mixture of experts", "all tensors of a call", "out",
    "records gradients of torch's inputs alone, with torch 2.10 or newer",
)  # fmt: skip
BACKWARD = Words("the backward of the mixture of experts", "all tensors of a call", "all gradients")

ROUTER_MULTIPLE = 8  # experts, for the router's product
_MAX_EXPERTS = 1024


class Jax(Framework):
    """JAX arrays and tracers, on which flashmoe_science.jax computes."""

    def device(self, tensor: Any) -> Device:
        return Device(CPU, 0)  # irrelevant: XLA has its own workspace

    def reshaped(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        return tensor.reshape(shape)


_JAX = Jax("jax")


def _framework(tensors: dict[str, Any], words: Words = WORDS) -> Framework:
    framework = _dispatch.common_framework(tensors, words)
    return _JAX if framework is _dispatch.JAX else framework


def _present(**tensors: Any) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _parts(name: str, routing: Any) -> dict[str, Any]:
    """The tensors of a routing by name."""
    if not isinstance(routing, tuple) or len(routing) != len(MoeRouting._fields):
        raise ArgumentTypeError(
            f"{name}: got {_dispatch.type_name(routing)}, accepted is a MoeRouting, which "
            "moe_route and moe_route_given return"
        )
    return dict(zip(MoeRouting._fields, routing, strict=True))


class _Calls:
    """Operations on the tensors of one call, all from one framework."""

    def __init__(
        self,
        tensors: dict[str, Any],
        stream: Any,
        outputs: dict[str, Any] | None = None,
        words: Words = WORDS,
    ) -> None:
        """Tensors by name. The first one's device computes the call. Outputs that are None are not
        given."""
        outputs = _present(**(outputs or {}))
        self.framework = _framework(tensors | outputs, words)
        self._outputs = tuple(outputs.values())
        for name, tensor in outputs.items():
            self.framework.check_output(name, tensor, words)
        self._first = next(iter(tensors.values()))
        device = self.framework.device(self._first)
        if self.framework is _JAX:
            for name in outputs:
                raise InvalidArgumentError(
                    f"{name}: JAX arrays cannot be written to; leave it None"
                )
            if stream is not None:
                raise InvalidArgumentError(
                    "stream: XLA chooses the stream of JAX arrays; leave it None"
                )
        self.given_stream = self.stream = _core.stream_handle(stream)
        if self.stream is None and device.type == CUDA:
            self.stream = self.framework.current_stream(device)
        self.on_gpu = device.type == CUDA

    def run(
        self,
        operation: str,
        tensors: dict[str, Any],
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """Outputs by name: those among `tensors`, and new ones."""
        if self.framework is _JAX:
            from flashmoe_science import jax

            return tensors | jax.run(operation, tensors, options)
        made: dict[str, Any] = {}

        def allocate(name: str, shape: tuple[int, ...], dtype: str) -> Any:
            alone = self.stream if name == "workspace" else None
            made[name] = self._empty(name, shape, dtype, alone)
            return self.framework.view(made[name], self.stream)

        views = {n: self.framework.view(t, self.stream) for n, t in tensors.items()}
        _core.call(operation, views, options, allocate, self.stream)
        self.framework.finish(*self._outputs)
        return tensors | made

    def _empty(self, name: str, shape: tuple[int, ...], dtype: str, stream: int | None) -> Any:
        like, framework = self._first, self.framework
        if type(framework) is Framework and not _dispatch.makes_tensors(like):
            if name == "workspace":
                raise ArgumentTypeError(
                    f"workspace: {_dispatch.type_name(like)} offers no way to make a tensor on its "
                    f"device, and this call needs {shape[0]} bytes there"
                )
            if self.on_gpu or dtype == "bfloat16":
                framework.namespace(like, WORDS)  # raises: there is no way to allocate
            framework = NUMPY
        return framework.empty(like, shape, dtype, stream)


def _routing(made: dict[str, Any]) -> MoeRouting:
    return MoeRouting(*(made.get(name) for name in MoeRouting._fields))


def _outputs(out: Any) -> dict[str, Any]:
    return {} if out is None else _present(**_parts("out", out))


def moe_route(
    tensors: dict[str, Any], options: dict[str, Any], out: Any, stream: Any
) -> MoeRouting:
    outputs = _outputs(out)
    if out is not None and options["return_lse"] and "lse" not in outputs:
        raise InvalidArgumentError("out: its lse is None, accepted with return_lse is a tensor")
    calls = _Calls(tensors, stream, outputs)
    made = calls.run("moe_route", tensors | outputs, options)
    return _routing(made) if out is None else out


def moe_route_given(
    tensors: dict[str, Any], options: dict[str, Any], out: Any, stream: Any
) -> MoeRouting:
    outputs = _outputs(out)
    calls = _Calls(tensors, stream, outputs)
    made = calls.run("moe_route", tensors | outputs, options)
    return _routing(made) if out is None else out


def moe_forward(
    tensors: dict[str, Any],
    routing: Any,
    options: dict[str, Any],
    outputs: dict[str, Any],
    stream: Any,
) -> Any:
    parts = _parts("routing", routing)
    tensors |= {name: parts[name] for name in ("weights", "offsets", "pairs", "slots")}
    calls = _Calls(tensors, stream, outputs)
    made = calls.run("moe_forward", tensors | outputs, options)
    both = options["return_pre_activation"]
    return (made["out"], made["pre_activation"]) if both else made["out"]


def grouped_product(tensors: dict[str, Any], options: dict[str, Any], out: Any, stream: Any) -> Any:
    outputs = _present(out=out)
    calls = _Calls(tensors, stream, outputs)
    return calls.run("grouped_product", tensors | outputs, options)["out"]


# ---- gradients ---------------------------------------------------------------------------------


def differentiate(
    operation: str,
    tensors: dict[str, Any],
    options: dict[str, Any],
    outputs: dict[str, Any],
    stream: Any,
) -> tuple[Any, ...]:
    """The outputs in order. One that is not given is new if the library makes it, else None."""
    given, written = _present(**outputs), {}
    if options.get("overwrite_pre_activation"):
        written = _present(pre_activation=tensors.get("pre_activation"))
    if written and _framework(tensors, BACKWARD) is _JAX:
        raise InvalidArgumentError(
            "overwrite_pre_activation: JAX arrays cannot be written to; leave it False"
        )
    for name, tensor in written.items():
        _core.check_writable(name, tensor)
    calls = _Calls(tensors, stream, given | written, BACKWARD)
    if calls.framework is _JAX and options["accumulate"]:
        raise InvalidArgumentError("accumulate: JAX arrays cannot be added to; leave it False")
    made = calls.run(operation, tensors | given, options)
    return tuple(made.get(name) for name in outputs)


def all_rows(like: Any) -> Any:
    """Offsets on `like`'s device that give a product of one expert all rows of `like`."""
    import numpy

    framework = _framework({"tokens": like})
    made = framework.empty(like, (2,), "int32")
    made[0], made[1] = 0, numpy.iinfo(numpy.int32).max
    return made


# ---- fused_moe -----------------------------------------------------------------------------------


def _rows(framework: Framework, name: str, tensor: Any) -> Any:
    """[..., n] as [rows, n]."""
    shape = tuple(tensor.shape)
    flat = None
    if len(shape) == 2:
        flat = tensor
    elif shape:
        flat = framework.reshaped(tensor, (math.prod(shape[:-1]), shape[-1]))
    if flat is None:
        raise InvalidArgumentError(
            f"{name}: its {len(shape)} dimensions are not rows at one distance, accepted are "
            f"tensors of which reshape(-1, {shape[-1] if shape else 1}) makes no copy"
        )
    return flat


def check_router(tokens: Any, router_weights: Any, router_bias: Any, w_gate_up: Any) -> None:
    """Checks the router with the library's sentences, which the library has only for logits made
    from these."""
    name = "router_weights"
    experts, columns = router_weights.shape
    if experts > _MAX_EXPERTS:
        raise InvalidArgumentError(f"{name}: got {experts} experts, accepted are 1 to 1024")
    if columns != tokens.shape[-1]:
        raise InvalidArgumentError(
            f"{name}: its number of columns is {columns}, but tokens has {tokens.shape[-1]}"
        )
    held: Any = getattr(w_gate_up, "shape", ())
    if len(held) == 3 and held[0] != experts:
        raise InvalidArgumentError(
            f"{name}: its number of experts is {experts}, but w_gate_up has {held[0]}"
        )
    if router_bias is None:
        return
    if len(router_bias.shape) != 1:
        raise InvalidArgumentError(
            f"router_bias: got {len(router_bias.shape)} dimensions, accepted are 1"
        )
    if router_bias.shape[0] != experts:
        raise InvalidArgumentError(
            f"router_bias: its number of experts is {router_bias.shape[0]}, but {name} has "
            f"{experts}"
        )


def router_product(
    tokens: Any, router_weights: Any, router_bias: Any, w_gate_up: Any, stream: Any
) -> Any:
    """Logits by the tensors' own library. The shape of w_gate_up tells the number of experts."""
    if not (hasattr(tokens, "__matmul__") and hasattr(router_weights, "T")):
        raise ArgumentTypeError(
            f"router_weights: {_dispatch.type_name(tokens)} knows no product of matrices, and here "
            "it would have to make this one; pass logits"
        )
    check_router(tokens, router_weights, router_bias, w_gate_up)
    with _dispatch.on_stream(tokens, _core.stream_handle(stream)):
        logits = tokens @ router_weights.T
        return logits if router_bias is None else logits + router_bias


def fused_moe(given: dict[str, Any], options: dict[str, Any], out: Any, stream: Any) -> Any:
    calls = _Calls(given, stream, {"out": out})
    if calls.framework is _JAX:
        from flashmoe_science import jax

        return jax.fused_moe(_fused_of_jax, given, options)
    given_out = out
    if _has_dlpack_alone(calls.framework, given["tokens"]):
        given = _dispatch.through_numpy(given, WORDS)
        if out is not None:
            given_out = _dispatch.output_through_numpy("out", out, WORDS)
        calls = _Calls(given, stream)
    made = _fused(calls, given, options, given_out)
    return made if out is None else out


def _has_dlpack_alone(framework: Framework, tokens: Any) -> bool:
    """Whether NumPy must reshape and multiply; raises if it cannot."""
    if type(framework) is not Framework or _dispatch.makes_tensors(tokens):
        return False
    if framework.device(tokens).type == CUDA:
        framework.namespace(tokens, WORDS)  # raises: no tensor can be made here
    return True


def _fused_of_jax(given: dict[str, Any], options: dict[str, Any]) -> Any:
    return _fused(_Calls(given, None), given, options, None)


def _fused(calls: _Calls, given: dict[str, Any], options: dict[str, Any], given_out: Any) -> Any:
    """out, with the shape of tokens; given_out if given."""
    framework = calls.framework

    def multiply(tokens: Any, router: Any, bias: Any) -> Any:
        if framework is _dispatch.NUMPY:  # NumPy's product supports masked arrays; ours does not
            for name in {"tokens", "router_weights", "router_bias"} & given.keys():
                _core.check_readable(name, given[name])
        return router_product(tokens, router, bias, given["w_gate_up"], calls.given_stream)

    tensors = _as_rows(framework, given | _present(out=given_out), multiply)
    out = calls.run("fused_moe", tensors, options)["out"]
    return framework.reshaped(out, tuple(given["tokens"].shape))


def _as_rows(
    framework: Framework, given: dict[str, Any], multiply: Callable[[Any, Any, Any], Any]
) -> dict[str, Any]:
    """The tensors of the C ABI's call. If the library has no product for the router, `multiply`
    makes logits from tokens, router_weights and router_bias."""
    tensors = given | {"tokens": _rows(framework, "tokens", given["tokens"])}
    if "out" in given:
        if tuple(given["out"].shape) != tuple(given["tokens"].shape):
            raise InvalidArgumentError(
                "out: got another shape than that of tokens, accepted is the same"
            )
        tensors["out"] = _rows(framework, "out", given["out"])
    router = given.get("router_weights")
    if "logits" in given:
        tensors["logits"] = _rows(framework, "logits", given["logits"])
    elif router is not None and len(router.shape) == 2 and router.shape[0] % ROUTER_MULTIPLE:
        bias = tensors.pop("router_bias", None)
        tensors["logits"] = multiply(tensors["tokens"], tensors.pop("router_weights"), bias)
    return tensors


def tensors_of_fused_plan(given: dict[str, Any]) -> dict[str, Any]:
    """The tensors of the C ABI's call, including logits that need not exist."""
    given = _present(**given)
    framework = _framework(given)
    if _has_dlpack_alone(framework, given["tokens"]):
        given, framework = _dispatch.through_numpy(given, WORDS), NUMPY

    def describe(tokens: Any, router: Any, bias: Any) -> Any:
        check_router(tokens, router, bias, given["w_gate_up"])
        shape = (tokens.shape[0], router.shape[0])
        if framework is _JAX:
            import jax

            described: Any = jax.ShapeDtypeStruct
            return described(shape, tokens.dtype)
        return shape, parse_dtype(tokens.dtype, "tokens"), framework.device(tokens), None

    return _as_rows(framework, given, describe)
