"""Ragged, padded and paged batches by flash_attention: NumPy, torch and its operators, plans, and
what is refused. What each sequence gives is in tests/cpu/test_sequences.py."""

from __future__ import annotations

import functools
from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest

LENGTHS_Q, LENGTHS_K = (3, 0, 12, 1), (20, 5, 12, 33)
PAGE = 8
POISON = -77.0


def starts(lengths: tuple[int, ...]) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


class Batch:
    """The same sequences packed, padded and in pages."""

    def __init__(self) -> None:
        rng = np.random.default_rng(2)
        normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
        self.q = [normal(1, n, 4, 16) for n in LENGTHS_Q]
        self.k = [normal(1, n, 2, 16) for n in LENGTHS_K]
        self.v = [normal(1, n, 2, 24) for n in LENGTHS_K]
        self.packed_q = np.concatenate(self.q, 1)
        self.cu_q, self.cu_k = starts(LENGTHS_Q), starts(LENGTHS_K)
        longest = max(LENGTHS_K)
        self.padded = [np.full((4, longest, 2, dim), np.nan, np.float32) for dim in (16, 24)]
        count = sum(-(-n // PAGE) for n in LENGTHS_K) + 1
        self.pages = [np.full((count, PAGE, 2, dim), np.nan, np.float32) for dim in (16, 24)]
        self.table = np.full((4, -(-longest // PAGE)), -1, np.int32)
        places = iter(rng.permutation(count))
        for b, n in enumerate(LENGTHS_K):
            for made, parts in zip(self.padded, (self.k, self.v), strict=True):
                made[b, longest - n :] = parts[b][0]
            for page in range(-(-n // PAGE)):
                at = self.table[b, page] = next(places)
                rows = slice(page * PAGE, min((page + 1) * PAGE, n))
                for made, parts in zip(self.pages, (self.k, self.v), strict=True):
                    made[at, : rows.stop - rows.start] = parts[b][0, rows]

    def ways(self) -> dict[str, tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
        """k, v and the tables of them."""
        begins = np.array([max(LENGTHS_K) - n for n in LENGTHS_K], np.int32)
        used = np.array(LENGTHS_K, np.int32)
        return {
            "packed": (np.concatenate(self.k, 1), np.concatenate(self.v, 1),
                       {"cu_seqlens_k": self.cu_k}),
            "left": (*self.padded, {"k_begin": begins}),
            "indexed": (*(x[::-1] for x in self.padded),
                        {"k_begin": begins, "batch_index": np.arange(3, -1, -1, dtype=np.int32)}),
            "paged": (*self.pages, {"seqused_k": used, "page_table": self.table}),
        }  # fmt: skip

    def expected(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        made = [
            fm.flash_attention(q, k, v, return_lse=True, **options)
            for q, k, v in zip(self.q, self.k, self.v, strict=True)
        ]
        return np.concatenate([x[0] for x in made], 1), np.concatenate([x[1] for x in made], 2)


BATCH = Batch()
WAYS = pytest.mark.parametrize("way", BATCH.ways())


@WAYS
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (6, None)}], ids=str)
def test_numpy(way: str, options: dict[str, Any]) -> None:
    k, v, tables = BATCH.ways()[way]
    out, lse = fm.flash_attention(
        BATCH.packed_q, k, v, cu_seqlens_q=BATCH.cu_q, **tables, return_lse=True, **options
    )
    want, want_lse = BATCH.expected(**options)
    assert out.tobytes() == want.tobytes()
    assert lse.tobytes() == want_lse.tobytes()
    alone = fm.flash_attention(
        BATCH.packed_q, k, v, cu_seqlens_q=BATCH.cu_q, max_seqlen_q=12, max_seqlen_k=10**9,
        split_size=8, **tables, **options,
    )  # fmt: skip
    assert alone.tobytes() == want.tobytes()


def test_rows_that_no_sequence_has_are_left_alone() -> None:
    q = np.concatenate([BATCH.packed_q, np.full((1, 5, 4, 16), np.nan, np.float32)], 1)
    out = np.full((1, q.shape[1], 4, 24), POISON, np.float32)
    lse = np.full((1, 4, q.shape[1]), POISON, np.float32)
    k, v, tables = BATCH.ways()["paged"]
    fm.flash_attention(q, k, v, cu_seqlens_q=BATCH.cu_q, **tables, out=out, lse=lse)
    total = sum(LENGTHS_Q)
    assert (out[:, total:] == POISON).all()
    assert (lse[..., total:] == POISON).all()
    assert out[:, :total].tobytes() == BATCH.expected()[0].tobytes()


def test_backward_of_numpy() -> None:
    k, v, tables = BATCH.ways()["left"]
    tables = {"cu_seqlens_q": BATCH.cu_q} | tables
    out, lse = fm.flash_attention(BATCH.packed_q, k, v, **tables, return_lse=True)
    dout = np.cos(out)
    gradients = fm.flash_attention_backward(dout, BATCH.packed_q, k, v, out, lse, **tables)
    begin = 0
    for b, (n, m) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        rows, begin = slice(begin, begin + n), begin + n
        own = dout[:, rows], BATCH.q[b], BATCH.k[b], BATCH.v[b], out[:, rows], lse[..., rows]
        want = fm.flash_attention_backward(*own)
        assert gradients.dq[:, rows].tobytes() == want.dq.tobytes()
        for made, alone in ((gradients.dk, want.dk), (gradients.dv, want.dv)):
            assert made[b, made.shape[1] - m :].tobytes() == alone[0].tobytes()
            assert (made[b, : made.shape[1] - m] == 0).all()
    plan = fm.attention_backward_plan(dout, BATCH.packed_q, k, v, out, lse, **tables)
    assert plan.flops == 0
    fm.flash_attention_backward(dout, BATCH.packed_q, k, v, out, lse, **tables)
    assert plan.launches == fm.last_launches()
    with pytest.raises(fm.UnsupportedError, match=r"^page_table: got one, accepted is none"):
        fm.flash_attention_backward(dout, BATCH.packed_q, *BATCH.pages, out, lse,
                                    cu_seqlens_q=BATCH.cu_q, page_table=BATCH.table)  # fmt: skip


def test_a_plan_tells_no_operations() -> None:
    k, v, tables = BATCH.ways()["paged"]
    plan = fm.attention_plan(BATCH.packed_q, k, v, cu_seqlens_q=BATCH.cu_q, **tables)
    assert plan.family == "cpu"
    assert plan.flops == 0
    fm.flash_attention(BATCH.packed_q, k, v, cu_seqlens_q=BATCH.cu_q, **tables)
    assert plan.launches == fm.last_launches()


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"seqused_k": np.zeros(3)}, TypeError, "seqused_k: got dtype fp64"),
        ({"k_begin": np.zeros(4, np.int64)}, TypeError, "k_begin: got dtype int64"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q: got -1, accepted is a number of 0"),
        ({"max_seqlen_k": 1.5}, TypeError, "max_seqlen_k: got 1.5 of type float"),
        ({"split_size": -8}, ValueError, "split_size: got -8, accepted is a number of 0"),
        ({"seqused_q": np.zeros(7, np.int32)}, ValueError, "seqused_q: got 7 numbers"),
        ({"page_table": BATCH.table, "cu_seqlens_k": BATCH.cu_k}, ValueError, "cu_seqlens_k: got"),
    ],
)
def test_what_is_wrong_is_named(given: Any, error: type[Exception], sentence: str) -> None:
    k, v, _ = BATCH.ways()["paged"]
    with pytest.raises((error, fm.InvalidArgumentError)) as raised:
        fm.flash_attention(BATCH.packed_q, k, v, cu_seqlens_q=BATCH.cu_q, **given)
    assert str(raised.value).startswith(sentence)


class TestTorch:
    @pytest.fixture(autouse=True)
    def torch(self) -> Any:
        self.torch = pytest.importorskip("torch")
        return self.torch

    def arguments(self, way: str) -> tuple[list[Any], dict[str, Any]]:
        k, v, tables = BATCH.ways()[way]
        of = lambda x: self.torch.from_numpy(np.ascontiguousarray(x))  # noqa: E731
        tables = {"cu_seqlens_q": BATCH.cu_q} | tables
        return [of(x) for x in (BATCH.packed_q, k, v)], {n: of(x) for n, x in tables.items()}

    @WAYS
    def test_values(self, way: str) -> None:
        tensors, tables = self.arguments(way)
        out, lse = fm.flash_attention(*tensors, **tables, causal=True, return_lse=True)
        want, want_lse = BATCH.expected(causal=True)
        assert out.numpy().tobytes() == want.tobytes()
        assert lse.numpy().tobytes() == want_lse.tobytes()

    @WAYS
    def test_under_compile(self, way: str) -> None:
        tensors, tables = self.arguments(way)

        def attend(*tensors: Any) -> Any:
            out, lse = fm.flash_attention(
                *tensors, **tables, causal=True, max_seqlen_q=12, return_lse=True
            )
            return fm.flash_attention(*tensors, **tables, causal=True), out, lse

        compiled = self.torch.compile(attend, fullgraph=True, backend="aot_eager")
        alone, out, lse = compiled(*tensors)
        want, want_lse = BATCH.expected(causal=True)
        assert out.numpy().tobytes() == alone.numpy().tobytes() == want.tobytes()
        assert lse.numpy().tobytes() == want_lse.tobytes()

    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    def test_queries_stand_where_they_are_said_to(self, compiled: bool) -> None:
        """At the last keys, by their numbers."""
        tensors, tables = self.arguments("packed")
        lengths = [np.diff(tables[f"cu_seqlens_{x}"].numpy()) for x in "qk"]
        offsets = self.torch.from_numpy(lengths[1] - lengths[0])
        given, plain = self.leaves(tensors), self.leaves(tensors)

        def attend(*given: Any) -> Any:
            return fm.flash_attention(*given, **tables, q_offset=offsets, causal="top_left")

        if compiled:
            self.torch._dynamo.reset()
            attend = self.torch.compile(attend, fullgraph=True, backend="aot_eager")
        for out in (attend(*given), fm.flash_attention(*plain, **tables, causal=True)):
            out.backward(out.detach().cos())
        assert all(map(self.torch.equal, [x.grad for x in given], [x.grad for x in plain]))

    def test_operator_and_fake_agree(self) -> None:
        import flashmoe_science.torch  # noqa: F401

        tensors, tables = self.arguments("paged")
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "k_begin",
                 "batch_index", "page_table", "q_offset", "k_scale", "v_scale")  # fmt: skip
        arguments = (*tensors, *[None] * 3, *(tables.get(name) for name in names), None, 64,
                     8, "bottom_right", None, None, None, None, "bshd", None)  # fmt: skip
        for name in ("ragged_attention", "ragged_attention_with_lse"):
            operator = getattr(self.torch.ops.flashmoe, name).default
            self.torch.library.opcheck(operator, arguments)

    def leaves(self, tensors: list[Any]) -> list[Any]:
        return [x.clone().requires_grad_() for x in tensors]

    def probe(self, out: Any, lse: Any) -> Any:
        """A loss by both, in which rows that no sequence has do not take part."""
        weights = self.torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).cos()
        return (weights * out).sum() + (lse.sin()).sum()

    def expected_gradients(self, **options: Any) -> list[list[Any]]:
        """The gradients of each sequence, by dense calls with the same loss."""
        of = self.torch.from_numpy
        each = [self.leaves([of(x) for x in parts])
                for parts in zip(BATCH.q, BATCH.k, BATCH.v, strict=True)]  # fmt: skip
        made = [fm.flash_attention(*x, return_lse=True, **options) for x in each]
        out, lse = self.torch.cat([x[0] for x in made], 1), self.torch.cat([x[1] for x in made], 2)
        self.probe(out, lse).backward()
        return [[x.grad[0].numpy() for x in tensors] for tensors in each]

    def placed(self, way: str, parts: list[Any], which: int) -> np.ndarray:
        """Gradients of keys where the keys are, and zeros elsewhere."""
        if way == "packed":
            return np.concatenate(parts)[None]
        made = np.zeros_like(BATCH.padded[which])
        for b, part in enumerate(parts):
            made[b, made.shape[1] - len(part) :] = part
        return made

    @pytest.mark.parametrize("way", ["packed", "left"])
    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    def test_gradients(self, way: str, compiled: bool) -> None:
        options = {"causal": True, "window": (9, None), "softcap": 2.0}
        tensors, tables = self.arguments(way)
        given = self.leaves(tensors)

        def attend(*given: Any) -> Any:
            return fm.flash_attention(*given, **tables, **options, return_lse=True)

        if compiled:
            self.torch._dynamo.reset()
            attend = self.torch.compile(attend, fullgraph=True, backend="aot_eager")
        self.probe(*attend(*given)).backward()
        want = self.expected_gradients(**options)
        dq = np.concatenate([x[0] for x in want])[None]
        assert given[0].grad.numpy().tobytes() == dq.tobytes()
        for i in (1, 2):
            placed = self.placed(way, [x[i] for x in want], i - 1)
            assert given[i].grad.numpy().tobytes() == placed.tobytes()

    def test_one_graph_trains_on_any_lengths(self) -> None:
        torch = self.torch
        tensors, tables = self.arguments("packed")
        ends = tables.pop("cu_seqlens_q"), tables.pop("cu_seqlens_k")
        others = (torch.tensor([0, 7, 7, 9, 16], dtype=torch.int32),
                  torch.tensor([0, 30, 41, 60, 70], dtype=torch.int32))  # fmt: skip

        def loss(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
            out = fm.flash_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
            return out.square().sum()

        torch._dynamo.reset()
        step = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for tables_of, stance in ((ends, "default"), (others, "fail_on_recompile")):
            gradients = []
            for function in (step, loss):
                given = self.leaves(tensors)
                with torch.compiler.set_stance(stance if function is step else "default"):
                    function(*given, *tables_of).backward()
                gradients.append([x.grad for x in given])
            assert all(map(torch.equal, *gradients))

    def test_gradients_in_double_precision(self) -> None:
        torch = self.torch
        cu = torch.tensor([0, 5, 5, 8], dtype=torch.int32)
        sinks = torch.tensor([0.3, -0.2], dtype=torch.float64).requires_grad_()
        q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 8, 2, 8, dtype=torch.float64))

        def packed(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            return fm.flash_attention(q, k, v, sinks=sinks, causal=True, cu_seqlens_q=cu,
                                      cu_seqlens_k=cu, return_lse=True)  # fmt: skip

        assert torch.autograd.gradcheck(packed, [q, k, v, sinks])

        begin = torch.tensor([0, 3], dtype=torch.int32)
        rows = [x.detach().reshape(2, 4, 2, 8).clone().requires_grad_() for x in (q, k, v)]

        def padded(q: Any, k: Any, v: Any) -> Any:
            return fm.flash_attention(q, k, v, k_begin=begin, causal=True, window=(2, None))

        assert torch.autograd.gradcheck(padded, rows)
        with pytest.raises(fm.UnsupportedError, match="differentiated again"):
            torch.autograd.gradgradcheck(padded, rows)

    def test_gradients_of_rows_that_no_sequence_has_are_zeros(self) -> None:
        tensors, tables = self.arguments("packed")
        spare = self.torch.full((1, 3, 4, 16), float("nan"))
        given = self.leaves([self.torch.cat([tensors[0], spare], 1), *tensors[1:]])
        out = fm.flash_attention(*given, **tables)
        dout = self.torch.ones_like(out)
        dout[:, -3:] = float("nan")
        out.backward(dout)
        assert (given[0].grad[:, -3:] == 0).all()
        assert all(x.grad.isfinite().all() for x in given)

    @pytest.mark.parametrize("way", ["indexed", "paged"])
    def test_keys_that_may_be_shared_have_no_gradients(self, way: str) -> None:
        tensors, tables = self.arguments(way)
        name = {"indexed": "batch_index", "paged": "page_table"}[way]
        tensors[1].requires_grad_()
        with pytest.raises(fm.UnsupportedError, match=rf"k: requires grad.*{name}: got.*detach"):
            fm.flash_attention(*tensors, **tables)
        with self.torch.no_grad():
            fm.flash_attention(*tensors, **tables)
        compiled = self.torch.compile(
            lambda *x: fm.flash_attention(*x, **tables), fullgraph=True, backend="aot_eager"
        )
        with pytest.raises(Exception, match="k: requires grad"):
            compiled(*tensors)

    def test_transforms_are_refused(self) -> None:
        tensors, tables = self.arguments("packed")

        def loss(q: Any) -> Any:
            return fm.flash_attention(q, *tensors[1:], **tables).sum()

        with pytest.raises(
            fm.UnsupportedError, match=r"^cu_seqlens_q: got one in a call that a tr"
        ):
            self.torch.func.grad(loss)(tensors[0])

    def test_backward_by_itself(self) -> None:
        tensors, tables = self.arguments("packed")
        out, lse = fm.flash_attention(*tensors, **tables, return_lse=True)
        dout = self.torch.cos(out)
        given = self.leaves(tensors)
        fm.flash_attention(*given, **tables).backward(dout)
        gradients = fm.flash_attention_backward(dout, *tensors, out, lse, **tables)
        assert all(map(self.torch.equal, gradients[:3], [x.grad for x in given]))
        compiled = self.torch.compile(
            lambda *x: fm.flash_attention_backward(*x, **tables)[:3], fullgraph=True,
            backend="aot_eager",
        )  # fmt: skip
        assert all(map(self.torch.equal, compiled(dout, *tensors, out, lse), gradients[:3]))

    def test_operator_and_fake_of_backward_agree(self) -> None:
        import flashmoe_science.torch  # noqa: F401

        tensors, tables = self.arguments("packed")
        out, lse = fm.flash_attention(*tensors, **tables, return_lse=True)
        arguments = (out, *tensors, out, lse, *[None] * 4, tables["cu_seqlens_q"],
                     tables["cu_seqlens_k"], *[None] * 9, 64, 8,
                     "none", None, None, None, None, "bshd", [True, False, True, True],
                     None)  # fmt: skip
        operator = self.torch.ops.flashmoe.ragged_attention_backward.default
        self.torch.library.opcheck(operator, arguments)

    def test_autocast(self) -> None:
        tensors, tables = self.arguments("left")
        with self.torch.autocast("cpu", self.torch.bfloat16):
            out = fm.flash_attention(*tensors, **tables)
        want = fm.flash_attention(*(x.bfloat16() for x in tensors), **tables)
        assert out.dtype == self.torch.bfloat16
        assert self.torch.equal(out, want)

    def test_tables_are_of_the_same_library(self) -> None:
        tensors, tables = self.arguments("packed")
        with pytest.raises(TypeError, match="cu_seqlens_k"):
            fm.flash_attention(*tensors, **tables | {"cu_seqlens_k": BATCH.cu_k})


class TestJax:
    @pytest.fixture(autouse=True)
    def _jax(self) -> None:
        self.jax = pytest.importorskip("jax")

    def arguments(self, way: str) -> tuple[list[Any], dict[str, Any]]:
        k, v, tables = BATCH.ways()[way]
        tables = {"cu_seqlens_q": BATCH.cu_q} | tables
        array = self.jax.numpy.asarray
        return [array(x) for x in (BATCH.packed_q, k, v)], {n: array(x) for n, x in tables.items()}

    @WAYS
    @pytest.mark.parametrize(
        "options", [{}, {"causal": True, "max_seqlen_q": 4, "split_size": 8}], ids=str
    )
    def test_bits_are_those_of_numpy(self, way: str, options: dict[str, Any]) -> None:
        tensors, tables = self.arguments(way)
        k, v, plain = BATCH.ways()[way]
        want = fm.flash_attention(
            BATCH.packed_q, k, v, cu_seqlens_q=BATCH.cu_q, **plain, **options, return_lse=True,
            out=np.zeros((1, sum(LENGTHS_Q), 4, 24), np.float32),
        )  # fmt: skip
        # The bound leaves 4 queries of the third sequence.
        seen = [*range(3), *range(3, 7), 15] if "max_seqlen_q" in options else [*range(16)]
        call = functools.partial(fm.flash_attention, **options, return_lse=True)
        plan = fm.attention_plan(*tensors, **tables, **options)
        for attend in (call, self.jax.jit(call)):
            out, lse = attend(*tensors, **tables)
            np.testing.assert_array_equal(out[:, seen], want[0][:, seen])
            np.testing.assert_array_equal(lse[..., seen], want[1][..., seen])
        assert (plan.family, plan.flops) == ("cpu", 0)
        fm.flash_attention(BATCH.packed_q, k, v, cu_seqlens_q=BATCH.cu_q, **plain, **options)
        assert plan.launches == fm.last_launches()

    def test_queries_stand_where_they_are_said_to(self) -> None:
        jax, jnp = self.jax, self.jax.numpy
        rng = np.random.default_rng(0)
        q, k, v = (jnp.asarray(rng.standard_normal((3, n, 2, 16), np.float32)) for n in (5, 9, 9))
        offsets = jnp.asarray([4, 0, -2], "int32")

        def loss(attend: Any) -> Any:
            return jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(attend(*x))), (0, 1, 2))

        seen = jnp.arange(9) <= jnp.arange(5)[:, None] + offsets[:, None, None, None]
        one = functools.partial(fm.flash_attention, attn_mask=seen)
        ours = jax.jit(functools.partial(fm.flash_attention, causal=True, q_offset=offsets))
        for got, want in zip(jax.tree.leaves(loss(ours)(q, k, v)),
                             jax.tree.leaves(loss(one)(q, k, v)), strict=True):  # fmt: skip
            np.testing.assert_allclose(got, want, atol=2e-5)

        def attend(q: Any, k: Any, v: Any, offset: Any) -> Any:
            return fm.flash_attention(q, k, v, q_offset=offset, causal=True)

        got = jax.vmap(attend)(*(x[:, None] for x in (q, k, v, offsets)))
        np.testing.assert_array_equal(got[:, 0], attend(q, k, v, offsets))

    def test_one_program_has_all_lengths(self) -> None:
        tensors, tables = self.arguments("left")
        traced = []

        @self.jax.jit
        def attend(begins: Any) -> Any:
            traced.append(begins)
            return fm.flash_attention(*tensors, **tables | {"k_begin": begins}, causal=True)

        for begins in (tables["k_begin"], tables["k_begin"] + 1, tables["k_begin"] * 0 + 33):
            want = fm.flash_attention(
                *(np.asarray(x) for x in tensors), cu_seqlens_q=BATCH.cu_q,
                k_begin=np.asarray(begins), causal=True,
            )  # fmt: skip
            np.testing.assert_array_equal(attend(begins), want)
        assert len(traced) == 1

    @pytest.mark.parametrize("way", ["packed", "left"])
    def test_gradients(self, way: str) -> None:
        tensors, tables = self.arguments(way)
        plain = {n: np.asarray(x) for n, x in tables.items()}

        def attend(q: Any, k: Any, v: Any, tables: dict[str, Any]) -> Any:
            return fm.flash_attention(q, k, v, **tables, causal=True, return_lse=True)

        (out, lse), pull = self.jax.vjp(lambda *x: attend(*x, tables), *tensors)
        dout, dlse = self.jax.numpy.cos(out), self.jax.numpy.zeros_like(lse)
        arrays = [np.asarray(x) for x in (dout, *tensors, out, lse)]
        want = fm.flash_attention_backward(*arrays, **plain, causal=True)[:3]
        functional = fm.flash_attention_backward(dout, *tensors, out, lse, **tables, causal=True)

        @self.jax.jit
        def pulled(tensors: Any, tables: Any, dout: Any) -> Any:
            return self.jax.vjp(lambda *x: attend(*x, tables), *tensors)[1]((dout, dlse))

        for made in (pull((dout, dlse)), pulled(tensors, tables, dout), functional[:3]):
            for got, expected in zip(made, want, strict=True):
                np.testing.assert_array_equal(got, expected)

    @pytest.mark.parametrize("way", ["indexed", "paged"])
    def test_shared_keys_have_no_gradients(self, way: str) -> None:
        tensors, tables = self.arguments(way)
        loss = lambda *x: fm.flash_attention(*x, **tables).sum()  # noqa: E731
        name = {"indexed": "batch_index", "paged": "page_table"}[way]
        for grad in (self.jax.grad(loss), self.jax.jit(self.jax.grad(loss))):
            with pytest.raises(fm.UnsupportedError, match=f"^{name}: got one, accepted is none"):
                grad(*tensors)

    @pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None)], ids=str)
    @pytest.mark.parametrize("packed", [False, True])
    def test_vmap(self, packed: bool, axes: tuple[int | None, int | None]) -> None:
        """Padded batches become one, of others there is one call after another."""
        numpy = self.jax.numpy
        rng = np.random.default_rng(4)
        shape = (3, 1, 12, 2, 16) if packed else (3, 2, 12, 2, 16)
        q = numpy.asarray(rng.standard_normal(shape, np.float32))
        if packed:
            tables = numpy.asarray([[0, 5, 12], [0, 1, 9], [3, 4, 4]], np.int32)
            names = ("cu_seqlens_q", "cu_seqlens_k")
        else:
            tables = numpy.asarray([[3, 12], [1, 0], [12, 11]], np.int32)
            names = ("seqused_q", "seqused_k")
        given = [x if axis == 0 else x[0] for x, axis in zip((q, tables), axes, strict=True)]

        def one(q: Any, table: Any) -> Any:
            made = fm.flash_attention(q, q, q, **dict.fromkeys(names, table), causal=True)
            at = numpy.arange(12)
            if packed:
                return made * ((at >= table[0]) & (at < table[-1]))[:, None, None] + 0.0
            return numpy.where((at < table[:, None])[..., None, None], made, 0.0)

        mapped = self.jax.vmap(self.jax.grad(lambda *x: (one(*x) ** 2).sum()), axes)
        got = mapped(*given)
        for i in range(3):
            own = (x[i] if axis == 0 else x for x, axis in zip(given, axes, strict=True))
            want = self.jax.grad(lambda *x: (one(*x) ** 2).sum())(*own)
            np.testing.assert_array_equal(got[i], want)
        assert ("scan" in str(self.jax.make_jaxpr(mapped)(*given))) == packed

    def test_export(self) -> None:
        export = pytest.importorskip("jax.export")
        tensors, tables = self.arguments("paged")
        attend = functools.partial(fm.flash_attention, max_seqlen_k=17)
        check = export.DisabledSafetyCheck.custom_call("flashmoe_attention_forward_v1")
        exported = export.export(self.jax.jit(attend), disabled_checks=[check])(*tensors, **tables)
        got = exported.call(*tensors, **tables)
        np.testing.assert_array_equal(got, attend(*tensors, **tables))
        assert (np.asarray(got) != np.asarray(fm.flash_attention(*tensors, **tables))).any()

    def test_what_is_wrong(self) -> None:
        tensors, tables = self.arguments("left")
        for call in (fm.flash_attention, self.jax.jit(fm.flash_attention), fm.attention_plan):
            with pytest.raises(ValueError, match=r"^k_begin: "):
                call(*tensors, **tables | {"k_begin": tables["k_begin"][:2]})
            with pytest.raises(TypeError, match=r"^k_begin: "):
                call(*tensors, **tables | {"k_begin": tables["k_begin"].astype("float32")})
