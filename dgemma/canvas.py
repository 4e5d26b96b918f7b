"""The canvas pass's own parts: self-conditioning, and the walk of a canvas through the blocks."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .config import TextConfig
from .layers import Block, GeGLU, Read, RMSNorm, one_ahead, unweighted_norm


# Canvas positions of a batch from which on layers are computed while the next is laid out (layers.one_ahead): the temporaries
# of all of a large batch's layers are gigabytes. Waiting costs a small one time.
MANY = 512


class SelfConditioning(GeGLU):
    """Adds what the model believed one step ago (Chen, Zhang and Hinton 2022, arXiv:2208.04202) to a canvas.

    The belief arrives as a soft embedding: the probabilities' mean of the embedding rows. At a block's first step there
    is none and the signal is zero; the closing norm runs all the same.
    """

    def __init__(self, config: TextConfig):
        super().__init__(config.hidden_size, config.intermediate_size)
        self.pre_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eps = config.rms_norm_eps

    def __call__(self, canvas: mx.array, belief: mx.array | None) -> mx.array:
        """`canvas` and `belief`, both `[B, C, D]`, -> `[B, C, D]`."""
        if belief is not None:  # of a zero signal every part is zero: nothing to add
            canvas = canvas + super().__call__(self.pre_norm(belief))
        return unweighted_norm(canvas, self.eps)


def decode(
    blocks: Sequence[Block], x: mx.array, angles: Sequence[tuple[mx.array, mx.array]], reads: Sequence[Read]
) -> mx.array:
    """A canvas `x [B, C, D]` through all blocks; `angles` and `reads` are per block."""
    before = None
    for block, turn, read in zip(blocks, angles, reads):
        x = block.decode(x, turn, read)
        if x.shape[0] * x.shape[1] >= MANY:
            before = one_ahead(x, before)
    return x
