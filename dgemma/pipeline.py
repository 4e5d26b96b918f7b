"""Words and pictures in, events or an Answer out.

    from dgemma import Pipeline
    pipe = Pipeline.from_pretrained()                       # the demo checkpoint that ships with dgemma
    answer = pipe("What is in this image?", images=["shapes.png"])
    print(answer.text)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import backend, interoperation, weights
from .answer import Answer, Answering, Called, Event, Finished, Seconds, Text, Thought  # noqa: F401: public names
from .config import GenerationConfig
from .denoise import Block, Prefilled  # noqa: F401: public names
from .hub import Found, find
from .infill import Filled, FillJob, ReviseJob, Revision
from .memory import BUDGET, EVERY
from .messages import Message
from .model import DiffusionGemma
from .processor import Processor, Prompt
from .reading import Read, ReadJob, SlotRead  # noqa: F401: a public name
from .session import Session, Turn  # noqa: F401: Turn is a public name
from .settings import FILL_SETTINGS, OF_THE_PROMPT, REVISE_SETTINGS, Request, is_batch, packing_of, split_settings
from .step import Options, Step  # noqa: F401: Step is a public name
from .tools import ToolCall  # noqa: F401: a public name


class Pipeline:
    """A loaded checkpoint, ready to answer."""

    def __init__(self, model: DiffusionGemma, processor: Processor, options: Options, load_seconds: float = 0.0):
        self.model, self.processor, self.options = model, processor, options
        self.load_seconds = load_seconds

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path | None = None,
        *,
        revision: str | None = None,
        image_attention: str = "encoder-window",
        dtype: mx.Dtype | None = None,
    ) -> Pipeline:
        """Load a folder, a hub id, or (None) the demo checkpoint that ships with dgemma.

        `image_attention` is how the tokens of an image see each other: "encoder-window" as in transformers, or
        "bidirectional" as in Google's JAX code. `dtype` defaults to float32 on a CPU and the stored one on a GPU.
        """
        unloaded = Unloaded(find(checkpoint, revision))
        unloaded.check(image_attention, dtype)
        unloaded.fetch()
        with _bar(str(checkpoint or "demo")) as progress:
            return unloaded.load(image_attention, dtype, progress)

    @classmethod
    def from_mlx_vlm(
        cls,
        model: Any,
        processor: Any,
        *,
        generation_config: Mapping[str, Any] | None = None,
        image_attention: str = "encoder-window",
    ) -> Pipeline:
        """Drive a DiffusionGemma that mlx-vlm has loaded: `model, processor = mlx_vlm.load(...)`.

        The weights are mlx-vlm's own arrays, shared and not copied, packed ones as they are; answers are those of
        from_pretrained with the same folder. On a CPU the floats must be float32: `model.set_dtype(mx.float32)`.
        `generation_config` holds keys of a generation_config.json that replace those that mlx-vlm kept. Import dgemma
        before mlx_vlm, so that a fast BLAS serves both. OptionError when these are not mlx-vlm's.
        """
        ours = interoperation.adopt(model, image_attention)
        words = interoperation.read_processor(processor, ours.config)
        return cls(ours, words, Options.of(interoperation.read_generation(model, generation_config)))

    def __call__(self, prompt: Any, images: Any = None, **settings: Any) -> Answer | list[Answer]:
        """Answer a prompt (a string or messages), or a list of prompts as one batch.

        `images` are sources that `dgemma.vision.load_image` knows: files, PIL images, arrays, bytes, data: URLs; for a
        batch, one list a prompt. Settings, all optional:

        seed: whole number, or one a row (a single number s gives row i the seed s + i); default 0
        preset: quality, balanced or fast, the settings of dgemma.presets; those given beside it win; default none of them
        max_new_tokens, steps, t_min, t_max: lengths and schedule; default the checkpoint's
        entropy_bound or confidence_threshold: which positions a step accepts; default the checkpoint's entropy bound
        stability, confidence: when a block has settled
        redraws: how often an empty answer is drawn again; default 2
        image_budget: soft tokens an image may take: 70, 140, 280, 560 or 1120
        chunk: prompt positions per encoder pass
        kv_bits: 8 or 4, to keep keys and values packed; kv_group_size: 32, 64 or 128 numbers a scale, default 64; kv_start: positions
            that are kept as they are until there are so many, default 0
        stop: a string, or several, before which the text ends; thoughts and calls are not searched
        tools: JSON schemas or Python functions, declared to the model; Answer.tool_calls has what it calls
        enable_thinking: ask the model to think; thinking_budget: tokens it may take for that, then its thought is closed
        canvas: token ids to begin the first block from; pins: {answer position: token id} held from first to last step
        """
        for event in self.stream(prompt, images, **settings):
            if isinstance(event, Finished):
                return list(event.answers) if is_batch(prompt) else event.answers[0]
        raise AssertionError("a stream ends with Finished")

    def stream(self, prompt: Any, images: Any = None, **settings: Any) -> Iterator[Event]:
        """The same, as events: Prefilled, then Step after Step, Block and Text, Thought or Called for each block, and Finished.

        Input is checked before the first event; closing the iterator stops between two steps.
        """
        request = Request.read(self, prompt, images, settings)
        return iter(Answering(self.model, self.processor, request, load_seconds=self.load_seconds))

    def chat(
        self,
        system: str | None = None,
        messages: Sequence[Message] | None = None,
        *,
        snapshot_every: int = EVERY,
        snapshot_bytes: int = BUDGET,
        **settings: Any,
    ) -> Session:
        """A conversation that encodes only what is new in it: `chat.send(...)`, `regenerate`, `edit`, `save`.

        `messages` are turns so far, an answer last; `settings`, as of a call, hold for all turns. To go back, copies of the sliding
        layers' rows are kept at the end of every prompt and every `snapshot_every` tokens; they and the features of pictures take
        at most `snapshot_bytes`, what was used least recently goes first. PromptError, ImageError, OptionError.
        """
        return Session(self, system, messages, snapshot_every=snapshot_every, snapshot_bytes=snapshot_bytes, **settings)

    def load_chat(self, path: str | Path, **settings: Any) -> Session:
        """The conversation that `Session.save` wrote; settings given here hold instead of those saved. SessionError when it is
        damaged or was saved with another checkpoint."""
        return Session.load(self, path, **settings)

    # -- a canvas of which a part is given (dgemma.reading, dgemma.infill) -------------------------------------------

    def read(self, prompt: Any, images: Any = None, *, template: Any, choices: Any, **settings: Any) -> Read | list[Read]:
        """What the model believes about the slots of a template: the probability of every choice, by one canvas pass.

            pipe.read("What is in this image?", images=["a.png"], template="I see a [[colour]] circle.",
                      choices={"colour": ["red", "green", "blue"]})["colour"].probabilities

        The canvas holds the template's text, noise in its slots and the end of the turn. `template` may be a list: all of
        them, as rows of one batch, share one prefill; `choices` is then one dict for all, or a list of dicts. A choice of several
        tokens has the product of their probabilities, each read with those before it pinned. Choices of different lengths are
        read on layouts of their own and normalised together. Raises PromptError, OptionError, ImageError. Settings, all optional:

        steps: canvas passes, default 1: the last is read, those before it denoise the slots
        temperature: divides the logits that are read, default 1
        seed: of the noise, default 0; draws: of so many draws of it the mean is taken, default 1
        width: tokens of the canvas; default as few as the template takes
        end: whether the end of the turn is pinned behind the template; default True
        image_budget, chunk, kv_bits, kv_group_size, kv_start: as of a call
        """
        options = replace(self.options, packing=packing_of(settings))
        found = ReadJob.of(self.processor, options, prompt, images, template=template, choices=choices, **settings).run(self.model)
        return found if isinstance(template, (list, tuple)) else found[0]

    def fill(self, template: str, prompt: Any = None, images: Any = None, **settings: Any) -> Filled:
        """Fill the holes of a template: `pipe.fill("A [[1-3]] circle left of a [[1]] square.", images=["a.png"])`.

        A hole is so many tokens, or one of a range: every combination of lengths is a row of a batch, and that one is
        taken whose finished canvas has the highest mean log-probability. The text around holes is pinned at every step and stands in
        the result as it was given. `prompt` is what the canvas answers; None for pictures alone. Settings: seed, width,
        end, image_budget, chunk as of read; steps, t_min, t_max, entropy_bound or confidence_threshold, stability and
        confidence as of a call. Raises PromptError, OptionError, ImageError.
        """
        *_, last = self.stream_fill(template, prompt, images, **settings)
        return last

    def stream_fill(self, template: str, prompt: Any = None, images: Any = None, **settings: Any) -> Iterator[Step | Filled]:
        """The same, as events: Step after Step, whose `rows` number the combinations of lengths, and at last the Filled."""
        own, options = split_settings(self.options, settings, FILL_SETTINGS)
        return FillJob.of(self.processor, options, template, prompt, images, **own).run(self.model)

    def revise(self, draft: str, prompt: Any = None, images: Any = None, **settings: Any) -> Revision:
        """Write a draft again: `pipe.revise("A red circle.", "Caption this picture.", images=["a.png"], strength=0.4)`.

        That share of the draft's positions (its end is one of them) is replaced by noise, and the canvas denoised as ever: what the
        model finds wrong changes, what it finds right stays. `pins` are {position: token id} held throughout. Settings: strength,
        pins, and those of fill but for width and end. Raises PromptError, OptionError, ImageError.
        """
        *_, last = self.stream_revise(draft, prompt, images, **settings)
        return last

    def stream_revise(self, draft: str, prompt: Any = None, images: Any = None, **settings: Any) -> Iterator[Step | Revision]:
        """The same, as events: Step after Step, and at last the Revision."""
        own, options = split_settings(self.options, settings, REVISE_SETTINGS)
        return ReviseJob.of(self.processor, options, draft, prompt, images, **own).run(self.model)


class Unloaded:
    """A checkpoint before its weights: all that can be checked without them is, so that a mistake costs no download."""

    def __init__(self, found: Found):
        self.found, self.options = found, Options.of(GenerationConfig.read(found.folder))
        self._began = time.perf_counter()

    @cached_property
    def opened(self) -> weights.Checkpoint:
        """Config and headers, checked."""
        return weights.Checkpoint.open(self.found.folder, self.found.headers())

    @cached_property
    def processor(self) -> Processor:
        """Tokenizer and template."""
        return Processor.open(self.found.folder, self.opened.config)

    def check(self, image_attention: str = "encoder-window", dtype: mx.Dtype | None = None) -> None:
        """Raise what loading would raise, but for the weights' own bytes."""
        weights.check_dtype(dtype or backend.activation_dtype(self.opened.dtype))
        DiffusionGemma(self.opened.config, image_attention)  # arrays are lazy: this costs nothing
        _ = self.processor

    def check_request(self, prompt: Any, images: Any = None, **settings: Any) -> tuple[Prompt, ...]:
        """Raise what Pipeline.stream would raise for these; returns the prompts as the model will read them."""
        return Request.read(self, prompt, images, settings).prompts

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Raise what Pipeline.stream would raise for these settings, whatever the prompt."""
        Request.of(self.options, 1, False, {name: value for name, value in settings.items() if name not in OF_THE_PROMPT})

    def fetch(self) -> None:
        """Fetch the weights, if they are still on the hub; a download shows its own progress on a terminal's stderr."""
        if self.found.absent:
            self.found = Found(folder=self.found.fetch())
            self.opened = weights.Checkpoint.open(self.found.folder)

    def load(
        self,
        image_attention: str = "encoder-window",
        dtype: mx.Dtype | None = None,
        progress: weights.Progress | None = None,
    ) -> Pipeline:
        """The loaded pipeline."""
        self.fetch()
        model = weights.load(self.opened, image_attention, dtype, progress)
        return Pipeline(model, self.processor, self.options, time.perf_counter() - self._began)


@contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal's stderr, if loading takes more than two seconds; yields what moves it."""
    from tqdm import tqdm  # here, since only a program that loads needs it; it comes with huggingface_hub

    with tqdm(desc=f"loading {name}", unit="B", unit_scale=True, delay=2, disable=None, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
