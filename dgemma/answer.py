"""One request being answered: what it gives as it goes, and the answers at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from . import tools
from .channels import CALL, TEXT, THOUGHT, Reader
from .denoise import Block, Done, Prefilled, denoise
from .messages import Message
from .model import DiffusionGemma
from .past import Past
from .processor import Processor, pad
from .settings import Request
from .step import Step
from .tools import ToolCall


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Where the time went; all rows of a batch share it."""

    load: float
    images: float
    prefill: float
    denoise: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the model said, and what it took."""

    text: str  # without thoughts, calls and control tokens
    tokens: tuple[int, ...]  # all that was written, thoughts and calls too
    finish_reason: str  # "stop": the model, or a stop string, ended it; "length": max_new_tokens did
    prompt_tokens: int  # images included
    image_tokens: int
    steps: tuple[int, ...]  # denoising steps of each block
    redrawn: int  # how often an empty first block was drawn again
    seed: int
    seconds: Seconds
    peak_memory: int  # bytes, of the whole call
    cached_tokens: int = 0  # of prompt_tokens, those that a session had encoded before
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_string: str | None = None  # the one that ended the text, which ends before it

    @property
    def message(self) -> Message:
        """The answer as a turn of the history: its text and complete calls, never its thoughts."""
        return tools.turn(self.text, self.tool_calls)

    @property
    def generated_tokens(self) -> int:
        """Tokens of the answer, the end token not counted."""
        return len(self.tokens)

    @property
    def blocks(self) -> int:
        """Blocks written."""
        return len(self.steps)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens of the answer per canvas pass."""
        return self.generated_tokens / max(1, sum(self.steps))


@dataclass(frozen=True)
class Text:
    """Text that a finished block adds to a row."""

    row: int
    delta: str


@dataclass(frozen=True)
class Thought:
    """Text that a finished block adds to a row's thoughts."""

    row: int
    delta: str


@dataclass(frozen=True)
class Called:
    """A tool call that a row has written; one that the end of the answer cut off comes too, with its problem."""

    row: int
    call: ToolCall


@dataclass(frozen=True)
class Finished:
    """The last event of a stream: the answers, one a row."""

    answers: tuple[Answer, ...]


Event = Prefilled | Step | Block | Text | Thought | Called | Finished
EVENTS = {TEXT: Text, THOUGHT: Thought, CALL: Called}


class Answering:
    """A request on its way: iterating gives its events, once. Closed between two of them, it stops there."""

    def __init__(
        self, model: DiffusionGemma, processor: Processor, request: Request, past: Past | None = None, load_seconds: float = 0.0
    ):
        """`past` is what the prompts are read into: new caches unless given."""
        self.model, self.request, self.load_seconds = model, request, load_seconds
        self._past, self._cached = past, 0
        self.rows = [Row(processor.reader(one, request.stops, request.thinking_budget)) for one in request.prompts]

    def __iter__(self) -> Iterator[Event]:
        mx.reset_peak_memory()
        clock, request = _Clock(), self.request
        ids, padding = pad(request.prompts, self.model.config.text.pad_token_id)
        past = self._past or Past(self.model, padding, request.options.packing)
        features = past.features(ids, [image for one in request.prompts for image in one.images])
        mx.eval(features)
        images_seconds = clock.lap()
        prefill_seconds = 0.0
        for event in denoise(
            self.model,
            ids,
            features,
            options=request.options,
            seeds=request.seeds,
            padding=padding,
            chunk=request.chunk,
            canvas=request.canvas,
            pins=request.pins,
            judges=[row.reader for row in self.rows],
            past=past,
        ):
            if isinstance(event, Prefilled):
                prefill_seconds, self._cached = clock.lap(), event.cached
            if isinstance(event, Done):
                seconds = Seconds(
                    load=self.load_seconds, images=images_seconds, prefill=prefill_seconds, denoise=clock.lap()
                )
                for i, row in enumerate(self.rows):
                    row.reader.finish(cut=event.reasons[i] == "length")
                    yield from row.events(i)
                yield Finished(tuple(self._answer(i, event, seconds) for i in range(len(self.rows))))
                return
            yield event
            if isinstance(event, Block):
                for i, tokens, steps in zip(event.rows, event.tokens, event.steps):
                    self.rows[i].tokens += tokens
                    self.rows[i].steps.append(steps)
                    yield from self.rows[i].events(i)

    def _answer(self, i: int, done: Done, seconds: Seconds) -> Answer:
        row, prompt = self.rows[i], self.request.prompts[i]
        return Answer(
            text=row.reader.text,
            thinking=row.reader.thinking,
            tool_calls=tuple(row.reader.calls),
            stop_string=row.reader.stop,
            tokens=tuple(row.tokens),
            finish_reason=done.reasons[i],
            prompt_tokens=len(prompt.ids),
            cached_tokens=self._cached,
            image_tokens=prompt.image_tokens,
            steps=tuple(row.steps),
            redrawn=done.redrawn[i],
            seed=self.request.seeds[i],
            seconds=seconds,
            peak_memory=mx.get_peak_memory(),
        )


@dataclass
class Row:
    """What one row has written so far."""

    reader: Reader

    def __post_init__(self) -> None:
        self.tokens: list[int] = []
        self.steps: list[int] = []

    def events(self, i: int) -> Iterator[Event]:
        """What its reader has read since the last call; `i` is the row's place."""
        return (EVENTS[channel](i, added) for channel, added in self.reader.take())


class _Clock:
    """Seconds since the last look."""

    def __init__(self) -> None:
        self._then = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last call, or since it was made."""
        then, self._then = self._then, time.perf_counter()
        return self._then - then
