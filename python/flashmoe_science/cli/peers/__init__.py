"""The peers that we are measured against. A peer is one object of the class Peer; nothing else
knows it.

The built-in ones are in the modules next to this file, one per provider. Other packages add theirs
through the entry point group "flashmoe.peers": the entry's name is the peer's, its value a Peer.

    [project.entry-points."flashmoe.peers"]
    mine = "my_package.flashmoe_peer:PEER"

Whether a peer is installed is found without importing it; only one that is timed is imported.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.output import CommandError
from flashmoe_science.cli.peers import (
    flash_attention,
    flashinfer,
    gradients,
    jax_cudnn,
    moe_gradients,
    sonicmoe,
    torch_moe,
    torch_sdpa,
    vllm_moe,
)
from flashmoe_science.cli.peers.peer import Missing, Peer
from flashmoe_science.cli.suites import ATTENTION

__all__ = ["GROUP", "Missing", "Peer", "choose_peers", "describe", "peer_names"]

GROUP = "flashmoe.peers"
_BUILT_IN = (
    *torch_sdpa.PEERS,
    *flash_attention.PEERS,
    *flashinfer.PEERS,
    *jax_cudnn.PEERS,
    *gradients.PEERS,
    *torch_moe.PEERS,
    *sonicmoe.PEERS,
    *vllm_moe.PEERS,
    *moe_gradients.PEERS,
)


def _entry_points() -> dict[str, Any]:
    """Peers of other packages by name; a built-in one keeps its name."""
    names = {peer.name for peer in _BUILT_IN}
    found = importlib.metadata.entry_points(group=GROUP)
    return {entry.name: entry for entry in found if entry.name not in names}


def peer_names(operation: str = ATTENTION) -> list[str]:
    """Every name that --peer takes for an operation, including those of other packages, which may
    belong to another operation."""
    return [*(p.name for p in _BUILT_IN if p.operation == operation), *_entry_points()]


def _load(name: str, entry: Any) -> Peer | Missing:
    try:
        peer = entry.load()
    except Exception as error:  # another package may raise anything on import
        return Missing(name, f"{entry.value} does not load: {type(error).__name__}: {error}")
    if not isinstance(peer, Peer):
        return Missing(name, f"{entry.value} is a {type(peer).__name__}, not a Peer")
    return peer.with_name(name)


def choose_peers(
    arrays: Arrays, wanted: list[str] | None, operation: str = ATTENTION
) -> list[Peer | Missing]:
    """The operation's peers to time on the arrays' device: the named ones, or all. A missing one
    says why."""
    kind = "cpu" if arrays.device == "cpu" else "cuda"
    entries = _entry_points()
    known = {peer.name: peer for peer in _BUILT_IN if peer.operation == operation}
    names = peer_names(operation) if wanted is None else [n for n in wanted if n != "none"]
    unknown = sorted(set(names) - {*known, *entries})
    if unknown:
        accepted = ", ".join(peer_names(operation))
        raise CommandError(f"--peer: got {', '.join(unknown)}, accepted are {accepted} and none")
    chosen: list[Peer | Missing] = []
    for name in dict.fromkeys(names):
        peer = known[name] if name in known else _load(name, entries[name])
        if isinstance(peer, Peer) and peer.operation != operation:
            if wanted is None:
                continue
            raise CommandError(f"--peer: {name} is of {peer.operation}, not of {operation}")
        if isinstance(peer, Peer) and kind not in peer.devices:
            if wanted is None:
                continue
            raise CommandError(
                f"--peer: {name} runs on {' and '.join(peer.devices)}, not on {arrays.device}"
            )
        chosen.append(peer.missing() or peer if isinstance(peer, Peer) else peer)
    return chosen


def describe(chosen: Sequence[Peer | Missing]) -> dict[str, dict[str, str]]:
    """What a record says about the peers themselves, by name."""
    described = {}
    for peer in chosen:
        if isinstance(peer, Missing):
            described[peer.name] = {"status": "missing", "reason": peer.reason}
        else:
            described[peer.name] = {"status": "found", "version": peer.version()}
    return described
