"""Gradients of ragged and padded batches: each sequence has those of a dense call of its own, bit
by bit where sums are added in the same order, and what no sequence has gets zeros."""

from __future__ import annotations

import itertools
from typing import Any

import flashmoe_science as fm
import pytest
import torch
from gpu import memory, ragged_backward
from gpu.backward import GRADIENTS
from gpu.ragged import HOSTILE, int32, starts
from gpu.ragged_backward import Given, Rows, Way, ways

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
DTYPES = ("fp16", "bf16")
LENGTHS_Q = (5, 0, 1, 40, 3, 300, 1, 129, 64)
LENGTHS_K = (9, 300, 0, 33, 1, 170, 515, 128, 65)
DIMS = ((64, 64), (128, 128), (256, 256))
PADDED = ((8, 8), (40, 24), (96, 72), (64, 128), (192, 128), (200, 248))
FAMILIES = ("sm90", "sm89")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "top_left": {"causal": "top_left"},
    "window": {"causal": "bottom_right", "window": (20, None)},
    "both_ends": {"window": (70, 3)},
    "left_end": {"window": (100, None)},
    "ahead_of_keys": {"causal": "top_left", "window": (25, 0)},
    "softcap": {"softcap": 1.5, "causal": "bottom_right"},
    "scale": {"scale": 0.3},
}


def _serves(family: str, dim: int = 64, dim_v: int = 64, **options: Any) -> bool:
    """Whether the family computes gradients of such sequences here."""
    rows = torch.zeros(1, 4, 2, dim, dtype=torch.bfloat16, device=DEVICE)
    values = torch.zeros(1, 4, 2, dim_v, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.zeros(1, 2, 4, device=DEVICE)
    offsets = int32([0, 4]).to(DEVICE)
    try:
        fm.attention_backward_plan(
            values, rows, rows, values, values, lse, cu_seqlens_q=offsets, cu_seqlens_k=offsets,
            kernel=family, **options,
        )  # fmt: skip
    except NotImplementedError:
        return False
    return True


@pytest.fixture(params=FAMILIES)
def kernel(request: pytest.FixtureRequest) -> str:
    """The family that calls ask for."""
    if not _serves(request.param):
        pytest.skip(f"{request.param} has no gradients of sequences here")
    return request.param


def _made(lengths: Any = (LENGTHS_Q, LENGTHS_K), **how: Any) -> Given:
    return ragged_backward.make(*lengths, DEVICE, **how)


def _check(given: Given, way: Way, kernel: str | None, **how: Any) -> ragged_backward.Result:
    """Has the bits of dense calls: with so few heads as these all are added in ascending order."""
    got = ragged_backward.run(given, way, kernel=kernel, **how)
    want = given.dense(ragged_backward.dense_kernel(got.kernel))
    ragged_backward.assert_same_bits(got, want)
    return got


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_every_way_has_the_bits_of_dense_calls(
    dim: int, dim_v: int, options: dict[str, Any], kernel: str
) -> None:
    if not _serves(kernel, dim, dim_v, **options):
        pytest.skip("other head dimensions")
    for i, dtype in enumerate(DTYPES):
        heads = ((4, 2), (3, 3), (8, 1))[(i + dim // 64) % 3]
        given = _made(dtype=dtype, dim=dim, dim_v=dim_v, heads=heads, options=options, seed=i)
        for name, way in ways(given).items():
            got = _check(given, way, kernel)
            if "softcap" not in options:  # which has fewer kernels
                assert f"{dtype}_d{dim}_dv{dim_v}_ragged" in got.kernel
            if name == "packed":
                ragged_backward.assert_accurate(given, got.parts)


@pytest.mark.parametrize(("dim", "dim_v"), PADDED)
def test_dimensions_that_are_padded(dim: int, dim_v: int, kernel: str) -> None:
    if not _serves(kernel, dim, dim_v):
        pytest.skip("other head dimensions")
    for i, dtype in enumerate(DTYPES):
        options = {"causal": ("bottom_right", "top_left")[i]}
        given = _made(dtype=dtype, dim=dim, dim_v=dim_v, options=options, seed=i, dlse=i == 0)
        for way in ways(given).values():
            got = _check(given, way, kernel)
        ragged_backward.assert_accurate(given, got.parts)


def test_no_kernel_is_named() -> None:
    for dim, dim_v in (*DIMS, *PADDED):
        given = _made(dim=dim, dim_v=dim_v, options={"causal": True})
        for way in ways(given).values():
            _check(given, way, None)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 0)}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_longer_sequences(dtype: str, options: dict[str, Any], kernel: str) -> None:
    """With many tiles, some of one sequence and some of many, and more queries than keys and
    fewer."""
    lengths = (2000, 700, 1, 3, 1300, 64), (1500, 700, 900, 5000, 1301, 2)
    for dim in (64, 128):
        given = _made(lengths, dtype=dtype, dim=dim, heads=(4, 2), options=options)
        for way in ways(given).values():
            got = _check(given, way, kernel)
        ragged_backward.assert_accurate(given, got.parts)


@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [64, 250, 1100])
@pytest.mark.parametrize(("heads", "dim"), [((16, 16), 64), ((16, 2), 128)], ids=str)
def test_equal_lengths_have_the_bits_of_a_dense_batch(
    heads: tuple[int, int], dim: int, dtype: str, causal: Any, length: int, kernel: str
) -> None:
    """With many heads most descend. If eight share a KV head, items may run in waves."""
    batch = max(3, 16000 // length)
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, device=DEVICE)
        return made.to(torch.float16 if dtype == "fp16" else torch.bfloat16)

    q, k, v, dout = (normal(batch, length, heads[i], dim) for i in (0, 1, 1, 0))
    out, lse = fm.flash_attention(q, k, v, causal=causal, return_lse=True)
    flat = [x.flatten(0, 1)[None] for x in (dout, q, k, v, out)]
    offsets = int32(torch.arange(batch + 1) * length).to(DEVICE)
    rows = lse.transpose(0, 1).flatten(1)[None].contiguous()
    said = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "causal": causal}
    got = fm.flash_attention_backward(*flat, rows, kernel=kernel, **said)
    name = fm.last_launches()[2].kernel
    dense = ragged_backward.dense_kernel(name)
    want = fm.flash_attention_backward(dout, q, k, v, out, lse, causal=causal, kernel=dense)
    split = "sm90" in name and not causal  # whose last items dense batches share among blocks
    for of in GRADIENTS[: 1 if split else 3]:
        mine, other = getattr(got, of), getattr(want, of).flatten(0, 1)[None]
        assert torch.equal(memory.bits(mine), memory.bits(other)), of
    for _ in range(10):
        again = fm.flash_attention_backward(*flat, rows, kernel=kernel, **said)
        for of in GRADIENTS:
            assert torch.equal(*(memory.bits(getattr(x, of)) for x in (got, again)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks(dtype: str, kernel: str) -> None:
    for options in ({}, {"causal": "bottom_right"}, {"window": (30, 2)}):
        given = _made(dtype=dtype, sinks=True, options=options)
        want = torch.zeros(4, dtype=torch.float64, device=DEVICE)
        for x in given.tensors:
            delta = (x["dout"].double() * x["out"].double()).sum(-1).transpose(1, 2)
            assert given.sinks is not None
            weight = torch.exp(given.sinks[:, None].double() - x["lse"].double())
            want -= (weight * (delta - x["dlse"].double())).sum((0, 2))
        made = [ragged_backward.run(given, way, kernel=kernel).dsinks
                for way in ways(given).values()]  # fmt: skip
        for x in made:
            assert x is not None and torch.equal(x, made[0])
        torch.testing.assert_close(made[0].double(), want, rtol=1e-4, atol=1e-4)
        alone = ragged_backward.run(given, ways(given)["left"], kernel=kernel, wanted=())
        assert torch.equal(alone.dsinks, made[0])


@pytest.mark.parametrize("wanted", [("dq",), ("dk",), ("dv",), ("dq", "dv"), ("dk", "dv")])
def test_each_gradient_alone(wanted: tuple[str, ...], kernel: str) -> None:
    given = _made(options={"causal": "bottom_right"}, dim=128)
    for way in ways(given).values():
        _check(given, way, kernel, wanted=wanted)


def test_gradients_are_accumulated_where_a_sequence_is(kernel: str) -> None:
    given = _made(sinks=True, options={"causal": "bottom_right"}, dtype="bf16")
    for way in ways(given).values():
        clean = ragged_backward.run(given, way, kernel=kernel, fp32=GRADIENTS)
        added = ragged_backward.run(given, way, kernel=kernel, fp32=GRADIENTS, added_to=3.0)
        for b, (x, y) in enumerate(zip(clean.parts, added.parts, strict=True)):
            if given.lengths_q[b] == 0:
                assert all((part == 3).all() for part in y.values())
                continue
            for name in GRADIENTS:
                assert torch.equal(x[name] + 3, y[name]), name
        assert torch.equal(clean.dsinks + 3, added.dsinks)
        plain = ragged_backward.run(given, way, kernel=kernel)
        rounded = [{name: part.to(torch.bfloat16) for name, part in x.items()}
                   for x in clean.parts]  # fmt: skip
        ragged_backward.assert_same_bits(plain, rounded)


@pytest.mark.parametrize("count", [1, 2, 129, 1025, 3000])
def test_any_number_of_short_sequences(count: int, kernel: str) -> None:
    generator = torch.Generator().manual_seed(count)

    def lengths(most: int) -> list[int]:
        return torch.randint(0, most, (count,), generator=generator).tolist()

    given = _made((lengths(9), lengths(70)), heads=(2, 1), options={"causal": True})
    for way in ways(given).values():
        _check(given, way, kernel)


def test_one_long_sequence_beside_many_short_ones(kernel: str) -> None:
    lengths = [3 + b % 40 for b in range(255)]
    lengths.insert(100, 20000)
    given = _made((lengths, lengths), heads=(4, 2), options={"causal": True}, dtype="bf16")
    for name in ("packed", "rooms"):
        _check(given, ways(given)[name], kernel)


def test_many_long_sequences(kernel: str) -> None:
    """With many heads, some of which descend: results are right, and the same on every run."""
    lengths = [300 + 517 * b % 1400 for b in range(24)]
    given = _made((lengths, lengths), heads=(8, 8), options={"causal": True}, dtype="bf16")
    way = ways(given)["packed"]
    got = ragged_backward.run(given, way, kernel=kernel)
    ragged_backward.assert_accurate(given, got.parts)
    other, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE)
    for _ in range(20):
        with torch.cuda.stream(other):  # takes multiprocessors away, another number each time
            noise @ noise
        again = ragged_backward.run(given, way, kernel=kernel)
        ragged_backward.assert_same_bits(again, got.parts)


def test_bits_do_not_depend_on_bounds(kernel: str) -> None:
    given = _made(dtype="bf16", dim=128, options={"causal": "bottom_right"}, sinks=True)
    want = ragged_backward.run(given, ways(given)["packed"], kernel=kernel).dsinks
    for bounds in ((300, 515), (10**9, 10**15), (301, None)):
        for way in ways(given).values():
            tables = way.tables | {"max_seqlen_q": bounds[0], "max_seqlen_k": bounds[1]}
            got = _check(given, way._replace(tables=tables), kernel)
            assert torch.equal(got.dsinks, want)


def test_bounds_that_are_too_small_cut_at_the_end(kernel: str) -> None:
    full = _made(options={"causal": "bottom_right"}, dlse=False)
    most_q, most_k = 131, 140
    cut = _made(([min(n, most_q) for n in LENGTHS_Q], [min(n, most_k) for n in LENGTHS_K]),
                options={"causal": "bottom_right"}, dlse=False)  # fmt: skip
    for x, y in zip(full.tensors, cut.tensors, strict=True):
        for name in ("q", "dout"):
            y[name] = x[name][:, :most_q].contiguous()
        for name in ("k", "v"):
            y[name] = x[name][:, :most_k].contiguous()
        y["out"], y["lse"] = fm.flash_attention(
            y["q"], y["k"], y["v"], return_lse=True, **cut.options
        )
    for way_of_full, way in zip(ways(full).values(), ways(cut).values(), strict=True):
        bounds = {"max_seqlen_q": most_q, "max_seqlen_k": most_k}
        # Rows of the full sequences, of which the cut ones are the first.
        long = Way(way_of_full.queries, way_of_full.keys, way_of_full.tables | bounds)
        assert len(way.tables) == len(way_of_full.tables)
        _check(cut, long, kernel)


def test_layout_bhsd(kernel: str) -> None:
    given = _made(dim=128, heads=(6, 3), options={"causal": "bottom_right"})
    for way in ways(given).values():
        _check(given, way, kernel, layout="bhsd")


def test_tables_of_any_strides(kernel: str) -> None:
    given = _made(options={"causal": "bottom_right"})
    for way in ways(given).values():
        spread = {}
        for name, x in way.tables.items():
            made = torch.full((3 * x.numel() + 1,), -5, dtype=torch.int32, device=DEVICE)
            spread[name] = made[1::3][: x.numel()].copy_(x)
        tensors = {n: way.keys.lay(given.all(n)) if n in "kv" else way.queries.lay(given.all(n))
                   for n in ("dout", "q", "k", "v", "out")}  # fmt: skip
        lse = way.queries.lay(given.all("lse"), 2)
        close = {name: x.to(DEVICE) for name, x in way.tables.items()}
        got, want = (
            fm.flash_attention_backward(**tensors, lse=lse, kernel=kernel, **given.options, **each)
            for each in (spread, close)
        )
        for name in GRADIENTS:
            assert torch.equal(*(memory.bits(getattr(x, name)) for x in (got, want)))


@pytest.mark.parametrize("offsets", [[4], [0, 0], [9, -3], [3, 3, 3], [5, 2, 2]])
def test_no_sequence_at_all(offsets: list[int], kernel: str) -> None:
    """Gradients are zeros all over."""
    x = torch.randn(1, 700, 2, 64, device=DEVICE).to(torch.bfloat16)
    lse, sinks = torch.zeros(1, 2, 700, device=DEVICE), torch.zeros(2, device=DEVICE)
    table = int32(offsets).to(DEVICE)
    dq, dk, dv = (torch.full_like(x, torch.nan) for _ in range(3))
    made = fm.flash_attention_backward(
        x, x, x, x, x, lse, sinks=sinks, cu_seqlens_q=table, cu_seqlens_k=table, kernel=kernel,
        dq=dq, dk=dk, dv=dv,
    )  # fmt: skip
    for each in (dq, dk, dv, made.dsinks):
        assert (each == 0).all()


@pytest.mark.parametrize("seed", range(40))
def test_hostile_numbers_stay_inside_the_tensors(seed: int, kernel: str) -> None:
    """Numbers from anywhere, poison around the tensors: gradients are finite, and the call ends."""
    generator = torch.Generator().manual_seed(seed)
    batch = 6
    rows_q, rows_k = (400, 330) if seed % 5 == 0 else (12, 13)

    def numbers(count: int) -> torch.Tensor:
        choices = torch.tensor([*HOSTILE, rows_q])
        picked = choices[torch.randint(len(choices), (count,), generator=generator)]
        return memory.place_values(int32(picked).to(DEVICE)).view

    def tensor(*shape: int) -> memory.Placed:
        made = torch.randn(shape, generator=generator).to(torch.bfloat16)
        return memory.place_values(made.to(DEVICE))

    tables: dict[str, Any] = {}
    if seed % 4 < 2:
        tables["cu_seqlens_q"] = numbers(batch + 1)
    if seed % 3 < 2:
        tables["cu_seqlens_k"] = numbers(batch + 1)
    batch_q, batch_k = (1 if f"cu_seqlens_{x}" in tables else batch for x in "qk")
    for name in ("seqused_q", "seqused_k", "k_begin"):
        if torch.rand((), generator=generator) < 0.6:
            tables[name] = numbers(batch)
    inputs = {
        "q": tensor(batch_q, rows_q, 4, 64), "k": tensor(batch_k, rows_k, 2, 64),
        "v": tensor(batch_k, rows_k, 2, 64), "out": tensor(batch_q, rows_q, 4, 64),
        "dout": tensor(batch_q, rows_q, 4, 64),
    }  # fmt: skip
    lse = memory.place_values(torch.full((batch_q, 4, rows_q), 50.0, device=DEVICE))
    outputs = {}
    for name in GRADIENTS:
        like = inputs[name[1:]].view
        outputs[name] = memory.place(like.shape, like.dtype, DEVICE)
        outputs[name].remember()
    fm.flash_attention_backward(
        **{name: x.view for name, x in (inputs | outputs).items()}, lse=lse.view, kernel=kernel,
        causal=bool(seed % 2), **tables,
    )  # fmt: skip
    for name, placed in outputs.items():
        assert placed.intact(), f"memory around {name} was written to"
        assert placed.view.isfinite().all(), name


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}], ids=["plain", "causal"])
def test_what_is_not_finite_stays_with_its_sequence(
    name: str, options: dict[str, Any], kernel: str
) -> None:
    """And with the rows and keys that see it."""
    lengths = (100, 70, 200, 33), (100, 70, 200, 33)
    clean = _made(lengths, options=options, dlse=False)
    given = _made(lengths, options=options, dlse=False)
    given.tensors[2][name][0, 120, 1, 5] = torch.nan
    for way in ways(given).values():
        made = ragged_backward.run(given, way, kernel=kernel)
        got, want = made.parts, clean.dense(ragged_backward.dense_kernel(made.kernel))
        for b in (0, 1, 3):
            for of in GRADIENTS:
                assert torch.equal(got[b][of], want[b][of])
        if options and name in ("k", "v"):
            assert got[2]["dq"][0, :120].isfinite().all()
            assert got[2]["dq"][0, 120:].isnan().any()
        if options and name in ("q", "dout"):
            assert got[2]["dk"][0, 121:].isfinite().all()
            assert got[2]["dv"][0, 121:].isfinite().all()
        if options:
            # Rows and keys that it does not reach are those of the clean call, but for the order
            # in which plain arithmetic adds.
            for of in GRADIENTS:
                seen = got[2][of].isfinite()
                torch.testing.assert_close(
                    got[2][of][seen], want[2][of][seen], atol=2e-2, rtol=2e-2
                )


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("fp32", [(), GRADIENTS], ids=["16 bits", "fp32"])
def test_what_is_not_finite_stays_there_where_gradients_are_added_to(
    name: str, fp32: tuple[str, ...], kernel: str
) -> None:
    """What it does not reach is added as if it were not there, and what it reaches is not lost."""
    lengths = (100, 0, 70, 330, 33), (100, 5, 70, 330, 0)
    options = {"causal": "bottom_right"}
    for dim in (64, 128):
        how = {"options": options, "dlse": False, "dim": dim, "dtype": "bf16"}
        clean, given = _made(lengths, **how), _made(lengths, **how)
        given.tensors[3][name][0, 120, 1, 5] = torch.nan
        for way in ways(given).values():
            got, want = (
                ragged_backward.run(x, way, kernel=kernel, fp32=fp32, added_to=3.0).parts
                for x in (given, clean)
            )
            rows = torch.arange(330, device=DEVICE)
            for b, of in itertools.product(range(5), GRADIENTS):
                mine, other = got[b][of], want[b][of]
                if b != 3:
                    assert torch.equal(mine, other), (b, of)
                    continue
                # out and lse are of the clean call: rows that see a key have NaN of it in dq, and
                # it has NaN itself; so have keys that a row sees, and the row.
                of_key = name in ("k", "v")
                if of == "dq":
                    hit = rows >= 120 if of_key else rows == 120
                else:
                    hit = rows == 120 if of_key else rows <= 120
                assert mine[0, ~hit].isfinite().all(), of
                of_heads = mine[0, hit].isnan().flatten(1).any(1)
                assert of_heads.all() or (of == "dv" and name == "v"), of
                left = mine.isfinite()
                torch.testing.assert_close(mine[left], other[left], atol=3e-2, rtol=2e-2)


def test_graph_replays_follow_the_tables(kernel: str) -> None:
    """One capture, and other lengths, also of other counts of tiles."""
    rows, heads = 3000, 4
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, rows, heads, 64, generator=generator, device=DEVICE).to(torch.bfloat16)
        for _ in range(4)
    )
    out, lse = torch.zeros_like(q), torch.zeros(1, heads, rows, device=DEVICE)
    offsets = int32([0] * 9).to(DEVICE)
    said = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "causal": True}
    made = [torch.empty_like(q) for _ in range(3)]

    def step() -> None:
        fm.flash_attention(q, k, v, out=out, lse=lse, return_lse=True, **said)
        fm.flash_attention_backward(dout, q, k, v, out, lse, kernel=kernel,
                                    **dict(zip(GRADIENTS, made, strict=True)), **said)  # fmt: skip

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for lengths in ([3000], [1, 2, 3, 4, 5, 6, 7, 8], [700, 0, 300, 1900, 0, 64], [0], [100] * 8):
        total = sum(lengths)
        filled = starts([*lengths, *[0] * (8 - len(lengths))])
        offsets.copy_(filled)
        for x in made:
            x.fill_(torch.nan)
        graph.replay()
        got = [x.clone() for x in made]
        step()
        for x, y in zip(got, made, strict=True):
            assert torch.equal(memory.bits(x), memory.bits(y))
            assert (x[:, total:] == 0).all()
            assert x.isfinite().all()


def test_what_the_workspace_held_makes_no_difference(kernel: str) -> None:
    given = _made(options={"causal": True}, sinks=True)
    way = ways(given)["rooms"]
    want = ragged_backward.run(given, way, kernel=kernel)
    for value in (0, 255, 127):
        filled = torch.full((64 << 20,), value, dtype=torch.uint8, device=DEVICE)
        del filled  # torch's allocator gives it to the call
        again = ragged_backward.run(given, way, kernel=kernel)
        ragged_backward.assert_same_bits(again, want.parts)
        assert torch.equal(again.dsinks, want.dsinks)


@pytest.mark.parametrize("sinks", [False, True])
def test_the_plan_is_the_launch(sinks: bool, kernel: str) -> None:
    given = _made(sinks=sinks)
    way = ways(given)["packed"]
    rows = {n: (way.keys if n in "kv" else way.queries).lay(given.all(n))
            for n in ("dout", "q", "k", "v", "out")}  # fmt: skip
    tables = {name: x.to(DEVICE) for name, x in way.tables.items()}
    said = {"lse": way.queries.lay(given.all("lse"), 2), "sinks": given.sinks, "kernel": kernel}
    plan = fm.attention_backward_plan(**rows, **said, **tables)
    fm.flash_attention_backward(**rows, **said, **tables)
    assert fm.last_launches() == plan.launches
    names = [launch.kernel for launch in plan.launches]
    assert len(names) == 3 + sinks
    assert names[0] == "attention_backward_tables"
    assert names[1].startswith("attention_backward_prologue_") and "_ragged" in names[1]
    assert plan.kernel.startswith(f"attention_backward_{kernel}_") and "_ragged" in plan.kernel
    assert plan.flops == 0


def test_a_workspace_is_of_the_tokens() -> None:
    """Not of sequences times the longest, nor of a tile of sums for each sequence."""
    count, length = 16384, 8
    x = torch.zeros(1, count * length, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.zeros(1, 16, count * length, device=DEVICE)
    offsets = int32(torch.arange(count + 1) * length).to(DEVICE)
    plan = fm.attention_backward_plan(x, x, x, x, x, lse, cu_seqlens_q=offsets,
                                      cu_seqlens_k=offsets)  # fmt: skip
    assert plan.workspace_bytes < 8 * x.nbytes


def test_rows_of_one_sequence_in_a_cache(kernel: str) -> None:
    """A batch of one row, and more room than the sequence has."""
    given = _made(((70,), (90,)), options={"causal": True})
    way = Way(Rows([(0, 0)], 1, 4000), Rows([(0, 9)], 1, 5000),
              {"seqused_q": int32([70]), "seqused_k": int32([99]),
               "k_begin": int32([9])})  # fmt: skip
    _check(given, way, kernel)


# ---- torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autograd(compiled: bool) -> None:
    given = _made(dtype="bf16", options={"causal": True}, dlse=False)
    want = given.dense("sm89")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: Any) -> torch.Tensor:
        return fm.flash_attention(q, k, v, causal=True, **tables)

    function = torch.compile(attend, fullgraph=True, dynamic=True) if compiled else attend
    for way in ways(given).values():
        tables = {name: x.to(DEVICE) for name, x in way.tables.items()}
        leaves = ((way.queries, "q"), (way.keys, "k"), (way.keys, "v"))
        q, k, v = (rows.lay(given.all(name)).requires_grad_() for rows, name in leaves)
        out = function(q, k, v, tables)
        out.backward(way.queries.lay(given.all("dout")))
        for x, name, rows, lengths in (
            (q, "dq", way.queries, given.lengths_q), (k, "dk", way.keys, given.lengths_k),
            (v, "dv", way.keys, given.lengths_k),
        ):  # fmt: skip
            assert x.grad is not None
            for b, part in enumerate(rows.take(x.grad, lengths)):
                torch.testing.assert_close(part, want[b][name], atol=2e-2, rtol=2e-2)
                part.zero_()
            assert (x.grad == 0).all()


def test_flash_attn_varlen_func() -> None:
    from flashmoe_science.flash_attn import flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func

    lengths = [700, 3, 64, 1, 300]
    total = sum(lengths)
    offsets = starts(lengths).to(DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    qkv = torch.randn(total, 3, 4, 128, generator=generator, device=DEVICE).to(torch.bfloat16)
    leaves = [x.clone().requires_grad_() for x in qkv.unbind(1)]
    weights = torch.randn(total, 4, 128, generator=generator, device=DEVICE).to(torch.bfloat16)
    out = flash_attn_varlen_func(*leaves, offsets, offsets, 700, 700, causal=True)
    (out * weights).sum().backward()
    packed = qkv.clone().requires_grad_()
    (flash_attn_varlen_qkvpacked_func(packed, offsets, 700, causal=True) * weights).sum().backward()
    for x, y in zip(leaves, packed.grad.unbind(1), strict=True):
        assert torch.equal(x.grad, y)
    for b, n in enumerate(lengths):
        rows = slice(int(offsets[b]), int(offsets[b]) + n)
        own = [x.detach()[rows].double().transpose(0, 1).requires_grad_() for x in leaves]
        made = torch.nn.functional.scaled_dot_product_attention(*own, is_causal=True)
        (made.transpose(0, 1) * weights[rows].double()).sum().backward()
        for x, y in zip(leaves, own, strict=True):
            torch.testing.assert_close(
                x.grad[rows].double(), y.grad.transpose(0, 1), atol=4e-2, rtol=4e-2
            )
