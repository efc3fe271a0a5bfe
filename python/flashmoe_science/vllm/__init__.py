"""FlashMoE as vLLM's attention, through a plugin: nothing needs to be imported.

    vllm serve MODEL --attention-backend CUSTOM

vLLM loads the plugin `flashmoe` in every process (entry point `vllm.general_plugins`). It assigns
vLLM's backend CUSTOM to FlashMoE unless another plugin has it. docs/vllm.md lists what was run.
"""

from __future__ import annotations

__all__ = ["register"]

_BACKEND = "flashmoe_science.vllm.backend.FlashMoEBackend"


def register() -> None:
    """Registers FlashMoE as vLLM's attention backend CUSTOM. May be called again."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
