"""dgemma as `dgemma bench` drives it: the requests that its peers get too, in a process of its own (python -m dgemma.runtime)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from dgemma.vision import Patches

from . import backend, kernels, peers, weights
from .config import GenerationConfig
from .denoise import Block, Prefilled, denoise
from .model import Cache, DiffusionGemma
from .peers import Samples, between
from .step import Options, Step
from .stopping import StepsOnly


class Dgemma(peers.Runtime):
    """This library, through what `Pipeline` calls: `encode_images`, `denoise`; and the bare canvas pass."""

    packages = ("dgemma", "mlx")

    def read(self, folder: Path, dtype: str) -> str:
        """Load the checkpoint; returns the device's name."""
        self.use(weights.load(folder, dtype=getattr(mx, dtype)))
        self.compiles = backend.is_gpu()
        return backend.device_name()

    def use(self, model: DiffusionGemma, reserved: Sequence[int] | None = None) -> None:
        """Drive a model that is loaded already."""
        config = model.config
        self.model, self.canvas, self.vocabulary = model, config.canvas_length, config.text.vocab_size
        self._kept = None
        if reserved is not None:
            self.reserved = list(reserved)

    def load(self, folder: str, dtype: str, reserved: Sequence[int]) -> dict[str, Any]:
        """Read a checkpoint; what runs it, and the seconds that took."""
        return super().load(folder, dtype, reserved) | {"kernels": kernels.name, "blas": backend.blas().name}

    def answer(self, prefix: int, batch: int, steps: int) -> Samples:
        """The loop itself, its events timed as they come."""
        options = endless(self.canvas, steps)
        times, began = [], time.perf_counter()
        for event in denoise(self.model, self.prompt(batch, prefix), [], options=options, seeds=range(batch)):
            if isinstance(event, (Prefilled, Step, Block)):
                times.append(time.perf_counter())
            if isinstance(event, Block):
                break
        if len(times) != steps + 2:
            raise RuntimeError(f"a block ended after {len(times) - 2} of {steps} steps")
        prefilled, *stepped, written = times
        # The last step is told sooner than the others: the loop starts no next one before it.
        return {"prefill": between([began, prefilled]), "step": between(stepped[:-1]), "block": between([prefilled, written])}

    def canvas_pass(self, prefix: int, batch: int) -> Samples:
        """`canvas_logits` of what the logits before believed."""
        caches, canvas, logits = self.prefilled(prefix, batch)

        def step() -> None:
            mx.eval(self.model.canvas_logits(canvas, caches, kernels.softmax(logits)))

        return {"pass": [peers.milliseconds(step)]}

    def image(self, columns: int, rows: int) -> Samples:
        """`encode_images` of one picture, cut already."""
        picture = noise_picture(columns, rows)
        return {"image": [peers.milliseconds(lambda: mx.eval(self.model.encode_images([picture])))]}

    def prefilled(self, prefix: int, batch: int) -> tuple[list[Cache], mx.array, mx.array]:
        """Caches, a canvas of noise `[B, C]` and its logits `[B, C, V]`; the last ones asked for are kept."""
        if self._kept is None or self._kept[0] != (prefix, batch):
            self._kept = None
            caches = self.model.make_caches()
            self.model.prefill(self.prompt(batch, prefix), [], caches)
            canvas = mx.array(self.noise(batch))
            logits = self.model.canvas_logits(canvas, caches)
            mx.eval(logits)
            self._kept = (prefix, batch), (caches, canvas, logits)
        return self._kept[1]

    def forget_peak(self) -> None:
        """Let the peak memory count from here."""
        super().forget_peak()
        mx.reset_peak_memory()

    def peak(self) -> int:
        """Bytes of the peak memory."""
        return mx.get_peak_memory() if backend.is_gpu() else super().peak()


def endless(canvas: int, steps: int) -> Options:
    """The model card's sampler for one block of exactly so many steps."""
    return replace(
        Options.of(GenerationConfig()), max_new_tokens=canvas, max_denoising_steps=steps, rule=StepsOnly(),
        end_token_ids=(), max_redraws=0,
    )  # fmt: skip


def noise_picture(columns: int, rows: int) -> Patches:
    """A picture of noise of so many patches a side, as the vision tower reads it."""
    pixels, positions = peers.patches(columns, rows)
    size = (16 * columns, 16 * rows)
    return Patches(pixels=pixels, positions=positions, soft_tokens=columns * rows // 9, size=size, resized=size)


if __name__ == "__main__":
    peers.serve(Dgemma())
