"""A conversation as messages, in transformers' form: checked, its pictures in their places.

The content of a message is a string or a list of parts:

    [{"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is this?"}]}]
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dgemma.vision import Patches

from . import tools
from .errors import PromptError

ROLES = ("system", "user", "assistant", "model", "tool")
WRITTEN_BY_MODEL = ("assistant", "model")
SOURCES = ("image", "url", "path")  # keys of an image part that may hold its picture
Message = dict[str, Any]


def conversation(prompt: str | Sequence[Message], images: Sequence[Any]) -> list[Message]:
    """Messages as they are; a plain string becomes a user's turn with a place for each image before the text."""
    if not isinstance(prompt, (str, list, tuple)):
        raise PromptError(f"a prompt is {_brief(prompt)}; a string or a list of messages is needed")
    if not isinstance(prompt, str):
        return list(prompt)
    if not prompt.strip():
        raise PromptError("the prompt is empty; ask something")
    parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": prompt}]
    return [{"role": "user", "content": parts}]


def check_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages, if they are a conversation that the model can answer; PromptError says what is wrong with which."""
    if not messages:
        raise PromptError("no messages; a conversation has at least one from the user")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or "role" not in message:
            raise PromptError(f"message {number} is {_brief(message)}; a dict with 'role' and 'content' is needed")
        if message["role"] not in ROLES:
            raise PromptError(f"message {number} has role {message['role']!r}; allowed: {', '.join(ROLES)}")
        content = message.get("content")
        if message.get("tool_calls") is not None:
            tools.check_calls(message, number)
            content = content or ""  # a turn of calls may say nothing
        if isinstance(content, str):
            _check_text(content, number)
            continue
        if not isinstance(content, (list, tuple)):
            raise PromptError(f"message {number} has content {_brief(content)}; a string or a list of parts is needed")
        for part in content:
            _check_part(part, number)
    if messages[-1]["role"] == "user" and not _says_something(messages[-1].get("content") or ""):
        raise PromptError("the prompt is empty; ask something")
    return list(messages)


def fill_images(messages: Sequence[Message], images: list[Any]) -> tuple[list[Message], list[Any]]:
    """Messages whose image parts are bare places, and a picture for each place in order.

    A part may carry its picture (`image`, `url` or `path`); the others are filled from `images`.
    """
    waiting, sources, filled = list(images), [], []
    missing = 0
    for message in messages:
        parts, content = [], message.get("content") or ""
        for part in [content] if isinstance(content, str) else content:
            if is_image(part):
                own = next((part[key] for key in SOURCES if part.get(key) is not None), None)
                if own is None and not waiting:
                    missing += 1
                    continue
                sources.append(own if own is not None else waiting.pop(0))
                parts.append({"type": "image"})
            else:
                parts.append({"type": "text", "text": part} if isinstance(part, str) else part)
        filled.append({**message, "content": parts})
    if missing or waiting:
        places = len(images) - len(waiting) + missing
        raise PromptError(
            f"{len(images)} image(s) for {places} empty image place(s) in the messages: "
            + (f"{missing} more needed" if missing else f"{len(waiting)} too many")
        )
    return filled, sources


def is_image(part: Any) -> bool:
    """Whether a part of a message is a picture, or a place for one."""
    return isinstance(part, dict) and part.get("type") == "image"


def in_place(part: dict[str, Any], source: Any, patches: Patches) -> dict[str, Any]:
    """An image part that holds its patches, and the name of the file that they came from."""
    named = {"name": os.fspath(source)} if isinstance(source, (str, os.PathLike)) and not str(source).startswith("data:") else {}
    return named | {key: value for key, value in part.items() if key not in SOURCES} | {"image": patches}


def image_parts(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """The parts of messages that are pictures, in reading order."""
    for message in messages:
        if not isinstance(message["content"], str):
            yield from (part for part in message["content"] if is_image(part))


def with_pictures(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    """The messages with `change(picture)` in the place of each picture."""
    made = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [{**part, "image": change(part["image"])} if is_image(part) else part for part in content]
        made.append({**message, "content": content})
    return made


def own(value: Any) -> Any:
    """What shares nothing that can be changed with `value`; pictures cannot, and are shared."""
    if isinstance(value, dict):
        return {key: own(one) for key, one in value.items()}
    return [own(one) for one in value] if isinstance(value, (list, tuple)) else value


def _check_part(part: Any, number: int) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, str):
        return _check_text(part, number)
    if kind == "text" and isinstance(part.get("text"), str):
        return _check_text(part["text"], number)
    if kind == "image":
        return
    raise PromptError(
        f"message {number} has a part {_brief(part)}; allowed: {{'type': 'text', 'text': ...}} and {{'type': 'image'}}"
    )


def _check_text(text: str, number: int) -> None:
    half = re.search("[\ud800-\udfff]", text)
    if half:
        raise PromptError(f"message {number} is no Unicode text: half a surrogate pair (U+{ord(half[0]):04X}); send UTF-8")


def _says_something(content: Any) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return any(
        (part if isinstance(part, str) else "image" if part["type"] == "image" else part["text"]).strip()
        for part in content
    )


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
