"""What is PaddlePaddle's own; its tensors are among the producers of the other tests."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
from flashmoe_science import _core, _dispatch
from flashmoe_science._dtypes import Device

paddle: Any = pytest.importorskip("paddle")


def arrays(count: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 9, 4, 32), np.float32) for _ in range(count)]


def test_devices_without_a_number() -> None:
    tensor = paddle.zeros([1])
    assert tensor.__dlpack_device__()[1] is None
    assert _dispatch.framework_of("q", tensor).device(tensor) == Device(1, 0)


def test_gradients_are_refused_where_they_are_recorded() -> None:
    q, k, v = (paddle.to_tensor(x) for x in arrays())
    want = fm.flash_attention(q, k, v)
    assert want.stop_gradient
    q.stop_gradient = False
    match = (
        r"^q: requires grad, but attention records gradients of torch's inputs alone; "
        r"call under paddle\.no_grad\(\) or pass q\.detach\(\)$"
    )
    with pytest.raises(ValueError, match=match):
        fm.flash_attention(q, k, v)
    with paddle.no_grad():
        assert (fm.flash_attention(q, k, v) == want).all()
    assert (fm.flash_attention(q.detach(), k, v) == want).all()


def test_parameters() -> None:
    layer = paddle.nn.Linear(32, 32)
    x = paddle.to_tensor(arrays()[0].reshape(-1, 32))
    offsets = paddle.to_tensor(np.array([0, x.shape[0]], np.int32))
    weight = layer.weight.transpose([1, 0]).unsqueeze(0)
    with pytest.raises(ValueError, match=r"^w: requires grad, but the mixture of experts"):
        fm.grouped_product(x, weight, offsets=offsets)
    with paddle.no_grad():
        parameter = paddle.create_parameter([1, 32, 32], "float32")
        assert type(parameter) is not paddle.Tensor
        out = fm.grouped_product(x, parameter, offsets=offsets)
    assert type(out) is paddle.Tensor
    np.testing.assert_allclose(
        out.numpy(), x.numpy() @ parameter[0].numpy().T, rtol=1e-4, atol=1e-5
    )


def test_frameworks_are_not_mixed() -> None:
    q, k, v = arrays()
    with pytest.raises(TypeError, match=r"^k: got numpy\.ndarray, but q is paddle\.Tensor"):
        fm.flash_attention(paddle.to_tensor(q), k, v)
    with pytest.raises(TypeError, match=r"^k: got paddle\.Tensor, but q is numpy\.ndarray"):
        fm.flash_attention(q, paddle.to_tensor(k), v)


def test_plans() -> None:
    q, k, v = arrays()
    tensors = [paddle.to_tensor(x) for x in (q, k, v)]
    assert fm.attention_plan(*tensors, causal=True) == fm.attention_plan(q, k, v, causal=True)


def test_what_is_no_output() -> None:
    tensor = paddle.zeros([2])
    _core.check_writable("out", tensor)
    with pytest.raises(TypeError, match=r"^out: got list, accepted is a tensor"):
        _core.check_writable("out", [1])
