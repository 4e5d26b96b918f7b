"""What must not creep back, counted and not timed: evaluations, masks built, numbers read back.

An evaluation is a wait for the device, and on a GPU so is a number that is read back; a mask of a long prompt is the
largest array of a pass. The numbers are today's: whoever lowers one lowers it here.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import dgemma  # noqa: F401
from dgemma import cpu, kernels, plain, weights
from dgemma.attention import masks
from dgemma.config import GenerationConfig
from dgemma.denoise import Block, Prefilled, denoise
from dgemma.step import Options, Step
from dgemma.stopping import StepsOnly
from oracle import tiny

STEPS, LAYERS = 4, 3  # of a block; of the model ("wide": two sliding layers, one full)
OPTIONS = replace(
    Options.of(GenerationConfig()), max_new_tokens=2 * tiny.CANVAS, max_denoising_steps=STEPS, rule=StepsOnly(),
    end_token_ids=(), max_redraws=0,
)  # fmt: skip

STARTS_A_STEP = 1  # all that a step computes, at once; what it waits for is the first number that is read
READS_A_STEP = 4  # the canvas, the most likely tokens, their entropies, which were accepted
STARTS_A_PASS, WAITS_A_PASS = LAYERS, LAYERS  # of the encoder: each layer but the first waits for the one before; then the caches
READS_A_BLOCK = 1  # the block's tokens, on their way into the encoder
CPU_EVALUATIONS_A_LAYER = 6  # dgemma.cpu waits for what mlx still does (views, caches) where numpy goes on


@pytest.fixture(scope="module")
def model(checkpoint):
    return weights.load(checkpoint, dtype=mx.float32)


@pytest.fixture
def on_plain_kernels(monkeypatch):
    """The formulations of a GPU; those of the CPU evaluate at every turn."""
    monkeypatch.setattr(kernels, "LAZY", True)
    for name, function in list(vars(kernels).items()):
        if callable(function) and function is getattr(cpu, name, None):
            monkeypatch.setattr(kernels, name, getattr(plain, name))


@pytest.fixture
def counts(monkeypatch):
    """How often mx.eval is called, masks are built and mlx arrays become numpy's, by the module that does it."""
    found: Counter[tuple[str, str]] = Counter()

    def counted(what, function, counts_for=lambda *_: True):
        def call(*arguments, **named):
            if counts_for(*arguments):
                found[what, sys._getframe(1).f_globals["__name__"].removeprefix("dgemma.")] += 1
            return function(*arguments, **named)

        return call

    is_mlx = lambda first, *_: isinstance(first, mx.array)
    monkeypatch.setattr(mx, "eval", counted("wait", mx.eval))
    monkeypatch.setattr(mx, "async_eval", counted("start", mx.async_eval))
    for name in ("array", "asarray"):
        monkeypatch.setattr(np, name, counted("read", getattr(np, name), is_mlx))
    for name in [name for name in vars(masks) if name.endswith("_mask")]:
        monkeypatch.setattr(masks, name, counted(name, getattr(masks, name)))
    return found


def ids_of(length, rows=1):
    return np.random.RandomState(0).randint(tiny.FIRST_TEXT, 90, (rows, length))


def by_event(model, counts, ids, **more):
    """Each event of two blocks, with what was counted up to it since the one before."""
    for event in denoise(model, ids, [], options=OPTIONS, seeds=range(len(ids)), **more):
        found = counts.copy()
        counts.clear()
        yield event, found


def of(found, what, *modules):
    return sum(number for (name, module), number in found.items() if name == what and (not modules or module in modules))


LOOP = ("denoise", "model", "canvas", "layers", "attention.caches", "attention.reads", "sampler", "stopping", "plain", "kernels")


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_is_started_once_and_read_back_once(model, on_plain_kernels, counts, rows):
    """The next one is started before a step is told, unless it is the last: 2, 1, 1, 0 starts for four steps."""
    steps = [found for event, found in by_event(model, counts, ids_of(40, rows)) if isinstance(event, Step)]
    assert len(steps) == 2 * STEPS
    for number, found in enumerate(steps):
        first, ahead = number % STEPS == 0, number % STEPS < STEPS - 1
        again = number == STEPS  # the second block's first step comes after the first block was encoded
        assert of(found, "start") == STARTS_A_STEP * (first + ahead) + (STARTS_A_PASS if again else 0), found
        assert of(found, "wait") == (WAITS_A_PASS if again else 0), found
        assert of(found, "read") == READS_A_STEP + (READS_A_BLOCK if again else 0), found


def test_between_its_last_step_and_its_end_a_block_waits_for_nothing(model, on_plain_kernels, counts):
    for event, found in by_event(model, counts, ids_of(40)):
        if isinstance(event, Block):
            assert not of(found, "start") and not of(found, "wait") and not of(found, "read")


@pytest.mark.parametrize("chunk, passes", [(None, 1), (16, 3)])
def test_a_prompt_is_computed_one_layer_ahead(model, on_plain_kernels, counts, chunk, passes):
    for event, found in by_event(model, counts, ids_of(40), chunk=chunk):
        if isinstance(event, Prefilled):
            assert of(found, "start") == passes * STARTS_A_PASS and not of(found, "read")
            assert of(found, "wait") == passes * WAITS_A_PASS


def test_the_cpu_waits_a_fixed_number_of_times_a_layer(model, counts):
    if kernels.name != "cpu":
        pytest.skip("these are the formulations of another backend")
    for event, found in by_event(model, counts, ids_of(40)):
        if isinstance(event, Step) and event.step > 1:
            assert of(found, "start") == STARTS_A_STEP and of(found, "wait", *LOOP) == 0
            assert of(found, "wait", "cpu") <= CPU_EVALUATIONS_A_LAYER * LAYERS + 2, found  # 2: self-conditioning, believe


def masks_of(found):
    return {name: number for (name, _), number in found.items() if name.endswith("_mask")}


@pytest.mark.parametrize("padding", [None, [0, 7]])
def test_a_mask_is_built_once_a_pass_whatever_the_number_of_layers(model, counts, padding):
    """The prompt in chunks of 16, then steps, then the first block through the encoder."""
    ids = ids_of(40, 1 if padding is None else len(padding))
    for event, found in by_event(model, counts, ids, padding=padding, chunk=16):
        built = masks_of(found)
        if isinstance(event, Prefilled):
            assert built == {"causal_mask": 3, "window_mask": 3}
        elif isinstance(event, Step) and event.step == 1:  # of this block, and the encoder's pass over the last one
            encoder = {"causal_mask": 1, "window_mask": 1} if event.block else {}
            assert built == {"block_read_mask": 2} | encoder  # one for each kind of layer
        else:
            assert not built, "later steps of a block have the same masks"


def test_an_image_prompt_builds_one_mask_for_each_kind_of_layer(model, counts):
    ids = ids_of(40)
    ids[0, 5:9] = model.config.image_token_id
    features = mx.zeros((4, model.config.text.hidden_size))
    caches = model.make_caches()
    model.prefill(ids, [features], caches)
    assert masks_of(counts) == {"image_mask": 1, "image_or_window_mask": 1}
