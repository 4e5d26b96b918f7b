"""How fast is the demo checkpoint here, beside transformers and mlx-vlm, on the same weights and inputs?

    python benchmarks/speed.py                                          dgemma alone
    python benchmarks/speed.py --transformers PYTHON --mlx-vlm PYTHON   and its peers, each by a Python that has it

Measured, in float32: image encoding plus prefill of a prompt with one picture, one canvas pass (logits, with
self-conditioning), and a whole answer (preprocessing to text). Every runtime runs in a process of its own; the processes
take turns (A B C A B C ...), so that a slow minute of the machine meets all of them. `mlx-vlm as installed` is mlx-vlm
with mlx's own BLAS, `mlx-vlm + BLAS` the same with the BLAS that dgemma loads.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "dgemma" / "demo"
PICTURE = ROOT / "examples" / "demo" / "pictures" / "three_shapes.png"
QUESTION = "Describe the picture."
WHAT = ("prefill with a picture", "canvas pass", "whole answer")


def repeat(function, seconds: float) -> list[float]:
    """Milliseconds of each call of `function`, for about `seconds`."""
    function()
    function()
    taken, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken) < 5:
        begin = time.perf_counter()
        function()
        taken.append((time.perf_counter() - begin) * 1e3)
    return taken


def measure_dgemma(seconds: float) -> dict[str, list[float]]:
    """dgemma as installed."""
    import dgemma

    import mlx.core as mx

    from dgemma.messages import conversation

    pipe = dgemma.Pipeline.from_pretrained(DEMO, dtype=mx.float32)
    prompt = pipe.processor.prompt(conversation(QUESTION, [PICTURE]), [PICTURE])
    ids, model = as_batch(prompt.ids), pipe.model

    def prefill():
        caches = model.make_caches()
        model.prefill(ids, model.encode_images(prompt.images), caches)
        return caches

    caches = prefill()
    canvas = mx.array(random_canvas(model.config))
    belief = mx.softmax(model.canvas_logits(canvas, caches), axis=-1)
    return {
        WHAT[0]: repeat(prefill, seconds),
        WHAT[1]: repeat(lambda: mx.eval(model.canvas_logits(canvas, caches, belief)), seconds),
        WHAT[2]: repeat(lambda: pipe(QUESTION, images=[PICTURE]), seconds),
    }


def measure_transformers(seconds: float) -> dict[str, list[float]]:
    """transformers, float32, as many threads as cores."""
    import torch
    from PIL import Image
    from transformers import AutoTokenizer, DynamicCache
    from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaForBlockDiffusion
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    torch.set_num_threads(os.cpu_count())
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(DEMO, dtype=torch.float32).eval()
    tokenizer, eyes = AutoTokenizer.from_pretrained(DEMO), Gemma4ImageProcessorPil.from_pretrained(DEMO)

    def inputs() -> dict:
        seen = eyes(Image.open(PICTURE).convert("RGB"), return_tensors="pt")
        ids = torch.tensor([expand(tokenizer, model.config, seen["num_soft_tokens_per_image"][0])])
        kinds = (ids == model.config.image_token_id).long()
        return {
            "input_ids": ids,
            "pixel_values": seen["pixel_values"],
            "image_position_ids": seen["image_position_ids"],
            "mm_token_type_ids": kinds,
        }

    given = inputs()
    ids, positions = given["input_ids"], torch.arange(given["input_ids"].shape[1])[None]

    def prefill():
        cache = DynamicCache(config=model.config.get_text_config())
        masks = model.model.encoder.create_masks_for_generate(
            config=model.config,
            inputs_embeds=torch.empty(*ids.shape, 0),
            attention_mask=torch.ones_like(ids).bool(),
            past_key_values=cache,
            position_ids=positions,
            mm_token_type_ids=given["mm_token_type_ids"],
        )
        pictures = {name: given[name] for name in ("pixel_values", "image_position_ids")}
        model.model.encoder(
            input_ids=ids, attention_mask=masks, past_key_values=cache, position_ids=positions, **pictures
        )
        return cache

    with torch.no_grad():
        cache, canvas = prefill(), torch.tensor(random_canvas(model.config))
        belief = model(decoder_input_ids=canvas, past_key_values=cache).logits
        step = lambda: model(decoder_input_ids=canvas, past_key_values=cache, self_conditioning_logits=belief)
        answer = lambda: tokenizer.decode(model.generate(**inputs()).sequences[0])
        return {WHAT[0]: repeat(prefill, seconds), WHAT[1]: repeat(step, seconds), WHAT[2]: repeat(answer, seconds)}


def measure_mlx_vlm(seconds: float) -> dict[str, list[float]]:
    """mlx-vlm, its own prefill and canvas pass; its weights cast to float32, since its CPU path runs nothing else."""
    if os.environ.get("DGEMMA_BLAS"):
        ctypes.CDLL(os.environ["DGEMMA_BLAS"], mode=ctypes.RTLD_GLOBAL)
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_map
    from mlx_vlm.tokenizer_utils import NaiveStreamingDetokenizer
    from mlx_vlm.utils import StoppingCriteria, load_model
    from PIL import Image
    from transformers import AutoTokenizer
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        Gemma4ImageProcessorPil,
        get_aspect_ratio_preserving_size,
    )

    model = load_model(released_spelling(DEMO))
    model.update(tree_map(lambda a: a.astype(mx.float32) if a.dtype == mx.bfloat16 else a, model.parameters()))
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.detokenizer = NaiveStreamingDetokenizer(tokenizer)
    tokenizer.stopping_criteria = StoppingCriteria([1, 6], tokenizer)
    budget = Gemma4ImageProcessorPil.from_pretrained(DEMO).max_soft_tokens

    def inputs() -> dict:
        picture = Image.open(PICTURE).convert("RGB")
        height, width = get_aspect_ratio_preserving_size(picture.height, picture.width, 16, budget * 9, 3)
        pixels = np.asarray(picture.resize((width, height), Image.BICUBIC), np.float32).transpose(2, 0, 1)[None] / 255
        ids = mx.array([expand(tokenizer, model.config, height * width // 48**2)])
        kinds = (ids == model.config.image_token_id).astype(mx.int32)
        return {"input_ids": ids, "pixel_values": mx.array(pixels), "mm_token_type_ids": kinds}

    given = inputs()

    def prefill():
        cache = model.make_cache()
        ids = given["input_ids"]
        pictures = {name: given[name] for name in ("pixel_values", "mm_token_type_ids")}
        model.diffusion_prefill_cache(ids, cache=cache, **pictures)
        mx.eval([c.state for c in cache])
        return cache

    cache, canvas = prefill(), mx.array(random_canvas(model.config))
    logits = model.diffusion_decoder_logits(canvas, cache=cache)
    prepared = model.diffusion_prepare_self_conditioning()

    def step():
        belief = model.diffusion_self_conditioning(logits, prepared)
        mx.eval(model.diffusion_decoder_logits(canvas, cache=cache, self_conditioning=belief))

    def answer():
        model.generate(
            **inputs(), tokenizer=tokenizer, gen_length=96, max_denoising_steps=48, diffusion_sampler="entropy-bound"
        )

    return {WHAT[0]: repeat(prefill, seconds), WHAT[1]: repeat(step, seconds), WHAT[2]: repeat(answer, seconds)}


def released_spelling(folder: Path) -> Path:
    """A copy of a checkpoint whose config spells the full layers as Google's does: mlx-vlm knows no per_layer_config."""
    copy = Path(tempfile.mkdtemp())
    for path in folder.iterdir():
        (copy / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    full = next(iter(text.pop("per_layer_config").values()))
    text |= {"global_head_dim": full["head_dim"], "num_global_key_value_heads": full["num_key_value_heads"]}
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def expand(tokenizer, config, soft_tokens: int) -> list[int]:
    """The question's token ids, its image place widened to `soft_tokens`."""
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    ids, soft = tokenizer.encode(text, add_special_tokens=False), config.image_token_id
    at = ids.index(soft)
    return ids[:at] + [config.boi_token_id] + [soft] * soft_tokens + [config.eoi_token_id] + ids[at + 1 :]


def as_batch(ids):
    """Token ids as one row."""
    import numpy as np

    return np.array([ids])


def random_canvas(config):
    """A canvas of noise, the same for every runtime."""
    import numpy as np

    text = getattr(config, "text", None) or config.text_config  # dgemma's config, or the others'
    return np.random.RandomState(0).randint(0, text.vocab_size, (1, config.canvas_length))


# Each runtime is imported inside its own function: the Python of one need not have the others.
RUNTIMES = {"dgemma": measure_dgemma, "transformers": measure_transformers, "mlx-vlm": measure_mlx_vlm}


def run(runtime: str, python: str, seconds: float, blas: str | None = None) -> dict[str, list[float]]:
    """One turn of one runtime, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "DGEMMA_BLAS"}
    if blas:
        environment["DGEMMA_BLAS"] = blas
    command = [python, __file__, "--measure", runtime, "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{runtime} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(results: dict[str, dict[str, list[float]]]) -> str:
    """Median milliseconds, fastest turn's median in brackets, and the ratio to dgemma."""
    lines = ["| ms | " + " | ".join(WHAT) + " |", "|---|" + "---|" * len(WHAT)]
    for name, measured in results.items():
        cells = []
        for what in WHAT:
            median, ours = statistics.median(measured[what]), statistics.median(results["dgemma"][what])
            cells.append(f"{median:.1f} (best {min(measured[what]):.1f}, x {median / ours:.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers", metavar="PYTHON", help="a Python with torch and transformers")
    parser.add_argument("--mlx-vlm", metavar="PYTHON", help="a Python with mlx-vlm")
    parser.add_argument("--turns", type=int, default=3, help="how often each runtime has its turn (default 3)")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds for each measurement (default 3)")
    parser.add_argument("--json", metavar="FILE", help="also write every sample there")
    parser.add_argument("--measure", choices=RUNTIMES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(RUNTIMES[arguments.measure](arguments.seconds)))
        return
    from dgemma import backend  # only the comparing process needs it

    turns = [("dgemma", "dgemma", sys.executable, None)]
    if arguments.transformers:
        turns.append(("transformers", "transformers", arguments.transformers, None))
    if arguments.mlx_vlm:
        turns.append(("mlx-vlm as installed", "mlx-vlm", arguments.mlx_vlm, None))
        if backend.blas().path:
            turns.append(("mlx-vlm + BLAS", "mlx-vlm", arguments.mlx_vlm, backend.blas().path))
    results: dict[str, dict[str, list[float]]] = {}
    for _ in range(arguments.turns):
        for name, runtime, python, blas in turns:
            for what, taken in run(runtime, python, arguments.seconds, blas).items():
                results.setdefault(name, {}).setdefault(what, []).extend(taken)
    print(f"{os.cpu_count()} cores, {arguments.turns} turns of {arguments.seconds:g} s each; median (best, ratio to dgemma)")
    print(table(results))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
