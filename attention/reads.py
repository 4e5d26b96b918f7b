"""What a layer attends to, once a cache has said what that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from dgemma import kernels


@dataclass(frozen=True)
class AttentionRead:
    """Keys and values `[B, K, T, E]` and the mask of one read: boolean `[B or 1, 1, L, T]`, or None for no mask."""

    keys: mx.array
    values: mx.array
    mask: mx.array | None

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """Softmax attention of `queries [B, H, L, E]`; H is a multiple of K. Returns `[B, H, L, E]`."""
        return kernels.attention(queries, self.keys, self.values, scale=scale, mask=self.mask)


@dataclass(frozen=True)
class StepwiseRead:
    """One read per position, for positions that each saw another state of the cache."""

    reads: Sequence[AttentionRead]

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """As AttentionRead.attend, position i of `queries [B, H, L, E]` attending to the i-th read."""
        steps = mx.split(queries, len(self.reads), axis=2)
        return mx.concatenate([read.attend(q, scale) for read, q in zip(self.reads, steps)], axis=2)
