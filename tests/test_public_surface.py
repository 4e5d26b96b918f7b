"""One public surface: short names, all explained, and an import that drags nothing along."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

import dgemma
from dgemma.sampler import EntropyBound
from dgemma.settings import with_settings
from dgemma.step import Options
from dgemma.stopping import StableAndConfident

PUBLIC = [
    "Answer",
    "Block",
    "Called",
    "CheckpointError",
    "DgemmaError",
    "Failure",
    "Filled",
    "Finished",
    "ImageError",
    "OptionError",
    "OutputError",
    "Pipeline",
    "Prefilled",
    "PromptError",
    "Read",
    "Revision",
    "Seconds",
    "Session",
    "SessionError",
    "SlotRead",
    "Step",
    "Text",
    "Thought",
    "ToolCall",
    "Turn",
    "UserError",
]


def test_these_are_the_public_names():
    assert sorted(dgemma.__all__) == PUBLIC  # whoever adds a name promises to keep it


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_explained(name):
    thing = getattr(dgemma, name)
    assert inspect.getdoc(thing)
    for method, function in inspect.getmembers(thing, inspect.isfunction):
        if not method.startswith("_"):
            assert inspect.getdoc(function), f"{name}.{method}"


def test_importing_dgemma_brings_no_heavy_library_along():
    heavy = ["torch", "matplotlib", "transformers", "mlx_vlm", "scipy", "sklearn"]
    code = f"import sys, dgemma; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_every_setting_of_a_call_is_documented_and_known():
    listed = re.findall(r"^(\w+(?:(?:,| or) \w+)*): ", inspect.getdoc(dgemma.Pipeline.__call__), re.MULTILINE)
    names = {name for line in listed for name in re.split(r", | or ", line)} | {"pins", "thinking_budget"}
    taken_by_the_call = {"seed", "image_budget", "chunk", "canvas", "pins", "stop", "tools", "enable_thinking", "thinking_budget"}
    assert taken_by_the_call < names
    options = Options(
        max_new_tokens=32, max_denoising_steps=8, t_min=0.4, t_max=2.0, sampler=EntropyBound(), rule=StableAndConfident(),
        end_token_ids=(1,),
    )  # fmt: skip
    for name in names - taken_by_the_call:
        given = {"preset": "fast", "kv_bits": 8, "kv_group_size": 64}.get(name, 1)
        beside = {"kv_bits": 8} if name.startswith("kv_") else {}
        assert with_settings(options, beside | {name: given}) is not None
    with pytest.raises(dgemma.OptionError, match="unknown setting 'temprature'"):
        with_settings(options, {"temprature": 1})


def test_errors_form_a_tree():
    for name in PUBLIC:
        thing = getattr(dgemma, name)
        if name.endswith("Error") or name == "Failure":
            assert issubclass(thing, dgemma.DgemmaError)
    assert issubclass(dgemma.ImageError, dgemma.UserError) and not issubclass(dgemma.Failure, dgemma.UserError)
