"""Tools: declarations on their way into a template, calls on their way out, both as transformers' messages have them.

A declaration is a JSON schema, or a Python function with type hints and a Google-style docstring:

    {"type": "function", "function": {"name": "weather", "description": ..., "parameters": {"type": "object", ...}}}

A call is written by the model in the grammar of its template, where <|"|> is one token and no string can hold it:

    call:weather{city:<|"|>Turin<|"|>,days:[1,2],units:{celsius:true}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import PromptError

CALL = "call:"
QUOTE = '<|"|>'
NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
WORDS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}
DEEPEST = 64  # lists and maps inside each other; a canvas of brackets must not exhaust Python's stack
SHAPE = "{'type': 'function', 'function': {'name': ..., 'parameters': {...}}} or a Python function"


@dataclass(frozen=True)
class ToolCall:
    """A call that the model has written. One that is incomplete or cannot be read has a `problem`, and its text all the same."""

    name: str | None  # None where not even that much was written
    arguments: dict[str, Any] | None  # None with a problem
    text: str  # as written, between <|tool_call> and <tool_call|>
    problem: str | None = None  # one line

    @property
    def complete(self) -> bool:
        """Whether it can be carried out."""
        return self.problem is None


class Unreadable(ValueError):
    """A call that does not follow the grammar; the message is one line."""


def read_call(pieces: Sequence[str]) -> ToolCall:
    """The call whose text was cut at each quote token: `pieces` 0, 2, ... stand outside strings, 1, 3, ... are strings."""
    text = QUOTE.join(pieces)
    try:
        name, arguments = _Reading(pieces).call()
    except Unreadable as error:
        return broken_call(pieces, f"the tool call cannot be read: {error}")
    return ToolCall(name, arguments, text)


def broken_call(pieces: Sequence[str], problem: str) -> ToolCall:
    """A call without arguments: what was written of its name, its text, and what is wrong with it."""
    name = pieces[0].strip().removeprefix(CALL).partition("{")[0].strip() if pieces else ""
    return ToolCall(name or None, None, QUOTE.join(pieces), problem)


class _Reading:
    """A call being read: each atom is one character outside strings, or a whole string as a tuple of one."""

    def __init__(self, pieces: Sequence[str]):
        self._atoms: list[Any] = []
        for number, piece in enumerate(pieces):
            self._atoms += [(piece,)] if number % 2 else piece
        self._open = len(pieces) % 2 == 0  # an odd number of quotes
        self._at = 0

    def call(self) -> tuple[str, dict[str, Any]]:
        """Name and arguments of the whole."""
        if self._open:
            raise Unreadable("a string is not closed")
        self._skip()
        for character in CALL:
            self._expect(character)
        name = self._word("{").strip()
        if not name:
            raise Unreadable("it has no name")
        self._expect("{")
        arguments = self._map(1)
        self._skip()
        if self._at < len(self._atoms):
            raise Unreadable(f"{self._seen()} follows its end")
        return name, arguments

    def _value(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise Unreadable(f"its values are more than {DEEPEST} deep")
        self._skip()
        first = self._peek()
        if isinstance(first, tuple):
            self._at += 1
            return first[0]
        if first in ("{", "["):
            self._at += 1
            return self._map(depth + 1) if first == "{" else self._list(depth + 1)
        if first == '"':
            return self._json_string()
        return _bare(self._word(",}]").strip())

    def _map(self, depth: int) -> dict[str, Any]:
        """Up to and with its closing brace; the opening one has been read."""
        found: dict[str, Any] = {}
        while not self._closes("}", first=not found):
            self._skip()
            key = self._peek()
            if isinstance(key, tuple):
                self._at += 1
                key = key[0]
            else:
                key = self._json_string() if key == '"' else self._word(":,{}[]").strip()
                if not key and self._peek() == ":":
                    raise Unreadable("a key is missing")
            self._skip()
            self._expect(":")
            found[key] = self._value(depth)
        return found

    def _list(self, depth: int) -> list[Any]:
        """Up to and with its closing bracket; the opening one has been read."""
        found: list[Any] = []
        while not self._closes("]", first=not found):
            found.append(self._value(depth))
        return found

    def _closes(self, bracket: str, first: bool) -> bool:
        """Past `bracket`: True. Past the comma before the next item, which the first does not have: False."""
        self._skip()
        if self._peek() == bracket:
            self._at += 1
            return True
        if not first:
            self._expect(",")
        return False

    def _json_string(self) -> str:
        """A string in JSON's quotes, which models of this family write now and then."""
        rest = "".join(atom if isinstance(atom, str) else QUOTE + atom[0] + QUOTE for atom in self._atoms[self._at :])
        try:
            value, end = json.JSONDecoder(strict=False).raw_decode(rest)
        except ValueError:
            raise Unreadable("a string is not closed") from None
        while end > 0:  # back from characters to atoms
            atom = self._atoms[self._at]
            end -= 1 if isinstance(atom, str) else len(atom[0]) + 2 * len(QUOTE)
            self._at += 1
        return value

    def _word(self, ends: str) -> str:
        """Bare text up to one of `ends`, which stays."""
        begin = self._at
        while self._at < len(self._atoms) and isinstance(self._peek(), str) and self._peek() not in ends:
            self._at += 1
        return "".join(self._atoms[begin : self._at])

    def _expect(self, character: str) -> None:
        if self._peek() != character:
            raise Unreadable(f"{character} was expected where {self._seen()} stands")
        self._at += 1

    def _peek(self) -> Any:
        return self._atoms[self._at] if self._at < len(self._atoms) else None

    def _seen(self) -> str:
        atom = self._peek()
        return "its end" if atom is None else "a string" if isinstance(atom, tuple) else repr(atom)

    def _skip(self) -> None:
        while isinstance(self._peek(), str) and self._peek().isspace():
            self._at += 1


def _bare(word: str) -> Any:
    """What a value without quotes means: a number, true, false, null; anything else is text that lost its quotes."""
    if not word:
        raise Unreadable("a value is missing")
    if word in WORDS:
        return WORDS[word]
    match = NUMBER.fullmatch(word)
    if match is None:
        return word
    try:
        return float(word) if match[1] or match[2] else int(word)
    except ValueError:  # Python reads no whole number of more than 4,300 digits
        raise Unreadable(f"a number has {len(word)} digits") from None


# -- into the prompt --------------------------------------------------------------------------------------------------


def declarations(tools: Any) -> list[dict[str, Any]]:
    """JSON schemas of `tools`, as a template wants them; PromptError says which has another shape."""
    if not isinstance(tools, (list, tuple)):
        raise PromptError(f"tools are {_brief(tools)}; a list is needed, each {SHAPE}")
    return [_declaration(tool, number) for number, tool in enumerate(tools, 1)]


def _declaration(tool: Any, number: int) -> dict[str, Any]:
    if callable(tool):
        from transformers.utils import get_json_schema  # here: its import takes seconds, and only functions need it

        try:
            return get_json_schema(tool)
        except Exception as error:  # DocstringParsingException, TypeHintParsingException, and what inspect raises
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PromptError(f"tool {number} is a function without a usable docstring and type hints ({reason})") from None
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise PromptError(f"tool {number} is {_brief(tool)}; {SHAPE} is needed")
    if not isinstance(function.get("parameters", {}), dict):
        raise PromptError(f"tool {number} has parameters {_brief(function['parameters'])}; a JSON schema is needed")
    try:
        json.dumps(tool, ensure_ascii=False).encode()  # half a surrogate pair is no text either
    except (TypeError, ValueError) as error:
        raise PromptError(f"tool {number} is no JSON ({error})") from None
    return tool


def check_calls(message: dict[str, Any], number: int) -> None:
    """Refuse calls of an earlier turn that no template could write again; PromptError."""
    calls = message["tool_calls"]
    if not isinstance(calls, (list, tuple)):
        raise PromptError(f"message {number} has tool_calls {_brief(calls)}; a list is needed")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not named or not isinstance(function.get("arguments", {}), (dict, str)):
            raise PromptError(
                f"message {number} has a tool call {_brief(call)}; "
                "{'type': 'function', 'function': {'name': ..., 'arguments': {...}}} is needed"
            )


def turn(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """The message by which an answer enters the history: its text and its complete calls. Thoughts stay out."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    done = [call for call in calls if call.complete]
    if done:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for i, call in enumerate(done)
        ]
    return message


def _brief(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
