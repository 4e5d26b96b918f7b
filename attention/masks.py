"""Who may look at whom: masks as pure functions of integers.

Positions are counted from the first slot of a row, padding included, so that all rows of a batch share them. A forward
pass adds the queries `offset .. offset + L - 1`; the keys it may see are the kept ones, `start .. offset - 1`, and the
new ones. Row b begins with `padding[b]` slots that no one may see (prompts are padded on the left).

A mask is boolean `[B or 1, 1, L, S + L]`, True where the query may look, or None where every query may look everywhere:
the fused kernels then run without one. Letters as in attention/README.md: B batch, L new, S stored, W window.

In the drawings a row is a query, a column a key, `x` may look, `.` may not, and `|` ends the stored keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np


class MaskMemo:
    """The masks of one forward pass, built once per kind and shared by every layer of that kind.

    One memo serves all caches of a model run. It keeps only the newest mask of each kind, so that a long prompt never
    holds more than a chunk's worth. `padding` is what the rows of the batch have in common for all layers.
    """

    def __init__(self, padding: Sequence[int] | None = None):
        self.padding = tuple(int(p) for p in padding) if padding is not None and any(padding) else None
        self._newest: dict[str, tuple[tuple, object, mx.array | None]] = {}

    def get(
        self, kind: str, key: tuple, build: Callable[[], mx.array | None], blocks: object = None
    ) -> mx.array | None:
        """The mask of `kind` for `key`; built when the last one of that kind was for another key or other blocks."""
        newest = self._newest.get(kind)
        if newest is None or newest[0] != key or newest[1] is not blocks:
            newest = self._newest[kind] = (key, blocks, build())
        return newest[2]


def causal_mask(offset: int, length: int, padding: Sequence[int] | None = None) -> mx.array | None:
    """Every query sees itself and all before it; the mask of full layers.

        offset 2, L 3:   x x | x . .
                         x x | x x .
                         x x | x x x
    """
    if length == 1 and padding is None:
        return None
    queries, keys = _grid(offset, length, 0)
    return _without_padding(keys <= queries, offset, length, 0, padding)


def window_mask(
    offset: int, length: int, window: int, start: int, padding: Sequence[int] | None = None
) -> mx.array | None:
    """Every query sees the newest `window` positions up to itself; the mask of sliding layers.

        offset 3, L 3, W 3, start 1:   x x | x . .
                                       . x | x x .
                                       . . | x x x
    """
    padding = _visible_padding(padding, start)
    if length == 1 and padding is None and start > offset - window:
        return None
    queries, keys = _grid(offset, length, start)
    seen = (keys <= queries) & (keys > queries - window)
    return _without_padding(seen, offset, length, start, padding)


def image_mask(
    offset: int, length: int, blocks: np.ndarray, padding: Sequence[int] | None = None
) -> mx.array | None:
    """Causal, and the tokens of an image see the whole of it; full layers of the encoder.

        offset 1, L 4, blocks -1 0 0 -1:   x | x . . .
                                           x | x x x .
                                           x | x x x .
                                           x | x x x x
    """
    queries, keys = _grid(offset, length, 0)
    seen = (keys <= queries) | _same_block(blocks, offset)
    return _without_padding(seen, offset, length, 0, padding)


def image_or_window_mask(
    offset: int, length: int, window: int, start: int, blocks: np.ndarray, padding: Sequence[int] | None = None
) -> mx.array | None:
    """(Causal and in the window) or in the same image, however large: "encoder-window", as transformers has it.

        offset 1, L 4, W 2, start 0, blocks 0 0 0 -1:   x | x x x .
                                                        . | x x x .
                                                        . | x x x .
                                                        . | . . x x
    """
    queries, keys = _grid(offset, length, start)
    seen = ((keys <= queries) & (keys > queries - window)) | _same_block(blocks, offset - start)
    return _without_padding(seen, offset, length, start, _visible_padding(padding, start))


def image_and_window_mask(
    offset: int, length: int, window: int, start: int, blocks: np.ndarray, padding: Sequence[int] | None = None
) -> mx.array | None:
    """In the window and (causal or in the same image), the window closed on both sides: as Google's JAX code has it.

        offset 1, L 4, W 2, start 0, blocks 0 0 0 -1:   x | x x . .
                                                        . | x x x .
                                                        . | . x x .
                                                        . | . . x x
    """
    queries, keys = _grid(offset, length, start)
    near = (keys > queries - window) & (keys < queries + window)
    seen = near & ((keys <= queries) | _same_block(blocks, offset - start))
    return _without_padding(seen, offset, length, start, _visible_padding(padding, start))


def block_read_mask(offset: int, length: int, start: int, padding: Sequence[int] | None = None) -> mx.array | None:
    """The canvas sees every kept key and the whole of itself; only padding is hidden.

        offset 3, L 2, start 1, padding 2:   . x | x x
                                             . x | x x
    """
    padding = _visible_padding(padding, start)
    if padding is None:
        return None
    keys = mx.arange(start, offset + length)[None, :]
    seen = (keys >= mx.array(padding)[:, None]) | (keys >= offset)  # [B, S + L]
    return mx.broadcast_to(seen[:, None, None, :], (len(padding), 1, length, seen.shape[-1]))


def ring_mask(positions: np.ndarray, padding: Sequence[int] | None) -> mx.array | None:
    """One query, the newest position, over a ring whose slots hold `positions`: everything but padding, and itself.

        slots hold 4 5 2 3, padding 3:   x x . x
    """
    padding = _visible_padding(padding, int(positions.min()))
    if padding is None:
        return None
    real = positions[None, :] >= np.array(padding)[:, None]
    return mx.array(real | (positions == positions.max()))[:, None, None, :]


def _grid(offset: int, length: int, start: int) -> tuple[mx.array, mx.array]:
    """Positions of the queries `[L, 1]` and of the keys `[1, S + L]`."""
    return mx.arange(offset, offset + length)[:, None], mx.arange(start, offset + length)[None, :]


def _same_block(blocks: np.ndarray, stored: int) -> mx.array:
    """Whether query and key belong to one image `[B, 1, L, S + L]`; images never reach back into the stored keys."""
    blocks = np.asarray(blocks)
    same = (blocks[:, :, None] == blocks[:, None, :]) & (blocks >= 0)[:, :, None]
    return mx.array(np.pad(same, ((0, 0), (0, 0), (stored, 0)))[:, None])


def _visible_padding(padding: Sequence[int] | None, start: int) -> Sequence[int] | None:
    """The padding, or None once every padded slot lies before `start` and is kept no more."""
    return None if padding is None or max(padding) <= start else padding


def _without_padding(
    seen: mx.array, offset: int, length: int, start: int, padding: Sequence[int] | None
) -> mx.array:
    """`seen` without the padded keys. A padded query keeps itself: a row that sees nothing would become NaN."""
    if seen.ndim == 2:
        seen = seen[None, None]
    if padding is None:
        return seen
    queries, keys = _grid(offset, length, start)
    real = keys >= mx.array(padding)[:, None, None, None]  # [B, 1, 1, S + L]
    return (seen & real) | (queries == keys)
