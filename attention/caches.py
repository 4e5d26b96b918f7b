"""What is remembered: the key/value caches of full and of sliding layers.

A cache belongs to one layer. It owns what is stored, the true position (`offset`) and the mask of each kind of read.
The verbs and their contracts are in attention/README.md; in short:

    append_decode           one position                     -> all it may see
    append_window           L positions, causal              -> all they may see
    append_committed        L positions, as L decodes        -> one read per position
    append_bidirectional    L positions, images as Google    -> all they may see
    append_encoder_window   L positions, images as transformers
    read_block              nothing is written               -> the kept past and the block's own keys

The model here writes by whole chunks and blocks (append_window and the two verbs for images) and reads by read_block;
single writes and the ring they fill are for loops that decode token by token, and for sessions that cut back.

New keys and values are `[B, K, L, E]`; every read is an AttentionRead. Positions count padding (masks.py).

A cache with a `packing` (packing.py) keeps its rows in 8 or 4 bits. New rows are packed as they are written, and a write attends to
them as they are stored, so that a later read sees the same; a block's own keys, which are not stored, are attended to as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from . import masks
from .masks import MaskMemo
from .packing import PackedRows, Packing, Rows, arrays, joined, like, unpacked
from .reads import AttentionRead, StepwiseRead

STEP = 256  # slots by which a buffer grows: one allocation per 256 tokens instead of one per token


@dataclass(frozen=True)
class CacheRows:
    """A self-contained copy of a cache: keys and values `[B, K, S, E]` in temporal order, and the position after them."""

    keys: Rows | None
    values: Rows | None
    offset: int
    padding: tuple[int, ...] | None
    packing: Packing | None = None


class _Cache:
    """What both caches share: buffers `[B, K, slots, E]`, the position, and the bookkeeping on them."""

    def __init__(self, memo: MaskMemo | None, packing: Packing | None = None):
        self.memo = memo or MaskMemo()
        self.packing = packing  # rows are packed from its `start` on
        self.keys: Rows | None = None
        self.values: Rows | None = None
        self.offset = 0
        self._reserved = 0

    @property
    def is_packed(self) -> bool:
        """Whether what is stored is packed, and what comes will be."""
        if self.keys is not None:
            return isinstance(self.keys, PackedRows)
        return self.packing is not None and self.packing.start == 0

    @property
    def arrays(self) -> list[mx.array]:
        """What it holds, to be evaluated."""
        return arrays(self.keys) + arrays(self.values)

    def to_quantized(self, bits: int = 8, group_size: int = 64) -> _Cache:
        """A new cache with the same rows, packed, as laid out and at the same ring position. ValueError if they are already."""
        if self.is_packed:
            raise ValueError(f"this cache is packed already, in {self.packing.bits} bits")
        made = copy.copy(self)
        made.packing = Packing(bits, group_size)
        made._pack()
        return made

    def _pack(self) -> None:
        if self.keys is not None:
            self.keys, self.values = self.packing.pack(self.keys), self.packing.pack(self.values)

    def _written(self) -> None:
        """After a write: pack everything once it is time."""
        if self.packing is not None and not self.is_packed and self.offset >= self.packing.start:
            self._pack()

    def _stored(self, new: mx.array) -> Rows:
        """New rows as they are to be stored."""
        return self.packing.pack(new) if self.is_packed else new

    @property
    def is_trimmable(self) -> bool:
        """Whether `trim` may drop positions."""
        return self.trimmable > 0

    def reserve(self, length: int) -> None:
        """Say that `length` positions are to come in all: a buffer that grows is made that long at once.

        A hint. It saves copies of a long prompt's buffer, and changes no result.
        """
        self._reserved = max(self._reserved, length)

    def append_committed(self, keys: mx.array, values: mx.array) -> StepwiseRead:
        """Write L positions one after the other; each has a read of its own, as append_decode would give it."""
        steps = range(keys.shape[2])
        return StepwiseRead([self.append_decode(keys[:, :, i : i + 1], values[:, :, i : i + 1]) for i in steps])

    def capture_rows(self) -> CacheRows:
        """A self-contained copy of what is kept, from which `restore` continues exactly as this cache would."""
        keys, values = self.temporal_view()
        if keys is not None:  # a view would keep the whole buffer alive, and a later write in place could reach it
            keys, values = like(keys, mx.contiguous), like(values, mx.contiguous)
            mx.eval(arrays(keys) + arrays(values))
        return CacheRows(keys, values, self.offset, self.memo.padding, self.packing)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers held."""
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one stored position takes, all rows of the batch together; 0 before the first write."""
        return 0 if self.keys is None else self.nbytes // self.keys.shape[2]


class KVCache(_Cache):
    """The cache of a full layer: everything, in the order it came, in a buffer that grows in steps of 256."""

    def __init__(self, memo: MaskMemo | None = None, packing: Packing | None = None):
        super().__init__(memo, packing)

    # -- writes -------------------------------------------------------------------------------------------------------

    def append_decode(self, keys: mx.array, values: mx.array) -> AttentionRead:
        """Write one position; it sees everything."""
        _one_position(keys)
        return self.append_window(keys, values)

    def append_window(self, keys: mx.array, values: mx.array) -> AttentionRead:
        """Write L positions; each sees itself and all before it."""
        offset, length = self.offset, keys.shape[2]
        padding = self.memo.padding
        mask = self.memo.get(
            "causal", (offset, length), lambda: masks.causal_mask(offset, length, padding)
        )
        return self._write(keys, values, mask)

    def append_bidirectional(self, keys: mx.array, values: mx.array, blocks: np.ndarray) -> AttentionRead:
        """Write L positions, causal: full layers of Google's model do not let image tokens look ahead."""
        return self.append_window(keys, values)

    def append_encoder_window(self, keys: mx.array, values: mx.array, blocks: np.ndarray) -> AttentionRead:
        """Write L positions, causal, each image of `blocks [B, L]` (-1 for text) seeing the whole of itself."""
        offset, length, padding = self.offset, keys.shape[2], self.memo.padding
        mask = self.memo.get(
            "image",
            (offset, length),
            lambda: masks.image_mask(offset, length, blocks, padding),
            blocks=blocks,
        )
        return self._write(keys, values, mask)

    def _write(self, keys: mx.array, values: mx.array, mask: mx.array | None) -> AttentionRead:
        self._put(self._stored(keys), self._stored(values))
        end = self.offset
        read = AttentionRead(unpacked(self.keys[:, :, :end]), unpacked(self.values[:, :, :end]), mask)
        self._written()
        return read

    def _put(self, keys: Rows, values: Rows) -> None:
        end = self.offset + keys.shape[2]
        self.keys = _grown(self.keys, keys, end, reserved=self._reserved)
        self.values = _grown(self.values, values, end, reserved=self._reserved)
        self.keys[:, :, self.offset : end] = keys
        self.values[:, :, self.offset : end] = values
        self.offset = end

    # -- reads --------------------------------------------------------------------------------------------------------

    def read_block(self, keys: mx.array, values: mx.array) -> AttentionRead:
        """All that is stored and the block's own keys and values; nothing is written."""
        offset, length, padding = self.offset, keys.shape[2], self.memo.padding
        mask = self.memo.get(
            "block", (offset, length), lambda: masks.block_read_mask(offset, length, 0, padding)
        )
        stored_keys, stored_values = self.temporal_view()
        return AttentionRead(_beside(stored_keys, keys), _beside(stored_values, values), mask)

    def temporal_view(self) -> tuple[Rows | None, Rows | None]:
        """Stored keys and values `[B, K, offset, E]` in the order they came, packed or not; None when nothing is stored."""
        if self.offset == 0:
            return None, None
        return self.keys[:, :, : self.offset], self.values[:, :, : self.offset]

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    @classmethod
    def restore(cls, rows: CacheRows, memo: MaskMemo | None = None) -> KVCache:
        """A new cache holding `rows`."""
        cache = cls(memo or MaskMemo(rows.padding), rows.packing)
        if rows.keys is not None:
            cache._put(rows.keys, rows.values)
        return cache

    def select(self, rows: Sequence[int], memo: MaskMemo) -> KVCache:
        """A new cache with only some rows of the batch; `memo` holds their padding."""
        return type(self).restore(_selected(self.capture_rows(), rows), memo)

    @property
    def trimmable(self) -> int:
        """How many of the newest positions `trim` may drop: all of them."""
        return self.offset

    def trim(self, count: int) -> None:
        """Drop the newest `count` positions; ValueError when fewer are stored."""
        if not 0 <= count <= self.trimmable:
            raise ValueError(f"cannot trim {count} positions: {self.offset} are stored")
        self.offset -= count


class RotatingKVCache(_Cache):
    """The cache of a sliding layer: the newest `window` positions.

    Two layouts take turns. After single writes it is a ring in which position p lies in slot p mod window: the layout is
    a function of the offset alone, so that a restored copy continues bit for bit. After a concatenating write it is a
    plain list in temporal order that may be longer than the window (the read needs the extra rows); the window is then
    its tail. `_first` is the position of the oldest kept row, `_ring` says which layout holds.
    """

    def __init__(self, window: int, memo: MaskMemo | None = None, packing: Packing | None = None):
        super().__init__(memo, packing)
        self.window = window
        self._first = 0
        self._ring = False
        self._undoable = 0  # positions of the last concatenating write that trim may still take back

    # -- writes -------------------------------------------------------------------------------------------------------

    def append_decode(self, keys: mx.array, values: mx.array) -> AttentionRead:
        """Write one position in place at the ring's head, evicting the oldest once full; returns the ring, in ring order."""
        _one_position(keys)
        self._to_ring()
        slot, live = self.offset % self.window, min(self.offset + 1, self.window)
        keys, values = self._stored(keys), self._stored(values)
        self.keys = _grown(self.keys, keys, slot + 1, limit=self.window)
        self.values = _grown(self.values, values, slot + 1, limit=self.window)
        self.keys[:, :, slot : slot + 1] = keys
        self.values[:, :, slot : slot + 1] = values
        self.offset += 1
        self._first = max(0, self.offset - self.window)
        self._undoable = 0
        newest, padding = self.offset - 1, self.memo.padding
        mask = self.memo.get(
            "ring", (newest, self.window), lambda: masks.ring_mask(_slots(newest, self.window), padding)
        )
        read = AttentionRead(unpacked(self.keys[:, :, :live]), unpacked(self.values[:, :, :live]), mask)
        self._written()
        return read

    def append_window(self, keys: mx.array, values: mx.array) -> AttentionRead:
        """Write L positions by concatenation; each sees the newest `window` positions up to itself."""
        return self._concatenate("window", masks.window_mask, keys, values, None)

    def append_bidirectional(self, keys: mx.array, values: mx.array, blocks: np.ndarray) -> AttentionRead:
        """As append_window, and the tokens of an image of `blocks [B, L]` also look ahead, inside the window."""
        return self._concatenate("image and window", masks.image_and_window_mask, keys, values, blocks)

    def append_encoder_window(self, keys: mx.array, values: mx.array, blocks: np.ndarray) -> AttentionRead:
        """As append_window, and the tokens of an image of `blocks [B, L]` see the whole of it, window or not."""
        return self._concatenate("image or window", masks.image_or_window_mask, keys, values, blocks)

    def _concatenate(self, kind, mask_of, keys, values, blocks) -> AttentionRead:
        """The newest window - 1 stored rows, then all new ones; both the new buffer and what is read."""
        offset, length = self.offset, keys.shape[2]
        stored_keys, stored_values = self._newest(self.window - 1)
        start = offset - (0 if stored_keys is None else stored_keys.shape[2])
        self.keys, self.values = _joined(stored_keys, self._stored(keys)), _joined(stored_values, self._stored(values))
        self.offset, self._first, self._ring, self._undoable = offset + length, start, False, length
        arguments = (offset, length, self.window, start) + (() if blocks is None else (blocks,))
        padding = self.memo.padding
        mask = self.memo.get(kind, arguments[:4], lambda: mask_of(*arguments, padding), blocks=blocks)
        read = AttentionRead(unpacked(self.keys), unpacked(self.values), mask)
        self._written()
        return read

    # -- reads --------------------------------------------------------------------------------------------------------

    def read_block(self, keys: mx.array, values: mx.array) -> AttentionRead:
        """The newest window - 1 positions in temporal order and the block's own; nothing is written."""
        stored_keys, stored_values = self._newest(self.window - 1)
        offset, length, padding = self.offset, keys.shape[2], self.memo.padding
        start = offset - (0 if stored_keys is None else stored_keys.shape[2])
        mask = self.memo.get(
            "block in window",
            (offset, length, start),
            lambda: masks.block_read_mask(offset, length, start, padding),
        )
        return AttentionRead(_beside(stored_keys, keys), _beside(stored_values, values), mask)

    def temporal_view(self) -> tuple[Rows | None, Rows | None]:
        """The newest min(offset, window) keys and values in the order they came; None when nothing is stored."""
        return self._newest(self.window)

    def _newest(self, count: int) -> tuple[Rows | None, Rows | None]:
        """The newest `count` kept rows (fewer when fewer are kept), in temporal order."""
        count = min(count, self.offset - self._first)
        if count == 0:
            return None, None
        return self._tail(self.keys, count), self._tail(self.values, count)

    def _tail(self, buffer: Rows, count: int) -> Rows:
        if not self._ring:
            return buffer[:, :, buffer.shape[2] - count :]
        begin, end = (self.offset - count) % self.window, (self.offset - 1) % self.window + 1
        if begin < end:
            return buffer[:, :, begin:end]
        return joined([buffer[:, :, begin : self.window], buffer[:, :, :end]])

    def _to_ring(self) -> None:
        """Lay the newest rows out so that position p lies in slot p mod window."""
        if self._ring:
            return
        keys, values = self._newest(self.window)
        self._ring = True
        if keys is not None:
            self._first = self.offset - keys.shape[2]
            if self._first > 0:
                keys, values = self._spread(keys), self._spread(values)
        self.keys, self.values = keys, values

    def _spread(self, rows: Rows) -> Rows:
        """Rows of the positions before `offset`, placed in their ring slots; slots of no position are zero."""
        count = rows.shape[2]
        slots = mx.array(np.arange(self.offset - count, self.offset) % self.window)
        ring = like(rows, lambda part: mx.zeros((*part.shape[:2], self.window, part.shape[3]), dtype=part.dtype))
        ring[:, :, slots] = rows
        return ring

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    @classmethod
    def restore(cls, rows: CacheRows, window: int, memo: MaskMemo | None = None) -> RotatingKVCache:
        """A new cache holding `rows`."""
        cache = cls(window, memo or MaskMemo(rows.padding), rows.packing)
        cache.keys, cache.values, cache.offset = rows.keys, rows.values, rows.offset
        cache._first = rows.offset - (0 if rows.keys is None else rows.keys.shape[2])
        return cache

    def select(self, rows: Sequence[int], memo: MaskMemo) -> RotatingKVCache:
        """A new cache with only some rows of the batch; `memo` holds their padding."""
        return type(self).restore(_selected(self.capture_rows(), rows), self.window, memo)

    @property
    def trimmable(self) -> int:
        """How many of the newest positions `trim` may drop: all while nothing was evicted, else those of a last concatenating write."""
        return self.offset if self._first == 0 else self._undoable

    def trim(self, count: int) -> None:
        """Drop the newest `count` positions; ValueError when what they pushed out is gone."""
        if not 0 <= count <= self.trimmable:
            raise ValueError(
                f"cannot trim {count} positions of a ring of {self.window} at position {self.offset}: "
                f"{self.trimmable} can be taken back"
            )
        if count == 0:
            return
        keys, values = self._newest(self.offset - self._first)
        kept = keys.shape[2] - count
        self.keys, self.values = (keys[:, :, :kept], values[:, :, :kept]) if kept else (None, None)
        self.offset -= count
        self._undoable = max(0, self._undoable - count)
        self._ring = False


# -- what both caches share -------------------------------------------------------------------------------------------


def _one_position(keys: mx.array) -> None:
    if keys.shape[2] != 1:
        raise ValueError(f"append_decode writes one position, got {keys.shape[2]}; append_window writes several")


def _grown(buffer: Rows | None, new: Rows, slots: int, limit: int | None = None, reserved: int = 0) -> Rows:
    """`buffer` with room for at least `slots` rows, grown in steps of 256, to `reserved`, and never past `limit`."""
    have = 0 if buffer is None else buffer.shape[2]
    if have >= slots:
        return buffer
    want = -(-max(slots, reserved) // STEP) * STEP
    want = want if limit is None else min(want, limit)
    room = like(new, lambda part: mx.zeros((*part.shape[:2], want - have, part.shape[3]), dtype=part.dtype))
    return room if buffer is None else joined([buffer, room])


def _joined(stored: Rows | None, new: Rows) -> Rows:
    return new if stored is None else joined([stored, new])


def _beside(stored: Rows | None, new: mx.array) -> mx.array:
    """Stored rows, unpacked, and a block's own."""
    return new if stored is None else mx.concatenate([unpacked(stored), new], axis=2)


def _slots(newest: int, window: int) -> np.ndarray:
    """The position that each live slot of the ring holds, in ring order."""
    live = np.arange(min(newest + 1, window))
    return newest - (newest - live) % window


def _selected(rows: CacheRows, chosen: Sequence[int]) -> CacheRows:
    padding = None if rows.padding is None else tuple(rows.padding[i] for i in chosen)
    if rows.keys is None:
        return CacheRows(None, None, rows.offset, padding, rows.packing)
    index = mx.array(list(chosen))
    return CacheRows(rows.keys[index], rows.values[index], rows.offset, padding, rows.packing)
