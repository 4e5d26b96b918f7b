"""Loading is strict and names what is wrong; renames and shards lose nothing."""

import json
import os
import shutil
import struct

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import load_file, save_file

import dgemma  # noqa: F401
from dgemma import backend, weights
from dgemma.convert import convert
from dgemma.errors import CheckpointError, OptionError
from dgemma.formats import Format
from dgemma.hub import find


@pytest.fixture
def folder(checkpoint, tmp_path):
    copy = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, copy)
    return copy


def tensors(folder):
    return load_file(folder / "model.safetensors")


def store(folder, found):
    save_file(found, folder / "model.safetensors")


def parameters(folder):
    return {name: np.array(array) for name, array in tree_flatten(weights.load(folder, dtype=mx.float32).parameters())}


def test_every_stored_number_arrives(folder):
    stored, loaded = tensors(folder), parameters(folder)
    assert len(stored) == len(loaded)
    np.testing.assert_array_equal(loaded["embed_tokens.weight"], stored["model.decoder.embed_tokens.weight"])
    scalar = "layers.1.encoder_layer_scalar"
    np.testing.assert_array_equal(loaded[scalar], stored["model.encoder.language_model.layers.1.layer_scalar"])
    assert loaded[scalar] != loaded["layers.1.layer_scalar"]
    name = "vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight"
    np.testing.assert_array_equal(loaded[name], stored[f"model.encoder.{name}"])


def test_shards_equal_one_file(folder):
    whole, stored = parameters(folder), tensors(folder)
    names = sorted(stored)
    (folder / "model.safetensors").unlink()
    index = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: stored[name] for name in part}, folder / f"model-0000{number}-of-00002.safetensors")
        index |= {name: f"model-0000{number}-of-00002.safetensors" for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for name, array in parameters(folder).items():
        np.testing.assert_array_equal(array, whole[name])


def test_second_copies_of_tied_weights_are_left_out(folder):
    stored = tensors(folder)
    table = stored["model.decoder.embed_tokens.weight"]
    stored["lm_head.weight"] = table
    stored["model.encoder.language_model.embed_tokens.weight"] = table
    layer = "layers.0.self_attn.q_proj.weight"
    stored[f"model.encoder.language_model.{layer}"] = stored[f"model.decoder.{layer}"]
    store(folder, stored)
    assert "lm_head.weight" not in parameters(folder)


def test_dtypes(folder):
    assert weights.load(folder).dtype == backend.activation_dtype(mx.float32)
    with pytest.raises(OptionError, match="dtype is mlx.core.int8; on this device allowed: mlx.core.float32"):
        weights.load(folder, dtype=mx.int8)
    if backend.is_gpu():
        assert weights.load(folder, dtype=mx.bfloat16).dtype == mx.bfloat16
    else:  # mlx's gather_mm knows float32 only there, and would say so at the first prompt
        with pytest.raises(OptionError, match="dtype is mlx.core.bfloat16; on this device allowed: mlx.core.float32"):
            weights.load(folder, dtype=mx.bfloat16)


def broken(change):
    def apply(folder):
        found = tensors(folder)
        change(found)
        store(folder, found)

    return apply


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    "damage, message",
    [
        (broken(lambda t: t.pop("model.decoder.norm.weight")), "tensor model.decoder.norm.weight is missing \\(1 of \\d+ in all\\)"),
        (broken(lambda t: t.update(odd=np.zeros(1, np.float32))), "tensor odd has no place in this model"),
        (
            broken(lambda t: t.update({"model.decoder.norm.weight": np.zeros(5, np.float32)})),
            "tensor model.decoder.norm.weight has shape \\(5,\\); config.json asks for \\(32,\\)",
        ),
        (
            broken(lambda t: t.update({"model.decoder.norm.weight": np.zeros(32, np.int64)})),
            "tensor model.decoder.norm.weight is I64; unquantised weights are F32, F16, BF16",
        ),
        (cut_short, "model.safetensors: truncated, [\\d,]+ of [\\d,]+ bytes; download it again"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "not a whole safetensors file \\(0 bytes\\)"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "not a whole safetensors file \\(64 bytes\\)"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x04" + b"\0" * 7 + b"nope"), "header is damaged"),
        (lambda f: (f / "model.safetensors").unlink(), "no \\*.safetensors file"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: not valid JSON"),
        (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
    ],
)
def test_damage_is_named(folder, damage, message):
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        weights.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "index, message",
    [
        ({"weight_map": {"a": "model-2.safetensors"}}, "shard model-2.safetensors is missing; the index lists 1 files"),
        ({"weight_map": {"a": "../other.safetensors"}}, "'../other.safetensors' points outside the checkpoint folder"),
        ({"weight_map": {"a": "a" * 300}}, "shard a{300} is missing; the index lists 1 files"),
        ({"weight_map": {"a": "a\0b"}}, "shard a\0b is missing"),
        ({"weight_map": {"a": ".."}}, "shard .. is missing"),
        ({"weight_map": {"a": ""}}, "shard  is missing"),
        ({"weight_map": {"a": "/etc/passwd"}}, "'/etc/passwd' points outside the checkpoint folder"),
        ({"weight_map": []}, "'weight_map' must map tensor names to files"),
        ({}, "'weight_map' must map tensor names to files"),
    ],
)
def test_an_index_that_does_not_fit_is_named(folder, index, message):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        weights.load(folder)


def rewritten(change):
    """Another header before the same data: `change` takes the header, and the names of its first two tensors."""

    def apply(folder):
        path = folder / "model.safetensors"
        data = path.read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:end])
        change(header, *sorted((name for name in header if name != "__metadata__"), key=lambda n: header[n]["data_offsets"])[:2])
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[end:] + bytes(64))

    return apply


def moved(by):
    """The first tensor's data elsewhere."""
    return rewritten(lambda h, a, b: h[a].update(data_offsets=[at + by for at in h[a]["data_offsets"]]))


@pytest.mark.parametrize(
    "damage, message",
    [
        (moved(4), "damaged header \\(tensors overlap, or leave gaps\\)"),
        (moved(-4), "damaged header; download"),
        (rewritten(lambda h, a, b: h.update({a: h[b]})), "damaged header \\(tensors overlap, or leave gaps\\)"),
        (rewritten(lambda h, a, b: h[a].update(data_offsets=[float(at) for at in h[a]["data_offsets"]])), "damaged header; "),
        (rewritten(lambda h, a, b: h[a].update(shape=[float(n) for n in h[a]["shape"]])), "damaged header; download"),
        (rewritten(lambda h, a, b: h[a].update(shape=[-n for n in h[a]["shape"]])), "damaged header; download"),
        (rewritten(lambda h, a, b: h[a].update(shape=[10**300, 10**300])), "damaged header \\(sizes and shapes differ\\)"),
        (rewritten(lambda h, a, b: h[a]["data_offsets"].append(0)), "damaged header; download"),
        (rewritten(lambda h, a, b: h.update(__metadata__="pt")), "damaged header; download"),
        (rewritten(lambda h, a, b: h.update(__metadata__=[1])), "damaged header; download"),
        (rewritten(lambda h, a, b: h.update(__metadata__={"dgemma": {}})), "damaged header; download"),
        (
            lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 5006) + b'{"a":' + b"9" * 5000 + b"}"),
            "header is damaged",
        ),
        (lambda f: [(f / "model.safetensors").unlink(), os.mkfifo(f / "model.safetensors")], "model.safetensors: not a file"),
        (lambda f: [(f / "model.safetensors").unlink(), (f / "model.safetensors").mkdir()], "model.safetensors: not a file"),
    ],
)
def test_a_hostile_header_is_refused(folder, damage, message):
    """mlx takes some of these: it would read one tensor's bytes for another's, or wait for a pipe."""
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        weights.load(folder)
    assert "\n" not in str(caught.value)


def test_metadata_may_be_null(folder):
    before = parameters(folder)
    rewritten(lambda h, a, b: h.update(__metadata__=None))(folder)
    found = parameters(folder)
    assert all((found[name] == array).all() for name, array in before.items())


def test_pickled_weights_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin is a pickle, which may run code of its own when it is read: convert it"):
        weights.load(folder)


@pytest.mark.parametrize("kind", ["plain", "packed", "unpacked"])
def test_loading_holds_little_twice(kind, tmp_path, monkeypatch):
    """At most a tenth more than the weights; batches as small beside the demo's 28 MB as they are beside real ones."""
    source = "demo" if kind == "plain" else convert("demo", tmp_path / "packed", Format(bits=4, group_size=32)).folder
    monkeypatch.setattr(weights, "BATCH", 1 << 20)
    monkeypatch.setattr(weights.Checkpoint, "unpacks", lambda self, dtype: kind == "unpacked")
    opened = weights.Checkpoint.open(find(source).folder)
    held = mx.get_active_memory()
    mx.clear_cache()
    mx.reset_peak_memory()
    model = weights.load(opened, dtype=mx.float32)
    assert mx.get_peak_memory() - held < 1.1 * sum(array.nbytes for _, array in tree_flatten(model.parameters()))
