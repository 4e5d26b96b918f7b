"""When a block is finished, and when an answer is.

A block rule judges each row from the most likely canvases so far (the newest last) and the newest entropies. It keeps
nothing between calls. An answer rule reads one row's finished blocks, and remembers what it has read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .errors import OptionError


class BlockRule(Protocol):
    """Says which rows of a block have settled."""

    history: int  # how many earlier canvases the rule wants to see

    def settled(self, best: Sequence[np.ndarray], entropy: np.ndarray) -> np.ndarray:
        """True for each settled row `[B]`: `best` are the block's canvases `[B, C]` so far, `entropy [B, C]` the newest."""
        ...


@dataclass(frozen=True)
class StableAndConfident:
    """The most likely canvas equals those of the last `stability` steps, and the mean entropy is below `confidence` nats."""

    stability: int = 1
    confidence: float = 0.005

    def __post_init__(self) -> None:
        if self.stability < 0:
            raise OptionError(f"stability is {self.stability}; a whole number of at least 0 is needed (default 1)")
        if not 0 < self.confidence < float("inf"):
            raise OptionError(f"confidence is {self.confidence}; a finite number above 0 is needed (default 0.005)")

    @property
    def history(self) -> int:
        """How many earlier canvases are compared."""
        return self.stability

    def settled(self, best: Sequence[np.ndarray], entropy: np.ndarray) -> np.ndarray:
        """True for each settled row `[B]`."""
        confident = entropy.mean(axis=-1) < self.confidence
        if len(best) <= self.stability:
            return np.zeros_like(confident)
        earlier = best[len(best) - 1 - self.stability : -1]
        return confident & np.all([(canvas == best[-1]).all(axis=-1) for canvas in earlier] or [True], axis=0)


@dataclass(frozen=True)
class StepsOnly:
    """Never settled: every block takes all its steps."""

    history: int = 0

    def settled(self, best: Sequence[np.ndarray], entropy: np.ndarray) -> np.ndarray:
        """False for each row `[B]`."""
        return np.zeros(len(entropy), dtype=bool)


class AnswerRule(Protocol):
    """Reads what one row emits, block by block: it may have a block written again, and end the answer."""

    def amend(self, tokens: Sequence[int]) -> Mapping[int, int] | None:
        """Positions of the block and the tokens to hold there while it is written again, once; None: it stands.

        `tokens` are what the block would emit. Nothing is remembered of them.
        """
        ...

    def push(self, tokens: Sequence[int]) -> int | None:
        """Take what the block emits; how many of these tokens are kept if the answer ends in it, None if it goes on."""
        ...


def cut(tokens: Sequence[int], end_token_ids: Sequence[int], room: int) -> tuple[list[int], str | None]:
    """A row's block up to its end token or to the `room` left, and why the answer ends there (None: it goes on)."""
    for index, token in enumerate(tokens[:room]):
        if token in end_token_ids:
            return list(tokens[:index]), "stop"
    return list(tokens[:room]), "length" if room <= len(tokens) else None
