"""The examples and notebooks run on the demo checkpoint and show what they say they show."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from dgemma.hub import DEMO

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PICTURES = EXAMPLES / "demo" / "pictures"
PICTURE, QUESTION = "three_shapes.png", "What is in this image?"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))

pytestmark = pytest.mark.skipif(not DEMO.is_dir(), reason="the demo checkpoint is not there yet")


def run(script: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd)


def right_answer() -> str:
    return json.loads((PICTURES / "answers.json").read_text())[PICTURE][QUESTION]


def test_describe_image_answers():
    done = run("describe_image.py", str(PICTURES / PICTURE), QUESTION)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == right_answer()
    assert "\x1b" not in done.stdout  # the sketch of the picture is for terminals


def test_describe_image_refuses_in_one_line():
    done = run("describe_image.py", "no_such_file.png")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["describe_image: no_such_file.png: no such image file"]


def test_watch_canvas_draws_every_step(tmp_path):
    done = run("watch_canvas.py", str(PICTURES / PICTURE), QUESTION, "--out", "seen", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    text, summary = done.stdout.splitlines()
    assert text == right_answer()
    blocks, steps = (int(word) for word in summary.split() if word.isdigit())
    with Image.open(tmp_path / "seen.gif") as film, Image.open(tmp_path / "seen.png") as strip:
        assert film.n_frames == blocks + steps  # each step, and each block as it was written
        assert strip.width == 1680
        colours = strip.convert("RGB").getcolors(strip.width * strip.height)
        assert len(colours) > 100  # a picture, a legend and cells, not an empty sheet
    assert (tmp_path / "seen.png").stat().st_size < 300_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_asserts_hold(path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "notebooks"))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress not found")
    import run_notebooks  # a script in examples/notebooks: not above, because it is on the path only here

    done = run_notebooks.run(path)
    assert not [output for cell in done.cells for output in cell.get("outputs", []) if output.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_what_it_shows(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("assert " in line for cell in cells for line in cell["source"])
    assert path.stat().st_size < 1_000_000


# -- the README -------------------------------------------------------------------------------------------------------

ROOT = EXAMPLES.parent
README = (ROOT / "README.md").read_text()


def blocks(kind: str, page: str = README) -> list[str]:
    return [text for name, text in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE) if name == kind]


def commands() -> list[tuple[str, str]]:
    """Each command of the README's console blocks and what it is said to print; the drawing of a canvas goes to stderr."""
    found = []
    for part in "\n".join(blocks("console")).split("$ ")[1:]:
        command, _, printed = part.partition("\n")
        kept = [line for line in printed.strip().splitlines() if not line.startswith(("block ", "⋮"))]
        found.append((command, "\n".join(kept)))
    return found


@pytest.mark.parametrize("command, printed", commands(), ids=lambda text: text[:40])
def test_a_command_of_the_readme_prints_what_it_says(command, printed):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=300, cwd=PICTURES, env=environment
    )
    assert done.returncode == 0, done.stderr
    if "Caption" in command:  # many right answers: a GPU's rounding may lead to another
        assert done.stdout.strip().endswith((".", "!"))
    else:
        assert done.stdout.strip() == printed


@pytest.fixture
def beside_examples(tmp_path, monkeypatch):
    """A folder in which the examples' pictures are where a reader of the README has them."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_program_about_conversations_runs(capsys, beside_examples):
    (program,) = blocks("python", (ROOT / "docs" / "sessions.md").read_text())
    exec(program, {})
    assert "The star is blue. 107 77" in capsys.readouterr().out
    assert (beside_examples / "talk.safetensors").exists()


def test_the_programs_of_the_readme_run(capsys, beside_examples):
    names = {}
    for program in blocks("python"):
        if '"google/' not in program:  # the released checkpoint cannot be fetched by a test
            exec(program, names)  # one after the other, as a reader would
    printed = capsys.readouterr().out
    assert printed.startswith(right_answer())
    assert "The end." in printed


def test_the_files_that_the_readme_links_to_are_there():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_tree_of_the_readme_is_the_tree():
    drawn = next(block for block in blocks("") if block.startswith("attention/"))
    folder, named = "", set()
    for line in drawn.splitlines():
        if not line.startswith(" "):
            folder = line.split("/")[0]
        named.update(f"{folder}/{name}" for name in re.findall(r"\b(\w+\.py)\b", line))
    there = {f"{folder}/{path.name}" for folder in ("attention", "vision", "dgemma") for path in (ROOT / folder).glob("*.py")}
    assert named == {path for path in there if not path.endswith("__init__.py")}
