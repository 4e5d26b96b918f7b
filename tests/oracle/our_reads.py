"""The same reads by dgemma; no torch."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from dgemma.config import GenerationConfig
from dgemma.reading import Question, read as read_slots
from dgemma.sampler import EntropyBound
from dgemma.step import Options
from dgemma.template import Pieces, Slot
from oracle import cases, ours, reads

load = functools.lru_cache(maxsize=None)(ours.load)


def measure(read: reads.ReadCase) -> dict[str, np.ndarray]:
    """logprob/SLOT/CHOICE, nats, and table/SLOT/LENGTH [length, V]."""
    case, prompt = cases.CASES[read.case], reads.prompt(read, ours.cut)
    model = load(case.model, case.image_attention)
    caches = model.make_caches()
    model.prefill(prompt.ids, model.encode_images(ours.patches(prompt)), caches)
    options = replace(Options.of(GenerationConfig()), t_min=read.t_min, t_max=read.t_max, sampler=EntropyBound(read.entropy_bound))
    (slots,) = read_slots(
        model, caches, [question(read)], options=options, steps=read.steps, seed=read.seed, width=read.width,
        temperature=read.temperature,
    )  # fmt: skip
    found = {}
    for place, slot in enumerate(slots):
        found |= {f"logprob/{place}/{name}": np.array(value) for name, value in slot.logprobs.items()}
        found |= {f"table/{place}/{length}": table for length, table in slot.tables.items()}
    return found


def question(read: reads.ReadCase) -> Question:
    """The template of a read; choices go by their numbers."""
    parts = reads.template(read)
    slots = [part for part in parts if isinstance(part, tuple)]
    return Question(
        Pieces(tuple(tuple(part) for part in parts if isinstance(part, list))),
        tuple(Slot(str(i), tuple(map(str, range(len(one)))), one) for i, one in enumerate(slots)),
    )


def differences(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """The largest difference of each kind: log-probabilities in nats, and normalised probabilities of choices."""
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    worst = {}
    for name in mine:
        kind = f"{name.split('/')[0]}, nats"
        worst[kind] = max(worst.get(kind, 0.0), float(np.abs(mine[name] - theirs[name]).max()))
    for slot in ("0", "1"):
        one, other = (normalised([float(d[n].item()) for n in sorted(d) if n.startswith(f"logprob/{slot}/")]) for d in (mine, theirs))
        worst["probability of a choice"] = max(worst.get("probability of a choice", 0.0), float(np.abs(one - other).max()))
    return worst


def normalised(logprobs: list[float]) -> np.ndarray:
    """Probabilities that add up to 1."""
    odds = np.exp(np.array(logprobs) - max(logprobs))
    return odds / odds.sum()
