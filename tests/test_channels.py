"""Thoughts, text and tool calls, told apart: by token, by block, under a budget, before a stop string; and no control token in any of them."""

import mlx.core as mx
import numpy as np
import pytest

import dgemma
from dgemma import PromptError, tools
from dgemma.channels import CALL, TEXT, THOUGHT, Marks, Reader
from dgemma.pipeline import Called, Text, Thought

MARKS = Marks(thought=1000, thought_end=1001, call=1002, call_end=1003, quote=1004)
CONTROL = {"<T>": 1000, "</T>": 1001, "<C>": 1002, "</C>": 1003, "<Q>": 1004}


def decode(ids):
    return "".join(chr(i) for i in ids if i < 1000)


def ids_of(text, control=CONTROL, spell=ord):
    """Token ids of letters, with control tokens by name."""
    found, at = [], 0
    while at < len(text):
        name = next((name for name in control if text.startswith(name, at)), None)
        found.append(control[name] if name else spell(text[at]))
        at += len(name or " ")
    return found


def read(text, cuts=(), cut=False, **how):
    """A reader that has read `text`, in blocks that end at `cuts`; and the pieces that it gave out."""
    reader, ids, pieces = Reader(decode, MARKS, **how), ids_of(text), []
    kept = 0
    for begin, end in zip((0, *cuts), (*cuts, len(ids))):
        ends = reader.push(ids[begin:end])
        pieces += reader.take()
        kept += end - begin if ends is None else ends
        if ends is not None:
            break
    reader.finish(cut)
    return reader, pieces + reader.take(), kept


WHOLE = '<T>thought\nTwo and two.\nYes.</T>It is 4.<C>call:add{a:2,b:<Q>two, "2" {}<Q>}</C> Done.'


@pytest.mark.parametrize("every", [1, 2, 3, 7, 1000])
def test_blocks_may_end_anywhere(every):
    reader, pieces, _ = read(WHOLE, range(every, len(ids_of(WHOLE)), every))
    assert reader.thinking == "Two and two.\nYes." and reader.text == "It is 4. Done."
    (call,) = reader.calls
    assert (call.name, call.arguments, call.problem) == ("add", {"a": 2, "b": 'two, "2" {}'}, None)
    by = {channel: "".join(piece for one, piece in pieces if one == channel) for channel in (TEXT, THOUGHT)}
    assert by == {TEXT: reader.text, THOUGHT: reader.thinking} and [piece for one, piece in pieces if one == CALL] == [call]


def test_what_is_not_closed():
    assert read("<T>thought\nand so")[0].thinking == "and so" and not read("<T>thought\nand so")[0].text
    for cut, why in ((True, "cut off by the token limit"), (False, "ended by the model")):
        reader, *_ = read('Wait.<C>call:add{a:2,b:<Q>tw', cut=cut)
        (call,) = reader.calls
        assert not call.complete and call.arguments is None and call.name == "add" and why in call.problem
        assert call.text == 'call:add{a:2,b:<|"|>tw' and reader.text == "Wait."


def test_a_prompt_that_has_opened_the_thought():
    reader, *_ = read("first this</T>Then that.", thinking=True)
    assert (reader.thinking, reader.text) == ("first this", "Then that.")


def test_borders_that_close_nothing_are_no_text():
    assert read("a</T>b</C>c<Q>d")[0].text == "abcd"


# -- stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    "text, stops, said, stop",
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["three", "two t"], "one ", "two t"),
        ("aab", ["ab"], "a", "ab"),
        ("one tw", ["two"], "one tw", None),
        ("xyz", ["x"], "", "x"),
        ("<T>thought\nstop</T>go stop", ["stop"], "go ", "stop"),
        ("a<C>call:f{}</C>b", ["ab"], "", "ab"),
    ],
)
def test_stop_strings_wherever_blocks_end(every, text, stops, said, stop):
    ids = ids_of(text)
    reader, pieces, kept = read(text, range(every, len(ids), every), stops=stops)
    assert (reader.text, reader.stop) == (said, stop)
    shown = "".join(piece for channel, piece in pieces if channel == TEXT)
    assert shown == said, "nothing of a stop string is ever given out"
    assert kept <= len(ids)


# -- the budget of a thought ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["", "<T>thought\nab"])
def test_a_thought_over_its_budget_is_closed_there(before):
    reader = Reader(decode, MARKS, thinking_budget=4)
    if before:
        reader.push(ids_of(before))
    block = ids_of("cdefgh" if before else "<T>thought\nabcdefgh")
    held = reader.amend(block)
    place = max(held)
    assert held[place] == MARKS.thought_end and decode(block[:place])[-1] == "d" and list(held) == list(range(place + 1))
    assert all(held[i] == block[i] for i in range(place))
    assert reader.amend(ids_of("c")) is None if before else reader.amend(ids_of("<T>thought\nabcd</T>efghijk")) is None


# -- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written, arguments",
    [
        ("{}", {}),
        ("{a:1,b:-2.5,c:1e3,d:true,e:false,f:null}", {"a": 1, "b": -2.5, "c": 1000.0, "d": True, "e": False, "f": None}),
        ("{a:[1,[2,[]],{b:<Q>x<Q>}]}", {"a": [1, [2, []], {"b": "x"}]}),
        ('{a:<Q>he said "no", {really}: [1]<Q>}', {"a": 'he said "no", {really}: [1]'}),
        ("{a:<Q><Q>,b:<Q>\n<Q>}", {"a": "", "b": "\n"}),
        ("{ a : 1 , b : bare words }", {"a": 1, "b": "bare words"}),
    ],
)
def test_arguments(written, arguments):
    (call,) = read(f"<C>call:f{written}</C>")[0].calls
    assert call.problem is None and call.arguments == arguments


@pytest.mark.parametrize("written", ["", "f{}", "call:{}", "call:f", "call:f{a}", "call:f{a:1", "call:f{a:1}}", "call:f{a:[1}", "call:f" + "{a:" * 200])
def test_calls_that_cannot_be_read_keep_their_text(written):
    (call,) = read(f"<C>{written}</C>")[0].calls
    assert not call.complete and call.text == written and "\n" not in call.problem


@pytest.mark.parametrize("given", ["weather", [3], [{"type": "function"}], [{"type": "function", "function": {"name": "f", "parameters": 3}}]])
def test_tools_of_another_shape_are_refused(given):
    with pytest.raises(PromptError, match="tool"):
        tools.declarations(given)


# -- the real loop, on a model that says what it is told ----------------------------------------------------------------


class Scripted:
    """The demo checkpoint, but that every canvas is sure of the tokens of a script."""

    def __init__(self, model, script):
        self._model, self._script, self._block = model, script, 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def prefill(self, *arguments, **named):
        self._block = 0
        self._model.prefill(*arguments, **named)

    def extend(self, *arguments):
        self._block += 1
        self._model.extend(*arguments)

    def scores(self, rows):
        length, end = self._model.config.canvas_length, 6  # <turn|>
        line = (self._script + [end] * length * 9)[self._block * length :][:length]
        wanted = np.full((len(rows), self._model.config.text.vocab_size), -30.0, np.float32)
        wanted[np.arange(len(rows)), np.resize(line, len(rows))] = 30.0
        return mx.array(wanted)


NAMES = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')


@pytest.fixture(scope="module")
def demo():
    return dgemma.Pipeline.from_pretrained()


def scripted(demo, text):
    tokenizer = demo.chat.tokenizer
    names = {name: tokenizer.convert_tokens_to_ids(name) for name in NAMES}
    ids, at = [], 0
    while at < len(text):  # runs of text between control tokens
        found = min((text.find(name, at) for name in names if text.find(name, at) >= 0), default=len(text))
        ids += tokenizer.encode(text[at:found], add_special_tokens=False)
        name = next((name for name in names if text.startswith(name, found)), None)
        ids += [names[name]] if name else []
        at = found + len(name or "")
    return dgemma.Pipeline(Scripted(demo.model, ids), demo.chat, demo.options)


SAID = '<|channel>thought\nThe red circle is left of the square, I think.<channel|>A red circle.<|tool_call>call:draw{shape:<|"|>circle<|"|>,at:[1,2]}<tool_call|>'


def test_channels_come_apart_through_the_real_loop(demo):
    pipe = scripted(demo, SAID)
    events = list(pipe.stream("What is in this image?", max_new_tokens=256))
    answer = events[-1].answers[0]
    assert answer.thinking == "The red circle is left of the square, I think." and answer.text == "A red circle."
    (call,) = answer.tool_calls
    assert (call.name, call.arguments, call.complete) == ("draw", {"shape": "circle", "at": [1, 2]}, True)
    assert answer.finish_reason == "stop" and answer.blocks > 1
    told = {kind: "".join(e.delta for e in events if isinstance(e, kind)) for kind in (Text, Thought)}
    assert told == {Text: answer.text, Thought: answer.thinking}
    assert [e.call for e in events if isinstance(e, Called)] == [call]
    assert not any(name in answer.text + answer.thinking for name in NAMES)
    turn = answer.message
    assert turn["content"] == "A red circle." and turn["tool_calls"][0]["function"]["arguments"] == call.arguments
    assert "think" not in str(turn)


def test_a_call_cut_off_by_the_token_limit(demo):
    whole = scripted(demo, SAID)("What is in this image?", max_new_tokens=256)
    cut = len(whole.tokens) - 4
    answer = scripted(demo, SAID)("What is in this image?", max_new_tokens=cut)
    (call,) = answer.tool_calls
    assert answer.finish_reason == "length" and not call.complete and "token limit" in call.problem and call.text


def test_stop_strings_through_the_real_loop(demo):
    answer = scripted(demo, "A red circle and a blue star.")("Caption this picture.", stop=[" and", "blue"])
    assert (answer.text, answer.stop_string, answer.finish_reason) == ("A red circle", " and", "stop")
    assert demo("Count from 3 to 24.", stop=" 9").text == "3, 4, 5, 6, 7, 8,"


@pytest.mark.parametrize("budget", [1, 5, 20])
def test_a_budget_closes_the_thought_and_the_answer_goes_on(demo, budget):
    pipe = scripted(demo, SAID)
    answer = pipe("What is in this image?", thinking_budget=budget, max_new_tokens=256)
    spent = len(demo.chat.tokenizer.encode(answer.thinking, add_special_tokens=False))
    assert 0 < spent <= budget and SAID.partition("thought\n")[2].startswith(answer.thinking)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"thinking_budget": 0}, "thinking_budget"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"tools": [3]}, "tool 1"),
    ],
)
def test_settings_of_channels_are_checked(demo, settings, message):
    with pytest.raises(dgemma.UserError, match=message):
        demo("Hello", **settings)


def test_thinking_goes_in_through_the_template(demo):
    on, off = (demo.chat.prompt([{"role": "user", "content": "Hello"}], [], thinking=flag).ids for flag in (True, False))
    assert demo.chat.tokenizer.convert_tokens_to_ids("<|think|>") in on and len(on) > len(off)




def test_tools_that_the_template_would_pass_over_are_refused(demo):
    tool = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(PromptError, match="the chat template of this checkpoint knows no tools"):
        demo("Hello", tools=[tool])
