"""Converting: every format and recipe computes what its rounding says, loads anywhere, and is there whole or not at all."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import resource
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import dgemma  # noqa: F401
from dgemma import backend, cli, hub, info, weights, writer
from dgemma.config import ModelConfig
from dgemma.convert import RECIPES, choose, convert
from dgemma.errors import CheckpointError, OptionError, OutputError
from dgemma.formats import DEFAULTS, Format
from dgemma.names import ours
from dgemma.plan import Plan
from dgemma.render import one_line
from dgemma.vision import preprocess
from dgemma.writer import Writer
from oracle import tiny

FINE, FINE_32 = Format(bits=8), Format(bits=8, group_size=32)
ROOT = Path(__file__).resolve().parents[1]


def roomy() -> dict:
    """A config whose widths take groups of 64, but for the tower's (32: groups of 32), in the spelling transformers saves."""
    found = tiny.config("wide")
    found["text_config"] |= {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
    found["vision_config"] |= {"intermediate_size": 64}
    return found


def store(folder: Path, config: dict, tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A checkpoint of these weights, with the small files of `words`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tiny.weights(config) if tensors is None else tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "processor_config.json"):
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A float32 checkpoint that reads text and images; tests must not change it."""
    return store(tmp_path_factory.mktemp("convert") / "source", roomy())


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def run(capsys):
    """Runs `dgemma convert` in this process: exit code, stdout, stderr."""

    def call(*argv: object) -> tuple[int, str, str]:
        code = cli.main(["convert", *map(str, argv)])
        return code, *capsys.readouterr()

    return call


def headers(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Stored names, dtypes and shapes."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            for name in file.keys():
                part = file.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
    return found


def parameters(folder: Path) -> dict[str, np.ndarray]:
    """What arrives in a model, unpacked, float32."""
    opened, found = weights.Checkpoint.open(folder), {}
    for name, parts in opened.read():
        path, _, last = name.rpartition(".")
        array = opened.formats[path].unpack(parts, mx.float32) if len(parts) > 1 else parts[last]
        found[name] = np.array(array.astype(mx.float32))
    return found


def digest(folder: Path) -> str:
    """Of every byte of every file of a folder."""
    marks = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        marks.update(path.name.encode() + (path.read_bytes() if path.is_file() else b""))
    return marks.hexdigest()


def canvas_logits(model, seed: int = 0) -> np.ndarray:
    """Logits of a canvas behind a prompt with a picture."""
    rng = np.random.RandomState(seed)
    image = preprocess(rng.randint(0, 255, (96, 48, 3)).astype(np.uint8), budget=70)
    ids = [2, tiny.BEGIN_IMAGE, *[tiny.IMAGE] * image.soft_tokens, tiny.END_IMAGE, *rng.randint(10, 90, 5)]
    caches = model.make_caches()
    model.prefill(np.array([ids]), model.encode_images([image]), caches)
    return np.array(model.canvas_logits(mx.array(rng.randint(0, 90, (1, tiny.CANVAS))), caches))


def rounded(folder: Path, formats: dict[str, Format], dtype: mx.Dtype = mx.float32) -> dict[str, mx.array]:
    """The parameters of an unquantised float32 checkpoint, those of `formats` packed and unpacked here."""
    found = {}
    for name, array in parameters(folder).items():
        fmt, array = formats.get(name.removesuffix(".weight")), mx.array(array)
        if fmt is None:
            found[name] = array.astype(dtype).astype(mx.float32)
            continue
        parts = fmt.pack(array)
        if fmt.mode == "affine":
            parts |= {part: parts[part].astype(dtype) for part in ("scales", "biases")}
        found[name] = fmt.unpack(parts, mx.float32)
    return found


# -- what it computes -------------------------------------------------------------------------------------------------

FORMATS = [Format.of(bits=bits, group_size=group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64)]
FORMATS += [Format.of(mode) for mode in DEFAULTS if mode != "affine"]
CASES = [(fmt, "default", False) for fmt in FORMATS]
CASES += [(Format.of(mode), recipe, False) for mode in DEFAULTS for recipe in RECIPES]
CASES += [(Format.of(group_size=32), "uniform", True), (Format.of("mxfp8"), "default", True)]


def of(path: str, recipe: str, eyes: bool, chosen: Format, width: int) -> Format | None:
    """What the recipes promise of a module, said once more: by its name alone."""
    if path.startswith(("vision_tower", "embed_vision")):
        wanted = (chosen,) if eyes else ()
    elif recipe != "uniform" and any(part in path for part in ("self_attn", "embed_tokens", "router")):
        wanted = (FINE, FINE_32)
    else:
        wanted = (FINE, FINE_32) if recipe == "mlx-vlm" and ".mlp." in path else (chosen,)
    return next((fmt for fmt in wanted if width % fmt.group_size == 0), None)


@pytest.mark.parametrize("chosen, recipe, eyes", dict.fromkeys(CASES), ids=str)
def test_a_conversion_computes_what_rounding_in_memory_computes(source, out, chosen, recipe, eyes):
    done = convert(source, out, chosen, recipe, vision=eyes)
    opened = weights.Checkpoint.open(out)
    model = weights.load(source, dtype=mx.float32)
    matrices = {name: shape[-1] for name, shape in opened.shapes.items() if name.endswith(".weight") and len(shape) > 1}
    wanted = {name.removesuffix(".weight"): of(name, recipe, eyes, chosen, width) for name, width in matrices.items()}
    assert opened.formats == {path: fmt for path, fmt in wanted.items() if fmt} == done.plan.formats
    model.load_weights(list(rounded(source, opened.formats).items()), strict=False)
    expected, found = canvas_logits(model), canvas_logits(weights.load(out, dtype=mx.float32))
    scale = np.abs(expected).max()
    assert np.abs(found - expected).max() <= (1e-3 * scale if backend.is_gpu() else 0)  # a CPU unpacks: the same numbers


def test_a_copy_is_bit_for_bit_the_source(source, out):
    """transformers' names and tensors, too: what was not quantised can be read by it as before."""
    done = convert(source, out, None)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys() and done.plan.formats == {}
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_tensors_larger_than_a_piece_are_written_piece_by_piece(source, out, tmp_path, monkeypatch):
    whole = convert(source, out, Format.of("mxfp4"))
    monkeypatch.setattr(writer, "PIECE", 1000)  # 15 rows of 64: never a whole number of pieces
    pieces = convert(source, tmp_path / "pieces", Format.of("mxfp4"))
    one, two = load_file(out / "model.safetensors"), load_file(tmp_path / "pieces" / "model.safetensors")
    assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)
    assert whole.plan.nbytes == pieces.plan.nbytes == (out / "model.safetensors").stat().st_size


# -- from packed sources ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [Format.of(mode) for mode in DEFAULTS], ids=str)
def test_unpacking_gives_the_rounded_numbers_and_an_unquantised_config(source, out, tmp_path, chosen):
    packed = convert(source, tmp_path / "packed", chosen)
    convert(tmp_path / "packed", out, None)
    expected, found = rounded(source, packed.plan.formats), parameters(out)
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert not {"quantization", "quantization_config"} & json.loads((out / "config.json").read_text()).keys()
    assert {dtype for dtype, _ in headers(out).values()} == {"F32"}


@pytest.mark.parametrize("chosen", [Format.of(mode) for mode in DEFAULTS], ids=str)
def test_what_has_its_format_is_not_rounded_again(source, out, tmp_path, chosen):
    convert(source, tmp_path / "packed", chosen)
    convert(tmp_path / "packed", out, chosen)
    before, after = load_file(tmp_path / "packed" / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)


def test_another_format_is_packed_from_the_unpacked_numbers(source, out, tmp_path):
    convert(source, tmp_path / "packed", Format.of("nvfp4"), "uniform")
    convert(tmp_path / "packed", out, Format.of("mxfp8"), "uniform")
    convert(tmp_path / "packed", tmp_path / "plain", None)
    expected, found = rounded(tmp_path / "plain", weights.Checkpoint.open(out).formats), parameters(out)
    assert all(np.array_equal(expected[name], found[name]) for name in expected)


def test_experts_one_tensor_each_are_stacked(source, out, tmp_path):
    tensors = {}
    for name, array in load_file(source / "model.safetensors").items():
        if ".experts.gate_up_proj" in name:
            for kind, half in zip(("gate", "up"), np.split(array, 2, axis=1)):
                stem = name.replace("gate_up_proj", "")
                tensors |= {f"{stem}{i}.{kind}_proj.weight": np.ascontiguousarray(one) for i, one in enumerate(half)}
        else:
            tensors[name] = array
    split = store(tmp_path / "split", roomy(), tensors)
    convert(split, out, None)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)


# -- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, dtype", [("BF16", mx.bfloat16), ("F16", mx.float16), ("F32", mx.float32)])
def test_the_rest_and_the_scales_are_in_the_dtype_asked_for(source, out, name, dtype):
    done = convert(source, out, Format.of(), dtype=dtype)
    assert {dtype for dtype, _ in headers(out).values()} == {"U32", name}
    expected, found = rounded(source, done.plan.formats, dtype), parameters(out)
    assert all(np.array_equal(expected[one], found[one]) for one in expected)
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).rpartition(".")[2]
    assert weights.Checkpoint.open(out).dtype == dtype


def test_each_tensor_keeps_its_dtype_unless_told(out, tmp_path):
    tensors = tiny.weights(roomy())
    half = {name: array.astype(np.float16) if "proj" in name else array for name, array in tensors.items()}
    convert(store(tmp_path / "half", roomy(), half), out, None)
    assert {"norm" in name: dtype for name, (dtype, _) in headers(out).items() if "proj" in name or "norm" in name} == {
        False: "F16",
        True: "F32",
    }


def test_scales_come_of_the_exact_numbers_and_are_rounded_once(out, tmp_path):
    half = {name: array.astype(np.float16) for name, array in tiny.weights(roomy()).items()}
    folder = store(tmp_path / "half", roomy(), half)
    done = convert(folder, out, Format.of(bits=3), dtype=mx.float32)
    expected, found = rounded(folder, done.plan.formats), parameters(out)
    assert all(np.array_equal(expected[name], found[name]) for name in expected)


def test_numbers_beyond_float16_are_not_made_infinite(out, tmp_path):
    tensors = tiny.weights(roomy())
    tensors["model.decoder.norm.weight"][3] = 1e5
    with pytest.raises(OptionError, match="tensor model.decoder.norm.weight has numbers beyond float16's 65,504; take"):
        convert(store(tmp_path / "big", roomy(), tensors), out, dtype=mx.float16)
    assert not out.exists() and len(list(tmp_path.iterdir())) == 1


# -- widths that do not fit ---------------------------------------------------------------------------------------------


def test_what_does_not_fit_stays_and_is_counted(out, checkpoint, run):
    """Hidden 32, dense MLP 64, experts 24: groups of 64 fit the dense down projection only, 8 bits take groups of 32."""
    done = convert(checkpoint, out, Format.of())
    chosen = {path for path, fmt in done.plan.formats.items() if fmt == Format()}
    assert chosen == {f"layers.{i}.mlp.down_proj" for i in range(3)} | {"self_conditioning.down_proj"}
    assert set(done.plan.formats.values()) == {Format(), FINE, FINE_32}  # o_proj is 64 wide, and 128 in full layers
    assert "layers.0.experts.down_proj" in done.unfit and "layers.0.mlp.gate_proj" in done.unfit
    assert len(done.unfit) == 2 + 3 * 4  # self-conditioning's gate and up; the MLP's, and both stacks of experts
    code, printed, said = run(checkpoint, out, "--overwrite")
    assert (code, said) == (0, "") and "14 of 33 matrices stay unquantised, their width being no multiple" in printed


def test_a_format_that_fits_nothing_is_refused():
    raw = tiny.config("wide")
    raw["text_config"] |= {"num_attention_heads": 2, "num_key_value_heads": 1}  # nothing is 128 wide
    with pytest.raises(OptionError, match="no matrix of this model is as wide as whole groups of 128; take smaller groups"):
        choose(ModelConfig.from_dict(raw), Format.of(group_size=128), "uniform")


# -- files ------------------------------------------------------------------------------------------------------------


def test_shards_are_small_enough_whole_and_of_one_conversion(source, out, tmp_path):
    most = 30_000
    done = convert(source, out, shard_size=most)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files, marks, total = sorted(out.glob("*.safetensors")), set(), 0
    assert [path.name for path in files] == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    for path in files:
        with safe_open(path, "numpy") as file:
            marks.add((file.metadata()["format"], file.metadata()["dgemma"]))
            sizes = {name: file.get_tensor(name).nbytes for name in file.keys()}
        assert sum(sizes.values()) <= most or len({ours(name).rpartition(".")[0] for name in sizes}) == 1
        assert {index["weight_map"].pop(name) for name in sizes} == {path.name}
        total += sum(sizes.values())
    assert not index["weight_map"] and index["metadata"] == {"total_size": total}
    assert 3 < len(files) <= 2 * total / most + 1  # two neighbours together are too large for one
    assert len(marks) == 1 and marks.pop()[0] == "mlx"
    assert done.plan.nbytes == sum(path.stat().st_size for path in files)
    convert(source, tmp_path / "again", shard_size=most)
    shutil.copy(tmp_path / "again" / files[1].name, files[1])
    with pytest.raises(CheckpointError, match="are of two conversions"):
        weights.Checkpoint.open(out)


def test_tensors_are_aligned_in_their_file(source, out):
    convert(source, out, Format.of("nvfp4"), "uniform", dtype=mx.bfloat16)
    data = (out / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            size = {"U32": 4, "BF16": 2, "U8": 1}[entry["dtype"]]
            assert (8 + length + entry["data_offsets"][0]) % size == 0


def test_small_files_come_along_and_nothing_else(source, out, tmp_path):
    folder = tmp_path / "full"
    shutil.copytree(source, folder)
    for name in ("special_tokens_map.json", "merges.txt", "spiece.model", "preprocessor_config.json", "LICENSE"):
        (folder / name).write_text(name)
    for name in ("tokenizer.safetensors", "tokenizer.bin", "run.py", "odd.json"):
        (folder / name).write_text("not wanted")
    (folder / "README.md").write_text("the old card")
    (folder / "tokenizer_old").mkdir()
    (tmp_path / "blob").write_text("a file of Hugging Face's cache")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("../blob")
    os.mkfifo(folder / "tokenizer.pipe")
    index = {"weight_map": dict.fromkeys(headers(source), "model.safetensors")}  # so that tokenizer.safetensors is none
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(folder, out)
    names = {path.name for path in out.iterdir()}
    assert names == {
        "config.json", "model.safetensors", "model.safetensors.index.json", "README.md", "tokenizer.json",
        "tokenizer_config.json", "generation_config.json", "processor_config.json", "chat_template.jinja",
        "special_tokens_map.json", "merges.txt", "spiece.model", "preprocessor_config.json", "LICENSE",
    }  # fmt: skip
    assert (out / "chat_template.jinja").read_bytes() == (folder / "chat_template.jinja").read_bytes()
    words = out / "tokenizer.json"
    assert words.read_text() == "a file of Hugging Face's cache" and not words.is_symlink()
    assert "the old card" not in (out / "README.md").read_text()


def test_the_model_card_says_what_it_is_and_how_to_run_it(source, out, run):
    run(source, out, "--mode", "mxfp8")
    text = (out / "README.md").read_text()
    parts = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in text.splitlines() if line.startswith("| ")}
    assert parts["experts"][0] == "mxfp8" and parts["vision tower"][0] == "float32"
    assert parts["attention"][0] == "8 bit, groups of 64; float32"
    total = sum(int(cells[1].strip(" |").replace(",", "")) for name, cells in parts.items() if name != "part")
    assert total == json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    bits = 8 * (out / "model.safetensors").stat().st_size / weights_count(source)
    assert f"{bits:.2f} bits per weight" in text and "by the recipe `default`, from `source` by dgemma" in text
    assert 'dgemma generate --model out "' in text and "mlx_vlm.generate --model out --image" in text
    assert "`source`" in text and str(source.parent) not in text  # it may be published: no paths of this machine
    run(source, out, "--quantize-vision", "--group-size", "32", "--overwrite")
    assert "mlx_vlm.generate --model out --image" not in (out / "README.md").read_text()


def weights_count(folder: Path) -> int:
    return sum(array.size for array in load_file(folder / "model.safetensors").values())


# -- config.json ------------------------------------------------------------------------------------------------------


def test_the_config_is_spelled_as_released_and_means_the_same(source, out):
    convert(source, out)
    before, after = ModelConfig.read(source), ModelConfig.read(out)
    assert (after.text, after.vision) == (before.text, before.vision)
    text = json.loads((out / "config.json").read_text())["text_config"]
    assert "per_layer_config" not in text
    assert (text["global_head_dim"], text["num_global_key_value_heads"]) == (32, 1)


def test_layers_that_the_released_spelling_cannot_say_stay_as_they_were():
    raw = tiny.config("causal")
    raw["text_config"]["per_layer_config"]["3"]["num_key_value_heads"] = 2
    written = Plan.of(raw).config
    assert written["text_config"]["per_layer_config"] == raw["text_config"]["per_layer_config"]
    assert ModelConfig.from_dict(written).text == ModelConfig.from_dict(raw).text


def test_layer_kinds_and_the_dtype_are_written_out():
    raw = tiny.config("ring")
    del raw["text_config"]["layer_types"], raw["dtype"]
    raw |= {"torch_dtype": "float32"}
    raw["text_config"] |= {"dtype": "float32"}
    written = Plan.of(raw, dtype=mx.float16).config
    assert written["text_config"]["layer_types"] == [tiny.SLIDING] * 5 + [tiny.FULL]
    assert [written["dtype"], written["torch_dtype"], written["text_config"]["dtype"]] == ["float16"] * 3
    assert "dtype" not in written["vision_config"]


def test_quantization_has_a_default_and_an_entry_for_every_other_format(source, out):
    convert(source, out, Format.of("mxfp4"))
    config = json.loads((out / "config.json").read_text())
    found = config["quantization"]
    assert config["quantization_config"] == found
    entries = {path: entry for path, entry in found.items() if isinstance(entry, dict)}
    assert {key: found[key] for key in found.keys() - entries.keys()} == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    stored = headers(out)
    assert entries and all(entry == FINE.settings and f"{path}.scales" in stored for path, entry in entries.items())
    assert "model.decoder.embed_tokens" in entries and "model.decoder.layers.0.experts.gate_up_proj" not in entries
    assert "model.decoder.layers.0.experts.gate_up_proj.weight" in stored


def test_the_source_config_is_not_changed_by_planning():
    raw = roomy()
    kept = copy.deepcopy(raw)
    Plan.of(raw, {"embed_tokens": Format()})
    assert raw == kept


def test_an_older_quantisation_leaves_no_trace(source, out, tmp_path):
    convert(source, tmp_path / "packed", Format.of("nvfp4"))
    convert(tmp_path / "packed", out, Format.of(bits=5), "uniform")
    assert json.loads((out / "config.json").read_text())["quantization"] == Format.of(bits=5).settings


def test_a_checkpoint_without_eyes_says_so(source, out, tmp_path):
    blind = {name: array for name, array in load_file(source / "model.safetensors").items() if "vision" not in name}
    convert(store(tmp_path / "blind", roomy(), blind), out)
    assert json.loads((out / "config.json").read_text())["vision_config"] is None
    assert weights.Checkpoint.open(out).config.vision is None
    assert "pipeline_tag: text-generation" in (out / "README.md").read_text()


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(run, *argv: object) -> str:
    """The one line with which `dgemma convert` refuses."""
    code, printed, said = run(*argv)
    assert (code, printed, said.count("\n")) == (2, "", 1), (code, printed, said)
    return said.removeprefix("dgemma: ").rstrip("\n")


@pytest.mark.parametrize(
    "options, message",
    [
        (("--mode", "q4"), "quantisation mode is 'q4'; allowed: affine, mxfp4, mxfp8, nvfp4"),
        (("--bits", "7"), "7 bits in groups of 64; affine has 2, 3, 4, 5, 6, 8 bits in groups of 32, 64, 128"),
        (("--mode", "mxfp4", "--bits", "8"), "mxfp4 has 4 bits in groups of 32, not 8 in 32"),
        (("--recipe", "best"), "recipe is 'best'; allowed: default, mlx-vlm, uniform"),
        (("--dtype", "float64"), "dtype is 'float64'; allowed: float32, float16, bfloat16"),
        (("--shard-size", "0"), "--shard-size is 0; a number of GB above 0 is needed"),
        (("--shard-size", "nan"), "--shard-size is nan; a number of GB above 0 is needed"),
        (("--no-quantize", "--bits", "4"), "--no-quantize packs nothing; what says how to pack (--mode, --bits, ...) has no"),
        (("--no-quantize", "--recipe", "uniform"), "--no-quantize packs nothing"),
        (("--no-quantize", "--quantize-vision"), "--no-quantize packs nothing"),
    ],
)
def test_options_that_mean_nothing_are_refused(run, source, out, options, message):
    assert refused(run, source, out, *options).startswith(message)
    assert not out.exists()


def test_a_dtype_of_the_library_is_checked(source, out):
    with pytest.raises(OptionError, match="dtype is mlx.core.int8; allowed: float32, float16, bfloat16"):
        convert(source, out, dtype=mx.int8)


def test_folders_that_must_not_be_written_are_refused(run, tmp_path, source):
    folder = tmp_path / "place"
    folder.mkdir()
    model = folder / "model"
    shutil.copytree(source, model)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_text("x")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.json").write_text('{"model_type": "gemma3"}')
    before = digest(tmp_path)
    for name, message in (
        (model, "is inside the checkpoint that is read"),
        (model / "inner", "is inside the checkpoint that is read"),
        (tmp_path / "link", "is inside the checkpoint that is read"),
        (folder, "is not empty and no DiffusionGemma; only a checkpoint is overwritten"),
        (tmp_path / "photos", "is not empty and no DiffusionGemma; only a checkpoint is overwritten"),
        (tmp_path / "project", "is not empty and no DiffusionGemma; only a checkpoint is overwritten"),
        ("", "the folder to write has an empty name; give one"),
        (tmp_path / "file", "is a file; give the name of a folder"),
        (tmp_path / "no" / "out", "there is no folder"),
        ("/proc", "is where a disk is mounted; give the name of a folder inside it"),
        (tmp_path / ("n" * 300), "not a folder that can be written (File name too long)"),
        ("nul\0", "not a folder that can be written (embedded null byte)"),
    ):
        if name != "/proc" or os.path.ismount("/proc"):
            assert message in refused(run, model, name, "--overwrite")
    (folder / "config.json").write_text('{"model_type": "diffusion_gemma"}')
    assert "holds the checkpoint that is read" in refused(run, model, folder, "--overwrite")
    (folder / "config.json").unlink()
    said = refused(run, model, tmp_path / "photos")
    assert said == f"{tmp_path}/photos: is not empty; give another name, or overwrite it (--overwrite)"
    assert digest(tmp_path) == before


def test_sources_that_are_none_are_refused_before_anything_is_made(run, tmp_path, out, source):
    assert "no such folder" in refused(run, tmp_path / "nowhere", out)
    damaged = tmp_path / "damaged"
    shutil.copytree(source, damaged)
    (damaged / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-10])
    assert "truncated" in refused(run, damaged, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]


# -- whole or not at all ----------------------------------------------------------------------------------------------


def test_an_empty_folder_may_be_there(source, out):
    out.mkdir()
    convert(source, out)
    assert weights.Checkpoint.open(out)


def test_overwriting_happens_at_the_end(source, out, tmp_path):
    convert(source, out, Format.of(bits=8))
    before, seen = digest(out), []
    (out / "extra.txt").write_text("x")

    def watch(done: int, total: int) -> None:
        seen.append((done, total, (out / "extra.txt").exists()))

    (out / "extra.txt").write_text("x")
    done = convert(source, out, Format.of(bits=2), overwrite=True, progress=watch)
    assert all(there for *_, there in seen) and not (out / "extra.txt").exists()
    assert [entry[0] for entry in seen] == sorted(entry[0] for entry in seen) and seen[-1][0] <= seen[-1][1] == done.plan.nbytes
    assert digest(out) != before and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_could_not_be_removed_is_not_overwritten(run, source, out, tmp_path, monkeypatch):
    convert(source, out)
    before, may = digest(tmp_path), os.access  # the tests may run as root, who may everything
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != out and may(path, mode))
    assert refused(run, source, out, "--overwrite") == f"{out}: cannot be overwritten (permission denied)"
    assert digest(tmp_path) == before


@pytest.mark.parametrize("name", ["語" * 85, "\U0001f600" * 63, "a" * 255, "a b`$(c)", "esc\x1b[31m\nape", os.fsdecode(b"\x80x")], ids=ascii)
def test_any_name_that_a_folder_can_have_will_do(run, source, tmp_path, name):
    code, printed, said = run(source, tmp_path / name, "--bits", "8")
    assert (code, said) == (0, "") and [path.name for path in tmp_path.iterdir()] == [name]
    assert printed.encode() and "\x1b" not in printed and len(printed.splitlines()) == 10
    words = [shlex.split(line) for line in (tmp_path / name / "README.md").read_text().splitlines() if "--model" in line]
    assert words and all(line[line.index("--model") + 1] == one_line(name) for line in words)


def test_no_file_can_be_read_as_one_before_the_end(source, out, tmp_path):
    seen = []

    def look(done: int, total: int) -> None:
        part, = tmp_path.glob(".out.*.part")
        seen.append([path.read_bytes()[:8] for path in part.glob("*.safetensors")])
        assert not (part / "config.json").exists()

    convert(source, out, shard_size=100_000, progress=look)
    assert len(seen[0]) > 1 and {start for starts in seen for start in starts} == {bytes(8)}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_ends_early_leaves_what_was_there(source, out, tmp_path, error, overwrite):
    if overwrite:
        convert(source, out, Format.of(bits=8))
    before = digest(tmp_path)

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise error

    with pytest.raises(error):
        convert(source, out, Format.of(bits=2), overwrite=overwrite, progress=stop)
    assert digest(tmp_path) == before


def test_ctrl_c_is_one_line(run, source, out, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Writer, "save", interrupt)
    assert run(source, out) == (130, "", "dgemma: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_comes_into_being_meanwhile_is_kept(source, out, tmp_path):
    def settle(done: int, total: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "mine").write_text("x")

    with pytest.raises(OutputError, match="out: cannot be written \\(Directory not empty\\); nothing was kept"):
        convert(source, out, progress=settle)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_the_old_checkpoint_is_put_back_if_the_new_one_cannot_take_its_place(source, out, tmp_path, monkeypatch):
    convert(source, out)
    before, rename = digest(tmp_path), Path.rename

    def refuse(self, target):
        if self.suffix == ".part":
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OutputError, match="cannot be written \\(Permission denied\\); nothing was kept"):
        convert(source, out, Format.of(bits=8), overwrite=True)
    assert digest(tmp_path) == before


KILLED = """\
import sys
import dgemma
from dgemma.convert import convert
print("ready", flush=True)
sys.stdin.readline()
convert(sys.argv[1], sys.argv[2], shard_size=20_000, progress=lambda *_: print("wrote", flush=True))
"""


def test_killed_at_any_moment_there_is_nothing_or_all(source, tmp_path):
    before, moments, count = digest(source), random.Random(5), len(tiny.weights(roomy()))
    kills = [(moments.randrange(count), 0.0) for _ in range(7)] + [(count, 0.03 * moments.random()) for _ in range(3)]
    outs = [tmp_path / f"out{number}" for number in range(len(kills))]
    children = [
        subprocess.Popen([sys.executable, "-c", KILLED, source, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for out in outs
    ]
    for child, (tensors, seconds) in zip(children, kills):
        assert child.stdout.readline() == b"ready\n"
        child.stdin.write(b"\n")
        child.stdin.close()
        for _ in range(tensors):
            assert child.stdout.readline() == b"wrote\n"
        time.sleep(seconds)
        child.kill()
        child.wait()
        child.stdout.close()
    assert digest(source) == before
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert left, "no run was killed while it wrote"
    for path in left:
        with pytest.raises(CheckpointError):
            weights.Checkpoint.open(path)
    for out in outs:
        assert not out.exists() or weights.Checkpoint.open(out)
    name = left[0].name.split(".")[1]
    convert(source, tmp_path / name, overwrite=True)  # a later run of that name takes the rest away
    assert not left[0].exists() and all(path.exists() for path in left[1:])


def test_leftovers_of_others_are_kept_and_an_old_checkpoint_is_put_back(source, out, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    keep = [f".out.{os.getppid()}.part", f".other.{ended.pid}.part", f".out.{ended.pid}.part.bak", f".out2.{ended.pid}.part"]
    for name in (*keep, f".out.{ended.pid}.part", f".out.{os.getpid()}.part"):
        (tmp_path / name).mkdir()
    convert(source, tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / f".out.{ended.pid}.old")  # killed between two renames
    with pytest.raises(OutputError, match="is not empty"):
        convert(source, out)
    assert weights.Checkpoint.open(out)
    convert(source, out, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {*keep, "out"}


def test_a_link_is_no_leftover(source, out, tmp_path):
    link = tmp_path / ".out.99999999999.old"  # no process has such an id
    link.symlink_to(source)
    convert(source, out)
    assert link.is_symlink() and not out.is_symlink() and (source / "config.json").exists()


# -- full disks -------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_too_small_is_said_before_the_work(run, source, out, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1000))
    said = refused(run, source, out)
    assert said.startswith(f"{out}: needs ") and said.endswith(" bytes, but 1,000 are free on that disk; make room")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_is_one_line_and_nothing_is_kept(run, source, tmp_path, monkeypatch):
    disk, need = tmp_path / "disk", convert(source, tmp_path / "probe", None).plan.nbytes
    disk.mkdir()
    mounted = os.geteuid() == 0 and sys.platform == "linux" and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={need // 2}", "tmpfs", str(disk)], capture_output=True
    ).returncode  # fmt: skip
    if not mounted:
        pytest.skip("only root can mount a small disk")
    try:
        assert "needs" in refused(run, source, disk / "out", "--no-quantize")
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 0, 10**12))  # others fill it
        for shard in ("5", "0.00003"):
            said = refused(run, source, disk / "out", "--no-quantize", "--shard-size", shard)
            assert said == f"{disk}/out: cannot be written (No space left on device); nothing was kept"
            assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_file_that_may_not_grow_so_large_is_one_line_and_nothing_is_kept(run, source, out, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        said = refused(run, source, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said == f"{out}: cannot be written (File too large); nothing was kept"
    assert not list(tmp_path.iterdir())


# -- the writer, for scripts ------------------------------------------------------------------------------------------


def test_tensors_may_come_from_anywhere_in_any_order(source, out, tmp_path):
    done = convert(source, tmp_path / "whole", Format.of("mxfp8"), shard_size=30_000)
    given = list(parameters(source).items())
    random.Random(1).shuffle(given)
    plan = Plan.of(roomy(), done.plan.formats, mx.float32, 30_000)
    with Writer(out, plan) as made:
        for name, array in given:
            made.put(name, mx.array(array))
    expected = parameters(tmp_path / "whole")
    assert all(np.array_equal(array, expected[name]) for name, array in parameters(out).items())
    names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in (out, tmp_path / "whole")]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda given: given.pop(), "tensor .* is missing \\(1 of \\d+ in all\\)"),
        (lambda given: given.append(given[0]), "tensor .* came twice"),
        (lambda given: given.append(("odd", mx.zeros(3))), "tensor odd has no place in this model"),
        (lambda given: given.insert(0, ("norm.weight", mx.zeros(3))), "tensor norm.weight has shape \\(3,\\); the config asks"),
    ],
)
def test_a_script_that_gives_other_tensors_is_told(out, tmp_path, change, message):
    plan = Plan.of(roomy(), {"embed_tokens": Format()}, mx.bfloat16)
    given = [(name, mx.zeros(shape)) for name, shape in plan.shapes.items()]
    change(given)
    with pytest.raises(CheckpointError, match=message), Writer(out, plan) as made:
        for name, array in given:
            made.put(name, array)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "path, fmt, message",
    [
        ("norm", Format(), "norm is no matrix of this model that can be packed"),
        ("nowhere", Format(), "nowhere is no matrix of this model"),
        ("embed_tokens", Format(group_size=128), "embed_tokens is 64 wide, which 4 bit, groups of 128 does not divide"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(path, fmt, message):
    with pytest.raises(OptionError, match=message):
        Plan.of(roomy(), {path: fmt})


# -- the command ------------------------------------------------------------------------------------------------------


def example_lines() -> list[str]:
    text = cli.parser()._subparsers._group_actions[0].choices["convert"].format_help()
    return [line.strip() for line in text.partition("examples:\n")[2].splitlines()]


@pytest.mark.parametrize("line", example_lines())
def test_every_example_of_the_help_runs(line, run, source, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "DEMO", source)
    monkeypatch.chdir(tmp_path)
    code, printed, said = run(*shlex.split(line)[2:])
    name = shlex.split(line)[3]
    assert (code, said) == (0, "") and printed.startswith(f"{name}: 1 file, ")
    assert weights.load(name, dtype=mx.float32) and info.read(name)


def test_every_option_has_a_help_text():
    assert all(action.help for action in cli.parser()._subparsers._group_actions[0].choices["convert"]._actions)


def test_the_summary_says_files_bytes_and_bits(run, source, out):
    code, printed, said = run(source, out, "--mode", "nvfp4", "--shard-size", "0.00005")
    count = len(list(out.glob("*.safetensors")))
    first, *parts = printed.splitlines()
    bits = 8 * sum(path.stat().st_size for path in out.glob("*.safetensors")) / weights_count(source)
    assert (code, said) == (0, "") and first.startswith(f"{out}: {count} files, ") and " kB, " in first
    assert first.endswith(f" {bits:.2f} bits per weight")
    assert any(part.split()[0] == "experts" and part.endswith("nvfp4") for part in parts)


def test_the_source_is_never_touched(run, source, out):
    before, times = digest(source), {path: path.stat().st_mtime_ns for path in source.iterdir()}
    run(source, out, "--quantize-vision", "--group-size", "32")
    run(source, out, "--overwrite", "--no-quantize")
    assert digest(source) == before and times == {path: path.stat().st_mtime_ns for path in source.iterdir()}


def test_every_number_of_a_packed_model_is_on_disk_once(source, out):
    convert(source, out)
    model = weights.load(out, dtype=mx.float32)
    assert {name for name, _ in tree_flatten(model.parameters())} <= {ours(name) for name in headers(out)} | {
        f"{ours(name)}.weight" for name in headers(out)
    }
