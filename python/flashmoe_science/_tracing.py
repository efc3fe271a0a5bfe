"""Whether torch.compile traces a call. It cannot look into native code: in its graphs calls are the
operators of flashmoe_science.torch."""

from __future__ import annotations

import sys
from typing import Any

_self: Any = sys.modules[__name__]


def __getattr__(name: str) -> Any:
    """torch.compiler as `compiler`, if torch has been imported. Dynamo asks for it here, too: it
    would copy all of sys.modules if a traced function looked there, while imports add to that."""
    module = sys.modules.get("torch.compiler") if name == "compiler" else None
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return module


def is_traced() -> bool:
    """Imports nothing: a tracer has imported torch, while another thread may be about to."""
    try:
        return _self.compiler.is_dynamo_compiling()  # type: ignore[no-any-return]
    except AttributeError:  # no torch, or one that is still being imported
        return False


def operators() -> Any:
    """flashmoe_science.torch.operators, which imports torch's compiler."""
    from flashmoe_science.torch import operators

    return operators
