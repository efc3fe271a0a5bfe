"""Whether torch.compile traces a call. It cannot look into native code: in its graphs calls are the
operators of flashmoe_science.torch."""

from __future__ import annotations

import sys
from typing import Any


def is_traced() -> bool:
    """Imports nothing: who traces has imported torch, which another thread may be about to do."""
    try:
        return sys.modules["torch.compiler"].is_dynamo_compiling()  # type: ignore[no-any-return]
    except (KeyError, AttributeError):
        return False


def operators() -> Any:
    """flashmoe_science.torch.operators, which imports torch's compiler."""
    from flashmoe_science.torch import operators

    return operators
