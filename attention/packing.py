"""Packed keys and values: rows of a cache in 8 or 4 bits (mlx's affine format), behaving as the array they stand for.

A cache slices, joins and writes its rows along axis 2 and never looks inside them, so it holds either kind: `mx.array [B, K, S, E]`,
or PackedRows of that shape. What goes in is packed once (`Packing.pack`); what is attended to is unpacked on the way out, as
often as it is read, so that nothing of full width is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from dgemma.errors import OptionError

BITS, GROUPS = (4, 8), (32, 64, 128)


@dataclass(frozen=True)
class Packing:
    """How a cache packs its rows: bits a number, numbers that share a scale, and the positions from which on it does.

    A head whose width is no multiple of `group_size` is padded with zeros to the next one. OptionError for what mlx packs not.
    """

    bits: int = 8
    group_size: int = 64
    start: int = 0  # positions that a cache holds before it is packed, all of it; 0: from the first write on

    def __post_init__(self) -> None:
        for name, allowed in (("bits", BITS), ("group_size", GROUPS)):
            if getattr(self, name) not in allowed:
                raise OptionError(f"kv_{name} is {getattr(self, name)!r}; allowed: {', '.join(map(str, allowed))}")
        if isinstance(self.start, bool) or not isinstance(self.start, int) or self.start < 0:
            raise OptionError(f"kv_start is {self.start!r}; a whole number of at least 0 is needed")

    def nbytes(self, head_dim: int, scale_bytes: int) -> int:
        """Bytes of one head of one position, its scales and biases in the dtype of activations."""
        groups = -(-head_dim // self.group_size)
        return groups * (self.group_size * self.bits // 8 + 2 * scale_bytes)

    def pack(self, rows: mx.array) -> PackedRows:
        """`rows [B, K, S, E]` packed; their rounding is at most half a step of each group's range in 2^bits - 1 steps."""
        width = rows.shape[-1]
        rows = mx.pad(rows, [(0, 0)] * 3 + [(0, -width % self.group_size)])
        return PackedRows(tuple(mx.quantize(rows, group_size=self.group_size, bits=self.bits)), width, self)


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows `[B, K, S, E]` in three parts `[B, K, S, ...]`: packed numbers, scales, biases."""

    parts: tuple[mx.array, ...]
    width: int  # E
    packing: Packing

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows that they stand for."""
        return (*self.parts[0].shape[:3], self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def unpacked(self) -> mx.array:
        """The rows `[B, K, S, E]`, in the dtype that they were packed from."""
        settings = {"group_size": self.packing.group_size, "bits": self.packing.bits}
        return mx.dequantize(*self.parts, **settings)[..., : self.width]

    def map(self, function: Callable[[mx.array], mx.array]) -> PackedRows:
        """The same done to every part."""
        return PackedRows(tuple(function(part) for part in self.parts), self.width, self.packing)

    def __getitem__(self, index: Any) -> PackedRows:
        return self.map(lambda part: part[index])

    def __setitem__(self, index: Any, rows: PackedRows) -> None:
        for part, new in zip(self.parts, rows.parts):
            part[index] = new


Rows = mx.array | PackedRows


def unpacked(rows: Rows) -> mx.array:
    """Rows as an array."""
    return rows.unpacked() if isinstance(rows, PackedRows) else rows


def arrays(rows: Rows | None) -> list[mx.array]:
    """The arrays that hold rows, to evaluate them."""
    return [] if rows is None else list(rows.parts) if isinstance(rows, PackedRows) else [rows]


def like(rows: Rows, function: Callable[[mx.array], mx.array]) -> Rows:
    """`function` done to an array, or to every part of packed rows."""
    return rows.map(function) if isinstance(rows, PackedRows) else function(rows)


def joined(rows: Sequence[Rows]) -> Rows:
    """Rows of one kind, one after the other along axis 2."""
    first = rows[0]
    if isinstance(first, PackedRows):
        return PackedRows(tuple(mx.concatenate(parts, axis=2) for parts in zip(*(one.parts for one in rows))), first.width, first.packing)
    return mx.concatenate(list(rows), axis=2)
