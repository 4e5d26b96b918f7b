"""Modules that hold one matrix, or one for each expert: plain, and packed in a quantised format.

A packed module answers the same calls as its plain twin, so that nothing above knows which it has. Letters: I inputs, O
outputs, X experts, T rows, V vocabulary, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn

from .formats import Format

# Numbers of a packed matrix that are unpacked at once, where it is multiplied unpacked: 4 MiB in float32, which stay in a
# cache (pieces of 64 MiB took two to three times as long on two x86-64 cores, for the 4 and 8 bit formats).
PIECE = 1 << 20


class Embedding(nn.Module):
    """The table of token embeddings `[V, D]`, which is also the head."""

    def __init__(self, vocabulary: int, hidden: int):
        super().__init__()
        self.weight = mx.zeros((vocabulary, hidden))

    def __call__(self, ids: mx.array) -> mx.array:
        """Rows `[..., D]` of `ids [...]`."""
        return self.weight[ids]

    def scores(self, x: mx.array) -> mx.array:
        """`x [..., D]` against every row: `[..., V]`."""
        return x @ self.weight.T

    def mix(self, shares: mx.array) -> mx.array:
        """The rows' sum `[..., D]`, weighted by `shares [..., V]`."""
        return shares @ self.weight


class ExpertStack(nn.Module):
    """One matrix for each expert, `[X, O, I]`."""

    def __init__(self, experts: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = mx.zeros((experts, outputs, inputs))

    @property
    def shape(self) -> tuple[int, ...]:
        """`(X, O, I)`."""
        return tuple(self.weight.shape)

    def __call__(self, x: mx.array, expert: mx.array, ordered: bool = False) -> mx.array:
        """Rows `x [T, R, I]`, R at a time times the matrix of their `expert [T]`: `[T, R, O]`. `ordered`: experts ascend."""
        return mx.gather_mm(x, self.weight.swapaxes(1, 2), rhs_indices=expert, sorted_indices=ordered)


class Packed(nn.Module):
    """A quantised matrix `[..., O, I]`; `shape` is that of the matrix, not of what is stored."""

    def __init__(self, shape: tuple[int, ...], format: Format):
        super().__init__()
        self.format, self._shape = format, tuple(shape)
        for name, stored in format.shapes(shape).items():  # placeholders, never evaluated: weights.load replaces them
            self[name] = mx.zeros(stored, dtype=mx.uint32 if name == "weight" else mx.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self._shape

    @property
    def dtype(self) -> mx.Dtype | None:
        """The dtype of the scales of an affine format, in which it multiplies; None for the others."""
        return self.scales.dtype if self.format.mode == "affine" else None

    def unpacked(self, index: object, dtype: mx.Dtype) -> mx.array:
        """The matrix at `index` along the first axis."""
        return self.format.unpack({name: self[name][index] for name in self.format.parts}, dtype)

    def pieces(self, dtype: mx.Dtype) -> Iterator[tuple[slice, mx.array]]:
        """All rows of the first axis, some at a time: where they lie, and the rows unpacked."""
        step = max(1, PIECE // math.prod(self._shape[1:]))
        for begin in range(0, self._shape[0], step):
            rows = slice(begin, min(begin + step, self._shape[0]))
            yield rows, self.unpacked(rows, dtype)

    def _times(self, x: mx.array, transpose: bool) -> mx.array:
        biases = self.get("biases")
        return mx.quantized_matmul(x, self.weight, self.scales, biases, transpose=transpose, **self.format.settings)


class PackedLinear(Packed):
    """A quantised projection without bias."""

    def __call__(self, x: mx.array) -> mx.array:
        """`x [..., I]` -> `[..., O]`."""
        return self._times(x, transpose=True)


class PackedEmbedding(Packed):
    """As Embedding, quantised."""

    def __call__(self, ids: mx.array) -> mx.array:
        """Rows `[..., D]` of `ids [...]`; the small float formats fit bfloat16 exactly."""
        return self.unpacked(ids, self.dtype or mx.bfloat16)

    def scores(self, x: mx.array) -> mx.array:
        """`x [..., D]` against every row: `[..., V]`."""
        return self._times(x, transpose=True)

    def mix(self, shares: mx.array) -> mx.array:
        """The rows' sum `[..., D]`, weighted by `shares [..., V]`."""
        return self._times(shares, transpose=False)


class PackedExpertStack(Packed):
    """As ExpertStack, quantised."""

    def __call__(self, x: mx.array, expert: mx.array, ordered: bool = False) -> mx.array:
        """As ExpertStack."""
        return mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.get("biases"),
            rhs_indices=expert,
            transpose=True,
            sorted_indices=ordered,
            **self.format.settings,
        )


PACKED = {nn.Linear: PackedLinear, Embedding: PackedEmbedding, ExpertStack: PackedExpertStack}
