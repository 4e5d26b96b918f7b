"""Make the goldens of the quantised formats anew with mlx-vlm in float32: PYTHON tests/oracle/make_formats.py

PYTHON is one that has mlx-vlm (pip install mlx-vlm); neither torch nor dgemma is needed. On one machine the files come out
the same bit for bit. Arguments name the formats to make; without any, all are made and others are deleted.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    import mlx_vlm  # noqa: F401
except ImportError:
    sys.exit(f"{sys.executable} has no mlx-vlm; run this with a Python that has it: pip install mlx-vlm")

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402

from oracle import cases, formats, peer, record, tiny  # noqa: E402


def main(names: list[str]) -> None:
    """The goldens of the named formats, or of all."""
    formats.GOLDENS.mkdir(exist_ok=True)
    if not names:
        for old in formats.GOLDENS.glob("*.*"):
            old.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        folders = {variant: source(Path(scratch) / variant, variant) for variant in ("pictures", "clipped", "text")}
        for name in names or formats.CONVERSIONS:
            conversion = formats.CONVERSIONS[name]
            target = Path(scratch) / "converted" / name
            peer.convert(folders[conversion.variant], target, conversion)
            listing = listing_of(target, conversion.variant)
            listing.write(name)
            found = measured(target, conversion.variant)
            record.save(formats.GOLDENS / f"{name}.npz", found)
            print(f"{name}: {len(listing.tensors)} tensors, {(target / 'model.safetensors').stat().st_size:,} bytes")
    size = sum(path.stat().st_size for path in formats.GOLDENS.iterdir())
    print(f"{formats.GOLDENS}: {size / 1e6:.2f} MB")


def source(folder: Path, variant: str) -> Path:
    """A tiny Hugging Face checkpoint, with as much of a tokenizer as `convert` insists on; returns the folder."""
    folder.mkdir()
    config = formats.config(variant)
    save_file(tiny.weights(config), folder / "model.safetensors", metadata={"format": "pt"})
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<bos>": 2}, unk_token="<pad>"))
    words.save(str(folder / "tokenizer.json"))
    roles = {f"{role}_token": f"<{role}>" for role in ("pad", "eos", "bos")}
    for name, value in {
        "config.json": config,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"} | roles,
        "processor_config.json": {"image_processor": {"max_soft_tokens": 70}},
    }.items():
        (folder / name).write_text(json.dumps(value))
    return folder


def listing_of(folder: Path, variant: str) -> formats.Listing:
    """What mlx-vlm wrote; what it left of the config must be as it was."""
    wrote, was = json.loads((folder / "config.json").read_text()), formats.config(variant)
    kept = {key: wrote[key] for key in was}
    if kept != was:
        raise SystemExit(f"{folder.name}: mlx-vlm changed {[key for key in was if kept[key] != was[key]]} in config.json")
    stored = mx.load(str(folder / "model.safetensors"))
    return formats.Listing(added={key: wrote[key] for key in wrote.keys() - was.keys()}, tensors=formats.listed(stored))


def measured(folder: Path, variant: str) -> dict[str, np.ndarray]:
    """What mlx-vlm computes in float32 of every prompt, and, with packed patches, what it computes as installed ("grey")."""
    model, found = peer.load(folder), {}
    readable = formats.prompts(variant)
    if peer.packs_patches(model):
        try:
            found = {f"grey/{name}": array for name, array in one(model, readable["picture"]).items()}
        except ValueError as error:  # uint32 patches times an affine matrix are a grey picture, times the others nothing
            print(f"{folder.name}: as installed, mlx-vlm reads no picture here: {error}")
        peer.unpack_patches(model)
    for name, case in readable.items():
        found |= {f"{name}/{key}": array for key, array in one(model, case).items()}
    return found


def one(model, case: cases.Case) -> dict[str, np.ndarray]:
    """What mlx-vlm computes of one prompt; these have no pictures that would need cutting."""
    return peer.measure(model, cases.prompt(case, cut=None), formats.canvases(case))


if __name__ == "__main__":
    main(sys.argv[1:])
