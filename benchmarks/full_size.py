"""The released geometry at full size, with random weights: write it, load it, look at two pictures, chat, measure.

    python benchmarks/full_size.py --folder /tmp/full            on a GPU with 80 GB or more (bf16 needs 52 GB)
    python benchmarks/full_size.py --geometry small --folder ...   the same on a small model, to try the script

Parts (--parts): `packed` writes a 4-bit checkpoint by the default recipe of dgemma convert, loads it through the normal
path, answers a prompt with two pictures over two blocks, and a second turn; `long` prefills a 128k prompt; `bf16` does
speed and memory of a bf16 model that never was a file, with packed caches too, and a conversation's second turn; `error` compares our bf16 logits and those of transformers in
bf16 with transformers' in float32 (needs torch), on 6 layers of full width. Prints one table.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from dgemma import geometry as checkpoint  # before mlx, so that a fast BLAS serves it

import mlx.core as mx
import numpy as np
from PIL import Image, ImageDraw

from dgemma import Pipeline, backend, fit, weights
from dgemma.attention import Packing
from dgemma.config import ModelConfig
from dgemma.formats import Format
from dgemma.memory import Memory
from dgemma.model import DiffusionGemma
from dgemma.pipeline import Finished, Prefilled, Step

STEPS = 8  # denoising steps a block: random weights never settle
Rows = list[tuple[str, str]]


def gigabytes(count: float) -> str:
    """Bytes in units of 1e9."""
    return f"{count / 1e9:.2f} GB"


def pictures() -> list[Image.Image]:
    """Two drawings."""
    made = []
    for size, colour in (((960, 640), "red"), ((640, 900), "blue")):
        image = Image.new("RGB", size, "white")
        ImageDraw.Draw(image).ellipse((100, 100, 500, 500), fill=colour)
        made.append(image)
    return made


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call, everything evaluated."""
    mx.synchronize()
    began = time.perf_counter()
    function()
    mx.synchronize()
    return time.perf_counter() - began


def packed(geometry: str, folder: Path, rows: Rows) -> Pipeline:
    """Write, load, two pictures over two blocks, a second turn."""
    out = folder / f"{geometry}-4bit"
    mx.reset_peak_memory()
    seconds = timed(lambda: checkpoint.write(geometry, out, Format.of(bits=4), overwrite=True))
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    rows.append(("write 4-bit checkpoint", f"{seconds:.1f} s, {gigabytes(size)}, peak {gigabytes(mx.get_peak_memory())}"))
    mx.reset_peak_memory()
    began = time.perf_counter()
    pipe = Pipeline.from_pretrained(out)
    held = mx.get_active_memory()
    load = f"{time.perf_counter() - began:.1f} s, {gigabytes(held)} held, peak {mx.get_peak_memory() / held:.3f} of that"
    rows.append(("load it", load))
    warm = timed(lambda: pipe("warm up", images=pictures()[:1], max_new_tokens=1, steps=2))
    rows.append(("first answer, kernels being compiled", f"{warm:.1f} s"))
    canvas, images = pipe.model.config.canvas_length, pictures()
    settings = {"max_new_tokens": 2 * canvas, "steps": STEPS, "redraws": 0, "confidence": 1e-30}
    question = [{"role": "user", "content": [*({"type": "image", "image": i} for i in images), part("What differs?")]}]
    answer, times = answer_of(pipe, question, settings)
    rows.append(("two pictures, two blocks", told(answer, times)))
    talk = [*question, {"role": "assistant", "content": answer.text.replace("<", "")}, {"role": "user", "content": "Why?"}]
    answer, times = answer_of(pipe, talk, settings)
    rows.append(("second turn", told(answer, times)))
    return pipe


def part(text: str) -> dict[str, str]:
    """A text part of a message."""
    return {"type": "text", "text": text}


def answer_of(pipe: Pipeline, messages: list, settings: dict) -> tuple:
    """The answer, and the milliseconds between the steps of its last block."""
    times = []
    for event in pipe.stream(messages, **settings):
        if isinstance(event, (Prefilled, Step)):
            times.append(time.perf_counter())
        elif isinstance(event, Finished):
            return event.answers[0], [1e3 * (b - a) for a, b in zip(times[-STEPS:], times[-STEPS + 1 :])]
    raise AssertionError("a stream ends with Finished")


def told(answer, times: list[float]) -> str:
    """What an answer took."""
    seconds = answer.seconds
    return (
        f"prompt {answer.prompt_tokens} ({answer.image_tokens} of images), {answer.generated_tokens} tokens in "
        f"{answer.blocks} blocks of {'+'.join(map(str, answer.steps))} steps; images {seconds.images:.2f} s, prefill "
        f"{seconds.prefill:.2f} s, denoising {seconds.denoise:.2f} s, step {np.median(times):.0f} ms, "
        f"peak {gigabytes(answer.peak_memory)}"
    )


def speed(model: DiffusionGemma, label: str, rows: Rows, prefixes: tuple[int, ...], packing: Packing | None = None) -> None:
    """Prefill and step at several prefixes."""
    canvas, text = model.config.canvas_length, model.config.text
    tokens = mx.array(np.random.RandomState(1).randint(0, text.vocab_size, (1, canvas)))
    for prefix in prefixes:
        ids = np.random.RandomState(0).randint(400, text.vocab_size, (1, prefix))
        mx.reset_peak_memory()
        caches = model.make_caches(packing=packing)
        prefill = timed(lambda: model.prefill(ids, [], caches))
        caches = model.make_caches(packing=packing)
        prefill = min(prefill, timed(lambda: model.prefill(ids, [], caches)))
        belief = mx.zeros((1, canvas, text.hidden_size), dtype=model.dtype)

        def step():
            hidden = model.canvas_hidden(tokens, caches, belief)
            logits = model.head(hidden)
            probabilities = mx.softmax(logits, axis=-1)
            mx.eval(model.soft_embed(probabilities), logits.argmax(axis=-1))

        step()
        times = [timed(step) for _ in range(5)]
        rows.append(
            (
                f"{label}, prefix {prefix:,}",
                f"prefill {prefill:.2f} s, step {1e3 * np.median(times):.0f} ms, peak {gigabytes(mx.get_peak_memory())}",
            )
        )


def session(model: DiffusionGemma, label: str, rows: Rows, prompt: int = 8192, new: int = 300) -> None:
    """A second turn after a long first one, warm and cold, and the way back to the first turn's end."""
    random, canvas = np.random.RandomState(0), model.config.canvas_length
    tokens = lambda count: random.randint(400, model.config.text.vocab_size, (1, count)).astype(np.int32)
    seen, memory = mx.array(tokens(canvas)), Memory(model)
    read = lambda ids: memory.read(ids, memory.features(ids, []))
    first, block = tokens(prompt), tokens(canvas)
    read(first)  # compiles
    memory.forget()
    cold = timed(lambda: read(first))
    written = timed(lambda: memory.write(block))
    second = np.concatenate([first, block, tokens(new)], axis=1)
    warm = timed(lambda: read(second))
    found = [np.array(model.canvas_hidden(seen, memory.caches).astype(mx.float32))]
    memory.forget()
    whole = timed(lambda: read(second))
    found.append(np.array(model.canvas_hidden(seen, memory.caches).astype(mx.float32)))
    back = timed(lambda: (memory.features(first, []), mx.eval([array for cache in memory.caches for array in cache.arrays])))
    assert memory.length == first.shape[1]
    rows.append(
        (
            f"{label}, turn of {new} tokens after one of {prompt:,} and a block",
            f"warm {1e3 * warm:.0f} ms, cold {1e3 * whole:.0f} ms, identical: {'yes' if np.array_equal(*found) else 'NO'}; first turn "
            f"{1e3 * cold:.0f} ms, block {1e3 * written:.0f} ms, back to the first turn's end {1e3 * back:.1f} ms; "
            f"caches {gigabytes(memory.nbytes - memory.kept.nbytes)}, {len(list(memory.kept))} copies {gigabytes(memory.kept.nbytes)}",
        )
    )


def long(pipe: Pipeline, opened: weights.Checkpoint, length: int, rows: Rows) -> None:
    """A prompt of 128k tokens: what it takes beyond weights and caches, and what `fit` said."""
    model = pipe.model
    ids = np.random.RandomState(0).randint(400, model.config.text.vocab_size, (1, length))
    caches = model.make_caches()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    seconds = timed(lambda: model.prefill(ids, [], caches))
    kv, peak = sum(cache.nbytes for cache in caches), mx.get_peak_memory()
    said = fit.need(opened, fit.Job(context=length))
    rows.append(
        (
            f"prompt of {length:,}",
            f"{seconds:.1f} s, weights {gigabytes(held)} + caches {gigabytes(kv)} + {gigabytes(peak - held - kv)} at the peak; "
            f"dgemma fit said {gigabytes(said.weights + said.caches + said.prefill)}",
        )
    )


def error(geometry: str, folder: Path, rows: Rows) -> None:
    """How far our bf16 logits, and transformers', are from transformers' in float32, on the same weights."""
    import torch  # only this part needs the reference
    from transformers import DynamicCache
    from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaForBlockDiffusion

    out = checkpoint.write(geometry, folder / f"{geometry}-6-layers", layers=6, overwrite=True)
    read = ModelConfig.read(out)
    random = np.random.RandomState(0)
    ids = random.randint(400, read.text.vocab_size, (1, 1500))
    canvas = random.randint(0, read.text.vocab_size, (1, read.canvas_length))
    ours = weights.load(out)
    caches = ours.make_caches()
    ours.prefill(ids, [], caches)
    first = ours.canvas_logits(mx.array(canvas), caches)
    found = {"ours": [np.array(first), np.array(ours.canvas_logits(mx.array(canvas), caches, mx.softmax(first, axis=-1)))]}
    del ours, caches, first
    gc.collect()
    mx.clear_cache()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, dtype in (("theirs", torch.bfloat16), ("exact", torch.float32)):
        model = DiffusionGemmaForBlockDiffusion.from_pretrained(out, dtype=dtype).to(device).eval()
        with torch.no_grad():
            cache = DynamicCache(config=model.config.get_text_config())
            model.model.encoder(input_ids=torch.from_numpy(ids).to(device), past_key_values=cache)
            inputs = {"decoder_input_ids": torch.from_numpy(canvas).to(device), "past_key_values": cache}
            first = model(**inputs).logits
            second = model(**inputs, self_conditioning_logits=first).logits
            found[name] = [first.float().cpu().numpy(), second.float().cpu().numpy()]
        del model, cache, first, second
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    for label, index in (("first step", 0), ("self-conditioned", 1)):
        exact = found["exact"][index]
        away = {name: np.linalg.norm(found[name][index] - exact) / np.linalg.norm(exact) for name in ("ours", "theirs")}
        rows.append(
            (
                f"6 layers, {label}: error against float32",
                f"ours {away['ours']:.4f}, transformers {away['theirs']:.4f}, ratio {away['ours'] / away['theirs']:.2f}",
            )
        )
    shutil.rmtree(out)


def main() -> None:
    """Run the parts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=checkpoint.GEOMETRIES, default="full")
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are written; 25 GB for full")
    parser.add_argument("--parts", nargs="+", default=["packed", "long", "bf16", "error"])
    parser.add_argument("--long", type=int, default=131_072 - 256, help="tokens of the long prompt")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    geometry, rows = arguments.geometry, [("device", f"{backend.device_name()}, mlx {mx.__version__}")]
    try:
        if {"packed", "long"} & set(arguments.parts):
            pipe = packed(geometry, arguments.folder, rows)
            opened = weights.Checkpoint.open(arguments.folder / f"{geometry}-4bit")
            speed(pipe.model, "4-bit", rows, (1024, 8192))
            if "long" in arguments.parts:
                long(pipe, opened, arguments.long, rows)
            del pipe
            gc.collect()
            mx.clear_cache()
        if "bf16" in arguments.parts:
            dtype = backend.activation_dtype(mx.bfloat16)
            model, name = checkpoint.in_memory(geometry, dtype), str(dtype).rpartition(".")[2]
            speed(model, name, rows, (1024, 8192))
            for bits in (8, 4):
                speed(model, f"{name}, keys and values {bits} bit", rows, (8192,), Packing(bits))
            session(model, name, rows)
            del model
            gc.collect()
            mx.clear_cache()
        if "error" in arguments.parts:
            error(geometry, arguments.folder, rows)
    finally:
        print("| what | measured |\n|---|---|")
        for name, value in rows:
            print(f"| {name} | {value} |", flush=True)


if __name__ == "__main__":
    main()
