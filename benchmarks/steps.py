"""How many denoising steps does the demo checkpoint need? Accuracy against steps per canvas, for every setting that decides.

    python benchmarks/steps.py                               the sweep: table and plot of docs/steps.md
    python benchmarks/steps.py --presets --seed 2 --n 100    the presets, on other questions: its second table

Questions and grading are those of examples/demo/evaluate.py (dgemma's `evaluate` extra), the same questions and seeds for
every setting; an empty answer is a wrong one (`redraws=0`). Two groups are kept apart: captions and stories, whose words
depend on each other and have to be negotiated, and the 22 tasks with one right answer, which settle at once. Pictures are
encoded once for all settings, and rows are answered in batches: a row's answer does not depend on its neighbours.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # at this width threads gain little, and lose much on a shared machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "demo"))

from evaluate import CHECKPOINT, SETS, Case, cases  # noqa: E402

from dgemma import Pipeline  # noqa: E402: before mlx, so that a fast BLAS serves
from dgemma.processor import pad  # noqa: E402
from dgemma.denoise import Block, denoise  # noqa: E402
from dgemma.presets import PRESETS  # noqa: E402
from dgemma.settings import with_settings  # noqa: E402

import mlx.core as mx  # noqa: E402, I001: see above

DOCS, PLOT = ROOT / "docs" / "steps.md", ROOT / "docs" / "steps.png"
GROUPS = {"negotiated": ("caption", "story"), "one answer": tuple(task for task in SETS if task not in ("caption", "story"))}
BATCH = 16
OWN = "the checkpoint's own"
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "entropy bound": {f"{x:g}": {"entropy_bound": x} for x in (0.02, 0.05, 0.2, 0.5, 1.0, 2.0)},
    "confidence threshold": {f"{x:g}": {"confidence_threshold": x} for x in (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)},
    "step cap": {f"{n}": {"steps": n} for n in (24, 16, 12, 8, 6, 4, 3, 2)},
    "stopping": {
        f"stable {s}, below {c:g}": {"stability": s, "confidence": c}
        for s, c in ((2, 0.005), (1, 0.02), (1, 0.05), (0, 0.005), (0, 0.02), (0, 0.05))
    },
    "temperature": {f"{a:g} to {b:g}": {"t_max": a, "t_min": b} for a, b in ((0.8, 0.8), (0.6, 0.4), (0.6, 0.2), (0.4, 0.4))},
}
# The family, and how its curve is drawn: colours of Okabe and Ito, which also differ in lightness.
STYLES = {
    "entropy bound": ("#0072B2", "o"),
    "confidence threshold": ("#D55E00", "s"),
    "step cap": ("#000000", "x"),
    "stopping": ("#009E73", "^"),
    "temperature": ("#CC79A7", "D"),
}


@dataclass
class Count:
    """What a group of questions came to."""

    right: int = 0
    asked: int = 0
    steps: int = 0
    canvases: int = 0

    @property
    def accuracy(self) -> float:
        """Per cent."""
        return 100 * self.right / self.asked

    @property
    def mean(self) -> float:
        """Denoising steps per canvas."""
        return self.steps / self.canvases

    def __str__(self) -> str:
        return f"{self.accuracy:.1f} % ({self.right} of {self.asked}) | {self.mean:.2f}"


@dataclass
class Point:
    """One setting, measured."""

    family: str
    label: str
    settings: dict[str, Any]
    counts: dict[str, Count] = field(default_factory=dict)  # of each group


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Questions that are answered together, their pictures encoded."""

    cases: Sequence[Case]
    seeds: Sequence[int]
    ids: Any  # [B, L]
    padding: Sequence[int]
    features: Sequence[mx.array]


def batches(pipe: Pipeline, tasks: Sequence[str], n: int, seed: int) -> list[Batch]:
    """`n` questions of each task; a question has the seed that evaluate.py gives it."""
    asked = [(case, 1000 * seed + i) for task in tasks for i, case in enumerate(cases(task, n, seed, swap=False))]
    found = []
    for begin in range(0, len(asked), BATCH):
        some, seeds = zip(*asked[begin : begin + BATCH])
        prompts = [pipe.processor.prompt(c.messages(), [p.image for p in c.shown], budget=c.budget) for c in some]
        ids, padding = pad(prompts, pipe.model.config.text.pad_token_id)
        features = pipe.model.encode_images([image for one in prompts for image in one.images])
        mx.eval(features)
        found.append(Batch(some, seeds, ids, padding, features))
    return found


def answers(pipe: Pipeline, batch: Batch, settings: dict[str, Any]) -> Iterator[tuple[Case, str, list[int]]]:
    """Each question of a batch, its answer, and the denoising steps of each of its canvases."""
    tokens, steps = [[] for _ in batch.cases], [[] for _ in batch.cases]
    options = with_settings(pipe.options, {"redraws": 0, **settings})
    for event in denoise(pipe.model, batch.ids, batch.features, options=options, seeds=batch.seeds, padding=batch.padding):
        if isinstance(event, Block):
            for row, more, taken in zip(event.rows, event.tokens, event.steps):
                tokens[row] += more
                steps[row].append(taken)
    for case, row, taken in zip(batch.cases, tokens, steps):
        yield case, pipe.processor.decode(row), taken


def measure(pipe: Pipeline, questions: list[Batch], settings: dict[str, Any]) -> Count:
    """All questions of a group under one setting."""
    count = Count()
    for batch in questions:
        for case, text, taken in answers(pipe, batch, settings):
            count.right += not case.faults(text)
            count.asked += 1
            count.steps += sum(taken)
            count.canvases += len(taken)
    return count


def points(presets: bool) -> list[Point]:
    """What is to be measured, the checkpoint's own settings first."""
    families = {"preset": {name: preset.settings() for name, preset in PRESETS.items()}} if presets else FAMILIES
    return [Point(OWN, "", {})] + [Point(f, label, s) for f, some in families.items() for label, s in some.items()]


def run(o: argparse.Namespace) -> list[Point]:
    """Measure every point that `o.json` does not have yet."""
    kept = Kept(o.json, dict(seed=o.seed, n=o.n, n_other=o.n_other, checkpoint=o.checkpoint))
    wanted, begin = points(o.presets), time.perf_counter()
    pipe = Pipeline.from_pretrained(o.checkpoint)
    numbers = {"negotiated": o.n, "one answer": o.n_other}
    questions = {name: batches(pipe, tasks, numbers[name], o.seed) for name, tasks in GROUPS.items()}
    for point in wanted:
        point.counts = kept.of(point) or {name: measure(pipe, asked, point.settings) for name, asked in questions.items()}
        kept.add(point)
        print(f"{time.perf_counter() - begin:5.0f} s  {row(point)}", file=sys.stderr, flush=True)
    return wanted


class Kept:
    """A JSON file of points, so that a run that was broken off can go on; None keeps nothing."""

    def __init__(self, path: Path | None, questions: dict[str, Any]):
        self.path, self.questions, self.points = path, questions, []
        if path is not None and path.exists():
            found = json.loads(path.read_text())
            if found["questions"] != questions:
                sys.exit(f"{path} holds answers to other questions ({found['questions']}); name another file")
            self.points = found["points"]

    def of(self, point: Point) -> dict[str, Count]:
        """What is known of a point's settings."""
        found = next((one for one in self.points if one["settings"] == point.settings), None)
        return {name: Count(**count) for name, count in found["counts"].items()} if found else {}

    def add(self, point: Point) -> None:
        """Keep a point."""
        if self.path is not None and not self.of(point):
            self.points.append(asdict(point))
            self.path.write_text(json.dumps(dict(questions=self.questions, points=self.points), indent=1))


# -- telling ----------------------------------------------------------------------------------------------------------


def row(point: Point) -> str:
    """A line of the table."""
    return f"| {point.family} {point.label} | " + " | ".join(str(point.counts[name]) for name in GROUPS) + " |"


def table(found: list[Point]) -> str:
    """Markdown."""
    head = "| setting | captions, stories | steps per canvas | one right answer | steps per canvas |\n|---|---|---|---|---|"
    return "\n".join([head, *map(row, found)])


def machine(o: argparse.Namespace, seconds: float) -> str:
    """On what, by what, how long."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), name)
    which = "--presets " if o.presets else ""
    command = f"python benchmarks/steps.py {which}--seed {o.seed} --n {o.n} --n-other {o.n_other}"
    versions = f"mlx {importlib.metadata.version('mlx')}"
    return f"One thread on a shared machine ({name}), {versions}; `{command}` took {seconds / 60:.0f} minutes."


NEAR = (12.3, 16.2)  # steps per canvas that the second panel shows
LABELS = {"stopping": (-7, -3, "right"), "temperature": (6, 5, "left"), "entropy bound": (-7, -4, "right"), "step cap": (-7, 3, "right")}


def plot(found: list[Point], path: Path) -> None:
    """Captions and stories: exact answers against steps per canvas, a curve a family; all of it, and where most settings are."""
    import matplotlib  # a table needs none

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    name, own = "negotiated", found[0].counts["negotiated"]
    figure, (whole, near) = plt.subplots(1, 2, figsize=(13, 6), layout="constrained")
    for family, (colour, marker) in STYLES.items():
        curve = [one for one in found if one.family == family]
        curve.sort(key=lambda one: (one.counts[name].mean, one.counts[name].accuracy))
        places = [(one.counts[name].mean, one.counts[name].accuracy) for one in curve]
        for axis in (whole, near):
            style = dict(color=colour, marker=marker, markersize=6, linewidth=1.3, label=family, alpha=0.9)
            axis.plot(*zip(*places), **style | ({"linestyle": "none"} if family in ("stopping", "temperature") else {}))
        for place, one in dict(zip(places, curve)).items():  # settings that came to the same are labelled once
            close = NEAR[0] <= place[0] <= NEAR[1]
            if family in ("stopping", "temperature") and not close:
                continue
            dx, dy, side = LABELS.get(family, (8, -3, "left"))
            (near if close else whole).annotate(
                one.label, place, color=colour, fontsize=7.5, xytext=(dx, dy), textcoords="offset points", ha=side,
            )  # fmt: skip
    for axis in (whole, near):
        axis.plot(own.mean, own.accuracy, "*", color="#E69F00", markersize=15, markeredgecolor="black", label=OWN, zorder=1)
        axis.set(xlabel="mean denoising steps per canvas", ylabel="exact answers, %")
        axis.grid(alpha=0.25)
    ticks = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
    whole.set(title=f"captions and stories, {own.asked} questions a point", xscale="log", xlim=(1.8, 60))
    whole.set_xticks(ticks, ticks)
    whole.minorticks_off()
    whole.legend(loc="upper left", frameon=False)
    near.set(title="the same, near the checkpoint's own settings", xlim=NEAR, ylim=(70, 101.5))
    figure.savefig(path, dpi=110)


def document(told: str, presets: bool) -> None:
    """Put a table into docs/steps.md."""
    name = "presets" if presets else "sweep"
    begin, end = f"<!-- the {name} of benchmarks/steps.py -->\n", f"<!-- end of the {name} -->"
    before, _, rest = DOCS.read_text().partition(begin)
    DOCS.write_text(before + begin + told + end + rest.partition(end)[2])


def main() -> None:
    """Measure, print the table, put it into docs/steps.md and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", action="store_true", help="the presets instead of the sweep")
    parser.add_argument("--n", type=int, default=32, help="captions, and stories (default %(default)s)")
    parser.add_argument("--n-other", type=int, default=3, help="questions of each other task (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of questions and answers (default %(default)s)")
    parser.add_argument("--checkpoint", default=str(CHECKPOINT), help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", type=Path, help="keep what is measured here; what it has is not measured again")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/ as it is")
    o = parser.parse_args()
    begin = time.perf_counter()
    found = run(o)
    told = f"{machine(o, time.perf_counter() - begin)}\n\n{table(found)}\n"
    print(told)
    if not o.no_docs:
        document(told, o.presets)
        if not o.presets:
            plot(found, PLOT)


if __name__ == "__main__":
    main()
