"""MLX's arrays on the CPU: refused where their rows begin at odd addresses, never copied."""

from __future__ import annotations

import re
from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest

mx: Any = pytest.importorskip("mlx.core")


@pytest.mark.parametrize("seq", [1, 16, 1000])
def test_refused_by_its_address(seq: int) -> None:
    values = np.random.default_rng(0).standard_normal((1, seq, 2, 16), dtype=np.float32)
    x = mx.array(values)
    mx.eval(x)
    sentence = r"q: its data begins at address 0x\w+, which is not a multiple of 16 bytes"
    with pytest.raises(fm.InvalidArgumentError) as caught:
        fm.flash_attention(x, x, x, out=np.empty_like(values))
    assert re.fullmatch(sentence, str(caught.value))


def test_by_way_of_numpy() -> None:
    """Which makes the copy that we do not."""
    values = np.random.default_rng(0).standard_normal((1, 33, 2, 16), dtype=np.float32)
    x = np.array(mx.array(values))
    np.testing.assert_array_equal(
        fm.flash_attention(x, x, x), fm.flash_attention(values, values, values)
    )
