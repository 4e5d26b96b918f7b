"""Are reads calibrated? Of the answers that the model gives 80 %, are 80 % right?

    python benchmarks/calibration.py                        docs/calibration.png; under three minutes on two CPU cores
    python benchmarks/calibration.py --n 20 --out /tmp/c.png      to try it

The demo checkpoint is asked about freshly drawn pictures (examples/demo): the colour of a shape, how many shapes there are, the
letters of a printed word, the digits of a number in held-out handwriting. Each picture is shown as it was drawn, and spoilt (shrunk,
then speckled), so that the model has something to be unsure of. Needs matplotlib and scikit-learn (dgemma's `evaluate` extra).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from dgemma import Pipeline, SlotRead

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "demo"))
import pictures  # noqa: E402
import questions  # noqa: E402

COUNTS = questions.NUMBERS[2:7]
LETTERS = list(pictures.LETTERS)
BINS = 10
STYLES = {"as drawn": ("#0072B2", "o"), "spoilt": ("#D55E00", "s")}  # of Okabe and Ito


@dataclass
class Asked:
    """A question with the text of its right answer, the slots in it and what belongs into each."""

    picture: Image.Image
    text: str
    template: str
    choices: dict[str, list[str]]
    right: dict[str, str]


def colour(r: random.Random) -> Asked:
    """What color is the star?"""
    scene = pictures.scene(r, r.randint(1, 4))
    shape, ink = r.choice([o for o in scene.objects if [k for k, _ in scene.objects].count(o[0]) == 1] or scene.objects)
    template = f"The {shape} is [[colour]]."
    return Asked(scene.image, f"What color is the {shape}?", template, {"colour": list(pictures.COLOURS)}, {"colour": ink})


def count(r: random.Random) -> Asked:
    """How many shapes are there?"""
    scene = pictures.scene(r, r.randint(2, 6))
    right = {"count": questions.NUMBERS[len(scene.objects)]}
    return Asked(scene.image, "How many shapes are there?", "There are [[count]] shapes.", {"count": COUNTS}, right)


def letters(r: random.Random) -> Asked:
    """What does the sign say? A slot for each letter."""
    word = "".join(r.choices(LETTERS, k=r.randint(3, 6)))
    names = [f"letter{i}" for i in range(len(word))]
    template = 'The sign says "' + "".join(f"[[{name}]]" for name in names) + '".'
    return Asked(
        pictures.sign(r, text=word).image, "What does the sign say?", template, {name: LETTERS for name in names}, dict(zip(names, word))
    )


def digits(r: random.Random) -> Asked:
    """What number is written here? Handwriting that the model was not trained on; a slot for each digit."""
    row = pictures.digit_row(r, held_out=True)
    names = [f"digit{i}" for i in range(len(row.text))]
    template = "The number is " + "".join(f"[[{name}]]" for name in names) + "."
    return Asked(row.image, "Read the number.", template, {name: list("0123456789") for name in names}, dict(zip(names, row.text)))


def spoil(r: random.Random, image: Image.Image) -> Image.Image:
    """The picture shrunk to as little as a quarter and enlarged again, with noise on top."""
    factor, noise = r.uniform(1, 4), r.uniform(0, 40)
    small = image.resize((max(2, round(image.width / factor)), max(2, round(image.height / factor))), Image.Resampling.BOX)
    pixels = np.asarray(small.resize(image.size, Image.Resampling.BICUBIC), np.float32)
    speckle = np.random.RandomState(r.randrange(2**31)).standard_normal(pixels.shape) * noise
    return Image.fromarray(np.clip(pixels + speckle, 0, 255).astype(np.uint8))


def ask(pipe: Pipeline, number: int, seed: int, spoilt: bool) -> Iterator[tuple[SlotRead, str]]:
    """The reads of a condition, each with its right choice."""
    r = random.Random(seed)
    for i in range(number):
        one = (colour, count, letters, digits)[i % 4](r)
        image = spoil(r, one.picture) if spoilt else one.picture
        read = pipe.read(one.text, [image], template=one.template, choices=one.choices, seed=i, image_budget=70)
        yield from ((read[name], right) for name, right in one.right.items())


def measure(reads: list[tuple[SlotRead, str]]) -> dict:
    """Confidence and success of each read's most likely choice, and what they come to."""
    sure = np.array([slot.probabilities[slot.best] for slot, _ in reads])
    hit = np.array([slot.best == right for slot, right in reads])
    place = np.minimum((sure * BINS).astype(int), BINS - 1)
    bins = [(sure[place == b].mean(), hit[place == b].mean(), int((place == b).sum())) for b in range(BINS) if (place == b).any()]
    return {
        "reads": len(reads), "accuracy": hit.mean(), "confidence": sure.mean(), "bins": bins,
        "ECE": sum(n * abs(c - h) for c, h, n in bins) / len(reads),
        "nats": float(np.mean([-np.log(max(slot.probabilities[right], 1e-12)) for slot, right in reads])),
    }  # fmt: skip


def draw(found: dict[str, dict], path: Path) -> None:
    """The reliability plot: a point a bin, its area the number of reads; error bars are 95 % (Wilson)."""
    import matplotlib.pyplot as plt  # here, since the measurement needs none

    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), constrained_layout=True, width_ratios=(1.15, 1))
    left.plot([0, 1], [0, 1], color="0.7", lw=1, ls="--")
    for at, (name, one) in enumerate(found.items()):
        ink, mark = STYLES[name]
        x, y, n = map(np.array, zip(*one["bins"]))
        middle, reach = wilson(y, n)
        left.vlines(x, middle - reach, middle + reach, color=ink, lw=1, alpha=0.6)
        left.scatter(x, y, s=14 + 30 * np.log10(n), color=ink, marker=mark, label=f"{name}: ECE {one['ECE']:.3f}", zorder=3)
        right.bar(np.array([min(int(c * BINS), BINS - 1) for c in x]) + (at - 0.5) * 0.4, n, 0.4, color=ink, label=name)
    left.set(xlabel="probability of the most likely choice", ylabel="how often it is right", xlim=(0, 1.03), ylim=(0, 1.05))
    left.legend(frameon=False, loc="upper left")
    ticks = [f"{b / BINS:g}" for b in range(BINS)]
    right.set(xlabel="probability of the most likely choice, from", ylabel="reads", yscale="log", xticks=range(BINS), xticklabels=ticks)
    right.legend(frameon=False, loc="upper left")
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, dpi=110)


def wilson(share: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Middle and half-width of the 95 % interval of a share (Wilson 1927)."""
    z = 1.96
    scale = 1 + z * z / count
    return (share + z * z / (2 * count)) / scale, z * np.sqrt(share * (1 - share) / count + z * z / (4 * count**2)) / scale


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=160, help="pictures of each condition; default 160")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "calibration.png")
    args = parser.parse_args()
    pipe, begin = Pipeline.from_pretrained(), time.perf_counter()
    found = {name: measure(list(ask(pipe, args.n, args.seed, name == "spoilt"))) for name in STYLES}
    for name, one in found.items():
        print(f"{name}: {one['reads']} reads, {100 * one['accuracy']:.1f} % right, mean confidence {100 * one['confidence']:.1f} %, "
              f"ECE {one['ECE']:.4f}, {one['nats']:.3f} nats")  # fmt: skip
        print("  bins (confidence, right, reads): " + ", ".join(f"({c:.2f}, {h:.2f}, {n})" for c, h, n in one["bins"]))
    draw(found, args.out)
    print(f"{args.out}, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
