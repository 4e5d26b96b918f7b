"""Will it fit? The memory that a job takes, from a checkpoint's headers and config alone; no weight is read.

    weights                                        all the time
    + the larger of    reading the images          the vision tower's rows and scores
                       a chunk of the prompt       caches so far, masks, scores, experts' rows
                       a denoising step            caches, scores, what is as wide as the vocabulary

Sliding layers keep a window and the last chunk, however long the prompt; full layers keep everything. The figures are a
contract: they depend on nothing but the arguments and the kind of device, and benchmarks/memory.py holds them against
measured peaks. Only on a CPU the weights of a quantised checkpoint also depend on the memory that is free: it says whether
loading unpacks them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import backend, flash, kernels, plain
from .attention import Packing
from .attention.caches import STEP
from .canvas import MANY
from .config import SLIDING, TextConfig, VisionConfig
from .errors import OptionError
from .hub import find
from .model import CHUNK, SCORES
from .processor import read_image_budget
from .render import size
from .settings import packing_of
from .weights import Checkpoint

# Temporaries of one kind that live at once, as measured (benchmarks/memory.py): a row of activations holds so many
# copies of the hidden width, a number of the vocabulary so many float32 copies.
ROWS, EXPERT_ROWS, EYE_ROWS, LOGITS = 6, 4, 8, 4.5
# Layers whose temporaries are held at once: mlx has some of a pass laid out while it computes; of large batches two (layers.
# one_ahead). On an H200 a step of one row held as much as 13 layers would.
LAID_OUT, PACED = 13, 2
SHARE = 0.95  # of the free memory that a job may fill
MOST = 2**31 - 1  # of anything that a job counts


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked of a model: `context` positions a row to read, images of `image_tokens` soft tokens each among them."""

    context: int
    images: int = 0
    image_tokens: int = 280
    batch: int = 1
    chunk: int | None = None
    packing: Packing | None = None  # of keys and values

    def __post_init__(self) -> None:
        for name, least in (("context", 1), ("images", 0), ("image_tokens", 1), ("batch", 1)):
            value = getattr(self, name)
            if not least <= value <= MOST:
                bound = f"at least {least} is needed" if value < least else f"at most {MOST:,} is possible"
                raise OptionError(f"{name} is {value}; {bound}")
        if self.chunk is not None and self.chunk < 1:
            raise OptionError(f"chunk is {self.chunk}; at least 1 is needed")

    @property
    def least(self) -> int:
        """Positions that the images take, each between two marks."""
        return max(1, self.images * (self.image_tokens + 2))

    @property
    def passed(self) -> int:
        """Positions of a row that go through the encoder at once; an image is never split."""
        size = max(1, CHUNK // self.batch) if self.chunk is None else self.chunk
        return min(self.context, max(size, self.image_tokens if self.images else 1))


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that a job takes, part by part."""

    weights: int
    full_caches: int
    sliding_caches: int
    images: int  # while images are encoded: rows and scores of the vision tower
    features: int  # the images' rows of the prompt
    prefill: int  # while a chunk is encoded: masks, scores, rows of activations
    step: int  # while a canvas is written: scores, what is as wide as the vocabulary

    @property
    def caches(self) -> int:
        """Keys and values of all layers."""
        return self.full_caches + self.sliding_caches

    @property
    def peak(self) -> int:
        """The most at any moment."""
        return self.weights + self.features + max(self.images, self.caches + max(self.prefill, self.step))


def need(opened: Checkpoint, job: Job, dtype: mx.Dtype | None = None) -> Need:
    """What `job` takes on this machine, activations in `dtype` (default: the backend's)."""
    dtype = dtype or backend.activation_dtype(opened.dtype)
    text, vision, width = opened.config.text, opened.config.vision, dtype.size
    full, sliding = caches(text, opened.config.canvas_length, job, width)
    return Need(
        weights=opened.nbytes_as(dtype, opened.unpacks(dtype)),
        full_caches=full,
        sliding_caches=sliding,
        images=_images(vision, job, width) if vision is not None and job.images else 0,
        features=job.images * job.image_tokens * text.hidden_size * width,
        prefill=_prefill(text, job, width),
        step=_step(text, opened.config.canvas_length, job, width) + _unpacked_table(opened, text, width),
    )


def caches(text: TextConfig, canvas: int, job: Job, width: int) -> tuple[int, int]:
    """Bytes of the caches of full and of sliding layers, once the prompt is in."""
    slots = -(-(job.context + canvas) // STEP) * STEP
    kept = min(job.context, text.sliding_window - 1 + job.passed)
    found = {True: 0, False: 0}
    for layer in text.layers:
        rows = kept if layer.kind == SLIDING else slots
        row = layer.head_dim * width if job.packing is None else job.packing.nbytes(layer.head_dim, width)
        found[layer.kind == SLIDING] += 2 * job.batch * layer.kv_heads * rows * row
    return found[False], found[True]


def _scores(queries: int, keys: int, width: int) -> int:
    """Bytes of attention scores held at once, for all heads' `queries` over `keys`."""
    most = flash.held(keys) if kernels.name == "cpu" else plain.SCORES
    return min(most, queries * keys) * width


def _rows(text: TextConfig, rows: int, width: int) -> int:
    """Bytes of the activations of `rows` positions inside a layer."""
    heads = text.num_attention_heads * max(layer.head_dim for layer in text.layers)
    dense = ROWS * (text.hidden_size + heads) + 3 * text.intermediate_size
    experts = EXPERT_ROWS * text.top_k_experts * (text.hidden_size + text.moe_intermediate_size)
    return rows * (dense + experts) * width


def _prefill(text: TextConfig, job: Job, width: int) -> int:
    rows, keys = job.batch * job.passed, job.context
    window = min(keys, text.sliding_window - 1 + job.passed)
    masks = job.batch * job.passed * (keys + window)
    layers = PACED if kernels.name == "cuda" else 1
    return masks + _scores(text.num_attention_heads * rows, keys, width) + layers * _rows(text, rows, width)


def _step(text: TextConfig, canvas: int, job: Job, width: int) -> int:
    rows, keys = job.batch * canvas, job.context + canvas
    read = max(2 * job.batch * layer.kv_heads * layer.head_dim * _seen(text, layer, keys) for layer in text.layers) * width
    scores = _scores(text.num_attention_heads * rows, keys, width)
    wide = min(kernels.WIDE, rows * text.vocab_size)
    if kernels.name == "cuda":  # all of a step is laid out at once; of the vocabulary, scores and probabilities
        layers = PACED if rows >= MANY else LAID_OUT
        return read + scores + layers * _rows(text, rows, width) + 2 * width * wide
    return max(read + scores + _rows(text, rows, width), int(LOGITS * 4 * wide))


def _unpacked_table(opened: Checkpoint, text: TextConfig, width: int) -> int:
    """Bytes of the table of embeddings, which dgemma.cuda unpacks at every step if it is packed."""
    packed = kernels.name == "cuda" and "embed_tokens" in opened.formats
    return text.vocab_size * text.hidden_size * width if packed else 0


def _seen(text: TextConfig, layer: Any, keys: int) -> int:
    return min(keys, text.sliding_window) if layer.kind == SLIDING else keys


def _images(vision: VisionConfig, job: Job, width: int) -> int:
    patches = job.image_tokens * vision.pooling_kernel_size**2
    together = min(job.images, max(1, SCORES // patches**2))
    pixels = job.images * patches * 3 * vision.patch_size**2 * 4
    rows = together * patches * (EYE_ROWS * vision.hidden_size + 3 * vision.intermediate_size) * width
    return pixels + rows + _scores(vision.num_attention_heads * together * patches, patches, width)


# -- against the machine ----------------------------------------------------------------------------------------------


def longest(opened: Checkpoint, job: Job, room: int) -> int:
    """The longest prompt of such a job that fits into `room` bytes, up to the model's context; 0 when none does."""
    least, most = job.least, _most(opened)
    if least > most or need(opened, replace(job, context=least)).peak > room:
        return 0
    while least < most:
        middle = (least + most + 1) // 2
        if need(opened, replace(job, context=middle)).peak <= room:
            least = middle
        else:
            most = middle - 1
    return least


def _most(opened: Checkpoint) -> int:
    """Tokens of the longest prompt that leaves the context room for a canvas."""
    return opened.config.text.max_position_embeddings - opened.config.canvas_length


def check(opened: Checkpoint, job: Job) -> None:
    """Refuse a job that this machine's free memory cannot hold; OptionError says what would fit."""
    free = backend.free_memory()
    if free is None:
        return
    wanted, room = need(opened, job), int(SHARE * free)
    if wanted.peak <= room:
        return
    fits = longest(opened, job, room)
    advice = (
        f"prompt and answer of {fits:,} tokens together would fit"
        if fits
        else "no prompt fits: take a smaller checkpoint (dgemma convert)"
    )
    raise OptionError(
        f"this needs {size(wanted.peak)} ({size(wanted.weights)} of weights) and {size(free)} of memory are free; {advice}; "
        "--force tries all the same"
    )


def read(model: str | Path | None, revision: str | None, **job: Any) -> dict[str, Any]:
    """All there is to say of a checkpoint by its name, ready for JSON; its weights are not fetched. CheckpointError.

    `job` are the fields of a Job; image_tokens None is the checkpoint's own budget.
    """
    found = find(model, revision)
    if job.get("image_tokens") is None:
        job["image_tokens"] = read_image_budget(found.folder)
    given = {f"kv_{name}": job.pop(f"kv_{name}", None) for name in ("bits", "group_size")}
    packing = packing_of({name: value for name, value in given.items() if value is not None})
    return examine(Checkpoint.open(found.folder, found.headers()), Job(**job, packing=packing))


def examine(opened: Checkpoint, job: Job) -> dict[str, Any]:
    """All of it, ready for JSON. OptionError for a job that this checkpoint never gets."""
    if job.context > (most := _most(opened)):
        raise OptionError(f"context is {job.context:,}; this checkpoint reads at most {most:,} tokens before a canvas")
    if job.images and opened.config.vision is None:
        raise OptionError(f"images is {job.images}; this checkpoint has no vision tower: it reads text only")
    if job.least > job.context:
        raise OptionError(
            f"images of {job.image_tokens} tokens, {job.images} of them, take {job.least:,}; context is {job.context:,}"
        )
    free, wanted = backend.free_memory(), need(opened, job)
    room = None if free is None else int(SHARE * free)
    return {
        "device": backend.device_name(),
        "dtype": str(backend.activation_dtype(opened.dtype)).rpartition(".")[2],
        "job": asdict(job) | {"chunk": job.passed},
        "bytes": asdict(wanted) | {"peak": wanted.peak},
        "free": free,
        "fits": None if room is None else wanted.peak <= room,
        "longest_context": None if room is None else longest(opened, job, room),
    }


def text(found: dict[str, Any]) -> str:
    """What `examine` found, for a person."""
    job, held = found["job"], found["bytes"]
    images = f", {job['images']} image(s) of {job['image_tokens']} tokens" if job["images"] else ""
    rows = f"{job['batch']} row(s) of " if job["batch"] > 1 else ""
    lines = [
        ("job", f"{rows}{job['context']:,} tokens{images}; {job['chunk']:,} a pass, in {found['dtype']} on {found['device']}"),
        ("weights", size(held["weights"])),
        ("full layers", f"{size(held['full_caches'])} of keys and values"),
        ("sliding layers", f"{size(held['sliding_caches'])}, the window and the last pass"),
        ("image features", size(held["features"])),
        ("reading images", f"{size(held['images'])} for a while"),
        ("reading a chunk", f"{size(held['prefill'])} for a while"),
        ("a step", f"{size(held['step'])} for a while"),
        ("peak", size(held["peak"])),
    ]
    if found["free"] is not None:
        verdict = "it fits" if found["fits"] else "it does not fit"
        longest = found["longest_context"]
        most = f"the longest such prompt has {longest:,} tokens" if longest else "no prompt of this kind fits"
        lines += [("free", size(found["free"])), ("verdict", f"{verdict}; {most}")]
    return "".join(f"{name:<20} {value}\n" for name, value in lines)
