"""What a model writes, told apart as it comes: thoughts, text and tool calls. Token ids in, pieces of text and calls out.

    <|channel>thought\n ... <channel|>      a thought, closed by the model, or by the budget (Reader.amend)
    <|tool_call>call: ... <tool_call|>      a call
    everything else                         text, up to a stop string

Borders are tokens: the same characters spelled letter by letter are text. No other control token reaches any channel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from . import tools
from .tools import ToolCall

TEXT, THOUGHT, CALL = "text", "thought", "call"
NAME = "thought\n"  # the line that a thought begins with
BETWEEN = "\n"  # several thoughts of one answer

Decode = Callable[[Sequence[int]], str]
Piece = tuple[str, "str | ToolCall"]  # channel, and what was added to it


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Ids of the tokens that part the channels; None for one that the tokenizer does not have."""

    thought: int | None = None
    thought_end: int | None = None
    call: int | None = None
    call_end: int | None = None
    quote: int | None = None


class TextStream:
    """Text as its tokens arrive: gives out only what later tokens can no longer change."""

    def __init__(self, decode: Decode):
        self._decode, self._ids, self._given = decode, [], 0

    def push(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that `tokens` add; half a character is held back until the rest comes or the text ends."""
        self._ids += tokens
        text = self._decode(self._ids)
        stop = len(text) if last else len(text.rstrip("\ufffd"))
        fresh, self._given = text[self._given : stop], max(self._given, stop)
        return fresh

    def reach(self, tokens: Sequence[int], length: int) -> int:
        """How many of `tokens`, the last that were pushed, the first `length` characters take."""
        before = self._ids[: len(self._ids) - len(tokens)]
        sizes = range(len(tokens))
        return bisect_left(sizes, length, key=lambda n: len(self._decode(before + list(tokens[:n])).rstrip("\ufffd")))


class Stops:
    """Finds stop strings in text that comes in pieces, and holds back what may yet become one.

    The string that is complete first ends the text, however the text was cut into pieces; of two that end together the longer.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held = tuple(stops), ""

    def push(self, fresh: str) -> tuple[str, str | None]:
        """What may be said now, and the stop string that ends the text here, if one does."""
        text, self._held = self._held + fresh, ""
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            return text[:at], stop
        longest = max(map(len, self._stops), default=1) - 1
        hold = next((n for n in range(min(longest, len(text)), 0, -1) if self._begins(text[-n:])), 0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], None

    def rest(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _begins(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)


@dataclass(frozen=True)
class State:
    """Where a row stands between two tokens."""

    channel: str = TEXT
    name: tuple[int, ...] | None = None  # the tokens of a thought that may still be its name line; None once past it
    used: int = 0  # tokens of all thoughts so far, name lines not counted


class Reader:
    """One row's answer, from its tokens. It judges blocks for denoise (stopping.AnswerRule) and keeps what they say."""

    def __init__(
        self,
        decode: Decode,
        marks: Marks,
        *,
        stops: Sequence[str] = (),
        thinking_budget: int | None = None,
        thinking: bool = False,
    ):
        """`decode` gives the text of ids without control tokens; `thinking`: the prompt has opened a thought already."""
        self._decode, self._marks, self._budget = decode, marks, thinking_budget
        self._state = State(THOUGHT if thinking else TEXT)
        self._stream, self._stops, self._cut = TextStream(decode), Stops(stops), 0
        self._thought, self._name, self._apart = TextStream(decode), None if thinking else "", False
        self._call: list[int] = []
        self._fresh: list[Piece] = []
        self.text, self.thinking = "", ""
        self.calls: list[ToolCall] = []
        self.stop: str | None = None  # the stop string that ended the text

    def amend(self, tokens: Sequence[int]) -> dict[int, int] | None:
        """Which positions of a block to hold while it is written again; None: it stands.

        A block in which a thought outgrows its budget keeps everything before the token that is one too many, and has
        the thought's end in that place; what follows is free.
        """
        if self._budget is None or self._marks.thought_end is None:
            return None
        state = self._state
        for at, token in enumerate(tokens):
            state = self._after(state, token)
            if state.channel == THOUGHT and state.used > self._budget:
                return {**dict(enumerate(tokens[:at])), at: self._marks.thought_end}
        return None

    def push(self, tokens: Sequence[int]) -> int | None:
        """Read what a block adds; how many of `tokens` are kept if a stop string ends the answer in it, else None."""
        tokens, begin = list(tokens), 0
        for at, token in enumerate(tokens):
            before, self._state = self._state, self._after(self._state, token)
            if self._borders(before, token):
                kept = self._say(before.channel, tokens[begin:at])
                if kept is not None:
                    return begin + kept
                self._cross(before, token)
                begin = at + 1
        kept = self._say(self._state.channel, tokens[begin:])
        return None if kept is None else begin + kept

    def finish(self, cut: bool) -> None:
        """No more tokens: give out what was held back. `cut`: the token limit ended the answer, not the model."""
        if self.stop is not None:
            return
        if self._state.channel == CALL:
            self._end_call("cut off by the token limit" if cut else "ended by the model before it was closed")
        elif self._state.channel == THOUGHT:
            self._think([], last=True)
        said, self.stop = self._stops.push(self._stream.push([], last=True))
        self._add(TEXT, said if self.stop is not None else said + self._stops.rest())

    def take(self) -> list[Piece]:
        """What has been added since the last call, in the order in which it was written."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def _after(self, state: State, token: int) -> State:
        """The state after one more token."""
        marks = self._marks
        if token == marks.call:
            return replace(state, channel=CALL)
        if token == marks.thought:
            return state if state.channel == THOUGHT else replace(state, channel=THOUGHT, name=())
        if (token, state.channel) in ((marks.thought_end, THOUGHT), (marks.call_end, CALL)):
            return replace(state, channel=TEXT)
        if state.channel != THOUGHT or token == marks.thought_end or token == marks.call_end:
            return state
        name = None if state.name is None else (*state.name, token)
        if name is not None and NAME.startswith(self._decode(name)):
            return replace(state, name=name)
        return replace(state, name=None, used=state.used + 1)

    def _borders(self, before: State, token: int) -> bool:
        """Whether a token parts channels; one that closes what is not open is passed over, but not read as text."""
        marks = self._marks
        if token == marks.quote:
            return before.channel != CALL
        return token in (marks.thought, marks.thought_end, marks.call, marks.call_end)

    def _cross(self, before: State, token: int) -> None:
        """Finish what ends at a border, begin what begins there."""
        marks, after = self._marks, self._state.channel
        if before.channel == THOUGHT and after != THOUGHT:
            self._think([], last=True)
        if before.channel == CALL and (after != CALL or token == marks.call):
            self._end_call(None if token == marks.call_end else "another channel was opened before it was closed")
        if after == THOUGHT and before.channel != THOUGHT:
            self._thought, self._name, self._apart = TextStream(self._decode), "", bool(self.thinking)

    def _say(self, channel: str, tokens: list[int]) -> int | None:
        """Add tokens to a channel; how many of them are kept if a stop string ends the text here."""
        if channel == CALL:
            self._call += tokens
        elif channel == THOUGHT:
            self._think(tokens)
        elif tokens:
            said, self.stop = self._stops.push(self._stream.push(tokens))
            self._add(TEXT, said)
            if self.stop is not None:
                return self._stream.reach(tokens, len(self.text))
        return None

    def _think(self, tokens: list[int], last: bool = False) -> None:
        """Add tokens to the thought, without its name line."""
        fresh = self._thought.push(tokens, last)
        if self._name is not None:
            self._name += fresh
            if NAME.startswith(self._name):
                return
            fresh, self._name = self._name.removeprefix(NAME), None
        if fresh and self._apart:
            fresh, self._apart = BETWEEN + fresh, False
        self._add(THOUGHT, fresh)

    def _end_call(self, problem: str | None) -> None:
        pieces: list[list[int]] = [[]]
        for token in self._call:
            if token == self._marks.quote:
                pieces.append([])
            else:
                pieces[-1].append(token)
        self._call = []
        texts = [self._decode(piece) for piece in pieces]
        call = tools.read_call(texts) if problem is None else tools.broken_call(texts, f"the tool call was {problem}")
        self.calls.append(call)
        self._fresh.append((CALL, call))

    def _add(self, channel: str, fresh: str) -> None:
        if not fresh:
            return
        if channel == TEXT:
            self.text += fresh
        else:
            self.thinking += fresh
        self._fresh.append((channel, fresh))
