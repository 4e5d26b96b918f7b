"""The same operations for mlx's CUDA backend: plain but for the experts.

mlx 0.32.4 multiplies each row of a token by its expert's matrix on its own there (`gather_mm` of single rows: 4.7 ms a layer of
the released geometry for a canvas of 256 tokens, on an H200; reading the weights once takes 0.35). Rows of one expert in
tiles of 16, a matrix for each tile, take 1.6 ms. Packed matrices keep the plain way.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from . import plain
from .matrices import Packed
from .plain import *  # noqa: F403: whatever has no other formulation here

TILE = (16, 64)  # rows of a tile: the least, and the most


def experts(rows: mx.array, chosen: mx.array, weights: mx.array, gate_up: nn.Module, down: nn.Module) -> mx.array:
    """As plain.experts, rows of one expert together in tiles; nothing is read back to lay them out."""
    (count, k), (number, inner, _) = chosen.shape, gate_up.shape
    # Fewer rows than tiles would pad; or packed stacks, whose products of several rows have not been measured on a GPU.
    if count * k < 4 * TILE[0] or isinstance(gate_up, Packed) or isinstance(down, Packed):
        return plain.experts(rows, chosen, weights, gate_up, down)
    size = TILE[0]
    while size < TILE[1] and size * number < count * k:
        size *= 2
    source, expert, place = tiles(chosen, number, size)
    hidden = gate_up(rows[source].reshape(-1, size, rows.shape[-1]), expert)  # [tiles, size, 2 I]
    gate, up = mx.split(hidden, 2, axis=-1)
    out = down(plain.geglu(gate, up), expert).reshape(-1, rows.shape[-1])  # [tiles size, D]
    out = out[place].reshape(count, k, -1)  # [T, k, D]
    return (out * weights[..., None]).sum(axis=1).astype(rows.dtype)


def tiles(chosen: mx.array, experts: int, size: int) -> tuple[mx.array, mx.array, mx.array]:
    """Lay the pairs of a row and an expert, `chosen [T, k]`, out in tiles of `size` rows, each of one expert.

        chosen 2 0 2 | experts 3, size 2:   tiles  [row 1, -]  [row 0, row 2]   expert 0 2

    Returns the row that fills each place `[tiles size]` (row 0 where none does), each tile's expert `[tiles]`, and the place of
    each pair `[T k]`. There are as many tiles as the worst choice could need, so that their number is known beforehand.
    """
    pairs, k = chosen.size, chosen.shape[1]
    flat = chosen.flatten()
    order = mx.argsort(flat)  # pairs, expert after expert
    expert = flat[order]
    counts = (flat[None, :] == mx.arange(experts)[:, None]).sum(axis=1)  # [X] pairs of each expert
    needed = (counts + size - 1) // size  # [X] tiles of each expert
    ends, firsts = mx.cumsum(needed), mx.cumsum(counts) - counts
    slots = (ends - needed)[expert] * size + mx.arange(pairs) - firsts[expert]  # of the ordered pairs
    number = pairs // size + min(experts, pairs)
    source = mx.put_along_axis(mx.zeros((number * size,), mx.int32), slots, (order // k).astype(mx.int32), axis=0)
    place = mx.put_along_axis(mx.zeros((pairs,), slots.dtype), order, slots, axis=0)
    owner = mx.minimum((mx.arange(number)[:, None] >= ends[None, :]).sum(axis=1), experts - 1)
    return source, owner, place
