"""`flashmoe check`: passes here, and each check fails for its own reason."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import time
from typing import Any

import flashmoe_science
import pytest
from flashmoe_science.cli import check, check_experts, environment, main

NAMES = ["build", "import", "launch", "correctness", "gradients", "experts", "speed"]


def run_check(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["check", "--device", "cpu", "--json"])
    document = json.loads(capsys.readouterr().out)
    return code, document | {"by_name": {c["name"]: c for c in document["checks"]}}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases are enough where a failure is what is tested."""
    monkeypatch.setattr(check, "_CORRECTNESS_SHAPES", check._CORRECTNESS_SHAPES[:2])
    monkeypatch.setattr(check, "_GRADIENT_SHAPES", check._GRADIENT_SHAPES[:2])
    monkeypatch.setattr(check_experts, "SHAPES", check_experts.SHAPES[:2])
    monkeypatch.setattr(
        check, "_SPEED_SHAPES", {"cpu": dataclasses.replace(check._LAUNCH_SHAPE, dtype="fp32")}
    )


def test_seven_checks_pass_in_thirty_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    code, document = run_check(capsys)
    assert time.monotonic() - begin < 30
    assert [c["name"] for c in document["checks"]] == NAMES
    assert [c["text"] for c in document["checks"] if not c["passed"]] == []
    assert code == 0
    assert document["passed"] is True


@pytest.mark.usefixtures("small")
def test_people_read_a_line_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    printed = capsys.readouterr().out
    for name in NAMES:
        assert f"ok    {name}" in printed
    if flashmoe_science.cuda_device_count() == 0:
        assert "running on the CPU backend." in printed
    assert printed.endswith("All seven checks passed.\n")


@pytest.mark.usefixtures("small")
def test_wrong_values_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = flashmoe_science.flash_attention

    def wrong(*arguments: Any, **options: Any) -> Any:
        out, lse = real(*arguments, **options)
        out[0, 0, 0, 0] += 0.25
        return out, lse

    monkeypatch.setattr(flashmoe_science, "flash_attention", wrong)
    code, document = run_check(capsys)
    assert code == 1
    assert document["by_name"]["launch"]["passed"]
    assert not document["by_name"]["correctness"]["passed"]
    assert "max|out - float64|" in document["by_name"]["correctness"]["text"]
    assert document["by_name"]["speed"]["text"].startswith("void: max|out - float64|")
    assert "contenders" not in document["by_name"]["speed"]["details"]


def test_gradients_are_checked_in_every_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = run_check(capsys)
    gradients = document["by_name"]["gradients"]
    assert " by cpu against float64; the largest error is " in gradients["text"]
    cases = gradients["details"]["cases"]
    assert {"fp32", "fp16"} <= {c["shape"]["dtype"] for c in cases}
    assert {c["tensor"] for c in cases} <= {"dq", "dk", "dv"}
    assert all(0 < c["error"] <= c["bound"] for c in cases)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("wrong", "sentence"), [(0.25, "max|dk - float64|"), (float("nan"), "dk holds NaN")]
)
def test_a_wrong_gradient_fails(
    wrong: float, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = flashmoe_science.flash_attention_backward

    def broken(*arguments: Any, **options: Any) -> Any:
        answer = real(*arguments, **options)
        options["dk"][-1, -1, -1, -1] += wrong
        return answer

    monkeypatch.setattr(flashmoe_science, "flash_attention_backward", broken)
    code, document = run_check(capsys)
    assert code == 1
    assert [c["name"] for c in document["checks"] if not c["passed"]] == ["gradients"]
    assert sentence in document["by_name"]["gradients"]["text"]


@pytest.mark.usefixtures("small")
def test_gradients_that_no_family_computes_are_no_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose families compute the forward alone."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise flashmoe_science.UnsupportedError("device: no family computes gradients on cuda:0")

    monkeypatch.setattr(flashmoe_science, "attention_backward_plan", refuse)
    code, document = run_check(capsys)
    assert code == 0
    text = "none: device: no family computes gradients on cuda:0"
    assert document["by_name"]["gradients"]["text"] == text


def test_experts_are_checked_in_every_layout_and_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = run_check(capsys)
    cases = document["by_name"]["experts"]["details"]["cases"]
    assert {c["layout"] for c in cases} == {
        "gate_up", "up_gate", "interleaved", "separate", "transposed"
    }  # fmt: skip
    assert {"fp32", "fp16"} <= {c["shape"]["dtype"] for c in cases}
    assert {c["kernel"] for c in cases} == {"", "cpu"}
    assert all(0 < c["error"] <= c["bound"] for c in cases)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("wrong", "sentence"), [(0.25, "max|out - float64|"), (float("nan"), "never written")]
)
def test_a_wrong_layer_fails(
    wrong: float, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = flashmoe_science.moe_forward

    def broken(*arguments: Any, **options: Any) -> Any:
        out = real(*arguments, **options)
        out[-1, -1] += wrong
        return out

    monkeypatch.setattr(flashmoe_science, "moe_forward", broken)
    code, document = run_check(capsys)
    assert code == 1
    assert [c["name"] for c in document["checks"] if not c["passed"]] == ["experts"]
    assert sentence in document["by_name"]["experts"]["text"]


@pytest.mark.usefixtures("small")
def test_a_wrong_routing_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = flashmoe_science.moe_route

    def broken(*arguments: Any, **options: Any) -> Any:
        routing = real(*arguments, **options)
        routing.weights[0, 0] *= 1.01
        return routing

    monkeypatch.setattr(flashmoe_science, "moe_route", broken)
    code, document = run_check(capsys)
    assert code == 1
    assert "routing: max|weight - float64|" in document["by_name"]["experts"]["text"]


@pytest.mark.usefixtures("small")
def test_an_output_that_is_not_written_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = flashmoe_science.flash_attention

    def forgetful(*arguments: Any, **options: Any) -> Any:
        out, lse = real(*arguments, **options)
        out[-1, -1, -1, -1] = float("nan")
        return out, lse

    monkeypatch.setattr(flashmoe_science, "flash_attention", forgetful)
    code, document = run_check(capsys)
    assert code == 1
    assert "never written" in document["by_name"]["correctness"]["text"]


@pytest.mark.usefixtures("small")
def test_a_wrong_lse_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = flashmoe_science.flash_attention

    def wrong(*arguments: Any, **options: Any) -> Any:
        out, lse = real(*arguments, **options)
        lse[0, 0, 0] += 0.01
        return out, lse

    monkeypatch.setattr(flashmoe_science, "flash_attention", wrong)
    code, document = run_check(capsys)
    assert code == 1
    assert "max|lse - float64|" in document["by_name"]["correctness"]["text"]


@pytest.mark.usefixtures("small")
def test_another_kernel_than_planned_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = flashmoe_science.last_launches
    monkeypatch.setattr(
        flashmoe_science,
        "last_launches",
        lambda: tuple(
            dataclasses.replace(launch, kernel="attention_forward_of_another") for launch in real()
        ),
    )
    code, document = run_check(capsys)
    assert code == 1
    assert "launched attention_forward_of_another" in document["by_name"]["launch"]["text"]
    assert "launched attention_forward_of_another" in document["by_name"]["experts"]["text"]
    assert "launched attention_forward_of_another" in document["by_name"]["gradients"]["text"]
    assert "not the planned one" in document["by_name"]["speed"]["text"]


@pytest.mark.usefixtures("small")
def test_another_kernel_of_a_family_that_is_named_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best kernel, which users get, is right."""
    real_call, real_launches = flashmoe_science.moe_forward, flashmoe_science.last_launches
    named: list[str | None] = [None]

    def call(*arguments: Any, **options: Any) -> Any:
        named[0] = options.get("kernel")
        return real_call(*arguments, **options)

    def launches() -> Any:
        first, *others = real_launches()
        return (
            dataclasses.replace(first, **({"kernel": "another"} if named[0] else {})),
            *others,
        )

    monkeypatch.setattr(flashmoe_science, "moe_forward", call)
    monkeypatch.setattr(flashmoe_science, "last_launches", launches)
    code, document = run_check(capsys)
    assert code == 1
    assert "launched another" in document["by_name"]["experts"]["text"]


@pytest.mark.usefixtures("small")
def test_a_version_that_differs_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "package_version", lambda: "9.9.9")
    code, document = run_check(capsys)
    assert code == 1
    assert document["by_name"]["build"]["text"].endswith("the package 9.9.9")


@pytest.mark.usefixtures("small")
def test_a_device_without_a_kernel_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = {"device": "cuda:0", "isa": "sm_75", "kernel_family": ""}
    monkeypatch.setattr(environment, "devices", lambda: [gpu])
    code, document = run_check(capsys)
    assert code == 1
    assert "no kernel runs on cuda:0 (sm_75)" in document["by_name"]["build"]["text"]


@pytest.mark.usefixtures("small")
def test_a_call_that_raises_fails_every_check_that_makes_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: Any, **__: Any) -> Any:
        raise flashmoe_science.FlashMoEError("q: got nonsense")

    monkeypatch.setattr(flashmoe_science, "flash_attention", raises)
    code, document = run_check(capsys)
    assert code == 1
    passed = {name: c["passed"] for name, c in document["by_name"].items()}
    assert passed == dict(zip(NAMES, [True, True, False, False, False, True, False], strict=True))
    assert "q: got nonsense" in document["by_name"]["launch"]["text"]


@pytest.mark.gpu
def test_passes_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    assert main(["check", "--device", "cuda:0", "--json"]) == 0
    assert time.monotonic() - begin < 30
    document = json.loads(capsys.readouterr().out)
    for launch in document["checks"][2]["details"]["launches"]:
        assert "cpu" not in launch["kernel"]
    cases = document["checks"][5]["details"]["cases"]
    named = {c["kernel"] for c in cases} - {""}
    assert {"sm89_few_tokens", "sm89"} <= named | set(document["checks"][5]["details"]["refused"])
    assert named
    assert all(c["family"] == c["kernel"] for c in cases if c["kernel"])
    assert "cpu" not in {c["family"] for c in cases}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("without", [["torch"], ["torch", "ml_dtypes"]])
def test_numpy_alone_is_enough(
    without: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in without else real(name, *a)
    )
    code, document = run_check(capsys)
    assert code == 0
    dtypes = {c["shape"]["dtype"] for c in document["by_name"]["correctness"]["details"]["cases"]}
    assert dtypes == {"fp32", "fp16"} | (set() if "ml_dtypes" in without else {"bf16"})
    assert list(document["by_name"]["speed"]["details"]["contenders"]) == ["flashmoe"]
