"""What a failed test's line says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from 3.11 on")
def test_a_failure_says_what_it_came_from(request: pytest.FixtureRequest) -> None:
    def fail() -> None:
        try:
            try:
                raise KeyError("the first")
            except KeyError as error:
                raise RuntimeError("the second") from error
        except RuntimeError as error:
            raise ModuleNotFoundError("what is seen") from error

    path = str(Path(__file__).with_name("conftest.py"))
    plugins = request.config.pluginmanager.get_plugins()
    (shared,) = (plugin for plugin in plugins if getattr(plugin, "__file__", None) == path)
    call = pytest.CallInfo.from_call(fail, "call")
    shared.pytest_name_causes(call)
    assert call.excinfo is not None
    assert call.excinfo.exconly().splitlines() == [
        "ModuleNotFoundError: what is seen",
        "from RuntimeError: the second",
        "from KeyError: 'the first'",
    ]
