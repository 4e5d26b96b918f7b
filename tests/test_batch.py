"""A batch answers as its rows alone do: ragged prompts, pictures in some, a seed each, rows that finish early leave."""

from pathlib import Path

import pytest

import dgemma

PICTURES = Path(__file__).resolve().parents[1] / "examples" / "demo" / "pictures"
ROWS = [  # prompt, its pictures, its seed
    ("Count from 3 to 24.", [], 5),  # three blocks
    ("What is in this image?", ["three_shapes.png"], 2),
    ("Hello", [], 9),
    ("Are the two numbers the same?", ["digits_407.png", "digits_92.png"], 0),
    ("Count from 1 to 9.", [], 1),
    ("Caption this picture.", ["two_shapes.png"], 3),  # many steps
    ("Count from 90 to 120.", [], 4),
    ("Hi", [], 8),
]


@pytest.fixture(scope="module")
def pipe():
    return dgemma.Pipeline.from_pretrained()


@pytest.mark.parametrize("settings", [{}, {"kv_bits": 8}, {"max_new_tokens": 40, "preset": "balanced"}], ids=str)
def test_eight_ragged_rows_answer_as_they_do_alone(pipe, settings):
    prompts, images, seeds = zip(*[(text, [PICTURES / name for name in names], seed) for text, names, seed in ROWS])
    together = pipe(list(prompts), list(images), seed=list(seeds), **settings)
    assert len(together) == len(ROWS)
    for answer, prompt, pictures, seed in zip(together, prompts, images, seeds):
        alone = pipe(prompt, pictures, seed=seed, **settings)
        assert (answer.tokens, answer.steps, answer.finish_reason) == (alone.tokens, alone.steps, alone.finish_reason), prompt


@pytest.mark.parametrize(
    "images, seed, message",
    [([[]], 0, "prompts"), ([[], []], [1, 2, 3], "3 seeds for 2"), (["a.png", "b.png", "c.png"], 0, "prompts")],
)
def test_lists_that_do_not_match_are_refused(pipe, images, seed, message):
    with pytest.raises(dgemma.UserError, match=message):
        pipe(["Hello", "Hi"], images, seed=seed)
