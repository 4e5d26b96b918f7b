"""What a measurement runs on: random weights of a geometry, the demo checkpoint, or a checkpoint by its name."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from . import backend, convert, fit, geometry, hub, render, weights
from .config import ModelConfig
from .errors import OptionError
from .formats import Format
from .model import DiffusionGemma
from .terminal import Progress
from .weights import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Weights, and how they are held; random ones are the same for the same seed."""

    geometry: str = "demo"
    model: str | None = None  # a folder or hub id instead
    bits: int | None = None  # packed by the default recipe of dgemma convert
    dtype: mx.Dtype | None = None  # of activations; None is the backend's own choice
    seed: int = 0

    @classmethod
    def of(cls, args: argparse.Namespace) -> Subject:
        """From the command line's arguments. OptionError for a dtype that does not compute here, or bits that are none."""
        if args.dtype is not None and args.dtype not in convert.DTYPES:
            raise OptionError(f"dtype is {args.dtype!r}; allowed: {', '.join(convert.DTYPES)}")
        dtype = None if args.dtype is None else weights.check_dtype(convert.DTYPES[args.dtype])
        made = cls(geometry=args.geometry, model=args.model, bits=args.bits, dtype=dtype, seed=args.seed)
        _ = made.format
        return made

    @property
    def name(self) -> str:
        """What it is called."""
        return self.model or self.geometry

    @property
    def format(self) -> Format | None:
        """How matrices are packed beyond what the checkpoint's own are."""
        return None if self.bits is None else Format.of(bits=self.bits)

    @property
    def is_random(self) -> bool:
        """Whether its weights are drawn here."""
        return self.model is None and self.geometry != "demo"

    @contextmanager
    def written(self, progress: Progress) -> Iterator[Checkpoint]:
        """A checkpoint folder, gone afterwards if it had to be written. OptionError if memory cannot hold its weights."""
        with tempfile.TemporaryDirectory(prefix="dgemma-") as temporary:
            out, told = Path(temporary) / "checkpoint", progress.share(f"writing {self.name}")
            if self.is_random:
                self._check_room()
                geometry.write(self.geometry, out, self.format, seed=self.seed, progress=told)
            elif self.format is not None:
                convert.convert(self.model, out, self.format, progress=told)
            else:
                out = hub.find(self.model).fetch()
            mx.clear_cache()
            yield Checkpoint.open(out)

    def load(self, progress: Progress, check: Callable[[Checkpoint], object] = lambda _: None) -> DiffusionGemma:
        """The model; random weights in their own dtype come without a file. `check` may refuse before they are made."""
        if not self.is_random or self.format is not None:
            with self.written(progress) as opened:
                check(opened)
                return weights.load(opened, dtype=self.dtype, progress=progress.share(f"loading {self.name}"))
        self._check_room()
        config = ModelConfig.from_dict(geometry.config(self.geometry))
        check(Checkpoint(folder=Path(), config=config, tensors={}, recipes={}, shapes=weights.shapes(config), formats={}))
        progress.now(f"drawing {self.name}")
        return geometry.in_memory(self.geometry, self.dtype or backend.activation_dtype(mx.bfloat16), self.seed)

    def _check_room(self) -> None:
        """Refuse random weights that this machine cannot hold, before gigabytes of them are made."""
        free, plan = backend.free_memory(), geometry.plan(self.geometry, self.format)
        width = (self.dtype or backend.activation_dtype(mx.bfloat16)).size
        held = plan.nbytes if self.format is not None else plan.parameters * width
        if free is not None and held > fit.SHARE * free:
            raise OptionError(
                f"geometry {self.geometry} takes {render.size(held)} of weights here and {render.size(free)} of memory are free; "
                "take a smaller geometry, or fewer --bits"
            )
