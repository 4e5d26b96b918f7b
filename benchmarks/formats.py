"""What does each quantised format cost the demo checkpoint, and does dgemma read it as mlx-vlm does?

    python benchmarks/formats.py --mlx-vlm PYTHON              every format; the table also goes to docs/formats.md
    python benchmarks/formats.py --mlx-vlm PYTHON --n 100      with 100 questions a task instead of 10

PYTHON is one that has mlx-vlm: its own `convert` writes the files, and its logits are what ours are compared with, both in
float32. This Python needs dgemma's `evaluate` extra: the accuracy is that of examples/demo/evaluate.py, on freshly drawn
pictures, the same ones for every format. Bytes are those of the safetensors files.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from speed import DEMO, released_spelling  # noqa: E402

DOCS = ROOT / "docs" / "formats.md"
BEGIN, END = "<!-- the table of benchmarks/formats.py -->\n", "<!-- end of the table -->"
QUESTION = "list"  # of oracle.demo.QUESTIONS: one picture
ORIGINAL = "bf16, as trained"
# What a row says -> the conversion of oracle.formats.CONVERSIONS that it measures.
BY_MLX_VLM = {
    **{f"{bits} bit": f"affine-{bits}-64" for bits in (8, 6, 5, 4, 3)},
    "4 bit, groups of 32": "affine-4-32",
    "4 bit, groups of 128": "affine-4-128",
    "3 bit, groups of 32": "affine-3-32",
    **{mode: mode for mode in ("mxfp8", "mxfp4", "nvfp4")},
    "4 bit, mlx-vlm's own choice": "own-4",
    "4 and 8 bit by place, as OptiQ": "optiq",
    "8 bit, tower and patches too": "patches-8",
    "4 bit, tower and patches too": "patches-4",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One format, measured."""

    label: str
    size: int  # bytes
    difference: float | None  # of our logits from mlx-vlm's, against their largest
    as_installed: float | None  # the same where mlx-vlm has to be mended first
    right: int
    asked: int
    steps: float  # denoising steps per canvas

    def __str__(self) -> str:
        logits = "-" if self.difference is None else f"{self.difference:.0e}"
        if self.as_installed is not None:
            logits += f" (unmended {self.as_installed:.2f})"
        accuracy = f"{100 * self.right / self.asked:.1f} % ({self.right} of {self.asked})"
        return f"| {self.label} | {self.size:,} | {logits} | {accuracy} | {self.steps:.2f} |"


# -- mlx-vlm's side ---------------------------------------------------------------------------------------------------


def peer_side(work: Path) -> None:
    """Convert whatever is not there yet, and measure every folder of `work`; by a Python that has mlx-vlm."""
    from oracle import peer  # the other side has no mlx-vlm

    from oracle import formats

    prompt, canvases = read_inputs(work)
    for name in json.loads((work / "names.json").read_text()):
        folder, begin = work / name, time.perf_counter()
        if not folder.exists():
            peer.convert(work / "source", folder, formats.CONVERSIONS[name])
        model, found = peer.load(folder), {}
        if peer.packs_patches(model):
            found = {f"as installed/{key}": array for key, array in peer.measure(model, prompt, canvases).items()}
            peer.unpack_patches(model)
        np.savez(work / f"{name}.npz", **found, **peer.measure(model, prompt, canvases))
        print(f"mlx-vlm: {name}, {time.perf_counter() - begin:.1f} s", file=sys.stderr)


def read_inputs(work: Path):
    """The prompt and the canvases that `write_inputs` left."""
    from oracle import cases  # neither side needs it otherwise

    with np.load(work / "inputs.npz") as stored:
        picture = cases.Picture(pixels=stored["pixels"], positions=stored["positions"])
        return cases.Prompt(ids=stored["ids"], padding=[0], pictures=[picture]), list(stored["canvases"])


# -- dgemma's side ----------------------------------------------------------------------------------------------------


def write_inputs(work: Path) -> tuple:
    """One question about one picture, as both sides get it; returns prompt and canvases."""
    from oracle import cases, demo, ours  # mlx-vlm's side has neither dgemma nor the tokenizer's folder

    prompt = demo.prompt(demo.QUESTIONS[QUESTION], ours.cut)
    canvases = cases.canvases(demo.config(), 1, "formats")
    picture = prompt.pictures[0]
    np.savez(
        work / "inputs.npz", ids=prompt.ids, canvases=canvases, pixels=picture.pixels, positions=picture.positions
    )
    return prompt, canvases


def by_dgemma() -> dict[str, Callable[[Path, Path], object]]:
    """Our own conversions: what a row says -> how its folder is made of the source."""
    from dgemma.convert import convert  # mlx-vlm's side has no dgemma
    from dgemma.formats import Format

    return {
        "4 bit, `dgemma convert`": functools.partial(convert, format=Format()),
        "4 bit in groups of 32, `dgemma convert`": functools.partial(convert, format=Format(group_size=32)),
    }


def difference(folder: Path, theirs: dict[str, np.ndarray], prompt, canvases) -> float:
    """The largest difference of our logits from theirs, against the largest of theirs."""
    from oracle import ours, record  # see write_inputs

    found = ours.measure(ours.load_folder(folder), prompt, canvases)
    return max(record.difference(found[name], array) for name, array in theirs.items() if name.startswith("logits/"))


def answers(folder: Path, n: int, jobs: int) -> tuple[int, int, float]:
    """Right answers, questions, and mean denoising steps a canvas, by examples/demo/evaluate.py."""
    report = folder.with_suffix(".json")
    script = ROOT / "examples" / "demo" / "evaluate.py"
    options = ["--checkpoint", folder, "--n", n, "--jobs", jobs, "--json", report]
    done = subprocess.run(list(map(str, [sys.executable, script, *options])), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"evaluate.py failed on {folder.name}:\n{done.stderr[-2000:]}")
    tasks = json.loads(report.read_text())["table"].values()
    canvases = sum(task["canvases"] for task in tasks)
    steps = sum(task["steps"] * task["canvases"] for task in tasks) / canvases
    return sum(task["right"] for task in tasks), sum(task["n"] for task in tasks), steps


def measure(label: str, folder: Path, inputs: tuple, arguments: argparse.Namespace) -> Row:
    """Everything of one format."""
    with np.load(folder.parent / f"{folder.name}.npz") as stored:
        theirs = dict(stored)
    grey = {name.removeprefix("as installed/"): array for name, array in theirs.items() if name.startswith("as")}
    right, asked, steps = answers(folder, arguments.n, arguments.jobs)
    return Row(
        label=label,
        size=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        difference=difference(folder, theirs, *inputs),
        as_installed=difference(folder, grey, *inputs) if grey else None,
        right=right,
        asked=asked,
        steps=steps,
    )


# -- both -------------------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    """Markdown."""
    head = "| format | bytes | logits against mlx-vlm's | demo accuracy | steps per canvas |\n|---|---|---|---|---|"
    return "\n".join([head, *map(str, rows)])


def machine(arguments: argparse.Namespace, seconds: float) -> str:
    """On what, by what, how long."""
    versions = f"mlx {importlib.metadata.version('mlx')}, mlx-vlm {peer_version(arguments.mlx_vlm)}"
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), name)
    command = f"python benchmarks/formats.py --mlx-vlm PYTHON --n {arguments.n}"
    return f"{os.cpu_count()} cores ({name}), {versions}; `{command}` took {seconds / 60:.0f} minutes."


def peer_version(python: str) -> str:
    """mlx-vlm's version in that Python; ends with a message where there is none."""
    asked = [python, "-c", "import importlib.metadata as m; print(m.version('mlx-vlm'))"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True)
    except OSError as error:
        sys.exit(f"{python}: {error.strerror}")
    if done.returncode:
        sys.exit(f"{python} has no mlx-vlm; name a Python that has it: pip install mlx-vlm")
    return done.stdout.strip()


def run(arguments: argparse.Namespace, work: Path) -> list[Row]:
    """Convert, then measure format after format."""
    import dgemma  # noqa: F401: before mlx, so that a fast BLAS serves; mlx-vlm's side has no dgemma

    (work / "source").symlink_to(released_spelling(DEMO))
    folders = {ORIGINAL: work / "source"} | {label: work / name for label, name in BY_MLX_VLM.items()}
    for number, (label, convert) in enumerate(by_dgemma().items()):
        folders[label] = work / f"dgemma-{number}"
        convert(work / "source", folders[label])
    if arguments.only:
        folders = {label: folder for label, folder in folders.items() if arguments.only in label}
    inputs = write_inputs(work)
    (work / "names.json").write_text(json.dumps([folder.name for folder in folders.values()]))
    subprocess.run([arguments.mlx_vlm, __file__, "--peer", str(work)], check=True)
    rows = []
    for label, folder in folders.items():
        rows.append(measure(label, folder, inputs, arguments))
        print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    """Measure, print the table, and put it into docs/formats.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mlx-vlm", metavar="PYTHON", help="a Python with mlx-vlm")
    parser.add_argument("--n", type=int, default=10, help="questions a task (default 10; there are 24 tasks)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that answer (default: all cores)")
    parser.add_argument("--only", metavar="TEXT", help="only rows whose first column has this; docs/formats.md stays")
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        peer_side(arguments.peer)
        return
    if importlib.util.find_spec("sklearn") is None:
        sys.exit("this Python lacks scikit-learn, whose digits the questions show: pip install -e '.[evaluate]'")
    if not arguments.mlx_vlm:
        parser.error("--mlx-vlm PYTHON is needed: a Python that has mlx-vlm")
    peer_version(arguments.mlx_vlm)  # before minutes are spent
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        found = table(run(arguments, Path(work)))
    told = f"{machine(arguments, time.perf_counter() - begin)}\n\n{found}\n"
    print(told)
    if not arguments.only:
        before, _, rest = DOCS.read_text().partition(BEGIN)
        DOCS.write_text(before + BEGIN + told + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
