"""Both spellings of the geometry, the card's policy, and a message for everything that does not fit."""

import copy
import json
import os

import pytest

import dgemma  # noqa: F401
from dgemma.config import FULL, SLIDING, GenerationConfig, ModelConfig
from dgemma.errors import CheckpointError
from oracle import tiny


def raw(name="ring"):
    return copy.deepcopy(tiny.CONFIGS[name])


def test_both_spellings_give_the_same_geometry():
    released = raw("ring")
    text = released["text_config"]
    assert text["global_head_dim"] == 32 and "per_layer_config" not in text
    saved = copy.deepcopy(released)
    wide = {"head_dim": saved["text_config"].pop("global_head_dim")}
    wide["num_key_value_heads"] = saved["text_config"].pop("num_global_key_value_heads")
    kinds = saved["text_config"]["layer_types"]
    saved["text_config"]["per_layer_config"] = {str(i): wide for i, kind in enumerate(kinds) if kind == FULL}
    assert ModelConfig.from_dict(saved) == ModelConfig.from_dict(released)
    layers = ModelConfig.from_dict(released).text.layers
    assert {(layer.kind, layer.head_dim, layer.kv_heads) for layer in layers} == {(SLIDING, 16, 2), (FULL, 32, 1)}


def test_the_released_geometry():
    config = {
        "model_type": "diffusion_gemma",
        "text_config": {
            "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112, "moe_intermediate_size": 704,
            "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
            "global_head_dim": 512, "num_global_key_value_heads": 2, "sliding_window": 1024, "num_experts": 128,
            "top_k_experts": 8, "max_position_embeddings": 262144, "use_bidirectional_attention": "vision",
        },
    }  # fmt: skip
    read = ModelConfig.from_dict(config)
    assert [i for i, layer in enumerate(read.text.layers) if layer.kind == FULL] == [5, 11, 17, 23, 29]
    assert read.text.layers[5].head_dim == 512 and read.text.layers[5].kv_heads == 2
    assert read.text.rope[SLIDING].theta == 1e4 and read.text.rope[FULL].fraction == 0.25
    assert read.canvas_length == 256 and read.image_token_id == 258880 and read.vision is None
    assert read.text.final_logit_softcapping == 30.0 and read.text.rms_norm_eps == 1e-6


def test_keys_that_nothing_reads_are_listed():
    config = raw() | {"mystery": 1}
    config["text_config"]["initializer_range"] = 0.02
    config["vision_config"]["num_labels"] = 2
    ignored = ModelConfig.from_dict(config).ignored
    assert {"mystery", "text_config.initializer_range", "vision_config.num_labels"} <= set(ignored)
    assert not {"model_type", "vision_config", "text_config.hidden_size", "text_config.layer_types"} & set(ignored)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c.update(model_type="gemma4"), "model_type is 'gemma4'; dgemma runs 'diffusion_gemma' checkpoints only"),
        (lambda c: c.update(text_config=[1]), "text_config: a JSON object is expected, found list"),
        (lambda c: c["text_config"].pop("hidden_size"), "text_config: hidden_size is None; a whole number from 1 to"),
        (lambda c: c["text_config"].update(hidden_size=-4), "hidden_size is -4; a whole number from 1 to 16777216 is needed"),
        (lambda c: c["text_config"].update(vocab_size="many"), "vocab_size is 'many'; a whole number"),
        (lambda c: c["text_config"].update(rms_norm_eps=float("nan")), "rms_norm_eps is nan; a number"),
        (lambda c: c["text_config"].update(num_kv_shared_layers=2), "num_kv_shared_layers is 2; supported: None, 0"),
        (lambda c: c["text_config"].update(layer_types=["f"]), "layer_types must list 6 entries of 'sliding_attention' or"),
        (lambda c: c["text_config"].update(top_k_experts=9), "top_k_experts is 9, more than num_experts \\(4\\)"),
        (lambda c: c["text_config"].update(num_key_value_heads=3), "4 query heads cannot share 3 key/value heads"),
        (lambda c: c["text_config"].update(use_bidirectional_attention="all"), "use_bidirectional_attention is 'all'"),
        (lambda c: c["text_config"].update(hidden_activation="relu"), "hidden_activation is 'relu'; supported: None, gelu"),
        (lambda c: c["text_config"]["rope_parameters"][FULL].update(rope_type="yarn"), "rope_type is 'yarn'; supported"),
        (lambda c: c.update(boi_token_id=999), "boi_token_id is 999 and eoi_token_id 9; the vocabulary ends at 95"),
        (lambda c: c.update(tie_word_embeddings=False), "tie_word_embeddings is False; encoder, decoder and head must share"),
        (lambda c: c["vision_config"].update(model_type="siglip"), "vision_config: model_type is 'siglip'"),
        (lambda c: c["vision_config"].update(patch_size=0), "patch_size is 0; a whole number from 1"),
    ],
)
def test_a_config_that_does_not_fit_says_where(change, message):
    config = raw()
    change(config)
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelConfig.from_dict(config)
    assert "\n" not in str(caught.value)


def test_generation_defaults_are_the_cards(tmp_path):
    card = GenerationConfig.read(tmp_path)
    assert (card.max_denoising_steps, card.t_min, card.t_max, card.entropy_bound) == (48, 0.4, 0.8, 0.1)
    assert (card.stability_threshold, card.confidence_threshold, card.end_token_ids) == (1, 0.005, (1, 106, 50))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 7, "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.2}})
    )
    own = GenerationConfig.read(tmp_path)
    assert own.end_token_ids == (7,) and own.entropy_bound == 0.2 and own.max_denoising_steps == 48


@pytest.mark.parametrize(
    "raw_config, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; a whole number from 1 to"),
        ({"t_max": -1}, "t_max is -1; a number above 0"),
        ({"sampler_config": {"_cls_name": "Other"}}, "only EntropyBoundSamplerConfig is known"),
        ({"eos_token_id": ["x"]}, "eos_token_id is 'x'; a whole number"),
    ],
)
def test_a_generation_config_that_does_not_fit_says_where(raw_config, message):
    with pytest.raises(CheckpointError, match=message):
        GenerationConfig.from_dict(raw_config)


def test_a_pipe_is_no_config(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="config.json: is no file"):
        ModelConfig.read(tmp_path)


def test_a_number_of_many_digits_is_no_number(tmp_path):
    (tmp_path / "config.json").write_text('{"canvas_length": ' + "9" * 5000 + "}")
    with pytest.raises(CheckpointError, match="config.json: not valid JSON"):
        ModelConfig.read(tmp_path)


def test_both_keys_of_a_quantization_are_known():
    raw = tiny.config("wide") | {"quantization": {"bits": 4, "group_size": 64}, "quantization_config": {"bits": 4}}
    read = ModelConfig.from_dict(raw)
    assert read.quantization == {"bits": 4, "group_size": 64} and "quantization_config" not in read.ignored
