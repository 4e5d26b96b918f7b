"""What several test files share: tiny random checkpoints that are whole (weights, tokenizer, template), and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import dgemma  # noqa: F401: before anything imports mlx, so that a fast BLAS serves the tests too

import pytest
from PIL import Image, ImageDraw

from oracle import tiny

CONTROLS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>")
LETTERS = "\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"()-+=/<>|"[:86]
TEMPLATE = """\
{{ bos_token }}{% for m in messages %}{{ "<|turn>" + ("model" if m.role == "assistant" else m.role) + "\\n" }}\
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}\
{{ "<|image|>" if p.type == "image" else p.text }}{% endfor %}{% endif %}{{ "<turn|>\\n" }}{% endfor %}\
{% if add_generation_prompt %}{{ "<|turn>model\\n" }}{% endif %}"""


def add_words(folder: Path, max_new_tokens: int = 16) -> Path:
    """A tokenizer of single characters, a template and the small configs beside tiny weights; returns the folder."""
    from tokenizers import AddedToken, Tokenizer, models

    words = Tokenizer(models.BPE({c: i for i, c in enumerate((*CONTROLS, *LETTERS))}, [], unk_token="<unk>"))
    words.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROLS])
    words.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        | {f"{role}_token": f"<{role}>" for role in ("pad", "eos", "bos", "unk")},
    )
    write_json(folder / "processor_config.json", {"image_processor": {"max_soft_tokens": 70}})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write_json(
        folder / "generation_config.json",
        {"max_new_tokens": max_new_tokens, "max_denoising_steps": 4, "eos_token_id": [1, 6], "pad_token_id": 0},
    )
    return folder


def write_json(path: Path, value: dict) -> None:
    """A JSON file."""
    path.write_text(json.dumps(value, indent=1))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny random checkpoint that reads text and images; tests must not change it."""
    return add_words(tiny.write_checkpoint(tmp_path_factory.mktemp("tiny"), "wide"))


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory) -> Path:
    """A tiny random checkpoint without a vision tower; tests must not change it."""
    return add_words(tiny.write_checkpoint(tmp_path_factory.mktemp("text"), "text"))


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """A folder with shapes.png and digits.png."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, colour in (("shapes.png", "red"), ("digits.png", "black")):
        image = Image.new("RGB", (96, 96), "white")
        ImageDraw.Draw(image).ellipse((20, 20, 70, 70), fill=colour)
        image.save(folder / name)
    return folder
