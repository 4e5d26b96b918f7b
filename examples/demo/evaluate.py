"""Measures the demo checkpoint: exact answers on freshly drawn pictures, with held-out handwriting and words.

    python examples/demo/evaluate.py --runtime dgemma|transformers [--n 100] [--tasks describe digits ...]
                                     [--swap] [--steps K] [--seed S] [--jobs J] [--json FILE]

Every answer but captions and stories must equal the one right answer, character by character; those two are graded by
the checker in stories.py. `--swap` is the control: the same questions about another case's pictures, which must fall
to chance. `--steps 2` forces at most two denoising steps a canvas.
"""

import argparse
import json
import os
import pathlib
import random
import time
from dataclasses import dataclass, field

import pictures
import questions
import stories

CHECKPOINT = pathlib.Path(__file__).resolve().parents[2] / "dgemma" / "demo"


@dataclass
class Case:
    """One question: the pictures of the first turn, earlier turns, and what the answer must be."""

    question: questions.Question
    shown: list
    history: list = field(default_factory=list)
    budget: int = 70

    def messages(self):
        """The conversation in transformers' form."""
        images, out = [{"type": "image"} for _ in self.shown], []
        for q in [*self.history, self.question]:
            out.append({"role": "user", "content": images + [{"type": "text", "text": q.text}]})
            out.append({"role": "assistant", "content": [{"type": "text", "text": q.answer}]})
            images = []
        return out[:-1]

    def faults(self, answer):
        if self.question.task == "caption":
            return stories.check_caption(answer, self.objects)
        if self.question.task == "story":
            return stories.check_story(answer, self.objects)
        return [] if answer == self.question.answer else ["wrong"]

    @property
    def objects(self):
        return self.truth.objects

    def __post_init__(self):
        self.truth = self.shown[0] if self.shown else None  # stays when --swap replaces what is shown


# ---------------------------------------------------------------------------------------------- cases
def ask(r, picture, task, budget=70):
    """The question of one task about a picture, or None when the picture does not allow it."""
    fitting = [q for q in questions.about(r, picture) if q.task == task]
    return Case(fitting[0], [picture], budget=budget) if fitting else None


def scene_like(r, n, wanted=None):
    """A scene of n shapes, with one of the wanted notes if any are given."""
    while True:
        p = pictures.scene(r, n)
        if not wanted or p.notes & wanted:
            return p


def pair(r, task):
    while True:
        a, b, question = questions.picture_pair(r, held_out=True)
        if question.task == task:
            return Case(question, [a, b])


def second_turn(r):
    p = r.choice([lambda: pictures.scene(r), lambda: pictures.scene(r), lambda: pictures.digit_row(r, held_out=True),
                  lambda: pictures.sign(r, "listed")])()
    history, question = questions.second_turn(r, p)
    return Case(question, [p], history)


def of_scene(task, low, high, wanted=None, budget=70):
    return lambda r: ask(r, scene_like(r, r.randint(low, high), wanted), task, budget)


SETS = {
    "describe": of_scene("describe", 1, 3),
    "count": of_scene("count", 1, 6),
    "colour": of_scene("colour", 1, 6),
    "list": of_scene("list", 4, 6),
    "dark background": of_scene("describe", 1, 3, {"dark"}),
    "grey background": of_scene("describe", 1, 3, {"grey"}),
    "coloured background": of_scene("describe", 1, 3, {"coloured"}),
    "panorama": of_scene("list", 4, 6, {"panorama"}),
    "portrait": of_scene("describe", 1, 3, {"portrait"}),
    "tiny shapes": of_scene("describe", 1, 3, {"tiny"}),
    "digits": lambda r: ask(r, pictures.digit_row(r, held_out=True), "digits"),
    "how many digits": lambda r: ask(r, pictures.digit_row(r, held_out=True), "how many digits"),
    "listed word": lambda r: ask(r, pictures.sign(r, "listed"), "word"),
    "held-out word": lambda r: ask(r, pictures.sign(r, "held out"), "word"),
    "random letters": lambda r: ask(r, pictures.sign(r, "random"), "random letters"),
    "how many letters": lambda r: ask(r, pictures.sign(r, "random"), "how many letters"),
    "counting": lambda r: Case(questions.counting(r), []),
    "more shapes": lambda r: pair(r, "more shapes"),
    "same number": lambda r: pair(r, "same number"),
    "second turn": second_turn,
    "describe, 140 tokens": of_scene("describe", 1, 3, budget=140),
    "digits, 140 tokens": lambda r: ask(r, pictures.digit_row(r, held_out=True), "digits", 140),
    "caption": of_scene("caption", 1, 4),
    "story": of_scene("story", 1, 5),
}


def cases(task, n, seed, swap):
    """n cases of a task; the same for the same seed on every runtime."""
    r, out = random.Random(f"{seed} {task}"), []
    while len(out) < n:
        case = SETS[task](r)
        if case:
            out.append(case)
    if swap:
        shown = [c.shown for c in out]
        for c, other in zip(out, shown[1:] + shown[:1]):
            c.shown = other
    return out


# ---------------------------------------------------------------------------------------------- runtimes
class Counter:
    """A streamer that only counts the denoising steps of each canvas."""

    def __init__(self):
        self.steps, self.drafts, self.prompt = [], 0, True

    def put_draft(self, value):
        self.drafts += 1

    def put(self, value):
        if self.prompt:
            self.prompt = False
        else:
            self.steps.append(self.drafts)
            self.drafts = 0

    def end(self):
        pass


def transformers_runtime(folder, steps):
    """answer(case, seed) by transformers in float32 on the CPU."""
    import torch
    from transformers import AutoTokenizer
    from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaForBlockDiffusion
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    torch.set_num_threads(1)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processors = {b: Gemma4ImageProcessorPil(max_soft_tokens=b) for b in (70, 140)}
    limits = {"max_denoising_steps": steps} if steps else {}
    end = model.generation_config.eos_token_id

    def answer(case, seed):
        text = tokenizer.apply_chat_template(case.messages(), tokenize=False, add_generation_prompt=True)
        inputs = {}
        if case.shown:
            seen = processors[case.budget]([p.image for p in case.shown], return_tensors="pt")
            pieces = text.split("<|image|>")
            text = pieces[0]
            for n, piece in zip(seen.pop("num_soft_tokens_per_image"), pieces[1:]):
                text += "<|image>" + "<|image|>" * int(n) + "<image|>" + piece
            inputs = dict(seen)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        if case.shown:
            inputs["mm_token_type_ids"] = (ids == tokenizer.convert_tokens_to_ids("<|image|>")).long()
        counter = Counter()
        torch.manual_seed(seed)
        with torch.no_grad():
            out = model.generate(input_ids=ids, streamer=counter, **inputs, **limits).sequences
        out = out[0, ids.shape[1]:].tolist()
        stop = next((i for i, t in enumerate(out) if t in end), len(out))
        return tokenizer.decode(out[:stop]), counter.steps

    return answer


def dgemma_runtime(folder, steps):
    """answer(case, seed) by this project's runtime."""
    from dgemma import Pipeline

    pipe = Pipeline.from_pretrained(folder)
    limits = {"steps": steps} if steps else {}

    def answer(case, seed):
        shown = [p.image for p in case.shown] or None
        out = pipe(case.messages(), images=shown, image_budget=case.budget, seed=seed, redraws=0, **limits)
        return out.text, list(out.steps)

    return answer


RUNTIMES = {"transformers": transformers_runtime, "dgemma": dgemma_runtime}


# ---------------------------------------------------------------------------------------------- measuring
def measure(o, part):
    """Every o.jobs-th case, starting with `part`: a list of (task, right, faults, steps, answer, wanted)."""
    answer, out = RUNTIMES[o.runtime](o.checkpoint, o.steps), []
    for task in o.tasks:
        for i, case in enumerate(cases(task, o.n, o.seed, o.swap)):
            if i % o.jobs == part:
                text, steps = answer(case, 1000 * o.seed + i)
                out.append((task, case.faults(text), steps, text, case.question.answer))
    return out


def table(results, tasks):
    """Per task: questions, right ones, mean denoising steps a canvas, and the faults that the checker named."""
    out = {}
    for task in tasks:
        rows = [r for r in results if r[0] == task]
        steps, faults = [s for r in rows for s in r[2]], [f for r in rows for f in r[1]]
        out[task] = dict(n=len(rows), right=sum(not r[1] for r in rows), steps=sum(steps) / max(1, len(steps)),
                         canvases=len(steps), faults={f: faults.count(f) for f in sorted(set(faults)) if f != "wrong"},
                         misses=[r[3:5] for r in rows if r[1]][:5])
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--runtime", choices=RUNTIMES, default="dgemma")
    p.add_argument("--checkpoint", default=str(CHECKPOINT))
    p.add_argument("--n", type=int, default=100, help="questions per task")
    p.add_argument("--tasks", nargs="+", choices=list(SETS), default=list(SETS), metavar="TASK",
                   help=f"of {list(SETS)}")
    p.add_argument("--swap", action="store_true", help="control: another case's pictures")
    p.add_argument("--steps", type=int, help="at most this many denoising steps a canvas")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--jobs", type=int, default=1, help="processes")
    p.add_argument("--json", help="write the table and a few misses here")
    o = p.parse_args()
    if o.swap:
        o.tasks = [t for t in o.tasks if t != "counting"]  # it has no picture
    start = time.time()
    if o.jobs == 1:
        results = measure(o, 0)
    else:
        import multiprocessing

        os.environ["OMP_NUM_THREADS"] = "1"
        with multiprocessing.get_context("spawn").Pool(o.jobs) as workers:
            results = sum(workers.starmap(measure, [(o, i) for i in range(o.jobs)]), [])
    result = table(results, o.tasks)
    print("| task | exact | % | steps per canvas |\n|---|---|---|---|")
    for task, t in result.items():
        print(f"| {task} | {t['right']} / {t['n']} | {100 * t['right'] / max(1, t['n']):.1f} | {t['steps']:.2f} |"
              + (f" {t['faults']}" if t["faults"] else ""))
    print(f"{o.runtime}, {len(results)} questions, {time.time() - start:.0f} s", flush=True)
    if o.json:
        report = dict(arguments=vars(o), seconds=round(time.time() - start), table=result)
        pathlib.Path(o.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
