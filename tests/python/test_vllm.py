"""The plugin for vLLM against vLLM's own interface classes: its registry has the backend, and
layers over pages give what a dense call gives of each request alone.

vLLM's wheel need not be installed: its Python files on the path are enough, as docs/vllm.md says.
"""

from __future__ import annotations

import importlib.metadata
import sys
import types
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
interface = pytest.importorskip("vllm.v1.attention.backend", exc_type=ImportError)
registry = pytest.importorskip("vllm.v1.attention.backends.registry", exc_type=ImportError)

import flashmoe_science as fm  # noqa: E402
import flashmoe_science.vllm  # noqa: E402

HEADS, HEADS_KV, DIM, BLOCK = 4, 2, 16, 8
KEYS, NEW = (21, 5, 40, 1), (1, 5, 7, 1)  # decoding, a prompt, a chunk of one, a prompt of one
DEVICES = pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)],
)


def normal(*shape: int, seed: int, like: Any) -> Any:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(like[0], like[1])


@pytest.fixture
def backend() -> Any:
    flashmoe_science.vllm.register()
    flashmoe_science.vllm.register()  # vLLM may load a plugin again
    return registry.AttentionBackendEnum.CUSTOM.get_class()


def test_the_plugin_is_found_by_vllm(backend: Any) -> None:
    [found] = [
        point for point in importlib.metadata.entry_points(group="vllm.general_plugins")
        if point.name == "flashmoe"
    ]  # fmt: skip
    assert found.load() is flashmoe_science.vllm.register
    assert issubclass(backend, interface.AttentionBackend)
    assert registry.AttentionBackendEnum[backend.get_name()].get_class() is backend


def test_vllm_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function that all of its processes begin with."""
    plugins = pytest.importorskip("vllm.plugins", exc_type=ImportError)
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    registry.AttentionBackendEnum.CUSTOM.clear_override()
    plugins.load_general_plugins()
    assert registry.AttentionBackendEnum.CUSTOM.get_class().get_impl_cls()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_where_vllm_lays_a_cache(
    layout: str, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = types.ModuleType("utils")  # vLLM's own imports the whole of it
    utils.get_kv_cache_layout = lambda: layout  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.utils", utils)
    order = backend.get_kv_cache_stride_order()
    shape = backend.get_kv_cache_shape(10, BLOCK, HEADS_KV, DIM)
    memory = {"NHD": (10, 2, BLOCK, HEADS_KV, DIM), "HND": (10, 2, HEADS_KV, BLOCK, DIM)}
    assert tuple(shape[i] for i in order) == memory[layout]
    with_layers = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    assert sorted(with_layers) == list(range(6))


def test_another_plugins_backend_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "vllm.v1.attention.backend.AttentionBackend"
    monkeypatch.setitem(registry._ATTN_OVERRIDES, registry.AttentionBackendEnum.CUSTOM, path)
    flashmoe_science.vllm.register()
    assert registry.AttentionBackendEnum.CUSTOM.get_class() is interface.AttentionBackend


class Capability(NamedTuple):
    major: int
    minor: int


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, []),
        ({"has_sink": True, "use_non_causal": True}, []),
        ({"use_batch_invariant": True}, ["batch invariance not supported"]),
        ({"dtype": torch.float32}, ["dtype not supported"]),
        ({"kv_cache_dtype": "bfloat16"}, []),
        (
            {"kv_cache_dtype": "float16"},
            ["kv_cache_dtype float16 not supported for a model in bfloat16: give auto"],
        ),
        ({"block_size": 1}, []),
        ({"attn_type": "encoder_only"}, []),
        ({"head_size": 80}, []),
        ({"head_size": 100}, ["head_size not supported"]),
        ({"kv_cache_dtype": "fp8"}, ["kv_cache_dtype not supported"]),
        ({"use_mla": True}, ["MLA not supported"]),
        ({"device_capability": Capability(8, 0)}, ["compute capability not supported"]),
        ({"attn_type": "encoder_decoder"}, ["attention type encoder_decoder not supported"]),
    ],
    ids=str,
)
def test_what_vllm_is_told(given: dict[str, Any], reason: list[str], backend: Any) -> None:
    asked = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
        "use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": Capability(9, 0),
        "attn_type": "decoder",
    }  # fmt: skip
    assert backend.validate_configuration(**asked | given) == reason


def batch(device: str, *, padding: int = 0) -> tuple[Any, Any]:
    """vLLM's metadata of a mixed batch over shuffled blocks, and the block table."""
    each = -(-max(KEYS) // BLOCK)
    table = torch.randperm(len(KEYS) * each, generator=torch.Generator().manual_seed(5))
    table = table.view(len(KEYS), each).int()
    slots = [
        int(table[r, at // BLOCK]) * BLOCK + at % BLOCK
        for r, (keys, new) in enumerate(zip(KEYS, NEW, strict=True))
        for at in range(keys - new, keys)
    ]
    starts = torch.tensor([0, *torch.tensor(NEW).cumsum(0).tolist()], dtype=torch.int32)
    common = interface.CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(KEYS, dtype=torch.int32, device=device),
        num_reqs=len(KEYS),
        num_actual_tokens=sum(NEW),
        max_query_len=max(NEW),
        max_seq_len=max(KEYS),
        block_table_tensor=table.to(device),
        slot_mapping=torch.tensor(slots + [-1] * padding, device=device),
    )
    return common, table


@DEVICES
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, {}),
        ({"sliding_window": 6}, {"window": (5, None)}),
        ({"logits_soft_cap": 3.0}, {"softcap": 3.0}),
        ({"sinks": True}, {}),
    ],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_a_layer_of_a_mixed_batch(
    given: dict[str, Any], meant: dict[str, Any], heads_first: bool, device: str, dtype: Any,
    backend: Any,
) -> None:  # fmt: skip
    like, padding = (device, dtype), 3
    common, table = batch(device, padding=padding)
    metadata = backend.get_builder_cls()(None, ["layer"], None, device).build(0, common)
    shape = backend.get_kv_cache_shape(table.numel(), BLOCK, HEADS_KV, DIM)
    cache = torch.full(shape, torch.nan, device=device, dtype=dtype)
    if heads_first:  # vLLM's layout HND: the same shape, heads before the rows of a block
        cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
    if given.get("sinks"):
        given = {"sinks": normal(HEADS, seed=9, like=like)}
        meant = {"sinks": given["sinks"]}
    layer = backend.get_impl_cls()(HEADS, DIM, 0.3, HEADS_KV, **given)

    dense = [
        (normal(1, keys, HEADS_KV, DIM, seed=r, like=like),
         normal(1, keys, HEADS_KV, DIM, seed=r + 10, like=like))
        for r, keys in enumerate(KEYS)
    ]  # fmt: skip
    for r, (k, v) in enumerate(dense):  # what earlier steps have written
        for at in range(KEYS[r] - NEW[r]):
            block = int(table[r, at // BLOCK])
            cache[block, 0, at % BLOCK], cache[block, 1, at % BLOCK] = k[0, at], v[0, at]
    q = normal(sum(NEW) + padding, HEADS, DIM, seed=20, like=like)
    k, v = (torch.cat([x[i][0, -new:] for x, new in zip(dense, NEW, strict=True)]) for i in (0, 1))
    k, v = (torch.cat([x, torch.full_like(x[:padding], torch.nan)]) for x in (k, v))
    layer.do_kv_cache_update(None, k, v, cache, metadata.slot_mapping)
    output = torch.full_like(q, 7)
    assert layer.forward(None, q, k, v, cache, metadata, output) is output
    family = "cpu" if device == "cpu" else "sm"
    assert fm.last_launches()[0].kernel.startswith(f"attention_forward_{family}")
    assert bool((output[sum(NEW) :] == 7).all())  # of padding nothing is written
    begin = 0
    for (k, v), new in zip(dense, NEW, strict=True):
        want = fm.flash_attention(
            q[None, begin : begin + new], k, v, causal=True, scale=0.3, **meant
        )
        exact = {"atol": 1e-5, "rtol": 1e-5} if device == "cpu" else {"atol": 2e-2, "rtol": 2e-2}
        torch.testing.assert_close(output[begin : begin + new], want[0], **exact)
        begin += new


@DEVICES
def test_an_encoder_has_no_cache(device: str, dtype: Any, backend: Any) -> None:
    like = (device, dtype)
    common, _ = batch(device)
    metadata = backend.get_builder_cls()(None, ["layer"], None, device).build(0, common)
    layer = backend.get_impl_cls()(HEADS, DIM, 0.3, HEADS, attn_type="encoder_only")
    q, k, v = (normal(sum(NEW), HEADS, DIM, seed=seed, like=like) for seed in (1, 2, 3))
    layer.do_kv_cache_update(None, k, v, torch.empty(0), metadata.slot_mapping)
    output = torch.empty_like(q)
    layer.forward(None, q, k, v, torch.empty(0), metadata, output)
    for begin, end in zip(common.query_start_loc_cpu, common.query_start_loc_cpu[1:], strict=False):
        want = fm.flash_attention(*(x[None, begin:end] for x in (q, k, v)), scale=0.3)
        torch.testing.assert_close(output[begin:end], want[0], atol=1e-2, rtol=1e-2)


def test_a_table_is_exchanged_and_a_profiling_run_reads_nothing(backend: Any) -> None:
    common, table = batch("cpu")
    builder = backend.get_builder_cls()(None, ["layer"], None, "cpu")
    metadata = builder.build(0, common)
    slots = torch.zeros(3, dtype=torch.int64)
    metadata.make_virtual_batches_block_table = len  # as vLLM does for chunked local attention
    other = builder.update_block_table(metadata, table + 1, slots)
    assert other.block_table is not metadata.block_table and other.slot_mapping is slots
    assert other.seq_lens is metadata.seq_lens
    assert other.make_virtual_batches_block_table is len
    layer = backend.get_impl_cls()(HEADS, DIM, 0.3, HEADS_KV)
    q, output = torch.randn(3, HEADS, DIM), torch.ones(3, HEADS, DIM)
    assert not layer.forward(None, q, q, q, torch.empty(0), None, output).any()


@pytest.mark.parametrize(
    ("given", "name"),
    [({"alibi_slopes": [1.0] * HEADS}, "alibi_slopes"), ({"kv_cache_dtype": "fp8"}, "kv_cache_dt"),
     ({"attn_type": "encoder_decoder"}, "attn_type")],
)  # fmt: skip
def test_what_is_not_there_is_refused(given: dict[str, Any], name: str, backend: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"^{name}"):
        backend.get_impl_cls()(HEADS, DIM, 0.3, HEADS_KV, **given)


def test_a_window_of_a_decoder_that_is_not_causal_is_refused(backend: Any) -> None:
    common, table = batch("cpu")
    common.causal = False
    metadata = backend.get_builder_cls()(None, ["layer"], None, "cpu").build(0, common)
    cache = torch.zeros(backend.get_kv_cache_shape(table.numel(), BLOCK, HEADS_KV, DIM))
    q = torch.randn(sum(NEW), HEADS, DIM)
    given = (None, q, q, q, cache, metadata, torch.empty_like(q))
    backend.get_impl_cls()(HEADS, DIM, 0.3, HEADS_KV).forward(*given)
    windowed = backend.get_impl_cls()(HEADS, DIM, 0.3, HEADS_KV, sliding_window=6)
    with pytest.raises(NotImplementedError, match=r"^sliding_window: .* not causal"):
        windowed.forward(*given)


@pytest.mark.gpu
def test_one_graph_serves_other_lengths(backend: Any) -> None:
    """As vLLM captures it: the tensors of the metadata stay, their numbers change."""
    like = ("cuda", torch.bfloat16)
    common, table = batch("cuda")
    metadata = backend.get_builder_cls()(None, ["layer"], None, "cuda").build(0, common)
    cache = normal(table.numel(), 2, BLOCK, HEADS_KV, DIM, seed=1, like=like)
    layer = backend.get_impl_cls()(HEADS, DIM, 0.3, HEADS_KV)
    q, k, v = (
        normal(sum(NEW), heads, DIM, seed=seed, like=like)
        for seed, heads in ((2, HEADS), (3, HEADS_KV), (4, HEADS_KV))
    )
    output = torch.empty_like(q)

    def step() -> None:
        layer.do_kv_cache_update(None, k, v, cache, metadata.slot_mapping)
        layer.forward(None, q, k, v, cache, metadata, output)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    metadata.seq_lens.copy_(torch.tensor([8, 5, 12, 1]))
    metadata.slot_mapping.copy_(metadata.slot_mapping.flip(0))
    graph.replay()
    replayed = output.clone()
    output.zero_()
    step()
    assert torch.equal(replayed, output)
