"""Presets: what each changes, that what is given beside one wins, and that none of them is the checkpoint's own settings."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

import dgemma  # noqa: F401
from dgemma import Pipeline, cli
from dgemma.errors import OptionError
from dgemma.presets import PRESETS, spell_out
from dgemma.sampler import ConfidenceThreshold, EntropyBound
from dgemma.settings import with_settings

PICTURES = Path(__file__).resolve().parents[1] / "examples" / "demo" / "pictures"


@pytest.fixture(scope="module")
def pipe():
    return Pipeline.from_pretrained()


def changed(before, after):
    return {field.name for field in fields(before) if getattr(before, field.name) != getattr(after, field.name)}


@pytest.mark.parametrize(
    "name, names",
    [("quality", {"rule"}), ("balanced", {"rule"}), ("fast", {"max_denoising_steps", "rule"})],
)
def test_a_preset_changes_what_it_says(pipe, name, names):
    options = with_settings(pipe.options, {"preset": name})
    assert changed(pipe.options, options) == names
    assert options == with_settings(pipe.options, PRESETS[name].settings())


def test_every_preset_is_tested():
    assert set(PRESETS) == {"quality", "balanced", "fast"}


def test_none_of_them_is_the_checkpoints_own(pipe):
    assert with_settings(pipe.options, {"preset": None}) == with_settings(pipe.options, {}) == pipe.options


def test_what_is_given_beside_a_preset_wins(pipe):
    fast = with_settings(pipe.options, {"preset": "fast"})
    assert with_settings(pipe.options, {"preset": "fast", "steps": 5}) == replace(fast, max_denoising_steps=5)
    quality = with_settings(pipe.options, {"preset": "quality"})
    assert with_settings(pipe.options, {"preset": "quality", "stability": 1}) == pipe.options
    for given, sampler in (({"entropy_bound": 0.3}, EntropyBound(0.3)), ({"confidence_threshold": 0.8}, ConfidenceThreshold(0.8))):
        assert with_settings(pipe.options, {"preset": "quality", **given}) == replace(quality, sampler=sampler)


def test_they_wait_longer_or_shorter_than_the_checkpoint(pipe):
    own = pipe.options.rule
    waits = {name: with_settings(pipe.options, {"preset": name}).rule for name in PRESETS}
    assert waits["quality"] == replace(own, stability=own.stability + 1) and waits["balanced"] == replace(own, stability=0)


@pytest.mark.parametrize("name", ["slow", "", 3, "Fast"])
def test_an_unknown_preset_is_refused(pipe, name):
    with pytest.raises(OptionError, match="one of quality, balanced, fast is needed"):
        spell_out({"preset": name})
    with pytest.raises(OptionError, match="preset is"):
        pipe("Hello", preset=name)


def test_the_command_line_refuses_one(capsys):
    assert cli.main(["generate", "--preset", "slow", "Hello"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "--preset" in err and "quality" in err


@pytest.mark.parametrize("name", [None, *PRESETS])
def test_every_preset_answers(pipe, name):
    answer = pipe("Are the two numbers the same?", images=[PICTURES / "digits_407.png", PICTURES / "digits_92.png"], preset=name)
    assert answer.text == "No, the first number is 407 and the second number is 92."
