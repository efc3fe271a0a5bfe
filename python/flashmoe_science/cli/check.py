"""`flashmoe check`: seven checks that tell, in seconds, whether this installation works."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from flashmoe_science.cli import environment
from flashmoe_science.cli.arrays import Arrays, choose_arrays, normal_device, usable_device
from flashmoe_science.cli.check_experts import check_experts
from flashmoe_science.cli.gradient_reference import judge_gradients
from flashmoe_science.cli.measure import (
    OURS,
    OurCall,
    call_ours,
    launch_mismatch,
    make_inputs,
    measure,
)
from flashmoe_science.cli.measure_backward import OurCall as OurBackward
from flashmoe_science.cli.measure_backward import call_ours as call_backward
from flashmoe_science.cli.measure_backward import make_backward_inputs
from flashmoe_science.cli.output import (
    EXIT_FAILED,
    EXIT_OK,
    Output,
    add_json_option,
    write_json,
)
from flashmoe_science.cli.peers import torch_sdpa
from flashmoe_science.cli.peers.peer import BackwardInputs, Inputs, Missing, Peer
from flashmoe_science.cli.reference import Accuracy, judge
from flashmoe_science.cli.shapes import BackwardShape, Shape
from flashmoe_science.cli.timing import Sampling

_DESCRIPTION = """\
Checks this installation, on the GPU if there is one that it can use, else on the CPU backend:

  build        the library loads, its version is the package's, and it holds code for every GPU here
  import       the package imports in a fresh interpreter, without a framework
  launch       the kernels that were launched, read back, are those that were planned
  correctness  attention: random inputs into poisoned outputs, against float64 mathematics in NumPy
  gradients    the same of attention's backward, where a kernel family computes it
  experts      the same of the mixture of experts, by every kernel family that computes it here
  speed        median time of one shape, beside torch's where torch is installed; it reports, and
               fails only when the row is void

Exits with 0 when all seven pass. Takes less than 30 seconds.
"""

_LAUNCH_SHAPE = Shape(1, 256, 256, 8, 2, 64, 64, causal="bottom_right")
_SPEED_SHAPES = {
    "cpu": Shape(1, 1024, 1024, 8, 8, 64, 64, causal="bottom_right"),
    "cuda": Shape(4, 4096, 4096, 16, 16, 128, 128, causal="bottom_right"),
}

# Odd lengths, grouped heads, every mask with seq_q != seq_k, rows that see no key, the smallest and
# largest head dimensions, a different value dimension, windows, and a softcap that bends.
_CORRECTNESS_SHAPES = (
    Shape(2, 65, 65, 3, 3, 64, 64),
    Shape(1, 200, 333, 4, 2, 128, 128, causal="bottom_right"),
    Shape(1, 333, 200, 4, 4, 64, 64, causal="bottom_right"),
    Shape(1, 130, 257, 4, 1, 96, 96, causal="top_left"),
    Shape(1, 1, 1000, 8, 2, 128, 128, causal="bottom_right"),
    Shape(3, 17, 64, 2, 1, 8, 8),
    Shape(1, 129, 129, 2, 2, 192, 128, causal="bottom_right"),
    Shape(1, 100, 300, 2, 1, 256, 256),
    Shape(1, 300, 300, 2, 1, 64, 64, causal="bottom_right", window_left=70),
    Shape(1, 200, 333, 2, 2, 128, 128, window_left=40, window_right=90, softcap=2.0),
)

# Smaller ones, since a float64 backward in NumPy takes longer.
_GRADIENT_SHAPES = (
    Shape(2, 65, 65, 3, 3, 64, 64),
    Shape(1, 70, 133, 4, 2, 128, 128, causal="bottom_right"),
    Shape(1, 133, 70, 2, 2, 64, 64, causal="bottom_right"),
    Shape(1, 60, 97, 4, 1, 96, 96, causal="top_left"),
    Shape(1, 65, 65, 2, 2, 192, 128, causal="bottom_right", window_left=30),
    Shape(1, 50, 99, 2, 1, 256, 256, window_left=40, window_right=20, softcap=2.0),
)


@dataclasses.dataclass
class Result:
    """What one check found."""

    name: str
    passed: bool
    text: str
    seconds: float = 0.0
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "check",
        help="does this installation work: build, import, launch, correctness, gradients, "
        "experts, speed",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", metavar="NAME", help="check this one: cpu or cuda:N")
    parser.add_argument("--kernel", metavar="FAMILY", help="check this kernel family")
    add_json_option(parser)
    parser.set_defaults(run=run)


class Checks:
    """The seven checks, on one device."""

    def __init__(self, device: str | None, kernel: str | None) -> None:
        self._wanted = device
        self._kernel = kernel
        self._seen: tuple[Any, Arrays] | None = None
        self.sentence = ""

    def _prepare(self) -> tuple[Any, Arrays]:
        """Prepares the package and arrays on the device; raises errors in either."""
        if self._seen is None:
            flashmoe = environment.package()
            device, self.sentence = usable_device(flashmoe)
            if self._wanted is not None:
                device = normal_device(self._wanted)
                self.sentence = f"Running on {device}, as asked."
            self._seen = flashmoe, choose_arrays(device)
        return self._seen

    def build(self) -> Result:
        library = environment.build_info()
        package = environment.package_version()
        families = environment.words(library["kernel_families"])
        details: dict[str, Any] = {"library": library, "package": package}
        if library["version"] != package:
            text = f"the library is {library['version']}, the package {package}"
            return Result("build", False, text, details=details)
        devices = environment.devices()
        details["devices"] = devices
        unserved = [d for d in devices if not d.get("kernel_family")]
        if unserved:
            listed = "; ".join(f"{d['device']} ({d.get('isa') or d['error']})" for d in unserved)
            built = library["cuda_architectures"] or "none"
            text = f"no kernel runs on {listed}; CUDA architectures built in: {built}"
            return Result("build", False, text, details=details)
        text = f"libflashmoe {library['version']}, kernels: {', '.join(families)}"
        gpus = environment.guarded(environment.nvidia_smi)
        if gpus and isinstance(gpus, list) and not library["cuda_architectures"]:
            text += f"; {gpus[0].get('name', 'a GPU')} is not used: this is a CPU-only build"
        return Result("build", True, text, details=details)

    def imports(self) -> Result:
        program = (
            "import json, sys, time; begin = time.perf_counter(); import flashmoe_science as f; "
            "f.build_info(); seconds = time.perf_counter() - begin; "
            "heavy = [m for m in ('torch', 'jax', 'cupy') if m in sys.modules]; "
            "print(json.dumps({'seconds': seconds, 'heavy': heavy}))"
        )
        fresh = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
        )
        if fresh.returncode != 0:
            last = (fresh.stderr.strip().splitlines() or ["no message"])[-1]
            return Result("import", False, f"import flashmoe_science fails: {last}")
        found = json.loads(fresh.stdout)
        if found["heavy"]:
            text = f"importing the package also imports {', '.join(found['heavy'])}"
            return Result("import", False, text, details=found)
        text = f"{found['seconds'] * 1e3:.0f} ms in a fresh interpreter, no framework imported"
        return Result("import", True, text, details=found)

    def launch(self) -> Result:
        flashmoe, arrays = self._prepare()
        shape = dataclasses.replace(_LAUNCH_SHAPE, dtype=arrays.dtypes[-1])
        ours = call_ours(flashmoe, arrays, shape, make_inputs(arrays, shape), self._kernel)
        details = {"plan": ours.plan, "launches": ours.launches}
        mismatch = launch_mismatch(ours.plan, ours.launches)
        if mismatch:
            return Result("launch", False, f"not as planned: {mismatch}", details=details)
        for launch in ours.launches:
            if launch["local_bytes"]:
                text = f"{launch['kernel']} uses {launch['local_bytes']} bytes of local memory"
                return Result("launch", False, text, details=details)
        kernels = ", ".join(launch["kernel"] for launch in ours.launches)
        return Result("launch", True, f"{kernels}, as planned", details=details)

    def correctness(self) -> Result:
        flashmoe, arrays = self._prepare()
        rows: list[dict[str, Any]] = []
        failed = []
        for dtype in arrays.dtypes:
            for base in _CORRECTNESS_SHAPES:
                shape = dataclasses.replace(base, dtype=dtype)
                inputs = make_inputs(arrays, shape, seed=len(rows))
                ours = call_ours(flashmoe, arrays, shape, inputs, self._kernel)
                verdict = _judge_on_host(arrays, shape, inputs, ours)
                rows.append({"shape": vars(shape)} | dataclasses.asdict(verdict))
                if not verdict.passed:
                    failed.append(f"{shape}: {verdict.reason}")
        if failed:
            text = f"{len(failed)} of {len(rows)} cases are wrong; first {failed[0]}"
            return Result("correctness", False, text, details={"cases": rows})
        margin = max(r["error"] / r["bound"] for r in rows)
        text = f"{len(rows)} cases in {', '.join(arrays.dtypes)} against float64; the largest error"
        text += f" is {margin:.2f} of what is allowed"
        return Result("correctness", True, text, details={"cases": rows})

    def gradients(self) -> Result:
        flashmoe, arrays = self._prepare()
        rows: list[dict[str, Any]] = []
        failed, families, refused = [], set(), []
        for dtype in arrays.dtypes:
            for base in _GRADIENT_SHAPES:
                shape = BackwardShape(**(vars(base) | {"dtype": dtype}))
                inputs = make_backward_inputs(arrays, shape, seed=len(rows))
                try:
                    ours = call_backward(flashmoe, arrays, shape, inputs, self._kernel)
                except flashmoe.UnsupportedError as error:
                    # A shape that this version does not compute is no fault of the installation.
                    refused.append(f"{shape}: {error}")
                    continue
                verdict = _judge_gradients_on_host(arrays, shape, inputs, ours)
                reason = launch_mismatch(ours.plan, ours.launches) or verdict.reason
                rows.append({"shape": vars(shape)} | dataclasses.asdict(verdict))
                families.add(ours.plan["family"])
                if reason:
                    failed.append(f"{shape}: {reason}")
        details = {"cases": rows, "refused": refused}
        if not rows:
            return Result("gradients", True, f"none: {refused[0]}", details=details)
        if failed:
            text = f"{len(failed)} of {len(rows)} cases are wrong; first {failed[0]}"
            return Result("gradients", False, text, details=details)
        margin = max(r["error"] / r["bound"] for r in rows)
        text = f"{len(rows)} cases by {', '.join(sorted(families))} against float64; the largest "
        text += f"error is {margin:.2f} of what is allowed"
        if refused:
            text += f"; {len(refused)} have no kernel here, first {refused[0]}"
        return Result("gradients", True, text, details=details)

    def experts(self) -> Result:
        flashmoe, arrays = self._prepare()
        found = check_experts(flashmoe, arrays, self._kernel)
        details = {"cases": [dataclasses.asdict(c) for c in found.cases], "refused": found.refused}
        if not found.cases:
            why = "; ".join(dict.fromkeys(found.refused.values()))
            # Asking for a family that computes only attention is no fault.
            return Result("experts", self._kernel is not None, f"none: {why}", details=details)
        if found.failed:
            first = found.failed[0]
            text = f"{len(found.failed)} of {len(found.cases)} cases are wrong; first "
            text += f"{first.shape}, {first.layout}, by {first.family}: {first.reason}"
            return Result("experts", False, text, details=details)
        text = f"{len(found.cases)} cases by {', '.join(found.families)} against float64; the "
        text += f"largest error is {found.margin:.2f} of what is allowed"
        return Result("experts", True, text, details=details)

    def speed(self) -> Result:
        flashmoe, arrays = self._prepare()
        kind = "cpu" if arrays.device == "cpu" else "cuda"
        dtype = arrays.dtypes[0] if kind == "cpu" else arrays.dtypes[-1]
        shape = dataclasses.replace(_SPEED_SHAPES[kind], dtype=dtype)
        if arrays.name == "cupy":
            return Result("speed", True, "not timed: timing on a GPU needs torch with CUDA")
        if kind == "cpu" and arrays.name == "torch":
            flashmoe.set_num_threads(arrays.xp.get_num_threads())
        beside: list[Peer | Missing] = [
            p
            for p in torch_sdpa.PEERS
            if kind in p.devices and not p.missing() and p.name != "torch-math"
        ]
        sampling = Sampling(seconds=0.5)
        cell = measure(flashmoe, arrays, shape, beside, sampling, self._kernel)
        if cell["status"] != "ok":
            return Result("speed", False, f"void: {cell['reason']}", details=cell)
        timed = cell["contenders"]
        ours = timed[OURS]
        text = f"{shape}: {ours['median_s'] * 1e3:.3f} ms, "
        text += f"{ours['tflops'] * 1e3:.0f} GFLOP/s" if kind == "cpu" else (
            f"{ours['tflops']:.0f} TFLOP/s"
        )  # fmt: skip
        for name, entry in timed.items():
            if "against" in entry:
                a = entry["against"]
                text += f"; {a['ratio']:.2f} [{a['low']:.2f}, {a['high']:.2f}] times {name}'s speed"
        return Result("speed", True, text, details=cell)

    def all(self) -> list[tuple[str, Callable[[], Result]]]:
        return [
            ("build", self.build),
            ("import", self.imports),
            ("launch", self.launch),
            ("correctness", self.correctness),
            ("gradients", self.gradients),
            ("experts", self.experts),
            ("speed", self.speed),
        ]


def _judge_on_host(arrays: Arrays, shape: Shape, inputs: Inputs, ours: OurCall) -> Accuracy:
    """Judges with NumPy, whatever the arrays, so that the verdict does not depend on the library
    that made them."""
    q, k, v = (arrays.to_host(x) for x in inputs)
    outputs = {OURS: arrays.to_host(ours.out)}
    return judge(Arrays(), shape, (q, k, v), outputs, arrays.to_host(ours.lse))[OURS]


def _judge_gradients_on_host(
    arrays: Arrays, shape: BackwardShape, inputs: BackwardInputs, ours: OurBackward
) -> Accuracy:
    q, k, v, dout = (arrays.to_host(x) for x in inputs)
    dq, dk, dv = (arrays.to_host(x) for x in ours.out)
    return judge_gradients(Arrays(), shape, (q, k, v, dout), {OURS: (dq, dk, dv)})[OURS]


def _guarded(name: str, check: Callable[[], Result]) -> Result:
    """A check that raises fails and reports the exception."""
    begin = time.monotonic()
    answer = environment.guarded(check)
    if not isinstance(answer, Result):
        answer = Result(name, False, answer["error"])
    answer.seconds = round(time.monotonic() - begin, 2)
    return answer


def run(arguments: argparse.Namespace) -> int:
    checks = Checks(arguments.device, arguments.kernel)
    output = Output(silent=arguments.json == "-")
    results = []
    said = False
    for name, check in checks.all():
        result = _guarded(name, check)
        results.append(result)
        if checks.sentence and not said:
            output.line(checks.sentence)
            said = True
        output.verdict(result.passed, name, f"{result.text} ({result.seconds:.1f} s)")
    passed = all(r.passed for r in results)
    output.line("All seven checks passed." if passed else "This installation does not work.")
    if arguments.json is not None:
        document = {
            "passed": passed,
            "sentence": checks.sentence,
            "checks": [dataclasses.asdict(r) for r in results],
            "environment": environment.for_record(),
        }
        write_json(document, arguments.json)
    return EXIT_OK if passed else EXIT_FAILED
