"""The matrix of typed reads: prompts, templates as token ids, choices; and the draws. Numbers only, no torch.

A template is drawn as a list: a list is text, a tuple a slot, whose entries are its choices.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from oracle import cases, tiny


@dataclass(frozen=True, kw_only=True)
class ReadCase:
    """One read on one prompt of cases.CASES (of one row)."""

    case: str
    steps: int = 1
    width: int | None = None
    temperature: float = 1.0
    seed: int = 0
    t_min: float = 0.4
    t_max: float = 0.8
    entropy_bound: float = 0.4

    @property
    def name(self) -> str:
        return f"{self.case}-steps-{self.steps}" + ("" if self.width is None else f"-width-{self.width}")


PROMPTS = ("ring-short", "ring-one", "ring-three", "ring-pictures", "wide-one", "causal-one", "clipped-three", "google-three")
READS = {
    one.name: one
    for prompt in PROMPTS
    for one in (
        ReadCase(case=prompt, seed=3),
        ReadCase(case=prompt, seed=5, width=tiny.CANVAS, temperature=0.7),
        ReadCase(case=prompt, seed=7, steps=3),
    )
}


def template(read: ReadCase) -> list:
    """Two tokens, a slot whose choices take one, one token, a slot whose choices take one or two, two tokens; as drawn above."""
    stream = np.random.RandomState(zlib.crc32(read.name.encode()))
    text = lambda count: stream.randint(tiny.FIRST_TEXT, 96, count).tolist()
    words = stream.choice(np.arange(tiny.FIRST_TEXT, 96), 12, replace=False).tolist()
    short = tuple((word,) for word in words[:4])
    mixed = ((words[4],), (words[5], words[6]), (words[5], words[7]), (words[8], words[8]), (words[9],), (words[10], words[4]))
    return [text(2), short, text(1), mixed, text(2)]


def prompt(read: ReadCase, cut: cases.Cut) -> cases.Prompt:
    """The prompt of a read."""
    return cases.prompt(cases.CASES[read.case], cut)
