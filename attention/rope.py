"""Rotary positions (Su et al. 2021, arXiv:2104.09864): the angle of a pair of features grows with the position.

Feature i of the first half of a head is paired with feature i of the second half. Two rules give the frequencies of the
pairs: `default` is theta^(-2i/E) over the whole head; `proportional` (the full layers) uses the same exponents but turns
only the first `fraction` of the pairs and leaves the others in place.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from dgemma.config import Rope


class Rotary:
    """The angles of one layer kind, computed once per forward pass and shared by its layers."""

    def __init__(self, rope: Rope, head_dim: int):
        self.head_dim = head_dim
        self._frequencies = mx.array(frequencies(rope, head_dim))  # [E / 2] float32

    def angles(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Cosine and signed sine, each `[B or 1, 1, L, E]` float32, for whole `positions [B or 1, L]`.

        The sine's first half is negated, so that turning a vector needs no negation of its own.
        """
        turns = positions.astype(mx.float32)[:, None, :, None] * self._frequencies  # [B, 1, L, E / 2]
        cos, sin = mx.cos(turns), mx.sin(turns)
        return mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians per position of each pair of features `[E / 2]`, float32."""
    pairs = head_dim // 2
    turned = int(rope.fraction * head_dim // 2) if rope.kind == "proportional" else pairs
    exponents = np.arange(0, 2 * turned, 2, dtype=np.float32) / np.float32(head_dim)
    found = np.zeros(pairs, dtype=np.float32)
    found[:turned] = 1.0 / np.float32(rope.theta) ** exponents
    return found
