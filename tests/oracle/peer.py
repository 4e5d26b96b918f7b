"""mlx-vlm, made to convert checkpoints and to measure what `ours.py` measures; for a Python that has mlx-vlm."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_vlm.convert import convert as mlx_vlm_convert
from mlx_vlm.utils import load_model

from oracle.cases import Picture, Prompt
from oracle.formats import Conversion


def convert(source: Path, target: Path, conversion: Conversion) -> None:
    """A converted copy of a checkpoint folder (config in the released spelling) by mlx-vlm's own `convert`."""
    arguments = dict(conversion.arguments)
    if conversion.choose is not None:
        arguments["quant_predicate"] = lambda path, module: conversion.choose(path)
    with contextlib.redirect_stdout(io.StringIO()):
        mlx_vlm_convert(str(source), str(target), **arguments)


class Float32Embedding(nn.QuantizedEmbedding):
    """mlx unpacks the small float formats to bfloat16; what is compared shall not be rounded there."""

    def __call__(self, ids: mx.array) -> mx.array:
        return super().__call__(ids).astype(mx.float32)


def load(folder: Path) -> nn.Module:
    """A checkpoint as mlx-vlm loads it, all that is not packed in float32."""
    model = load_model(folder)
    halves = (mx.bfloat16, mx.float16)
    model.update(tree_map(lambda a: a.astype(mx.float32) if a.dtype in halves else a, model.parameters()))
    table = model.model.decoder.embed_tokens
    if isinstance(table, nn.QuantizedEmbedding):
        table.__class__ = Float32Embedding
    return model


def packs_patches(model: nn.Module) -> bool:
    """Whether the projection of the patches is quantised."""
    tower = model.model.encoder.vision_tower
    return tower is not None and isinstance(tower.patch_embedder.input_proj, nn.QuantizedLinear)


def unpack_patches(model: nn.Module) -> None:
    """A patch projection that works: mlx-vlm casts the patches to the dtype of its weight, which is uint32 when packed."""
    patches = model.model.encoder.vision_tower.patch_embedder
    packed = patches.input_proj
    settings = {"group_size": packed.group_size, "bits": packed.bits, "mode": packed.mode, "dtype": mx.float32}
    plain = nn.Linear(1, 1, bias=False)
    plain.weight = mx.dequantize(packed.weight, packed.scales, packed.get("biases"), **settings)
    patches.input_proj = plain


def measure(model: nn.Module, prompt: Prompt, canvases: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Features of the pictures, and logits of two canvases [1, C], the second conditioned on the first's.

    One row, at most one picture: mlx-vlm takes no padding here. The names are those of ours.measure.
    """
    ids, found, pictures = mx.array(prompt.ids), {}, {}
    if prompt.pictures:
        kinds = (ids == model.config.image_token_id).astype(mx.int32)
        pictures = {"pixel_values": mx.array(whole(prompt.pictures[0])), "mm_token_type_ids": kinds}
        found["vision/0"] = np.array(model.model.encoder.get_image_features(pictures["pixel_values"])[0])
    cache = model.make_cache()
    model.diffusion_prefill_cache(ids, cache=cache, **pictures)
    first = model.diffusion_decoder_logits(mx.array(canvases[0]), cache=cache)
    belief = model.diffusion_self_conditioning(first / 0.7, model.diffusion_prepare_self_conditioning())
    second = model.diffusion_decoder_logits(mx.array(canvases[1]), cache=cache, self_conditioning=belief)
    return found | {"logits/first": np.array(first), "logits/conditioned": np.array(second)}


def whole(picture: Picture) -> np.ndarray:
    """Patches put together again: float32 [1, 3, H, W]."""
    columns, rows = (int(last) + 1 for last in picture.positions[-1])
    tiles = picture.pixels.reshape(rows, columns, 16, 16, 3)
    return tiles.transpose(4, 0, 2, 1, 3).reshape(1, 3, 16 * rows, 16 * columns)
