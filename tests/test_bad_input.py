"""Bad input, each kind: one line on stderr that says what was seen and what is allowed, exit code 2, nothing written."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from dgemma import cli

BUDGET_LIST = "70, 140, 280, 560, 1120"


@pytest.fixture
def refuse(capfd, monkeypatch, tmp_path):
    """Runs a command that has to be refused, in an empty folder; returns its one line without the "dgemma: "."""
    monkeypatch.delenv("DGEMMA_DEBUG", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(*argv: str, stdin: bytes = b"") -> str:
        empty = tmp_path / "cwd"
        empty.mkdir(exist_ok=True)
        monkeypatch.chdir(empty)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        code = cli.main(argv)
        out, err = capfd.readouterr()
        assert (code, out) == (2, "") and err.startswith("dgemma: ") and err.count("\n") == 1, (code, out, err)
        assert os.listdir(empty) == [], "something was written"
        return err.removeprefix("dgemma: ").rstrip("\n")

    return call


# -- pictures ---------------------------------------------------------------------------------------------------------


def png(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def noise_png() -> bytes:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 80).save(file, "PNG")
    return file.getvalue()


def thin_png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (1, 10_000)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    "data, says",
    [
        (b"", "is empty; give a complete image file"),
        (noise_png()[:2000], "damaged or incomplete image ("),
        (b"words, no picture" * 9, "not an image, or one without pixels; allowed formats are PNG, JPEG"),
        (png(0, 0), "not an image, or one without pixels; allowed formats are PNG, JPEG"),
        (thin_png(), "1x10000 pixels is too long and thin; at a budget of 70 soft tokens"),
        (png(50_000, 50_000), "2,500,000,000 pixels is too large; at most 178 megapixels"),
    ],
    ids=["empty", "truncated", "words", "0x0", "1x10000", "50000x50000"],
)
def test_picture_files(refuse, checkpoint, tmp_path, data, says):
    path = tmp_path / "bad.png"
    path.write_bytes(data)
    assert refuse("generate", "--model", str(checkpoint), "--image", str(path), "Hi").startswith(f"{path}: {says}")


@pytest.mark.parametrize(
    "name, says",
    [
        ("nowhere.png", "nowhere.png: no such image file"),
        ("/", "/: is a directory; give one image file"),
        ("/dev/null", "/dev/null: is not a regular file; give an image file"),
        ("https://x.org/a.png", "https://x.org/a.png: pictures are not fetched from the network; "),
        ("a\0b.png", "a?b.png: not a file name"),
        ("a\x1b[31m\nb.png", "a?[31m?b.png: no such image file"),
        ("a" * 5000, "aaa"),
    ],
)
def test_picture_names(refuse, checkpoint, name, says):
    assert refuse("generate", "--model", str(checkpoint), "--image", name, "Hi").startswith(says)


def test_pictures_for_a_checkpoint_without_eyes(refuse, text_checkpoint, pictures):
    said = refuse("generate", "--model", str(text_checkpoint), "--image", str(pictures / "shapes.png"), "Hi")
    assert said == "1 image(s) given, but this checkpoint has no vision tower: it reads text only"


# -- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", " \n\t"])
def test_empty_prompts(refuse, checkpoint, prompt):
    assert refuse("generate", "--model", str(checkpoint), prompt) == "the prompt is empty; ask something"


def test_stdin(refuse, checkpoint):
    ask = ("generate", "--model", str(checkpoint), "-")
    assert refuse(*ask) == "the prompt is empty; ask something"
    assert refuse(*ask, stdin=b"ab\xff") == "stdin is not UTF-8 text (byte 2 is 0xff)"


@pytest.mark.parametrize("spelled", ["<|image|>", "<|image>", "<image|>", "<|turn>", "<turn|>"])
def test_control_tokens_spelled_in_a_text(refuse, checkpoint, spelled):
    says = f"message 1 spells {spelled}, which only the chat template may write; put a space inside it"
    assert refuse("generate", "--model", str(checkpoint), f"a {spelled} b") == says
    assert refuse("generate", "--model", str(checkpoint), "--system", spelled, "Hi") == says


@pytest.mark.parametrize("half", ["\ud800", "\udcff"])
def test_half_a_surrogate(refuse, checkpoint, half):
    said = refuse("generate", "--model", str(checkpoint), f"a{half}b")
    assert said == f"message 1 is no Unicode text: half a surrogate pair (U+{ord(half):04X}); send UTF-8"


def test_control_characters_are_text(checkpoint, capsys):
    argv = ["generate", "--model", str(checkpoint), "--max-tokens", "8", "--steps", "1", "a\x00\x1b[31m\x07\ufffe\U0010ffff"]
    assert cli.main(argv) == 0


@pytest.mark.parametrize("length", [4090, 1_000_000])
def test_a_prompt_longer_than_the_context(refuse, checkpoint, length):
    said = refuse("generate", "--model", str(checkpoint), "a" * length)
    assert said == (
        f"the prompt has {length + 16} tokens and the answer may take 16; the context is 4096: "
        "shorten the prompt, or lower --max-tokens or the image budget"
    )


@pytest.mark.parametrize(
    "messages, images, says",
    [
        ([{"type": "text", "text": "Hi"}], ["a.png"], "1 image(s) for 0 empty image place(s) in the messages: 1 too many"),
        ([{"type": "image"}, {"type": "text", "text": "Hi"}], [], "0 image(s) for 1 empty image place(s) in the messages: 1 more"),
        ([{"type": "image"}] * 3 + ["Hi"], ["a.png"], "1 image(s) for 3 empty image place(s) in the messages: 2 more needed"),
    ],
)
def test_more_places_than_pictures_and_the_reverse(messages, images, says):
    """The command line makes the places itself; messages come from programs."""
    from dgemma import PromptError
    from dgemma.messages import fill_images

    with pytest.raises(PromptError, match=says.replace("(", r"\(").replace(")", r"\)")):
        fill_images([{"role": "user", "content": messages}], images)


# -- options ----------------------------------------------------------------------------------------------------------

T_RANGE = "0 < --t-min <= --t-max is needed"
BOUND, CONFIDENCE = "a finite number above 0 is needed (default 0.1)", "a finite number above 0 is needed (default 0.005)"
THRESHOLD = "a number in (0, 1] is needed (default 0.9)"


@pytest.mark.parametrize(
    "option, value, says",
    [
        ("--max-tokens", "0", "--max-tokens is 0; at least 1 is needed"),
        ("--max-tokens", "-5", "--max-tokens is -5; at least 1 is needed"),
        ("--max-tokens", "1" + "0" * 30, "the prompt has 18 tokens and the answer may take 1" + "0" * 30),
        ("--max-tokens", "1.5", "argument --max-tokens: '1.5' is not a whole number"),
        ("--max-tokens", "9" * 5000, "argument --max-tokens: '" + "9" * 40 + "' is not a whole number"),
        ("--steps", "0", "--steps is 0; at least 1 is needed"),
        ("--t-min", "nan", f"--t-min is nan and --t-max 0.8; {T_RANGE}"),
        ("--t-min", "0", f"--t-min is 0.0 and --t-max 0.8; {T_RANGE}"),
        ("--t-min", "5", f"--t-min is 5.0 and --t-max 0.8; {T_RANGE}"),
        ("--t-max", "inf", f"--t-min is 0.4 and --t-max inf; {T_RANGE}"),
        ("--t-max", "-1", f"--t-min is 0.4 and --t-max -1.0; {T_RANGE}"),
        ("--t-max", "hot", "argument --t-max: 'hot' is not a number"),
        ("--entropy-bound", "nan", f"the entropy bound is nan; {BOUND}"),
        ("--entropy-bound", "-inf", f"the entropy bound is -inf; {BOUND}"),
        ("--entropy-bound", "0", f"the entropy bound is 0.0; {BOUND}"),
        ("--confidence-threshold", "nan", f"the confidence threshold is nan; {THRESHOLD}"),
        ("--confidence-threshold", "0", f"the confidence threshold is 0.0; {THRESHOLD}"),
        ("--confidence-threshold", "1.5", f"the confidence threshold is 1.5; {THRESHOLD}"),
        ("--stability", "-1", "stability is -1; a whole number of at least 0 is needed (default 1)"),
        ("--confidence", "inf", f"confidence is inf; {CONFIDENCE}"),
        ("--redraws", "-1", "redraws is -1; a whole number of at least 0 is needed (default 2)"),
        ("--image-budget", "71", f"argument --image-budget: invalid choice: 71 (choose from {BUDGET_LIST})"),
        ("--chunk", "0", "chunk is 0; at least 1 is needed"),
        ("--seed", "-1", "seed is -1; 0 to 2**64 - 1 is allowed"),
        ("--seed", str(2**64), f"seed is {2**64}; 0 to 2**64 - 1 is allowed"),
        ("--image-attention", "all", "argument --image-attention: invalid choice: 'all' (choose from "),
    ],
    ids=lambda value: value[:24],
)
def test_options_out_of_range(refuse, checkpoint, option, value, says):
    assert refuse("generate", "--model", str(checkpoint), f"{option}={value}", "Hi").startswith(says)


@pytest.mark.parametrize(
    "argv, says",
    [
        ((), "the following arguments are required: COMMAND; see dgemma --help"),
        (("dance",), "argument COMMAND: invalid choice: 'dance'"),
        (("generate",), "the following arguments are required: PROMPT; see dgemma generate --help"),
        (("generate", "Hi", "--dance"), "unrecognized arguments: --dance; see dgemma --help"),
        (("generate", "Hi", "--max", "3"), "unrecognized arguments: --max 3; see dgemma --help"),
        (
            ("generate", "--entropy-bound", "0.1", "--confidence-threshold", "0.9", "Hi"),
            "argument --confidence-threshold: not allowed with argument --entropy-bound; see dgemma generate --help",
        ),
    ],
)
def test_command_lines_that_cannot_be_read(refuse, argv, says):
    assert refuse(*argv).startswith(says)


# -- checkpoints: where -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/no/where", "./nowhere", "a\0b", "", "a" * 5000, "~nobody-of-that-name/x", "one/two/three"])
def test_models_that_are_nowhere(refuse, name):
    said = refuse("generate", "--model", name, "Hi")
    assert said.endswith("no such folder; give a checkpoint folder, a hub id like google/diffusiongemma-26B-A4B-it, or demo")


def test_a_file_as_model(refuse, checkpoint):
    path = checkpoint / "config.json"
    assert refuse("info", str(path)) == f"{path}: a file; give the folder that holds config.json"


def test_a_hub_id_without_network(checkpoint):
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    code = "import sys; from dgemma.cli import main; sys.exit(main())"
    argv = [sys.executable, "-c", code, "info", "google/no-such-model"]
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        began = time.monotonic()
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=os.environ | environment)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith("dgemma: google/no-such-model: no such folder here, and it cannot be fetched from the")
        assert time.monotonic() - began < 60


# -- checkpoints: what ------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A copy of the tiny checkpoint to be broken."""
    return Path(shutil.copytree(checkpoint, tmp_path / "broken"))


def edit(path: Path, *keys: str, value=None) -> None:
    """Set one key of a JSON file; None removes it."""
    raw = json.loads(path.read_text())
    section = raw
    for key in keys[:-1]:
        section = section[key]
    if value is None:
        del section[keys[-1]]
    else:
        section[keys[-1]] = value
    path.write_text(json.dumps(raw))


def header(**tensors) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


@pytest.mark.parametrize(
    "data, says",
    [
        (b"", "not a whole safetensors file (0 bytes); download it again"),
        (b"1234", "not a whole safetensors file (4 bytes); download it again"),
        (b"\xff" * 999, "not a whole safetensors file (999 bytes); download it again"),
        (struct.pack("<Q", 4) + b"\xff\xff\xff\xff", "the safetensors header is damaged; download it again"),
        (header(a=[1]), "damaged header; download it again"),
        (header(a={"dtype": "F32", "shape": [2], "data_offsets": [0, "x"]}), "damaged header; download it again"),
        (header(a={"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}), "truncated, "),
        (header(a={"dtype": "F32", "shape": [2 * 10**11], "data_offsets": [0, 8]}), "damaged header (sizes and shapes differ)"),
        (header(a={"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}), "damaged header; download it again"),
    ],
)
def test_damaged_safetensors(refuse, broken, data, says):
    path = broken / "model.safetensors"
    path.write_bytes(data)
    assert refuse("generate", "--model", str(broken), "Hi").startswith(f"{path}: {says}")


def test_a_truncated_safetensors_file(refuse, broken):
    path = broken / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    says = f"{path}: truncated, {len(whole) // 2:,} of {len(whole):,} bytes; download it again"
    assert refuse("generate", "--model", str(broken), "Hi") == says
    assert refuse("info", str(broken)) == says


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda w: w.pop("model.decoder.layers.0.mlp.up_proj.weight"), "tensor model.decoder.layers.0.mlp.up_proj.weight is missing (1 of "),
        (lambda w: w.pop("model.decoder.embed_tokens.weight"), "tensor model.decoder.embed_tokens.weight is missing (1 of "),
        (
            lambda w: w.update({"model.decoder.layers.9.extra": np.zeros(3, np.float32)}),
            "tensor model.decoder.layers.9.extra has no place in this model (1 such in all)",
        ),
        (
            lambda w: w.update({"model.decoder.layers.0.mlp.up_proj.weight": np.zeros((3, 4), np.float32)}),
            "tensor model.decoder.layers.0.mlp.up_proj.weight has shape (3, 4); config.json asks for (64, 32)",
        ),
    ],
    ids=["missing", "missing-embedding", "extra", "shape"],
)
def test_tensors_that_do_not_fit(refuse, broken, change, says):
    weights = load_file(broken / "model.safetensors")
    change(weights)
    save_file(weights, broken / "model.safetensors")
    assert refuse("generate", "--model", str(broken), "Hi").startswith(f"{broken}: {says}")


def test_shards(refuse, broken):
    index = broken / "model.safetensors.index.json"
    (broken / "model.safetensors").rename(broken / "model-1-of-2.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}))
    ask = ("generate", "--model", str(broken), "Hi")
    assert refuse(*ask) == f"{broken}: shard model-2-of-2.safetensors is missing; the index lists 2 files"
    index.write_text('{"weight_map": {"a": "../x.safetensors"}}')
    assert refuse(*ask) == f"{index}: '../x.safetensors' points outside the checkpoint folder"
    index.write_text("{")
    assert refuse(*ask).startswith(f"{index}: not valid JSON (")
    index.unlink()
    (broken / "model-1-of-2.safetensors").unlink()
    assert refuse(*ask) == f"{broken}: no *.safetensors file"


@pytest.mark.parametrize(
    "data, says",
    [
        (b"{", "not valid JSON ("),
        (b"[1]", "a JSON object is expected, found list"),
        (b"\xff\xfe", "cannot be read ("),
        (b"[" * 100_000, "not valid JSON ("),
        (None, "no such file; a checkpoint folder holds config.json and safetensors"),
    ],
    ids=["brace", "list", "binary", "deep", "absent"],
)
def test_config_files(refuse, broken, data, says):
    path = broken / "config.json"
    path.unlink() if data is None else path.write_bytes(data)
    assert refuse("generate", "--model", str(broken), "Hi").startswith(f"{path}: {says}")


@pytest.mark.parametrize("kind", ["llama", [1], None])
def test_a_config_of_another_model(refuse, broken, kind):
    path = broken / "config.json"
    edit(path, "model_type", value=kind)
    said = refuse("generate", "--model", str(broken), "Hi")
    assert said == f"{path}: model_type is {kind!r}; dgemma runs 'diffusion_gemma' checkpoints only"


SIZES = {
    "text_config": {
        "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "sliding_window",
        "max_position_embeddings",
    },
    "vision_config": {
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim", "patch_size",
        "pooling_kernel_size", "position_embedding_size",
    },
}  # fmt: skip


@pytest.mark.parametrize("value", [0, -1, "wide", 1.5, 10**12, 10**30])
@pytest.mark.parametrize("section, key", [(section, key) for section, keys in SIZES.items() for key in sorted(keys)])
def test_sizes_that_no_model_has(refuse, broken, section, key, value):
    path = broken / "config.json"
    edit(path, section, key, value=value)
    said = refuse("info", str(broken))
    assert said.startswith(f"{path}: {section}: ") and f"{key} is {value!r}; a whole number from 1 to " in said


@pytest.mark.parametrize("key", sorted(SIZES["text_config"]))
def test_sizes_that_are_missing(refuse, broken, key):
    path = broken / "config.json"
    edit(path, "text_config", key)
    assert refuse("info", str(broken)).startswith(f"{path}: text_config: {key} is None; a whole number from 1 to ")


def test_a_billion_layers_without_a_list_of_them(refuse, broken):
    path = broken / "config.json"
    edit(path, "text_config", "layer_types")
    edit(path, "text_config", "num_hidden_layers", value=10**9)
    said = refuse("info", str(broken))
    assert said == f"{path}: text_config: num_hidden_layers is {10**9}; a whole number from 1 to 1024 is needed"


@pytest.mark.parametrize(
    "keys, value, says",
    [
        (("canvas_length",), 5000, "canvas_length is 5000, more than max_position_embeddings (4096)"),
        (("text_config", "pad_token_id"), 96, "text_config: pad_token_id is 96; the vocabulary ends at 95"),
        (("text_config", "top_k_experts"), 9, "text_config: top_k_experts is 9, more than num_experts (4)"),
        (("text_config", "layer_types"), [{}, 1, 2], "text_config: layer_types must list 3 entries of "),
        (("text_config", "final_logit_softcapping"), 0, "text_config: final_logit_softcapping is 0; a number above 0"),
        (("text_config", "rope_parameters", "sliding_attention", "rope_theta"), 0,
         "text_config: rope_parameters: sliding_attention: rope_theta is 0; a number above 0 and up to 1e+09 is needed"),
        (("text_config", "per_layer_config"), {"2": [1]}, "text_config: per_layer_config: 2: a JSON object is expected"),
        (("text_config",), [1], "text_config: a JSON object is expected, found list"),
    ],
)  # fmt: skip
def test_configs_that_contradict_themselves(refuse, broken, keys, value, says):
    path = broken / "config.json"
    edit(path, *keys, value=value)
    assert refuse("info", str(broken)).startswith(f"{path}: {says}")


@pytest.mark.parametrize(
    "key, value, says",
    [
        ("max_new_tokens", 0, "max_new_tokens is 0; a whole number from 1 to "),
        ("t_min", 0, "t_min is 0; a number above 0 and up to 1e+09 is needed"),
        ("t_min", 3.0, "t_min is 3.0, more than t_max (0.8)"),
        ("eos_token_id", "x", "eos_token_id is 'x'; a whole number from 0 to "),
        ("sampler_config", {"_cls_name": "Other"}, "sampler_config is {'_cls_name': 'Other'}; only Entropy"),
        ("sampler_config", {"entropy_bound": 0}, "sampler_config.entropy_bound is 0; a number above 0"),
    ],
)
def test_generation_configs(refuse, broken, key, value, says):
    path = broken / "generation_config.json"
    edit(path, key, value=value)
    assert refuse("generate", "--model", str(broken), "Hi").startswith(f"{path}: {says}")


@pytest.mark.parametrize(
    "name, data, says",
    [
        ("tokenizer.json", None, ": no tokenizer.json; a checkpoint folder holds its tokenizer"),
        ("tokenizer.json", b"{garbage", "/tokenizer.json: no tokenizer that can be read ("),
        ("tokenizer.json", b"{}", "/tokenizer.json: no tokenizer that can be read ("),
        ("tokenizer.json", b"\xff\x00" * 9, "/tokenizer.json: no tokenizer that can be read ("),
        ("tokenizer_config.json", b"{garbage", "/tokenizer_config.json: not valid JSON ("),
        ("chat_template.jinja", None, ": no chat template; a chat_template.jinja is needed beside the tokenizer"),
        ("chat_template.jinja", b"\xff\x00" * 9, "/chat_template.jinja: cannot be read ("),
    ],
)
def test_tokenizer_files(refuse, broken, name, data, says):
    path = broken / name
    path.unlink() if data is None else path.write_bytes(data)
    assert refuse("generate", "--model", str(broken), "Hi").startswith(f"{broken}{says}")


@pytest.mark.parametrize(
    "template, says",
    [
        ("{% garbage", "the chat template refuses these messages: Encountered unknown tag 'garbage'."),
        ("{{ raise_exception('no, please') }}", "the chat template refuses these messages: no, please"),
        ("{{ 1 / 0 }}", "the chat template refuses these messages: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "the chat template refuses these messages: access to attribute '__class__'"),
        ("no place", "the chat template made 0 place(s) for 1 image(s)"),
    ],
)
def test_templates(refuse, broken, pictures, template, says):
    (broken / "chat_template.jinja").write_text(template)
    said = refuse("generate", "--model", str(broken), "--image", str(pictures / "shapes.png"), "Hi")
    assert said.startswith(says)


def test_a_template_that_writes_nothing(refuse, broken):
    (broken / "chat_template.jinja").write_text("")
    said = refuse("generate", "--model", str(broken), "Hi")
    assert said == "template and tokenizer make nothing of these messages; tokens 0 to 95 are needed"


def test_an_image_budget_that_no_eye_has(refuse, broken):
    path = broken / "processor_config.json"
    edit(path, "image_processor", "max_soft_tokens", value=71)
    said = refuse("generate", "--model", str(broken), "Hi")
    assert said == f"{path}: max_soft_tokens is 71; allowed are {BUDGET_LIST}"


# -- outputs ----------------------------------------------------------------------------------------------------------


def test_outputs_that_cannot_be_written(refuse, checkpoint, tmp_path):
    ask = ("generate", "--model", str(checkpoint), "Hi", "--output")
    assert refuse(*ask, str(tmp_path)) == f"{tmp_path}: is a folder; give a file to write"
    missing = tmp_path / "no" / "a.txt"
    assert refuse(*ask, str(missing)) == f"{missing}: there is no folder {missing.parent}; make it first"
    assert refuse(*ask, "a\0b").startswith("a b: not a file that can be written (")
    assert refuse(*ask, "a" * 5000).endswith("not a file that can be written (File name too long)")


def test_a_full_disk(refuse, checkpoint, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "a.json"
    path.write_text("old")
    ask = ("generate", "--model", str(checkpoint), "--max-tokens", "8", "--steps", "1", "--json", "Hi", "--output")
    assert refuse(*ask, str(path)) == f"{path}: cannot be written (No space left on device); nothing was kept"
    assert path.read_text() == "old" and not list(tmp_path.glob(".*"))


def test_a_disk_that_fills_while_writing(tmp_path):
    """A limit on the size of files stands for a real full disk: no root is needed."""
    code = "from dgemma.files import write_whole; write_whole('a.txt', 'x' * 9999)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert done.stderr.endswith("OutputError: a.txt: cannot be written (File too large); nothing was kept\n")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
def test_devices_that_are_full(refuse, checkpoint):
    full = "dgemma: /dev/full: cannot be written (No space left on device); nothing was kept"
    ask = ("generate", "--model", str(checkpoint), "--max-tokens", "8", "--steps", "1", "--output", "/dev/full", "Hi")
    assert refuse(*ask) == full.removeprefix("dgemma: ")
    code = "import sys; from dgemma.cli import main; sys.exit(main())"
    with open("/dev/full", "w") as stdout:
        argv = [sys.executable, "-c", code, "info", str(checkpoint)]
        done = subprocess.run(argv, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "dgemma: the output cannot be written (No space left on device)\n")
