"""Typed reads: what a model believes about the slots of a template, without writing anything.

    canvas = the template's tokens, pinned; noise in its slots; the end of the turn behind it
    one canvas pass -> log-probabilities at the slots' positions -> the probability of every choice

All templates of a call share one prefill: its caches are repeated, and every canvas is a row of a batch over them. Canvases
are as narrow as their template.

A choice of several tokens has the product of their probabilities, token j read with the tokens before it pinned in their
places and noise after it: one row for each beginning that choices share. A slot whose choices differ in length has a layout
for each length, since what stands behind the slot moves; every choice is read on the layout of its own length, and the
probabilities are normalised over all choices together: lengths are equally likely beforehand, and no product is corrected for
its length. While a slot is read the others hold noise, at the length of most of their choices (the shorter at a tie).

Draws. Each row begins with `mx.random.key(seed)` and draws as a block of dgemma.step does, so rows of one width hold the same
noise, and a question's result does not depend on those asked beside it. Of several draws the i-th takes `seed` + i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from .denoise import settle
from .errors import OptionError, PromptError
from .messages import Message, conversation
from .model import Cache, DiffusionGemma
from .processor import TURN_TOKENS, Processor, Prompt
from .settings import check_seed, whole
from .step import Options, seed_canvas
from .template import FREE, Pieces, Slot, Template, parse, read_slots

MOST = 64  # rows of a batch: each holds a copy of the caches
Line = tuple[int, ...]  # a canvas, FREE where noise is


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotRead:
    """What the model believes about one slot."""

    name: str
    probabilities: Mapping[str, float]  # of each choice; they add up to 1
    logprobs: Mapping[str, float]  # of each choice among all texts of its length: nats, not normalised over the choices
    tables: Mapping[int, np.ndarray] = field(repr=False)  # length of the slot -> log-probabilities [length, V], the slot all noise

    @property
    def best(self) -> str:
        """The most likely choice."""
        return max(self.probabilities, key=self.probabilities.get)

    @property
    def entropy(self) -> float:
        """How undecided it is between the choices, in nats: 0 when certain, log(choices) at most."""
        return max(0.0, -sum(p * math.log(p) for p in self.probabilities.values() if p > 0))

    @property
    def mass(self) -> float:
        """How much of its belief the choices cover, before they are normalised; over several lengths, at most one a length."""
        return sum(math.exp(one) for one in self.logprobs.values())

    def logprob(self, token: int, position: int = 0, length: int | None = None) -> float:
        """The log-probability, in nats, of any token at a position of the slot, all of the slot being noise.

        `length` picks a layout where the choices have several lengths; default the shortest. OptionError when out of range.
        """
        table = self.tables.get(min(self.tables) if length is None else length)
        if table is None:
            raise OptionError(f"slot {self.name!r} was not read with length {length}; {', '.join(map(str, self.tables))} is allowed")
        if not 0 <= position < len(table) or not 0 <= token < table.shape[1]:
            raise OptionError(
                f"token {token} at position {position} of slot {self.name!r}: "
                f"positions run to {len(table) - 1}, tokens to {table.shape[1] - 1}"
            )
        return float(table[position, token])


@dataclass(frozen=True)
class Read:
    """What the model believes about the slots of one template."""

    template: str
    slots: Mapping[str, SlotRead]
    text: str  # the template with each slot's most likely choice

    def __getitem__(self, name: str) -> SlotRead:
        """The slot of that name."""
        return self.slots[name]


# -- what reads and fills share ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What canvases stand after: a prompt, read and checked."""

    prompt: Prompt
    chunk: int | None

    @classmethod
    def of(cls, processor: Processor, prompt: Any, images: Any, budget: int | None, chunk: int | None) -> Asked:
        """`prompt` as Pipeline.stream takes one; None for pictures alone. PromptError, ImageError, OptionError."""
        pictures = [] if images is None else list(images) if isinstance(images, (list, tuple)) else [images]
        if prompt is None and not pictures:
            raise PromptError("neither a prompt nor a picture is given; the canvas has to stand after something")
        read = processor.prompt(_messages(prompt, pictures), pictures, budget=budget)
        room, limit = processor.config.canvas_length, processor.config.text.max_position_embeddings
        if len(read.ids) + room > limit:
            raise PromptError(f"the prompt has {len(read.ids)} tokens and the canvas {room}; the context is {limit}: shorten the prompt")
        if chunk is not None:
            whole("chunk", chunk, 1)
        return cls(read, chunk)

    def prefill(self, model: DiffusionGemma, options: Options) -> list[Cache]:
        """Caches that hold the prompt, for one row, packed if the options want that."""
        caches, features = model.make_caches(packing=options.packing), model.encode_images(self.prompt.images)
        model.prefill(np.array([self.prompt.ids], dtype=np.int32), features, caches, self.chunk)
        return caches


def _messages(prompt: Any, pictures: Sequence[Any]) -> list[Message]:
    if prompt is None:
        return [{"role": "user", "content": [{"type": "image"} for _ in pictures]}]
    return conversation(prompt, pictures)


def repeat(caches: Sequence[Cache], rows: int) -> Sequence[Cache]:
    """Caches of one row for a batch of `rows` canvases; the given ones where one is enough, for a canvas writes nothing."""
    if rows == 1:
        return caches
    memo = type(caches[0].memo)(None)
    return [cache.select([0] * rows, memo) for cache in caches]


def plain_ids(processor: Processor, text: str, what: str) -> list[int]:
    """Token ids of a text that a canvas is to hold. PromptError when it spells a control token."""
    ids = processor.tokenizer.encode(text, add_special_tokens=False)
    control = next((token for token in ids if token in control_ids(processor)), None)
    if control is not None:
        name = processor.tokenizer.convert_ids_to_tokens([control])[0]
        raise PromptError(f"{what} spells {name}, a control token; put a space inside it")
    return ids


def control_ids(processor: Processor) -> frozenset[int]:
    """The tokens that are no text."""
    return frozenset(i for i, token in processor.tokenizer.added_tokens_decoder.items() if token.special)


def end_id(processor: Processor, options: Options) -> int:
    """The token that ends an answer: the end of the turn, if the checkpoint stops at it."""
    turn = processor.tokenizer.convert_tokens_to_ids(TURN_TOKENS[1])
    return turn if turn in options.end_token_ids else options.end_token_ids[0]


def pieces_of(processor: Processor, template: Template, end: int | None) -> Pieces:
    """The template's text as token ids; `end` is pinned behind it unless it is None."""
    texts = tuple(tuple(plain_ids(processor, text, "the template")) for text in template.texts)
    return Pieces(texts, () if end is None else (end,))


def check_width(processor: Processor, longest: int, width: Any) -> None:
    """PromptError when a canvas of `longest` tokens is too long, OptionError when `width` is out of range."""
    most = processor.config.canvas_length
    if longest > most:
        raise PromptError(f"the template takes {longest} tokens, filled and ended; a canvas has {most}: shorten it")
    if width is not None and not longest <= whole("width", width, 1) <= most:
        raise OptionError(f"width is {width}; {longest} (the template's) to {most} (the canvas's) is allowed")


# -- reads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """One template, as token ids with the choices of its slots."""

    pieces: Pieces
    slots: tuple[Slot, ...]

    def line(self, place: int, length: int, beginning: Sequence[int], width: int | None) -> tuple[Line, int]:
        """The canvas on which slot `place` is `length` long and starts with `beginning`; and where the slot is."""
        lengths = [length if i == place else slot.usual for i, slot in enumerate(self.slots)]
        line, starts = self.pieces.canvas(lengths, width)
        line[starts[place] : starts[place] + len(beginning)] = beginning
        return tuple(line), starts[place]

    @property
    def longest(self) -> int:
        """Tokens of the longest canvas that is read without a width."""
        return max(len(self.line(i, max(slot.lengths), (), None)[0]) for i, slot in enumerate(self.slots))


@dataclass(frozen=True, kw_only=True)
class ReadJob:
    """A read, checked and ready for a model."""

    asked: Asked
    templates: tuple[Template, ...]
    written: tuple[str, ...]
    questions: tuple[Question, ...]
    options: Options
    steps: int
    seed: int
    draws: int
    width: int | None
    temperature: float

    @classmethod
    def of(
        cls, processor: Processor, options: Options, prompt: Any, images: Any, *, template: Any, choices: Any, steps: int = 1, seed: int = 0,
        draws: int = 1, width: int | None = None, temperature: float = 1.0, end: bool = True, image_budget: int | None = None, chunk: int | None = None,
    ) -> ReadJob:  # fmt: skip
        """What Pipeline.read is asked for. Raises PromptError, OptionError, ImageError."""
        written = tuple(template) if isinstance(template, (list, tuple)) else (template,)
        if not written:
            raise PromptError("no template is given; at least one is needed")
        templates = tuple(parse(one) for one in written)
        given = list(choices) if isinstance(choices, (list, tuple)) else [choices] * len(written)
        if len(given) != len(written):
            raise OptionError(f"{len(given)} dicts of choices for {len(written)} template(s); one for all, or one for each is needed")
        shared = frozenset(name for one in templates for name in one.marks) if isinstance(choices, Mapping) else frozenset()
        closing = end_id(processor, options) if end else None
        encode = lambda text: plain_ids(processor, text, "a choice")
        questions = tuple(
            Question(pieces_of(processor, one, closing), read_slots(one, words, encode, shared)) for one, words in zip(templates, given)
        )
        check_width(processor, max(one.longest for one in questions), width)
        if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 < temperature < math.inf:
            raise OptionError(f"temperature is {temperature!r}; a finite number above 0 is needed (default 1)")
        for name, value in (("steps", steps), ("draws", draws)):
            whole(name, value, 1)
        return cls(
            asked=Asked.of(processor, prompt, images, image_budget, chunk), templates=templates, written=written, questions=questions,
            options=options, steps=steps, seed=check_seed(seed), draws=draws, width=width, temperature=temperature,
        )  # fmt: skip

    def run(self, model: DiffusionGemma) -> list[Read]:
        """The reads, one a template."""
        caches = self.asked.prefill(model, self.options)
        drawn = [
            read(
                model, caches, self.questions, options=self.options, steps=self.steps, seed=(self.seed + i) % 2**64,
                width=self.width, temperature=self.temperature,
            )
            for i in range(self.draws)
        ]  # fmt: skip
        found = []
        for number, (written, template) in enumerate(zip(self.written, self.templates)):
            slots = [averaged(reads) for reads in zip(*(one[number] for one in drawn))]
            found.append(Read(written, {slot.name: slot for slot in slots}, template.filled([slot.best for slot in slots])))
        return found


@dataclass
class _Wanted:
    """What is to be read of one canvas, and what was found."""

    picks: dict[int, set[int]] = field(default_factory=dict)  # position -> tokens whose log-probability is wanted
    whole: set[int] = field(default_factory=set)  # positions of which every token's is
    logprobs: dict[tuple[int, int], float] = field(default_factory=dict)  # (position, token) -> nats
    tables: dict[int, np.ndarray] = field(default_factory=dict)  # position -> [V]


def read(
    model: DiffusionGemma,
    caches: Sequence[Cache],
    questions: Sequence[Question],
    *,
    options: Options,
    steps: int = 1,
    seed: int = 0,
    width: int | None = None,
    temperature: float = 1.0,
) -> list[list[SlotRead]]:
    """What the model believes about every slot of `questions`, after what `caches` hold (one row, left as they are).

    Before the pass that is read, `steps` - 1 ordinary denoising steps are taken by `options` (their noise, temperatures and
    acceptance), in which all that is pinned stays. `temperature` divides the logits that are read.
    """
    wanted: dict[Line, _Wanted] = {}
    for question in questions:
        for place, slot in enumerate(question.slots):
            _want(wanted, question, place, slot, width)
    by_width: dict[int, list[Line]] = {}
    for line in wanted:
        by_width.setdefault(len(line), []).append(line)
    for lines in by_width.values():
        for begin in range(0, len(lines), MOST):
            part = lines[begin : begin + MOST]
            _look_at(model, repeat(caches, len(part)), {line: wanted[line] for line in part}, options, steps, seed, temperature)
    return [
        [_slot_read(wanted, question, place, slot, width) for place, slot in enumerate(question.slots)] for question in questions
    ]


def _want(wanted: dict[Line, _Wanted], question: Question, place: int, slot: Slot, width: int | None) -> None:
    """Note every canvas that a slot needs: one for each length, and one for each beginning of its choices."""
    for tokens in slot.tokens:
        for j, token in enumerate(tokens):
            line, start = question.line(place, len(tokens), tokens[:j], width)
            note = wanted.setdefault(line, _Wanted())
            note.picks.setdefault(start + j, set()).add(token)
            if j == 0:
                note.whole.update(range(start, start + len(tokens)))


def _look_at(
    model: DiffusionGemma, caches: Sequence[Cache], wanted: dict[Line, _Wanted], options: Options, steps: int, seed: int, t: float
) -> None:
    """Read canvases of one width, as one batch."""
    canvas = np.array(list(wanted), dtype=np.int32)  # [R, C]
    state = seed_canvas(model, canvas, [mx.random.key(seed)] * len(canvas), canvas != FREE)
    if steps > 1:
        taking = settle(model, caches, state, options.exactly(steps - 1), range(len(canvas)))
        while True:
            try:
                next(taking)
            except StopIteration as end:
                state = end.value
                break
    hidden = model.canvas_hidden(state.tokens, caches, state.belief)  # [R, C, D]
    for row, note in enumerate(wanted.values()):
        places = sorted(note.picks.keys() | note.whole)
        logits = model.head(hidden[row, mx.array(places)]) / t  # [P, V]
        found = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        for place, line in zip(places, found):
            note.logprobs.update({(place, token): float(line[token]) for token in note.picks.get(place, ())})
            if place in note.whole:
                note.tables[place] = line


def _slot_read(wanted: dict[Line, _Wanted], question: Question, place: int, slot: Slot, width: int | None) -> SlotRead:
    """Put together what was read about one slot."""
    logprobs, tables = {}, {}
    for word, tokens in zip(slot.words, slot.tokens):
        logprobs[word] = 0.0
        for j, token in enumerate(tokens):
            line, start = question.line(place, len(tokens), tokens[:j], width)
            logprobs[word] += wanted[line].logprobs[start + j, token]
            if j == 0 and len(tokens) not in tables:
                tables[len(tokens)] = np.stack([wanted[line].tables[start + i] for i in range(len(tokens))])
    return SlotRead(slot.name, normalised(logprobs), logprobs, dict(sorted(tables.items())))


def averaged(reads: Sequence[SlotRead]) -> SlotRead:
    """Reads of one slot under several draws of noise as one: the mean of what they give each choice and each token."""
    if len(reads) == 1:
        return reads[0]
    mean = lambda logs: np.logaddexp.reduce(np.array(logs, dtype=np.float64), axis=0) - math.log(len(reads))
    logprobs = {word: float(mean([one.logprobs[word] for one in reads])) for word in reads[0].logprobs}
    tables = {length: mean([one.tables[length] for one in reads]).astype(np.float32) for length in reads[0].tables}
    return SlotRead(reads[0].name, normalised(logprobs), logprobs, tables)


def normalised(logprobs: Mapping[str, float]) -> dict[str, float]:
    """Probabilities of the choices that add up to 1."""
    top = max(logprobs.values())
    odds = {word: math.exp(one - top) for word, one in logprobs.items()}
    total = sum(odds.values())
    return {word: one / total for word, one in odds.items()}
