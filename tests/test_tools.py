"""Tool calls: what the grammar can say is read back, what it cannot is a line with the text kept; declarations are checked."""

from __future__ import annotations

import random

import pytest

from dgemma import PromptError, tools
from dgemma.tools import QUOTE, ToolCall, declarations, read_call, turn


def write(value) -> str:
    """A value as the released template writes it."""
    if isinstance(value, str):
        return QUOTE + value + QUOTE
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{write(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write, value)) + "]"
    return repr(value)


def read(text: str) -> ToolCall:
    return read_call(text.split(QUOTE))


def any_value(stream: random.Random, depth: int):
    kind = stream.randrange(8 if depth else 6)
    if kind == 6:
        return [any_value(stream, depth - 1) for _ in range(stream.randrange(4))]
    if kind == 7:
        return {f"k{i}": any_value(stream, depth - 1) for i in range(stream.randrange(4))}
    text = "".join(stream.choice("ab {}[],:\"'\\\n<|>né") for _ in range(stream.randrange(12))).replace(QUOTE, "")
    return [text, text, None, stream.random() < 0.5, stream.randrange(-999, 999), stream.uniform(-1e6, 1e6)][kind]


def test_whatever_the_template_can_write_is_read_back():
    stream = random.Random(0)
    for _ in range(500):
        arguments = {f"a{i}": any_value(stream, 3) for i in range(stream.randrange(4))}
        call = read("call:do_it" + write(arguments))
        assert call.complete and (call.name, call.arguments) == ("do_it", arguments), call


@pytest.mark.parametrize(
    "text, arguments",
    [
        ("call:f{}", {}),
        (" call:f { a : 1 , b : [ true , null ] } \n", {"a": 1, "b": [True, None]}),
        ('call:f{"a b":"x, \\"y\\" }"}', {"a b": 'x, "y" }'}),
        (f"call:f{{{QUOTE}a:b{QUOTE}:1e3}}", {"a:b": 1000.0}),
        ("call:f{unit:celsius,n:-7}", {"unit": "celsius", "n": -7}),
        ("call:f{a:nan,b:1_000}", {"a": "nan", "b": "1_000"}),
        ("call:f{a:None,b:True}", {"a": None, "b": True}),
        (f"call:f{{a:{QUOTE}{QUOTE}}}", {"a": ""}),
    ],
)
def test_what_models_write_beside_the_grammar(text, arguments):
    call = read(text)
    assert (call.name, call.arguments, call.problem, call.text) == ("f", arguments, None, text)


@pytest.mark.parametrize(
    "text, name, problem",
    [
        ("", None, "c was expected where its end stands"),
        ("weather{}", "weather", "c was expected where 'w' stands"),
        ("call:{}", None, "it has no name"),
        ("call:f", "f", "{ was expected where its end stands"),
        ("call:f{a:1", "f", ", was expected where its end stands"),
        ("call:f{a}", "f", ": was expected where '}' stands"),
        ("call:f{a:}", "f", "a value is missing"),
        ("call:f{:1}", "f", "a key is missing"),
        ("call:f{a:1}}", "f", "'}' follows its end"),
        (f"call:f{{a:{QUOTE}x}}", "f", "a string is not closed"),
        ('call:f{a:"x}', "f", "a string is not closed"),
        ("call:f{a:" + "[" * 5000, "f", "its values are more than 64 deep"),
        ("call:f{a:" + "9" * 5000 + "}", "f", "a number has 5000 digits"),
    ],
)
def test_what_cannot_be_read_keeps_its_text(text, name, problem):
    call = read(text)
    assert not call.complete and call.arguments is None and (call.name, call.text) == (name, text)
    assert call.problem == f"the tool call cannot be read: {problem}" and "\n" not in call.problem


def weather(city: str, days: int = 1) -> str:
    """
    The weather of a city.

    Args:
        city: Its name.
        days: How many days ahead.
    """
    return city


SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def test_functions_become_schemas_as_transformers_has_it():
    given, own = declarations([weather, SCHEMA])
    assert own is SCHEMA and given["function"]["name"] == "weather"
    assert given["function"]["parameters"]["properties"]["city"] == {"type": "string", "description": "Its name."}
    assert given["function"]["parameters"]["required"] == ["city"]


def bare(x):
    return x


@pytest.mark.parametrize(
    "given, message",
    [
        ("weather", "tools are 'weather'; a list is needed"),
        (SCHEMA, "tools are {'type': 'function'"),
        ([5], "tool 1 is 5; {'type': 'function', 'function': {'name'"),
        ([SCHEMA, {"name": "f"}], "tool 2 is {'name': 'f'}"),
        ([{"type": "function", "function": {"name": ""}}], "tool 1 is"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tool 1 has parameters \\[\\]"),
        ([{"type": "function", "function": {"name": "f", "x": {1, 2}}}], "tool 1 is no JSON"),
        ([{"type": "function", "function": {"name": "f", "x": "\ud800"}}], "tool 1 is no JSON"),
        ([bare], "tool 1 is a function without a usable docstring and type hints"),
    ],
)
def test_other_shapes_are_refused_in_one_line(given, message):
    with pytest.raises(PromptError, match=message) as caught:
        declarations(given)
    assert "\n" not in str(caught.value)


def test_only_complete_calls_enter_the_history():
    done, broken = read("call:f{a:1}"), read("call:f{a")
    assert turn("Hm.", [done, broken]) == {
        "role": "assistant",
        "content": "Hm.",
        "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }
    assert turn("Hm.", [broken]) == {"role": "assistant", "content": "Hm."}


@pytest.mark.parametrize("calls", [5, [5], [{"function": {}}], [{"function": {"name": "f", "arguments": 5}}]])
def test_calls_of_earlier_turns_are_checked(calls):
    with pytest.raises(PromptError, match="message 3 has "):
        tools.check_calls({"role": "assistant", "tool_calls": calls}, 3)
