"""A tokenizer read without transformers says what transformers' says: the demo's, and whatever a config may ask for."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys

import pytest

from dgemma import words
from dgemma.errors import CheckpointError
from dgemma.hub import DEMO

TEXTS = (
    "What is in this image?",
    "  two  spaces, tabs\tand\n\nlines ",
    "ünïcödé 漢字 🙂 \u200d end",
    "<|turn>user\nHi<turn|>\n<|image|> and <bos><eos>",
    "",
    "1234567890 + 3,14 = ?",
)


@pytest.fixture(scope="module")
def theirs():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(DEMO), local_files_only=True)


@pytest.fixture(scope="module")
def ours():
    found = words.load(DEMO)
    assert isinstance(found, words.Words)
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_encoding(ours, theirs, text):
    for special in (True, False):
        assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)


def test_decoding(ours, theirs):
    stream = random.Random(0)
    for _ in range(50):
        ids = [stream.randrange(len(theirs)) for _ in range(stream.randrange(1, 30))]
        for skip in (True, False):
            told = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == told
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)


def test_vocabulary(ours, theirs):
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    ids = {i: token.special for i, token in ours.added_tokens_decoder.items()}
    assert ids == {i: token.special for i, token in theirs.added_tokens_decoder.items()}
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.convert_tokens_to_ids("<|image|>") == theirs.convert_tokens_to_ids("<|image|>")
    assert ours.convert_tokens_to_ids(["<bos>", "<eos>"]) == theirs.convert_tokens_to_ids(["<bos>", "<eos>"])


PARTS = [{"type": "image"}, {"type": "text", "text": "What is <this>, & that?"}]
TALKS = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PARTS}],
    [{"role": "user", "content": PARTS}, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Why?"}],
)
TEMPLATES = (
    None,
    "{% for m in messages %}{{ m | tojson }}{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}{{ bos_token }}",
    "{% for m in messages %}\n  {% generation %}[{{ m.role }}]{% endgeneration %}\n{% endfor %}{{ image_token }}",
    "{{ messages | tojson(indent=2) }}{{ tools is none }}{{ add_generation_prompt }}{{ strftime_now('%Y') }}",
)


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_templates(ours, theirs, talk, template):
    given = {"chat_template": template, "tokenize": False, "add_generation_prompt": True}
    assert ours.apply_chat_template(talk, **given) == theirs.apply_chat_template(talk, **given)


def test_a_template_may_refuse_and_cannot_escape(ours):
    with pytest.raises(Exception, match="no such role"):
        ours.apply_chat_template(TALKS[0], chat_template="{{ raise_exception('no such role') }}", tokenize=False)
    with pytest.raises(Exception, match="unsafe"):
        ours.apply_chat_template(TALKS[0], chat_template="{{ ''.__class__.__mro__ }}", tokenize=False)


def test_ids_come_without_a_second_begin(ours):
    ids = ours.apply_chat_template(TALKS[0], add_generation_prompt=True)
    assert ids.count(ours.convert_tokens_to_ids("<bos>")) == 1


def copy(tmp_path, **changes):
    folder = tmp_path / "words"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, folder / name)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | changes
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_role_makes_a_token_special_as_transformers_has_it(tmp_path):
    from transformers import AutoTokenizer

    folder = copy(tmp_path, extra_special_tokens={"odd_token": "a"})
    ours, theirs = words.load(folder), AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    ids = theirs.encode("banana <eos>", add_special_tokens=False)
    assert ours.encode("banana <eos>", add_special_tokens=False) == ids
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def test_other_classes_are_left_to_transformers(tmp_path):
    found = words.load(copy(tmp_path, tokenizer_class="GemmaTokenizer"))
    assert not isinstance(found, words.Words)


def test_the_template_may_stand_in_the_config(tmp_path):
    folder = copy(tmp_path, chat_template=[{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}])
    (folder / "chat_template.jinja").unlink()
    assert words.load(folder).chat_template == "one"
    folder = copy(tmp_path / "x", chat_template="only") if (tmp_path / "x").mkdir() is None else None
    (folder / "chat_template.jinja").unlink()
    assert words.load(folder).chat_template == "only"


def test_a_template_that_is_no_text(tmp_path):
    folder = copy(tmp_path)
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="chat_template.jinja: cannot be read"):
        words.load(folder)


def test_an_answer_needs_no_transformers():
    program = (
        "import sys; from dgemma import Pipeline; import dgemma.vision;"
        "print(Pipeline.from_pretrained()('Count from 3 to 5.').text);"
        "print([m for m in ('transformers', 'torch') if m in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told == "3, 4, 5.\n[]\n"
