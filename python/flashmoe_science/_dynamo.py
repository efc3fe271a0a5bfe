"""Has torch.compile know the functions of this package, whichever of the two is imported first.

What tells it is flashmoe_science.torch, which needs torch's compiler. That is a slow import, which
torch itself puts off until it is needed: so it is waited for.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_COMPILER = "torch._dynamo"


class _Finder:
    """Finds torch's compiler where the finders behind it do, to act when it has been loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _COMPILER:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)  # old finders have none
            if finder is self or find_spec is None:
                continue
            spec = find_spec(name, path, target)
            if spec is not None:
                self._act_after(spec.loader)
                return spec
        return None

    def _act_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            # A list of its own: other threads' imports go through the one that there was.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
            _register()

        loader.exec_module = exec_module


def _register() -> None:
    try:
        importlib.import_module("flashmoe_science.torch")
    except Exception as error:  # whose import it is, may not want us at all
        import logging

        logging.getLogger(__name__).warning(
            "torch.compile does not know the functions of flashmoe_science: %s", error
        )


def serve() -> None:
    """Once: has torch's compiler know the functions when it is there, be it now."""
    if _COMPILER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())
