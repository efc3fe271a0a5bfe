"""Keys and values of fp8 (e4m3), with scales or without: beside the same numbers of q's dtype, bit
for bit, and beside float64; in every framework, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest

torch = pytest.importorskip("torch")

FP8 = torch.float8_e4m3fn
NAN_CODES = (0x7F, 0xFF)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LENGTHS = (300, 0, 17, 64)
HEADS = (4, 2)  # of q and of k


def as_codes(tensor: Any) -> Any:
    return tensor.view(torch.uint8)


class Paged:
    """Sequences whose keys are in pages; what no sequence has holds NaN, in scales, too."""

    def __init__(self, size: int, queries: int, dim: int, dim_v: int, dtype: Any, seed: int = 0):
        torch.manual_seed(seed)
        needed = [-(-n // size) for n in LENGTHS]
        pages = sum(needed) + 3
        heads_q, heads = HEADS
        self.q = torch.randn(len(LENGTHS), queries, heads_q, dim).to(dtype)
        self.k = torch.randn(pages, size, heads, dim).to(FP8)
        self.v = torch.randn(pages, size, heads, dim_v).to(FP8)
        order = torch.randperm(pages).int()
        self.table = torch.full((len(LENGTHS), max(needed) + 1), 1 << 30, dtype=torch.int32)
        for b, (count, n) in enumerate(zip(needed, LENGTHS, strict=True)):
            self.table[b, :count], order = order[:count], order[count:]
            if n % size:
                for tensor, code in zip((self.k, self.v), NAN_CODES, strict=True):
                    as_codes(tensor)[int(self.table[b, n // size]), n % size :] = code
        self.free = order.long()
        for tensor, code in zip((self.k, self.v), NAN_CODES, strict=True):
            as_codes(tensor)[self.free] = code
        self.tables = {
            "page_table": self.table, "seqused_k": torch.tensor(LENGTHS, dtype=torch.int32)
        }  # fmt: skip

    def scales(self, low: float = 0.3) -> tuple[Any, Any]:
        """One of each page and head."""
        made = [torch.rand(self.k.shape[0], HEADS[1]) + low for _ in range(2)]
        for each in made:
            each[self.free] = torch.nan
        return made[0], made[1] * 0.05

    def widened(self, k_scale: Any = None, v_scale: Any = None) -> tuple[Any, Any]:
        """In q's dtype, multiplied by scales in fp32."""
        dtype = self.q.dtype
        made = []
        for tensor, scale in ((self.k, k_scale), (self.v, v_scale)):
            numbers = tensor.float()
            if scale is not None:
                numbers = numbers * scale.expand(tensor.shape[0], HEADS[1])[:, None, :, None]
            made.append(numbers.to(dtype))
        return made[0], made[1]


def exact(batch: Paged, k_scale: Any, v_scale: Any) -> tuple[Any, Any]:
    """out and lse in float64, causal from the last key back."""
    heads_q, heads = HEADS
    group = heads_q // heads
    q = batch.q.double()
    out = torch.zeros(*q.shape[:3], batch.v.shape[3], dtype=torch.float64)
    lse = torch.full((q.shape[0], heads_q, q.shape[1]), -torch.inf, dtype=torch.float64)
    size = batch.k.shape[1]
    for b, n in enumerate(LENGTHS):
        pages = batch.table[b, : -(-n // size)].long()
        keys, values = (
            (x[pages].double() * s[pages].double()[:, None, :, None]).flatten(0, 1)[:n]
            for x, s in ((batch.k, k_scale), (batch.v, v_scale))
        )
        for h, i in itertools.product(range(heads_q), range(q.shape[1])):
            seen = n - q.shape[1] + i + 1
            if seen <= 0:
                continue
            logits = keys[:seen, h // group] @ q[b, i, h] / q.shape[3] ** 0.5
            out[b, i, h] = logits.softmax(0) @ values[:seen, h // group]
            lse[b, h, i] = logits.logsumexp(0)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_widened_exactly(dtype: str) -> None:
    """A key of weight 1 gives its value: all 254 codes that are numbers, and NaN of the others."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    v = codes.view(256, 1, 1, 1).expand(256, 1, 1, 16).contiguous().view(FP8)
    k = torch.zeros_like(v)
    q = torch.ones(256, 1, 1, 16, dtype=DTYPES[dtype])
    out = fm.flash_attention(q, k, v)[:, 0, 0, 0].float()
    want = v[:, 0, 0, 0].float()
    assert out.isnan().nonzero().flatten().tolist() == [*NAN_CODES]
    numbers = ~want.isnan()
    assert torch.equal(out[numbers], want[numbers]) and want[numbers].abs().max() == 448
    # And as keys: lse of one key is its logit.
    _, lse = fm.flash_attention(q, v, k, scale=1.0, return_lse=True)
    assert torch.equal(lse.flatten()[numbers], 16 * want[numbers])
    assert lse.flatten()[~numbers].isnan().all()


@pytest.mark.parametrize(("dim", "dim_v"), [(16, 16), (80, 48), (128, 128)])
@pytest.mark.parametrize(("size", "queries"), [(1, 1), (16, 1), (16, 5), (48, 70)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_widened_cache(
    dtype: str, size: int, queries: int, dim: int, dim_v: int
) -> None:
    """Without scales and with any: those of a call of q's dtype with the same."""
    batch = Paged(size, queries, dim, dim_v, DTYPES[dtype])
    options = {"causal": True, "return_lse": True, **batch.tables}
    for k_scale, v_scale in ((None, None), batch.scales()):
        scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
        got = fm.flash_attention(batch.q, batch.k, batch.v, **scales, **options)
        want = fm.flash_attention(batch.q, *batch.widened(), **scales, **options)
        assert not got[0].isnan().any()
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("queries", [1, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_of_two_are_as_good_as_multiplied(dtype: str, queries: int) -> None:
    batch = Paged(16, queries, 64, 64, DTYPES[dtype])
    scale = torch.exp2(torch.randint(-3, 4, (batch.k.shape[0], HEADS[1])).float())
    options = {"causal": True, "return_lse": True, **batch.tables}
    got = fm.flash_attention(
        batch.q, batch.k, batch.v, k_scale=scale, v_scale=scale, **options
    )  # fmt: skip
    want = fm.flash_attention(batch.q, *batch.widened(scale, scale), **options)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize(("size", "queries"), [(1, 1), (16, 1), (16, 70)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_scale_beside_float64(dtype: str, size: int, queries: int) -> None:
    batch = Paged(size, queries, 64, 48, DTYPES[dtype])
    k_scale, v_scale = batch.scales()
    out, lse = fm.flash_attention(
        batch.q, batch.k, batch.v, k_scale=k_scale, v_scale=v_scale, causal=True, return_lse=True,
        **batch.tables,
    )  # fmt: skip
    want, sums = exact(batch, k_scale, v_scale)
    # A cache that is multiplied before is rounded once more.
    near = fm.flash_attention(
        batch.q, *batch.widened(k_scale, v_scale), causal=True, **batch.tables
    )
    allowed = 2 * (near.double() - want).abs().max() + 1e-6
    assert (out.double() - want).abs().max() <= allowed
    seen = sums.isfinite()
    assert (lse.double() - sums)[seen].abs().max() < 1e-3
    assert (lse[~seen] == -torch.inf).all()


def test_bits_do_not_depend_on_the_shape_of_scales() -> None:
    batch = Paged(16, 3, 64, 64, torch.bfloat16)
    pages, heads = batch.k.shape[0], HEADS[1]
    call = {"causal": True, **batch.tables}
    one, each = torch.tensor(0.37), torch.tensor([0.61, 1.7])
    alike = {
        "one": [one, one.view(1), one.view(1, 1), one.expand(heads), one.expand(pages, heads)],
        "each": [each, each.view(1, heads), each.expand(pages, heads).contiguous(),
                 torch.stack([each, each + 1], 1)[:, 0]],
        "pages": [batch.scales()[0][:, :1], batch.scales()[0][:, :1]],
    }  # fmt: skip
    alike["pages"][1] = alike["pages"][0].expand(pages, heads)
    for shapes in alike.values():
        outs = [
            fm.flash_attention(batch.q, batch.k, batch.v, k_scale=s, v_scale=s, **call)
            for s in shapes
        ]
        assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("way", ["dense", "batch_index", "cu_seqlens_k"])
@pytest.mark.parametrize("queries", [1, 60])
def test_keys_in_rows(way: str, queries: int) -> None:
    """Scales of rows of the batch; a NaN scale of one that no sequence has."""
    torch.manual_seed(0)
    int32 = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    q = torch.randn(3, queries, *HEADS[:1], 32).bfloat16()
    k, v = (torch.randn(4, 90, HEADS[1], 32).to(FP8) for _ in range(2))
    scale = torch.exp2(torch.randint(-2, 3, (4, HEADS[1])).float())
    tables: dict[str, Any] = {}
    if way == "dense":
        k, v, scale = k[:3], v[:3], scale[:3]
    elif way == "batch_index":
        scale[2] = torch.nan
        tables = {"batch_index": int32(3, 0, 1), "seqused_k": int32(90, 3, 0)}
    else:
        k, v, scale = k[:1], v[:1], scale[:1]
        tables = {"cu_seqlens_k": int32(0, 50, 50, 90)}
    wide = [(x.float() * scale[:, None, :, None]).nan_to_num(0).bfloat16() for x in (k, v)]
    got = fm.flash_attention(q, k, v, k_scale=scale, v_scale=scale, window=(40, 0), **tables)
    assert torch.equal(got, fm.flash_attention(q, *wide, window=(40, 0), **tables))


@pytest.mark.parametrize("queries", [4, 80])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_nan_scale_reaches_the_rows_that_see_its_page_alone(name: str, queries: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, queries, 2, 32).bfloat16()
    k, v = (torch.randn(12, 16, 1, 32).to(FP8) for _ in range(2))
    scale = torch.ones(12, 1)
    scale[11] = torch.nan
    tables = {
        "page_table": torch.arange(12, dtype=torch.int32)[None],
        "seqused_k": torch.tensor([177], dtype=torch.int32),
    }  # of the last page one key, which the last query alone sees
    out = fm.flash_attention(q, k, v, causal=True, **{name: scale}, **tables)
    assert out[:, -1].isnan().all() and not out[:, :-1].isnan().any()


def test_hidden_pages_have_no_scale() -> None:
    batch = Paged(16, 2, 32, 32, torch.bfloat16)
    table = batch.table.clone()
    table[0, 3], table[3, 0] = -1, 10**6
    tables = batch.tables | {"page_table": table}
    scale = batch.scales()[0].nan_to_num(1)
    got = fm.flash_attention(batch.q, batch.k, batch.v, k_scale=scale, v_scale=scale, **tables)
    want = fm.flash_attention(batch.q, *batch.widened(), k_scale=scale, v_scale=scale, **tables)
    assert torch.equal(got, want) and not got.isnan().any()


def _numpy(tensor: Any) -> Any:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    if tensor.dtype == FP8:
        return as_codes(tensor).numpy().view(ml_dtypes.float8_e4m3fn)
    return np.asarray(tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy())


@pytest.mark.parametrize("framework", ["numpy", "jax", "jit"])
def test_other_frameworks(framework: str) -> None:
    batch = Paged(16, 2, 32, 32, torch.float32)
    k_scale, v_scale = batch.scales()
    want = fm.flash_attention(
        batch.q, batch.k, batch.v, k_scale=k_scale, v_scale=v_scale, causal=True, **batch.tables
    )
    given = [_numpy(x) for x in (batch.q, batch.k, batch.v, k_scale, v_scale)]
    tables = {name: _numpy(x) for name, x in batch.tables.items()}

    def call(q: Any, k: Any, v: Any, k_scale: Any, v_scale: Any, tables: Any) -> Any:
        return fm.flash_attention(q, k, v, k_scale=k_scale, v_scale=v_scale, causal=True, **tables)

    jax = None if framework == "numpy" else pytest.importorskip("jax")
    if jax is not None:
        given = [jax.numpy.asarray(x) for x in given]
        tables = {name: jax.numpy.asarray(x) for name, x in tables.items()}
    compiled: Any = jax.jit(call) if jax is not None and framework == "jit" else call
    got = np.asarray(compiled(*given, tables))
    np.testing.assert_array_equal(got[[0, 2, 3]], want.numpy()[[0, 2, 3]])


def test_in_a_graph_of_torch() -> None:
    batch = Paged(16, 2, 32, 32, torch.bfloat16)
    scales = batch.scales()

    def call(q: Any, k: Any, v: Any, k_scale: Any, v_scale: Any) -> Any:
        return fm.flash_attention(q, k, v, k_scale=k_scale, v_scale=v_scale, **batch.tables)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    tensors = (batch.q, batch.k, batch.v, *scales)
    assert torch.equal(compiled(*tensors), call(*tensors))


def _call(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "q": torch.ones(2, 3, 4, 16).bfloat16(), "k": torch.ones(2, 5, 2, 16).to(FP8),
        "v": torch.ones(2, 5, 2, 16).to(FP8),
    }  # fmt: skip
    return fm.flash_attention(**(given | changes))


WIDE = torch.ones(2, 5, 2, 16)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "v of 16 bits": ({"v": WIDE.bfloat16()}, TypeError, "v: got dtype bf16, accepted is fp8_e4m3"),
    "k of 16 bits": ({"k": WIDE.bfloat16()}, TypeError, "v: got dtype fp8_e4m3, accepted is bf16"),
    "q": ({"q": torch.ones(2, 3, 4, 16).to(FP8)}, TypeError, "q: got dtype fp8_e4m3, accepted are"),
    "fp64": (
        {"q": torch.ones(2, 3, 4, 16).double()}, TypeError,
        "k: got dtype fp8_e4m3, accepted is fp64 as q's",
    ),
    "scale of fp64": (
        {"q": torch.ones(2, 3, 4, 16).double(), "k": WIDE.double(), "v": WIDE.double(),
         "v_scale": torch.ones(1)},
        NotImplementedError, "v_scale: got one and a q of fp64",
    ),
    "another fp8": (
        {"k": WIDE.to(torch.float8_e5m2), "v": WIDE.to(torch.float8_e5m2)}, TypeError,
        "k: got dtype float8_e5m2 (code 12, 8 bits, 1 lanes), accepted are bf16 as q",
    ),
    "rows": (
        {"k": torch.ones(2, 5, 2, 24).to(FP8)[..., :16]}, ValueError,
        "k: dimension 2 has stride 24 elements, accepted are multiples of 16",
    ),
    "dtype of a scale": (
        {"k_scale": torch.ones(1).half()}, TypeError, "k_scale: got dtype fp16, accepted is fp32"
    ),
    "heads of a scale": (
        {"k_scale": torch.ones(4)}, ValueError,
        "k_scale: got shape [4], accepted are [], [1 or 2] and [1 or 2, 1 or 2]",
    ),
    "rows of a scale": ({"v_scale": torch.ones(3, 2)}, ValueError, "v_scale: got shape [3, 2]"),
    "rank of a scale": ({"v_scale": torch.ones(1, 1, 1)}, ValueError, "v_scale: got 3 dimensions"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, kind, sentence = REFUSED[name]
    with pytest.raises(kind) as raised:
        _call(**changes)
    assert str(raised.value).startswith(sentence)


def test_no_gradients() -> None:
    q = torch.ones(2, 3, 4, 16).bfloat16().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^q: requires grad, .*of 8 bits"):
        _call(q=q)
    with pytest.raises(NotImplementedError, match=r"^q: requires grad, .*k_scale: got one"):
        _call(q=q, k=WIDE.bfloat16(), v=WIDE.bfloat16(), k_scale=torch.ones(1))
    with torch.no_grad():
        assert _call(q=q).shape == q.shape


def test_autocast_leaves_them() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = _call(q=torch.ones(2, 3, 4, 16))
    assert out.dtype == torch.bfloat16 and (out == 1).all()


def test_a_plan_says_so() -> None:
    plan = fm.attention_plan(
        torch.ones(2, 3, 4, 16).bfloat16(), torch.ones(2, 5, 2, 16).to(FP8),
        torch.ones(2, 5, 2, 16).to(FP8), k_scale=torch.ones(2, 2),
    )  # fmt: skip
    assert (plan.operation, plan.family) == ("attention_forward", "cpu")
    assert plan.bytes == 2 * (2 * 3 * 4 * 16) * 2 + 2 * (2 * 5 * 2 * 16) + 4 * 4
