"""What tells a loaded checkpoint from others: encodings of one are of no use to another.

Every bit of every weight takes part, and the weights are read where they lie: of each tensor, as whole numbers mod 2^32, the sums
of its rows and of its columns are hashed. So one changed number shows, and so do two that change places, and only sums leave the
GPU: about a thousandth of 52 GB. It is a checksum against mistakes, no proof against somebody who wants to be mistaken for another.
"""

from __future__ import annotations

import hashlib

import mlx.core as mx
from mlx.utils import tree_flatten

from .model import DiffusionGemma

WHOLE = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}  # bytes of a number -> what its bits are read as; their sums are uint32


def fingerprint(model: DiffusionGemma) -> str:
    """A digest, in hex, of all that an encoding depends on: geometry, how images attend, and names, shapes, dtypes and bits of all weights."""
    config = model.config
    digest = hashlib.sha256(repr((config.text, config.vision, config.image_token_id, model.image_attention)).encode())
    for name, array in sorted(tree_flatten(model.parameters())):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        for part in sums(array):
            digest.update(memoryview(part))
    return digest.hexdigest()


def sums(array: mx.array) -> tuple[mx.array, mx.array]:
    """The bits of an array `[..., M, N]` of any rank, as whole numbers, summed over N and over all else: uint32 `[... M]`, `[N]`."""
    bits = array.view(WHOLE[array.itemsize])
    rows = bits.reshape(-1, bits.shape[-1] if bits.ndim else 1)  # [... M, N]
    return rows.sum(axis=1), rows.sum(axis=0)
