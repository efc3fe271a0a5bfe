"""check_sequences on the CPU and from Python: what it finds beside a loop, in every framework, in
traces, and what is refused. tests/c/fuzz_sequences.cpp has it of hostile numbers by the C ABI."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
from flashmoe_science import SequenceFault as Fault
from producers import ON_CPU
from reference import to_numpy


def int32(*numbers: Any) -> np.ndarray:
    return np.array(numbers, np.int32)


Q, K = np.zeros((3, 4, 2, 16), np.float32), np.zeros((9, 8, 1, 16), np.float32)
PAGED = {"page_table": int32([0, 1, 2], [3, 9, -1], [5, 8, 7]), "seqused_k": int32(24, 8, 9)}
FAULTS = {
    "sound": ({}, [0, 0, 0]),
    "page": ({"seqused_k": int32(24, 9, 24)}, [0, Fault.PAGE_TABLE, 0]),
    "pages": ({"page_table": int32([-1, 0, 0], [0, 0, 0], [99, -5, 0])},
              [Fault.PAGE_TABLE, 0, Fault.PAGE_TABLE]),
    "page behind the bound": ({"seqused_k": int32(8, 24, 8), "max_seqlen_k": 8},
                              [0, Fault.MAX_SEQLEN_K, 0]),
    "page before the first key": ({"page_table": int32([-1, 0, 0], [0, 0, 0], [0, 0, 0]),
                                   "k_begin": int32(8, 0, 0)}, [0, 0, 0]),
    "lengths": ({"seqused_k": int32(25, -1, 0)}, [Fault.SEQUSED_K, Fault.SEQUSED_K, 0]),
    "begins": ({"k_begin": int32(25, -1, 9)}, [Fault.K_BEGIN, Fault.K_BEGIN, 0]),
    "queries": ({"seqused_q": int32(4, 5, -1)}, [0, Fault.SEQUSED_Q, Fault.SEQUSED_Q]),
    "most queries": ({"seqused_q": int32(4, 3, 2), "max_seqlen_q": 3}, [Fault.MAX_SEQLEN_Q, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize(("given", "want"), FAULTS.values(), ids=FAULTS)
def test_faults_of_pages(given: dict[str, Any], want: list[int]) -> None:
    status = fm.check_sequences(Q, K, **PAGED | given)
    assert status.dtype == np.int32
    assert status.tolist() == want


def test_faults_of_packed_rows_and_of_a_cache() -> None:
    q, k = np.zeros((1, 10, 2, 16), np.float16), np.zeros((1, 20, 1, 16), np.float16)
    starts = int32(0, 4, 3, 11, 10)
    status = fm.check_sequences(q, k, cu_seqlens_q=starts, cu_seqlens_k=int32(0, 20, 20, 21, -1))
    wrong_q, wrong_k = Fault.CU_SEQLENS_Q, Fault.CU_SEQLENS_K
    assert status.tolist() == [0, wrong_q, wrong_q | wrong_k, wrong_q | wrong_k]
    status = fm.check_sequences(Q, K, batch_index=int32(8, 9, -1))
    assert status.tolist() == [0, Fault.BATCH_INDEX, Fault.BATCH_INDEX]


def test_names_of_faults_are_those_of_arguments() -> None:
    assert {fault.name.lower() for fault in Fault} <= set(fm.check_sequences.__kwdefaults__)
    assert sum(Fault) == 2 ** len(Fault) - 1


def test_extents_alone_are_looked_at() -> None:
    """Tensors of any dtype and without memory of their own serve."""
    q = np.broadcast_to(np.float64(0), (3, 4, 2, 16))
    k = np.broadcast_to(np.int8(0), (9, 8, 1, 16))
    assert fm.check_sequences(q, k, **PAGED).tolist() == [0, 0, 0]


def host(result: Any) -> np.ndarray:
    root = type(result).__module__.partition(".")[0]
    return np.asarray(result) if root in ("producers", "array_api_strict") else to_numpy(result)


@pytest.mark.parametrize("producer", ON_CPU, ids=str)
def test_every_framework(producer: Any) -> None:
    given, want = FAULTS["lengths"]
    tables = {name: producer.as_is(x) for name, x in (PAGED | given).items()}
    status = fm.check_sequences(producer.make(Q, "fp32"), producer.make(K, "fp32"), **tables)
    assert isinstance(status, producer.kind)
    assert host(status).tolist() == want


def test_a_status_that_is_given_and_a_plan() -> None:
    given, want = FAULTS["begins"]
    status = np.full(6, 77, np.int32)
    plan = fm.check_sequences_plan(Q, K, **PAGED | given, status=status[::2])
    assert (plan.operation, plan.family) == ("check_sequences", "cpu")
    assert status.tolist() == [77] * 6
    fm.check_sequences(Q, K, **PAGED | given, status=status[::2])
    assert status[::2].tolist() == want and status[1::2].tolist() == [77] * 3
    assert plan.launches == fm.last_launches()


@pytest.mark.parametrize(("name", "given"), [
    ("sequences", {"page_table": None, "seqused_k": None}),
    ("status", {"status": np.zeros(2, np.int32)}),
    ("status", {"status": np.zeros(3, np.int64)}),
    ("page_table", {"page_table": np.zeros((2, 3), np.int32)}),
    ("batch_index", {"batch_index": np.zeros(3, np.int32)}),
    ("layout", {"layout": "sbhd"}),
    ("kernel", {"kernel": "sm90"}),
])  # fmt: skip
def test_what_is_wrong_is_named(name: str, given: dict[str, Any]) -> None:
    for call in (fm.check_sequences, fm.check_sequences_plan):
        with pytest.raises((ValueError, TypeError), match=f"^{name}: "):
            call(Q, K, **PAGED | given)


def test_torch() -> None:
    torch = pytest.importorskip("torch", minversion="2.6")
    given, want = FAULTS["most queries"]
    there = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x
             for n, x in (PAGED | given).items()}  # fmt: skip
    q, k = torch.from_numpy(Q).requires_grad_(), torch.from_numpy(K)
    assert fm.check_sequences(q, k, **there).tolist() == want
    torch._dynamo.reset()
    step = torch.compile(
        lambda q: fm.check_sequences(q, k, **there), backend="aot_eager", fullgraph=True
    )
    assert step(q).tolist() == want
    tables = [there.get(n) for n in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k",
                                     "k_begin", "batch_index", "page_table")]  # fmt: skip
    operator = torch.ops.flashmoe.check_sequences.default
    torch.library.opcheck(operator, (q.detach(), k, *tables, 3, None, "bshd", None))


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    given, want = FAULTS["most queries"]
    there = {n: jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x
             for n, x in (PAGED | given).items()}  # fmt: skip
    bound = there.pop("max_seqlen_q")

    def call(q: Any, tables: Any) -> Any:
        return fm.check_sequences(q, jax.numpy.asarray(K), **tables, max_seqlen_q=bound)

    for step in (call, jax.jit(call)):
        assert step(jax.numpy.asarray(Q), there).tolist() == want
    loss = lambda q: q.sum() + call(q, there).sum().astype(q.dtype)  # noqa: E731
    assert (jax.grad(loss)(jax.numpy.asarray(Q)) == 1).all()
    with pytest.raises(ValueError, match=r"^status: JAX arrays cannot be written to"):
        fm.check_sequences(jax.numpy.asarray(Q), jax.numpy.asarray(K), **there,
                           status=jax.numpy.zeros(3, jax.numpy.int32))  # fmt: skip
