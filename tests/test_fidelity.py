"""dgemma computes what transformers computes: tiny random models and the demo checkpoint against stored goldens.

`oracle/make_goldens.py` made the goldens with torch; nothing here needs it. `oracle/live.py` compares with the live
reference instead, on more prompts and seeds.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on an NVIDIA GPU mlx would round float32 products to 10 bits

import dgemma  # before mlx: it loads the BLAS that mlx then uses

import mlx.core as mx
import numpy as np
import pytest

from oracle import cases, demo, ours, record, tiny

GOLDENS = Path(__file__).parent / "oracle" / "goldens"
TOLERANCE = 1e-4  # of a tensor's largest value
CHUNK = 5  # shorter than every image block but one

load = functools.lru_cache(maxsize=None)(ours.load)
load_demo = functools.lru_cache(maxsize=None)(ours.load_folder)


@functools.lru_cache(maxsize=None)
def load_pipeline() -> dgemma.Pipeline:
    return dgemma.Pipeline.from_pretrained(demo.folder(), dtype=mx.float32)


@functools.lru_cache(maxsize=None)
def read_json(name: str) -> dict:
    return json.loads((GOLDENS / name).read_text())


def agree(found: dict, golden: dict) -> None:
    """Every tensor of `found` equals the golden of its name; the message names the first that does not."""
    thinned = {name: record.thin(name, array) for name, array in found.items()}
    far = {kind: worst for kind, worst in record.largest(thinned, golden).items() if not worst[0] < TOLERANCE}
    assert not far, f"largest difference of each comparison that fails (against {TOLERANCE}): {far}"


@pytest.mark.parametrize("name", cases.CASES)
def test_a_forward_pass_computes_what_the_reference_computes(name):
    case, golden = cases.CASES[name], record.read(GOLDENS / f"{name}.npz")
    pair = cases.canvases(tiny.CONFIGS[case.model], len(case.rows), name)
    found = ours.measure(load(case.model, case.image_attention), cases.prompt(case, ours.cut), pair)
    assert found.keys() == golden.keys()
    agree(found, golden)


@pytest.mark.parametrize("name", cases.CASES)
def test_a_prompt_in_chunks_computes_what_the_reference_computes_in_one(name):
    case, golden = cases.CASES[name], record.read(GOLDENS / f"{name}.npz")
    pair = cases.canvases(tiny.CONFIGS[case.model], len(case.rows), name)
    found = ours.measure(load(case.model, case.image_attention), cases.prompt(case, ours.cut), pair, CHUNK)
    assert {key for key in golden if not key.startswith("hidden/")} == found.keys()
    agree(found, golden)


@pytest.mark.parametrize("name", cases.GENERATIONS)
def test_a_generation_takes_the_reference_s_tokens_steps_and_reasons(name):
    run = cases.GENERATIONS[name]
    case = cases.CASES[run.case]
    made = ours.generate(load(case.model, case.image_attention), cases.prompt(case, ours.cut), run.seeds, run.policy)
    assert made.outcome == read_json("generations.json")[name]


# The demo checkpoint -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def goldens_of_demo() -> dict:
    if not demo.folder().is_dir():
        pytest.skip("this tree ships no demo checkpoint")
    stored = read_json("demo.json")
    assert stored["checksum"] == demo.checksum(), "the demo checkpoint or its pictures changed: run make goldens"
    return stored


def prompt_of_demo(name: str, golden: dict) -> cases.Prompt:
    """The ids that the reference read, and pictures that dgemma prepared."""
    pictures = demo.pictures(demo.QUESTIONS[name], ours.cut)
    return cases.Prompt(ids=np.array(golden["ids"], np.int32), padding=golden["padding"], pictures=pictures)


@pytest.mark.parametrize("name", [name for name, question in demo.QUESTIONS.items() if question.measured])
def test_the_demo_computes_what_the_reference_computes(name, goldens_of_demo):
    prompt, golden = prompt_of_demo(name, goldens_of_demo[name]), record.read(GOLDENS / f"demo-{name}.npz")
    pair = cases.canvases(demo.config(), len(prompt.ids), name)
    agree(ours.measure(load_demo(demo.folder()), prompt, pair), golden)


@pytest.mark.parametrize("name", demo.QUESTIONS)
def test_the_demo_answers_as_under_the_reference(name, goldens_of_demo):
    golden = goldens_of_demo[name]
    made = ours.generate(load_demo(demo.folder()), prompt_of_demo(name, golden), golden["seeds"], demo.policy())
    assert made.outcome == {key: golden[key] for key in ("tokens", "steps", "reasons")}


@pytest.mark.parametrize("name", ["compare", "finer", "batch"])
def test_the_demo_answers_words_and_pictures_as_under_the_reference(name, goldens_of_demo):
    question, golden = demo.QUESTIONS[name], goldens_of_demo[name]
    pictures = [[demo.scene(scene) for scene in names] for _, names in question.rows]
    answers = load_pipeline()(
        [text for text, _ in question.rows],
        pictures,
        seed=golden["seeds"],
        image_budget=question.budget,
        redraws=0,
    )
    found = {"tokens": [list(answer.tokens) for answer in answers], "steps": [list(answer.steps) for answer in answers]}
    assert found == {"tokens": golden["tokens"], "steps": golden["steps"]}
    assert [answer.prompt_tokens for answer in answers] == [
        len(row) - pad for row, pad in zip(golden["ids"], golden["padding"])
    ]
