"""The matrix: which prompts, on which tiny model, with which sampling. Numbers only; neither torch nor mlx.

A prompt's row is drawn as a tuple: an int is that many text tokens, a pair is an image of (columns, rows) soft tokens
with its begin and end tokens around, a string is a picture that goes through the image processor at a budget of 70.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from oracle import tiny

ENCODER_WINDOW, BIDIRECTIONAL = "encoder-window", "bidirectional"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Patches of one image: pixels [N, 768] float32 in [0, 1], positions [N, 2] int32 (x, y), N a multiple of 9."""

    pixels: np.ndarray
    positions: np.ndarray

    @property
    def soft_tokens(self) -> int:
        return len(self.pixels) // 9


Cut = Callable[[np.ndarray, int], Picture]  # a picture uint8 [H, W, 3] and a budget of soft tokens -> its patches


@dataclass(frozen=True, kw_only=True)
class Case:
    """One prompt (a batch of rows) on one tiny model, and the image attention it is read with."""

    name: str
    model: str
    rows: tuple[tuple, ...]
    image_attention: str = ENCODER_WINDOW


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A batch ready for either implementation: ids [B, L] int32 left-padded, padding [B], pictures in reading order."""

    ids: np.ndarray
    padding: list[int]
    pictures: list[Picture]

    @property
    def lengths(self) -> list[int]:
        return [self.ids.shape[1] - pad for pad in self.padding]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a generation is sampled and stopped."""

    max_new_tokens: int
    max_denoising_steps: int = 8
    t_min: float = 0.4
    t_max: float = 0.8
    entropy_bound: float = 0.1
    stability: int = 1
    confidence: float = 0.005
    end_token_ids: tuple[int, ...] = (1,)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One whole generation: a case's prompt, one seed a row, a policy."""

    name: str
    case: str
    seeds: tuple[int, ...]
    policy: Policy = field(default_factory=lambda: Policy(max_new_tokens=8))


SHORT, ONE, THREE = (9,), (4, (3, 2), 9), (2, (2, 1), 3, (4, 4), 1, (1, 5), 6)  # (4, 4) overflows a window of 12
LONG = (9, (3, 3), 50, (5, 2), 9)
BATCH = ((20,), (3, (2, 3), 8, (3, 1), 4), (5, (2, 2), 6))
CASES = {
    case.name: case
    for case in (
        Case(name="ring-short", model="ring", rows=(SHORT,)),
        Case(name="ring-one", model="ring", rows=(ONE,)),
        Case(name="ring-three", model="ring", rows=(THREE,)),
        Case(name="ring-batch", model="ring", rows=BATCH),
        Case(name="ring-pictures", model="ring", rows=((3, "stripes", 5, "disc", 4),)),
        Case(name="wide-one", model="wide", rows=(ONE,)),
        Case(name="wide-batch", model="wide", rows=(LONG, (12,), (7, (2, 2), 60))),
        Case(name="causal-short", model="causal", rows=(SHORT,)),
        Case(name="causal-one", model="causal", rows=(ONE,)),
        Case(name="causal-batch", model="causal", rows=BATCH),
        Case(name="clipped-three", model="clipped", rows=(THREE,)),
        Case(name="text-batch", model="text", rows=((17,), (5,), (30,))),
        Case(name="google-one", model="ring", rows=(ONE,), image_attention=BIDIRECTIONAL),
        Case(name="google-three", model="ring", rows=(THREE,), image_attention=BIDIRECTIONAL),
        Case(name="google-batch", model="wide", rows=(LONG, (12,)), image_attention=BIDIRECTIONAL),
    )
}

# Seeds were looked for that keep clear of every border (reference.Margins); make_goldens checks that they do.
GENERATIONS = {
    run.name: run
    for run in (
        Generation(name="ring-short-4-blocks", case="ring-short", seeds=(1,), policy=Policy(max_new_tokens=32)),
        Generation(name="ring-short-ends", case="ring-short", seeds=(201,), policy=Policy(max_new_tokens=32)),
        Generation(name="ring-one-1-block", case="ring-one", seeds=(201,), policy=Policy(max_new_tokens=8)),
        Generation(name="ring-one-2-blocks", case="ring-one", seeds=(201,), policy=Policy(max_new_tokens=16)),
        Generation(
            name="ring-one-13-tokens", case="ring-one", seeds=(301,), policy=Policy(max_new_tokens=13, confidence=0.02)
        ),
        Generation(
            name="ring-three-4-blocks", case="ring-three", seeds=(101,),
            policy=Policy(max_new_tokens=32, entropy_bound=0.3)
        ),
        Generation(
            name="ring-batch-ends", case="ring-batch", seeds=(501, 502, 503),
            policy=Policy(max_new_tokens=32, end_token_ids=(1, 6)),
        ),
        Generation(name="ring-pictures", case="ring-pictures", seeds=(201,), policy=Policy(max_new_tokens=16)),
        Generation(
            name="wide-one-6-steps", case="wide-one", seeds=(501,),
            policy=Policy(max_new_tokens=32, max_denoising_steps=6)
        ),
        Generation(
            name="wide-batch-4-blocks", case="wide-batch", seeds=(301, 302, 303),
            policy=Policy(max_new_tokens=32, end_token_ids=(1, 6)),
        ),
        Generation(
            name="wide-batch-ends", case="wide-batch", seeds=(1501, 1502, 1503),
            policy=Policy(max_new_tokens=32, end_token_ids=(1, 6)),
        ),
        Generation(
            name="causal-one-stable-twice", case="causal-one", seeds=(1,),
            policy=Policy(max_new_tokens=16, stability=2, max_denoising_steps=12),
        ),
        Generation(
            name="causal-batch-confident-only", case="causal-batch", seeds=(501, 502, 503),
            policy=Policy(max_new_tokens=32, stability=0, confidence=0.05),
        ),
        Generation(name="clipped-three", case="clipped-three", seeds=(501,), policy=Policy(max_new_tokens=16)),
        Generation(
            name="text-batch", case="text-batch", seeds=(301, 302, 303),
            policy=Policy(max_new_tokens=32, end_token_ids=(1, 6, 11)),
        ),
        Generation(name="google-three", case="google-three", seeds=(501,), policy=Policy(max_new_tokens=16)),
        Generation(name="google-batch", case="google-batch", seeds=(201, 202), policy=Policy(max_new_tokens=32)),
    )
}  # fmt: skip



def prompt(case: Case, cut: Cut, salt: str = "") -> Prompt:
    """The prompt of a case; the same on every machine. `salt` makes another of the same shape.

    `cut` turns a picture and a budget into patches: each implementation brings its own.
    """
    stream = np.random.RandomState(zlib.crc32(f"{case.name}{salt}".encode()))
    vocabulary = tiny.CONFIGS[case.model]["text_config"]["vocab_size"]
    rows, pictures = [], []
    for parts in case.rows:
        row: list[int] = [2]  # begin of sequence
        for part in parts:
            if isinstance(part, int):
                row += stream.randint(tiny.FIRST_TEXT, vocabulary, part).tolist()
                continue
            pictures.append(cut(drawing(part), 70) if isinstance(part, str) else noise(*part, stream))
            row += [tiny.BEGIN_IMAGE, *[tiny.IMAGE] * pictures[-1].soft_tokens, tiny.END_IMAGE]
        rows.append(row)
    return batch(rows, pictures)


def batch(rows: list[list[int]], pictures: list[Picture]) -> Prompt:
    """Rows of different lengths, padded on the left."""
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    ids = np.array([[tiny.PAD] * pad + row for pad, row in zip(padding, rows)], dtype=np.int32)
    return Prompt(ids=ids, padding=padding, pictures=pictures)


def positions(columns: int, rows: int) -> np.ndarray:
    """(x, y) of every patch of a grid in reading order, int32 [columns * rows, 2]."""
    x, y = np.meshgrid(np.arange(columns), np.arange(rows), indexing="xy")
    return np.stack([x, y], axis=-1).reshape(-1, 2).astype(np.int32)


def noise(columns: int, rows: int, stream: np.random.RandomState) -> Picture:
    """An image of random pixels, `columns` by `rows` soft tokens: far smaller than the processor would make one."""
    places = positions(3 * columns, 3 * rows)
    return Picture(pixels=stream.random_sample((len(places), 768)).astype(np.float32), positions=places)


def drawing(name: str) -> np.ndarray:
    """A picture to be resized, uint8 [H, W, 3], by integer arithmetic only."""
    height, width = {"stripes": (40, 90), "disc": (130, 70)}[name]
    y, x = np.mgrid[:height, :width]
    inside = (x - width // 2) ** 2 + (y - height // 2) ** 2 < 900 if name == "disc" else (x + 2 * y) % 23 < 9
    red, green, blue = 255 - x, 40 + y, (3 * x + 5 * y) % 256
    return np.where(inside[..., None], [30, 200, 90], np.stack([red, green, blue], axis=-1)).astype(np.uint8)


def canvases(model_config: dict, rows: int, name: str) -> list[np.ndarray]:
    """Two canvases to be scored, int32 [B, C]. The second is committed; it holds an image token, as no block should."""
    vocabulary, length = model_config["text_config"]["vocab_size"], model_config["canvas_length"]
    stream = np.random.RandomState(zlib.crc32(f"{name} canvases".encode()))
    pair = [stream.randint(0, vocabulary, (rows, length)).astype(np.int32) for _ in range(2)]
    pair[1][0, 3] = model_config["image_token_id"]
    return pair
