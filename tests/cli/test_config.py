"""`flashmoe config`: every answer is a path that is there, or a flag made of one."""

from __future__ import annotations

import json
from pathlib import Path

import flashmoe_science
import pytest
from flashmoe_science.cli import config, environment, main


@pytest.fixture(autouse=True)
def _installed() -> None:
    if not any(d.glob("lib/libflashmoe.so*") for d in environment.package_directories()):
        pytest.skip("the library is not inside the package here")


def test_json_has_every_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert answers["version"] == flashmoe_science.__version__
    assert (Path(answers["includedir"]) / "flashmoe" / "flashmoe.h").is_file()
    assert (Path(answers["cmakedir"]) / "flashmoe-config.cmake").is_file()
    library = next(f[3:] for f in answers["libs"].split() if f.startswith("-l:"))
    assert (Path(answers["libdir"]) / library).is_file()
    assert answers["cflags"] == f"-I{answers['includedir']}"


def test_asked_answers_come_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--libs", "--cflags"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:2] for line in lines] == ["-I", "-L"]


def test_a_missing_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "package_directories", lambda: [tmp_path])
    assert main(["config", "--cflags"]) == 1
    assert f"include/flashmoe/flashmoe.h in {tmp_path}" in capsys.readouterr().err


def test_a_header_without_a_version_is_refused(tmp_path: Path) -> None:
    header = tmp_path / "flashmoe.h"
    header.write_text("#define FLASHMOE_VERSION_MAJOR 0\n")
    with pytest.raises(config.CommandError, match="states no FLASHMOE_VERSION"):
        config.header_version(header)
