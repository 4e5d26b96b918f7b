"""`dgemma read`, `fill` and `revise`: their examples on the demo checkpoint, their output and their refusals."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from dgemma import cli
from dgemma.hub import DEMO

PICTURES = Path(__file__).resolve().parents[1] / "examples" / "demo" / "pictures"
COMMANDS = ("read", "fill", "revise")
ASK = ("--image", "two_shapes.png", "--prompt", "What is in this image?")

pytestmark = pytest.mark.skipif(not DEMO.is_dir(), reason="the demo checkpoint is not there yet")


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command in this process, beside the demo's pictures: exit code, stdout, stderr."""
    monkeypatch.chdir(PICTURES)
    monkeypatch.delenv("DGEMMA_DEBUG", raising=False)

    def call(*argv, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        return cli.main(argv), *capsys.readouterr()

    return call


def examples(command):
    made = cli.parser()._subparsers._group_actions[0].choices[command]
    return [line.strip() for line in made.format_help().partition("examples:\n")[2].splitlines()]


@pytest.mark.parametrize("line", [line for command in COMMANDS for line in examples(command)])
def test_every_example_of_the_help_runs(line, run):
    echo, _, command = line.rpartition(" | ")
    argv = shlex.split(command)[1:]
    code, out, err = run(*argv, stdin=shlex.split(echo)[1] + "\n" if echo else "")
    assert (code, err) == (0, "") and out
    if "--json" in argv:
        json.loads(out)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_text(command):
    made = cli.parser()._subparsers._group_actions[0].choices[command]
    assert all(action.help for action in made._actions)


def test_the_docs_run(run, capsys, monkeypatch):
    text = (PICTURES.parents[2] / "docs" / "control.md").read_text()
    commands = re.findall(r"^\$ dgemma (.*)$", text, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        code, out, err = run(*shlex.split(command))
        assert (code, err) == (0, "") and "orange" in out
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(PICTURES.parents[2])
    exec(program, {})
    assert capsys.readouterr().out.count("green") >= 3


def test_a_read_names_the_most_likely_choice(run):
    template, *more = "I see a [[c]] square left of an orange circle.", "--choice", "c=red,green", "--choice", "c=blue"
    code, out, _ = run("read", *ASK, template, *more)
    first, second = out.splitlines()
    assert code == 0 and first == "I see a green square left of an orange circle."
    assert second.startswith("  c: green 1, red ") and ", mass " in second
    (read,) = json.loads(run("read", *ASK, template, *more, "--json")[1])["reads"]
    assert read["slots"]["c"]["best"] == "green" and list(read["slots"]["c"]["probabilities"]) == ["red", "green", "blue"]


def test_several_templates_are_read_at_once(run):
    _, out, _ = run("read", *ASK, "--json", "--choice", "c=green,red", "--choice", "o=orange,red", "I see a [[c]] square.", "I see an [[o]] circle.")
    assert [list(read["slots"]) for read in json.loads(out)["reads"]] == [["c"], ["o"]]


@pytest.mark.parametrize("argv", [("fill", *ASK, "I see [[1-3]] left of an orange circle."), ("revise", *ASK, "I see a red square.")])
def test_watch_draws_the_canvas_and_changes_no_result(argv, run, monkeypatch):
    plain = run(*argv)
    code, out, err = run(*argv, "--watch")
    assert (code, out) == plain[:2] and plain[2] == ""
    steps = err.splitlines()
    assert len(steps) > 0 and all(line.startswith("block 1, step ") for line in steps)


def test_a_fill_is_its_text(run):
    code, out, err = run("fill", *ASK, "I see a [[1-2]] square left of an [[1]] circle.")
    assert (code, out, err) == (0, "I see a green square left of an orange circle.\n", "")
    made = json.loads(run("fill", *ASK, "--json", "I see a [[1]] square left of an [[1]] circle.")[1])
    assert made["holes"] == ["green", "orange"] and made["lengths"] == [1, 1] and made["model"] == "demo"


def test_a_revision_mends_the_draft(run):
    draft = "I see a red square left of a blue circle."
    assert run("revise", *ASK, draft) == (0, "I see a green square left of an orange circle.\n", "")
    assert run("revise", *ASK, "-", stdin=draft + "\n")[1] == "I see a green square left of an orange circle.\n"


@pytest.mark.parametrize(
    "argv, message",
    [
        (("fill", *ASK, "no hole"), "the template has no hole"),
        (("fill", *ASK, "a [[1-3]"), "never closes it"),
        (("fill", "a [[1]]"), "neither --prompt nor --image is given"),
        (("fill", *ASK, "a [[40]]"), "a canvas has 32"),
        (("fill", *ASK, "a [[1]]", "--image", "none.png"), "none.png: no such image file"),
        (("fill", *ASK, "a [[1]]", "--max-tokens", "5"), "unrecognized arguments"),
        (("read", *ASK, "a [[c]]"), "slot 'c' has no choices"),
        (("read", *ASK, "a [[c]]", "--choice", "red"), "--choice 'red' names no slot"),
        (("read", *ASK, "a [[c]]", "--choice", "c=a", "--choice", "d=b"), "choices for 'd'"),
        (("read", *ASK, "a [[c]]n", "--choice", "c=gree"), "choice 'gree' of 'c' becomes other tokens in its place than alone"),
        (("revise", *ASK, "a draft", "--strength", "2"), "strength is 2.0"),
        (("revise", *ASK, "x" * 40), "the draft takes 41 tokens"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, message, run):
    code, out, err = run(*argv)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
