"""Words and pictures in, an Answer out: on a tiny random checkpoint, where nothing depends on what the model knows."""

import numpy as np
import pytest
from PIL import Image

import dgemma
from dgemma import Block, Finished, OptionError, Pipeline, Prefilled, PromptError, Step, Text
from dgemma.channels import TextStream
from dgemma.messages import conversation, fill_images

C = 8


@pytest.fixture(scope="module")
def pipe(checkpoint):
    return Pipeline.from_pretrained(checkpoint)


def picture(colour="red"):
    return Image.new("RGB", (96, 48), colour)


def test_stream_equals_collected(pipe):
    events = list(pipe.stream("Hello.", images=[picture()], seed=3))
    kinds = [type(event) for event in events]
    assert kinds[0] is Prefilled and kinds[-1] is Finished and Step in kinds and Block in kinds
    (answer,) = events[-1].answers
    assert "".join(event.delta for event in events if isinstance(event, Text)) == answer.text
    again = pipe("Hello.", images=[picture()], seed=3)
    assert (again.text, again.tokens, again.steps) == (answer.text, answer.tokens, answer.steps)


def test_counters_are_honest(pipe):
    answer = pipe("Hello.", images=[picture(), picture()], seed=1, max_new_tokens=11)
    one = pipe.processor.prompt(conversation("Hello.", [picture(), picture()]), [picture(), picture()])
    assert answer.prompt_tokens == len(one.ids) and answer.image_tokens == sum(i.soft_tokens for i in one.images)
    assert answer.generated_tokens == len(answer.tokens) <= 11
    assert answer.blocks == len(answer.steps)
    assert answer.tokens_per_forward == pytest.approx(len(answer.tokens) / sum(answer.steps))
    assert answer.finish_reason in ("stop", "length") and answer.seed == 1
    spent = answer.seconds
    assert min(spent.load, spent.images, spent.prefill, spent.denoise) > 0 and answer.peak_memory > 0


def test_a_batch_equals_single_calls(pipe):
    prompts = ["Hello.", "A longer question than the first?", "Hm."]
    images = [[picture()], [], [picture("blue"), picture("green")]]
    together = pipe(prompts, images=images, seed=[5, 6, 7])
    for prompt, pictures, seed, answer in zip(prompts, images, (5, 6, 7), together):
        assert pipe(prompt, images=pictures, seed=seed).tokens == answer.tokens
    counted = pipe(prompts, images=images, seed=5)
    assert [answer.tokens for answer in counted] == [answer.tokens for answer in together]
    assert [answer.seed for answer in counted] == [5, 6, 7]


def test_messages_strings_and_ready_pictures_are_the_same_prompt(pipe):
    image = picture()
    bare = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hello."}]}]
    full = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Hello."}]}]
    answers = [pipe("Hello.", images=image), pipe(bare, images=[image]), pipe(full)]
    assert len({answer.tokens for answer in answers}) == 1
    assert pipe([bare, full], images=[[image], []], seed=[0, 0])[0].tokens == answers[0].tokens


def test_several_turns(pipe):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "One."}]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two?"},
    ]
    rendered = pipe.processor.render(fill_images(turns, [picture()])[0])
    assert rendered == (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\n<|image|>One.<turn|>\n"
        "<|turn>model\nYes.<turn|>\n<|turn>user\nTwo?<turn|>\n<|turn>model\n"
    )
    assert pipe(turns, images=[picture()]).image_tokens > 0


def test_an_image_is_begin_soft_tokens_end(pipe):
    prompt = pipe.processor.prompt(conversation("Hi", [picture()]), [picture()])
    config, ids = pipe.model.config, list(prompt.ids)
    begin = ids.index(config.boi_token_id)
    soft = prompt.images[0].soft_tokens
    assert ids[begin + 1 : begin + 1 + soft] == [config.image_token_id] * soft
    assert ids[begin + 1 + soft] == config.eoi_token_id and ids.count(config.image_token_id) == soft


def test_the_checkpoints_image_budget_is_the_default(pipe):
    large = Image.new("RGB", (1000, 1000))
    soft = lambda **more: pipe.processor.prompt(conversation("Hi", [large]), [large], **more).image_tokens
    assert soft() <= 70 < soft(budget=140) <= 140
    assert pipe("Hi", images=[large], image_budget=140).image_tokens == soft(budget=140)


def test_chunks_change_nothing(pipe):
    assert pipe("Hello.", images=[picture()], chunk=3).tokens == pipe("Hello.", images=[picture()]).tokens


def test_pins_and_seed_canvas_pass_through(pipe):
    assert pipe("Hello.", pins={0: 20, 1: 21}, max_new_tokens=C).tokens[:2] == (20, 21)
    canvas = [30] * C
    pipe("Hello.", canvas=canvas)
    pinned = pipe(["Hello.", "Hi."], pins=[{0: 20}, {0: 21}])
    assert [answer.tokens[0] for answer in pinned] == [20, 21]


def test_text_streams_hold_back_half_characters():
    def decode(ids):  # of a tokenizer whose tokens are bytes
        return bytes(ids).decode("utf-8", errors="replace")

    stream, given = TextStream(decode), []
    for token in "né€🙂!".encode():
        given.append(stream.push([token]))
    assert "".join(given) == "né€🙂!" and "\ufffd" not in "".join(given)
    cut = TextStream(decode)
    assert cut.push("né".encode()[:2]) == "n" and cut.push([], last=True) == "\ufffd"


@pytest.mark.parametrize(
    "call, error, message",
    [
        (dict(prompt=""), PromptError, "the prompt is empty; ask something"),
        (dict(prompt=" \n"), PromptError, "the prompt is empty"),
        (dict(prompt=[]), PromptError, "the prompt is empty; a string, messages, or a list of either is needed"),
        (dict(prompt=7), PromptError, "a string, messages, or a list of either is needed"),
        (dict(prompt=[{"role": "user", "content": ""}]), PromptError, "the prompt is empty"),
        (dict(prompt=[{"role": "cat", "content": "x"}]), PromptError, "message 1 has role 'cat'; allowed: system"),
        (dict(prompt=[{"content": "x"}]), PromptError, "message 1 is {'content': 'x'}; a dict with 'role' and"),
        (dict(prompt=[{"role": "user", "content": 5}]), PromptError, "message 1 has content 5; a string or a list"),
        (dict(prompt=[{"role": "user", "content": [{"type": "audio"}]}]), PromptError, "message 1 has a part"),
        (
            dict(prompt=[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]),
            PromptError,
            "0 image\\(s\\) for 1 empty image place\\(s\\) in the messages: 1 more needed",
        ),
        (
            dict(prompt=[{"role": "user", "content": "x"}], images=["a.png"]),
            PromptError,
            "1 image\\(s\\) for 0 empty image place\\(s\\) in the messages: 1 too many",
        ),
        (dict(prompt=["a", "b"], images=["a.png"]), PromptError, "a batch of 2 prompts takes images as 2 lists"),
        (dict(prompt="x" * 5000), PromptError, "the prompt has 50\\d\\d tokens and the answer may take 16; the context is"),
        (dict(prompt="x", max_new_tokens=10**9), PromptError, "the context is 4096"),
        (dict(prompt="x", max_new_tokens=1.5), OptionError, "max_new_tokens is 1.5; a whole number is needed"),
        (dict(prompt="x", steps=True), OptionError, "steps is True; a whole number is needed"),
        (dict(prompt="x", t_max="hot"), OptionError, "t_max is 'hot'; a number is needed"),
        (dict(prompt="x", entropy_bound=0.1, confidence_threshold=0.9), OptionError, "name two samplers"),
        (dict(prompt="x", temprature=1), OptionError, "unknown setting 'temprature'"),
        (dict(prompt="x", seed=-1), OptionError, "seed is -1; 0 to 2\\*\\*64 - 1 is allowed"),
        (dict(prompt=["x", "y"], seed=[1]), OptionError, "1 seeds for 2 prompt\\(s\\)"),
        (dict(prompt="x", chunk=0), OptionError, "chunk is 0; at least 1 is needed"),
        (dict(prompt="x", canvas=[0.5] * C), OptionError, "the seed canvas holds float64; whole numbers are needed"),
        (dict(prompt="x", canvas=[[1, 2], [3]]), OptionError, "the seed canvas has rows of different lengths"),
        (dict(prompt="x", pins=[5]), OptionError, "pins are \\[5\\]; a dict from answer positions to token ids"),
        (dict(prompt="x", pins={"6": 5}), OptionError, "a pin's position is '6'; a whole number is needed"),
        (dict(prompt="x", pins={6: 1.5}), OptionError, "a pinned token is 1.5; a whole number is needed"),
        (dict(prompt=["x", "y"], pins={0: 1}), OptionError, "takes pins as a list of 2 dicts"),
        (dict(prompt=["x", 5]), PromptError, "a prompt is 5; a string or a list of messages is needed"),
        (
            dict(prompt=[{"role": "user", "content": [{"type": "image", "text": None}]}]),
            PromptError,
            "1 empty image place",
        ),
        (dict(prompt="x", image_budget=100, images=[picture()]), OptionError, "70, 140, 280, 560"),
    ],
)
def test_bad_input_is_one_clear_line(pipe, call, error, message):
    with pytest.raises(error, match=message) as caught:
        pipe(**call)
    assert "\n" not in str(caught.value)
    assert issubclass(error, dgemma.UserError)


def test_arrays_are_pictures_too(pipe):
    pixels = np.asarray(picture())
    assert pipe("Hello.", images=[pixels]).tokens == pipe("Hello.", images=[picture()]).tokens


# -- packed keys and values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"kv_bits": 8}, {"kv_bits": 4, "kv_group_size": 32}, {"kv_bits": 8, "kv_start": 40}])
def test_packed_keys_and_values_answer(settings):
    pipe = dgemma.Pipeline.from_pretrained()
    assert pipe("Count from 3 to 24.", **settings).text == pipe("Count from 3 to 24.").text


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"kv_bits": 5}, "kv_bits is 5; allowed: 4, 8"),
        ({"kv_bits": "8"}, "kv_bits is '8'; a whole number is needed"),
        ({"kv_bits": 8, "kv_group_size": 16}, "kv_group_size is 16; allowed: 32, 64, 128"),
        ({"kv_bits": 8, "kv_start": -1}, "kv_start is -1"),
        ({"kv_group_size": 64}, "kv_group_size says how to pack keys and values; give kv_bits"),
    ],
)
def test_packings_that_are_none_are_refused(settings, message):
    with pytest.raises(dgemma.OptionError, match=message):
        dgemma.Pipeline.from_pretrained()("Hello", **settings)
