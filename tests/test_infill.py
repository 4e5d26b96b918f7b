"""Filling and revising on tiny random models: what is pinned stays, at every step and byte for byte."""

from __future__ import annotations

import json
import random
import shutil

import dgemma

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from conftest import LETTERS
from dgemma import Filled, OptionError, Pipeline, PromptError, Revision, Step
from oracle import tiny

C = tiny.CANVAS


@pytest.fixture(scope="module")
def pipe(checkpoint, tmp_path_factory):
    """The tiny checkpoint with a tokenizer whose text is that of its tokens, one after the other, as Gemma's is."""
    folder = shutil.copytree(checkpoint, tmp_path_factory.mktemp("fused") / "model")
    words = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(words | {"decoder": {"type": "Fuse"}}))
    return Pipeline.from_pretrained(folder)


def picture():
    return Image.new("RGB", (96, 48), "red")


def encode(pipe, text):
    return pipe.processor.tokenizer.encode(text, add_special_tokens=False)


def test_the_text_around_holes_is_pinned_at_every_step(pipe):
    *steps, filled = pipe.stream_fill("ab[[2]]c [[1]]", "Hi?", [picture()], seed=2)
    assert steps and all(isinstance(step, Step) for step in steps) and isinstance(filled, Filled)
    held = {i: token for i, token in enumerate(encode(pipe, "ab") + [None] * 2 + encode(pipe, "c") + [None, 6]) if token is not None}
    for step in steps:
        assert step.canvas.shape == (1, 7)  # as narrow as the template and its end
        assert {i: step.canvas[0, i] for i in held} == {i: step.best[0, i] for i in held} == held
        assert step.accepted[0, list(held)].all() and (step.entropy[0, list(held)] == 0).all()


def random_template(stream):
    """A template of single characters that fits a canvas of 8, its texts, and whether each hole takes a space."""
    room = C - 1
    holes = [stream.choice(["1", "2", "1-2"]) for _ in range(stream.randint(1, 2))]
    room -= sum(int(hole[-1]) for hole in holes)
    letters = LETTERS.replace("[", "").replace("]", "")
    texts = []
    for _ in range(len(holes) + 1):
        size = stream.randint(0, min(2, room))
        texts.append("".join(stream.choices(letters, k=size)))
        room -= size
    return "".join(f"{text}[[{hole}]]" for text, hole in zip(texts, holes)) + texts[-1], texts


def test_pinned_text_is_byte_identical_in_every_result(pipe):
    """benchmarks/pinned.py has 1,000 of these."""
    stream = random.Random(5)
    for number in range(40):
        template, texts = random_template(stream)
        filled = pipe.fill(template, "Hi?", seed=number, steps=2)
        spoken, at = filled.text.encode(), 0
        assert len(filled.holes) == len(texts) - 1
        for text, hole in zip(texts, (*filled.holes, "")):
            part = (text + hole).encode()
            assert spoken[at : at + len(part)] == part
            at += len(part)
        assert at == len(spoken)
        assert pipe.processor.decode(filled.tokens) == filled.text  # the tokens say the same as the text
        for text in texts:
            assert not text or set(encode(pipe, text.removesuffix(" "))) <= set(filled.tokens)


def test_holes_hold_text_and_keep_their_space(pipe):
    control = set(range(10))  # of conftest.CONTROLS
    for seed in range(10):
        filled = pipe.fill("a [[3]]", "Hi?", seed=seed, steps=2)
        assert filled.tokens[1] == encode(pipe, " ")[0] and filled.text.startswith("a ")
        assert not control & set(filled.tokens) and len(filled.tokens) == 4


def test_a_range_tries_every_length_and_takes_the_most_confident(pipe):
    *steps, best = pipe.stream_fill("a[[1-3]]b[[1-2]]", "Hi?")
    assert {place for step in steps for place in step.rows} == set(range(6)) and best.tried == 6
    alone = [pipe.fill(f"a[[{i}]]b[[{j}]]", "Hi?") for i in (1, 2, 3) for j in (1, 2)]
    assert best.confidence == pytest.approx(max(one.confidence for one in alone), abs=1e-4)
    (same,) = [one for one in alone if one.lengths == best.lengths]
    assert (same.text, same.holes, same.tokens) == (best.text, best.holes, best.tokens)
    assert [len(encode(pipe, hole)) for hole in best.holes] == list(best.lengths)


def test_confidence_is_the_mean_log_probability_of_the_canvas(pipe):
    filled = pipe.fill("a[[2]]b", "Hi?")
    (a, b, c, d), end = filled.tokens, 6
    line = [a, b, c, d, end]
    caches = pipe.model.make_caches()
    pipe.model.prefill(np.array([pipe.processor.prompt([{"role": "user", "content": "Hi?"}]).ids]), [], caches)
    logits = np.array(pipe.model.canvas_logits(mx.array([line]), caches))[0].astype(float)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert filled.confidence == pytest.approx(np.mean([logs[i, token] for i, token in enumerate(line)]), abs=1e-4)


def test_a_wide_canvas_leaves_what_is_behind_the_end_to_the_model(pipe):
    filled = pipe.fill("a[[2]]", "Hi?", width=C)
    assert len(filled.tokens) == 3 and filled.text[0] == "a"


def test_the_same_seed_fills_the_same(pipe):
    assert pipe.fill("a[[4]]", "Hi?", seed=1) == pipe.fill("a[[4]]", "Hi?", seed=1)
    assert len({pipe.fill("a[[4]]", "Hi?", seed=seed, steps=1).text for seed in range(5)}) > 1


# -- revising ---------------------------------------------------------------------------------------------------------


def test_a_revision_begins_from_the_draft(pipe):
    first, *_, made = pipe.stream_revise("abcdef", "Hi?", strength=0.5, seed=3)
    assert isinstance(first, Step) and isinstance(made, Revision)
    assert made.draft == tuple(encode(pipe, "abcdef")) and len(made.renoised) == round(0.5 * 7)
    assert made.text == pipe.processor.decode(made.tokens)
    assert pipe.revise("abcdef", "Hi?", strength=0.5, seed=3) == made
    assert pipe.revise("abcdef", "Hi?", strength=0.5, seed=4).renoised != made.renoised


@pytest.mark.parametrize("strength, count", [(0.001, 1), (0.4, 3), (1, 7)])
def test_strength_is_the_share_that_becomes_noise(pipe, strength, count):
    assert len(pipe.revise("abcdef", "Hi?", strength=strength).renoised) == count


def test_the_draft_is_seen(pipe):
    """At the lowest strength two drafts are denoised to different texts from the same noise."""
    assert pipe.revise("abcdef", "Hi?", strength=0.1, steps=1).text != pipe.revise("uvwxyz", "Hi?", strength=0.1, steps=1).text


def test_pins_hold_through_a_revision(pipe):
    *steps, made = pipe.stream_revise("abcdef", "Hi?", strength=1, pins={0: 40, 3: 50})
    assert all(step.canvas[0, 0] == 40 and step.best[0, 3] == 50 for step in steps)
    assert made.tokens[0] == 40 and not {0, 3} & set(made.renoised)


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, error, message",
    [
        (dict(template="no hole"), PromptError, "the template has no hole"),
        (dict(template="a [[b]]"), PromptError, "\\[\\[b\\]\\] is no hole"),
        (dict(template="a [[1]"), PromptError, "never closes it"),
        (dict(template="a [[1 [[2]] ]]"), PromptError, "inside another"),
        (dict(template="a[[8]]"), PromptError, "the template takes 10 tokens, filled and ended; a canvas has 8"),
        (dict(template="a[[1-900000]]"), OptionError, "make 900000 combinations; at most 1024"),
        (dict(template="a[[1-7]]"), PromptError, "the template takes 9 tokens"),
        (dict(template="a[[1]]", prompt=None), PromptError, "neither a prompt nor a picture"),
        (dict(template="a[[1]]", width=2), OptionError, "width is 2; 3 \\(the template's\\) to 8"),
        (dict(template="a[[1]]", seed=-1), OptionError, "seed is -1"),
        (dict(template="a[[1]]", max_new_tokens=8), OptionError, "unknown setting 'max_new_tokens'; one canvas is written"),
        (dict(template="a[[1]]", strength=1), OptionError, "unknown setting 'strength'"),
        (dict(template="<turn|>[[1]]"), PromptError, "the template spells <turn|>, a control token"),
    ],
)
def test_bad_templates_are_one_clear_line(pipe, call, error, message):
    with pytest.raises(error, match=message) as caught:
        pipe.stream_fill(**({"prompt": "Hi?"} | call))  # before the first event
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (dict(draft=""), PromptError, "the draft is ''; a text to revise"),
        (dict(draft=5), PromptError, "the draft is 5"),
        (dict(draft="\ud800"), PromptError, "half a surrogate pair"),
        (dict(draft="abcdefgh"), PromptError, "the draft takes 9 tokens with its end; a canvas has 8: shorten it"),
        (dict(draft="a<eos>"), PromptError, "the draft spells <eos>"),
        (dict(strength=0), OptionError, "strength is 0; a number above 0 and at most 1"),
        (dict(strength=1.1), OptionError, "strength is 1.1"),
        (dict(strength="x"), OptionError, "strength is 'x'"),
        (dict(pins=[1]), OptionError, "pins are \\[1\\]; a dict"),
        (dict(pins={8: 1}), OptionError, "pin 8 -> 1: positions run to 7, tokens to 95"),
        (dict(pins={0: 96}), OptionError, "pin 0 -> 96"),
        (dict(pins={-1: 1}), OptionError, "a pin's position is -1"),
        (dict(pins={0: 1.5}), OptionError, "a pinned token is 1.5"),
        (dict(width=8), OptionError, "unknown setting 'width'"),
        (dict(prompt="x" * 5000), PromptError, "the context is 4096"),
    ],
)
def test_bad_drafts_are_one_clear_line(pipe, call, error, message):
    with pytest.raises(error, match=message) as caught:
        pipe.stream_revise(**({"draft": "abc", "prompt": "Hi?"} | call))
    assert "\n" not in str(caught.value) and issubclass(error, dgemma.UserError)
