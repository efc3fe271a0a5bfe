"""FlashAttention 2, 3 and 4: three packages with nearly one function."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.peers.peer import (
    Inputs,
    Peer,
    import_first,
    is_causal,
    window_of,
)
from flashmoe_science.cli.shapes import Shape
from flashmoe_science.cli.timing import Contender

# flash_attn without its extension is only the folder that FlashAttention 4 lives in.
_FA2 = ("flash_attn_2_cuda",)
_FA3 = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
_FA4 = ("flash_attn.cute",)
_GET_FA3 = "install the folder hopper of the flash-attention sources"


def _first(answer: Any) -> Any:
    """Their output; some versions return it with the LSE."""
    return answer[0] if isinstance(answer, tuple) else answer


def _prepare(
    modules: tuple[str, ...],
    unbounded: int | None,
    options: dict[str, Any],
    arrays: Arrays,
    shape: Shape,
    inputs: Inputs,
) -> Contender:
    """`unbounded` stands for no bound in their window_size."""
    causal = is_causal(shape, "bottom_right", "FlashAttention")
    window = window_of(shape, "bottom_right", "FlashAttention")
    if window is not None:
        ends = tuple(unbounded if end is None else end for end in window)
        options = options | {"window_size": ends}
    if shape.softcap is not None:
        options = options | {"softcap": shape.softcap}
    function = import_first(modules).flash_attn_func
    call = functools.partial(function, *inputs, causal=causal, **options)
    return Contender("", call, output=_first)


# For a backward: the forward splits no keys, as by default.
_FA3_TO_DIFFERENTIATE = Peer(
    "fa3",
    ("cuda",),
    _FA3,
    "flash_attn_3",
    _GET_FA3,
    functools.partial(_prepare, _FA3, -1, {}),
)

PEERS = (
    Peer(
        "fa2",
        ("cuda",),
        _FA2,
        "flash-attn",
        "pip install --no-build-isolation flash-attn",
        functools.partial(_prepare, ("flash_attn",), -1, {}),
    ),
    Peer(
        "fa3",
        ("cuda",),
        _FA3,
        "flash_attn_3",
        _GET_FA3,
        # 0 lets it choose the number of key splits; its default, 1, would forbid them, and decoding
        # needs them.
        functools.partial(_prepare, _FA3, -1, {"num_splits": 0}),
    ),
    Peer(
        "fa4",
        ("cuda",),
        _FA4,
        "flash-attn-4",
        "pip install --pre flash-attn-4",
        functools.partial(_prepare, _FA4, None, {}),
    ),
)

TO_DIFFERENTIATE = (
    *(_FA3_TO_DIFFERENTIATE if peer.name == _FA3_TO_DIFFERENTIATE.name else peer for peer in PEERS),
    dataclasses.replace(
        _FA3_TO_DIFFERENTIATE,
        name="fa3-deterministic",
        prepare=functools.partial(_prepare, _FA3, -1, {"deterministic": True}),
    ),
)
