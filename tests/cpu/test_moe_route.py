"""Routing on the CPU against NumPy: which experts, in what order, exactly; weights closely."""

from __future__ import annotations

import capi
import capi_moe
import moe_oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SCORINGS = ("softmax", "topk_softmax", "sigmoid")


def check_layout(routing: capi_moe.Routing, experts: int) -> None:
    offsets, pairs, slots = moe_oracle.sort_pairs(routing.ids, experts)
    np.testing.assert_array_equal(routing.offsets, offsets)
    np.testing.assert_array_equal(routing.pairs, pairs)
    np.testing.assert_array_equal(routing.slots, slots)


def check(logits: np.ndarray, top_k: int, **options) -> capi_moe.Routing:
    routing = capi_moe.route(logits, top_k=top_k, lse=True, **options)
    # In the C ABI 0 stands for what the option's absence means.
    defaults = {name: 1 for name in ("scale", "num_groups") if not options.get(name)}
    expected = moe_oracle.route(logits, top_k, **options | defaults)
    np.testing.assert_array_equal(routing.ids, expected.ids)
    assert routing.weights.dtype == routing.lse.dtype == capi.sums_dtype(logits.dtype)
    wide = logits.dtype == np.float64
    near, least = (1e-13, 1e-15) if wide else (3e-6, 1e-9)
    np.testing.assert_allclose(routing.weights, expected.weights, rtol=near, atol=least)
    near = 1e-14 if wide else 1e-6
    np.testing.assert_allclose(routing.lse, expected.lse, rtol=near, atol=near)
    assert (np.sort(routing.ids, axis=1)[:, 1:] > np.sort(routing.ids, axis=1)[:, :-1]).all()
    check_layout(routing, logits.shape[1])
    return routing


def coarse(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Few distinct numbers, exact in every dtype, so that there are many ties."""
    return (rng.integers(-16, 17, shape) / 4).astype(np.float32)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("renormalize", [0, 1])
@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(0, 4, 2), (1, 1, 1), (5, 7, 7), (33, 8, 2), (129, 60, 6), (300, 128, 8), (40, 1024, 32),
     (2, 33, 32), (1000, 3, 1)],
)  # fmt: skip
def test_logits(
    scoring: str, renormalize: int, dtype: str, tokens: int, experts: int, top_k: int
) -> None:
    rng = np.random.default_rng([tokens, experts])
    logits = capi.normal(rng, (tokens, experts), capi_moe.DTYPES[dtype])
    check(logits, top_k, scoring=scoring, renormalize=renormalize, scale=2.5)
    tied = coarse(rng, (tokens, experts)).astype(capi_moe.DTYPES[dtype])
    check(tied, top_k, scoring=scoring, renormalize=renormalize)


@pytest.mark.parametrize("renormalize", [0, 1])
@pytest.mark.parametrize(
    ("experts", "num_groups", "top_groups", "top_k"),
    [(256, 8, 4, 8), (16, 8, 1, 2), (16, 2, 2, 16), (60, 6, 3, 5), (1024, 512, 300, 32),
     (8, 1, 1, 3)],
)  # fmt: skip
@pytest.mark.parametrize("biased", [True, False])
def test_groups(
    experts: int, num_groups: int, top_groups: int, top_k: int, biased: bool, renormalize: int
) -> None:
    rng = np.random.default_rng(experts)
    logits = coarse(rng, (64, experts))
    bias = (rng.integers(-8, 9, experts) / 32).astype(np.float32) if biased else None
    how = {"num_groups": num_groups, "top_groups": top_groups, "scale": 2.5}
    check(logits, top_k, scoring="sigmoid", selection_bias=bias, renormalize=renormalize, **how)


def test_selection_bias_chooses_and_does_not_weigh() -> None:
    rng = np.random.default_rng(1)
    logits = coarse(rng, (50, 16))
    bias = (rng.integers(-64, 65, 16) / 32).astype(np.float32)
    routing = check(logits, 4, scoring="sigmoid", selection_bias=bias)
    unbiased = check(logits, 4, scoring="sigmoid")
    assert (routing.ids != unbiased.ids).any()


@pytest.mark.parametrize("scoring", SCORINGS)
def test_nan_and_infinity_are_routed_to_distinct_experts(scoring: str) -> None:
    nan, inf = np.nan, np.inf
    rows = [
        [nan] * 6, [-inf] * 6, [inf] * 6, [0.0, nan, 1.0, nan, -inf, 2.0],
        [-inf, nan, -inf, nan, -inf, nan], [nan, inf, 0.0, -inf, inf, nan],
        [1.0, 1.0, nan, 1.0, 1.0, 0.5],
    ]  # fmt: skip
    logits = np.array(rows, np.float32)
    for top_k in range(1, 7):
        routing = capi_moe.route(logits, top_k=top_k, scoring=scoring, lse=True)
        expected = moe_oracle.route(logits, top_k, scoring=scoring)
        np.testing.assert_array_equal(routing.ids, expected.ids)
        np.testing.assert_allclose(routing.weights, expected.weights, rtol=1e-6)
        np.testing.assert_allclose(routing.lse, expected.lse, rtol=1e-6)
        check_layout(routing, 6)


def test_nan_in_groups() -> None:
    nan, inf = np.nan, np.inf
    rows = [[nan] * 8, [nan, 9.0, 1.0, 1.0, nan, nan, 0.0, nan], [-inf] * 8, [nan] * 6 + [0.0, 0.0]]
    logits = np.array(rows, np.float32)
    for top_groups, top_k in ((1, 2), (2, 3), (3, 6), (4, 8)):
        how = {"scoring": "sigmoid", "num_groups": 4, "top_groups": top_groups}
        routing = capi_moe.route(logits, top_k=top_k, **how)
        np.testing.assert_array_equal(routing.ids, moe_oracle.route(logits, top_k, **how).ids)
        check_layout(routing, 8)


def test_a_group_whose_sum_is_no_number_comes_last() -> None:
    logits = np.zeros((1, 6), np.float32)
    for opposite in range(3):  # the group that has both infinities
        bias = np.zeros(6, np.float32)
        bias[2 * opposite : 2 * opposite + 2] = np.inf, -np.inf
        how = {"scoring": "sigmoid", "selection_bias": bias, "num_groups": 3, "top_groups": 2}
        chosen = capi_moe.route(logits, top_k=4, **how).ids
        assert not {2 * opposite, 2 * opposite + 1} & set(chosen[0].tolist())


def test_lse_of_large_logits() -> None:
    rng = np.random.default_rng(9)
    near = rng.standard_normal((4, 12)).astype(np.float32)
    check(near + np.array([[90], [-110], [3e4], [-3e4]], np.float32), 3)


@pytest.mark.parametrize("renormalize", [0, 1])
def test_weights_whose_sum_is_zero(renormalize: int) -> None:
    """Too small for fp32, they stay 0."""
    logits = np.full((3, 8), -200, np.float32)
    made = capi_moe.route(logits, top_k=2, scoring="sigmoid", renormalize=renormalize)
    assert (made.weights == 0).all()
    ids, weights = np.array([[0, 1], [2, 3]], np.int32), np.array([[0, 0], [1, -1]], np.float32)
    given = {"given_ids": ids, "given_weights": weights, "experts": 4, "top_k": 2}
    np.testing.assert_array_equal(capi_moe.route(**given, renormalize=renormalize).weights, weights)


def test_logits_with_gaps_between_rows() -> None:
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((20, 40)).astype(np.float32)
    np.testing.assert_array_equal(
        check(wide[::-2, 8:24], 3).ids, check(wide[::-2, 8:24].copy(), 3).ids
    )


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize("renormalize", [0, 1])
def test_given(index: type, dtype: str, renormalize: int) -> None:
    rng = np.random.default_rng(5)
    ids = rng.integers(-3, 12, (77, 10)).astype(index)[:, 2:7]  # experts twice, and not mine
    weights = rng.random((77, 5)).astype(capi_moe.DTYPES[dtype])
    options = {"renormalize": renormalize, "scale": 0.5}
    routing = capi_moe.route(given_ids=ids, experts=9, top_k=5, given_weights=weights, **options)
    expected = moe_oracle.route_given(ids, weights, num_experts=9, **options)
    np.testing.assert_array_equal(routing.ids, expected.ids)
    np.testing.assert_allclose(routing.weights, expected.weights, rtol=1e-6)
    check_layout(routing, 9)


def test_given_ids_alone_weigh_one() -> None:
    ids = np.array([[3, 0], [1, 4]], np.int32)
    routing = capi_moe.route(given_ids=ids, experts=4, top_k=2)
    np.testing.assert_array_equal(routing.weights, [[1, 1], [1, 0]])
    np.testing.assert_array_equal(routing.ids, [[3, 0], [1, -1]])


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_expert_map(index: type) -> None:
    ids = np.array([[0, 1, 2, 3, 4, 5, 6], [-1, 7, -(2**31), 2**31 - 1, 6, 0, 0]], index)
    if index is np.int64:
        ids[1, 2:4] = -(2**63), 2**63 - 1
    mapped = np.array([2, -1, 0, 3, 99, -7, 1], np.int32)
    routing = capi_moe.route(given_ids=ids, experts=3, top_k=7, expert_map=mapped)
    expected = [[2, -1, 0, -1, -1, -1, 1], [-1, -1, -1, -1, 1, 2, 2]]
    np.testing.assert_array_equal(routing.ids, expected)
    np.testing.assert_array_equal(routing.weights, (np.array(expected) >= 0).astype(np.float32))
    check_layout(routing, 3)
    empty = capi_moe.route(given_ids=ids, experts=3, top_k=7, expert_map=mapped[:0])
    assert (empty.ids == -1).all() and (empty.pairs == -1).all() and (empty.offsets == 0).all()


def test_threads_change_nothing() -> None:
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((3000, 64)).astype(np.float32)
    lib = capi.load()
    made = []
    try:
        for threads in (1, 2, 5):
            capi.check(lib.flashmoe_set_num_threads(threads), lib)
            made.append(capi_moe.route(logits, top_k=6, lse=True))
    finally:
        capi.check(lib.flashmoe_set_num_threads(0), lib)
    for other in made[1:]:
        for name, array in made[0].arrays().items():
            np.testing.assert_array_equal(array, getattr(other, name))


def test_no_tokens_without_data() -> None:
    """Logits of no token are logits where their memory has no address, and tell E."""

    def run(experts: int, top_k: int) -> capi_moe.Routing:
        nothing = capi.tensor(np.empty((0, 4), np.float32))
        nothing.data = None
        routing = capi_moe.Routing.poisoned(0, experts, top_k, lse=True)
        capi_moe.run(capi_moe.make_params(capi_moe.RouteParams, logits=nothing, **routing.arrays()))
        return routing

    assert (run(4, 2).offsets == 0).all()
    with pytest.raises(capi.FlashmoeError, match=r"offsets: .* is 6, but logits has 5"):
        run(5, 2)
    with pytest.raises(capi.FlashmoeError, match=r"ids: got 5 .* at most the 4 of logits"):
        run(4, 5)


@settings(max_examples=60)
@given(st.data())
def test_any_problem(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 70))
    top_k = data.draw(st.integers(1, min(experts, 32)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    options = {
        "scoring": data.draw(st.sampled_from(SCORINGS)),
        "renormalize": data.draw(st.integers(0, 1)),
        "scale": data.draw(st.sampled_from([0.0, 2.5, -1.0])),
    }
    if options["scoring"] == "sigmoid":
        if data.draw(st.booleans()):
            options["selection_bias"] = (rng.integers(-32, 33, experts) / 16).astype(np.float32)
        counts = [g for g in range(2, experts // 2 + 1) if experts % g == 0]
        if counts and data.draw(st.booleans()):
            groups = data.draw(st.sampled_from(counts))
            least = -(-top_k // (experts // groups))
            options |= {"num_groups": groups, "top_groups": data.draw(st.integers(least, groups))}
    shape = data.draw(st.integers(0, 200)), experts
    if "num_groups" not in options:
        check(coarse(rng, shape), top_k, **options)
        return
    # Sums of different twos that are equal in float64 need not be in fp32, so none may be near.
    logits = rng.standard_normal(shape, np.float32)
    if "selection_bias" in options:
        options["selection_bias"] = rng.standard_normal(experts, np.float32)
    clear = [moe_oracle.closest_choices(row[None], **options) > 3e-6 for row in logits]
    check(logits[np.array(clear, bool)], top_k, **options)
