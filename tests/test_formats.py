"""Every format that mlx-vlm writes loads, and computes what mlx-vlm computes; other writers' spellings load the same.

`oracle/make_formats.py` made the goldens with mlx-vlm; nothing here needs it. The files are made anew, bit for bit.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on an NVIDIA GPU mlx would round float32 products to 10 bits

import dgemma  # noqa: F401: before mlx: it loads the BLAS that mlx then uses

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dgemma import backend, kernels, plain, weights
from dgemma.errors import CheckpointError, OptionError
from dgemma.formats import Format, Quantization
from dgemma.matrices import Packed
from dgemma.names import module
from oracle import cases, formats, ours, record, tiny

TOLERANCE = 1e-5 if not backend.is_gpu() else 1e-4  # of a tensor's largest value; measured on a CPU: 7e-7
KERNELS = [name for name, found in vars(kernels).items() if callable(found) and hasattr(plain, name)]

Tensors = dict[str, mx.array]
PACKED, MIXED = "affine-4-64", "every-mode"


@pytest.fixture(scope="session")
def converted(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a conversion by its name; tests must not change it."""
    root = tmp_path_factory.mktemp("converted")
    return functools.lru_cache(maxsize=None)(lambda name: formats.rebuild(root / name, name))


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    """The Hugging Face checkpoint that was converted; tests must not change it."""
    return tiny.write_checkpoint(tmp_path_factory.mktemp("original"), formats.MODEL)


def measured(folder: Path, prompts: dict[str, cases.Case]) -> dict[str, np.ndarray]:
    """What dgemma computes of every prompt: what peer.measure measures, under the goldens' names."""
    model, found = ours.load_folder(folder), {}
    for name, case in prompts.items():
        prompt, (first, second) = cases.prompt(case, ours.cut), formats.canvases(case)
        features, caches = model.encode_images(ours.patches(prompt)), model.make_caches()
        model.prefill(prompt.ids, features, caches)
        logits = model.canvas_logits(mx.array(first), caches)
        conditioned = model.canvas_logits(mx.array(second), caches, mx.softmax(logits / 0.7, axis=-1))
        found |= {f"{name}/logits/first": np.array(logits), f"{name}/logits/conditioned": np.array(conditioned)}
        found |= {f"{name}/vision/{i}": np.array(rows) for i, rows in enumerate(features)}
    return found


def differences(found: dict[str, np.ndarray], golden: dict[str, np.ndarray]) -> dict[str, float]:
    """The largest difference of each tensor from its golden, against the golden's largest value."""
    return {name: record.difference(record.thin(name, array), golden[name]) for name, array in found.items()}


def keep_packed(monkeypatch) -> None:
    monkeypatch.setattr(weights.Checkpoint, "unpacks", lambda self, dtype: False)


def as_on_a_gpu(monkeypatch) -> None:
    keep_packed(monkeypatch)
    for name in KERNELS:
        monkeypatch.setattr(kernels, name, getattr(plain, name))


WAYS = {"as loaded here": lambda monkeypatch: None, "packed": keep_packed, "packed, plain kernels": as_on_a_gpu}
# Every format in every way, but the CPU's packed products, which are slow, not for every group size.
RUNS = [(name, way) for name in formats.CONVERSIONS for way in WAYS if way != "packed" or not name.endswith(("-32", "-128"))]


# -- mlx-vlm's files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", formats.CONVERSIONS)
def test_the_files_are_mlx_vlm_s_bit_for_bit(name, converted):
    made = formats.listed(mx.load(str(converted(name) / "model.safetensors")))
    wanted = {key: (dtype, shape, crc) for key, (dtype, shape, crc) in formats.Listing.read(name).tensors.items()}
    assert made.keys() == wanted.keys()
    assert not [key for key in wanted if made[key] != wanted[key]]


@pytest.mark.parametrize("name, way", RUNS)
def test_logits_are_mlx_vlm_s(name, way, converted, monkeypatch):
    WAYS[way](monkeypatch)
    golden = record.read(formats.GOLDENS / f"{name}.npz")
    found = measured(converted(name), formats.prompts(formats.CONVERSIONS[name].variant))
    assert found.keys() == {key for key in golden if not key.startswith("grey/")}
    far = {key: value for key, value in differences(found, golden).items() if not value < TOLERANCE}
    assert not far


def test_a_format_that_is_read_wrongly_would_be_seen():
    """Conversions of other numbers have other logits, by far more than what counts as agreement."""
    of: dict[int, np.ndarray] = {}
    for name in formats.CONVERSIONS:
        words = [entry for entry in formats.Listing.read(name).tensors.items() if "vision" not in entry[0]]
        of[hash(str(words))] = record.read(formats.GOLDENS / f"{name}.npz")["words/logits/first"]
    assert len(of) > 24
    distances = sorted(record.difference(one, other) for one, other in itertools.combinations(of.values(), 2))
    assert distances[0] > 100 * TOLERANCE


@pytest.mark.parametrize("name", [one for one in formats.CONVERSIONS if formats.Listing.read(one).packs_patches])
def test_packed_patches_are_seen_where_mlx_vlm_sees_grey(name, converted):
    golden = record.read(formats.GOLDENS / f"{name}.npz")
    grey = {key.removeprefix("grey/"): array for key, array in golden.items() if key.startswith("grey/")}
    if not grey:  # mlx multiplies whole numbers with affine matrices only: mlx-vlm fails
        assert "nvfp4" in name
        return
    found = measured(converted(name), {"picture": formats.PROMPTS["picture"]})
    seen = {key.removeprefix("picture/"): array for key, array in found.items()}
    assert seen.keys() == grey.keys()
    for key, array in seen.items():
        assert record.difference(record.thin(f"grey/{key}", array), grey[key]) > 0.02


@pytest.mark.parametrize("name", formats.CONVERSIONS)
def test_packed_matrices_stay_packed(name, converted, monkeypatch):
    """In the model every stored scale has its module, in the format that config.json gives; nothing is unpacked."""
    keep_packed(monkeypatch)
    found, model = formats.Listing.read(name), ours.load_folder(converted(name))
    held = {path: twin.format for path, twin in model.named_modules() if isinstance(twin, Packed)}
    stored = {key.removesuffix(".scales") for key in found.tensors if key.endswith(".scales")}
    assert held == {module(path): Format.of(**formats.settings(found, path)) for path in stored}


# -- other spellings --------------------------------------------------------------------------------------------------

EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|gate|up|down)_proj(?:\.(\w+))?$")


def separate(tensors: Tensors, config: dict) -> None:
    """Gate and up apart, in the files and in the entries of the config."""
    for name in [name for name in tensors if ".gate_up_proj" in name]:
        gate, up = mx.split(tensors.pop(name), 2, axis=-2)
        for half, array in (("gate_proj", gate), ("up_proj", up)):
            tensors[name.replace("gate_up_proj", half)] = array
    rename_entries(config, r"gate_up_proj", ("gate_proj", "up_proj"))


def one_an_expert(tensors: Tensors, config: dict) -> None:
    """A tensor for each expert and half, as the files of other mixtures have it."""
    separate(tensors, config)
    for name in [name for name in tensors if EXPERTS.match(name)]:
        stack, kind, part = EXPERTS.match(name).groups()
        for number, array in enumerate(tensors.pop(name)):
            tensors[f"{stack}.{number}.{kind}_proj.{part or 'weight'}"] = array


def one_an_expert_whole(tensors: Tensors, config: dict) -> None:
    """A tensor for each expert, gate and up together."""
    for name in [name for name in tensors if EXPERTS.match(name)]:
        stack, kind, part = EXPERTS.match(name).groups()
        for number, array in enumerate(tensors.pop(name)):
            tensors[f"{stack}.{number}.{kind}_proj.{part or 'weight'}"] = array


def suffixed(tensors: Tensors, config: dict) -> None:
    """`.weight` after the experts' names, as mlx-vlm writes them."""
    for name in [name for name in tensors if EXPERTS.match(name) and not EXPERTS.match(name)[3]]:
        tensors[f"{name}.weight"] = tensors.pop(name)


def prefixed(tensors: Tensors, config: dict) -> None:
    """`language_model.` before everything that reads text."""
    for name in [name for name in tensors if "vision" not in name]:
        tensors[f"language_model.{name}"] = tensors.pop(name)
    rename_entries(config, r"^model\.", ("language_model.model.",))


def rename_entries(config: dict, pattern: str, news: tuple[str, ...]) -> None:
    """Entries of `quantization`, those whose path has the pattern once under each new name."""
    for key in ("quantization", "quantization_config"):
        for path in [path for path in config.get(key, ()) if re.search(pattern, path)]:
            entry = config[key].pop(path)
            config[key] |= {re.sub(pattern, new, path): entry for new in news}


def with_leftovers(tensors: Tensors, config: dict) -> None:
    """Second copies of tied weights, and angles: what no model reads."""
    for prefix in ("", "language_model."):
        tensors[f"{prefix}lm_head.weight"] = mx.zeros((3, 5))
        tensors[f"{prefix}model.encoder.language_model.norm.weight"] = mx.zeros((4,))
        tensors[f"{prefix}model.decoder.rotary_emb.inv_freq"] = mx.zeros((4,))


SPELLINGS = (separate, one_an_expert, one_an_expert_whole, suffixed, prefixed, with_leftovers)


def read(folder: Path) -> tuple[Tensors, dict]:
    """The tensors and the config of a folder."""
    return mx.load(str(folder / "model.safetensors")), json.loads((folder / "config.json").read_text())


def write(folder: Path, config: dict, files: dict[str, Tensors], index: bool = False) -> Path:
    """A folder of these files, with an index that names them all or none; returns the folder."""
    (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        mx.save_safetensors(str(folder / name), tensors, metadata={"format": "mlx"})
    if index:
        named = {tensor: file for file, tensors in files.items() for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    return folder


def parameters(folder: Path) -> dict[str, np.ndarray]:
    """Everything that a loaded model holds."""
    return {name: np.array(array) for name, array in tree_flatten(weights.load(folder, dtype=mx.float32).parameters())}


@functools.lru_cache(maxsize=None)
def wanted(base: Path) -> dict[str, np.ndarray]:
    """What dgemma computes of every prompt with the usual spelling."""
    return measured(base, formats.PROMPTS)


def same(found: dict[str, np.ndarray], usual: dict[str, np.ndarray]) -> None:
    """Equal to the last bit."""
    assert found.keys() == usual.keys()
    assert not [name for name in usual if not np.array_equal(found[name], usual[name])]


@pytest.fixture(params=["Hugging Face", MIXED])
def base(request, original, converted) -> Path:
    """A folder in the usual spelling, plain or packed."""
    return original if request.param == "Hugging Face" else converted(request.param)


@pytest.mark.parametrize("spell", SPELLINGS)
def test_another_spelling_is_the_same_model(spell, base, tmp_path, monkeypatch):
    tensors, config = read(base)
    spell(tensors, config)
    write(tmp_path, config, {"model.safetensors": tensors})
    same(measured(tmp_path, formats.PROMPTS), wanted(base))
    keep_packed(monkeypatch)
    same(parameters(tmp_path), parameters(base))


def in_shards(tensors: Tensors) -> dict[str, Tensors]:
    names = sorted(tensors)  # weights, scales and biases of one matrix come to lie in different files
    return {f"model-0000{n + 1}-of-00003.safetensors": {name: tensors[name] for name in names[n::3]} for n in range(3)}


def in_a_sidecar(tensors: Tensors, path: str) -> dict[str, Tensors]:
    """The eyes in a file of their own, under names without `model.encoder`."""
    eyes = {name.removeprefix("model.encoder."): tensors.pop(name) for name in list(tensors) if "vision" in name}
    return {"model.safetensors": tensors, path: eyes}


def test_shards_with_an_index_are_the_same_model(base, tmp_path):
    tensors, config = read(base)
    write(tmp_path, config, in_shards(tensors), index=True)
    same(measured(tmp_path, formats.PROMPTS), wanted(base))


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("path", ["optiq/optiq_vision.safetensors", "optiq_vision.safetensors"])
def test_the_eyes_that_optiq_keeps_beside_are_found(path, index, base, tmp_path):
    tensors, config = read(base)
    files = in_a_sidecar(tensors, path)
    write(tmp_path, config, files)
    if index:  # OptiQ's names the text's files only
        named = {"weight_map": dict.fromkeys(files["model.safetensors"], "model.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(named))
    same(measured(tmp_path, formats.PROMPTS), wanted(base))


def test_a_file_without_eyes_reads_text(base, tmp_path):
    tensors, config = read(base)
    assert config["vision_config"]
    write(tmp_path, config, {"model.safetensors": {name: t for name, t in tensors.items() if "vision" not in name}})
    found = measured(tmp_path, {"words": formats.PROMPTS["words"]})
    same(found, {name: array for name, array in wanted(base).items() if name in found})
    assert ours.load_folder(tmp_path).config.vision is None


# -- what `quantization` says -----------------------------------------------------------------------------------------


def test_entries_of_single_modules():
    raw = {
        "group_size": 32, "bits": 4, "mode": "mxfp4",
        "model.decoder.embed_tokens": {"group_size": 64, "bits": 8},
        "model.decoder.layers.0.mlp.up_proj": {"bits": 5},
        "language_model.model.decoder.layers.1.self_attn.q_proj": {"mode": "nvfp4"},
        "model.decoder.layers.0.router.proj": False,
        "model.decoder.layers.1.router.proj": True,
        "model.decoder.layers.0.experts.gate_proj": {"bits": 3, "group_size": 32},
        "vision_tower.patch_embedder.input_proj": {"group_size": 128, "bits": 6},
    }  # fmt: skip
    found = Quantization.of(raw, module, "config.json")
    assert found.format("embed_tokens") == Format(mode="affine", bits=8, group_size=64)  # no mode: affine, not mxfp4
    assert found.format("layers.0.mlp.up_proj") == Format(mode="affine", bits=5, group_size=64)
    assert found.format("layers.1.self_attn.q_proj") == Format(mode="nvfp4", bits=4, group_size=16)
    assert found.format("layers.0.router.proj") is None
    assert found.format("layers.1.router.proj") == found.default == Format(mode="mxfp4", bits=4, group_size=32)
    assert found.format("layers.0.experts.gate_up_proj") == Format(mode="affine", bits=3, group_size=32)
    assert found.format("vision_tower.patch_embedder.input_proj") == Format(mode="affine", bits=6, group_size=128)
    assert found.format("layers.2.mlp.up_proj") == found.default


@pytest.mark.parametrize("settings", [{"bits": 7}, {"bits": 0}, {"group_size": 48}, {"mode": "nf4"}, {"mode": "mxfp4", "group_size": 64}])
def test_a_format_that_mlx_does_not_pack_is_none(settings):
    for make in (Format, Format.of):
        with pytest.raises(OptionError, match="affine has 2, 3|quantisation mode is 'nf4'|mxfp4 has 4 bits in groups of 32"):
            make(**settings)


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_either_key_and_false_for_what_is_not_quantised(key, converted, original, tmp_path, monkeypatch):
    keep_packed(monkeypatch)
    tensors, config = read(converted(PACKED))
    path = "model.decoder.layers.0.router.proj"
    for part in ("scales", "biases"):
        del tensors[f"{path}.{part}"]
    tensors[f"{path}.weight"] = read(original)[0][f"{path}.weight"]
    config[key] = config.pop("quantization") | {path: False}
    if key == "quantization":
        del config["quantization_config"]
    model = weights.load(write(tmp_path, config, {"model.safetensors": tensors}))
    assert not isinstance(model.layers[0].router.proj, Packed) and isinstance(model.layers[1].router.proj, Packed)


# -- refusals ---------------------------------------------------------------------------------------------------------

TABLE = "model.decoder.embed_tokens"
SETTINGS = {"group_size": 64, "bits": 4, "mode": "affine"}


def settings(**changes) -> Callable[[Tensors, dict], None]:
    """Another `quantization`; a value None drops the key."""

    def change(tensors: Tensors, config: dict) -> None:
        changed = {key: value for key, value in (SETTINGS | changes).items() if value is not None}
        config["quantization"] = config["quantization_config"] = changed

    return change


def dropped(*names: str) -> Callable[[Tensors, dict], None]:
    return lambda tensors, config: [tensors.pop(name) for name in names]


def added(name: str, array: Callable[[Tensors], mx.array]) -> Callable[[Tensors, dict], None]:
    return lambda tensors, config: tensors.update({name: array(tensors)})


def foreign(**method) -> Callable[[Tensors, dict], None]:
    """Another library's quantization_config."""

    def change(tensors: Tensors, config: dict) -> None:
        del config["quantization"]
        config["quantization_config"] = method

    return change


def one_expert_missing(number: int) -> Callable[[Tensors, dict], None]:
    def change(tensors: Tensors, config: dict) -> None:
        one_an_expert(tensors, config)
        for part in ("weight", "scales", "biases"):
            del tensors[f"model.decoder.layers.1.experts.{number}.down_proj.{part}"]

    return change


def one_expert_unlike(tensors: Tensors, config: dict) -> None:
    one_an_expert(tensors, config)
    name = "model.decoder.layers.1.experts.2.down_proj.scales"
    tensors[name] = tensors[name].astype(mx.bfloat16)


def halves_unlike(tensors: Tensors, config: dict) -> None:
    separate(tensors, config)
    name = "model.decoder.layers.0.experts.up_proj.weight"
    tensors[name] = tensors[name][..., :-1]


def a_half_missing(tensors: Tensors, config: dict) -> None:
    separate(tensors, config)
    del tensors["model.decoder.layers.0.experts.up_proj.scales"]


def narrow(tensors: Tensors, config: dict) -> None:
    """A width that no group divides."""
    config["text_config"]["intermediate_size"] = 120
    for name in tensors:
        if re.search(r"(mlp|self_conditioning)\.(gate|up)_proj\.", name) and "vision" not in name:
            tensors[name] = tensors[name][:120]


def a_vector(tensors: Tensors, config: dict) -> None:
    """A norm that somebody packed."""
    for part, array in (("weight", mx.zeros((16,), mx.uint32)), ("scales", mx.ones((2,))), ("biases", mx.ones((2,)))):
        tensors[f"model.decoder.norm.{part}"] = array


def without_quantization(tensors: Tensors, config: dict) -> None:
    del config["quantization"], config["quantization_config"]


def of(name: str) -> Callable[[Tensors], mx.array]:
    return lambda tensors: tensors[name]


def zeros(*shape: int, dtype: mx.Dtype = mx.float32) -> Callable[[Tensors], mx.array]:
    return lambda tensors: mx.zeros(shape, dtype)


DOWN = "model.decoder.layers.0.experts.down_proj"
NO_FORMAT = "which mlx has no format for; use the bf16 original or an MLX conversion of it"
UNTOLD = "tensor {T}.scales belongs to a quantised weight; config.json says nothing of it"
# Case: (conversion, what happens to its tensors and config, what is said). {T} is the embedding, ... is anything.
REFUSALS = {
    "more bits": (PACKED, settings(bits=8),
        "tensor {T}.weight has shape (96, 16); quantization in config.json (8 bit, groups of 64) asks for (96, 32)"),
    "fewer bits": (PACKED, settings(bits=3), "tensor {T}.weight has shape (96, 16); ... (3 bit, groups of 64) asks for (96, 12)"),
    "smaller groups": (PACKED, settings(group_size=32),
        "tensor {T}.scales has shape (96, 2); ... (4 bit, groups of 32) asks for (96, 4)"),
    "larger groups": (PACKED, settings(group_size=128),
        "tensor {T}.scales has shape (96, 2); ... (4 bit, groups of 128) asks for (96, 1)"),
    "another mode": ("affine-4-32", settings(mode="mxfp4", group_size=32), "tensor {T}.scales is F32; mxfp4 needs U8"),
    "no affine mode": ("mxfp4", settings(group_size=32),
        "tensor {T}.scales is U8; 4 bit, groups of 32 needs F32, F16, BF16"),
    "a mode of other groups": ("mxfp4", settings(mode="nvfp4", group_size=16),
        "tensor {T}.scales has shape (96, 4); ... (nvfp4) asks for (96, 8)"),
    "an unknown mode": (PACKED, settings(mode="nf4"),
        "quantization: quantisation mode is 'nf4'; allowed: affine, mxfp4, mxfp8, nvfp4"),
    "unknown bits": (PACKED, settings(bits=7),
        "quantization: 7 bits in groups of 64; affine has 2, 3, 4, 5, 6, 8 bits in groups of 32, 64, 128"),
    "a mode that has no such groups": (PACKED, settings(mode="mxfp8"),
        "quantization: mxfp8 has 8 bits in groups of 32, not 4 in 64"),
    "half a bit": (PACKED, settings(bits=4.5), "bits and group_size are 4.5 and 64; whole numbers are needed"),
    "no object": (PACKED, lambda t, c: c.update(quantization="4bit"), "quantization: a JSON object is expected, found str"),
    "an entry of wrong bits": (PACKED, settings(**{TABLE: {"bits": 8, "group_size": 64}}),
        "tensor {T}.weight has shape (96, 16); ... (8 bit, groups of 64)"),
    "an entry that is nonsense": (PACKED, settings(**{TABLE: {"bits": "8"}}),
        "quantization of {T}: bits and group_size are '8' and None"),
    "an entry that says false": (PACKED, settings(**{TABLE: False}), UNTOLD),
    "no quantization at all": (PACKED, without_quantization, UNTOLD),
    "a width that is not divided": (PACKED, narrow, "down_proj is 120 wide, which 4 bit, groups of 64 does not divide"),
    "no scales": (PACKED, dropped(f"{TABLE}.scales"), "tensor {T}.weight is quantised, but its scales are missing"),
    "no biases": (PACKED, dropped(f"{TABLE}.biases"), "tensor {T}.biases is missing"),
    "no packed weight": (PACKED, dropped(f"{TABLE}.weight"), "tensor {T}.weight is missing"),
    "biases where none belong": ("mxfp4", added(f"{TABLE}.biases", zeros(96, 4)),
        "tensor {T}.biases has no place in this model (1 such in all)"),
    "scales of whole numbers": (PACKED, added(f"{TABLE}.scales", zeros(96, 2, dtype=mx.int32)),
        "tensor {T}.scales is I32; 4 bit, groups of 64 needs F32, F16, BF16"),
    "a packed weight of floats": (PACKED, added(f"{TABLE}.weight", zeros(96, 16)),
        "tensor {T}.weight is F32; 4 bit, groups of 64 needs U32"),
    "a packed vector": (PACKED, a_vector, "tensor model.decoder.norm.weight is quantised; only matrices are"),
    "fp8": (PACKED, foreign(quant_method="fp8", weight_block_size=[128, 128]), f"quantised by fp8, {NO_FORMAT}"),
    "compressed-tensors": (PACKED, foreign(quant_method="compressed-tensors", format="pack-quantized", config_groups={}),
        f"quantised by compressed-tensors, {NO_FORMAT}"),
    "gptq, which has bits too": (PACKED, foreign(quant_method="gptq", bits=4, group_size=64),
        f"quantised by gptq, {NO_FORMAT}"),
    "an unknown method": (PACKED, foreign(load_in_4bit=True), f"quantised by an unknown method, {NO_FORMAT}"),
    "a method that is no word": (PACKED, foreign(quant_method={"a": [1]}), f"quantised by an unknown method, {NO_FORMAT}"),
    "an expert of 5,000 digits": (PACKED, added(f"model.decoder.layers.1.experts.{'9' * 5000}.down_proj", zeros(1)),
        f"tensor model.decoder.layers.1.experts.{'9' * 5000}.down_proj has no place in this model"),
    "an expert missing": (PACKED, one_expert_missing(1),
        "tensor model.decoder.layers.1.experts.down_proj...: its parts do not match, ('down', 1) (part, expert) is missing"),
    "the last expert missing": (PACKED, one_expert_missing(3),
        "tensor model.decoder.layers.1.experts.down_proj.weight has shape (3, 128, 16); ... asks for (4, 128, 16)"),
    "an expert unlike the others": (PACKED, one_expert_unlike,
        "experts.0.down_proj.scales and ...experts.2.down_proj.scales differ in shape or dtype; experts must be alike"),
    "halves unlike": (PACKED, halves_unlike,
        "experts.gate_proj.weight and ...experts.up_proj.weight do not fit together: (4, 128, 16), (4, 128, 15)"),
    "a half missing": (PACKED, a_half_missing,
        "layers.0.experts.gate_up_proj.scales: its parts do not match, ('up', None) (part, expert) is missing"),
    "an expert's tensor twice": ("bf16", added(DOWN, of(f"{DOWN}.weight")), "tensors ...down_proj... are the same weight"),
    "a tensor under two names": ("bf16", added("decoder.norm.weight", of("model.decoder.norm.weight")),
        "tensors ...decoder.norm.weight and ...decoder.norm.weight are the same weight"),
}  # fmt: skip


def refused(folder: Path, message: str) -> None:
    """Opening says this, on one line, and whose fault it is."""
    pattern = ".*".join(map(re.escape, message.replace("{T}", TABLE).split("...")))
    with pytest.raises(CheckpointError, match=pattern) as caught:
        weights.Checkpoint.open(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused(case, converted, tmp_path):
    name, change, message = REFUSALS[case]
    tensors, config = read(converted(name))
    change(tensors, config)
    refused(write(tmp_path, config, {"model.safetensors": tensors}), message)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("place", ["model.decoder.norm.weight", f"{TABLE}.scales"])
def test_float8_tensors_are_refused(dtype, place, converted, tmp_path):
    tensors, config = read(converted(PACKED))
    tensors[place] = mx.zeros(tensors[place].shape, mx.uint8)
    relabel(write(tmp_path, config, {"model.safetensors": tensors}) / "model.safetensors", place, dtype)
    refused(tmp_path, f"tensor {place} is {dtype}; ... F32, F16, BF16")


def relabel(path: Path, tensor: str, dtype: str) -> None:
    """Another dtype of the same size in a file's header."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header[tensor]["dtype"] = dtype
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    raw = json.loads(path.read_text())
    change(raw["weight_map"])
    path.write_text(json.dumps(raw))


FIRST, SECOND = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
SHARD = "model-0000...-of-00003.safetensors"
MIXTURES = {
    "a tensor in another file": (
        lambda named: named.update({f"{TABLE}.weight": SECOND if named[f"{TABLE}.weight"] == FIRST else FIRST}),
        f"the index says tensor {{T}}.weight is in {SHARD}, but it is in {SHARD}; these are files of two checkpoints",
    ),
    "a tensor that is nowhere": (
        lambda named: named.update(odd=FIRST),
        f"the index says tensor odd is in {FIRST}, but it is in no file; these are files of two checkpoints",
    ),
    "a tensor that it does not name": (
        lambda named: named.pop(f"{TABLE}.weight"),
        "holds tensor {T}.weight, which the index does not name; these are files of two checkpoints",
    ),
    "a file that is not there": (
        lambda named: named.update(odd="model-00004-of-00003.safetensors"),
        "shard model-00004-of-00003.safetensors is missing; the index lists 4 files",
    ),
    "a file outside": (lambda named: named.update(odd="../x.safetensors"), "'../x.safetensors' points outside the checkpoint"),
    "a file at the root": (lambda named: named.update(odd="/x.safetensors"), "'/x.safetensors' points outside the checkpoint"),
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_an_index_and_files_that_differ_are_refused(mixture, converted, tmp_path):
    change, message = MIXTURES[mixture]
    tensors, config = read(converted(PACKED))
    write(tmp_path, config, in_shards(tensors), index=True)
    weights.Checkpoint.open(tmp_path)
    change_index(tmp_path, change)
    refused(tmp_path, message)


def test_files_of_two_conversions_are_refused(converted, tmp_path):
    tensors, config = read(converted(PACKED))
    files = in_shards(tensors)
    write(tmp_path, config, files)
    for name, origin in zip(files, ("a", "a", "b")):
        mx.save_safetensors(str(tmp_path / name), files[name], metadata={"format": "mlx", "dgemma": origin})
    refused(tmp_path, "model-00001-of-00003.safetensors and model-00003-of-00003.safetensors are of two conversions; download or")


def test_a_tensor_in_two_files_is_refused(converted, tmp_path):
    tensors, config = read(converted(PACKED))
    write(tmp_path, config, {"a.safetensors": tensors, "b.safetensors": {f"{TABLE}.weight": tensors[f"{TABLE}.weight"]}})
    refused(tmp_path, "b.safetensors: tensor {T}.weight stands in two files of this checkpoint")
