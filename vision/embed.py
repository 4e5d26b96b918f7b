"""Soft tokens -> rows of the prompt, and where a prompt keeps its pictures."""

import mlx.core as mx
import numpy as np
from mlx import nn

from dgemma import kernels
from dgemma.config import VisionConfig
from dgemma.errors import PromptError


class ImageEmbedder(nn.Module):
    """Norm without weight, then a projection to the text width; `model.encoder.embed_vision.` in the checkpoint."""

    def __init__(self, config: VisionConfig, text_hidden: int, eps: float):
        super().__init__()
        self._eps = eps
        self.embedding_projection = nn.Linear(config.hidden_size, text_hidden, bias=False)

    def __call__(self, soft: mx.array) -> mx.array:
        """Soft tokens [.., vision hidden] -> rows [.., D], in the dtype of `soft`."""
        return kernels.linear(mx.fast.rms_norm(soft, None, self._eps), self.embedding_projection)


def image_blocks(ids: np.ndarray, image_token_id: int) -> np.ndarray:
    """Which picture each position of a prompt belongs to: int32 [B, L], -1 for text.

    A block is a run of soft tokens; blocks are counted from 0 in each row.

        ids     text boi img img eoi text boi img eoi
        blocks   -1   -1   0   0  -1   -1  -1   1  -1
    """
    soft = np.asarray(ids) == image_token_id  # [B, L]
    starts = soft & ~np.pad(soft, ((0, 0), (1, 0)))[:, :-1]
    return np.where(soft, starts.cumsum(axis=1) - 1, -1).astype(np.int32)


def place(rows: mx.array, ids: np.ndarray, image_token_id: int, features: list[mx.array]) -> mx.array:
    """`rows` [B, L, D] with those at soft tokens replaced by `features`, in reading order (row by row of the batch).

    features: one [n, D] a picture. Raises PromptError when their rows and the places in `ids` [B, L] differ in number.
    """
    soft = np.asarray(ids) == image_token_id  # [B, L]
    places, given = int(soft.sum()), sum(len(picture) for picture in features)
    if places != given:
        raise PromptError(f"the prompt has {places} image soft tokens, but its {len(features)} images fill {given}")
    if not features:
        return rows
    table = mx.concatenate(features).astype(rows.dtype)  # [places, D]
    index = np.maximum(soft.reshape(-1).cumsum() - 1, 0).reshape(soft.shape)  # [B, L]
    return mx.where(mx.array(soft)[..., None], table[mx.array(index)], rows)
