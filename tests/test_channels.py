"""Thoughts, text, calls and stops through the real loop and pipeline, with the demo's tokenizer and a model that is told what to write."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import scripted
from dgemma import Block, Called, Finished, OptionError, Pipeline, PromptError, Text, Thought
from dgemma.channels import Stops

CHAT = scripted.processor()
CLOSE, END = CHAT.marks.thought_end, 6
SAID = '<|channel>thought\nA star, or two?\nTwo.<channel|>I see two stars.<|tool_call>call:draw{what:<|"|>a "{star}", [red]<|"|>,n:2}<tool_call|>'


def ids(text: str) -> list[int]:
    return CHAT.tokenizer.encode(text, add_special_tokens=False)


def answer(*texts: str, canvas: int = 8, room: int = 400, template: str | None = scripted.TEMPLATE, **settings):
    """The answers to as many prompts as texts; each is ended by <turn|>."""
    pipe = scripted.pipeline(*([*ids(text), END] for text in texts), canvas=canvas, room=room, template=template)
    return pipe("Hi" if len(texts) == 1 else ["Hi"] * len(texts), **settings)


# -- channels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("canvas", [1, 3, 8, 64])
def test_a_thought_a_text_and_a_call_are_told_apart(canvas):
    found = answer(SAID, canvas=canvas)
    assert found.thinking == "A star, or two?\nTwo." and found.text == "I see two stars."
    (call,) = found.tool_calls
    assert (call.name, call.arguments, call.problem) == ("draw", {"what": 'a "{star}", [red]', "n": 2}, None)
    assert list(found.tokens) == ids(SAID) and found.finish_reason == "stop"


@pytest.mark.parametrize("canvas", [1, 3, 8, 64])
def test_they_stream_apart_and_in_order(canvas):
    events = list(scripted.pipeline([*ids(SAID), END], canvas=canvas).stream("Hi"))
    (collected,) = events[-1].answers
    assert "".join(e.delta for e in events if isinstance(e, Text)) == collected.text
    assert "".join(e.delta for e in events if isinstance(e, Thought)) == collected.thinking
    assert [e.call for e in events if isinstance(e, Called)] == list(collected.tool_calls)
    order = [type(e) for e in events if isinstance(e, (Text, Thought, Called))]
    assert order == sorted(order, key=[Thought, Text, Called].index)
    assert [t for e in events if isinstance(e, Block) for t in e.tokens[0]] == list(collected.tokens)
    if canvas == 3:
        assert order.count(Text) > 1 and order.count(Thought) > 1


def test_random_tokens_never_leak_a_control_token_and_stream_as_collected():
    stream = random.Random(1)
    controls = [token.content for token in CHAT.tokenizer.added_tokens_decoder.values() if token.special]
    marks = [10, 11, 17, 18, 21]
    for _ in range(60):
        line = [stream.choice(marks) if stream.random() < 0.3 else stream.randrange(2, 384) for _ in range(40)]
        line = [token for token in line if token != END]
        seen = []
        for canvas in (5, 64):
            events = list(scripted.pipeline([*line, END], canvas=canvas).stream("Hi", redraws=0))
            (found,) = events[-1].answers
            assert "".join(e.delta for e in events if isinstance(e, Text)) == found.text
            assert "".join(e.delta for e in events if isinstance(e, Thought)) == found.thinking
            assert not [name for name in controls if name in found.text + found.thinking]
            seen.append((found.text, found.thinking, found.tool_calls))
        assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "said, thinking, text",
    [
        ("<|channel>thought\n<channel|>Yes.", "", "Yes."),  # how a template switches thinking off
        ("<|channel>Hm.<channel|>Yes.", "Hm.", "Yes."),  # no name line
        ("<|channel>thought\nOne.<channel|>Yes.<|channel>thought\nTwo.<channel|> No.", "One.\nTwo.", "Yes. No."),
        ("<|channel>thought\nWhat now", "What now", ""),
        ("<|channel>thou", "", ""),
        ("Yes.<channel|><tool_call|><|\"|> No.<|think|>", "", "Yes. No."),
        ("<|channel>thought\nA<tool_call|><|channel>b<channel|>", "Ab", ""),
    ],
)
def test_odd_thoughts(said, thinking, text):
    found = answer(said, redraws=0)
    assert (found.thinking, found.text, found.tool_calls) == (thinking, text, ())


def test_a_thought_that_the_prompt_has_opened():
    opened = scripted.TEMPLATE + "{{- '<|channel>thought\\n' -}}"
    found = answer("Two, I think.<channel|>Two.", template=opened)
    assert (found.thinking, found.text) == ("Two, I think.", "Two.")


def test_borders_spelled_letter_by_letter_are_text():
    letters = [i for c in "<|channel>" for i in ids(c)]
    pipe = scripted.pipeline([*letters, END])
    assert 10 not in letters and pipe("Hi").text == "<|channel>"


# -- calls ------------------------------------------------------------------------------------------------------------


def test_a_call_cut_off_by_the_token_limit_is_incomplete_and_kept():
    said = '<|tool_call>call:draw{what:<|"|>a star<|"|>}<tool_call|>'
    found = answer("Now. " + said, room=len(ids("Now. " + said)) - 3)
    (call,) = found.tool_calls
    assert not call.complete and call.problem == "the tool call was cut off by the token limit"
    assert (call.name, call.arguments, call.text) == ("draw", None, 'call:draw{what:<|"|>a star')
    assert found.finish_reason == "length" and found.text == "Now. " and "tool_calls" not in found.message


@pytest.mark.parametrize(
    "said, problem",
    [
        ("<|tool_call>call:f{a:1}", "the tool call was ended by the model before it was closed"),
        ("<|tool_call>call:f{a:1}<|tool_call>call:g{}<tool_call|>", "another channel was opened before it was closed"),
        ("<|tool_call>call:f{a:1<tool_call|>", "the tool call cannot be read: , was expected where its end stands"),
    ],
)
def test_calls_that_are_not_whole(said, problem):
    first, *rest = answer(said).tool_calls
    assert problem in first.problem and first.text.startswith("call:f{a:1") and first.name == "f"
    assert [call.name for call in rest] == (["g"] if "call:g" in said else [])


def test_tools_go_in_calls_come_out_results_go_back():
    def draw(what: str) -> str:
        """
        Draws a thing.

        Args:
            what: The thing.
        """

    pipe = scripted.pipeline([*ids('<|tool_call>call:draw{what:<|"|>star<|"|>}<tool_call|>'), 19, END])
    talk = [{"role": "user", "content": "A star!"}]
    first = pipe(talk, tools=[draw])
    told = CHAT.tokenizer.decode(pipe.model.prompts[0][0].tolist())
    assert '<|tool>declaration:draw{description:<|"|>Draws a thing.<|"|>,parameters:{type:<|"|>object<|"|>' in told
    talk += [first.message, {"role": "tool", "name": "draw", "content": "drawn"}]
    pipe(talk, tools=[draw])
    told = CHAT.tokenizer.decode(pipe.model.prompts[1][0].tolist())
    assert told.endswith(
        '<|turn>model\n<|tool_call>call:draw{what:<|"|>star<|"|>}<tool_call|>'
        '<|tool_response>response:draw{value:<|"|>drawn<|"|>}<tool_response|>'
    )


def test_thoughts_never_enter_the_history():
    pipe = scripted.pipeline([*ids(SAID), END])
    found = pipe("Hi", enable_thinking=True)
    assert "<|think|>" in CHAT.tokenizer.decode(pipe.model.prompts[0][0].tolist())
    assert "thought" not in str(found.message) and found.message["content"] == "I see two stars."
    with_thought = {"role": "assistant", "content": "<|channel>thought\nA secret.<channel|>Two."}
    shown = CHAT.render([{"role": "user", "content": "Hi"}, with_thought, {"role": "user", "content": "Why?"}])
    assert "secret" not in shown and "Two." in shown


# -- the budget -------------------------------------------------------------------------------------------------------


def thinker(thought: str, rest: str, canvas: int):
    """Thinks on whatever happens; once its thought is closed for it, it answers from there."""
    free = ids("<|channel>thought\n" + thought + "<channel|>" + rest) + [END]
    known: list[int] = []  # the answer so far, as it was committed
    calls = {}

    def script(block: int, tokens: list[int]) -> list[int]:
        calls[block] = tokens
        before = len(known)
        if before < block * canvas:
            known.extend(script.last)
        line = known[: block * canvas]
        for at, token in enumerate(tokens):
            held = line + tokens[: at + 1]
            if token == CLOSE and CLOSE not in line and held[:-1] == free[: len(held) - 1]:
                script.last = (tokens[: at + 1] + ids(rest) + [END] + [1] * canvas)[:canvas]
                script.closed = len(held) - 1
                return script.last
        if CLOSE in line:
            script.last = (ids(rest) + [END] + [1] * canvas)[len(line) - line.index(CLOSE) - 1 :][:canvas]
        else:
            script.last = free[block * canvas : (block + 1) * canvas]
        script.last = (script.last + [1] * canvas)[:canvas]
        return script.last

    return script


THOUGHT_TEXT = "one, two, three, four, five, six, seven, eight, nine, ten"


@pytest.mark.parametrize("canvas", [4, 8, 16])
def test_a_budget_closes_the_thought_exactly_there(canvas):
    name, thought = len(ids("<|channel>thought\n")), ids(THOUGHT_TEXT)
    for budget in range(1, 20):
        found = scripted.pipeline(thinker(THOUGHT_TEXT, "Yes.", canvas), canvas=canvas)("Hi", thinking_budget=budget)
        closed = list(found.tokens).index(CLOSE)
        assert closed == name + budget and list(found.tokens[:closed]) == (ids("<|channel>thought\n") + thought)[:closed]
        assert found.thinking == CHAT.decode(thought[:budget]) and found.text == "Yes." and found.finish_reason == "stop"


def test_a_thought_within_its_budget_is_left_alone():
    length = len(ids(THOUGHT_TEXT))
    free = scripted.pipeline(thinker(THOUGHT_TEXT, "Yes.", 8))("Hi")
    same = scripted.pipeline(thinker(THOUGHT_TEXT, "Yes.", 8))("Hi", thinking_budget=length)
    assert (same.tokens, same.steps) == (free.tokens, free.steps) and same.thinking == THOUGHT_TEXT
    less = scripted.pipeline(thinker(THOUGHT_TEXT, "Yes.", 8))("Hi", thinking_budget=length - 1)
    assert less.thinking == CHAT.decode(ids(THOUGHT_TEXT)[:-1])


def test_a_closed_thought_in_a_batch_leaves_its_neighbours_alone():
    def both(*scripts, seeds):
        return scripted.pipeline(*scripts)(["Hi"] * len(scripts), thinking_budget=4, seed=seeds)

    straight = lambda block, _: [*ids("A plain answer of several blocks."), END][block * 8 : block * 8 + 8]
    together = both(straight, thinker(THOUGHT_TEXT, "Yes.", 8), seeds=[3, 4])
    alone = both(straight, seeds=[3]) + both(thinker(THOUGHT_TEXT, "Yes.", 8), seeds=[4])
    assert [(a.tokens, a.steps) for a in together] == [(a.tokens, a.steps) for a in alone]


def test_on_the_demo_itself_a_budget_holds_what_was_written():
    """The demo thinks no thoughts of its own: one is pinned open, and the real model writes the rest around its end."""
    pipe = Pipeline.from_pretrained()
    found = pipe("Count from 3 to 24.", pins={0: CHAT.marks.thought}, thinking_budget=5, max_new_tokens=64)
    tokens = list(found.tokens)
    assert tokens[0] == CHAT.marks.thought and CLOSE in tokens
    assert len(ids(found.thinking)) <= 5 and pipe.processor.decode(tokens[tokens.index(CLOSE) :]).startswith(found.text[:5])


# -- stops ------------------------------------------------------------------------------------------------------------

COUNT = "3, 4, 5, 6, 7, 8, 9, 10, 11."


@pytest.mark.parametrize("canvas", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("stop", ["7", ", 7", "7, 8, 9", "6, 7,", "1.", "3", "11.", "x", ["10", " 8"], ["8, 9, 10", "9"]])
def test_the_text_ends_before_the_first_stop_string(canvas, stop):
    found = answer(COUNT, canvas=canvas, stop=stop)
    stops = [stop] if isinstance(stop, str) else stop
    ends = [(COUNT.index(one) + len(one), COUNT.index(one)) for one in stops if one in COUNT]
    assert found.text == (COUNT[: min(ends)[1]] if ends else COUNT)
    assert found.stop_string == (COUNT[min(ends)[1] : min(ends)[0]] if ends else None) and found.finish_reason == "stop"
    assert CHAT.decode(found.tokens).startswith(found.text)
    if canvas == 1 and ends:
        assert found.blocks <= len(ids(COUNT[: min(ends)[0]])), "nothing is written after the stop string"


def test_nothing_of_a_stop_string_is_said_too_early():
    events = list(scripted.pipeline([*ids(COUNT), END], canvas=1).stream("Hi", stop=["7, 8, 9", "5, 7"]))
    said = ""
    for event in events:
        if isinstance(event, Text):
            said += event.delta
            assert "3, 4, 5, 6, ".startswith(said)
    assert said == "3, 4, 5, 6, "
    held = scripted.pipeline([*ids(COUNT), END], canvas=1)("Hi", stop="11.x")
    assert held.text == COUNT and held.stop_string is None, "what only began like one is said in the end"


def test_stops_are_found_the_same_however_the_text_is_cut():
    stream = random.Random(0)
    for _ in range(500):
        text = "".join(stream.choice("ab") for _ in range(stream.randrange(20)))
        stops = ["".join(stream.choice("ab") for _ in range(stream.randrange(1, 6))) for _ in range(stream.randrange(1, 4))]
        ends = [(text.index(one) + len(one), text.index(one), one) for one in stops if one in text]
        finder, said, at, found = Stops(stops), "", 0, None
        while at < len(text) and found is None:
            size = stream.randrange(1, 5)
            fresh, found = finder.push(text[at : at + size])
            said, at = said + fresh, at + size
        expected = (text[: min(ends)[1]], min(ends)[2]) if ends else (text, None)
        assert (said if found is not None else said + finder.rest(), found) == expected, (text, stops)


def test_thoughts_and_calls_are_not_searched():
    found = answer('<|channel>thought\nA star.<channel|>Two.<|tool_call>call:f{a:<|"|>star<|"|>}<tool_call|>', stop="star")
    assert found.stop_string is None and found.thinking == "A star." and found.tool_calls[0].complete


@pytest.mark.parametrize("canvas", [1, 8, 64])
def test_what_follows_a_stop_string_in_its_block_is_not_written(canvas):
    found = answer(SAID, canvas=canvas, stop="two")
    assert (found.text, found.stop_string, found.tool_calls) == ("I see ", "two", ()) and found.thinking
    assert list(found.tokens) == ids(SAID)[: len(found.tokens)]
    assert CHAT.decode(found.tokens[found.tokens.index(CLOSE) :]).startswith("I see ") and CHAT.marks.call not in found.tokens


def test_a_row_that_a_stop_string_ends_leaves_the_batch():
    pipe = scripted.pipeline([*ids(COUNT), END], [*ids("9"), *ids(COUNT), END])
    events = list(pipe.stream(["Hi", "Hi"], stop="9"))
    blocks = [event.rows for event in events if isinstance(event, Block)]
    assert blocks[0] == (0, 1) and all(rows == (0,) for rows in blocks[1:]) and len(blocks) > 1
    assert isinstance(events[-1], Finished)
    assert [one.text for one in events[-1].answers] == ["3, 4, 5, 6, 7, 8, ", ""]


def test_on_the_demo_itself_a_stopped_answer_is_the_beginning_of_the_whole():
    pipe = Pipeline.from_pretrained()
    whole = pipe("Count from 3 to 24.")
    found = pipe("Count from 3 to 24.", stop=["17", " 15"])
    assert found.text == whole.text.partition(" 15")[0] and found.stop_string == " 15"
    assert whole.tokens[: len(found.tokens)] == found.tokens and len(found.steps) < len(whole.steps)


# -- bad input --------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "function", "function": {"name": "f", "description": "<|turn>", "parameters": {}}}


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"stop": ""}, OptionError, "stop holds an empty string"),
        ({"stop": ["a", ""]}, OptionError, "stop holds an empty string"),
        ({"stop": 5}, OptionError, "stop is 5; a string or a list of strings is needed"),
        ({"stop": [5]}, OptionError, "stop is \\[5\\]; a string or a list"),
        ({"thinking_budget": 0}, OptionError, "thinking_budget is 0; at least 1 is needed"),
        ({"thinking_budget": 1.5}, OptionError, "thinking_budget is 1.5; a whole number is needed"),
        ({"enable_thinking": 1}, OptionError, "enable_thinking is 1; True or False is needed"),
        ({"tools": [5]}, PromptError, "tool 1 is 5; "),
        ({"tools": [SCHEMA]}, PromptError, "tool 1 spells <|turn>, which only the chat template may write".replace("|", "\\|")),
    ],
)
def test_bad_settings_are_one_clear_line(settings, error, message):
    with pytest.raises(error, match=message) as caught:
        answer("Yes.", **settings)
    assert "\n" not in str(caught.value)


def test_a_template_without_tools_or_thinking_says_so(checkpoint):
    demo = scripted.pipeline([END], template=None)
    with pytest.raises(PromptError, match="the chat template of this checkpoint knows no tools"):
        demo("Hi", tools=[SCHEMA | {"function": {"name": "f", "parameters": {}}}])
    tiny = Pipeline.from_pretrained(checkpoint)
    with pytest.raises(PromptError, match="the chat template of this checkpoint knows no thinking"):
        tiny("Hi", enable_thinking=True)
    with pytest.raises(OptionError, match="thinking_budget is 3, but this checkpoint's tokenizer has no <channel|>".replace("|", "\\|")):
        tiny("Hi", thinking_budget=3)


@pytest.mark.parametrize("text", ["a<|tool_call>b", "a<tool_response|>b", 'a<|"|>b', "a<|channel>b"])
def test_results_and_questions_cannot_spell_borders(text):
    with pytest.raises(PromptError, match="message 2 spells .* put a space inside it"):
        CHAT.prompt([{"role": "user", "content": "Hi"}, {"role": "tool", "name": "f", "content": text}])


# -- docs/words.md ----------------------------------------------------------------------------------------------------

STOPS, THOUGHTS, TOOLS = re.findall("```python\n(.*?)```", (Path(__file__).parents[1] / "docs" / "words.md").read_text(), re.DOTALL)


def test_the_example_of_stops_says_what_its_comment_says(capsys):
    exec(STOPS, {})
    assert STOPS.endswith(f"  # {capsys.readouterr().out}")


def test_the_example_of_thoughts_prints_them(capsys):
    line = THOUGHTS.split("\n", 1)[1]  # without the checkpoint that it loads
    exec(line, {"pipe": scripted.pipeline([*ids(SAID), END]), "Thought": Thought})
    assert capsys.readouterr().out == "A star, or two?\nTwo."


def test_the_example_of_tools_calls_one(capsys, tmp_path, monkeypatch):
    path = tmp_path / "example.py"  # transformers reads a function's source
    path.write_text(TOOLS)
    pipe = scripted.pipeline([*ids('<|tool_call>call:weather{city:<|"|>Turin<|"|>}<tool_call|>'), END])
    exec(compile(TOOLS, str(path), "exec"), {"pipe": pipe})
    told = CHAT.tokenizer.decode(pipe.model.prompts[1][0].tolist())
    assert told.endswith('<tool_call|><|tool_response>response:weather{value:<|"|>sunny<|"|>}<tool_response|>')
