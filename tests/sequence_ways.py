"""Every way to say where the same sequences are of which there are gradients, for tests of every
backend: tensors and tables are made by the framework's own functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Rows(NamedTuple):
    """Where each sequence is: (batch, first row), of so many rows of so many batches. Frameworks
    add how to lay tensors there."""

    places: list[tuple[int, int]]
    batch: int
    length: int

    def take(self, x: Any, lengths: Sequence[int]) -> list[Any]:
        """Views of the rows of each sequence."""
        return [x[b : b + 1, i : i + n] for (b, i), n in zip(self.places, lengths, strict=True)]


class Way(NamedTuple):
    queries: Any
    keys: Any
    tables: dict[str, Any]


def starts(lengths: Sequence[int], first: int = 0) -> list[int]:
    return [first + sum(lengths[:b]) for b in range(len(lengths) + 1)]


def packed(lengths: Sequence[int], before: int, behind: int) -> tuple[Rows, list[int]]:
    offsets = starts(lengths, before)
    return Rows([(0, i) for i in offsets[:-1]], 1, offsets[-1] + behind), offsets


def padded(lengths: Sequence[int], left: Sequence[int] | None = None) -> Rows:
    left = left or [0] * len(lengths)
    longest = max(n + skip for n, skip in zip(lengths, left, strict=True)) + 2
    return Rows(list(enumerate(left)), len(lengths), longest)


def ways(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    behind_q: int,
    rows: Callable[..., Rows],
    int32: Callable[[Sequence[int]], Any],
) -> dict[str, Way]:
    """`behind_q`: rows behind the last of packed queries. `rows` is the framework's Rows, `int32`
    makes its tables."""
    packed_q, cu_q = packed(lengths_q, 2, behind_q)
    packed_k, cu_k = packed(lengths_k, 0, 5)
    left = [(3 * b + 1) % 11 for b in range(len(lengths_k))]
    ends = [n + skip for n, skip in zip(lengths_k, left, strict=True)]
    # In rooms of which each sequence leaves some, on either side.
    room = [n + 4 for n in lengths_k]
    room_k, cu_room = packed(room, 3, 1)
    inside = Rows([(b, i + 2) for b, i in room_k.places], room_k.batch, room_k.length)

    def way(queries: Rows, keys: Rows, **tables: Sequence[int]) -> Way:
        made = {name: int32(numbers) for name, numbers in tables.items()}
        return Way(rows(*queries), rows(*keys), made)

    return {
        "packed": way(packed_q, packed_k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k),
        "padded": way(
            padded(lengths_q), padded(lengths_k), seqused_q=lengths_q, seqused_k=lengths_k
        ),
        "left": way(
            padded(lengths_q), padded(lengths_k, left), seqused_q=lengths_q, seqused_k=ends,
            k_begin=left,
        ),
        "packed_and_left": way(
            packed_q, padded(lengths_k, left), cu_seqlens_q=cu_q, seqused_k=ends, k_begin=left
        ),
        "rooms": way(
            packed_q, inside, cu_seqlens_q=cu_q, cu_seqlens_k=cu_room,
            seqused_k=[n + 2 for n in lengths_k], k_begin=[2] * len(room),
        ),
    }  # fmt: skip
