"""torch.compile knows the functions of flashmoe_science, in whatever order both are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch", minversion="2.6")

_BEFORE = {
    "first": "import flashmoe_science as fm",
    "after-torch": "import torch; import flashmoe_science as fm",
    "after-the-compiler": "import torch._dynamo; import flashmoe_science as fm",
    "before-the-compiler": "import flashmoe_science as fm; import torch._dynamo",
    "by-a-module-of-ours": "import flashmoe_science._warn_once; import flashmoe_science as fm",
    "by-our-torch": "import flashmoe_science.torch.sdpa; import flashmoe_science as fm",
    "by-name": "from flashmoe_science.moe import fused_moe; import flashmoe_science as fm",
}

_COMPILE = """
import torch

q = torch.randn(1, 8, 2, 16)
tokens, router = torch.randn(6, 16), torch.randn(8, 16)
w_up, w_down = torch.randn(8, 32, 16), torch.randn(8, 16, 16)

def attend(q):
    return fm.flash_attention(q, q, q, causal=True) + fm.flash_attention_forward(q, q, q)

def route(tokens):
    routing = fm.moe_route(tokens @ router.T, 2)
    return routing.offsets, fm.moe_route_given(routing.ids, routing.weights, num_experts=8).weights

def layer(tokens):
    routing = fm.moe_route(tokens @ router.T, 2)
    product = fm.grouped_product(tokens, w_up, offsets=routing.offsets)[:0]
    return product, fm.moe_forward(tokens, w_up, w_down, routing)

def fused(tokens):
    return fm.fused_moe(tokens, router, w_up, w_down, 2)

for function, x in (attend, q), (route, tokens), (layer, tokens), (fused, tokens):
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), function(x))
"""

# Another thread imports meanwhile, so that whoever goes over sys.modules fails.
_WHILE_OTHERS_IMPORT = """
import sys, threading
import torch
import flashmoe_science as fm

q = torch.randn(1, 8, 2, 16)
compiled = torch.compile(
    lambda q: fm.flash_attention(q, q, q), fullgraph=True, backend="aot_eager"
)
done = threading.Event()

def add():
    names = [f"made_up_{i}" for i in range(64)]
    while not done.is_set():
        sys.modules.update(dict.fromkeys(names, sys))
        for name in names:
            del sys.modules[name]

sys.setswitchinterval(1e-5)
thread = threading.Thread(target=add)
thread.start()
try:
    torch.testing.assert_close(compiled(q), fm.flash_attention(q, q, q))
finally:
    done.set()
    thread.join()
"""

_INSIDE = """
import torch

@torch.compile(fullgraph=True, backend="aot_eager")
def attend(q):
    import flashmoe_science as fm
    return fm.flash_attention(q, q, q)

q = torch.randn(1, 8, 2, 16)
out = attend(q)
import flashmoe_science as fm
torch.testing.assert_close(out, fm.flash_attention(q, q, q))
"""

_UNUSED = """
import sys
finders = list(sys.meta_path)
import flashmoe_science as fm
import torch, torch._dynamo
q = torch.randn(1, 8, 2, 16)
fm.flash_attention(q, q, q)
assert "flashmoe_science.torch" not in sys.modules
assert sys.meta_path == finders
torch.compile(fm.flash_attention, fullgraph=True, backend="eager")(q, q, q)
assert "flashmoe_science.torch" in sys.modules
"""


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("before", _BEFORE)
def test_the_package_alone_compiles(before: str) -> None:
    run(_BEFORE[before] + "\n" + _COMPILE)


def test_the_package_alone_compiles_where_a_graph_imports_it() -> None:
    run(_INSIDE)


def test_the_operators_are_imported_by_the_first_graph() -> None:
    run(_UNUSED)


def test_a_graph_is_made_while_another_thread_imports() -> None:
    run(_WHILE_OTHERS_IMPORT)
