"""Typed reads by brute force through transformers: a canvas and a pass of its own for every token of every choice."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import torch
from transformers import DynamicCache

from oracle import cases, reads, reference


@torch.no_grad()
def measure(model: reference.Oracle, read: reads.ReadCase) -> dict[str, np.ndarray]:
    """logprob/SLOT/CHOICE, nats, and table/SLOT/LENGTH [length, V] of a read; as test_reading.ours files them."""
    prompt, case = reads.prompt(read, reference.cut), cases.CASES[read.case]
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    reference.encode(model, prompt.ids, prompt.padding, prompt, cache, case.image_attention)
    parts, found = reads.template(read), {}
    for slot, place in enumerate(i for i, part in enumerate(parts) if isinstance(part, tuple)):
        for number, choice in enumerate(parts[place]):
            total = 0.0
            for j, token in enumerate(choice):
                line, start = canvas(parts, place, choice[:j], len(choice), read.width)
                table = believed(model, cache, line, read)
                total += table[start + j, token]
                if j == 0:
                    found[f"table/{slot}/{len(choice)}"] = table[start : start + len(choice)]
            found[f"logprob/{slot}/{number}"] = np.array(total)
    return found


def canvas(parts: list, place: int, beginning: tuple, length: int, width: int | None) -> tuple[list, int]:
    """The token of each position, None where noise is, and where the slot `place` begins."""
    line, start = [], 0
    for i, part in enumerate(parts):
        if i == place:
            start = len(line)
            line += [*beginning, *[None] * (length - len(beginning))]
        elif isinstance(part, list):
            line += part
        else:
            sizes = [len(choice) for choice in part]
            line += [None] * max(sorted(set(sizes)), key=sizes.count)  # max takes the first, the shorter, at a tie
    return line + [None] * ((width or 0) - len(line)), start


def believed(model: reference.Oracle, cache: DynamicCache, line: list, read: reads.ReadCase) -> np.ndarray:
    """Log-probabilities [C, V] of a canvas, after the steps before the one that is read."""
    vocabulary, key = model.config.text_config.vocab_size, mx.random.key(read.seed)
    held = np.array([token is not None for token in line])
    given = np.array([-1 if token is None else token for token in line])

    def draw(*shape: int) -> np.ndarray:
        nonlocal key
        key, now = mx.random.split(key)
        return np.array(mx.random.uniform(shape=shape, key=now))

    noise = lambda uniforms: np.floor(uniforms * np.float32(vocabulary)).astype(int)
    tokens, signal = np.where(held, given, noise(draw(len(line)))), None
    for step in range(read.steps - 1, 0, -1):
        t = read.t_min + (read.t_max - read.t_min) * step / (read.steps - 1)
        signal = reference.logits(model, tokens[None], cache, [0], signal) / np.float32(t)
        chances, uniforms = np.exp(logs(signal[0])), draw(2, len(line))
        entropy = np.where(held, 0, -(chances * logs(signal[0])).sum(-1))
        rising = np.argsort(entropy, kind="stable")
        accepted = np.zeros(len(line), bool)
        accepted[rising] = np.cumsum(entropy[rising]) - entropy[rising] <= read.entropy_bound
        drawn = (np.cumsum(chances, -1) <= uniforms[0][:, None] * chances.sum(-1, keepdims=True)).sum(-1)
        tokens = np.where(held, given, np.where(accepted, drawn, noise(uniforms[1])))
    return logs(reference.logits(model, tokens[None], cache, [0], signal)[0] / read.temperature)


def logs(logits: np.ndarray) -> np.ndarray:
    """log softmax, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))
