"""FlashMoE as the attention of vLLM, by a plugin: nothing is to be imported.

    vllm serve MODEL --attention-backend CUSTOM

vLLM loads the plugin `flashmoe` of every process (entry point `vllm.general_plugins`), which gives
its backend CUSTOM to FlashMoE unless another plugin has it. docs/vllm.md says what was run.
"""

from __future__ import annotations

__all__ = ["register"]

_BACKEND = "flashmoe_science.vllm.backend.FlashMoEBackend"


def register() -> None:
    """Makes FlashMoE vLLM's attention backend CUSTOM. May be called again."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
