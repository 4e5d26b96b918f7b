"""A model that writes what it is told, block by block: for what the demo checkpoint was not trained to write.

It stands where DiffusionGemma stands; loop, sampler, tokenizer, template and pipeline are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from dgemma import Pipeline, words
from dgemma.config import GenerationConfig, ModelConfig
from dgemma.hub import DEMO
from dgemma.processor import Processor
from dgemma.step import Options

Script = Callable[[int, list[int]], Sequence[int]]  # block, canvas as it is -> what the model believes it should be
TEMPLATE = (Path(__file__).parent / "released.jinja").read_text()


class Memo:
    """What a batch's caches know of its padding."""

    def __init__(self, padding):
        self.padding = padding


class Cache:
    """Which rows are at work, and how many blocks each has written."""

    def __init__(self, rows: Sequence[int], memo: Memo):
        self.rows, self.memo, self.blocks = list(rows), memo, 0

    def select(self, going, memo) -> Cache:
        """The rows that go on."""
        kept = Cache([self.rows[i] for i in going], memo)
        kept.blocks = self.blocks
        return kept


class Scripted:
    """One script a row. Hidden states `[R, C, 1]` are the ids it is sure of."""

    def __init__(self, config: ModelConfig, scripts: Sequence[Script]):
        self.config, self.scripts, self.prompts = config, scripts, []

    def make_caches(self, padding=None, packing=None):
        """One cache; nothing in it could be packed."""
        return [Cache(range(len(self.scripts)), Memo(padding))]

    def encode_images(self, images):
        """No images."""
        return []

    def prefill(self, ids, features, caches, chunk=None):
        """Keep the prompt for the test to look at."""
        self.prompts.append(np.array(ids))

    def extend(self, ids, caches):
        """A block is written."""
        caches[0].blocks += 1

    def canvas_hidden(self, canvas, caches, belief=None):
        """What each row's script says, from the canvas that it sees."""
        length, rows = self.config.canvas_length, []
        for row, tokens in zip(caches[0].rows, np.array(canvas).tolist()):
            said = list(self.scripts[row](caches[0].blocks, tokens))
            rows.append((said + [1] * length)[:length])
        return mx.array(np.array(rows, dtype=np.float32)[..., None])

    def scores(self, hidden):
        """Certainty: `[n, V]`."""
        return mx.where(hidden == mx.arange(self.config.text.vocab_size), 1000.0, -1000.0)

    def soft_embed(self, probabilities):
        """Nothing to tell the next step."""
        return mx.zeros((len(probabilities), 1))


def processor(template: str | None = TEMPLATE, canvas: int = 8) -> Processor:
    """The demo's tokenizer with a template, for canvases of that length."""
    return Processor(words.load(DEMO), replace(ModelConfig.read(DEMO), canvas_length=canvas), template=template)


def pipeline(*scripts: Script | Sequence[int], canvas: int = 8, room: int = 400, template: str | None = TEMPLATE) -> Pipeline:
    """A pipeline whose row i writes what `scripts[i]` says: a script, or token ids that go on from block to block."""
    talk = processor(template, canvas)
    rows = [one if callable(one) else _straight(list(one), canvas) for one in scripts]
    options = replace(Options.of(GenerationConfig.read(DEMO)), max_new_tokens=room)
    return Pipeline(Scripted(talk.config, rows), talk, options)


def _straight(ids: list[int], canvas: int) -> Script:
    return lambda block, _: ids[block * canvas : (block + 1) * canvas]
