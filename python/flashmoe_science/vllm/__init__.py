"""FlashMoE as vLLM's attention, through a plugin: nothing needs to be imported.

    vllm serve MODEL --attention-backend CUSTOM

vLLM loads the plugin `flashmoe` in every process (entry point `vllm.general_plugins`). It assigns
vLLM's backend CUSTOM to FlashMoE unless another plugin has it. docs/vllm.md lists what was run.
"""

from __future__ import annotations

import logging

__all__ = ["register"]

_BACKEND = "flashmoe_science.vllm.backend.FlashMoEBackend"


def register() -> None:
    """Registers FlashMoE as vLLM's attention backend CUSTOM. May be called again.

    vLLM stops at an error of a plugin, whatever backend it is to use. So a vLLM with another
    registry than ours knows gets a warning and goes on without FlashMoE.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        if not AttentionBackendEnum.CUSTOM.is_overridden():
            register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
    except (ImportError, AttributeError) as error:
        logging.getLogger(__name__).warning(
            "FlashMoE is not registered as an attention backend, its plugin is for vLLM 0.22: %s",
            error,
        )
