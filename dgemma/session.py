"""A conversation: turns that are sent, answered again, edited, broken off, saved. Only what is new is encoded.

    chat = pipe.chat(system="Be brief.")
    chat.send("What is in this image?", images=["shapes.png"]).text
    chat.send("And how many are red?").text          # encodes this question, nothing of what came before
    chat.edit(0, "Count the shapes.").text           # back to the first turn, with other words and the same picture

The turns are the truth, as messages; every prompt is made of them by the checkpoint's own template. What has been encoded of
them (dgemma.memory) only saves time: an answer is the same, token for token, whether it was there or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from dgemma.vision import Patches

from . import archive, tools
from .answer import Answer, Answering, Event, Finished
from .errors import ImageError, OptionError, PromptError, SessionError
from .fingerprint import fingerprint
from .memory import BUDGET, EVERY, Memory
from .messages import WRITTEN_BY_MODEL, Message, conversation, image_parts, own, with_pictures
from .model import DiffusionGemma
from .processor import Processor
from .settings import OF_THE_PROMPT, Request, whole
from .step import Options

FORMAT, VERSION = "dgemma session", 1
NOT_KEPT = ("tools", "canvas", "pins")  # settings that a file does not hold: functions, and what is for one answer


class Loaded(Protocol):
    """What a session answers with (Pipeline)."""

    model: DiffusionGemma
    processor: Processor
    options: Options


@dataclass(frozen=True)
class Turn:
    """What was asked, a message from the user or the results of tools, and what the model replied."""

    asked: tuple[Message, ...]
    reply: Message
    seed: int


class Session:
    """A conversation with one pipeline; `Pipeline.chat` makes it. For one thread at a time."""

    def __init__(
        self,
        pipe: Loaded,
        system: str | None = None,
        messages: Sequence[Message] | None = None,
        *,
        snapshot_every: int = EVERY,
        snapshot_bytes: int = BUDGET,
        **settings: Any,
    ):
        self._pipe, self._settings = pipe, own(_given(settings))
        of_the_answer = {name: value for name, value in self._settings.items() if name not in OF_THE_PROMPT}
        request = Request.of(pipe.options, 1, False, of_the_answer)
        self._memory = Memory(pipe.model, request.options.packing, every=snapshot_every, budget=snapshot_bytes)
        self._opening, self._turns = self._parted(system, messages, request.seeds[0])
        self._version, self._writing = 0, None

    # -- what was said ------------------------------------------------------------------------------------------------

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns so far."""
        return tuple(Turn(tuple(own(turn.asked)), own(turn.reply), turn.seed) for turn in self._turns)

    @property
    def messages(self) -> list[Message]:
        """The conversation as messages, which a pipeline or another session can go on from."""
        return own(self._told(self._turns))

    @property
    def cached_tokens(self) -> int:
        """Positions that are in the caches."""
        return self._memory.length

    @property
    def snapshot_bytes(self) -> int:
        """Bytes that copies of the sliding layers' rows and the features of pictures take; never more than the budget."""
        return self._memory.kept.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the caches and of all copies."""
        return self._memory.nbytes

    # -- verbs --------------------------------------------------------------------------------------------------------

    def send(self, message: str | Sequence[Message], images: Any = None, **settings: Any) -> Answer:
        """Say something, with pictures if wanted, and have the answer.

        `message` is a string, or messages: results of tools are `[{"role": "tool", "name": ..., "content": ...}]`. `images` and
        `settings` as of Pipeline.__call__; those given to Pipeline.chat hold where none is given here. PromptError,
        ImageError, OptionError; the conversation then is as it was.
        """
        return _last(self.stream(message, images, **settings))

    def stream(self, message: str | Sequence[Message], images: Any = None, **settings: Any) -> Iterator[Event]:
        """The same, as the events of Pipeline.stream. Input is checked before the first.

        Closed between two events, or interrupted (Ctrl-C), it keeps the blocks that are finished as the model's reply; a turn
        of which none is finished has not been.
        """
        return self._answer(self._turns, self._asked(message, images, settings), settings)

    def regenerate(self, turn: int = -1, **settings: Any) -> Answer:
        """Have a turn answered again, from the next seed unless one is given; the turns after it are gone."""
        return _last(self.stream_regenerate(turn, **settings))

    def stream_regenerate(self, turn: int = -1, **settings: Any) -> Iterator[Event]:
        """The same, as events."""
        place = self._place(turn)
        seed = (self._turns[place].seed + 1) % 2**64
        return self._answer(self._turns[:place], self._turns[place].asked, {"seed": seed} | _given(settings))

    def edit(self, turn: int, message: str | Sequence[Message], images: Any = None, **settings: Any) -> Answer:
        """Ask something else in a turn's place; the turns after it are gone. `images` None: the pictures it had; []: none."""
        return _last(self.stream_edit(turn, message, images, **settings))

    def stream_edit(self, turn: int, message: str | Sequence[Message], images: Any = None, **settings: Any) -> Iterator[Event]:
        """The same, as events."""
        place = self._place(turn)
        if images is None and isinstance(message, str):
            images = list(image_parts(self._turns[place].asked))
        return self._answer(self._turns[:place], self._asked(message, images, settings), settings)

    def forget(self) -> None:
        """Let go of all that is encoded; the next turn begins cold, with the same outcome. PromptError while an answer is written."""
        self._idle()
        self._memory.forget()

    # -- on a disk ----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write turns, pictures, settings and all that is encoded to one safetensors file, whole or not at all.

        Settings that are no plain values (tools) are left out, and given again to Pipeline.load_chat. OutputError, SessionError.
        """
        pictures = {image.digest: image for image in self._images()}
        memory, arrays = self._memory.state()
        record = {
            "settings": {name: value for name, value in self._settings.items() if name not in NOT_KEPT},
            "opening": _written(self._opening),
            "turns": [{"asked": _written(turn.asked), "reply": _written([turn.reply]), "seed": turn.seed} for turn in self._turns],
            "pictures": {
                digest: {"soft_tokens": image.soft_tokens, "size": image.size, "resized": image.resized}
                for digest, image in pictures.items()
            },
            "memory": memory,
        }
        for digest, image in pictures.items():
            arrays |= {f"pixels {digest}": mx.array(image.pixels), f"positions {digest}": mx.array(image.positions)}
        archive.write(path, FORMAT, VERSION, fingerprint(self._pipe.model), record, arrays)

    @classmethod
    def load(cls, pipe: Loaded, path: str | Path, **settings: Any) -> Session:
        """The session of a file that `save` wrote; Pipeline.load_chat. SessionError, OptionError."""
        for name in {"system", "messages"} & settings.keys():
            raise OptionError(f"{name} is part of what was saved; it cannot be given anew")
        settings = _given(settings)
        record, arrays = archive.read(path, FORMAT, VERSION, fingerprint(pipe.model))
        try:
            made = cls(pipe, **(record["settings"] | settings))
            pictures = {
                digest: Patches(
                    pixels=np.array(arrays[f"pixels {digest}"]), positions=np.array(arrays[f"positions {digest}"]),
                    soft_tokens=one["soft_tokens"], size=tuple(one["size"]), resized=tuple(one["resized"]),
                )
                for digest, one in record["pictures"].items()
            }  # fmt: skip
            made._opening = _read(record["opening"], pictures)
            made._turns = [
                Turn(_read(one["asked"], pictures), *_read(one["reply"], pictures), one["seed"]) for one in record["turns"]
            ]
            named = {name: settings[f"snapshot_{name}"] for name in ("every", "bytes") if f"snapshot_{name}" in settings}
            made._memory = Memory.restore(pipe.model, record["memory"] | named, arrays)
            if not all(type(turn.seed) is int and 0 <= turn.seed < 2**64 for turn in made._turns):
                raise ValueError(f"seeds {[turn.seed for turn in made._turns]}")
            if told := made._told(made._turns):
                made._pictured(told, (), {"image_budget": None})
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, PromptError, ImageError) as error:
            raise SessionError(f"{path}: holds what no session can ({type(error).__name__}: {error})") from None
        return made

    # -- inside -------------------------------------------------------------------------------------------------------

    def _answer(self, before: Sequence[Turn], asked: tuple[Message, ...], settings: Mapping[str, Any]) -> Iterator[Event]:
        request = Request.read(self._pipe, self._told([*before, asked]), None, self._settings | _given(settings))
        return self._events(list(before), asked, request, self._version)

    def _events(self, before: list[Turn], asked: tuple[Message, ...], request: Request, version: int) -> Iterator[Event]:
        answering = Answering(self._pipe.model, self._pipe.processor, request, self._memory)
        reader = answering.rows[0].reader
        self._idle()
        if version != self._version:
            raise PromptError("this chat has gone on since this stream was made; make it again")
        self._writing = request  # right before the try: an interruption between them would lock the chat
        try:
            self._memory.repack(request.options.packing)
            with closing(iter(answering)) as events:
                for event in events:
                    if isinstance(event, Finished):
                        self._turned(before, asked, event.answers[0].message, request)
                        self._writing = None  # who stops reading at the last event has read to the end
                    yield event
        except (GeneratorExit, KeyboardInterrupt):
            if version == self._version:
                reader.finish(cut=True)
                reply = tools.turn(reader.text, reader.calls)
                if reply["content"].strip() or reply.get("tool_calls"):
                    self._turned(before, asked, reply, request)
            raise
        finally:
            if self._writing is request:
                self._writing = None

    def _idle(self) -> None:
        if self._writing is not None:
            raise PromptError("this chat is writing another answer; read that stream to its end, or close it")

    def _turned(self, before: list[Turn], asked: tuple[Message, ...], reply: Message, request: Request) -> None:
        self._turns, self._version = [*before, Turn(asked, own(reply), request.seeds[0])], self._version + 1

    def _images(self) -> Iterator[Patches]:
        return (part["image"] for part in image_parts(self._told(self._turns)))

    def _told(self, turns: Sequence[Turn | tuple[Message, ...]]) -> list[Message]:
        """Messages of turns, the last of which may still be without a reply."""
        parts = [(*one.asked, one.reply) if isinstance(one, Turn) else one for one in turns]
        return [*self._opening, *(message for part in parts for message in part)]

    def _asked(self, message: Any, images: Any, settings: Mapping[str, Any]) -> tuple[Message, ...]:
        """A new turn's messages, its pictures in their places."""
        sources = [] if images is None else list(images) if isinstance(images, (list, tuple)) else [images]
        if isinstance(message, str) and message.strip():
            parts = [one if isinstance(one, dict) else {"type": "image", "image": one} for one in sources]
            asked, sources = [{"role": "user", "content": [*parts, {"type": "text", "text": message}]}], []
        else:
            asked = conversation(message, sources)
        for number, one in enumerate(asked, 1):
            role = one.get("role") if isinstance(one, dict) else None
            if role == "system" or role in WRITTEN_BY_MODEL:
                raise PromptError(f"message {number} of this turn has role {role!r}; a turn asks as user or tool")
        return tuple(self._pictured(asked, sources, settings))

    def _pictured(self, messages: Sequence[Message], sources: Sequence[Any], settings: Mapping[str, Any]) -> list[Message]:
        budget = (self._settings | _given(settings)).get("image_budget")
        try:
            return own(self._pipe.processor.pictured(messages, sources, budget))
        except RecursionError:
            raise PromptError("a message holds itself, or is nested too deep") from None

    def _parted(self, system: str | None, messages: Sequence[Message] | None, seed: int) -> tuple[tuple[Message, ...], list[Turn]]:
        """A conversation so far as its opening and its turns."""
        if system is not None and not isinstance(system, str):
            raise PromptError(f"system is {system!r}; a string is needed")
        if messages is not None and not isinstance(messages, (list, tuple)):
            raise PromptError(f"messages are of type {type(messages).__name__}; a list is needed")
        told = ([] if system is None else [{"role": "system", "content": system}]) + list(messages or ())
        if not told:
            return (), []
        told = self._pictured(told, (), {})
        opening = tuple(takewhile(lambda message: message["role"] == "system", told))
        turns, asked = [], []
        for message in told[len(opening) :]:
            if message["role"] not in WRITTEN_BY_MODEL:
                asked.append(message)
                continue
            if not asked:
                raise PromptError("an answer stands where a question is needed; turns begin with the user")
            turns.append(Turn(tuple(asked), message, seed))
            asked = []
        if asked:
            raise PromptError("the conversation ends with a question; leave it out and send it")
        return opening, turns

    def _place(self, turn: Any) -> int:
        count = len(self._turns)
        if not -count <= whole("turn", turn) < count:
            raise OptionError(f"turn is {turn}; this chat has {count} turn(s)" + (f", 0 to {count - 1}" if count else "; send something first"))
        return turn % count


def check_file(path: str | Path) -> None:
    """Refuse a file that no session can be loaded from, as far as its header tells; SessionError."""
    archive.check(path, FORMAT, VERSION)


def _written(messages: Sequence[Message]) -> list[Message]:
    """Messages with pictures' digests in the places of pictures."""
    return with_pictures(messages, lambda image: image.digest)


def _read(messages: Sequence[Message], pictures: Mapping[str, Patches]) -> tuple[Message, ...]:
    """What `_written` wrote, with the pictures."""
    return tuple(with_pictures(messages, lambda digest: pictures[digest]))


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that are given; None says that one is not."""
    return {name: value for name, value in settings.items() if value is not None}


def _last(events: Iterator[Event]) -> Answer:
    with closing(events):  # an interruption between two events would else leave the stream open, held by its traceback
        for event in events:
            if isinstance(event, Finished):
                return event.answers[0]
    raise AssertionError("a stream ends with Finished")
