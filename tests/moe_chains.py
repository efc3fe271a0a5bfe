"""Calls of the mixture of experts on both sides of every boundary of the planners' choices, with
the kernels that they are made of on a GPU of compute capability 9.0: what cost.h and family.cpp of
each family are to choose.

tests/gpu/test_moe_chains.py runs the calls there, tests/cpu/test_moe_chains.py on the CPU.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import capi_moe
import kernels
from moe_cases import Case

MULTIPROCESSORS = 132  # of the GPU that the boundaries are known of, H100 and H200


# ---- routing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RouteChain:
    tokens: int
    experts: int
    top_k: int
    kernels: tuple[str, ...]
    dtype: str = "bf16"  # of the logits, or of the ids that are given
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    biased: bool = False  # with a selection_bias

    @property
    def given(self) -> bool:
        return self.dtype.startswith("int")

    @property
    def c_options(self) -> dict[str, Any]:
        """The options as the C ABI has them."""
        made = dict(self.options)
        if "scoring" in made:
            made["scoring"] = capi_moe.SCORINGS[made["scoring"]]
        return made

    def __str__(self) -> str:
        options = "".join(f",{name}={value}" for name, value in self.options.items())
        bias = ",biased" if self.biased else ""
        return f"T={self.tokens},E={self.experts},K={self.top_k},{self.dtype}{bias}{options}"


def once(kind: str) -> tuple[str, ...]:
    return (f"moe_route_once_{kind}",)


def twice(kind: str) -> tuple[str, ...]:
    return (f"moe_route_choose_{kind}", "moe_route_place")


# Experts of each kernel: the fewest and the most.
_WIDTHS = ((1, 32), (33, 128), (129, 256), (257, 512), (513, 1024))
_MODES: tuple[tuple[int, str, bool, dict[str, Any]], ...] = (  # bits of a key, and who has them
    (32, "bf16", False, {"renormalize": True}),
    (32, "fp16", False, {"scoring": "sigmoid"}),
    (64, "fp32", False, {"scoring": "topk_softmax"}),
    (64, "bf16", True, {"scoring": "sigmoid", "scale": 2.5}),
)
ONCE = 512  # tokens of one launch: a cluster of 16 blocks, 32 each


def routes() -> list[RouteChain]:
    made = []
    for bits, dtype, biased, options in _MODES:
        for ends in _WIDTHS:
            kind = f"key{bits}_e{ends[1]}"
            for experts in ends:
                top_k = min(experts, 32 if experts == ends[1] else 5)
                how = {"dtype": dtype, "options": options, "biased": biased}
                made += [RouteChain(ONCE, experts, top_k, once(kind), **how),
                         RouteChain(ONCE + 1, experts, top_k, twice(kind), **how)]  # fmt: skip
    groups = {"scoring": "sigmoid", "num_groups": 8, "top_groups": 4, "renormalize": True}
    for biased in (False, True):  # choices that are not the logits, whatever those are
        made += [RouteChain(ONCE, 256, 8, once("key64_e256"), options=groups, biased=biased),
                 RouteChain(ONCE + 1, 256, 8, twice("key64_e256"), options=groups,
                            biased=biased)]  # fmt: skip
    # None; up to 64 pairs, which are compared with each other; twice as many blocks each time.
    few = {0: 2, 1: 32, 2: 32, 3: 32, 8: 8, 9: 8, 12: 5, 13: 5}
    made += [RouteChain(t, 60, k, once("key32_e128")) for t, k in few.items()]
    for blocks in (1, 2, 4, 8, 16):
        tokens = ONCE * blocks // 32
        made += [RouteChain(t, 60, 4, once("key32_e128")) for t in (tokens, tokens + 1)]
    # Ids: a warp takes as many tokens at a time as have their pairs in its lanes.
    for dtype in ("int32", "int64"):
        for top_k in (1, 2, 5, 8, 32):
            most = ONCE * (32 // top_k)
            how = {"renormalize": True, "scale": 2.5} if dtype == "int64" else {}
            made += [RouteChain(most, 60, top_k, once("given"), dtype, how),
                     RouteChain(most + 1, 60, top_k, twice("given"), dtype, how)]  # fmt: skip
        made += [RouteChain(t, 8, 8, once("given"), dtype) for t in (1, 8, 9)]
    # A block's list of 8192 choices, and one that is made anew.
    for tokens in (256 * MULTIPROCESSORS, 256 * MULTIPROCESSORS + 1):
        made.append(RouteChain(tokens, 33, 32, twice("key32_e128")))
        made.append(RouteChain(tokens, 33, 32, twice("given"), "int32"))
    return made


# ---- layers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerChain:
    """kernels: The layer's kernels, with {} for the dtype; none if the family refuses the call."""

    what: str
    case: Case
    family: str
    kernels: tuple[str, ...]
    named: bool = True  # the call names the family
    crowded: bool = False  # every token takes expert 0
    shared: bool = False  # all experts have the same matrices, at the same place
    pre_activation: bool = False

    def names(self, dtype: str) -> tuple[str, ...]:
        return tuple(kernel.format(dtype) for kernel in self.kernels)

    def __str__(self) -> str:
        return f"{self.family}: {self.what}" if self.named else self.what


def _combine(case: Case) -> str:
    batch = 2 if case.top_k <= 2 else 4 if case.top_k <= 4 else 8
    return f"moe_combine_{{}}_k{batch}"


def few_tokens(what: str, case: Case, tile: str, **more: Any) -> LayerChain:
    arch = "sm90" if tile == "bulk" else "sm89"
    kernels = tuple(f"moe_{stage}_{arch}_few_tokens_{{}}_{tile}" for stage in ("up", "down"))
    return LayerChain(what, case, "sm89_few_tokens", kernels, **more)


def sm90(what: str, case: Case, up: str, down: str = "down", **more: Any) -> LayerChain:
    products = tuple(f"grouped_product_sm90_{{}}_{name}" for name in (up, down))
    return LayerChain(what, case, "sm90", (*products, _combine(case)), **more)


def sm89(what: str, case: Case, **more: Any) -> LayerChain:
    gated = "_gated" if case.gate != "none" else ""
    up = f"grouped_product_sm89_{{}}{gated}" + ("_trans" if case.transposed else "")
    down = "grouped_product_sm89_{}" + ("_trans" if case.turns_down else "")
    return LayerChain(what, case, "sm89", (up, down, _combine(case)), **more)


def _refused(what: str, case: Case, family: str) -> LayerChain:
    return LayerChain(what, case, family, ())


_SHORT = Case(hidden=256, inner=192, experts=8, top_k=2)  # rows that no copy engine is asked for
_LONG = Case(hidden=512, inner=512, experts=8, top_k=2)
_KEPT = Case(tokens=384, hidden=264, inner=256, experts=2, top_k=1)  # 192 tokens an expert

_with = dataclasses.replace
_KEPT_MORE = _with(_KEPT, tokens=768, inner=512)


def _stream_chains() -> list[LayerChain]:
    made = [
        few_tokens("1 token", _with(_SHORT, tokens=1), "r16_n8"),
        few_tokens("8 tokens", _with(_SHORT, tokens=8), "r16_n8"),
        few_tokens("9 tokens", _with(_SHORT, tokens=9), "r32_n16"),
        few_tokens("9 of long rows", _with(_LONG, tokens=9), "r32_n16"),
        few_tokens("128 tokens", _with(_SHORT, tokens=128), "r32_n16", crowded=True),
        few_tokens("128 of 1024 experts",
                Case(tokens=128, hidden=64, inner=32, experts=1024, top_k=32), "r32_n16"),
        _refused("129 tokens", _with(_SHORT, tokens=129), "sm89_few_tokens"),
        _refused("up transposed", _with(_SHORT, tokens=3, transposed=True, down_transposed=False),
                 "sm89_few_tokens"),
        _refused("down transposed", _with(_SHORT, tokens=3, down_transposed=True),
                 "sm89_few_tokens"),
        few_tokens("504 columns of x", _with(_LONG, tokens=3, hidden=504), "r16_n8"),
        few_tokens("504 columns of a", _with(_LONG, tokens=3, inner=504), "r16_n8"),
        few_tokens("512 columns", _with(_LONG, tokens=8), "bulk"),
    ]  # fmt: skip
    # Blocks that take whole stripes of 32 rows are busy 93 % of the time, or share stripes of 16.
    full = next(n for n in range(MULTIPROCESSORS) if n >= 0.93 * MULTIPROCESSORS)
    for stripes, tile in ((full - 1, "r16_n8"), (full, "r32_n8"), (MULTIPROCESSORS, "r32_n8"),
                          (MULTIPROCESSORS + 1, "r16_n8")):  # fmt: skip
        case = Case(tokens=8, hidden=32 * stripes, inner=40, experts=2, top_k=2)
        made.append(few_tokens(f"{stripes} stripes", case, tile))
    # The same of the stripes of 16 rows; slots of an expert at a time; columns of a stage, and
    # whether rows come in one or more.
    for tokens, hidden, inner, crowded in (
        (1, 16 * MULTIPROCESSORS, 512, False), (4, 520, 640, True), (5, 768, 776, True),
        (8, 1024, 1032, True), (2, 1280, 1288, False), (2, 1536, 1544, False),
        (2, 512, 2056, False),
    ):  # fmt: skip
        case = Case(tokens=tokens, hidden=hidden, inner=inner, experts=4, top_k=2)
        what = f"{tokens} of {hidden} by {inner}"
        made.append(few_tokens(what, case, "bulk", crowded=crowded))
    # Every tile has its own code for the options; layouts are only strides.
    for tokens, base in ((3, _SHORT), (20, _SHORT), (3, _LONG)):
        tile = "bulk" if base is _LONG else "r16_n8" if tokens <= 8 else "r32_n16"
        for case in (
            _with(base, gate="none", activation="relu2", bias="x"),
            _with(base, gate="interleaved", activation="gelu", limit=0.8, bias="fp32"),
            _with(base, gate="separate", weight_on_input=True, alpha=1.702, up_offset=1.0),
        ):
            what = f"{tokens} of {tile}, {case.gate}"
            case = _with(case, tokens=tokens)
            made.append(few_tokens(what, case, tile, pre_activation=case.gate != "separate"))
    return made


def _sm90_chains() -> list[LayerChain]:
    made = [
        sm90("64 tokens an expert", _with(_SHORT, tokens=128, experts=2, top_k=1),
              "swiglu_up_narrow"),
        sm90("more than 64 tokens an expert", _with(_SHORT, tokens=129, experts=2, top_k=1),
              "swiglu_up"),
        # Tiles of 96 and of 192 tokens, full and one more.
        sm90("a narrow tile", _with(_SHORT, tokens=96, top_k=1), "swiglu_up_narrow",
              crowded=True),
        sm90("two narrow tiles", _with(_SHORT, tokens=97, top_k=1), "swiglu_up_narrow",
              crowded=True),
        sm90("a tile", _with(_SHORT, tokens=192, experts=2, top_k=1), "swiglu_up", crowded=True),
        sm90("two tiles", _with(_SHORT, tokens=193, experts=2, top_k=1), "swiglu_up",
              crowded=True),
        sm90("1 token", _with(_SHORT, tokens=1), "swiglu_up_narrow"),
        # What takes the activation of every kind.
        *(
            sm90(what, _with(_SHORT, tokens=40, **changed), "gated_up")
            for what, changed in {
                "gelu": {"activation": "gelu"}, "gelu_tanh": {"activation": "gelu_tanh"},
                "relu": {"activation": "relu"}, "relu2": {"activation": "relu2"},
                "alpha": {"alpha": 1.702}, "limit": {"limit": 0.8}, "up_offset": {"up_offset": 1.0},
                "weight_on_input": {"weight_on_input": True}, "bias": {"bias": "x"},
            }.items()
        ),
        sm90("pre_activation", _with(_SHORT, tokens=40), "swiglu_up_narrow", pre_activation=True),
        sm90("pre_activation of two tiles", _with(_SHORT, tokens=193, experts=2, top_k=1),
              "swiglu_up", crowded=True, pre_activation=True),
        sm90("pre_activation, gelu", _with(_SHORT, tokens=200, activation="gelu", top_k=1),
              "gated_up", crowded=True, pre_activation=True),
        sm90("pre_activation, no gate",
              _with(_SHORT, tokens=200, gate="none", activation="relu2", top_k=1), "up",
              crowded=True, pre_activation=True),
        sm90("200 tokens of one expert, gated",
              _with(_SHORT, tokens=200, activation="gelu", top_k=1), "gated_up", crowded=True),
        # Layouts: the order of rows is one of addresses, which stride is 1 one of kernels.
        sm90("up_gate", _with(_SHORT, tokens=20, gate="up_gate"), "swiglu_up_narrow"),
        sm90("interleaved", _with(_SHORT, tokens=20, gate="interleaved"), "swiglu_up_narrow"),
        sm90("separate", _with(_SHORT, tokens=300, gate="separate"), "swiglu_up"),
        sm90("no gate", _with(_SHORT, tokens=200, gate="none", activation="relu2"), "up",
              pre_activation=True),
        sm90("no gate, transposed", _with(_SHORT, tokens=200, gate="none", transposed=True),
              "up_trans", "down_trans"),
        sm90("transposed", _with(_SHORT, tokens=70, transposed=True), "gated_up_trans",
              "down_trans", pre_activation=True),
        sm90("up transposed", _with(_SHORT, tokens=70, transposed=True, down_transposed=False),
              "gated_up_trans"),
        sm90("down transposed", _with(_SHORT, tokens=70, down_transposed=True),
              "swiglu_up_narrow", "down_trans"),
        sm90("transposed with interleaved rows",
              _with(_SHORT, tokens=70, transposed=True, gate="interleaved", bias="x", limit=0.8),
              "gated_up_interleaved", "down_trans", pre_activation=True),
        sm90("transposed with interleaved rows, 200 tokens of one expert",
              _with(_SHORT, tokens=200, transposed=True, gate="interleaved", top_k=1,
                    down_transposed=False), "gated_up_interleaved", crowded=True),
        # Weights that are kept in registers; then more token tiles than pass by them in one run.
        sm90("192 tokens an expert", _KEPT, "swiglu_up", "down_short"),
        sm90("fewer tokens an expert", _with(_KEPT, tokens=383), "swiglu_up"),
        sm90("200 columns", _with(_KEPT, inner=200), "swiglu_up", "down_short"),
        sm90("192 columns", _with(_KEPT, inner=192), "swiglu_up"),
        sm90("264 columns", _with(_KEPT, inner=264), "swiglu_up"),
        sm90("384 tokens an expert, 512 columns", _KEPT_MORE, "swiglu_up", "down_middle"),
        sm90("fewer tokens an expert, 512 columns", _with(_KEPT_MORE, tokens=767), "swiglu_up"),
        sm90("448 columns", _with(_KEPT_MORE, inner=448), "swiglu_up"),
        sm90("456 columns", _with(_KEPT_MORE, inner=456), "swiglu_up", "down_middle"),
        sm90("520 columns", _with(_KEPT_MORE, inner=520), "swiglu_up"),
        sm90("2500 tokens of one expert, 512 columns",
              _with(_KEPT_MORE, tokens=2500, bias="x"), "gated_up", "down_middle", crowded=True),
        sm90("192 tokens an expert, down transposed", _with(_KEPT, down_transposed=True),
              "swiglu_up", "down_trans"),
        sm90("2500 tokens of one expert", _with(_KEPT, tokens=2500, bias="x"), "gated_up",
              "down_short", crowded=True),
    ]  # fmt: skip
    return made


def _sm89_chains() -> list[LayerChain]:
    made = [
        # Tiles of 96 and of 288 tokens, full and one more.
        *(
            sm89(f"{tokens} tokens of one expert", _with(_SHORT, tokens=tokens, top_k=1),
                  crowded=True)
            for tokens in (96, 97, 288, 289)
        ),
        sm89("1 token", _with(_SHORT, tokens=1)),
        sm89("no gate", _with(_SHORT, tokens=70, gate="none", activation="relu2"),
              pre_activation=True),
        sm89("transposed", _with(_SHORT, tokens=70, transposed=True), pre_activation=True),
        sm89("transposed with interleaved rows",
              _with(_SHORT, tokens=70, transposed=True, gate="interleaved", bias="fp32")),
        sm89("no gate, transposed", _with(_SHORT, tokens=70, gate="none", transposed=True)),
        sm89("up transposed",
              _with(_SHORT, tokens=70, gate="separate", transposed=True, down_transposed=False)),
        sm89("down transposed", _with(_SHORT, tokens=70, gate="up_gate", down_transposed=True)),
    ]  # fmt: skip
    # Rows of a token that combining loads at a time; its blocks of less and of more threads.
    made += [
        sm89(f"K of {top_k}", _with(_SHORT, tokens=20, experts=33, top_k=top_k))
        for top_k in (1, 2, 3, 4, 5, 8, 9, 32)
    ]
    made += [
        sm89(f"{tokens} tokens beside multiprocessors", _with(_SHORT, tokens=tokens))
        for tokens in (MULTIPROCESSORS - 1, MULTIPROCESSORS)
    ]
    return made


def _unnamed_chains() -> list[LayerChain]:
    """The chain that serves a call without a named kernel: that of the family with the least
    estimate. For one token, and for few with long rows, that is sm89_few_tokens, otherwise sm90 if
    it can."""
    interleaved = {"gate": "interleaved", "transposed": True}
    made = [
        sm90("4 tokens of short rows", _with(_SHORT, tokens=4), "swiglu_up_narrow"),
        sm90("9 tokens", _with(_LONG, tokens=9, experts=64), "swiglu_up_narrow"),
        few_tokens("8 tokens", _with(_LONG, tokens=8, experts=11), "bulk"),
        sm90("128 tokens", _with(_SHORT, tokens=128), "swiglu_up_narrow"),
        sm90("1 token of transposed weights", _with(_LONG, tokens=1, transposed=True),
              "gated_up_trans", "down_trans"),
        sm90("1 token of interleaved rows", _with(_SHORT, tokens=1, **interleaved),
              "gated_up_interleaved", "down_trans"),
        few_tokens("1 token of short rows", _with(_SHORT, tokens=1), "r16_n8"),
        few_tokens("16 tokens that sm90 cannot walk",
                   _with(_SHORT, tokens=16, experts=32, top_k=4), "r32_n16", shared=True),
        sm89("64 tokens that sm90 cannot walk", _with(_SHORT, tokens=64, experts=32, top_k=4),
             shared=True),
        sm89("129 tokens that sm90 cannot walk", _with(_SHORT, tokens=129, experts=64, top_k=4),
              shared=True),
    ]  # fmt: skip
    return [dataclasses.replace(chain, named=False) for chain in made]


def layers() -> list[LayerChain]:
    return [*_stream_chains(), *_sm90_chains(), *_sm89_chains(), *_unnamed_chains()]


def stated_kernels() -> set[str]:
    """All of which some chain is made."""
    made = {kernel for chain in routes() for kernel in chain.kernels}
    return made | {name for chain in layers() for d in kernels.DTYPES for name in chain.names(d)}
