"""dgemma against the live reference: python tests/oracle/live.py [--rounds N] [--seeds N]

Prints the largest difference of each comparison and how the whole generations came out; exit code 1 where a limit is
passed. Needs the `dev` extra (torch). Prompts and canvases are drawn anew in each round, so this sees far more than the
goldens hold.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLX_ENABLE_TF32", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dgemma  # noqa: E402, F401  before torch: it loads the BLAS that mlx then uses
from oracle import cases, demo, ours, record, reference, tiny  # noqa: E402

TOLERANCE = 1e-4
# A run that came closer to a border than this may fall to either side of it. Logits start 1e-6 of their scale apart;
# over tens of steps self-conditioning carries that to ten times as much and more.
ROUNDING = {"draw": 5e-5, "best": 1e-3, "accept": 5e-5, "stop": 2e-5, "route": 1e-5}


class Table:
    """The largest difference of each comparison so far, and the fate of the generations."""

    def __init__(self):
        self.worst: dict[str, tuple[float, str]] = {}
        self.runs: Counter[str] = Counter()
        self.faults: list[str] = []

    def measured(self, group: str, label: str, found: dict, expected: dict) -> None:
        for kind, (size, name) in record.largest(found, expected).items():
            key = f"{group}: {kind}"
            self.worst[key] = max((size, f"{label} {name}"), self.worst.get(key, (0.0, "")))

    def generated(self, group: str, label: str, made: record.Run, expected: record.Run) -> None:
        near = {name: size for name, size in vars(expected.margins).items() if size < ROUNDING[name]}
        same = made.outcome == expected.outcome
        verdict = "identical" if same else "rounding" if near else "different"
        self.runs[f"{group}: {verdict}"] += 1
        if not same:
            self.faults.append(f"{label}: {verdict} {near}\n  ours      {made.outcome}\n  reference {expected.outcome}")

    def show(self) -> bool:
        """Print everything; True when all is within its limits."""
        print(f"\n{'comparison':<52}{'largest difference':>20}   where")
        for key, (size, where) in sorted(self.worst.items()):
            print(f"{key:<52}{size:>20.1e}   {where}")
        print(f"\n{'generations':<52}{'runs':>20}")
        for key, count in sorted(self.runs.items()):
            print(f"{key:<52}{count:>20}")
        print("", *self.faults, sep="\n")
        fine = all(size < TOLERANCE for size, _ in self.worst.values())
        return fine and not any(key.endswith("different") for key in self.runs)


def main() -> None:
    """Everything, tiny models first."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=2, help="prompts drawn for each case (default 2)")
    arguments.add_argument("--seeds", type=int, default=2, help="seeds for each generation (default 2)")
    wanted, table = arguments.parse_args(), Table()
    references = {name: reference.load(name) for name in tiny.CONFIGS}
    for case in cases.CASES.values():
        model = ours.load(case.model, case.image_attention)
        for turn in range(wanted.rounds):
            forward(table, case, references[case.model], model, turn)
        for run in (run for run in cases.GENERATIONS.values() if run.case == case.name):
            for turn in range(wanted.seeds):
                seeds = tuple(seed + 1000 * turn for seed in run.seeds)
                theirs, mine = cases.prompt(case, reference.cut), cases.prompt(case, ours.cut)
                expected = reference.generate(references[case.model], theirs, seeds, run.policy, case.image_attention)
                made = ours.generate(model, mine, seeds, run.policy)
                table.generated(group(case), f"{run.name} seeds {seeds}", made, expected)
    if demo.folder().is_dir():
        of_demo(table, wanted.seeds)
    raise SystemExit(0 if table.show() else 1)


def group(case: cases.Case) -> str:
    """Under which heading a case is listed."""
    return "tiny, as Google" if case.image_attention == cases.BIDIRECTIONAL else "tiny"


def forward(table: Table, case: cases.Case, expected_of, model, turn: int) -> None:
    """One drawn prompt through both, whole and in chunks."""
    theirs, prompt = (cases.prompt(case, side.cut, f" round {turn}") for side in (reference, ours))
    pair = cases.canvases(tiny.CONFIGS[case.model], len(case.rows), f"{case.name} round {turn}")
    expected = reference.measure(expected_of, theirs, pair, case.image_attention)
    table.measured(group(case), case.name, ours.measure(model, prompt, pair), expected)
    table.measured(f"{group(case)}, chunks", case.name, ours.measure(model, prompt, pair, 5), expected)


def of_demo(table: Table, seeds: int) -> None:
    """The shipped checkpoint: forward passes and whole answers."""
    expected_of, model = reference.load_folder(demo.folder()), ours.load_folder(demo.folder())
    for question in demo.QUESTIONS.values():
        theirs, prompt = (demo.prompt(question, side.cut) for side in (reference, ours))
        pair = cases.canvases(demo.config(), len(question.rows), question.name)
        expected = reference.measure(expected_of, theirs, pair, cases.ENCODER_WINDOW)
        table.measured("demo", question.name, ours.measure(model, prompt, pair), expected)
        for turn in range(seeds):
            drawn = [seed + 100 * turn for seed in question.seeds]
            made = ours.generate(model, prompt, drawn, demo.policy())
            expected = reference.generate(expected_of, theirs, drawn, demo.policy())
            table.generated("demo", f"demo {question.name} seeds {drawn}", made, expected)


if __name__ == "__main__":
    main()
