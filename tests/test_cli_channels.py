"""Thoughts, calls and stop strings on the command line: what goes to stdout, what to stderr."""

from __future__ import annotations

import json
import shutil

import pytest

import scripted
from dgemma import Pipeline, cli
from dgemma.hub import DEMO
from dgemma.pipeline import Unloaded
from test_channels import END, SAID, ids

CALL = {"name": "draw", "arguments": {"what": 'a "{star}", [red]', "n": 2}}


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs a command on a demo whose template has the released grammar, and whose model writes `said`."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(scripted.TEMPLATE)
    (tmp_path / "tools.json").write_text(json.dumps({"type": "function", "function": {"name": "draw", "parameters": {}}}))
    monkeypatch.chdir(tmp_path)

    def call(said: str, *argv: str) -> tuple[int, str, str]:
        model = scripted.pipeline([*ids(said), END]).model
        monkeypatch.setattr(Unloaded, "load", lambda self, *_, **__: Pipeline(model, self.processor, self.options))
        code = cli.main(["generate", "--model", str(folder), *argv, "Hi"])
        return code, *capsys.readouterr()

    return call


def test_text_and_calls_go_to_stdout_and_thoughts_to_stderr(run):
    code, out, err = run(SAID, "--think", "--tools", "tools.json", "--thinking-budget", "200")
    text, call = out.splitlines()
    assert (code, text, err) == (0, "I see two stars.", "A star, or two?\nTwo.\n") and json.loads(call) == CALL


def test_thoughts_are_silent_unless_asked_for(run):
    assert run(SAID)[2] == "" == run(SAID, "--think", "--quiet")[2]


def test_one_object_has_everything(run):
    found = json.loads(run(SAID, "--json")[1])
    assert (found["text"], found["thinking"], found["tool_calls"]) == ("I see two stars.", "A star, or two?\nTwo.", [CALL])


def test_a_file_gets_text_and_calls(run, tmp_path):
    code, out, _ = run(SAID, "--output", "a.txt")
    assert (code, out, (tmp_path / "a.txt").read_text()) == (0, "", run(SAID)[1])


def test_a_call_alone_is_one_line(run):
    code, out, err = run("<|tool_call>call:f{}<tool_call|>")
    assert (code, out, err) == (0, '{"name": "f", "arguments": {}}\n', "")


def test_a_call_that_was_cut_off_is_a_line_on_stderr(run):
    code, out, err = run("Now.<|tool_call>call:f{a:\n1,b:2}<tool_call|>", "--max-tokens", "18")
    assert (code, out) == (0, "Now.\n")
    assert err.startswith("dgemma: the tool call was cut off by the token limit: call:f{a: 1") and err.count("\n") == 1


def test_stop_strings(run):
    assert run("3, 4, 5, 6", "--stop", "x", "--stop", ", 5") == (0, "3, 4\n", "")
    assert json.loads(run("3, 4, 5, 6", "--stop", ", 5", "--json")[1])["stop_string"] == ", 5"


@pytest.mark.parametrize(
    "argv, line",
    [
        (["--stop", ""], "stop holds an empty string; a stop string has at least one character"),
        (["--thinking-budget", "0"], "--thinking-budget is 0; at least 1 is needed"),
        (["--tools", "nowhere.json"], "nowhere.json: cannot be read (No such file or directory)"),
        (["--tools", "model/chat_template.jinja"], "model/chat_template.jinja: is no JSON (Expecting property name"),
        (["--tools", "model/config.json"], "tool 1 is {'architectures': "),
        (["--model", str(DEMO), "--tools", "tools.json"], "the chat template of this checkpoint knows no tools"),
    ],
)
def test_mistakes_are_one_line(run, argv, line):
    code, out, err = run("Yes.", *argv)
    assert (code, out) == (2, "") and err.startswith(f"dgemma: {line}") and err.count("\n") == 1
