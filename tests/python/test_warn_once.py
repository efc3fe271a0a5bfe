"""What is said once: by any thread, and by calls that are traced."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from flashmoe_science import _warn_once  # noqa: E402

NAME = "flashmoe_science.test"


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    _warn_once.forget()
    with caplog.at_level(logging.WARNING, NAME):
        yield lambda: [r.getMessage() for r in caplog.records if r.name == NAME]
    _warn_once.forget()


def test_a_sentence_is_said_once_by_each_logger(
    heard: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        _warn_once.warn_once(NAME, "100 %s")
        _warn_once.warn_once(NAME + ".other", "100 %s")
        _warn_once.warn_once(NAME, "another")
    assert heard() == ["100 %s", "another"]
    assert len(caplog.records) == 3
    _warn_once.forget()
    _warn_once.warn_once(NAME, "another")
    assert heard() == ["100 %s", "another", "another"]


def test_threads_that_meet_say_it_once(heard: Callable[[], list[str]]) -> None:
    together = threading.Barrier(8)

    def say() -> None:
        for i in range(200):
            together.wait()
            _warn_once.warn_once(NAME, str(i))

    threads = [threading.Thread(target=say) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard() == [str(i) for i in range(200)]


def program(x: Any) -> Any:
    if x.shape[-1] % 8:
        _warn_once.warn_once(NAME, f"x: its head dimension is {x.shape[-1]}")
    return x.sin()


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_graph_says_it_while_it_is_compiled_and_stays_whole(
    dynamic: bool | None, heard: Callable[[], list[str]]
) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op[:4] == "call"])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, dynamic=dynamic, backend=backend)
    for length in (3, 5, 7, 30):
        x = torch.ones(length, 12)
        assert torch.equal(compiled(x), x.sin())
    assert len(graphs) == (1 if dynamic else 2)
    assert all(len(calls) == 1 for calls in graphs)
    assert heard() == ["x: its head dimension is 12"]
    program(torch.ones(3, 12))
    assert heard() == ["x: its head dimension is 12"]


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_says_it_once(strict: bool, heard: Callable[[], list[str]]) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return program(x)

    exported = torch.export.export(Module(), (torch.ones(3, 12),), strict=strict)
    for _ in range(2):
        exported.module()(torch.ones(3, 12))
    assert heard() == ["x: its head dimension is 12"]
