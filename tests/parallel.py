"""Which tests pytest-xdist gives to one process: those that share what takes long to make.

    python -m pytest -n auto

By the tests' ids, since that is what the process knows that gives them out. (The marker xdist_group
changes ids, which newer versions of pytest do not let it do.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

ISAS = ("scalar", "avx2", "avx512", "avx512bf16", "amx")  # instruction sets of the CPU kernels

_JAX = (
    *("jax_moe_gradients", "jax_dot_product_attention", "jax_gradients", "jax_ragged_dot"),
    *("jax_moe", "jax_masks", "jax", "jax_lowering"),
)

# Those that take longest first, so that none is left when all others are done.
_SHARING = (
    ("the sanitized build", r"tests/packaging/test_sanitizers\.py::\w*(sanitized|fuzz)"),
    ("the library's machine code", r"tests/cuda/test_sass"),
    ("the installation", r"tests/packaging/test_(consumers|library|pages|sanitizers)\.py"),
    ("the source distribution", r"tests/packaging/test_sdist\.py"),
    ("mypy's cache", r"tests/python/test_stub\.py"),
    ("the site", r"tests/docs/test_site\.py"),
    ("programs on a made-up CUDA", r"tests/cuda/test_(launch|moe_plans)\.py"),
    ("JAX's programs for the GPU", r"tests/gpu/test_jax_attention\.py"),
    ("an encoder", r"tests/examples/test_sentence_embeddings\.py"),
    # Most of whose time is XLA's, which compiles an operation once a process.
    *((f"JAX's programs of {name}", rf"tests/python/test_{name}\.py") for name in _JAX),
)
_PATTERNS = [(name, re.compile(pattern)) for name, pattern in _SHARING]
_ISA = re.compile(rf"(?<=[\[-])({'|'.join(ISAS)})(?=[]-])")


def case_of(nodeid: str) -> str:
    """The id without the instruction set: its case, of which there is one reference."""
    return _ISA.sub("", nodeid, count=1) if nodeid.startswith("tests/cpu/") else nodeid


def group_of(nodeid: str) -> str:
    """What the test shares, or its case."""
    return next((name for name, pattern in _PATTERNS if pattern.match(nodeid)), case_of(nodeid))


def first(nodeid: str) -> int:
    """A key to sort by: what shares something first, the rest as they were."""
    group = group_of(nodeid)
    names = [name for name, _ in _SHARING]
    return names.index(group) if group in names else len(names)


def gpus_in_turn(worker: str, count: int) -> str:
    """CUDA_VISIBLE_DEVICES of a process: all GPUs, beginning with another one than its neighbours,
    since tests take the first."""
    number = int(worker.removeprefix("gw"))
    return ",".join(str((number + i) % count) for i in range(count))


def scheduler(config: Any, log: Any) -> Any:
    """Gives one group after the other to whichever process is free.

    Nearly every test is a group of its own. pytest-xdist's scheduler walks over all groups that a
    process has been given, finished ones too, and looks for a test among all, whenever one ends: of
    thirty thousand that takes minutes. Here what is finished is forgotten, and places are known.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def __init__(self, config: Any, log: Any) -> None:
            super().__init__(config, log)
            self._places: dict[str, int] = {}

        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
            super().add_node_collection(node, collection)  # all processes must collect the same
            if not self._places:
                self._places = {nodeid: place for place, nodeid in enumerate(collection)}

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            nodeid = self.registered_collections[node][item_index]
            groups = self.assigned_work[node]
            group = groups[group_of(nodeid)]
            del group[nodeid]
            if not group:
                del groups[group_of(nodeid)]
            self._reschedule(node)

        def _assign_work_unit(self, node: Any) -> None:
            name, group = self.workqueue.popitem(last=False)
            self.assigned_work[node][name] = group
            node.send_runtest_some([self._places[nodeid] for nodeid in group])

    config.option.loadscopereorder = False  # they come in the order of `first`
    return Groups(config, log)
