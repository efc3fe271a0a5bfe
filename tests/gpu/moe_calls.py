"""One chain of calls of the mixture of experts, by the C ABI: every tensor in poisoned memory,
every workspace of exactly the bytes that were asked for, and what ran read back.

On the GPU or, for the same chains where there is none, on the CPU.
"""

from __future__ import annotations

import ctypes as c
from typing import Any

import capi
import capi_moe
import moe_oracle
import torch
from gpu import memory, moe_layers
from gpu.memory import Placed, Placement
from gpu.moe_layers import DTYPES, generator
from moe_chains import LayerChain, RouteChain

_GUARD = 4096  # bytes before and behind a workspace
_POISONS = (0xFF, 0x5A)  # NaN and -1; numbers that look like any other
_INTEGERS = {"int32": torch.int32, "int64": torch.int64}
FEW = (-3.0, -1.2, 0.1, 0.9, 2.2, 4.0)  # logits, of which every arithmetic's sigmoids are apart


# ---- one call ------------------------------------------------------------------------------------


class Call:
    """Parameters, with what they are the addresses of."""

    def __init__(self, kind: type, placed: dict[str, Placed], **values: Any) -> None:
        self.placed = placed
        self.params = capi_moe.make_params(
            kind, **{name: each.raw() for name, each in placed.items()}, **values
        )
        self.lib = capi.load()
        self.plan = capi_moe.plan_of(self.params, self.lib)
        self.run, _, size_of = capi_moe.functions(self.params, self.lib)
        size = c.c_size_t()
        capi.check(size_of(self.params, size), self.lib)
        assert size.value == self.plan.workspace_bytes
        self.device = next(iter(placed.values())).buffer.device
        room = self.plan.workspace_bytes + 2 * _GUARD
        self.workspace = torch.full((room,), 0xA5, dtype=torch.uint8, device=self.device)

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(launch.kernel.decode() for launch in self.plan.launches)

    def launch(self) -> None:
        """What is planned, and nothing else."""
        cuda = self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device).cuda_stream if cuda else None
        begin = self.workspace.data_ptr() + _GUARD
        capi.check(self.run(self.params, begin, self.plan.workspace_bytes, stream), self.lib)

    def check_launch(self, poison: int, outputs: tuple[str, ...], *, runs: bool = True) -> None:
        """Launches, reads the launches back, and finds nothing touched but the outputs."""
        self.workspace[_GUARD:-_GUARD] = poison
        for each in self.placed.values():
            each.remember()
        self.launch()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if runs:
            launches = capi.last_launches(self.lib)
            assert capi.is_planned(self.plan, launches)
            assert all(launch.local_bytes == 0 for launch in launches)
        for name, each in self.placed.items():
            assert each.intact(inside=name not in outputs), f"{name}: memory of it or around"
        for guard in (self.workspace[:_GUARD], self.workspace[-_GUARD:]):
            assert (guard == 0xA5).all(), "memory around the workspace was written"


# ---- routing -------------------------------------------------------------------------------------


def clear_rows(z: torch.Tensor, bias: torch.Tensor | None, groups: int) -> torch.Tensor:
    """The rows whose choices and groups are equal for every arithmetic, or apart: the order of sums
    that fp32 cannot tell from one another is open."""
    choice = z.double().sigmoid() + (0 if bias is None else bias.double())
    choice = torch.where(choice.isnan(), -torch.inf, choice)
    sums = choice.view(len(z), groups, z.shape[1] // groups).topk(2, -1).values.sum(-1)
    clear = torch.ones(len(z), dtype=torch.bool, device=z.device)
    for values in (choice, sums):
        gaps = values.sort(1).values.diff(dim=1)
        clear &= ~((gaps > 0) & (gaps < 2e-6)).any(1)
    return z[clear]


def few_values(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    few = torch.tensor(FEW, device=g.device)
    return few[torch.randint(len(few), shape, generator=g, device=g.device)]


def with_wild(values: torch.Tensor, share: float, g: torch.Generator) -> torch.Tensor:
    """So many of them NaN or infinite."""
    wild = torch.tensor([torch.nan, torch.inf, -torch.inf], device=values.device)
    picks = wild[torch.randint(3, values.shape, generator=g, device=values.device)]
    return torch.where(torch.rand(values.shape, generator=g, device=values.device) < share,
                       picks, values)  # fmt: skip


def _logits_of(chain: RouteChain, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    g = generator(chain.tokens + 31 * chain.experts, device)
    groups = chain.options.get("num_groups", 1)
    if not chain.biased and groups == 1:
        z = torch.randn(chain.tokens, chain.experts, generator=g, device=device)
        z[:, ::3] = (z[:, ::3] * 2).round()  # with ties
        return with_wild(z, 0.02, g).to(DTYPES[chain.dtype]), None
    bias = None
    if chain.biased:
        bias = torch.randint(-2, 3, (chain.experts,), generator=g, device=device) * 1.75
    rows = chain.tokens if groups == 1 else 2 * chain.tokens
    z = with_wild(few_values((rows, chain.experts), g), 0.02, g).to(DTYPES[chain.dtype])
    if groups > 1:
        z = clear_rows(z, bias, groups)[: chain.tokens].contiguous()
    assert len(z) == chain.tokens
    return z, bias


def _given_of(chain: RouteChain, device: str) -> dict[str, torch.Tensor]:
    """Ids, of which some are nobody's, weights, and a map of them to this call's experts."""
    g = generator(chain.tokens + chain.top_k, device)
    shape = (chain.tokens, chain.top_k)
    known = chain.experts + 7
    ids = torch.randint(-3, known + 3, shape, generator=g, device=device)
    ids = ids.to(_INTEGERS[chain.dtype])
    if chain.tokens > 2:
        ends = torch.iinfo(ids.dtype)
        ids[1, 0], ids[2, -1] = ends.max, ends.min
    # Positive, as those are that are divided by their sum.
    weights = torch.rand(shape, generator=g, device=device).half() + 0.1
    made = {"given_ids": ids, "given_weights": weights}
    if chain.top_k % 2 == 0:
        made["expert_map"] = torch.randint(-2, chain.experts + 2, (known,), generator=g,
                                           device=device).int()  # fmt: skip
    return made


def _places(tokens: int, experts: int, top_k: int, device: str) -> dict[str, Placed]:
    """The places of a routing's outputs."""

    def place(*shape: int, dtype: torch.dtype = torch.int32) -> Placed:
        return memory.place(shape, dtype, device)

    return {
        "ids": place(tokens, top_k),
        "weights": place(tokens, top_k, dtype=torch.float32),
        "offsets": place(experts + 1),
        "pairs": place(tokens * top_k),
        "slots": place(tokens, top_k),
    }


def _routing_of(call: Call) -> capi_moe.Routing:
    return capi_moe.Routing(**{n: call.placed[n].view for n in ROUTED if n in call.placed})


ROUTED = ("ids", "weights", "offsets", "pairs", "slots", "lse")


def route_call(chain: RouteChain, device: str) -> tuple[Call, moe_oracle.Routing]:
    """The call, and what it is to give."""
    outputs = _places(chain.tokens, chain.experts, chain.top_k, device)
    if chain.given:
        given = _given_of(chain, device)
        want = moe_oracle.route_given(
            given["given_ids"], given["given_weights"], num_experts=chain.experts,
            expert_map=given.get("expert_map"), **chain.options,
        )  # fmt: skip
    else:
        logits, bias = _logits_of(chain, device)
        want = moe_oracle.route(logits, chain.top_k, selection_bias=bias, **chain.options)
        given = {"logits": logits}
        if bias is not None:
            given["selection_bias"] = bias
        outputs["lse"] = memory.place((chain.tokens,), torch.float32, device)
    inputs = {name: memory.place_values(tensor) for name, tensor in given.items()}
    return Call(capi_moe.RouteParams, inputs | outputs, **chain.c_options), want


def check_route(chain: RouteChain, device: str) -> tuple[str, ...]:
    """Right, whatever the workspace held; the names of the kernels."""
    call, want = route_call(chain, device)
    for poison in _POISONS:
        call.check_launch(poison, ROUTED)
        moe_oracle.assert_routed(_routing_of(call), want)
    return call.kernels


# ---- layers --------------------------------------------------------------------------------------


def layer_calls(chain: LayerChain, dtype: str, device: str) -> tuple[Call, Call]:
    """Routing, and the layer for what it will give. Raises capi.FlashmoeError where the family
    refuses the layer."""
    case = chain.case
    g = generator(case.tokens + case.experts, device)
    z = torch.randn(case.tokens, case.experts, generator=g, device=device)
    if chain.crowded:
        z[:, 0] = 50.0
    routed = _places(case.tokens, case.experts, case.top_k, device)
    logits = memory.place_values(z.to(DTYPES[dtype]))
    route = Call(capi_moe.RouteParams, {"logits": logits} | routed, renormalize=1)
    low = DTYPES[dtype]
    rows = Placement((0, 1), (8, 8))
    placed = moe_layers.place_weights(case, dtype, gap=8, shared=chain.shared, device=device)
    placed["out"] = memory.place((case.tokens, case.hidden), low, device, rows)
    if chain.pre_activation:
        width = case.inner if case.gate == "none" else 2 * case.inner
        shape = (case.tokens * case.top_k, width)
        placed["pre_activation"] = memory.place(shape, low, device, Placement((0, 1), (0, 16)))
    placed |= {name: routed[name] for name in ("weights", "offsets", "pairs", "slots")}
    gate = {"none": "no_gate"}.get(case.gate, case.gate)
    values = {
        "gate": capi_moe.GATES[gate], "activation": capi_moe.ACTIVATIONS[case.activation],
        "limit": case.limit or 0.0, "alpha": 0.0 if case.alpha == 1.0 else case.alpha,
        "up_offset": case.up_offset, "weight_on_input": int(case.weight_on_input),
    }  # fmt: skip
    if chain.named and device != "cpu":
        values["kernel"] = chain.family.encode()
    return route, Call(capi_moe.ForwardParams, placed, **values)


def check_layer(chain: LayerChain, dtype: str, device: str) -> tuple[str, ...]:
    """Both calls, right, whatever the workspaces held; the names of the layer's kernels."""
    route, layer = layer_calls(chain, dtype, device)
    case = chain.case
    route.check_launch(_POISONS[0], ROUTED)
    routing = _routing_of(route)
    logits = route.placed["logits"].view
    moe_oracle.assert_routed(routing, moe_oracle.route(logits, case.top_k, renormalize=True))
    bits = []
    for poison in _POISONS:
        layer.check_launch(poison, ("out", "pre_activation"), runs=case.tokens > 0)
        bits.append(memory.bits(layer.placed["out"].view).clone())
    assert torch.equal(*bits), "what the workspace held shows in the output"
    values = {name: each.view for name, each in layer.placed.items() if name not in _NO_VALUES}
    moe_oracle.assert_forward(
        layer.placed["out"].view, **values, **case.options, routing=routing,
        pre_activation=layer.placed["pre_activation"].view if chain.pre_activation else None,
    )  # fmt: skip
    return layer.kernels


_NO_VALUES = ("out", "pre_activation", "weights", "offsets", "pairs", "slots")
