"""What both sides hand over, and how it is filed, thinned and compared."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oracle.cases import Policy

KEPT = 256  # numbers kept of a tensor in a golden


@dataclass(frozen=True, kw_only=True)
class Run:
    """A generation's outcome, a list a row: token ids (the end token left out), steps of each block, why it ended."""

    tokens: list[list[int]]
    steps: list[list[int]]
    reasons: list[str]
    margins: Any = None  # of the reference's runs only

    @property
    def outcome(self) -> dict[str, list]:
        return {"tokens": self.tokens, "steps": self.steps, "reasons": self.reasons}


def answers(blocks: list[list[list[int]]], steps: list[list[int]], policy: Policy, margins: Any) -> Run:
    """The reference's whole canvases as answers: up to the end token, or to exactly max_new_tokens."""
    tokens, reasons, taken = [], [], []
    for row in range(len(steps[0])):
        whole = [token for block in blocks for token in block[row]][: policy.max_new_tokens]
        end = next((i for i, token in enumerate(whole) if token in policy.end_token_ids), None)
        tokens.append(whole if end is None else whole[:end])
        reasons.append("length" if end is None else "stop")
        taken.append([block[row] for block in steps if block[row]])
    return Run(tokens=tokens, steps=taken, reasons=reasons, margins=margins)


def thin(name: str, array: np.ndarray) -> np.ndarray:
    """At most KEPT numbers of a tensor, flat: all of a small one, else places picked by the tensor's name."""
    flat = np.asarray(array, np.float32).reshape(-1)
    if flat.size <= KEPT:
        return flat
    picked = np.random.RandomState(zlib.crc32(name.encode())).randint(0, flat.size, KEPT)
    return flat[np.sort(picked)]


def difference(ours: np.ndarray, reference: np.ndarray) -> float:
    """The largest difference, against the largest value of the reference; infinite where shapes or NaNs disagree."""
    if ours.shape != reference.shape or not np.isfinite(ours).all():
        return float("inf")
    return float(np.abs(ours.astype(np.float64) - reference).max() / np.abs(reference).max())


def comparison(name: str) -> str:
    """The comparison that a tensor's name belongs to: rows, layers and images of one kind are one comparison."""
    rest = name.removeprefix("block/")
    parts = rest.split("/")
    kind = {"cache": parts[0] + " " + parts[-2], "logits": parts[0] + " " + parts[-1]}.get(parts[0], parts[0])
    return kind + (" after a block" if name.startswith("block/") else "")


def largest(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> dict[str, tuple[float, str]]:
    """The largest difference of each comparison, and the tensor where it lies. What ours lacks is not compared."""
    worst: dict[str, tuple[float, str]] = {}
    for name in ours:
        found = (difference(ours[name], reference[name]), name)
        worst[comparison(name)] = max(found, worst.get(comparison(name), found))
    return worst


def save(path: Path, found: dict[str, np.ndarray]) -> None:
    """Thinned tensors as one flat array: hundreds of small members would cost more than the numbers."""
    thinned = [thin(name, array) for name, array in found.items()]
    ends = np.cumsum([part.size for part in thinned])
    np.savez_compressed(path, names=np.array(list(found)), ends=ends, values=np.concatenate(thinned))


def read(path: Path) -> dict[str, np.ndarray]:
    """What `save` wrote: thinned tensors by name."""
    with np.load(path) as stored:
        names, parts = stored["names"].tolist(), np.split(stored["values"], stored["ends"][:-1])
    return dict(zip(names, parts))
