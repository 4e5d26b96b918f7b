"""Filling holes and revising drafts: canvases of which a part is given.

    fill      text around the holes is pinned at every step; a length that is a range is tried as rows of a batch
    revise    a finished text, some of its positions replaced by noise, denoised again

Draws. Each row begins with `mx.random.key(seed)`, all lengths of a fill with the same one; `revise` first splits it and draws C
uniform numbers, by which it chooses the positions that become noise. Then they draw as a block of dgemma.step does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .denoise import settle
from .errors import OptionError, PromptError
from .model import Cache, DiffusionGemma
from .processor import Processor
from .reading import MOST, Asked, check_width, control_ids, end_id, pieces_of, plain_ids, repeat
from .settings import check_seed, whole
from .step import FORBIDDEN, Allowed, Options, Step, seed_canvas
from .template import FREE, Pieces, Template, hole_lengths, parse

PINNED, ANY, WORD = range(3)  # kinds of positions: held; any text; text that begins with a space
LAYOUTS = 1024  # combinations of hole lengths that are tried; each is a row


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A template with its holes filled."""

    text: str
    holes: tuple[str, ...]  # what stands in each hole, without the space before it that is the template's
    tokens: tuple[int, ...]  # of the text, the end left out
    lengths: tuple[int, ...]  # tokens of each hole
    confidence: float  # nats: mean log-probability of the canvas's tokens, each with all the others in place
    steps: int  # denoising steps that the chosen canvas took
    tried: int  # combinations of lengths
    seed: int


@dataclass(frozen=True, kw_only=True)
class Revision:
    """A draft, written again."""

    text: str
    tokens: tuple[int, ...]
    draft: tuple[int, ...]  # its tokens
    renoised: tuple[int, ...]  # positions of the canvas that began as noise, those behind the draft left out
    steps: int
    seed: int


# -- filling ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FillJob:
    """A template to be filled, checked and ready for a model."""

    processor: Processor
    asked: Asked
    template: Template
    pieces: Pieces
    layouts: tuple[tuple[int, ...], ...]  # the lengths of the holes, one entry a candidate
    options: Options
    seed: int
    width: int | None

    @classmethod
    def of(
        cls, processor: Processor, options: Options, template: Any, prompt: Any, images: Any, *, seed: int = 0, width: int | None = None,
        end: bool = True, image_budget: int | None = None, chunk: int | None = None,
    ) -> FillJob:  # fmt: skip
        """What Pipeline.fill is asked for. Raises PromptError, OptionError, ImageError."""
        parsed = parse(template)
        ranges = hole_lengths(parsed)
        pieces = pieces_of(processor, parsed, end_id(processor, options) if end else None)
        check_width(processor, len(pieces.canvas([one[0] for one in ranges])[0]), None)
        tried = math.prod(map(len, ranges))
        if tried > LAYOUTS:
            raise OptionError(f"the holes' lengths make {tried} combinations; at most {LAYOUTS} are tried: narrow the ranges")
        check_width(processor, len(pieces.canvas([one[-1] for one in ranges])[0]), width)
        return cls(
            processor=processor, asked=Asked.of(processor, prompt, images, image_budget, chunk), template=parsed, pieces=pieces,
            layouts=tuple(itertools.product(*ranges)), options=options, seed=check_seed(seed), width=width,
        )  # fmt: skip

    def run(self, model: DiffusionGemma) -> Iterator[Step | Filled]:
        """Steps of every candidate (`rows` are places in `layouts`), then the fill.

        Of several lengths the one whose finished canvas is the most confident is chosen: the highest mean log-probability of its
        tokens, pinned text included (a wrong length makes what surrounds it unlikely), from one pass over that canvas; the
        first at a tie.
        """
        caches = self.asked.prefill(model, self.options)
        allowed = text_tokens(self.processor, model)
        by_width: dict[int, list[int]] = {}
        for number, lengths in enumerate(self.layouts):
            by_width.setdefault(len(self.pieces.canvas(lengths, self.width)[0]), []).append(number)
        found: dict[int, tuple[float, np.ndarray, int]] = {}
        for numbers in by_width.values():
            for begin in range(0, len(numbers), MOST):
                part = numbers[begin : begin + MOST]
                lines, steps, scores = yield from self._candidates(model, repeat(caches, len(part)), part, allowed)
                found.update({number: one for number, one in zip(part, zip(scores, lines, steps))})
        best = max(sorted(found), key=lambda number: found[number][0])
        yield self._filled(best, *found[best])

    def _candidates(self, model: DiffusionGemma, caches: Sequence[Cache], numbers: Sequence[int], bias: mx.array):
        """Denoise candidates of one width as a batch; their canvases `[R, C]`, steps `[R]` and confidences `[R]`."""
        canvas = np.array([self.pieces.canvas(self.layouts[n], self.width)[0] for n in numbers], dtype=np.int32)
        kinds = np.where(canvas == FREE, ANY, PINNED)
        for row, number in enumerate(numbers):
            starts = self.pieces.canvas(self.layouts[number])[1]
            kinds[row, [start for start, lead in zip(starts, self.template.leads) if lead]] = WORD
            kinds[row, self._length(number) :] = PINNED  # what stands behind the template is the model's own affair
        keys = [mx.random.key(self.seed)] * len(numbers)
        state = seed_canvas(model, canvas, keys, canvas != FREE, Allowed(mx.array(kinds), bias))
        state = yield from settle(model, caches, state, self.options, numbers)
        tokens = mx.array(state.shown[0])
        logits = model.canvas_logits(tokens, caches)  # [R, C, V]
        sure = mx.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - mx.logsumexp(logits, axis=-1)  # [R, C]
        scores = [float(line[: self._length(n)].mean()) for n, line in zip(numbers, np.array(sure))]
        return state.shown[0], state.steps.tolist(), scores

    def _length(self, number: int) -> int:
        """Tokens of a candidate, the end included."""
        return len(self.pieces.canvas(self.layouts[number])[0])

    def _filled(self, number: int, confidence: float, line: np.ndarray, steps: int) -> Filled:
        lengths = self.layouts[number]
        starts = self.pieces.canvas(lengths)[1]
        spoken = [self.processor.decode(line[start : start + length]) for start, length in zip(starts, lengths)]
        holes = tuple(text.removeprefix(lead) for text, lead in zip(spoken, self.template.leads))
        return Filled(
            text=self.template.filled(holes), holes=holes, lengths=lengths, confidence=confidence, steps=steps,
            tokens=tuple(line[: self._length(number) - len(self.pieces.end)].tolist()), tried=len(self.layouts), seed=self.seed,
        )  # fmt: skip


def text_tokens(processor: Processor, model: DiffusionGemma) -> mx.array:
    """The bias `[3, V]` of the kinds PINNED, ANY and WORD: a hole takes no control token, and a word's hole keeps its space."""
    vocabulary, known = model.config.text.vocab_size, len(processor.tokenizer)
    text = np.zeros(vocabulary, dtype=bool)
    text[:known] = True
    text[[i for i in control_ids(processor) if i < vocabulary]] = False
    names = processor.pieces(range(known))
    spaced = text.copy()
    spaced[:known] &= [name.startswith((" ", "Ġ")) for name in names]
    allowed = np.stack([np.ones(vocabulary, dtype=bool), text, spaced if spaced.any() else text])
    return mx.array(np.where(allowed, 0.0, FORBIDDEN)).astype(model.dtype)


# -- revising ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReviseJob:
    """A draft to be written again, checked and ready for a model."""

    processor: Processor
    asked: Asked
    draft: tuple[int, ...]
    end: int
    strength: float
    pins: Mapping[int, int]
    options: Options
    seed: int

    @classmethod
    def of(
        cls, processor: Processor, options: Options, draft: Any, prompt: Any, images: Any, *, strength: float = 0.4, seed: int = 0,
        pins: Any = None, image_budget: int | None = None, chunk: int | None = None,
    ) -> ReviseJob:  # fmt: skip
        """What Pipeline.revise is asked for. Raises PromptError, OptionError, ImageError."""
        if not isinstance(draft, str) or not draft.strip():
            raise PromptError(f"the draft is {draft!r}; a text to revise is needed")
        if any("\ud800" <= char <= "\udfff" for char in draft):
            raise PromptError("the draft is no Unicode text: half a surrogate pair")
        ids, most = plain_ids(processor, draft, "the draft"), processor.config.canvas_length
        if len(ids) + 1 > most:
            raise PromptError(f"the draft takes {len(ids) + 1} tokens with its end; a canvas has {most}: shorten it")
        if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not 0 < strength <= 1:
            raise OptionError(f"strength is {strength!r}; a number above 0 and at most 1 is needed (default 0.4)")
        return cls(
            processor=processor, asked=Asked.of(processor, prompt, images, image_budget, chunk), draft=tuple(ids), end=end_id(processor, options),
            strength=strength, pins=check_pins(pins, most, processor.config.text.vocab_size), options=options, seed=check_seed(seed),
        )  # fmt: skip

    def run(self, model: DiffusionGemma) -> Iterator[Step | Revision]:
        """Steps, then the revision."""
        length, written = model.config.canvas_length, (*self.draft, self.end)
        key, drawn = mx.random.split(mx.random.key(self.seed))
        order = np.argsort(np.array(mx.random.uniform(shape=(length,), key=drawn))[: len(written)])
        renoised = sorted(order[: max(1, round(self.strength * len(written)))].tolist())
        canvas = np.full((1, length), FREE, dtype=np.int32)
        canvas[0, : len(written)] = written
        canvas[0, renoised] = FREE
        pinned = np.zeros(canvas.shape, dtype=bool)
        for position, token in self.pins.items():
            canvas[0, position], pinned[0, position] = token, True
        state = seed_canvas(model, canvas, [key], pinned)
        state = yield from settle(model, self.asked.prefill(model, self.options), state, self.options, (0,))
        line = state.shown[0][0].tolist()
        stop = next((i for i, token in enumerate(line) if token in self.options.end_token_ids), length)
        yield Revision(
            text=self.processor.decode(line[:stop]), tokens=tuple(line[:stop]), draft=self.draft, steps=int(state.steps[0]),
            renoised=tuple(i for i in renoised if i not in self.pins), seed=self.seed,
        )  # fmt: skip


def check_pins(pins: Any, length: int, vocabulary: int) -> dict[int, int]:
    """Pins of one canvas; OptionError when one lies outside the canvas or the vocabulary."""
    if pins is not None and not isinstance(pins, Mapping):
        raise OptionError(f"pins are {pins!r}; a dict from positions to token ids is needed")
    for position, token in (pins or {}).items():
        whole("a pin's position", position, 0)
        whole("a pinned token", token, 0)
        if position >= length or token >= vocabulary:
            raise OptionError(f"pin {position} -> {token}: positions run to {length - 1}, tokens to {vocabulary - 1}")
    return {int(position): int(token) for position, token in (pins or {}).items()}
