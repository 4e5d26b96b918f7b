"""Events -> stdout and stderr: text as blocks finish, the canvas as it settles, a sign of life when something takes long.

stdout gets the answer and nothing else; the canvas, progress and statistics go to stderr.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TextIO

import mlx.core as mx

from . import render
from .denoise import Block, Prefilled
from .pipeline import Answer, Called, Event, Finished, Seconds, Text, Thought
from .step import Step

PATIENCE = 2.0  # seconds before progress is shown


def is_screen(stream: TextIO) -> bool:
    """Whether `stream` is a terminal on which the cursor can be moved."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def wants_colour(stream: TextIO) -> bool:
    """Whether escapes may be written: a terminal, and no NO_COLOR (no-color.org)."""
    return is_screen(stream) and not os.environ.get("NO_COLOR")


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """(columns, lines) of the terminal behind `stream`; 80 x 24 where it does not say."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns, lines = 0, 0
    return columns or 80, lines or 24


class Progress:
    """One line on a terminal's stderr that says what takes so long, from the third second on; silent elsewhere."""

    def __init__(self, wanted: bool = True):
        self._wanted = wanted and is_screen(sys.stderr)
        self._lock, self._end = threading.Lock(), threading.Event()
        self._label, self._detail, self._since, self._shown = "", "", 0.0, False

    def __enter__(self) -> Progress:
        if self._wanted:
            threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._end.set()
        self.hide()

    def now(self, label: str, detail: str = "") -> None:
        """What is being done from here on; the seconds count from a new label, not from a new detail."""
        with self._lock:
            if label != self._label:
                self._since = time.monotonic()
            self._label, self._detail = render.printable(label), detail

    def share(self, label: str) -> Callable[[int, int], None]:
        """A callback that says how much of something is done."""
        return lambda done, total: self.now(label, f", {100 * done // max(1, total)} %")

    def hide(self) -> None:
        """Say nothing until the next `now`: the line is needed for something else."""
        with self._lock:
            self._label = ""
            if self._shown:
                self._write("\r\x1b[K")
            self._shown = False

    def _run(self) -> None:
        while not self._end.wait(0.25):
            with self._lock:
                waited = time.monotonic() - self._since
                if self._label and (self._shown or waited >= PATIENCE):
                    columns, _ = terminal_size(sys.stderr)
                    line = f"{self._label}{self._detail}, {waited:.0f} s"
                    self._write(f"\r\x1b[90m{line[: columns - 1]}\x1b[0m\x1b[K")
                    self._shown = True

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


class Transcript:
    """What a stream has given so far, so that an interrupted one is an answer too."""

    def __init__(self, seed: int, load_seconds: float = 0.0, image_tokens: int = 0):
        self.seed, self.load_seconds, self.image_tokens = seed, load_seconds, image_tokens
        self.text, self.tokens, self.steps, self.prompt_tokens, self.cached_tokens = "", [], [], 0, 0
        self.thinking, self.calls = "", []
        self.where = "before the first step"
        self.finished: Answer | None = None
        self._began, self._prefill = time.perf_counter(), 0.0

    def see(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, Prefilled):
            self.prompt_tokens, self.cached_tokens = event.prompt_tokens[0], event.cached
            self._prefill = self._elapsed()
        elif isinstance(event, Step):
            self.where = f"in block {event.block + 1}, step {event.step}"
        elif isinstance(event, Block):
            self.tokens += event.tokens[0]
            self.steps.append(event.steps[0])
        elif isinstance(event, Text):
            self.text += event.delta
        elif isinstance(event, Thought):
            self.thinking += event.delta
        elif isinstance(event, Called):
            self.calls.append(event.call)
        elif isinstance(event, Finished):
            self.finished = event.answers[0]

    def answer(self) -> Answer:
        """The answer; one that was cut off has the finish reason "interrupted", and images count as prefill."""
        if self.finished is not None:
            return self.finished
        prefill = self._prefill or self._elapsed()
        return Answer(
            text=self.text,
            thinking=self.thinking,
            tool_calls=tuple(self.calls),
            tokens=tuple(self.tokens),
            finish_reason="interrupted",
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            image_tokens=self.image_tokens,
            steps=tuple(self.steps),
            redrawn=0,
            seed=self.seed,
            seconds=Seconds(load=self.load_seconds, images=0.0, prefill=prefill, denoise=self._elapsed() - prefill),
            peak_memory=mx.get_peak_memory(),
        )

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began


class Speaker:
    """The answer's text on stdout as it comes; nothing when it is wanted elsewhere."""

    def __init__(self, wanted: bool = True):
        self._wanted, self._last = wanted, ""

    def say(self, delta: str) -> None:
        """Write some text now; a terminal gets no control characters."""
        if self._wanted and delta:
            sys.stdout.write(render.printable(delta) if sys.stdout.isatty() else delta)
            sys.stdout.flush()
            self._last = delta[-1]

    def end(self, empty_too: bool = True) -> None:
        """Finish the line."""
        if self._wanted and self._last != "\n" and (self._last or empty_too):
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._last = ""


class Watch:
    """The canvas on stderr: redrawn in place on a terminal, a line a step elsewhere or under NO_COLOR."""

    def __init__(self, inks: render.Inks, steps: int):
        self._inks, self._steps = inks, steps
        self._screen = render.Screen() if wants_colour(sys.stderr) else None
        self._said = ""

    @property
    def holds_text(self) -> bool:
        """Whether the answer's text has to wait, because the canvas is drawn on the terminal that it goes to."""
        return self._screen is not None and sys.stdout.isatty()

    def step(self, step: Step) -> None:
        """Draw a step."""
        if self._screen is None:
            self._write(render.step_line(step, self._steps, self._inks) + "\n")
            return
        cells = [render.Cell(render.printable(self._said)), *render.step_cells(step, self._inks)]
        title = render.step_title(step, self._steps)
        self._write(self._screen.frame(title, cells, *terminal_size(sys.stderr)))

    def text(self, delta: str) -> None:
        """Text of a finished block stands before the canvas from here on."""
        self._said += delta

    def close(self) -> None:
        """Take the drawing away."""
        if self._screen is not None:
            self._write(self._screen.clear(terminal_size(sys.stderr)[0]))

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


class Muser:
    """Thoughts on stderr as they come, grey where there is colour; nothing unless they are wanted."""

    def __init__(self, wanted: bool):
        self._wanted, self._last = wanted, ""

    def say(self, delta: str) -> None:
        """Write some of a thought."""
        if self._wanted:
            grey, plain = (f"\x1b[{render.NOISE}m", "\x1b[0m") if wants_colour(sys.stderr) else ("", "")
            sys.stderr.write(grey + (render.printable(delta) if sys.stderr.isatty() else delta) + plain)
            sys.stderr.flush()
            self._last = delta[-1]

    def end(self) -> None:
        """Finish the line."""
        if self._last not in ("", "\n"):
            sys.stderr.write("\n")
            sys.stderr.flush()
        self._last = ""


def written(event: Text | Called, before: str) -> str:
    """An event as the answer shows it, after the text `before`: a complete call is a line of JSON, another is none."""
    if isinstance(event, Text):
        return event.delta
    if not event.call.complete:
        return ""
    return ("\n" if before and not before.endswith("\n") else "") + render.json_line(render.call_object(event.call))


def show(
    events: Iterable[Event],
    transcript: Transcript,
    speaker: Speaker,
    progress: Progress,
    watch: Watch | None,
    thoughts: bool = False,
) -> None:
    """Play a stream: note it, speak it, draw it. However it ends, the terminal is left in order and the text is out.

    `thoughts`: write them to stderr, unless the canvas is drawn there.
    """
    held, said, muser = "", "", Muser(thoughts and watch is None)
    try:
        progress.now("reading the prompt")
        for event in events:
            transcript.see(event)
            if isinstance(event, Step) and watch is not None:
                progress.hide()
                watch.step(event)
            elif isinstance(event, Step) and not transcript.text:
                progress.now(f"writing block {event.block + 1}", f", step {event.step}")
            elif isinstance(event, Thought):
                progress.hide()
                muser.say(event.delta)
            elif isinstance(event, (Text, Called)):
                progress.hide()
                muser.end()
                fresh = written(event, said)
                said += fresh
                if watch is not None:
                    watch.text(fresh)
                if watch is not None and watch.holds_text:
                    held += fresh
                else:
                    speaker.say(fresh)
    finally:
        progress.hide()
        muser.end()
        if watch is not None:
            watch.close()
        speaker.say(held)
        speaker.end(empty_too=transcript.finished is not None)
