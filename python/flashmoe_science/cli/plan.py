"""`flashmoe plan`: which kernel serves a shape, how it is launched, and why not another."""

from __future__ import annotations

import argparse
import math
from typing import Any

from flashmoe_science._dtypes import GPU_MODELS
from flashmoe_science.cli import environment
from flashmoe_science.cli.arrays import normal_device
from flashmoe_science.cli.output import (
    EXIT_OK,
    CommandError,
    Output,
    add_json_option,
    write_json,
)
from flashmoe_science.cli.shapes import (
    BackwardShape,
    Shape,
    add_pass_options,
    add_shape_options,
    of_pass,
    shape_from_options,
)

_DESCRIPTION = """\
Explains one attention call, or with --backward that of its gradients, without making it: the kernel
that would serve it, its tile, threads, shared memory, grid and workspace, the work in it, and why
the other kernel families are not used. Needs no tensors, and for --device cpu and --gpu no GPU:
--gpu plans for a model that is not here, from a table of facts, and gives the plan that such a
device would get.

  flashmoe plan --batch 1 --seq 4096 --heads 32 --kv-heads 8 --dim 128 --causal
  flashmoe plan --seq-q 1 --seq-k 8192 --heads 32 --kv-heads 8 --dim 128 --dtype fp16 --device cpu
  flashmoe plan --seq 16384 --heads 16 --dim 128 --causal --window 1023,none --softcap 50
  flashmoe plan --seq 4096 --heads 32 --dim 128 --gpu h200
  flashmoe plan --seq 4096 --heads 32 --kv-heads 8 --dim 128 --causal --backward
"""

# Most threads per SM, and bytes of shared memory that the system reserves per block, on sm_89 and
# sm_90.
_THREADS_PER_SM = {89: 1536}
_DEFAULT_THREADS_PER_SM = 2048
_SYSTEM_SHARED_BYTES = 1024


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="which kernel serves a shape, how it is launched, and why not another",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_shape_options(parser, required=True)
    add_pass_options(parser)
    add_device_options(parser)
    parser.add_argument(
        "--kernel",
        metavar="FAMILY",
        help="ask for this kernel family (sm89_few_rows, sm90, sm89 or cpu) or schedule "
        "of one (sm90_whole_tiles, sm90_split_kv)",
    )
    parser.add_argument("--layout", choices=("bshd", "bhsd"), default="bshd", help="(default bshd)")
    add_json_option(parser)
    parser.set_defaults(run=run)


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for a device, or a GPU model that need not be here."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--device",
        metavar="NAME",
        help="cpu, cuda or cuda:N (default: the first GPU the library can use, else cpu)",
    )
    group.add_argument(
        "--gpu", choices=GPU_MODELS, help="plan for this model, whatever GPU is here or not"
    )


def chosen_device(flashmoe: Any, arguments: argparse.Namespace) -> str:
    """The name of the device or model to plan for. A missing device is refused with what can be
    planned for instead."""
    if arguments.gpu:
        return str(arguments.gpu)
    if not arguments.device:
        return "cuda:0" if flashmoe.cuda_device_count() > 0 else "cpu"
    try:
        device = normal_device(arguments.device)
        flashmoe.device_info(device)
    except (CommandError, flashmoe.DeviceError) as error:
        models = f"; --gpu plans for one that is not here: {', '.join(GPU_MODELS)}"
        raise CommandError(
            f"{error}{models if flashmoe.build_info().cuda_architectures else ''}"
        ) from error
    return device


def plan_for(
    flashmoe: Any, shape: Shape, device: str, layout: str = "bshd", kernel: str | None = None
) -> Any:
    """The package's plan of one shape."""
    backward = isinstance(shape, BackwardShape)
    plan = flashmoe.attention_backward_plan_for if backward else flashmoe.attention_plan_for
    return plan(
        batch=shape.batch,
        seq_q=shape.seq_q,
        seq_k=shape.seq_k,
        heads_q=shape.heads_q,
        heads_kv=shape.heads_kv,
        dim=shape.dim,
        dim_v=shape.dim_v,
        dtype=shape.dtype,
        device=device,
        **shape.options,
        layout=layout,
        kernel=kernel,
    )


def occupancy(plan: dict[str, Any], device: dict[str, Any]) -> dict[str, Any]:
    """How the grid fills the device. On a GPU shared memory and threads bound the blocks per SM;
    registers can lower this further and are known only once the kernel is loaded."""
    units = max(int(device["multiprocessors"]), 1)
    blocks = math.prod(plan["grid"])
    resident = 1
    if device["compute_capability"]:
        shared = device["shared_bytes_per_block"] + _SYSTEM_SHARED_BYTES
        threads = _THREADS_PER_SM.get(device["compute_capability"], _DEFAULT_THREADS_PER_SM)
        by_shared = shared // (plan["shared_bytes"] + _SYSTEM_SHARED_BYTES)
        by_threads = threads // max(math.prod(plan["block"]), 1)
        resident = max(1, int(min(by_shared, by_threads)))
    return {"blocks": blocks, "units": units, "resident": resident} | {
        "waves": blocks / (units * resident)
    }


def _rejected(plan: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [line for line in plan["rejected"].splitlines() if line]
    return [(family, reason.strip()) for family, _, reason in (li.partition(":") for li in lines)]


def launch_words(launch: dict[str, Any], gpu: bool) -> str:
    """A kernel's launch, in one line."""
    if not gpu:
        return f"{launch['grid'][0]} tiles over {launch['block'][0]} threads"
    parts = [f"grid {_extent(launch['grid'])}", f"block {_extent(launch['block'])}"]
    parts.append(f"{launch['shared_bytes']} bytes shared")
    if launch["cluster"] > 1:
        parts.append(f"clusters of {launch['cluster']}")
    if launch["stages"]:
        parts.append(f"{launch['stages']} stages")
    return ", ".join(parts)


def work_rows(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """Workspace, work and time of a whole call."""
    rows = [("workspace", f"{plan['workspace_bytes']} bytes")]
    if plan["flops"]:
        rows.append(("work", f"{plan['flops'] / 1e9:.4g} GFLOP in the products"))
    rows.append(("traffic", f"{plan['bytes'] / 1e6:.4g} MB, every tensor once"))
    if plan["microseconds"]:
        rows.append(("estimate", f"{plan['microseconds']:.1f} us, by which families are chosen"))
    return rows


def _extent(values: list[int]) -> str:
    return " x ".join(str(v) for v in values)


def _print(document: dict[str, Any], shape: Shape, output: Output) -> None:
    plan, device, fill = document["plan"], document["device"], document["occupancy"]
    gpu = device["compute_capability"] != 0
    way = "backward of " if isinstance(shape, BackwardShape) else ""
    output.heading(f"{way}{shape} on {device['device']} ({device['name']})")
    waves = f"{fill['waves']:.2f} ({fill['blocks']} {'blocks' if gpu else 'tiles'} over "
    waves += f"{fill['units']} {'SMs' if gpu else 'threads'}"
    waves += f", at most {fill['resident']} at a time on each)" if gpu else ")"
    rows = [
        ("kernel", plan["kernel"]),
        ("family", f"{plan['family']} ({plan['isa']})"),
        ("tile", f"{plan['tile_q']} queries x {plan['tile_k']} keys, {plan['stages']} stages"),
        ("compiled for", f"dim {plan['dim']}, dim_v {plan['dim_v']}"),
        ("grid", _extent(plan["grid"])),
        ("block" if gpu else "threads", _extent(plan["block"]) if gpu else str(plan["block"][0])),
    ]
    if gpu:
        if plan["cluster"] > 1:
            rows.append(("cluster", f"{plan['cluster']} blocks share the keys of a tile"))
        rows.append(("shared memory", f"{plan['shared_bytes']} bytes a block"))
    rows.append(("waves", waves))
    main = [launch["kernel"] for launch in plan["launches"]].index(plan["kernel"])
    for i, launch in enumerate(plan["launches"]):
        if i != main:
            line = f"{launch['kernel']}, {launch_words(launch, gpu)}"
            rows.append(("before" if i < main else "then", line))
    output.pairs(rows + work_rows(plan))
    output.heading("Not used")
    output.pairs(_rejected(plan) or [("none", "every other family is absent from this build")])


def run(arguments: argparse.Namespace) -> int:
    flashmoe = environment.package()
    device = chosen_device(flashmoe, arguments)
    dtype = "fp32" if device == "cpu" else "bf16"
    shape = of_pass(shape_from_options(arguments, dtype), arguments)
    fields = environment.plan_as_dict(
        plan_for(flashmoe, shape, device, arguments.layout, arguments.kernel)
    )
    described = {"device": device, **environment.as_dict(flashmoe.device_info(device))}
    document = {
        "shape": vars(shape),
        "device": described,
        "plan": fields,
        "occupancy": occupancy(fields, described),
    }
    if arguments.json != "-":
        _print(document, shape, Output())
    if arguments.json is not None:
        write_json(document, arguments.json)
    return EXIT_OK
