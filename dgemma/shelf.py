"""Rows of caches as arrays with names, and back: what a file holds of them."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from dgemma.attention import CacheRows, Packing
from dgemma.attention.packing import Rows
from dgemma.attention.packing import arrays as arrays_of

from .config import SLIDING, Layer
from .model import DiffusionGemma


def named(name: str, keys: Rows | None, values: Rows | None) -> dict[str, mx.array]:
    """The arrays of a cache's rows by names; none when there are no rows."""
    parts = {"keys": arrays_of(keys), "values": arrays_of(values)}
    return {f"{name}.{part}.{i}": array for part, found in parts.items() for i, array in enumerate(found)}


class Shelf:
    """Rows of caches by the names that `named` gave them, checked: KeyError, ValueError for what no such cache can hold."""

    def __init__(self, model: DiffusionGemma, packing: Packing | None, arrays: dict[str, mx.array]):
        self.text, self.dtype, self.packing, self.arrays = model.config.text, model.dtype, packing, arrays

    def rows(self, name: str, layer: Layer, offset: int) -> CacheRows:
        """The rows of one layer at position `offset`."""
        if offset == 0:
            return CacheRows(None, None, 0, None, self.packing)
        keys, values = (self._part(f"{name}.{part}", layer) for part in ("keys", "values"))
        least = most = offset
        if layer.kind == SLIDING:
            least, most = min(offset, self.text.sliding_window - 1), min(offset, self.text.sliding_window)
        if keys.shape != values.shape or not least <= keys.shape[2] <= most:
            raise ValueError(f"{name}: rows of shape {keys.shape} and {values.shape} at position {offset}")
        return CacheRows(keys, values, offset, None, self.packing)

    def _part(self, name: str, layer: Layer) -> Rows:
        first = self.arrays[f"{name}.0"]
        blank = mx.zeros((1, layer.kv_heads, first.shape[2], layer.head_dim), dtype=self.dtype)  # lazy: never made
        packed = f"{name}.1" in self.arrays
        like = self.packing.pack(blank) if packed else blank
        parts = [self.arrays[f"{name}.{i}"] for i in range(3 if packed else 1)]
        for part, wanted in zip(parts, arrays_of(like)):
            if (part.shape, part.dtype) != (wanted.shape, wanted.dtype):
                raise ValueError(f"{name}: {part.dtype} {part.shape} where {wanted.dtype} {wanted.shape} is needed")
        return replace(like, parts=tuple(parts)) if packed else first
