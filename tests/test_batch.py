"""A batch of ragged rows, pictures in some, says what each row says alone, token for token in float32."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on an NVIDIA GPU mlx would round float32 products to 10 bits

import dgemma  # before mlx: it loads the BLAS that mlx then uses

import mlx.core as mx
import pytest
from PIL import Image

from dgemma import Block, OptionError, Pipeline, PromptError

PICTURES = Path(__file__).parents[1] / "examples" / "demo" / "pictures"
SEEDS = [11, 3, 0, 7, 7, 2**40, 5, 1]


@pytest.fixture(scope="module")
def demo():
    return Pipeline.from_pretrained(dtype=mx.float32)


@pytest.fixture(scope="module")
def tiny(checkpoint):
    return Pipeline.from_pretrained(checkpoint, dtype=mx.float32)


def same(pipe, prompts, images, **settings):
    """The batch, once each row has been compared with its single run."""
    together = pipe(prompts, images=images, seed=SEEDS, **settings)
    assert len(together) == len(prompts) == 8
    for prompt, pictures, seed, found in zip(prompts, images, SEEDS, together):
        alone = pipe(prompt, images=pictures, seed=seed, **settings)
        for field in ("tokens", "text", "steps", "finish_reason", "redrawn", "prompt_tokens", "image_tokens", "seed", "stop_string"):
            assert getattr(found, field) == getattr(alone, field), (prompt, field)
    return together


ASKED = [
    ("Count from 1 to 30.", []),
    ("What is in this image?", ["three_shapes.png"]),
    ("Count from 7 to 9.", []),
    ("Are the two numbers the same?", ["digits_407.png", "digits_92.png"]),
    ("Tell a short story about this picture.", ["three_shapes.png"]),
    ([{"role": "user", "content": "Count from 3 to 5."}, {"role": "assistant", "content": "3, 4, 5."}, {"role": "user", "content": "Count from 3 to 14."}], []),
    ("Count from 5 to 25.", []),
    ("Count from 3 to 14.", []),
]  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"kv_bits": 8, "preset": "balanced"}], ids=str)
def test_the_demo_with_pictures_in_three_rows_and_several_blocks(demo, settings):
    prompts, images = [one for one, _ in ASKED], [[str(PICTURES / name) for name in names] for _, names in ASKED]
    together = same(demo, prompts, images, **settings)
    assert sum(bool(one.image_tokens) for one in together) == 3 and len({one.prompt_tokens for one in together}) > 4
    assert {one.blocks for one in together} == {1, 2, 3}


def ragged(size=(96, 48)):
    picture = lambda colour: Image.new("RGB", size, colour)
    prompts = ["Hello." * n for n in (1, 9, 2, 30, 1, 4, 17, 3)]
    return prompts, [[], [picture("red")], [], [], [picture("blue"), picture("green")], [], [picture("white")], []]


@pytest.mark.parametrize("settings", [{"max_new_tokens": 40}, {"max_new_tokens": 21, "chunk": 7}, {"stop": ["e", "Q"]}])
def test_a_random_model_with_pictures_in_three_rows_and_several_blocks(tiny, settings):
    together = same(tiny, *ragged(), **settings)
    assert max(one.blocks for one in together) > 1


def test_rows_that_finish_early_leave_the_batch(demo):
    prompts = [one for one, names in ASKED if not names]
    events = list(demo.stream(prompts, seed=0))
    at_work = [event.rows for event in events if isinstance(event, Block)]
    assert at_work[0] == tuple(range(len(prompts))) and len(at_work[-1]) < len(prompts)
    assert all(set(later) <= set(earlier) for earlier, later in zip(at_work, at_work[1:]))
    assert [one.blocks for one in events[-1].answers] == [sum(row in rows for rows in at_work) for row in range(len(prompts))]


def test_a_batch_of_one_is_a_batch(tiny):
    (found,) = tiny(["Hello."], images=[[]], seed=[3])
    assert found.tokens == tiny("Hello.", seed=3).tokens == tiny("Hello.", seed=[3]).tokens


@pytest.mark.parametrize(
    "call, error, message",
    [
        (dict(prompt=["x", "y"], seed=[1, 2, 3]), OptionError, "3 seeds for 2 prompt\\(s\\)"),
        (dict(prompt=["x", "y"], seed=[1, -1]), OptionError, "seed is -1; 0 to 2\\*\\*64 - 1 is allowed"),
        (dict(prompt=["x", "y"], seed=[1, "2"]), OptionError, "seed is '2'; a whole number is needed"),
        (dict(prompt=["x", "y"], seed=2**64 - 1), OptionError, "seed is 18446744073709551616; 0 to"),
        (dict(prompt=["x", "y"], images=[[]]), PromptError, "a batch of 2 prompts takes images as 2 lists"),
        (dict(prompt=["x", "y"], images=[[], [], []]), PromptError, "a batch of 2 prompts takes images as 2 lists"),
        (dict(prompt=["x", "y"], canvas=[[5] * 8]), OptionError, "the seed canvas has shape \\(1, 8\\); \\(2, 8\\) is needed"),
        (dict(prompt=["x", ""]), PromptError, "the prompt is empty"),
    ],
)
def test_lengths_that_do_not_match_are_one_clear_line(tiny, call, error, message):
    with pytest.raises(error, match=message) as caught:
        tiny(**call)
    assert "\n" not in str(caught.value) and issubclass(error, dgemma.UserError)
