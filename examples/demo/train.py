"""Trains the demo checkpoint on one GPU.

    python examples/demo/train.py --out DIR --seconds 840

The parameters are transformers' own (fused.py); what is saved is a Hugging Face checkpoint in bf16, a moving average
of the weights. `--cpu` runs a few tiny steps to check the script. Raw weights are saved too, for `--resume`.
"""

import argparse
import glob
import math
import os
import time

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import numpy as np
import torch
import torch.nn.functional as F

import pictures
import pool
import questions
import vocabulary
from fused import Fused, new_model
from optimiser import Optimiser
from vocabulary import CANVAS

START = time.time()
N_TASKS = len(questions.TASKS)
FIRST_FREE = questions.TASKS.index(questions.FREE[0])
TORCH = {np.uint8: torch.uint8, np.int16: torch.int16}


def say(*words):
    print(f"[{time.time() - START:5.0f} s]", *words, flush=True)


def options():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", default="out")
    p.add_argument("--seconds", type=float, default=840, help="wall time, start-up included")
    p.add_argument("--steps", type=int, default=10**9)
    p.add_argument("--rate", type=float, default=2e-3)
    p.add_argument("--decay", type=float, default=0.3, help="last part of the run in which the rate falls to zero")
    p.add_argument("--warmup", type=int, default=300)
    p.add_argument("--short", type=int, default=160, help="pictures a step with short prompts, two rows each")
    p.add_argument("--long", type=int, default=32, help="slots of two pictures a step, three rows each")
    p.add_argument("--large", type=int, default=20, help="pictures of 140 soft tokens a step, two rows each")
    p.add_argument("--text", type=int, default=32, help="rows a step without pictures")
    p.add_argument("--pool", type=int, default=48000, help="short slots on the GPU; a quarter as many of the others")
    p.add_argument("--painters", type=int, default=15)
    p.add_argument("--resume", help="folder with raw weights")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--log", type=int, default=500)
    p.add_argument("--save", type=float, default=150, help="seconds between saved checkpoints")
    p.add_argument("--cpu", action="store_true")
    return p.parse_args()


# ---------------------------------------------------------------------------------------------- data on the GPU
class Pool:
    """Slots of one kind on the GPU; new ones replace the oldest."""

    def __init__(self, kind, n, device):
        self.kind, self.n = kind, n
        self.data = {k: torch.zeros((n,) + s, dtype=TORCH[d], device=device)
                     for k, (s, d) in kind.fields().items()}
        self.filled = torch.zeros((), device=device)
        self.written = 0

    def put(self, arrays):
        size = arrays["rows"].shape[0]
        at = self.written % (self.n // size * size)
        for k, t in self.data.items():
            t[at:at + size].copy_(arrays[k], non_blocking=True)
        self.written += size
        self.filled.fill_(float(min(self.written, self.n // size * size)))

    def draw(self, n, rows):
        """n random slots and `rows` random rows of each: pixels etc. [n, ...], prompt etc. [n * rows, ...]."""
        device = self.filled.device
        slot = (torch.rand(n, device=device) * self.filled).long()
        out = {k: self.data[k].index_select(0, slot) for k in ("pixels", "width", "count", "classes", "order")}
        have = self.data["rows"].index_select(0, slot).float()
        pick = [(torch.rand(n, device=device) * have).long()]
        for _ in range(rows - 1):  # another row than the one before
            ahead = 1 + (torch.rand(n, device=device) * (have - 1).clamp(min=0)).long()
            pick.append((pick[-1] + ahead) % have.long().clamp(min=1))
        pick = torch.stack(pick, 1)
        for k in ("prompt", "answer"):
            t = self.data[k].index_select(0, slot)
            out[k] = torch.gather(t, 1, pick[..., None].expand(-1, -1, t.shape[2])).flatten(0, 1).long()
        out["task"] = torch.gather(self.data["task"].index_select(0, slot), 1, pick).flatten().long()
        return out


class Feed:
    """Moves finished buffers of the painters into the pools on the training stream."""

    def __init__(self, painters, pools, cuda):
        self.painters, self.pools, self.cuda, self.busy = painters, pools, cuda, {}
        self.kinds = [k for k in painters.kinds for _ in range(2)]
        self.tensors = [{k: torch.from_numpy(a) for k, a in arrays.items()} for arrays in painters.buffers]
        if cuda:
            for arrays in painters.buffers:
                for a in arrays.values():  # page-locked memory, so that copies need not wait
                    torch.cuda.cudart().cudaHostRegister(a.ctypes.data, a.nbytes, 0)

    def pump(self, most=4):
        for b, event in list(self.busy.items()):
            if event is None or event.query():  # the copy is done: the painter may use the buffer again
                self.painters.flags[b] = 0
                del self.busy[b]
        for b in [b for b in self.painters.ready() if b not in self.busy][:most]:
            self.pools[self.kinds[b].name].put(self.tensors[b])
            self.busy[b] = torch.cuda.Event() if self.cuda else None
            if self.cuda:
                self.busy[b].record()


# ---------------------------------------------------------------------------------------------- one step
def accept(logits, answer, free, vocab):
    """The next canvas as the sampler would make it from these logits, and the self-conditioning signal.

    Positions are accepted by the entropy bound and hold the model's own samples; in free tasks, whose right answers
    are many, they hold the target's tokens instead, so that the canvas stays part of one answer. The rest is noise.
    """
    r, c = answer.shape
    processed = logits / (0.4 + 0.4 * torch.rand(r, 1, 1, device=logits.device))
    p = processed.softmax(-1)
    entropy = -(p * p.clamp(min=1e-30).log()).sum(-1)
    sample = (processed - torch.log(-torch.log(torch.rand_like(processed).clamp(1e-20, 1 - 1e-7)))).argmax(-1)
    ordered, index = entropy.sort(-1)
    bound = (ordered.cumsum(-1) - ordered) <= 0.1
    accepted = torch.zeros_like(bound).scatter(-1, index, bound)
    tokens = torch.where(free[:, None], answer, sample)
    return torch.where(accepted, tokens, noise_canvas(answer, vocab)), processed


def noise_canvas(answer, vocab):
    return (torch.rand(answer.shape, device=answer.device) * vocab).long().clamp(max=vocab - 1)


class Trainer:
    """Everything that one optimiser step needs; `step` has no branch on data and is captured as one CUDA graph."""

    def __init__(self, o, model, pools, text, device):
        self.o, self.pools, self.device = o, pools, device
        self.dtype = torch.float32 if o.cpu else torch.bfloat16
        self.vocab = model.config.text_config.vocab_size
        self.net = Fused(model, self.dtype, pool.LONG.prompt + CANVAS, compiled=not o.cpu)
        heads = [torch.nn.Linear(192, pictures.N_CLASSES), torch.nn.Linear(192, pictures.MAX_ORDER + 1)]
        self.heads = [h.to(device) for h in heads]
        named = dict(model.named_parameters())  # tied weights appear once
        named |= {f"patch_loss.{i}.{n}": p for i, h in enumerate(self.heads) for n, p in h.named_parameters()}
        self.named, self.params = named, list(named.values())
        self.rate = torch.tensor(0.0, device=device)
        self.optimiser = Optimiser(named.items(), self.rate)
        self.average = [p.detach().clone() for p in self.params]
        self.text = [t.to(device) for t in text]
        self.right = torch.zeros(3, N_TASKS, device=device)  # rows, right after pass 1, right after pass 3
        self.losses = torch.zeros(11, device=device)

    def batch(self):
        """Pictures and rows of one step: the vision results' inputs and, for both prompt lengths, ids/answers/tasks."""
        o = self.o
        short, long, large = (self.pools[k].draw(n, q) for k, n, q in
                              (("short", o.short, 2), ("long", o.long, 3), ("large", o.large, 2)))
        pick = (torch.rand(o.text, device=self.device) * self.text[0].shape[0]).long()
        for k, t in zip(("prompt", "answer", "task"), self.text):
            short[k] = torch.cat([short[k], t.index_select(0, pick).long()])
        return short, long, large

    def see(self, shots):
        """Runs the tower over pictures [s, k, n, 768] of several draws with one patch count; soft tokens and losses."""
        join = lambda k: torch.cat([d[k].flatten(0, 1) for d in shots])
        pixels, count = join("pixels"), join("count")
        b, n = pixels.shape[:2]
        gain = 1 + 0.08 * torch.randn(b, device=self.device)
        bias = 0.05 * torch.randn(b, device=self.device)
        level = 0.04 * torch.rand(b, 1, 1, device=self.device)
        noise = torch.randn(b, n, 768, device=self.device, dtype=self.dtype) * level.to(self.dtype)
        h, soft = self.net.vision(pixels, join("width"), count, gain, bias, noise)
        weights = [w for head in self.heads for w in (head.weight, head.bias)]
        losses = self.net.f["patch_losses"](h, join("classes"), join("order"), count, *weights)
        out, at = [], 0
        for d in shots:
            s, k = d["pixels"].shape[:2]
            out.append(soft[at:at + s * k].view(s, k * soft.shape[1], -1))
            at += s * k
        return out, losses

    def prompts(self, short, long, large):
        """Encodes both groups of rows; returns joined caches, masks, answers, tasks and the other losses."""
        (soft_short, soft_long), loss_a = self.see([short, long])
        (soft_large,), loss_b = self.see([large])
        n = self.o.short * 2
        x_short = F.pad(self.net.soft_rows(short["prompt"][:n], soft_short, 70), (0, 0, 0, 0, 0, self.o.text))
        x_long = torch.cat([self.net.soft_rows(long["prompt"], soft_long, 70),
                            self.net.soft_rows(large["prompt"], soft_large, 140)])
        ids = [short["prompt"], torch.cat([long["prompt"], large["prompt"]])]
        kept, balance = zip(*(self.net.encode(i, x) for i, x in zip(ids, (x_short, x_long))))
        caches, masks = self.net.join(ids, kept)
        join = lambda k: torch.cat([d[k] for d in (short, long, large)])
        patch = [0.85 * a + 0.15 * b for a, b in zip(loss_a, loss_b)]
        return caches, masks, join("answer"), join("task"), patch, sum(balance)

    def step(self):
        """Three denoising passes over the same rows, their losses, one update."""
        caches, masks, answer, task, patch, balance = self.prompts(*self.batch())
        free = task >= FIRST_FREE
        rows = answer.shape[0]
        rand = lambda: torch.rand(rows, 1, device=self.device)
        level = torch.where(rand() < torch.where(free[:, None], 0.35, 0.6), 1.0, rand())  # share of noise in the canvas
        noised = torch.rand(answer.shape, device=self.device) < level
        canvas, logits, total, each = torch.where(noised, noise_canvas(answer, self.vocab), answer), None, 0.0, []
        for turn in range(3):
            if turn:
                with torch.no_grad():
                    following, signal = accept(logits.detach(), answer, free, self.vocab)
                    keep = rand() < torch.where(free[:, None], 0.15, 0.4)
                    canvas = torch.where(keep, canvas, following)
            logits, b = self.net.decode(canvas, caches, masks, signal if turn else None)
            loss = F.cross_entropy(logits.flatten(0, 1), answer.flatten(), reduction="none").view(rows, -1).mean(1)
            each.append(loss)
            total, balance = total + loss.mean(), balance + b
            if turn != 1:
                self.count_right(turn, logits, answer, task, level)
        total = total + patch[0] + 0.5 * patch[1] + 0.003 * balance
        self.keep_losses(each, free, patch, balance)
        for p in self.params:
            p.grad = None
        total.backward()
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        self.optimiser.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.params, 0.002)

    @torch.no_grad()
    def count_right(self, turn, logits, answer, task, level):
        """Counts rows that started as pure noise and whose arg-max canvas is exactly the answer."""
        right = (logits.argmax(-1) == answer).all(-1).float()
        of_task = (task[:, None] == torch.arange(N_TASKS, device=self.device)).float() * (level == 1)
        if turn == 0:
            self.right[0] += of_task.sum(0)
        self.right[1 if turn == 0 else 2] += right @ of_task

    @torch.no_grad()
    def keep_losses(self, each, free, patch, balance):
        f = free.float()
        values = [(l * w).sum() / w.sum().clamp(min=1) for w in (1 - f, f) for l in each]
        others = [patch[0], patch[1], balance / 30, self.optimiser.norm, torch.ones_like(balance)]
        self.losses += torch.stack(values + others)

    def report(self, n, ms, fresh):
        l = (self.losses / self.losses[-1]).tolist()
        count, first, last = self.right.tolist()
        tasks = " ".join(f"{t.replace(' ', '-')}:{a / max(c, 1) * 100:.1f}/{b / max(c, 1) * 100:.1f}"
                         for t, c, a, b in zip(questions.TASKS, count, first, last) if c)
        say(f"{n} {ms:.1f} ms/step {fresh:.0f} new/s rate {self.rate.item():.1e} single "
            + " ".join(f"{x:.4f}" for x in l[:3]) + " free " + " ".join(f"{x:.3f}" for x in l[3:6])
            + f" patch {l[6]:.4f} {l[7]:.4f} balance {l[8]:.2f} norm {l[9]:.2f} | {tasks}")
        self.losses.zero_()
        self.right.zero_()
        return math.isfinite(l[0] + l[3])


# ---------------------------------------------------------------------------------------------- saving
def save(trainer, model, folder):
    """The averaged weights as a checkpoint in bf16, and the raw ones in two files for --resume."""
    os.makedirs(folder, exist_ok=True)
    raw = [p.detach().clone() for p in trainer.params]
    with torch.no_grad():
        for p, a in zip(trainer.params, trainer.average):
            p.copy_(a)
        shared = {}  # weights that both passes use stay one tensor, and are saved once
        state = {k: shared.setdefault(v.data_ptr(), v.to(torch.bfloat16).cpu()) for k, v in model.state_dict().items()}
        for p, r in zip(trainer.params, raw):
            p.copy_(r)
    model.save_pretrained(folder, state_dict=state)
    config = vocabulary.pathlib.Path(folder) / "config.json"  # it names the dtype of the model in memory
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    vocabulary.save(folder)
    write_generation_config(folder)
    weights = dict(zip(trainer.named, (r.cpu() for r in raw)))
    for i in range(2):
        torch.save({k: weights[k] for k in list(weights)[i::2]}, f"{folder}/raw{i}.pt")


def write_generation_config(folder):
    """The model card's sampler, with this vocabulary's end tokens; 128 tokens are four canvases."""
    vocabulary.write(vocabulary.pathlib.Path(folder) / "generation_config.json", dict(
        bos_token_id=vocabulary.BOS, pad_token_id=vocabulary.PAD, eos_token_id=[vocabulary.EOS, vocabulary.END_TURN],
        max_new_tokens=128, max_denoising_steps=48, t_max=0.8, t_min=0.4, stability_threshold=1,
        confidence_threshold=0.005, return_dict_in_generate=True,
        sampler_config=dict(_cls_name="EntropyBoundSamplerConfig", entropy_bound=0.1), transformers_version="5.17.0"))


def load_raw(trainer, folder):
    weights = {}
    for file in glob.glob(f"{folder}/raw*.pt"):
        weights |= torch.load(file, map_location=trainer.device)
    with torch.no_grad():
        for name, p, a in zip(trainer.named, trainer.params, trainer.average):
            p.copy_(weights[name])
            a.copy_(weights[name])
    say("resumed", len(weights), "tensors")


# ---------------------------------------------------------------------------------------------- the loop
def capture(step):
    """Runs the step three times (this compiles it), then records it; returns what replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(3):
            step()
            torch.cuda.synchronize()
            say("warm-up step", i)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    torch.cuda.synchronize()
    say(f"captured; {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB used")
    return graph.replay


def rate_at(o, n, share):
    """Warm-up, constant, then a straight line to zero; share is how much of the run is over."""
    fall = 1.0 if share < 1 - o.decay else max(0.0, (1 - share) / max(o.decay, 1e-9))
    return o.rate * min(1.0, (n + 1) / o.warmup) * fall


def loop(o, trainer, model, feed, run):
    begin, end = time.time(), START + o.seconds
    n, logged, when, painted, saved, cuts = 0, 0, begin, 0, begin, 0
    good = [p.detach().clone() for p in trainer.params]
    trainer.losses.zero_(), trainer.right.zero_()
    while time.time() < end and n < o.steps:
        share = max((time.time() - begin) / (end - begin), n / o.steps)
        trainer.rate.fill_(rate_at(o, n, share) * 0.6 ** cuts)
        run()
        n += 1
        feed.pump()
        if n % 64 == 0 and not o.cpu:
            torch.cuda.current_stream().synchronize()
        if n % o.log == 0 or n in (20, 100, 250):
            total = sum(p.written for p in trainer.pools.values())
            took = time.time() - when
            fine = trainer.report(n, took / (n - logged) * 1e3, (total - painted) / took)
            logged, when, painted = n, time.time(), total
            if fine and n % o.log == 0:
                good = [p.detach().clone() for p in trainer.params]
            elif not fine:
                say("diverged: back to the last good weights, at a lower rate")
                cuts += 1
                with torch.no_grad():
                    for p, a, g in zip(trainer.params, trainer.average, good):
                        p.copy_(g), a.copy_(g)
                    for t in trainer.optimiser.state():
                        t.zero_()
        if time.time() - saved > o.save:
            save(trainer, model, o.out)
            saved = time.time()
    if not o.cpu:
        torch.cuda.synchronize()
    total = sum(p.written for p in trainer.pools.values())
    say(f"{n} steps in {time.time() - begin:.0f} s, {total} slots painted")


def main():
    o = options()
    tokenizer = vocabulary.build_tokenizer()
    pictures.handwriting(), pictures.font_files()
    large = max(1, o.painters // 7)
    kinds = ([pool.SHORT] * (o.painters - 3 * large) + [pool.LONG] * 2 * large + [pool.LARGE] * large)
    if o.painters < 5:
        kinds = [pool.SHORT, pool.LONG, pool.LARGE]
        pool.Painters.BATCH = dict(short=16, long=8, large=8)
    painters = pool.Painters(tokenizer.to_str(), kinds, int(START) % 100000 * 100)
    device = "cpu" if o.cpu else "cuda"
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    model = new_model(tokenizer.get_vocab_size(), o.seed).train().to(device)
    size = dict(short=o.pool, long=o.pool // 4, large=o.pool // 4)
    pools = {k.name: Pool(k, size[k.name], device) for k in (pool.SHORT, pool.LONG, pool.LARGE)}
    text = [torch.from_numpy(a) for a in pool.text_rows(vocabulary.Encoder(tokenizer), 500 if o.cpu else 20000, 128)]
    trainer = Trainer(o, model, pools, text, device)
    say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    if o.resume:
        load_raw(trainer, o.resume)
    feed = Feed(painters, pools, not o.cpu)
    first = dict(short=16, long=8, large=8) if o.cpu else dict(short=3000, long=500, large=250)
    while any(pools[k].written < n for k, n in first.items()):
        feed.pump(30)
        time.sleep(0.01)
    say("first pictures", {k: p.written for k, p in pools.items()})
    try:
        loop(o, trainer, model, feed, trainer.step if o.cpu else capture(trainer.step))
        save(trainer, model, o.out)
        say("saved")
    finally:
        painters.stop()


if __name__ == "__main__":
    main()
