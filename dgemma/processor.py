"""Words to token ids and back: tokenizer, chat template, image places, and a reader of what the model writes.

The template and the tokenizer are the checkpoint's own, applied as transformers does (dgemma.words). Messages have
transformers' form (dgemma.messages).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dgemma.vision import BUDGETS, Patches, preprocess

from . import tools as tooling
from . import words
from .channels import Marks, Reader
from .config import ModelConfig, read_json
from .errors import CheckpointError, OptionError, PromptError
from .messages import WRITTEN_BY_MODEL, Message, check_messages, fill_images, in_place, is_image

TURN_TOKENS = ("<|turn>", "<turn|>")
TOOL_TOKENS = ("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", tooling.QUOTE)
MARKS = {
    "thought": "<|channel>",
    "thought_end": "<channel|>",
    "call": "<|tool_call>",
    "call_end": "<tool_call|>",
    "quote": tooling.QUOTE,
}  # names of channels.Marks
IMAGE_BUDGET = 280  # soft tokens an image may take where no processor config says otherwise


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it: token ids, each image as begin, soft tokens, end; and the images in that order."""

    ids: tuple[int, ...]
    images: tuple[Patches, ...]

    @property
    def image_tokens(self) -> int:
        """Soft tokens of all images."""
        return sum(image.soft_tokens for image in self.images)


class Processor:
    """The tokenizer and chat template of one checkpoint."""

    def __init__(
        self,
        tokenizer: Any,
        config: ModelConfig,
        *,
        image_budget: int = IMAGE_BUDGET,
        template: str | None = None,
        source: str | Path = "the tokenizer",
    ):
        """`tokenizer` is a dgemma.words.Words or transformers'; `template` stands in for its own; `source` names them in messages.

        CheckpointError when they do not fit the model or there is no template.
        """
        self.tokenizer, self.config, self.image_budget = tokenizer, config, image_budget
        self.template = tokenizer.chat_template if template is None else template
        if self.template is None:
            raise CheckpointError(f"{source}: no chat template; a chat_template.jinja is needed beside the tokenizer")
        if len(tokenizer) > config.text.vocab_size:
            raise CheckpointError(f"{source}: the tokenizer has {len(tokenizer)} tokens, the model {config.text.vocab_size}")
        images = tokenizer.convert_ids_to_tokens([config.image_token_id, config.boi_token_id, config.eoi_token_id])
        added = tokenizer.get_added_vocab()
        borders = (*TURN_TOKENS, *images, *TOOL_TOKENS, MARKS["thought"], MARKS["thought_end"])
        self._reserved = tuple(name for name in borders if name in added)
        self.marks = Marks(**{role: added.get(name) for role, name in MARKS.items()})
        # Special tokens never reach the text; borders do not either, where a tokenizer fails to mark them as special.
        self._hidden = frozenset(added[name] for name in self._reserved)

    @classmethod
    def open(cls, folder: str | Path, config: ModelConfig) -> Processor:
        """The tokenizer and template in a checkpoint folder. CheckpointError names what is missing or damaged."""
        if not any((Path(folder) / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
            raise CheckpointError(f"{folder}: no tokenizer.json; a checkpoint folder holds its tokenizer")
        try:
            tokenizer = words.load(Path(folder))
        except CheckpointError:
            raise
        except Exception as error:  # transformers raises what it likes: OSError, ValueError, KeyError, JSON errors
            reason = f"{type(error).__name__}: {_first_line(error)}"
            raise CheckpointError(f"{folder}: the tokenizer cannot be loaded ({reason})") from None
        return cls(tokenizer, config, image_budget=read_image_budget(Path(folder)), source=folder)

    def prompt(
        self,
        messages: Sequence[Message],
        images: Sequence[Any] = (),
        *,
        budget: int | None = None,
        tools: Sequence[Any] | None = None,
        thinking: bool = False,
    ) -> Prompt:
        """Token ids and images of a conversation that waits for the model's turn.

        `images` fill the image parts that name no picture, in order. `budget` is the most soft tokens an image may take.
        `tools` are declared (JSON schemas or Python functions), `thinking` is asked for, as the template does either.
        PromptError when places and images do not match, there is nothing to answer, or the template knows no tools.
        """
        filled, sources = fill_images(check_messages(messages), list(images))
        self._check_spelling(filled)
        declared = None if not tools else self._declare(tools)
        patches = self._cut(sources, budget)
        ids = self.tokenizer.encode(self.render(filled, declared, thinking), add_special_tokens=False)
        places = ids.count(self.config.image_token_id)
        if places != len(patches):
            raise PromptError(f"the chat template made {places} place(s) for {len(patches)} image(s)")
        text = [token for token in ids if token != self.config.image_token_id]  # that one may lie past the vocabulary
        if not text or max(text) >= self.config.text.vocab_size:
            raise CheckpointError(
                f"template and tokenizer make {'nothing' if not text else f'token {max(text)}'} of these messages; "
                f"tokens 0 to {self.config.text.vocab_size - 1} are needed"
            )
        return Prompt(tuple(self._expand(ids, patches)), patches)

    def pictured(self, messages: Sequence[Message], images: Sequence[Any] = (), budget: int | None = None) -> list[Message]:
        """The same messages, each picture in its place, cut to patches: they can be asked again when its file is gone.

        `images` and `budget` as of `prompt`. A picture given as a path keeps that as its `name`. PromptError, ImageError.
        """
        _, sources = fill_images(check_messages(messages), list(images))
        waiting, made = iter(zip(sources, self._cut(sources, budget))), []
        for message in messages:
            content = message.get("content") or ""
            if not isinstance(content, str):
                parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
                content = [in_place(part, *next(waiting)) if is_image(part) else part for part in parts]
            made.append({**message, "content": content})
        return made

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None, thinking: bool = False
    ) -> str:
        """The conversation as the template writes it, up to where the model's turn begins.

        `tools` are JSON schemas. PromptError when the template refuses the messages, or ignores tools or thinking.
        """
        plain = self._apply(messages)
        wanted = ({"tools": list(tools)} if tools else {}) | ({"enable_thinking": True} if thinking else {})
        for name, value in wanted.items():
            if self._apply(messages, **{name: value}) == plain:
                raise PromptError(f"the chat template of this checkpoint knows no {name.removeprefix('enable_')}")
        return self._apply(messages, **wanted) if wanted else plain

    def _apply(self, messages: Sequence[Message], **variables: Any) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.template, tokenize=False, add_generation_prompt=True, **variables
            )
        except Exception as error:  # jinja's TemplateError, or whatever a template's own code runs into
            raise PromptError(f"the chat template refuses these messages: {_first_line(error)}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated tokens, without control tokens."""
        shown = [i for i in ids if i not in self._hidden]
        return self.tokenizer.decode(shown, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def reader(self, prompt: Prompt, stops: Sequence[str] = (), thinking_budget: int | None = None) -> Reader:
        """What reads the answer to `prompt`. OptionError for a budget where the tokenizer knows no thoughts."""
        if thinking_budget is not None and self.marks.thought_end is None:
            raise OptionError(f"thinking_budget is {thinking_budget}, but this checkpoint's tokenizer has no {MARKS['thought_end']}")
        borders = (self.marks.thought, self.marks.thought_end, self.tokenizer.convert_tokens_to_ids(TURN_TOKENS[0]))
        last = next((i for i in reversed(prompt.ids) if i in borders), None)
        opened = last is not None and last == self.marks.thought  # some templates open the thought themselves
        return Reader(self.decode, self.marks, stops=stops, thinking_budget=thinking_budget, thinking=opened)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each token's own text, control tokens by their names; for drawing a canvas."""
        words = self.tokenizer.convert_ids_to_tokens([int(i) for i in ids])
        return [(word or "").replace("▁", " ") for word in words]

    def _check_spelling(self, messages: Sequence[Message]) -> None:
        """Refuse text that the tokenizer would read as the border of a turn or an image."""
        for number, message in enumerate(messages, 1):
            if message["role"] not in WRITTEN_BY_MODEL:
                for part in message["content"]:
                    self._refuse(part.get("text", ""), f"message {number}")
            beside = {key: value for key, value in message.items() if key not in ("role", "content")}  # names, calls
            try:
                text = json.dumps(beside, ensure_ascii=False, default=str)
                text.encode()  # half a surrogate pair is no text
            except (TypeError, ValueError, RecursionError) as error:
                raise PromptError(f"message {number} holds what cannot be written as text ({_first_line(error)})") from None
            self._refuse(text, f"message {number}")

    def _declare(self, tools: Sequence[Any]) -> list[dict[str, Any]]:
        declared = tooling.declarations(tools)
        for number, tool in enumerate(declared, 1):
            self._refuse(json.dumps(tool, ensure_ascii=False), f"tool {number}")
        return declared

    def _refuse(self, text: str, where: str) -> None:
        spelled = next((name for name in self._reserved if name in text or json.dumps(name)[1:-1] in text), None)
        if spelled is not None:
            raise PromptError(f"{where} spells {spelled}, which only the chat template may write; put a space inside it")

    def _cut(self, sources: Sequence[Any], budget: int | None) -> tuple[Patches, ...]:
        """The patches of each picture."""
        vision, most = self.config.vision, self.image_budget if budget is None else budget
        if budget is not None and (type(budget) is not int or budget not in BUDGETS):  # also where no picture is
            raise OptionError(f"image budget {budget!r}: allowed are {', '.join(map(str, BUDGETS))} soft tokens an image")
        if sources and vision is None:
            raise PromptError(
                f"{len(sources)} image(s) given, but this checkpoint has no vision tower: it reads text only"
            )
        return tuple(
            preprocess(source, budget=most, patch_size=vision.patch_size, pooling=vision.pooling_kernel_size, label=f"image {n}")
            for n, source in enumerate(sources, 1)
        )

    def _expand(self, ids: Sequence[int], images: Sequence[Patches]) -> list[int]:
        config, waiting, expanded = self.config, iter(images), []
        for token in ids:
            if token == config.image_token_id:
                soft = [config.image_token_id] * next(waiting).soft_tokens
                expanded += [config.boi_token_id, *soft, config.eoi_token_id]
            else:
                expanded.append(token)
        return expanded


def pad(prompts: Sequence[Prompt], pad_token_id: int) -> tuple[np.ndarray, list[int]]:
    """Ids `[B, L]` padded on the left, and how many slots of padding each row begins with."""
    length = max(len(prompt.ids) for prompt in prompts)
    padding = [length - len(prompt.ids) for prompt in prompts]
    rows = [[pad_token_id] * gap + list(prompt.ids) for gap, prompt in zip(padding, prompts)]
    return np.array(rows, dtype=np.int32), padding


def check_budget(budget: Any, source: str | Path) -> int:
    """Soft tokens an image may take, as `source` has it (None: the usual); CheckpointError when no tower makes so many."""
    if budget is not None and budget not in BUDGETS:
        raise CheckpointError(f"{source}: max_soft_tokens is {budget!r}; allowed are {', '.join(map(str, BUDGETS))}")
    return IMAGE_BUDGET if budget is None else budget


def read_image_budget(folder: Path) -> int:
    """What the checkpoint's processor config says of it."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (folder / name).exists():
            raw = read_json(folder / name)
            section = raw.get("image_processor") or raw
            budget = section.get("max_soft_tokens") if isinstance(section, dict) else None
            if budget is not None:
                return check_budget(budget, folder / name)
    return IMAGE_BUDGET


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
