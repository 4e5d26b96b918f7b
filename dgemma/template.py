"""Templates: text with named slots or holes, and where its tokens lie on a canvas. No model here.

    "The colour is [[colour]]."          a slot, to be read: it has a name, and choices
    "A [[1-3]] circle, [[2]] squares."   holes, to be filled: so many tokens

A word's token begins with the space before the word. So one space before a mark is the mark's own: the text around "[[colour]]"
above is "The colour is" and ".", and the choice "red" is read as " red".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import OptionError, PromptError

OPEN, CLOSE = "[[", "]]"
FREE = -1  # a position of a canvas that no token is given for

Encode = Callable[[str], list[int]]  # token ids of a plain text


@dataclass(frozen=True)
class Template:
    """A text with marks: `texts[0] leads[0] [[marks[0]]] texts[1] ...`; one text more than marks, a lead is " " or ""."""

    texts: tuple[str, ...]
    leads: tuple[str, ...]
    marks: tuple[str, ...]

    def filled(self, parts: Sequence[str]) -> str:
        """The text with `parts` where its marks are."""
        return "".join(text + lead + part for text, lead, part in zip(self.texts, (*self.leads, ""), (*parts, "")))


@dataclass(frozen=True)
class Slot:
    """A named place of a template and what may stand there: the choices as words and as token ids, in one order."""

    name: str
    words: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens its choices take: every length that occurs, the shortest first."""
        return tuple(sorted({len(one) for one in self.tokens}))

    @property
    def usual(self) -> int:
        """The length of most of its choices, the shorter one at a tie."""
        counts = [len(one) for one in self.tokens]
        return max(self.lengths, key=lambda length: (counts.count(length), -length))


@dataclass(frozen=True)
class Pieces:
    """A template's text as token ids: `texts` around its marks, and `end`, which follows the last of them."""

    texts: tuple[tuple[int, ...], ...]
    end: tuple[int, ...] = ()

    def canvas(self, lengths: Sequence[int], width: int | None = None) -> tuple[list[int], list[int]]:
        """Tokens of a canvas whose marks are `lengths` long, FREE at the marks, and where each mark begins.

        It is as long as the template, or `width` long: the rest is FREE.
        """
        line, starts = list(self.texts[0]), []
        for length, text in zip(lengths, self.texts[1:]):
            starts.append(len(line))
            line += [FREE] * length + list(text)
        line += self.end
        return line + [FREE] * ((width or 0) - len(line)), starts


def parse(template: Any) -> Template:
    """A template taken apart. PromptError where a mark is not closed, lies in another one, or there is none."""
    if not isinstance(template, str):
        raise PromptError(f"a template is {template!r}; a string is needed")
    if half := re.search("[\ud800-\udfff]", template):
        raise PromptError(f"the template is no Unicode text: half a surrogate pair (U+{ord(half[0]):04X})")
    texts, marks, begin, opened = [], [], 0, None
    for found in re.finditer(r"\[\[|\]\]", template):
        if found[0] == OPEN:
            if opened is not None:
                raise PromptError(f'the template opens "[[" at character {found.start() + 1} inside another; close that one first')
            texts.append(template[begin : found.start()])
            opened = found.end()
        else:
            if opened is None:
                raise PromptError(f'the template has "]]" at character {found.start() + 1} that closes nothing; open it with "[["')
            marks.append(template[opened : found.start()].strip())
            begin, opened = found.end(), None
    if opened is not None:
        raise PromptError(f'the template opens "[[" at character {opened - 1} and never closes it; "]]" does')
    if not marks:
        raise PromptError('the template has no hole; mark one as in "The colour is [[colour]]." or "A [[1-3]] circle."')
    leads = tuple(" " if text.endswith(" ") else "" for text in texts)
    kept = tuple(text.removesuffix(lead) for text, lead in zip(texts, leads))
    return Template((*kept, template[begin:]), leads, tuple(marks))


def hole_lengths(template: Template) -> tuple[range, ...]:
    """The lengths that each hole may have: [[2]] or [[1-3]] tokens. PromptError for other marks."""
    found = []
    for mark in template.marks:
        numbers = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", mark, re.ASCII)
        low, high = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (0, 0)
        if not 1 <= low <= high:
            raise PromptError(f"[[{mark}]] is no hole; its tokens are needed: [[2]], or a range from 1 upwards such as [[1-3]]")
        found.append(range(low, high + 1))
    return tuple(found)


def check_names(template: Template) -> None:
    """PromptError unless every mark is a slot's name and no name comes twice."""
    for number, mark in enumerate(template.marks):
        if not mark.isidentifier():
            raise PromptError(f"[[{mark}]] names no slot; a name of letters, digits and _ is needed, such as [[colour]]")
        if mark in template.marks[:number]:
            raise PromptError(f"the template has two slots named {mark!r}; every slot needs a name of its own")


def read_slots(template: Template, choices: Any, encode: Encode, others: frozenset[str] = frozenset()) -> tuple[Slot, ...]:
    """The slots of a template with their choices, in its order.

    `choices` maps each slot's name to words; `others` are names that belong to other templates. OptionError names the choice
    that is missing, empty, given twice or unknown, or that becomes other tokens in its place than alone.
    """
    check_names(template)
    if not isinstance(choices, Mapping):
        raise OptionError(f"choices are {choices!r}; a dict from slots to lists of words is needed")
    for name in choices:
        if name not in template.marks and name not in others:
            raise OptionError(f"choices for {name!r}, which is no slot of the template; it has {', '.join(template.marks)}")
    words = {name: _words(name, choices.get(name)) for name in template.marks}
    first = [words[name][0] for name in template.marks]
    pieces = [encode(text) for text in template.texts]
    alone = {name: [encode(lead + word) for word in words[name]] for name, lead in zip(template.marks, template.leads)}
    for place, name in enumerate(template.marks):
        for word, tokens in zip(words[name], alone[name]):
            parts = [tokens if other == name else alone[other][0] for other in template.marks]
            apart = [token for text, part in zip(pieces, (*parts, [])) for token in (*text, *part)]
            if not tokens or encode(template.filled([*first[:place], word, *first[place + 1 :]])) != apart:
                raise OptionError(
                    f"choice {word!r} of {name!r} becomes other tokens in its place than alone; "
                    "put a space or a whole word at the border of the slot"
                )
    return tuple(Slot(name, words[name], tuple(map(tuple, alone[name]))) for name in template.marks)


def _words(name: str, given: Any) -> tuple[str, ...]:
    """The choices of one slot, checked as words."""
    if isinstance(given, (str, bytes)) or not isinstance(given, (Sequence, type(None))):
        raise OptionError(f"choices of {name!r} are {given!r}; a list of words is needed")
    if not given:
        raise OptionError(f"slot {name!r} has no choices; at least one is needed")
    for number, word in enumerate(given):
        if not isinstance(word, str) or not word or re.search("[\ud800-\udfff]", word):
            raise OptionError(f"a choice of {name!r} is {word!r}; a word or a text is needed")
        if word in given[:number]:
            raise OptionError(f"choice {word!r} of {name!r} is given twice")
    return tuple(given)
