"""Other runtimes of DiffusionGemma, driven for `dgemma bench`: each by the Python that has it, in a process of its own.

This file is handed to that Python as it is (`command`), so it imports nothing of dgemma, and a peer only in its own class.
The process reads requests from stdin and answers each on stdout, a line of JSON both ways:

    {"do": "load", "folder": ..., "dtype": "float32", "reserved": [...]}    -> {"versions": {...}, "device": ..., ...}
    {"do": "measure", "what": "answer", "seconds": 1, "prefix": 256, ...}   -> {"ms": {"step": [...], ...}, "peak": ...}

What can be asked for (`Runtime`): an `answer` of one block, a `canvas_pass`, an `image`. A peer does each as its own
`generate` does, with its own defaults but for what would end a block before its last step. Inputs are drawn here, from
seeds, so that every runtime reads the same.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import resource
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NEEDS = {"transformers": ("transformers", "torch"), "mlx-vlm": ("mlx_vlm",), "mlx-vlm+blas": ("mlx_vlm",)}
BLAS = "DGEMMA_BLAS"  # the library that "mlx-vlm+blas" loads before mlx
LONG = 10  # on a CPU a job that takes so many times the seconds it is given is not done a first time for nothing
CHUNK = 2048  # prompt positions of a pass in mlx-vlm's own command line
FIRST = 16  # random prompts begin above the control tokens
UNSETTLED = 1e-30  # mean entropy that no canvas falls below
Samples = dict[str, list[float]]  # milliseconds by what was measured


# -- inputs -----------------------------------------------------------------------------------------------------------


def tokens(seed: int, rows: int, length: int, vocabulary: int, reserved: Sequence[int]) -> Any:
    """Random token ids, int64 numpy `[rows, length]`, none of them `reserved` (an image's places)."""
    import numpy as np  # here, like all that a Python may lack: `missing` answers without it

    ids = np.random.RandomState(seed).randint(FIRST, vocabulary, (rows, length))
    ids[np.isin(ids, reserved)] = FIRST
    return ids


def patches(columns: int, rows: int) -> tuple[Any, Any]:
    """A picture of noise: float32 `[N, 768]` in 0..1 and int32 `[N, 2]`, patches of 16 x 16 pixels in reading order."""
    import numpy as np

    y, x = np.divmod(np.arange(columns * rows, dtype=np.int32), columns)
    return np.random.RandomState(2).rand(columns * rows, 768).astype(np.float32), np.stack([x, y], axis=1)


def whole(pixels: Any, columns: int, rows: int) -> Any:
    """The picture `[1, 3, H, W]` that patches `[N, 768]` were cut from, for a peer that cuts them itself."""
    return pixels.reshape(rows, columns, 16, 16, 3).transpose(4, 0, 2, 1, 3).reshape(1, 3, 16 * rows, 16 * columns)


# -- what every runtime does ------------------------------------------------------------------------------------------


class Runtime(ABC):
    """One runtime with one checkpoint; subclasses say how to load it and how each thing is done once."""

    packages: tuple[str, ...] = ()
    compiles = False  # whether kernels are made when they are first used; `read` says so

    def __init__(self) -> None:
        self.reserved: list[int] = []
        self._warm: set[tuple] = set()  # what has been done before
        self._kept: tuple[tuple[int, int], tuple] | None = None  # what a canvas pass needs, for one prefix and batch

    def load(self, folder: str, dtype: str, reserved: Sequence[int]) -> dict[str, Any]:
        """Read a checkpoint; what runs it, and the seconds that took."""
        began = time.perf_counter()
        self.reserved = list(reserved)
        device = self.read(Path(folder), dtype)
        versions = {name: importlib.metadata.version(name) for name in self.packages}
        return {"versions": versions, "device": device, "load_seconds": round(time.perf_counter() - began, 2)}

    def measure(self, what: str, seconds: float, **job: int) -> dict[str, Any]:
        """Do one thing again and again for about `seconds`, at least once; the first time does not count.

        Then memory is claimed and threads start, which is little beside LONG times the `seconds`: so long a first time counts on
        a CPU. A GPU's kernels are compiled then, which may take longer than that.
        """
        once, key = getattr(self, what), (what, *sorted(job.items()))
        self.forget_peak()
        found: Samples = {}
        began = time.perf_counter()
        if key not in self._warm:
            self._warm.add(key)
            first = once(**job)
            if (now := time.perf_counter()) - began > LONG * seconds and not self.compiles:
                found = {name: list(taken) for name, taken in first.items()}
            else:
                began = now
        while not found or time.perf_counter() - began < seconds:
            for name, taken in once(**job).items():
                found.setdefault(name, []).extend(taken)
        return {"ms": {name: [round(ms, 4) for ms in taken] for name, taken in found.items()}, "peak": self.peak()}

    @abstractmethod
    def read(self, folder: Path, dtype: str) -> str:
        """Load the checkpoint; returns the device's name."""

    @abstractmethod
    def answer(self, prefix: int, batch: int, steps: int) -> Samples:
        """Read a prompt and write one block in `steps` steps: "prefill", each "step" between two, the "block"."""

    @abstractmethod
    def canvas_pass(self, prefix: int, batch: int) -> Samples:
        """One bare canvas pass, from the logits of the last (softmax, soft embedding) to its own: "pass"."""

    @abstractmethod
    def image(self, columns: int, rows: int) -> Samples:
        """Encode one picture of so many patches to rows of the prompt: "image"."""

    def forget_peak(self) -> None:
        """Let the peak memory count from here; without Linux it counts from the process's start."""
        try:
            Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: resets VmHWM
        except OSError:
            pass

    def peak(self) -> int:
        """Bytes of the peak memory: of the device where it has its own, else resident."""
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        except (OSError, StopIteration):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def prompt(self, rows: int, length: int) -> Any:
        """The prompt that every runtime reads."""
        return tokens(0, rows, length, self.vocabulary, self.reserved)

    def noise(self, rows: int) -> Any:
        """The canvas of a bare pass."""
        return tokens(1, rows, self.canvas, self.vocabulary, self.reserved)


def milliseconds(function: Callable[[], Any]) -> float:
    """What one call takes; whatever it starts, it must wait for."""
    began = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - began)


def between(times: Sequence[float]) -> list[float]:
    """Milliseconds from each of these seconds to the next."""
    return [1e3 * (after - before) for before, after in zip(times, times[1:])]


# -- transformers -----------------------------------------------------------------------------------------------------


class Transformers(Runtime):
    """Hugging Face's implementation, on torch's accelerator if it has one, else on all cores."""

    packages = ("transformers", "torch")

    def read(self, folder: Path, dtype: str) -> str:
        """Load the checkpoint; returns the device's name."""
        import torch  # each peer in its own class: another's Python lacks it
        from transformers import DynamicCache  # likewise
        from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaForBlockDiffusion  # likewise

        self.torch, self.new_cache, self.on_gpu = torch, DynamicCache, torch.accelerator.is_available()
        self.device = torch.accelerator.current_accelerator() if self.on_gpu else torch.device("cpu")
        torch.set_grad_enabled(False)
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
        model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model, self.compiles = model.to(self.device).eval(), self.on_gpu
        self.canvas, self.vocabulary = model.config.canvas_length, model.config.text_config.vocab_size
        return torch.cuda.get_device_name() if self.device.type == "cuda" else self.device.type.upper()

    def answer(self, prefix: int, batch: int, steps: int) -> Samples:
        """`model.generate`; a streamer hears of every step, a hook of the encoder's end."""
        ids, times, encoded = self._tensor(self.prompt(batch, prefix)), [], []
        watch = SimpleNamespace(put=lambda _: None, end=lambda: None, put_draft=lambda value: times.append(self._now()))
        hook = self.model.model.encoder.register_forward_hook(lambda *_: encoded.append(self._now()))
        began = self._now()
        try:
            self.model.generate(
                ids, streamer=watch, max_new_tokens=self.canvas, max_denoising_steps=steps,
                stability_threshold=steps, confidence_threshold=UNSETTLED,
            )  # fmt: skip
        finally:
            hook.remove()
        if len(times) != steps:
            raise RuntimeError(f"a block ended after {len(times)} of {steps} steps")
        return {"prefill": between([began, encoded[0]]), "step": between(times), "block": between([encoded[0], times[-1]])}

    def canvas_pass(self, prefix: int, batch: int) -> Samples:
        """`model(...)` with a cache and the logits before."""
        cache, canvas, logits = self._prefilled(prefix, batch)
        began = self._now()
        self.model(decoder_input_ids=canvas, past_key_values=cache, self_conditioning_logits=logits)
        return {"pass": between([began, self._now()])}

    def image(self, columns: int, rows: int) -> Samples:
        """The encoder's `get_image_features`."""
        pixels, positions = (self._tensor(array)[None] for array in patches(columns, rows))
        began = self._now()
        self.model.model.encoder.get_image_features(pixels, positions.long())
        return {"image": between([began, self._now()])}

    def _prefilled(self, prefix: int, batch: int) -> tuple:
        """A cache, a canvas and its logits; the last ones asked for are kept."""
        if self._kept is None or self._kept[0] != (prefix, batch):
            self._kept = None
            ids, cache = self._tensor(self.prompt(batch, prefix)), self.new_cache(config=self.model.config.get_text_config())
            self.model.model.encoder(input_ids=ids, past_key_values=cache)
            canvas = self._tensor(self.noise(batch))
            logits = self.model(decoder_input_ids=canvas, past_key_values=cache).logits
            self._kept = (prefix, batch), (cache, canvas, logits)
        return self._kept[1]

    def _tensor(self, array: Any) -> Any:
        return self.torch.from_numpy(array).to(self.device)

    def _now(self) -> float:
        if self.on_gpu:
            self.torch.accelerator.synchronize()
        return time.perf_counter()

    def forget_peak(self) -> None:
        """Let the peak memory count from here."""
        super().forget_peak()
        if self.device.type == "cuda":
            self.torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Bytes of the peak memory."""
        return self.torch.cuda.max_memory_allocated() if self.device.type == "cuda" else super().peak()


# -- mlx-vlm ----------------------------------------------------------------------------------------------------------


class MlxVlm(Runtime):
    """mlx-vlm; its floats are cast to the dtype that is asked for, since its CPU path runs float32 only."""

    packages = ("mlx-vlm", "mlx")

    def read(self, folder: Path, dtype: str) -> str:
        """Load the checkpoint; returns the device's name."""
        if os.environ.get(BLAS):
            ctypes.CDLL(os.environ[BLAS], mode=ctypes.RTLD_GLOBAL)
        import mlx.core as mx  # after the BLAS, and each peer in its own class
        from mlx.utils import tree_map  # likewise
        from mlx_vlm.generate import diffusion  # likewise
        from mlx_vlm.utils import load_model  # likewise

        self.mx, self.diffusion = mx, diffusion
        with tempfile.TemporaryDirectory() as copy:
            self.model = load_model(released_spelling(folder, Path(copy)))
            wanted = getattr(mx, dtype)
            cast = lambda array: array.astype(wanted) if mx.issubdtype(array.dtype, mx.floating) else array
            self.model.update(tree_map(cast, self.model.parameters()))
            mx.eval(self.model.parameters())
        self.compiles = mx.default_device() != mx.cpu
        config = self.model.config
        self.canvas, self.vocabulary = config.canvas_length, config.text_config.vocab_size
        # As the released checkpoint's, but that no canvas is ever confident.
        config.generation_config = {"stability_threshold": 1, "confidence_threshold": 0.0}
        return "CPU" if mx.default_device() == mx.cpu else str(mx.device_info().get("device_name", "GPU"))

    def answer(self, prefix: int, batch: int, steps: int) -> Samples:
        """Its `stream_diffusion_generate`, entropy bound, temperature 0; more than one row it only prefills."""
        ids = self.mx.array(self.prompt(batch, prefix))
        if batch > 1:
            return {"prefill": [milliseconds(lambda: self._prefill(ids))]}
        times, judge = [], self.diffusion._diffusion_stable_and_confident
        silent = SimpleNamespace(reset=lambda: None, add_token=lambda *_, **__: None, finalize=lambda: None, last_segment="")
        words = SimpleNamespace(stopping_criteria=lambda _: False, detokenizer=silent)

        def judged(*arguments: Any) -> bool:  # the one place that a step reaches when it has been computed
            settled = judge(*arguments)
            self.mx.eval(arguments[0])
            times.append(time.perf_counter())
            return settled

        self.diffusion._diffusion_stable_and_confident = judged
        began = time.perf_counter()
        try:
            for result in self.diffusion.stream_diffusion_generate(
                self.model, words, words, ids, None, None, max_tokens=self.canvas, skip_special_token_ids=[],
                max_denoising_steps=steps, diffusion_sampler="entropy-bound", diffusion_full_canvas=True,
                prefill_step_size=CHUNK,
            ):  # fmt: skip
                if result.diffusion_block_complete:
                    ended, read = time.perf_counter(), result.prompt_tokens / result.prompt_tps
        finally:
            self.diffusion._diffusion_stable_and_confident = judge
        if result.diffusion_denoising_steps != steps:
            raise RuntimeError(f"a block ended after {result.diffusion_denoising_steps} of {steps} steps")
        return {"prefill": [1e3 * read], "step": between(times), "block": [1e3 * (ended - began - read)]}

    def canvas_pass(self, prefix: int, batch: int) -> Samples:
        """Its self-conditioning and decoder."""
        cache, canvas, logits, prepared = self._prefilled(prefix, batch)

        def step() -> None:
            belief = self.model.diffusion_self_conditioning(logits, prepared)
            self.mx.eval(self.model.diffusion_decoder_logits(canvas, cache=cache, self_conditioning=belief))

        return {"pass": [milliseconds(step)]}

    def image(self, columns: int, rows: int) -> Samples:
        """Its encoder's `get_image_features`, from whole pixels: it cuts the patches itself."""
        picture = self.mx.array(whole(patches(columns, rows)[0], columns, rows))
        return {"image": [milliseconds(lambda: self.mx.eval(self.model.model.encoder.get_image_features(picture)))]}

    def _prefill(self, ids: Any) -> Any:
        cache, long = self.model.make_cache(), ids.shape[1] > CHUNK
        cache = self.model.diffusion_prefill_cache(ids, cache=cache, prefill_step_size=CHUNK, chunk_prefill=long)
        self.mx.eval([one.state for one in cache])
        return cache

    def _prefilled(self, prefix: int, batch: int) -> tuple:
        """A cache, a canvas, its logits, and what self-conditioning prepares; the last ones asked for are kept."""
        if self._kept is None or self._kept[0] != (prefix, batch):
            self._kept = None
            cache, canvas = self._prefill(self.mx.array(self.prompt(batch, prefix))), self.mx.array(self.noise(batch))
            logits = self.model.diffusion_decoder_logits(canvas, cache=cache)
            prepared = self.model.diffusion_prepare_self_conditioning()
            self.mx.eval(logits)
            self._kept = (prefix, batch), (cache, canvas, logits, prepared)
        return self._kept[1]

    def forget_peak(self) -> None:
        """Let the peak memory count from here."""
        super().forget_peak()
        self.mx.reset_peak_memory()

    def peak(self) -> int:
        """Bytes of the peak memory."""
        return super().peak() if self.mx.default_device() == self.mx.cpu else self.mx.get_peak_memory()


def released_spelling(folder: Path, copy: Path) -> Path:
    """Links to a checkpoint whose config spells the full layers as Google's does: mlx-vlm knows no per_layer_config."""
    for path in folder.iterdir():
        if path.name != "config.json":
            (copy / path.name).symlink_to(path.resolve())
    config = json.loads((folder / "config.json").read_text())
    if per_layer := config["text_config"].pop("per_layer_config", None):
        full = next(iter(per_layer.values()))
        config["text_config"] |= {"global_head_dim": full["head_dim"], "num_global_key_value_heads": full["num_key_value_heads"]}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


# -- the process ------------------------------------------------------------------------------------------------------

PEERS: dict[str, type[Runtime]] = {"transformers": Transformers, "mlx-vlm": MlxVlm, "mlx-vlm+blas": MlxVlm}


def command(python: str, peer: str) -> list[str]:
    """What runs this file in another Python. Not by its path: that would put the folder of dgemma's modules before all."""
    return [python, "-c", f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')", peer]


def missing(peer: str) -> list[str]:
    """What this Python lacks for a peer."""
    return [name for name in NEEDS[peer] if importlib.util.find_spec(name) is None]


def serve(runtime: Runtime) -> None:
    """Answer requests, a line of JSON each, until there are no more; what libraries print goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(runtime, request.pop("do"))(**request)
        except Exception as error:  # noqa: BLE001: whatever a runtime raises is an answer too
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    if sys.argv[2:] == ["--missing"]:
        print(json.dumps(missing(sys.argv[1])))
    else:
        serve(PEERS[sys.argv[1]]())
