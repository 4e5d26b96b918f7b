"""Training examples as fixed-size arrays, made by many processes and kept in a large pool on the GPU.

A slot holds one or two pictures and up to ROWS rows about them; a row is a prompt, one canvas of the answer, and its
task. Three kinds of slot:

    short  one picture at 70 soft tokens, prompts up to 128 tokens
    long   two such pictures, prompts up to 224 tokens: pairs, second turns, later canvases of stories
    large  one picture at 140 soft tokens, prompts up to 224 tokens
"""

import mmap
import os
import random
import time
import traceback
from dataclasses import dataclass

import numpy as np

import pictures
import questions
from fused import MARKS, SOFT_MARK
from vocabulary import CANVAS, Encoder

ROWS = 8


@dataclass(frozen=True)
class Kind:
    name: str
    pictures: int
    budget: int
    prompt: int

    @property
    def patches(self):
        return self.budget * 9

    def fields(self):
        """Name -> (shape of one slot, dtype)."""
        k, n = self.pictures, self.patches
        return {"pixels": ((k, n, 768), np.uint8), "width": ((k,), np.uint8), "count": ((k,), np.int16),
                "classes": ((k, n), np.uint8), "order": ((k, n), np.uint8), "rows": ((), np.uint8),
                "prompt": ((ROWS, self.prompt), np.int16), "answer": ((ROWS, CANVAS), np.int16),
                "task": ((ROWS,), np.uint8)}


SHORT, LONG, LARGE = Kind("short", 1, 70, 128), Kind("long", 2, 70, 224), Kind("large", 1, 140, 224)


def rows_of(encoder, question, soft=(), history=()):
    """(prompt, canvas, task) for every canvas of one answer; earlier canvases belong to the prompt."""
    prompt = encoder.prompt(question.text, soft, history)
    canvases = encoder.canvases(question.answer)
    task = questions.TASKS.index(question.task)
    return [(prompt + sum(canvases[:i], []), canvas, task) for i, canvas in enumerate(canvases)]


def random_picture(r):
    t = r.random()
    if t < 0.23:
        return pictures.scene(r, r.randint(1, 3))
    if t < 0.48:
        return pictures.scene(r, r.randint(3, 6))
    return pictures.digit_row(r) if t < 0.83 else pictures.sign(r)


def slot_contents(r, kind):
    """The pictures of one slot and its conversations: (question, indices of the pictures in the prompt, history)."""
    if kind.pictures == 2 and r.random() < 0.6:
        a, b, question = questions.picture_pair(r)
        shown, asked = [a, b], [(question, (0, 1), ())] * 3
    elif kind.pictures == 2:
        shown, asked = [pictures.scene(r, r.randint(1, 6)), random_picture(r)], []
    else:
        shown, asked = [random_picture(r)], []
    for i, p in enumerate(shown):
        asked += [(q, (i,), ()) for q in questions.about(r, p)]
        if p.kind == "scene" and len(p.objects) <= 4:
            asked += [(q, (i,), ()) for q in questions.about(r, p) if q.task == "caption"]
        if kind.prompt > 128 or r.random() < 0.3:
            history, q = questions.second_turn(r, p)
            asked += [(q, (i,), history)] * 2
    return shown, asked


def fill(encoder, r, kind, arrays, i):
    """Draws a new slot i into the arrays of its kind."""
    shown, asked = slot_contents(r, kind)
    marks = []
    for j, p in enumerate(shown):
        pixels, width, classes, order = pictures.patches(p, kind.budget)
        n = len(pixels)
        for name, value in (("pixels", pixels), ("classes", classes), ("order", order)):
            arrays[name][i, j, :n] = value
            arrays[name][i, j, n:] = 0
        arrays["width"][i, j], arrays["count"][i, j] = width, n
        marks.append([SOFT_MARK + MARKS * j + s for s in range(n // 9)])
    first, rows = [], []  # questions about both pictures come first: they would drown among those about one
    for question, which, history in asked:
        # The trainer numbers the soft tokens by slot; a prompt may show only the second picture.
        (first if len(which) == 2 else rows).extend(rows_of(encoder, question, [marks[j] for j in which], history))
    rows = [row for row in rows if len(row[0]) <= kind.prompt]
    rows = first + r.sample(rows, min(ROWS - len(first), len(rows)))
    arrays["rows"][i] = len(rows)
    for j, (prompt, canvas, task) in enumerate(rows):
        arrays["prompt"][i, j] = 0
        arrays["prompt"][i, j, kind.prompt - len(prompt):] = prompt
        arrays["answer"][i, j], arrays["task"][i, j] = canvas, task


def text_rows(encoder, n, length, seed=7):
    """Rows without pictures: counting, also as a second turn. Arrays [n, length], [n, 32], [n]."""
    r, rows = random.Random(seed), []
    while len(rows) < n:
        question, history = questions.counting(r), []
        if r.random() < 0.3:
            history = [questions.counting(r)]
        rows += [row for row in rows_of(encoder, question, (), history) if len(row[0]) <= length]
    prompts = np.zeros((n, length), np.int16)
    for i, (prompt, _, _) in enumerate(rows[:n]):
        prompts[i, length - len(prompt):] = prompt
    return prompts, np.array([y for _, y, _ in rows[:n]], np.int16), np.array([t for *_, t in rows[:n]], np.uint8)


def arrays_in(memory, kind, n):
    """Arrays of n slots inside one shared block of memory (or newly allocated, when memory is None)."""
    out, at = {}, 0
    for name, (shape, dtype) in kind.fields().items():
        size = int(np.prod((n,) + shape)) * np.dtype(dtype).itemsize
        out[name] = (np.zeros((n,) + shape, dtype) if memory is None
                     else np.frombuffer(memory, dtype, size // np.dtype(dtype).itemsize, at).reshape((n,) + shape))
        at += -(-size // 64) * 64
    return out


def bytes_of(kind, n):
    return sum(-(-int(np.prod((n,) + s)) * np.dtype(d).itemsize // 64) * 64 for s, d in kind.fields().values())


class Painters:
    """Processes that draw slots without end. Each owns two buffers; flag 1 means full, 0 means to be filled."""

    BATCH = {"short": 128, "long": 64, "large": 64}

    def __init__(self, tokenizer_json, kinds, seed):
        """kinds: the kind that each process draws. Must be created before CUDA starts, since it forks."""
        self.kinds, self.flags_memory = kinds, mmap.mmap(-1, 4096)
        self.flags = np.frombuffer(self.flags_memory, np.int32)
        self.buffers, self.pids = [], []
        for kind in kinds:
            for _ in range(2):
                memory = mmap.mmap(-1, bytes_of(kind, self.BATCH[kind.name]))
                self.buffers.append(arrays_in(memory, kind, self.BATCH[kind.name]))
        for w, kind in enumerate(kinds):
            pid = os.fork()
            if pid == 0:
                try:
                    self.paint(w, kind, tokenizer_json, seed + w)
                finally:
                    traceback.print_exc()
                    os._exit(1)
            self.pids.append(pid)

    def paint(self, w, kind, tokenizer_json, seed):
        from tokenizers import Tokenizer

        os.nice(5)
        encoder, r, parent = Encoder(Tokenizer.from_str(tokenizer_json)), random.Random(seed), os.getppid()
        while True:
            for b in (2 * w, 2 * w + 1):
                while self.flags[b]:
                    time.sleep(0.002)
                    if os.getppid() != parent:
                        os._exit(0)
                for i in range(self.BATCH[kind.name]):
                    fill(encoder, r, kind, self.buffers[b], i)
                self.flags[b] = 1

    def ready(self):
        """Buffers to be collected. A dead painter would go unnoticed while the pool grows stale, so it is an error."""
        for pid in self.pids:
            if os.waitpid(pid, os.WNOHANG)[0]:
                raise RuntimeError(f"painter {pid} died")
        return [b for b in range(len(self.buffers)) if self.flags[b]]

    def stop(self):
        for pid in self.pids:
            os.kill(pid, 9)
