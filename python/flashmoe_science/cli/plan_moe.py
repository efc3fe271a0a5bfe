"""`flashmoe plan-moe`: which kernels serve a layer of experts, and why not others."""

from __future__ import annotations

import argparse
from typing import Any

from flashmoe_science.cli import environment
from flashmoe_science.cli.output import EXIT_OK, Output, add_json_option, write_json
from flashmoe_science.cli.plan import add_device_options, chosen_device, launch_words, work_rows

_DESCRIPTION = """\
Explains one layer of a mixture of experts without computing it: the launches of its routing and of
its products in order, their tiles, threads, shared memory and grids, the workspace, the work, and
why the other kernel families are not used. Needs no tensors, and for --device cpu and --gpu no GPU.

  flashmoe plan-moe --tokens 4096 --hidden 2048 --inner 768 --experts 128 --top-k 8
  flashmoe plan-moe --tokens 1 --hidden 4096 --inner 14336 --experts 8 --top-k 2 --gpu h100
"""

_EXTENTS = {
    "tokens": "rows of the hidden states",
    "hidden": "size of a hidden state, a multiple of 8",
    "inner": "inner size of an expert, a multiple of 8",
    "experts": "number of experts",
    "top_k": "experts of a token",
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan-moe",
        help="which kernels serve a layer of experts, and why not others",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, meaning in _EXTENTS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, required=True, metavar="N", help=meaning)
    parser.add_argument(
        "--dtype", choices=("fp16", "bf16", "fp32"), help="(default bf16; on the CPU fp32)"
    )
    parser.add_argument(
        "--gate",
        choices=("gate_up", "up_gate", "interleaved", "separate", "none"),
        default="gate_up",
        help="how gate and up lie in the weights (default gate_up)",
    )
    parser.add_argument(
        "--activation",
        choices=("silu", "gelu", "gelu_tanh", "relu", "relu2"),
        default="silu",
        help="(default silu)",
    )
    parser.add_argument(
        "--scoring",
        choices=("softmax", "topk_softmax", "sigmoid"),
        default="softmax",
        help="of the routing (default softmax)",
    )
    parser.add_argument(
        "--transposed", action="store_true", help="weights are stored as [E, H, 2I] and [E, I, H]"
    )
    parser.add_argument("--bias", action="store_true", help="experts have biases")
    add_device_options(parser)
    parser.add_argument(
        "--kernel",
        metavar="FAMILY",
        help="ask for this kernel family: sm89_few_tokens, sm90, sm89 or cpu",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def _launch(launch: dict[str, Any], gpu: bool) -> str:
    words = launch_words(launch, gpu)
    if gpu and launch["tile_m"]:
        words += f", tile {launch['tile_m']} rows x {launch['tile_n']} tokens"
    return words


def _print(document: dict[str, Any], output: Output) -> None:
    shape, device = document["shape"], document["device"]
    gpu = device["compute_capability"] != 0
    extents = " ".join(f"{name} {shape[name]}" for name in _EXTENTS)
    output.heading(f"{shape['dtype']} {extents} on {device['device']} ({device['name']})")
    for part in ("routing", "layer"):
        plan = document[part]
        output.heading(f"{part.capitalize()}: {plan['family']} ({plan['isa']})")
        output.pairs([(launch["kernel"], _launch(launch, gpu)) for launch in plan["launches"]])
        output.pairs(work_rows(plan))
    output.heading("Not used for the layer")
    rejected = [line.partition(":") for line in document["layer"]["rejected"].splitlines() if line]
    output.pairs(
        [(family, reason.strip()) for family, _, reason in rejected]
        or [("none", "every other family is absent from this build")]
    )


def run(arguments: argparse.Namespace) -> int:
    flashmoe = environment.package()
    device = chosen_device(flashmoe, arguments)
    dtype = arguments.dtype or ("fp32" if device == "cpu" else "bf16")
    extents = {name: getattr(arguments, name) for name in _EXTENTS}
    layer = flashmoe.moe_plan_for(
        **extents,
        dtype=dtype,
        device=device,
        gate=arguments.gate,
        activation=arguments.activation,
        transposed=arguments.transposed,
        bias=arguments.bias,
        kernel=arguments.kernel,
    )
    routing = flashmoe.moe_route_plan_for(
        tokens=arguments.tokens,
        experts=arguments.experts,
        top_k=arguments.top_k,
        dtype=dtype,
        device=device,
        scoring=arguments.scoring,
    )
    options = ("gate", "activation", "scoring", "transposed", "bias")
    document = {
        "shape": {
            **extents,
            "dtype": dtype,
            **{name: getattr(arguments, name) for name in options},
        },
        "device": {"device": device, **environment.as_dict(flashmoe.device_info(device))},
        "routing": environment.plan_as_dict(routing),
        "layer": environment.plan_as_dict(layer),
    }
    if arguments.json != "-":
        _print(document, Output())
    if arguments.json is not None:
        write_json(document, arguments.json)
    return EXIT_OK
