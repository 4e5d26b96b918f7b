"""Questions to the checkpoint that ships with dgemma, put to both implementations. Neither torch nor mlx."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from oracle.cases import Cut, Picture, Policy, Prompt, batch

PICTURES = Path(__file__).resolve().parents[2] / "examples" / "demo" / "pictures"
Shape = tuple[str, str, int, int, int]  # kind, colour, x, y, half its size

COLOURS = {"red": (214, 40, 40), "blue": (40, 80, 214), "green": (40, 160, 70), "yellow": (240, 200, 40)}
SCENES: dict[str, tuple[tuple[int, int], tuple[Shape, ...]]] = {
    "two": ((320, 256), (("circle", "red", 90, 120, 50), ("square", "blue", 230, 140, 45))),
    "three": (
        (384, 192),
        (("triangle", "green", 60, 90, 45), ("circle", "yellow", 190, 100, 40), ("square", "red", 310, 90, 42)),
    ),
    "tall": ((192, 320), (("circle", "blue", 90, 80, 50), ("triangle", "red", 100, 230, 55))),
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A batch of questions, each with its scenes or shipped pictures, one seed a row."""

    name: str
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    seeds: tuple[int, ...]
    budget: int = 70
    measured: bool = False  # features, caches and logits are compared too, not only the answers


QUESTIONS = {
    question.name: question
    for question in (
        Question(name="describe", rows=(("Describe the picture.", ("two",)),), seeds=(1,)),
        Question(name="list", rows=(("List every shape from left to right.", ("three",)),), seeds=(2,)),
        Question(name="count", rows=(("Count from 3 to 14.", ()),), seeds=(3,)),
        Question(
            name="compare", rows=(("Which picture has more shapes?", ("tall", "three")),), seeds=(4,), measured=True
        ),
        Question(name="finer", rows=(("What color is the circle?", ("tall",)),), seeds=(5,), budget=140, measured=True),
        Question(name="digits", rows=(("What number is written here?", ("digits_407.png",)),), seeds=(11,)),
        Question(name="sign", rows=(("What does the sign say?", ("sign_coffee.png",)),), seeds=(12,)),
        Question(name="panorama", rows=(("How many shapes are there?", ("panorama.png",)),), seeds=(13,)),
        Question(name="caption", rows=(("Caption this picture.", ("three",)),), seeds=(6,)),
        Question(name="story", rows=(("Tell a short story about this picture.", ("two",)),), seeds=(7,)),
        Question(
            name="batch",
            rows=(
                ("How many shapes are there?", ("three",)),
                ("Count from 3 to 14.", ()),
                ("Which picture has more shapes?", ("two", "tall")),
            ),
            seeds=(8, 9, 10),
            measured=True,
        ),
    )
}  # fmt: skip


def folder() -> Path:
    """The shipped checkpoint; the variable DGEMMA_DEMO names another."""
    shipped = Path(__file__).resolve().parents[2] / "dgemma" / "demo"
    return Path(os.environ.get("DGEMMA_DEMO", shipped))


def checksum() -> str:
    """SHA-256 of the weights and the pictures that the goldens were made from."""
    shown = {name for question in QUESTIONS.values() for _, names in question.rows for name in names}
    digest = hashlib.sha256((folder() / "model.safetensors").read_bytes())
    for name in sorted(shown - set(SCENES)):
        digest.update((PICTURES / name).read_bytes())
    return digest.hexdigest()


def config() -> dict:
    """config.json of the checkpoint."""
    return json.loads((folder() / "config.json").read_text())


def policy() -> Policy:
    """The checkpoint's own way to be sampled."""
    raw = json.loads((folder() / "generation_config.json").read_text())
    ends = raw["eos_token_id"]
    return Policy(
        max_new_tokens=raw["max_new_tokens"],
        max_denoising_steps=raw["max_denoising_steps"],
        t_min=raw["t_min"],
        t_max=raw["t_max"],
        entropy_bound=raw["sampler_config"]["entropy_bound"],
        stability=raw["stability_threshold"],
        confidence=raw["confidence_threshold"],
        end_token_ids=tuple(ends if isinstance(ends, list) else [ends]),
    )


def pictures(question: Question, cut: Cut) -> list[Picture]:
    """A question's pictures in reading order, as `cut` makes their patches."""
    return [cut(scene(name), question.budget) for _, names in question.rows for name in names]


def prompt(question: Question, cut: Cut) -> Prompt:
    """A question as ids, through the checkpoint's template and transformers' tokenizer."""
    from transformers import AutoTokenizer  # seconds to import, and the goldens hold the ids

    tokenizer, special = AutoTokenizer.from_pretrained(folder()), config()
    image, shown, rows = special["image_token_id"], pictures(question, cut), []
    soft = iter(shown)
    for text, names in question.rows:
        content = [{"type": "image"} for _ in names] + [{"type": "text", "text": text}]
        messages = [{"role": "user", "content": content}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        row: list[int] = []
        for token in tokenizer(rendered, add_special_tokens=False).input_ids:
            if token == image:
                row += [special["boi_token_id"], *[image] * next(soft).soft_tokens, special["eoi_token_id"]]
            else:
                row.append(token)
        rows.append(row)
    return batch(rows, shown)


def scene(name: str) -> np.ndarray:
    """A picture uint8 [H, W, 3]: a shipped file, or coloured shapes on a light ground, by integer arithmetic only."""
    if name not in SCENES:
        return np.asarray(Image.open(PICTURES / name).convert("RGB"))
    (width, height), shapes = SCENES[name]
    picture = np.full((height, width, 3), 240, np.uint8)
    y, x = np.mgrid[:height, :width]
    for kind, colour, cx, cy, half in shapes:
        dx, dy = abs(x - cx), y - cy
        inside = {
            "circle": dx**2 + dy**2 < half**2,
            "square": np.maximum(dx, abs(dy)) < half,
            "triangle": (abs(dy) < half) & (2 * dx < dy + half),
        }[kind]
        picture[inside] = COLOURS[colour]
    return picture
