"""Plans of the gradients of the mixture of experts for models of GPUs: which stages a call has,
what they need, and what is refused. This needs no GPU."""

from __future__ import annotations

import ctypes as c
from typing import Any

import capi
import capi_moe
import flashmoe_science as fm
import pytest

if "sm89" not in fm.build_info().kernel_families.split():
    pytest.skip("built without kernels for GPUs", allow_module_level=True)

_H200, _L4 = capi.Device(256, 1), capi.Device(256, 2)  # FLASHMOE_DEVICE_GPU_MODEL
_MOST_SHARED_BYTES = 99 * 1024
_FLOAT, _BFLOAT, _INT = 2, 4, 0
T, H, INNER, E, K = 1000, 256, 192, 8, 2


def tensor(*shape: int, kind: tuple[int, int] = (_BFLOAT, 16), turned: bool = False) -> capi.Tensor:
    """At an address that faults where it is read."""
    made = capi.Tensor()
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    if turned:
        strides[1:] = [1, shape[1]]
    made.data = 1 << 20
    made.ndim = len(shape)
    made.shape = (c.c_int64 * len(shape))(*shape)
    made.strides = (c.c_int64 * len(shape))(*strides)
    made.dtype = capi.DType(*kind, 1)
    return made


FP32, INT32 = (_FLOAT, 32), (_INT, 32)


def plan(params: Any, device: capi.Device) -> capi.Plan:
    for view in params.keep:
        view.device = device
    return capi_moe.plan_of(params)


def layer(*wanted: str, saved: bool = False, separate: bool = False, **values: Any) -> Any:
    rows = INNER if separate else 2 * INNER
    shapes = {"dx": (T, H), "dw_gate_up": (E, rows, H), "dw_up": (E, INNER, H),
              "dw_down": (E, H, INNER), "db_gate_up": (E, rows), "db_up": (E, INNER),
              "db_down": (E, H)}  # fmt: skip
    given = {
        "dout": tensor(T, H), "x": tensor(T, H), "w_gate_up": tensor(E, rows, H),
        "w_up": tensor(E, INNER, H) if separate else None, "w_down": tensor(E, H, INNER),
        "weights": tensor(T, K, kind=FP32), "offsets": tensor(E + 1, kind=INT32),
        "pairs": tensor(T * K, kind=INT32), "slots": tensor(T, K, kind=INT32),
        "pre_activation": tensor(T * K, 2 * INNER) if saved else None,
    }  # fmt: skip
    for name in wanted:
        given[name] = tensor(T, K, kind=FP32) if name == "dweights" else tensor(*shapes[name])
    gate = capi_moe.GATES["separate" if separate else "gate_up"]
    return capi_moe.make_params(capi_moe.BackwardParams, gate=gate, **given | values)


def stages(made: capi.Plan) -> list[str]:
    names = {"grouped_product_sm89": "product", "moe_backward_rows": "rows",
             "moe_backward_sm89": "dw", "moe_backward_sums": "sums",
             "moe_backward_combine": "combine", "moe_backward_zeros": "zeros"}  # fmt: skip
    return [
        next(stage for name, stage in names.items() if launch.kernel.decode().startswith(name))
        for launch in made.launches[: made.launch_count]
    ]


@pytest.mark.parametrize("device", [_H200, _L4], ids=["h200", "l4"])
def test_stages_are_those_that_are_needed(device: capi.Device) -> None:
    def of(*wanted: str, **options: Any) -> list[str]:
        made = plan(layer(*wanted, kernel=b"sm89", **options), device)
        assert made.family == b"sm89"
        assert made.microseconds > 0
        for launch in made.launches[: made.launch_count]:
            assert 0 < launch.shared_bytes <= _MOST_SHARED_BYTES or launch.shared_bytes == 0
        return stages(made)

    every = ("dx", "dw_gate_up", "dw_down", "db_gate_up", "db_down", "dweights")
    assert of(*every, saved=True) == ["product", "rows", "dw", "sums", "product", "combine"]
    assert of(*every) == ["product", "product", "rows", "dw", "sums", "product", "combine"]
    assert of("dx", saved=True) == ["product", "rows", "product", "combine"]
    assert of("dx", saved=True, separate=True) == ["product", "rows", "product", "product",
                                                   "combine"]  # fmt: skip
    assert of("dw_down", saved=True) == ["rows", "dw"]
    assert of("dw_gate_up", saved=True) == ["product", "rows", "dw"]
    assert of("db_down") == ["rows", "sums"]
    assert of("dweights", saved=True) == ["product", "rows", "combine"]
    assert of("dweights", saved=True, weight_on_input=1) == ["product", "rows", "product",
                                                             "combine"]  # fmt: skip


def sm90_stages(*wanted: str, **options: Any) -> list[str]:
    """The stages of a layer by sm90; its product `gradient` also goes back through the
    activation."""
    gate = options.pop("gate", None)
    params = layer(*wanted, kernel=b"sm90", **options)
    if gate is not None:
        params.gate = capi_moe.GATES[gate]
    made = plan(params, _H200)
    kinds = {"_up_gradient": "gradient", "_up": "up", "_down": "down", "_rows_bf16": "rows",
             "_slots": "slots", "_weight_gradient": "dw", "_sums": "sums",
             "_combine": "combine"}  # fmt: skip
    return [
        next(kind for name, kind in kinds.items() if name in launch.kernel.decode())
        for launch in made.launches[: made.launch_count]
    ]


def test_da_goes_through_silu_in_the_product_that_gives_it() -> None:
    """In sm90, if only that and a gate are between the two products; otherwise it goes row by
    row."""
    skip_without("sm90")
    every = ("dx", "dw_gate_up", "dw_down", "dweights")
    behind = ["dw", "down", "combine"]
    for options in ({}, {"overwrite_pre_activation": 1}, {"gate": "up_gate"}):
        assert sm90_stages(*every, saved=True, **options) == ["slots", "gradient", *behind]
    # Rows of dx have no room for both a and what is computed again: a lies where a gradient will,
    # which waits for the other.
    assert sm90_stages(*every) == ["up", "slots", "gradient", "dw", *behind]
    assert sm90_stages("dx", "db_gate_up", saved=True) == ["slots", "gradient", "sums", "down",
                                                           "combine"]  # fmt: skip
    assert sm90_stages("dweights", saved=True) == ["slots", "gradient", "combine"]
    assert sm90_stages("dw_down", saved=True) == ["rows", "dw"]
    for options in (
        {"activation": capi_moe.ACTIVATIONS["gelu"]}, {"alpha": 1.702}, {"limit": 7.0},
        {"up_offset": 1.0}, {"weight_on_input": 1}, {"gate": "interleaved"},
        {"b_down": tensor(E, H)},
    ):  # fmt: skip
        assert sm90_stages("dx", saved=True, **options)[:2] == ["up", "rows"], options


def pieces(*bytes_each: int, pairs: int = T * K) -> int:
    return sum(-(-pairs * n // 256) * 256 for n in bytes_each)


def test_the_workspace() -> None:
    """Per pair, in numbers of x's dtype: 2I and then the larger of I and H; what is computed again
    costs 2I besides the I."""
    every = ("dx", "dw_gate_up", "dw_down", "dweights")
    named = {"kernel": b"sm89"}
    saved = plan(layer(*every, saved=True, **named), _H200).workspace_bytes
    assert saved == pieces(4, 4, 4 * INNER, 2 * H)
    again = plan(layer(*every, **named), _H200).workspace_bytes
    assert again == pieces(4, 4, 4 * INNER, 2 * INNER, 4 * INNER)
    weights = plan(layer("dw_down", saved=True, **named), _H200).workspace_bytes
    assert weights == pieces(4, 2 * INNER)


def slots(pairs: int, experts: int) -> int:
    """In sm90, where da goes through SiLU after its product: tokens and weights, which are read in
    boxes, and the queue of gradients, two counts and the experts."""
    return pieces(4, 4, pairs=pairs + 256) + pieces(4, pairs=2) + pieces(16, pairs=experts)


def parts(inner: int, pairs: int) -> int:
    """In sm90: the weights' gradients, with 128 columns each."""
    return pieces(4 * 2 * -(-inner // 256), pairs=pairs)


FAMILIES = pytest.mark.parametrize("family", ["sm90", "sm89"])


def skip_without(family: str) -> None:
    if family not in fm.build_info().kernel_families.split():
        pytest.skip(f"built without the {family} kernels")


@FAMILIES
@pytest.mark.parametrize("gate", ["gate_up", "up_gate", "interleaved"])
def test_what_is_overwritten_has_no_other_place(family: str, gate: str) -> None:
    """dz, where pre_activation was, but in the order of interleaved rows."""
    skip_without(family)

    def size(*wanted: str, **options: int) -> int:
        params = layer(*wanted, saved=True, kernel=family.encode(), **options)
        params.gate = capi_moe.GATES[gate]
        return int(plan(params, _H200).workspace_bytes)

    for wanted in (("dx", "dw_gate_up", "dw_down"), ("dw_gate_up",), ("db_gate_up", "db_down")):
        saved = size(*wanted) - size(*wanted, overwrite_pre_activation=1)
        assert saved == (0 if gate == "interleaved" else pieces(4 * INNER)), wanted
    assert size("dw_down") == size("dw_down", overwrite_pre_activation=1)


def test_a_gradient_has_room_for_another_stage() -> None:
    """In sm90: a, and da before it, lie where dw_gate_up will; not in a gradient that is added to,
    or has gaps or fewer numbers."""
    skip_without("sm90")

    def size(turned: bool = False, gap: bool = False, **options: int) -> int:
        params = layer("dw_gate_up", "dw_down", saved=True, kernel=b"sm90", **options)
        held = params.dw_gate_up.contents
        if turned:
            held.strides[1], held.strides[2] = 1, 2 * INNER
        if gap:
            held.strides[0] += 8
        return int(plan(params, _H200).workspace_bytes)

    least, a = size(), pieces(2 * INNER)
    assert size(turned=True) == least
    assert size(gap=True) == least + a
    assert size(accumulate=1) == least + a
    few = fm.moe_backward_plan_for(  # experts for so many tokens
        tokens=4096, hidden=64, inner=1024, experts=8, top_k=2, device="h200", kernel="sm90",
        wanted=(False, True, False, True, False, False, False, False),
    )  # fmt: skip
    assert few.workspace_bytes == slots(8192, 8) + pieces(4 * 1024, 2 * 1024, pairs=8192)


def test_many_rows_of_dx_go_by_halves() -> None:
    """In sm90, without a bound."""
    skip_without("sm90")
    made, whole = bounded("sm90", None), bounded("sm90", 1 << 40)
    assert [launch.repeats for launch in made.launches][-2:] == [2, 2]
    assert {launch.repeats for launch in (*made.launches[:-2], *whole.launches)} == {1}
    y = 4096 * 8 * 2048 * 2
    assert whole.workspace_bytes - made.workspace_bytes == y // 2


def bounded(family: str, bound: int | None, **wanted: Any) -> Any:
    return fm.moe_backward_plan_for(
        tokens=4096, hidden=2048, inner=1024, experts=64, top_k=8, device="h200", kernel=family,
        max_workspace_bytes=bound, **wanted,
    )  # fmt: skip


@FAMILIES
def test_bounded_workspaces(family: str) -> None:
    """By chunks of I, then of H, as few as there may be; dz stays whole for dx."""
    skip_without(family)
    pairs, dz = 4096 * 8, 4 * 1024
    with pytest.raises(fm.UnsupportedError, match="max_workspace_bytes: got 1, ") as refusal:
        bounded(family, 1)
    least = int(str(refusal.value).rpartition("and from ")[2].partition(" on")[0])
    sm90 = family == "sm90"  # which has a in the place of a gradient, unless by chunks of I
    small = slots(pairs, 64) + parts(1024, pairs) if sm90 else pieces(4, 4, pairs=pairs)
    assert least == small + pieces(dz, 2 * 256, pairs=pairs)
    with pytest.raises(fm.UnsupportedError, match=f"and from {least} on"):
        bounded(family, least - 1)
    whole = small + pieces(dz, 2 * 2048, pairs=pairs)
    for bound, of_inner, of_hidden in (
        (least, 1 if sm90 else 4, 8), (least + pairs * 2 * 256, 1 if sm90 else 2, 4),
        (least + pairs * 2 * 512, 1 if sm90 else 2, 3), (whole, 1, 1),
    ):  # fmt: skip
        made = bounded(family, bound)
        assert made.workspace_bytes <= bound
        repeats = [launch.repeats for launch in made.launches]
        first = next(i for i in range(len(repeats)) if "combine" in made.launches[-1 - i].kernel)
        assert (repeats[0], repeats[-1 - first]) == (of_inner, of_hidden)
    # Without dx it goes in chunks, too.
    of_weights = (False, True, False, True, False, False, False, False)
    small = slots(pairs, 64) if sm90 else pieces(4, pairs=pairs)
    thin = bounded(family, small + pieces(4 * 256, 2 * 256, pairs=pairs), wanted=of_weights)
    assert {launch.repeats for launch in thin.launches} == {4}


def test_grouped_products() -> None:
    def of(wanted: tuple[str, ...], **values: Any) -> list[str]:
        given = {"dout": tensor(T, INNER), "x": tensor(T, H), "w": tensor(E, INNER, H),
                 "offsets": tensor(E + 1, kind=INT32)}  # fmt: skip
        shapes = {"dx": (T, H), "dw": (E, INNER, H), "dbias": (E, INNER)}
        given |= {name: tensor(*shapes[name]) for name in wanted}
        params = capi_moe.make_params(capi_moe.ProductBackwardParams, kernel=b"sm89",
                                      **given | values)  # fmt: skip
        made = plan(params, _L4)
        assert made.workspace_bytes == 0
        return stages(made)

    assert of(("dx", "dw", "dbias")) == ["zeros", "product", "dw", "sums"]
    assert of(("dx",), accumulate=1) == ["product"]
    assert of(("dw",), w=None) == ["dw"]


def test_routing_has_one_launch() -> None:
    params = capi_moe.make_params(
        capi_moe.RouteBackwardParams, dweights=tensor(T, K, kind=FP32),
        ids=tensor(T, K, kind=INT32), logits=tensor(T, E), dlogits=tensor(T, E),
    )  # fmt: skip
    made = plan(params, _L4)
    assert [launch.kernel for launch in made.launches[: made.launch_count]] == [
        b"moe_route_backward"
    ]


def test_mixed_layouts_are_refused_where_they_are_computed_again() -> None:
    mixed = {"w_up": tensor(E, INNER, H, turned=True), "kernel": b"sm89"}
    assert plan(layer("dx", separate=True, saved=True, **mixed), _H200).family == b"sm89"
    with pytest.raises(capi.FlashmoeError, match="w_up: got transposed weights, and w_gate_up"):
        plan(layer("dx", separate=True, **mixed), _H200)
