"""One denoising step's choices: temperature, which positions to accept, what the others become.

Pure functions of arrays; letters as elsewhere: B rows, C canvas positions. What is as wide as the vocabulary, entropies and
draws, is `believe` of dgemma.kernels. The rules are those of the model
card (google/diffusiongemma-26B-A4B-it) and of Ben-Hamu et al. 2025, "Accelerated sampling from masked diffusion models
via entropy bounded unmasking" (arXiv:2505.24857).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from .errors import OptionError


@dataclass(frozen=True)
class Statistics:
    """What the model believes about each position, after temperature."""

    best: mx.array  # [B, C] the most likely token
    entropy: mx.array  # [B, C] float32, nats
    confidence: mx.array  # [B, C] float32, the probability of `best`


def temperature(remaining: int, steps: int, t_min: float, t_max: float) -> float:
    """The schedule: t_max while `remaining` is `steps`, falling on a line towards t_min at 0 (1 is the last step)."""
    return t_min + (t_max - t_min) * remaining / steps


def noise(uniforms: mx.array, vocabulary: int) -> mx.array:
    """Tokens drawn evenly from the whole vocabulary; the model has no mask token."""
    return mx.minimum((uniforms * vocabulary).astype(mx.int32), vocabulary - 1)


class Sampler(Protocol):
    """Chooses the positions whose drawn tokens stay; every other position becomes noise."""

    def accept(self, statistics: Statistics) -> mx.array:
        """True where a position is accepted, `[B, C]`."""
        ...


@dataclass(frozen=True)
class EntropyBound:
    """Accept positions from the surest on while the entropies before them add up to at most `bound` nats.

    The sum bounds what the accepted positions can still tell each other, so they may be drawn independently. The surest
    position is always accepted.
    """

    bound: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.bound < float("inf"):
            raise OptionError(f"the entropy bound is {self.bound}; a finite number above 0 is needed (default 0.1)")

    def accept(self, statistics: Statistics) -> mx.array:
        """True where a position is accepted, `[B, C]`."""
        order = mx.argsort(statistics.entropy, axis=-1)
        ascending = mx.take_along_axis(statistics.entropy, order, axis=-1)
        chosen = mx.cumsum(ascending, axis=-1) - ascending <= self.bound
        return mx.put_along_axis(mx.zeros_like(chosen), order, chosen, axis=-1)


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Accept positions whose most likely token has at least probability `threshold`, and the surest one below it.

    After the confidence-aware decoding of Fast-dLLM (Wu et al. 2025, arXiv:2505.22618), which takes the surest masked
    position whatever its confidence, so that no step is idle. Here nothing is masked: a position that has settled is judged
    again at every step and is the surest of all, so the one taken for progress has to be the surest of the others. Among
    equals it is the first.
    """

    threshold: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise OptionError(f"the confidence threshold is {self.threshold}; a number in (0, 1] is needed (default 0.9)")

    def accept(self, statistics: Statistics) -> mx.array:
        """True where a position is accepted, `[B, C]`."""
        settled = statistics.confidence >= self.threshold
        undecided = mx.where(settled, -1.0, statistics.confidence)
        surest = undecided.argmax(axis=-1, keepdims=True)  # [B, 1] a settled one, accepted as it is, where none is below
        return mx.put_along_axis(settled, surest, mx.array(True), axis=-1)
