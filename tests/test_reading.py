"""Typed reads: against brute force through transformers, and laws on tiny random models."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on an NVIDIA GPU mlx would round float32 products to 10 bits

import math
from pathlib import Path

import dgemma  # before mlx: it loads the BLAS that mlx then uses

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from dgemma import OptionError, Pipeline, PromptError
from dgemma.reading import MOST, repeat
from oracle import our_reads, reads, record

GOLDENS = Path(__file__).parent / "oracle" / "goldens" / "reads"
NATS, CHANCE = 2e-4, 1e-5  # log-probabilities reach -20; MLX and torch round their float32 differently


@pytest.fixture(scope="module")
def pipe(checkpoint):
    return Pipeline.from_pretrained(checkpoint)


def agree(mine, theirs):
    found = our_reads.differences(mine, theirs)
    assert found.pop("probability of a choice") < CHANCE
    assert max(found.values()) < NATS, found


@pytest.mark.parametrize("name", reads.READS)
def test_a_read_is_what_brute_force_through_the_reference_computes(name):
    golden = record.read(GOLDENS / f"{name}.npz")
    mine = our_reads.measure(reads.READS[name])
    agree({kind: record.thin(kind, array) for kind, array in mine.items()}, golden)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the live reference needs torch")
@pytest.mark.parametrize("name", ["ring-one-steps-1", "ring-one-steps-3"])
def test_a_read_is_what_the_live_reference_computes(name):
    from oracle import brute_reads, cases, reference  # here: they import torch

    read = reads.READS[name]
    agree(our_reads.measure(read), brute_reads.measure(reference.load(cases.CASES[read.case].model), read))


# -- laws on a pipeline -----------------------------------------------------------------------------------------------

ONE = dict(template="It [[a]].", choices={"a": ["is", "am", "be"]})
MIXED = dict(template="[[a]]-[[b]]", choices={"a": ["x", "yy", "zz"], "b": ["1", "2"]})


def picture(colour="red"):
    return Image.new("RGB", (96, 48), colour)


def same(one, other, tolerance=1e-5):
    """Reads are equal: batches of other sizes round differently."""
    assert one.slots.keys() == other.slots.keys()
    for name, slot in one.slots.items():
        assert slot.logprobs == pytest.approx(other[name].logprobs, abs=tolerance)
        assert slot.probabilities == pytest.approx(other[name].probabilities, abs=tolerance)
        for length, table in slot.tables.items():
            np.testing.assert_allclose(table, other[name].tables[length], atol=10 * tolerance)


@pytest.mark.parametrize("more", [{}, {"steps": 3}, {"width": 8}, {"end": False}, {"temperature": 2.0}])
def test_a_read_adds_up(pipe, more):
    read = pipe.read("Hi?", [picture()], **MIXED, **more)
    for slot in read.slots.values():
        assert sum(slot.probabilities.values()) == pytest.approx(1)
        assert slot.probabilities[slot.best] == max(slot.probabilities.values())
        assert slot.entropy == pytest.approx(-sum(p * math.log(p) for p in slot.probabilities.values()))
        assert 0 <= slot.entropy <= math.log(len(slot.probabilities)) + 1e-9
        for table in slot.tables.values():
            np.testing.assert_allclose(np.exp(table.astype(np.float64)).sum(axis=-1), 1, atol=1e-5)
    assert read.text == f"{read['a'].best}-{read['b'].best}"


def test_choices_are_what_the_table_says(pipe):
    slot = pipe.read("Hi?", **MIXED)["b"]
    one = pipe.processor.tokenizer.encode("1", add_special_tokens=False)[0]
    assert slot.logprob(one) == pytest.approx(slot.logprobs["1"], abs=1e-6)
    assert slot.mass == pytest.approx(math.exp(slot.logprobs["1"]) + math.exp(slot.logprobs["2"]))


def test_all_texts_of_a_length_add_up_to_one(pipe):
    """The product over positions is a distribution: over all second characters it adds up to the first one's probability."""
    known = [c for c in "abcdefghijklmnopqrstuvwxyz"]
    slot = pipe.read("Hi?", template="[[a]]", choices={"a": [f"q{c}" for c in known]})["a"]
    first = slot.logprob(pipe.processor.tokenizer.encode("q", add_special_tokens=False)[0])
    assert slot.mass < math.exp(first) + 1e-6  # the other characters have the rest
    assert list(slot.tables) == [2] and slot.tables[2].shape == (2, pipe.model.config.text.vocab_size)


def test_questions_over_one_prefill_are_what_they_are_alone(pipe):
    asked = [ONE, MIXED, dict(template="No [[c]]", choices={"c": ["way", "go", "x"]})]
    together = pipe.read(
        "Hi?", [picture()], template=[one["template"] for one in asked], choices=[one["choices"] for one in asked], seed=4
    )
    assert len(together) == 3
    for one, found in zip(asked, together):
        same(found, pipe.read("Hi?", [picture()], **one, seed=4))


def test_one_dict_serves_all_templates(pipe):
    choices = {"a": ["x", "y"], "b": ["1", "2"]}
    first, second = pipe.read("Hi?", template=["[[a]]?", "[[b]]!"], choices=choices)
    assert (list(first.slots), list(second.slots)) == (["a"], ["b"])


def test_more_rows_than_a_batch_holds_change_nothing(pipe, monkeypatch):
    whole = pipe.read("Hi?", **MIXED)
    monkeypatch.setattr("dgemma.reading.MOST", 2)
    same(whole, pipe.read("Hi?", **MIXED))
    assert MOST > 2


def test_the_seed_is_the_noise(pipe):
    same(pipe.read("Hi?", **ONE, seed=3), pipe.read("Hi?", **ONE, seed=3), 0)
    assert pipe.read("Hi?", **ONE, seed=3)["a"].logprobs != pipe.read("Hi?", **ONE, seed=4)["a"].logprobs


def test_several_draws_are_the_mean_of_each(pipe):
    mean = pipe.read("Hi?", **MIXED, seed=3, draws=3)
    single = [pipe.read("Hi?", **MIXED, seed=seed) for seed in (3, 4, 5)]
    for name, slot in mean.slots.items():
        for word, value in slot.logprobs.items():
            assert math.exp(value) == pytest.approx(np.mean([math.exp(one[name].logprobs[word]) for one in single]), rel=1e-5)
        assert slot.logprob(20) == pytest.approx(np.log(np.mean([np.exp(one[name].logprob(20)) for one in single])), abs=1e-5)
        assert sum(slot.probabilities.values()) == pytest.approx(1)


def test_a_read_leaves_the_caches_as_they_are(pipe):
    caches = pipe.model.make_caches()
    pipe.model.prefill(np.array([[2, 30, 31, 32]]), [], caches)
    rows = repeat(caches, 3)
    before = [np.array(cache.temporal_view()[0]) for cache in caches]
    canvas = mx.array(np.arange(18).reshape(3, 6) + 10)
    many = np.array(pipe.model.canvas_logits(canvas, rows))
    for row in range(3):
        np.testing.assert_allclose(np.array(pipe.model.canvas_logits(canvas[row : row + 1], repeat(caches, 1)))[0], many[row], atol=1e-4)
    assert all((np.array(cache.temporal_view()[0]) == old).all() for cache, old in zip(caches, before))


def test_pictures_alone_are_a_prompt(pipe):
    assert pipe.read(None, [picture()], **ONE)["a"].best in ("is", "am", "be")


@pytest.mark.parametrize(
    "call, error, message",
    [
        (dict(template=[], choices={}), PromptError, "no template is given"),
        (dict(template="too long a [[a]]", choices={"a": ["x"]}), PromptError, "the template takes 13 tokens, filled and ended; a canvas has 8"),
        (dict(template="[[a]]", choices={"a": ["123456789"]}), PromptError, "takes 10 tokens"),
        (dict(ONE, width=5), OptionError, "width is 5; 7 \\(the template's\\) to 8 \\(the canvas's\\) is allowed"),
        (dict(ONE, width=9), OptionError, "width is 9; 7"),
        (dict(ONE, width="x"), OptionError, "width is 'x'; a whole number is needed"),
        (dict(ONE, draws=0), OptionError, "draws is 0; at least 1 is needed"),
        (dict(ONE, steps=0), OptionError, "steps is 0; at least 1 is needed"),
        (dict(ONE, seed=-1), OptionError, "seed is -1; 0 to 2\\*\\*64 - 1 is allowed"),
        (dict(ONE, seed=2**64), OptionError, "0 to 2\\*\\*64 - 1 is allowed"),
        (dict(ONE, temperature=0), OptionError, "temperature is 0; a finite number above 0"),
        (dict(ONE, chunk=0), OptionError, "chunk is 0; at least 1 is needed"),
        (dict(ONE, prompt=None), PromptError, "neither a prompt nor a picture"),
        (dict(ONE, prompt="x" * 5000), PromptError, "the prompt has 50\\d\\d tokens and the canvas 8; the context is 4096"),
        (dict(ONE, choices={"b": ["x"]}), OptionError, "choices for 'b', which is no slot"),
        (dict(ONE, choices=[{}, {}]), OptionError, "2 dicts of choices for 1 template"),
        (dict(ONE, template=[ONE["template"], "x [[b]]"]), OptionError, "slot 'b' has no choices"),
        (dict(template="<eos>[[a]]", choices={"a": ["x"]}), PromptError, "the template spells <eos>, a control token"),
        (dict(template="[[a]]", choices={"a": ["<eos>"]}), PromptError, "a choice spells <eos>, a control token"),
    ],
)
def test_bad_input_is_one_clear_line(pipe, call, error, message):
    with pytest.raises(error, match=message) as caught:
        pipe.read(**({"prompt": "Hi?"} | call))
    assert "\n" not in str(caught.value) and issubclass(error, dgemma.UserError)


def test_only_what_was_read_can_be_asked_for(pipe):
    slot = pipe.read("Hi?", **MIXED)["a"]
    assert slot.logprob(20, 1, length=2) < 0
    for call in (dict(token=-1), dict(token=10**6), dict(token=20, position=1), dict(token=20, length=3)):
        with pytest.raises(OptionError, match="slot 'a'"):
            slot.logprob(**call)


def test_a_read_over_packed_keys_and_values_is_near():
    import dgemma

    pipe = dgemma.Pipeline.from_pretrained()
    ask = dict(prompt="Count from 3 to 24.", template="[[n]], 4, 5", choices={"n": ["3", "7"]})
    plain, packed = pipe.read(**ask)["n"], pipe.read(**ask, kv_bits=8)["n"]
    assert packed.best == plain.best and packed.probabilities != plain.probabilities
    with pytest.raises(dgemma.OptionError, match="kv_bits is 5"):
        pipe.read(**ask, kv_bits=5)
