"""`dgemma convert`: a checkpoint with its matrices packed, packed otherwise, or unpacked, one tensor at a time.

A recipe says which matrices get the chosen format and which 8 bits. Noise in attention and in the embeddings, which are
the head too, makes the sampler less sure and costs denoising steps; most of the bytes are experts. The eyes stay as they
are unless asked for.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from . import __version__, hub, weights
from .config import ModelConfig, read_json
from .errors import CheckpointError, OptionError, OutputError
from .formats import Format
from .info import part_of
from .plan import SHARD, Plan, dtype_name, matrices
from .render import one_line, size
from .terminal import Progress
from .writer import Writer, check_folder
from .writer import Progress as Report

# The parts of dgemma.info that get 8 bits, whatever the others get.
RECIPES = {
    "default": {"embedding and head", "attention", "router"},
    "mlx-vlm": {"embedding and head", "attention", "router", "dense MLP"},  # mlx-vlm 0.7.10's own choice
    "uniform": set(),
}
EYES = {"vision tower", "image embedding"}
FINE = (Format(bits=8), Format(bits=8, group_size=32))  # the first that fits
DTYPES = {dtype_name(dtype): dtype for dtype in weights.DTYPES.values()}
# The small files that a checkpoint may have beside config.json and its weights.
FILES = (
    "tokenizer*", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*", "chat_template.json", "vocab.json",
    "special_tokens_map.json", "added_tokens.json", "generation_config.json", "processor_config.json",
    "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"}


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A checkpoint that was written: where, what, and which matrices the wanted format does not fit."""

    folder: Path
    plan: Plan
    unfit: tuple[str, ...]  # our module paths; they stay unquantised


def convert(
    source: str | Path | None,
    out: str | Path,
    format: Format | None = Format(),
    recipe: str = "default",
    *,
    vision: bool = False,
    dtype: mx.Dtype | None = None,
    shard_size: float = SHARD,
    overwrite: bool = False,
    revision: str | None = None,
    progress: Report | None = None,
) -> Converted:
    """Write the checkpoint `source` (as hub.find takes it) to the folder `out`, whole or not at all.

    `format` None unpacks everything; `vision` packs the eyes too, in `format`. What is not packed, and affine scales,
    are in `dtype`, by default the stored one. Matrices that have their format already are copied. Files hold at most
    `shard_size` bytes or one parameter. `progress` is told bytes written and bytes in all. Raises UserError.
    """
    if dtype is not None and dtype not in DTYPES.values():
        raise OptionError(f"dtype is {dtype}; allowed: {', '.join(DTYPES)}")
    fine_parts(recipe)
    check_folder(out, overwrite)  # like all that can be checked, before weights are fetched
    found = hub.find(source, revision)
    folder = found.folder
    _check_apart(folder, out)
    opened = weights.Checkpoint.open(folder, found.headers())
    formats, unfit = choose(opened.config, format, recipe, vision)
    raw = read_json(folder / "config.json")
    if opened.config.vision is None:
        raw["vision_config"] = None
    plan = Plan.of(raw, formats, _dtypes(opened, dtype), shard_size)
    small, writer = _small_files(folder), Writer(out, plan, overwrite, progress)
    small["README.md"] = card(one_line(_title(source, folder)), one_line(writer.out.name), plan, recipe).encode()
    with writer:
        found.fetch()
        for parameter, parts in opened.read():
            path, _, last = parameter.rpartition(".")
            if len(parts) > 1:
                writer.put_packed(parameter, parts, opened.formats[path])
            else:
                writer.put(parameter, parts[last])
        for file, data in small.items():
            writer.save(file, data)
    return Converted(folder=writer.out, plan=plan, unfit=unfit)


def choose(
    config: ModelConfig, format: Format | None, recipe: str = "default", vision: bool = False
) -> tuple[dict[str, Format], tuple[str, ...]]:
    """The format of each of our module paths that is packed; and the paths whose width no group divides.

    OptionError for a recipe that is none, and for a format that fits nothing at all.
    """
    fine = fine_parts(recipe)
    formats: dict[str, Format] = {}
    unfit = []
    for path, shape in matrices(config).items() if format else ():
        part = part_of(f"{path}.weight")
        if part in EYES and not vision:
            continue
        fitting = [one for one in (FINE if part in fine else (format,)) if one.fits(shape)]
        if fitting:
            formats[path] = fitting[0]
        else:
            unfit.append(path)
    if format and not formats:
        raise OptionError(f"no matrix of this model is as wide as whole groups of {format.group_size}; take smaller groups")
    return formats, tuple(unfit)


def fine_parts(recipe: str) -> set[str]:
    """The parts that a recipe gives 8 bits; OptionError for a recipe that is none."""
    if recipe not in RECIPES:
        raise OptionError(f"recipe is {recipe!r}; allowed: {', '.join(RECIPES)}")
    return RECIPES[recipe]


def _dtypes(opened: weights.Checkpoint, dtype: mx.Dtype | None) -> dict[str, mx.Dtype]:
    """The dtype of each parameter, or of its affine scales: the wanted one, else the stored one."""
    found = {}
    for name in opened.shapes:
        path, _, last = name.rpartition(".")
        fmt = opened.formats.get(path) if last == "weight" else None
        if dtype is not None or (fmt and fmt.mode != "affine"):
            found[name] = dtype or opened.dtype
        else:
            first = opened.recipes[f"{path}.scales" if fmt else name].names[0]
            found[name] = weights.DTYPES[opened.tensors[first].dtype]
    return found


def _check_apart(folder: Path, out: str | Path) -> None:
    """Neither folder may lie in the other: the source is never touched."""
    try:
        there = Path(out).expanduser().resolve()
        inside = any(one.exists() and one.samefile(folder) for one in (there, *there.parents))
        around = there.exists() and any(one.samefile(there) for one in folder.resolve().parents)
    except (ValueError, RuntimeError, OSError):  # Writer says what is wrong with the name
        return
    if inside or around:
        raise OutputError(f"{out}: {'is inside' if inside else 'holds'} the checkpoint that is read ({folder}); give another")


def _title(source: str | Path | None, folder: Path) -> str:
    """What a model card calls the source: its hub id, or the name of its folder without the way there."""
    name = str(source or "demo")
    return name if hub.HUB_ID.fullmatch(name) and not Path(name).expanduser().is_dir() else folder.resolve().name


def _small_files(folder: Path) -> dict[str, bytes]:
    """The contents of the small files of a checkpoint by name; folders, pipes and weights are none."""
    found = {}
    for path in sorted({path for pattern in FILES for path in folder.glob(pattern)}):
        if path.is_file() and path.suffix not in WEIGHTS and not path.name.endswith(".index.json"):
            try:
                found[path.name] = path.read_bytes()
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    return found


# -- what it came to --------------------------------------------------------------------------------------------------


def table(plan: Plan) -> list[tuple[str, str, int]]:
    """Parts of a model: what they are stored as, and their bytes."""
    kinds: dict[str, dict[str, int]] = {}
    for name, places in plan.places.items():
        fmt, (place, *_) = plan.format(name), places.values()
        of, kind = kinds.setdefault(part_of(name), {}), str(fmt) if fmt else dtype_name(place.dtype)
        of[kind] = of.get(kind, 0) + sum(place.nbytes for place in places.values())
    return [(part, "; ".join(sorted(of, key=of.get, reverse=True)), sum(of.values())) for part, of in kinds.items()]


def summary(done: Converted, name: str) -> str:
    """What was written, for a person."""
    plan, files = done.plan, len(done.plan.files)
    count = f"{files} file" if files == 1 else f"{files} files"
    lines = [f"{one_line(name)}: {count}, {size(plan.nbytes)}, {plan.bits_per_weight:.2f} bits per weight"]
    lines += [f"  {part:<20} {size(nbytes):>9}  {kind}" for part, kind, nbytes in table(plan)]
    if done.unfit:
        first = done.unfit[0]
        width = plan.shapes[f"{first}.weight"][-1]
        lines.append(
            f"{len(done.unfit)} of {len(done.unfit) + len(plan.formats)} matrices stay unquantised, their width being no "
            f"multiple of the group (first: {first}, {width} wide)"
        )
    return "\n".join(lines) + "\n"


CARD = """\
---
library_name: mlx
pipeline_tag: {task}
tags:
- mlx
- dgemma
- diffusion_gemma
{base}---

# {name}

{made}, from `{source}` by dgemma {version}. {nbytes}, {bits:.2f} bits per weight.

| part | stored as | bytes |
|---|---|---|
{rows}

With dgemma:

```sh
{ours}
```

With mlx-vlm{caution}:

```sh
{theirs}
```
"""


def card(source: str, name: str, plan: Plan, recipe: str) -> str:
    """The model card, README.md, of the checkpoint `name`."""
    sees = plan.config.get("vision_config") is not None
    blind, model = sees and "vision_tower.patch_embedder.input_proj" in plan.formats, shlex.quote(name)
    ours = [f'dgemma generate --model {model} "Why is the sky blue?"']
    theirs = [f'mlx_vlm.generate --model {model} --prompt "Why is the sky blue?"']
    if sees:
        ours.append(f'dgemma generate --model {model} --image picture.png "What is in this image?"')
    if sees and not blind:
        theirs.append(f'mlx_vlm.generate --model {model} --image picture.png --prompt "What is in this image?"')
    return CARD.format(
        task="image-text-to-text" if sees else "text-generation",
        base=f"base_model: {source}\n" if hub.HUB_ID.fullmatch(source) else "",
        name=name,
        made=f"Quantised by the recipe `{recipe}`" if plan.formats else "Not quantised",
        source=source,
        version=__version__,
        nbytes=size(plan.nbytes),
        bits=plan.bits_per_weight,
        rows="\n".join(f"| {part} | {kind} | {nbytes:,} |" for part, kind, nbytes in table(plan)),
        caution=" (text only: mlx-vlm 0.7.10 casts pixels to the integers of the packed patch projection)" if blind else "",
        ours="\n".join(ours),
        theirs="\n".join(theirs),
    )


# -- the command ------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """`dgemma convert`; returns the exit code."""
    chosen = {"mode": args.mode, "bits": args.bits, "group_size": args.group_size}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if args.no_quantize and (chosen or args.recipe or args.quantize_vision):
        raise OptionError("--no-quantize packs nothing; what says how to pack (--mode, --bits, ...) has no place beside it")
    if args.dtype is not None and args.dtype not in DTYPES:
        raise OptionError(f"dtype is {args.dtype!r}; allowed: {', '.join(DTYPES)}")
    if not args.shard_size > 0:
        raise OptionError(f"shard_size is {args.shard_size:g}; a number of GB above 0 is needed")
    with Progress() as progress:
        done = convert(
            args.model,
            args.out,
            None if args.no_quantize else Format.of(**chosen),
            args.recipe or "default",
            vision=args.quantize_vision,
            dtype=args.dtype and DTYPES[args.dtype],
            shard_size=args.shard_size * 1e9,
            overwrite=args.overwrite,
            revision=args.revision,
            progress=progress.share(f"writing {args.out}"),
        )
    sys.stdout.write(summary(done, args.out))
    return 0
