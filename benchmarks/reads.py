"""Claims of docs/control.md: ten questions over one prefill against ten calls, what the noise of a slot does, and text that stays
as it was pinned.

    python benchmarks/reads.py                  all; five minutes on two CPU cores
    python benchmarks/reads.py --templates 0    without the last

On the demo checkpoint, or `--model`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median

from dgemma import Pipeline  # before mlx: it loads the BLAS that mlx then uses

import mlx.core as mx
import numpy as np

from dgemma.reading import ReadJob, repeat

PICTURES = Path(__file__).resolve().parents[1] / "examples" / "demo" / "pictures"
PICTURE = PICTURES / "three_shapes.png"
ROWS = 64  # of a batch
COLOURS = ["red", "green", "blue", "yellow", "purple", "orange", "black", "pink", "white"]
SHAPES = ["circle", "square", "triangle", "star", "diamond"]
QUESTION = "What is in this image?"
TEMPLATES = [
    "I see a [[colour]] circle, a blue star and a yellow triangle.",
    "I see a red [[shape]], a blue star and a yellow triangle.",
    "I see a red circle, a [[colour]] star and a yellow triangle.",
    "I see a red circle, a blue [[shape]] and a yellow triangle.",
    "I see a red circle, a blue star and a [[colour]] triangle.",
    "I see a red circle, a blue star and a yellow [[shape]].",
    "I see a [[colour]] circle.",
    "I see a [[colour]] star.",
    "I see a [[colour]] triangle.",
    "I see a [[colour]] circle left of a blue [[shape]].",
]


def main() -> None:
    """Print all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a hub id; default: the demo checkpoint")
    parser.add_argument("--turns", type=int, default=9, help="how often each way has its turn; default 9")
    parser.add_argument("--templates", type=int, default=1000, help="random templates to fill; default 1,000")
    args = parser.parse_args()
    pipe = Pipeline.from_pretrained(args.model)
    time_questions(pipe, args.turns)
    try_all_noise(pipe)
    if args.templates:
        check_pinned(pipe, args.templates)


def time_questions(pipe: Pipeline, turns: int) -> None:
    """Ten questions as rows over one prefill, and one by one; in turns, so that a slow minute meets both."""
    choices = {"colour": COLOURS, "shape": SHAPES}
    at_once = lambda: pipe.read(QUESTION, [PICTURE], template=TEMPLATES, choices=choices)
    one_by_one = lambda: [found for one in TEMPLATES for found in pipe.read(QUESTION, [PICTURE], template=[one], choices=[used(one)])]
    used = lambda template: {name: words for name, words in choices.items() if f"[[{name}]]" in template}
    ways = {"ten questions, one prefill": at_once, "ten calls": one_by_one}
    seconds = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            if turn:  # the first has everything to warm up
                seconds[name].append(time.perf_counter() - begin)
    for name, taken in seconds.items():
        print(f"{name}: {1000 * median(taken):.0f} ms (best {1000 * min(taken):.0f})")
    one, ten = seconds.values()
    print(f"ratio of medians {median(ten) / median(one):.1f}, of the best {min(ten) / min(one):.1f}")
    together, apart = at_once(), one_by_one()
    gap = max(
        abs(a[name].probabilities[word] - b[name].probabilities[word])
        for a, b in zip(together, apart) for name in a.slots for word in a[name].probabilities
    )  # fmt: skip
    print(f"largest difference of a probability between the two: {gap:.1e}")


def try_all_noise(pipe: Pipeline) -> None:
    """The right colour of a shape, read with each token of the vocabulary in turn as the noise of its slot; with the end and without."""
    asked = [
        (name, text, answer)
        for name, answers in json.loads((PICTURES / "answers.json").read_text()).items()
        for text, answer in answers.items()
        if text.startswith("What color")
    ]
    vocabulary, found = pipe.model.config.text.vocab_size, {"template and end": [], "template alone": []}
    for name, text, answer in asked[:8]:
        start, colour = answer.removesuffix(".").rsplit(" ", 1)
        for (way, rows), end in zip(found.items(), (True, False)):
            job = ReadJob.of(
                pipe.processor, pipe.options, text, [PICTURES / name], template=f"{start} [[c]].", choices={"c": [colour]}, end=end
            )
            (question,), ((token,),) = job.questions, job.questions[0].slots[0].tokens
            line, place = question.line(0, 1, (), None)
            canvas = np.tile(np.array(line), (vocabulary, 1))
            canvas[:, place] = np.arange(vocabulary)
            caches = repeat(job.asked.prefill(pipe.model, pipe.options), ROWS)
            for begin in range(0, vocabulary, ROWS):  # 384 tokens: six batches
                logits = pipe.model.canvas_logits(mx.array(canvas[begin : begin + ROWS]), caches)[:, place]
                rows.append(np.array(mx.softmax(logits, axis=-1)[:, token]))
    for way, rows in found.items():
        right = np.concatenate(rows).reshape(-1, vocabulary)
        worst = pipe.processor.pieces(right.mean(axis=0).argsort()[:3].tolist())
        print(f"{way}: right colour {right.mean():.4f} over all noise, below 0.9 for {100 * (right < 0.9).mean():.1f} %, "
              f"least {right.min():.4f}; worst {worst}")  # fmt: skip


def check_pinned(pipe: Pipeline, count: int) -> None:
    """Fill random templates, and find their text byte for byte in each result."""
    words, stream, kept, holes = vocabulary(pipe), random.Random(7), 0, 0
    for number in range(count):
        texts, template = random_template(words, stream, pipe.model.config.canvas_length)
        filled = pipe.fill(template, QUESTION, seed=number, steps=2)
        rebuilt = b"".join(a.encode() + b.encode() for a, b in zip(texts, (*filled.holes, "")))
        spoken = pipe.processor.decode(filled.tokens).encode()  # from the tokens of the canvas, not from the template
        kept += rebuilt == filled.text.encode() == spoken
        holes += len(filled.holes)
    print(f"pinned text byte-identical in {kept} of {count} results, around {holes} holes")
    if kept != count:
        raise SystemExit(1)


def vocabulary(pipe: Pipeline) -> list[str]:
    """Texts of one token each, those of the printable ASCII but brackets and the words of the demo's pictures."""
    single = [chr(code) for code in range(33, 127) if chr(code) not in "[]<>|"]
    return single + [f" {word}" for word in COLOURS + SHAPES + ["a", "the", "of", "left", "and", "3", "14"]]


def random_template(words: list[str], stream: random.Random, room: int) -> tuple[list[str], str]:
    """Texts, and a template with a hole of one or two tokens (once in a while either) between them."""
    marks = [stream.choice(["1", "2", "1", "2", "1-2"]) for _ in range(stream.randint(1, 4))]
    texts = ["".join(stream.choices(words, k=stream.randint(0, (room - 10) // 10))) for _ in range(len(marks) + 1)]
    texts = [text + stream.choice(["", " "]) if i < len(marks) else text for i, text in enumerate(texts)]
    return texts, "".join(f"{text}[[{mark}]]" for text, mark in zip(texts, marks)) + texts[-1]


if __name__ == "__main__":
    main()
