"""dgemma, made to measure what `reference.py` measures; no torch."""

from __future__ import annotations

import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np

from dgemma import weights
from dgemma.denoise import Block, Done, denoise
from dgemma.model import DiffusionGemma
from dgemma.sampler import EntropyBound
from dgemma.step import Options
from dgemma.stopping import StableAndConfident
from dgemma.vision import Patches, preprocess
from oracle import tiny
from oracle.cases import ENCODER_WINDOW, Picture, Policy, Prompt
from oracle.record import Run


def load(name: str, image_attention: str = ENCODER_WINDOW) -> DiffusionGemma:
    """A tiny model by the name of its configuration, through a real checkpoint folder."""
    with tempfile.TemporaryDirectory() as folder:
        return load_folder(tiny.write_checkpoint(folder, name), image_attention)


def load_folder(folder: str | Path, image_attention: str = ENCODER_WINDOW) -> DiffusionGemma:
    """A checkpoint in float32, on whatever device mlx has."""
    return weights.load(folder, image_attention, mx.float32)


def measure(
    model: DiffusionGemma, prompt: Prompt, canvases: list[np.ndarray], chunk: int | None = None
) -> dict[str, np.ndarray]:
    """Everything that is compared of one prompt and two canvases [B, C]; the names are those of reference.measure.

    With a `chunk` the prompt is written in pieces, and its hidden states are left out: no pass has them all.
    """
    features = model.encode_images(patches(prompt))
    found = {f"vision/{i}": np.array(rows) for i, rows in enumerate(features)}
    cache = model.make_caches(prompt.padding if any(prompt.padding) else None)
    if chunk is None:
        hidden = np.array(model.encode(prompt.ids, features, cache))
        found |= {f"hidden/{row}": hidden[row, pad:] for row, pad in enumerate(prompt.padding)}
    else:
        model.prefill(prompt.ids, features, cache, chunk)
    found |= caches(cache, prompt.lengths)
    first = model.canvas_logits(mx.array(canvases[0]), cache)
    found["logits/first"] = np.array(first)
    belief = mx.softmax(first / 0.7, axis=-1)
    found["logits/conditioned"] = np.array(model.canvas_logits(mx.array(canvases[1]), cache, belief))
    block = np.array(model.encode(canvases[1], [], cache))
    found |= {f"block/hidden/{row}": block[row] for row in range(len(block))}
    found |= {f"block/{k}": v for k, v in caches(cache, [n + block.shape[1] for n in prompt.lengths]).items()}
    found["block/logits/first"] = np.array(model.canvas_logits(mx.array(canvases[0]), cache))
    return found


def cut(image: np.ndarray, budget: int) -> Picture:
    """The patches that dgemma makes of a picture uint8 [H, W, 3]."""
    made = preprocess(image, budget=budget)
    return Picture(pixels=made.pixels, positions=made.positions)


def patches(prompt: Prompt) -> list[Patches]:
    """A prompt's pictures as dgemma's model takes them."""
    made = []
    for picture in prompt.pictures:
        size = tuple(16 * (int(last) + 1) for last in picture.positions[-1])
        made.append(
            Patches(
                pixels=picture.pixels,
                positions=picture.positions,
                soft_tokens=picture.soft_tokens,
                size=size,
                resized=size,
            )
        )
    return made


def caches(cache: list, lengths: list[int]) -> dict[str, np.ndarray]:
    """Keys and values [K, S, E] of each layer and row, oldest first; a row's padding, on the left, is cut off.

    A sliding layer's view is `window` rows long; the reference keeps one less, which is all that a read can reach.
    """
    found = {}
    for index, layer in enumerate(cache):
        most = min(layer.offset, getattr(layer, "window", layer.offset + 1) - 1)
        for name, stored in zip(("keys", "values"), layer.temporal_view()):
            stored = np.array(stored)
            for row, length in enumerate(lengths):
                found[f"cache/{index}/{name}/{row}"] = stored[row, :, -min(length, most) :]
    return found


def generate(
    model: DiffusionGemma, prompt: Prompt, seeds: tuple[int, ...], policy: Policy, chunk: int | None = None
) -> Run:
    """dgemma's own loop. Empty first blocks are not drawn again: the reference does not."""
    options = Options(
        max_new_tokens=policy.max_new_tokens,
        max_denoising_steps=policy.max_denoising_steps,
        t_min=policy.t_min,
        t_max=policy.t_max,
        sampler=EntropyBound(policy.entropy_bound),
        rule=StableAndConfident(policy.stability, policy.confidence),
        end_token_ids=policy.end_token_ids,
        max_redraws=0,
    )
    features = model.encode_images(patches(prompt))
    padding = prompt.padding if any(prompt.padding) else None
    tokens, steps = [[] for _ in seeds], [[] for _ in seeds]
    for event in denoise(model, prompt.ids, features, options=options, seeds=seeds, padding=padding, chunk=chunk):
        if isinstance(event, Block):
            for row, new, taken in zip(event.rows, event.tokens, event.steps):
                tokens[row] += [int(token) for token in new]
                steps[row].append(int(taken))
        elif isinstance(event, Done):
            reasons = list(event.reasons)
    return Run(tokens=tokens, steps=steps, reasons=reasons)
