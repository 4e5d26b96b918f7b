"""DiffusionGemma: one stack of blocks, run in two ways.

    prompt, finished blocks --> encode  (causal, writes the caches)
    canvas                  --> canvas_logits  (bidirectional, reads the caches, writes nothing)

Both passes share every weight but the scalar that ends a layer. Images enter as rows of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dgemma.attention import KVCache, MaskMemo, Packing, RotatingKVCache, Rotary
from dgemma.vision import ImageEmbedder, Patches, VisionTower, image_blocks, place

from . import kernels
from .canvas import SelfConditioning, decode
from .config import SLIDING, ModelConfig
from .errors import OptionError, PromptError
from .layers import Block, Read, RMSNorm, one_ahead
from .matrices import Embedding

IMAGE_ATTENTION = ("encoder-window", "bidirectional")
CHUNK = 1024  # prompt positions per encoder pass, all rows together, unless the caller says otherwise
SCORES = 1 << 26  # attention scores of one head in a pass of the vision tower: bounds how many images share it

Cache = KVCache | RotatingKVCache


class DiffusionGemma(nn.Module):
    """The model of one checkpoint.

    `image_attention` says how the tokens of an image see each other in the encoder pass: "encoder-window" (the whole
    image, in every layer, as transformers does) or "bidirectional" (sliding layers only and inside the window, as
    Google's JAX code does).
    """

    def __init__(self, config: ModelConfig, image_attention: str = "encoder-window"):
        super().__init__()
        if image_attention not in IMAGE_ATTENTION:
            raise OptionError(f"image_attention is {image_attention!r}; allowed: {', '.join(IMAGE_ATTENTION)}")
        text = config.text
        self.config, self.image_attention = config, image_attention
        self.embed_tokens = Embedding(text.vocab_size, text.hidden_size)
        self.self_conditioning = SelfConditioning(text)
        self.layers = [Block(text, layer) for layer in text.layers]
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps)
        if config.vision is not None:
            self.vision_tower = VisionTower(config.vision)
            self.embed_vision = ImageEmbedder(config.vision, text.hidden_size, config.vision.rms_norm_eps)
        self._rotary = {layer.kind: Rotary(text.rope[layer.kind], layer.head_dim) for layer in text.layers}

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of activations."""
        return self.norm.weight.dtype

    # -- the encoder pass ---------------------------------------------------------------------------------------------

    def make_caches(self, padding: Sequence[int] | None = None, packing: Packing | None = None) -> list[Cache]:
        """Empty caches, one a layer, for a batch whose row b begins with `padding[b]` slots of padding; packed if so wanted."""
        memo, window = MaskMemo(padding), self.config.text.sliding_window
        return [
            RotatingKVCache(window, memo, packing) if layer.kind == SLIDING else KVCache(memo, packing)
            for layer in self.config.text.layers
        ]

    def encode_images(self, images: Sequence[Patches]) -> list[mx.array]:
        """Rows of the prompt for each image, `[n, D]`; images of one grid go through the tower together."""
        if images and self.config.vision is None:
            raise PromptError(f"{len(images)} image(s) given, but this checkpoint has no vision tower: it reads text only")
        features: list[mx.array | None] = [None] * len(images)
        for grid in dict.fromkeys(image.grid for image in images):
            same = [i for i, image in enumerate(images) if image.grid == grid]
            most = max(1, SCORES // len(images[same[0]].pixels) ** 2)
            for part in (same[i : i + most] for i in range(0, len(same), most)):
                pixels = mx.array(np.stack([images[i].pixels for i in part]))  # [B, N, 768]
                soft = self.embed_vision(self.vision_tower(pixels, mx.array(images[part[0]].positions)))
                for row, i in enumerate(part):
                    features[i] = soft[row]
        return features

    def encode(self, ids: np.ndarray, features: Sequence[mx.array], caches: Sequence[Cache]) -> mx.array:
        """One encoder pass: writes `ids [B, L]` to the caches; hidden states `[B, L, D]` after the last norm.

        `features` holds a row of the prompt for each image token of `ids`, in reading order, row after row.
        """
        text, image = self.config.text, self.config.image_token_id
        x = self._embed(mx.array(np.where(ids == image, text.pad_token_id, ids)))  # an image token without an image is padding
        blocks = None
        if features:
            x = place(x, ids, image, features)
            if text.use_bidirectional_attention == "vision":
                blocks = image_blocks(ids, image)
        angles = self._angles(caches[0], ids.shape[1])
        before = None
        for block, cache, layer in zip(self.layers, caches, text.layers):
            x = block.encode(x, angles[layer.kind], self._writer(cache, blocks))
            before = one_ahead(x, before)
        return self.norm(x)

    def _writer(self, cache: Cache, blocks: np.ndarray | None) -> Read:
        """The verb by which an encoder layer writes its cache."""
        if blocks is None:
            return cache.append_window
        verb = cache.append_encoder_window if self.image_attention == "encoder-window" else cache.append_bidirectional
        return lambda keys, values: verb(keys, values, blocks)

    def prefill(
        self, ids: np.ndarray, features: Sequence[mx.array], caches: Sequence[Cache], chunk: int | None = None
    ) -> None:
        """Write a whole prompt `ids [B, L]` to the caches, at most `chunk` positions a pass.

        A chunk never ends inside an image, so one that holds a large image may be longer; the result is the same.
        """
        features = list(features)
        size = max(1, CHUNK // len(ids)) if chunk is None else chunk
        for cache in caches:
            cache.reserve(cache.offset + ids.shape[1] + self.config.canvas_length)
        for begin, end in chunks(ids, self.config.image_token_id, size):
            part = ids[:, begin:end]
            taken, features = self._features_of(ids, begin, end, features)
            self.encode(part, taken, caches)
            mx.eval([array for cache in caches for array in cache.arrays])
            if end < ids.shape[1]:
                mx.clear_cache()  # what mlx keeps of a chunk fits no later one: every chunk's attention is wider

    def _features_of(
        self, ids: np.ndarray, begin: int, end: int, features: list[mx.array]
    ) -> tuple[list[mx.array], list[mx.array]]:
        """The features of the images inside positions begin..end of each row, and all of them for the next call."""
        if not features:
            return [], features
        blocks = image_blocks(ids, self.config.image_token_id)
        taken, first = [], 0
        for row in blocks:
            taken += [features[first + b] for b in np.unique(row[begin:end]) if b >= 0]
            first += int(row.max()) + 1
        return taken, features

    def extend(self, ids: mx.array, caches: Sequence[Cache]) -> None:
        """Write a finished block `ids [B, C]` to the caches."""
        self.encode(np.asarray(ids), [], caches)
        mx.eval([array for cache in caches for array in cache.arrays])

    # -- the canvas pass ----------------------------------------------------------------------------------------------

    def canvas_logits(
        self, canvas: mx.array, caches: Sequence[Cache], probabilities: mx.array | None = None
    ) -> mx.array:
        """Logits `[B, C, V]`, float32 and soft-capped, of a `canvas [B, C]` of token ids.

        `probabilities [B, C, V]` are what the previous step of this block believed (after temperature); None at its first.
        """
        belief = None if probabilities is None else self.soft_embed(probabilities)
        return self.head(self.canvas_hidden(canvas, caches, belief))

    def canvas_hidden(self, canvas: mx.array, caches: Sequence[Cache], belief: mx.array | None = None) -> mx.array:
        """The canvas pass up to the head: `[B, C, D]` of a `canvas [B, C]`; `belief [B, C, D]` is from `soft_embed`.

        Head and belief are apart because they alone are as wide as the vocabulary, and may be taken some rows at a time.
        """
        x = self.self_conditioning(self._embed(canvas), belief)
        angles = self._angles(caches[0], canvas.shape[1])
        turns = [angles[layer.kind] for layer in self.config.text.layers]
        return self.norm(decode(self.layers, x, turns, [cache.read_block for cache in caches]))

    def head(self, x: mx.array) -> mx.array:
        """Soft-capped logits `[..., V]`, float32, of hidden states `[..., D]`."""
        logits = self.scores(x).astype(mx.float32)  # entropies of 0.005 need more than bf16 keeps
        return kernels.softcap(logits, self.config.text.final_logit_softcapping)

    def scores(self, x: mx.array) -> mx.array:
        """Hidden states `[..., D]` through the transposed embedding: `[..., V]` in x's dtype, not capped yet."""
        return kernels.scores(x, self.embed_tokens)

    # -- shared -------------------------------------------------------------------------------------------------------

    def _embed(self, ids: mx.array) -> mx.array:
        return self._scaled(self.embed_tokens(ids).astype(self.dtype))

    def soft_embed(self, probabilities: mx.array) -> mx.array:
        """What a step believed, as self-conditioning reads it: `probabilities [..., V]` -> `[..., D]`."""
        return self._scaled(kernels.mix(probabilities.astype(self.dtype), self.embed_tokens))

    def _scaled(self, x: mx.array) -> mx.array:
        return x * mx.array(self.config.text.hidden_size**0.5, dtype=x.dtype)  # rounded first, as the reference does

    def _angles(self, cache: Cache, length: int) -> dict[str, tuple[mx.array, mx.array]]:
        """Rotary angles of `length` positions after what the caches hold, per layer kind; padding does not count."""
        positions = mx.arange(cache.offset, cache.offset + length)[None, :]
        if cache.memo.padding is not None:
            positions = positions - mx.array(cache.memo.padding)[:, None]
        return {kind: rotary.angles(positions) for kind, rotary in self._rotary.items()}


def chunks(ids: np.ndarray, image_token_id: int, size: int) -> list[tuple[int, int]]:
    """Cuts `[begin, end)` of a prompt `ids [B, L]` at most `size` long, longer only where an image would be split."""
    if size < 1:
        raise OptionError(f"the prefill chunk is {size}; at least 1 is needed")
    image = ids == image_token_id
    inside = (image[:, 1:] & image[:, :-1]).any(axis=0)  # no cut between position i and i + 1
    cuts, begin, length = [], 0, ids.shape[1]
    while begin < length:
        end = min(begin + size, length)
        while begin + 1 < end < length and inside[end - 1]:  # back to before the image
            end -= 1
        while end < length and inside[end - 1]:  # an image longer than a chunk is taken whole
            end += 1
        cuts.append((begin, end))
        begin = end
    return cuts
