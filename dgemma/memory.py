"""What is remembered of one conversation, so that only what is new in it is encoded.

    prompt of this turn      <bos> system, question, answer, question ...      token ids and pictures
    what was encoded         <bos> system, question, answer                    ^ as far as these agree it can be kept

The caches are cut back to the longest part that the two share and the rest is encoded. Full layers forget their newest
positions at will. Sliding layers cannot once their ring has wrapped: for them rows are kept, in temporal order, at some of the
places where an encoder pass ended (`cuts`): the end of every prompt, and every so many tokens. Those copies and the pictures'
features share a number of bytes; what was used least recently goes first.

Cuts outlive the caches. A prompt that is encoded again is encoded in the passes of the first time, so that what comes out
is the same to the last bit, whatever was still in memory (warm = cold).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from dgemma.attention import CacheRows, KVCache, Packing, RotatingKVCache
from dgemma.vision import Patches

from .config import SLIDING
from .errors import OptionError
from .kept import Kept
from .model import CHUNK, Cache, DiffusionGemma, chunks
from .past import Past
from .shelf import Shelf, named

EVERY = 1024  # positions between two copies of the sliding layers' rows; their window in the released checkpoint
BUDGET = 1 << 31  # bytes of those copies and the pictures' features
Spelled = list[int | str]  # token ids, an image's soft tokens replaced by its digest


class Memory(Past):
    """The caches of a conversation of one row, and what it takes to cut them back.

    The sliding layers' rows are copied at the end of every prompt, and of the first pass that ends `every` positions or more after
    the last copy. `budget` bytes are for those copies and for the features of pictures. The caches themselves are not counted: they are
    as long as the conversation was at its longest since it last began anew. OptionError for an `every` below 1, a `budget` below 0.
    """

    def __init__(self, model: DiffusionGemma, packing: Packing | None = None, *, every: int = EVERY, budget: int = BUDGET):
        super().__init__(model, None, packing)
        for name, value, least in (("snapshot_every", every, 1), ("snapshot_bytes", budget, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"{name} is {value!r}; a whole number of at least {least} is needed")
        self.packing, self.every, self.kept = packing, every, Kept(budget)
        self.spelled: Spelled = []  # what has been encoded; it may be longer than what the caches hold
        self.cuts: list[int] = []  # ends of the passes in which it was, ascending
        self._coming: Spelled = []
        self._torn = False

    # -- a past (past.Past) -------------------------------------------------------------------------------------------

    def features(self, ids: np.ndarray, images: Sequence[Patches]) -> list[mx.array]:
        """Cut back to what the prompt `ids [1, L]` shares with what was encoded; the features of the images after that."""
        self._coming, begins = spell(ids[0].tolist(), images, self.model.config.image_token_id)
        same = shared(self.spelled, self._coming)
        self.cuts = [cut for cut in self.cuts if cut <= same]
        self.spelled = self.spelled[: self.cuts[-1] if self.cuts else 0]
        for cut in set(self._copies()).difference(self.cuts):
            self.kept.drop(cut)
        self._cut_back()
        return [self._feature(image) for begin, image in zip(begins, images) if begin >= self.length]

    def read(self, ids: np.ndarray, features: Sequence[mx.array], chunk: int | None = None) -> int:
        """Encode what of the prompt is not in the caches; how many positions were. `features` is what `features` returned for it.

        At most `chunk` positions a pass where it is new; what was encoded before, in the passes of then.
        """
        if len(self._coming) != ids.shape[1]:
            raise ValueError("read takes what `features` was asked about just before: it cuts back to what this prompt shares")
        cached, waiting = self.length, list(features)
        image, last = self.model.config.image_token_id, len(self.spelled)
        for cache in self.caches:
            cache.reserve(ids.shape[1] + self.model.config.canvas_length)
        new = [last + end for _, end in chunks(ids[:, last:], image, CHUNK if chunk is None else chunk)]
        for end in [cut for cut in self.cuts if cut > cached] + new:
            part = ids[:, self.length : end]
            taken = runs(part[0] == image)
            with self._unbroken():
                self.model.prefill(part, waiting[:taken], self.caches, part.shape[1])
                self._passed(self._coming[len(self.spelled) : end])
            waiting = waiting[taken:]
        self._coming = []
        self._copy()
        return cached

    def write(self, tokens: np.ndarray) -> None:
        """Encode a finished block `[1, C]`."""
        with self._unbroken():
            super().write(tokens)
            self._passed(tokens[0].tolist())

    def keep(self, rows: Sequence[int]) -> None:
        """A conversation has one row, and keeps it."""

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Positions that the caches hold."""
        return self.caches[0].offset

    @property
    def nbytes(self) -> int:
        """Bytes of the caches and of all that is kept beside them."""
        return sum(cache.nbytes for cache in self.caches) + self.kept.nbytes

    def forget(self) -> None:
        """Let go of everything but the cuts: what comes next is encoded anew, in the same passes."""
        with self._unbroken():
            self.caches = self.model.make_caches(None, self.packing)
            self.kept = Kept(self.kept.budget)

    def repack(self, packing: Packing | None) -> None:
        """From now on keys and values are packed like that; those that are packed otherwise are forgotten."""
        if packing != self.packing:
            with self._unbroken():
                self.packing = packing
                self.forget()

    # -- on a disk ----------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], dict[str, mx.array]]:
        """All that it holds, as a record (JSON) and arrays by name, for `restore` of a memory of the same model."""
        if self._torn or self.length not in (0, *self.cuts):  # broken off midway: no rows to go on from
            self.forget()
        arrays: dict[str, mx.array] = {}
        for number, cache in enumerate(self.caches):
            arrays |= named(f"now.{number}", *cache.temporal_view())
        kept: list[int | str] = [key for key in self.kept if isinstance(key, str) or key in self.cuts]
        for key in kept:
            thing = self.kept.peek(key)
            if isinstance(key, int):
                for number, rows in enumerate(thing):
                    arrays |= named(f"at {key}.{number}", rows.keys, rows.values)
            else:
                arrays[f"image {key}"] = thing
        packing = None if self.packing is None else [self.packing.bits, self.packing.group_size, self.packing.start]
        record = {
            "spelled": self.spelled, "cuts": self.cuts, "length": self.length, "kept": kept, "packing": packing,
            "every": self.every, "bytes": self.kept.budget,
        }  # fmt: skip
        return record, arrays

    @classmethod
    def restore(cls, model: DiffusionGemma, record: dict[str, Any], arrays: dict[str, mx.array]) -> Memory:
        """The memory whose `state` this is. KeyError, TypeError or ValueError when it is none."""
        packing = None if record["packing"] is None else Packing(*record["packing"])
        made = cls(model, packing, every=record["every"], budget=record["bytes"])
        made.spelled, made.cuts = list(record["spelled"]), list(record["cuts"])
        places, kept = [0, *made.cuts], record["kept"]
        if not all(type(place) is int for place in [*places, record["length"]]):
            raise ValueError(f"cut at {made.cuts}, and caches of {record['length']!r}")
        if not all(type(key) is str or (type(key) is int and key in made.cuts) for key in kept):
            raise ValueError(f"kept {kept}, cut at {made.cuts}")
        if sorted(set(places)) != places or places[-1] != len(made.spelled) or record["length"] not in places:
            raise ValueError(f"{len(made.spelled)} tokens, cut at {made.cuts}, and caches of {record['length']}")
        shelf, layers = Shelf(model, packing, arrays), model.config.text.layers
        made.caches = [
            restored(cache, shelf.rows(f"now.{number}", layer, record["length"]))
            for number, (cache, layer) in enumerate(zip(made.caches, layers))
        ]
        rings = [layer for layer in layers if layer.kind == SLIDING]
        for key in kept:
            if isinstance(key, int):
                rows = [shelf.rows(f"at {key}.{number}", layer, key) for number, layer in enumerate(rings)]
                made.kept.put(key, rows, sum(nbytes(one) for one in rows))
            else:
                rows, width = arrays[f"image {key}"], model.config.text.hidden_size
                if (rows.ndim, rows.shape[-1], rows.dtype) != (2, width, model.dtype):
                    raise ValueError(f"features of shape {rows.shape}, {rows.dtype}")
                made.kept.put(key, rows, rows.nbytes)
        return made

    # -- inside -------------------------------------------------------------------------------------------------------

    def _passed(self, tokens: Spelled) -> None:
        """An encoder pass has ended; `tokens` are new, none if it repeated one of before."""
        if tokens:
            self.spelled = self.spelled + tokens
            self.cuts.append(len(self.spelled))
        if self.length - max((cut for cut in self._copies() if cut < self.length), default=0) >= self.every:
            self._copy()

    def _copies(self) -> list[int]:
        return [key for key in self.kept if isinstance(key, int)]

    def _copy(self) -> None:
        """Keep the sliding layers' rows as they are now, in the budget; room is made first, so that at no time they take more."""
        rings = [cache for cache in self.caches if isinstance(cache, RotatingKVCache)]
        if self.length not in self.kept:
            views = [rows for ring in rings for rows in ring.temporal_view() if rows is not None]  # lazy: sizes alone
            if not self.kept.room(sum(rows.nbytes for rows in views)):
                return
            del views
            copies = [ring.capture_rows() for ring in rings]
            self.kept.put(self.length, copies, sum(nbytes(one) for one in copies))
        self.kept.get(self.length)

    def _cut_back(self) -> None:
        """Bring the caches back to the last cut that can be reached."""
        if self._torn:
            self.forget()
        for cut in reversed(self.cuts):
            if self._reachable(cut):
                break
        else:
            cut = 0
        if cut == 0:
            self.caches = self.model.make_caches(None, self.packing)
        elif cut < self.length:
            rows = self.kept.get(cut)
            waiting = None if rows is None else iter(rows)
            with self._unbroken():  # layers are trimmed in place, one after the other
                self.caches = [back(cache, cut, waiting) for cache in self.caches]

    def _reachable(self, cut: int) -> bool:
        """Whether the caches can be cut back to `cut`."""
        if cut >= self.length:
            return cut == self.length
        if self.packing is not None and cut < self.packing.start and self.caches[0].is_packed:
            return False  # they would be packed too early
        return cut in self.kept or all(cache.trimmable >= self.length - cut for cache in self.caches)

    def _feature(self, image: Patches) -> mx.array:
        """An image's rows of the prompt `[n, D]`: kept ones, or by the tower, which gets it alone, as it always does here."""
        rows = self.kept.get(image.digest)
        if rows is None or len(rows) != image.soft_tokens:
            (rows,) = self.model.encode_images([image])
            mx.eval(rows)
            self.kept.put(image.digest, rows, rows.nbytes)
        return rows

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """What is broken off here leaves layers of different lengths: then all is forgotten before the next pass."""
        self._torn = True
        yield
        self._torn = False


def back(cache: Cache, cut: int, rows: Iterator[CacheRows] | None) -> Cache:
    """A cache at position `cut`: a sliding layer's from its `rows`, if there are any, every other one trimmed."""
    if rows is not None and isinstance(cache, RotatingKVCache):
        return restored(cache, next(rows))
    cache.trim(cache.offset - cut)
    return cache


def restored(cache: Cache, rows: CacheRows) -> Cache:
    """A cache of the same kind and the same batch as `cache`, with those rows."""
    if isinstance(cache, RotatingKVCache):
        return RotatingKVCache.restore(rows, cache.window, cache.memo)
    return KVCache.restore(rows, cache.memo)


def nbytes(rows: CacheRows) -> int:
    """Bytes of a copy."""
    return 0 if rows.keys is None else rows.keys.nbytes + rows.values.nbytes


def spell(ids: Sequence[int], images: Sequence[Patches], image_token_id: int) -> tuple[Spelled, list[int]]:
    """A prompt with each image's soft tokens replaced by its digest, and where the images begin."""
    spelled, begins, place = list(ids), [], 0
    for image in images:
        place = spelled.index(image_token_id, place)
        begins.append(place)
        spelled[place : place + image.soft_tokens] = [image.digest] * image.soft_tokens
        place += image.soft_tokens
    return spelled, begins


def shared(a: Spelled, b: Spelled) -> int:
    """How long the beginning is that both have."""
    least, most = 0, min(len(a), len(b))
    while least < most:  # halved: lists are compared in C, 100,000 tokens in 1 ms, where a loop takes 13
        middle = (least + most + 1) // 2
        if a[least:middle] == b[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def runs(image: np.ndarray) -> int:
    """How many images `image [L]` (True at a soft token) has: each is one run, for there are tokens between two."""
    return int(image[0]) + int((image[1:] & ~image[:-1]).sum()) if len(image) else 0
