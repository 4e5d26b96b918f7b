"""What a canvas stands after: caches that hold a prompt and the finished blocks, and the three ways in which they change."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from dgemma.attention import Packing
from dgemma.vision import Patches

from .model import Cache, DiffusionGemma


class Past:
    """The caches of a batch, one entry a layer; row b begins with `padding[b]` slots of padding."""

    def __init__(self, model: DiffusionGemma, padding: Sequence[int] | None = None, packing: Packing | None = None):
        self.model, self.padding = model, padding
        self.caches: list[Cache] = model.make_caches(padding, packing)

    def features(self, ids: np.ndarray, images: Sequence[Patches]) -> list[mx.array]:
        """Rows of the prompt `[n, D]` for those of the images of `ids [B, L]` that `read` is going to need, in reading order."""
        return self.model.encode_images(images)

    def read(self, ids: np.ndarray, features: Sequence[mx.array], chunk: int | None = None) -> int:
        """Have the prompts `ids [B, L]` in the caches, with `features` of the same; how many positions were there already."""
        self.model.prefill(ids, features, self.caches, chunk)
        return 0

    def write(self, tokens: np.ndarray) -> None:
        """Add a finished block `[B, C]`."""
        self.model.extend(mx.array(tokens), self.caches)

    def keep(self, rows: Sequence[int]) -> None:
        """Let go of all rows of the batch but these."""
        if self.padding is not None:
            self.padding = [self.padding[row] for row in rows]
        memo = type(self.caches[0].memo)(self.padding)
        self.caches = [cache.select(rows, memo) for cache in self.caches]
