"""Templates: what is a mark, where its tokens lie, and which choices fit; on plain strings and a tokenizer of characters."""

import random
import re

import pytest

from dgemma.errors import OptionError, PromptError
from dgemma.template import FREE, Pieces, Slot, check_names, hole_lengths, parse, read_slots


def words(text):
    """A tokenizer like SentencePiece's: a word and the space before it are one token, whatever else is a character."""
    return [hash(part) & 0xFFFF for part in re.findall(r" ?[a-z]+|.", text, re.DOTALL)]


def test_a_template_is_texts_and_marks_and_a_space_before_a_mark_is_its_own():
    found = parse("The colour is [[colour]] and there are  [[count]]shapes.")
    assert found.texts == ("The colour is", " and there are ", "shapes.")
    assert (found.leads, found.marks) == ((" ", " "), ("colour", "count"))
    assert found.filled(["red", "two"]) == "The colour is red and there are  twoshapes."


def test_what_is_filled_in_leaves_everything_else_byte_for_byte():
    stream = random.Random(1)
    for _ in range(1000):
        texts = ["".join(stream.choices(" ab\n[].é🙂-", k=stream.randint(0, 6))) for _ in range(stream.randint(2, 4))]
        texts = [re.sub(r"\[+|\]+", "·", text) for text in texts]
        parts = [stream.choice(["", "x", " y "]) for _ in texts[1:]]
        found = parse("".join(text + f"[[{i}]]" for i, text in enumerate(texts[:-1])) + texts[-1])
        assert found.filled(parts) == "".join(a + b for a, b in zip(texts, [*parts, ""]))


def test_a_canvas_is_free_at_its_marks_and_behind_its_end():
    pieces = Pieces(((1, 2), (3,), ()), end=(9,))
    assert pieces.canvas([2, 1]) == ([1, 2, FREE, FREE, 3, FREE, 9], [2, 5])
    assert pieces.canvas([1, 1], width=8) == ([1, 2, FREE, 3, FREE, 9, FREE, FREE], [2, 4])


def test_holes_have_a_length_or_a_range_of_them():
    assert hole_lengths(parse("[[2]] [[1-3]][[4-4]]")) == (range(2, 3), range(1, 4), range(4, 5))


def test_the_usual_length_of_a_slot_is_that_of_most_choices():
    assert Slot("a", ("x", "y", "z"), ((1,), (2, 3), (4, 5))).usual == 2
    assert Slot("a", ("x", "y"), ((1,), (2, 3))).usual == 1
    assert Slot("a", ("x", "y"), ((1,), (2, 3))).lengths == (1, 2)


def test_choices_take_the_space_before_their_slot():
    (slot,) = read_slots(parse("it is [[a]]."), {"a": ["red", "light blue"]}, words)
    assert [list(one) for one in slot.tokens] == [words(" red"), words(" light blue")]


@pytest.mark.parametrize(
    "template, message",
    [
        (5, "a template is 5; a string is needed"),
        ("", "the template has no hole"),
        ("The colour is red.", "the template has no hole; mark one as in"),
        ("a [[b", 'opens "\\[\\[" at character 3 and never closes it'),
        ("a [[b]] [[", 'opens "\\[\\[" at character 9 and never closes it'),
        ("a [[b [[c]] d]]", 'opens "\\[\\[" at character 7 inside another; close that one first'),
        ("a ]] b", '"\\]\\]" at character 3 that closes nothing'),
        ("[[a]] ]]", '"\\]\\]" at character 7 that closes nothing'),
        ("\ud800[[a]]", "half a surrogate pair"),
    ],
)
def test_a_template_that_is_none_is_one_clear_line(template, message):
    with pytest.raises(PromptError, match=message) as caught:
        parse(template)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mark", ["", "a", "0", "3-1", "1-", "-2", "1-2-3", "0-2", "1.5", "٣"])
def test_a_hole_needs_a_length(mark):
    with pytest.raises(PromptError, match="is no hole; its tokens are needed"):
        hole_lengths(parse(f"a [[{mark}]]"))


@pytest.mark.parametrize(
    "template, message",
    [
        ("[[1-3]]", "\\[\\[1-3\\]\\] names no slot"),
        ("[[]]", "names no slot"),
        ("[[a b]]", "names no slot"),
        ("[[a]] [[a]]", "two slots named 'a'"),
    ],
)
def test_a_slot_needs_a_name_of_its_own(template, message):
    with pytest.raises(PromptError, match=message):
        check_names(parse(template))


@pytest.mark.parametrize(
    "choices, message",
    [
        (5, "choices are 5; a dict from slots to lists of words"),
        ({}, "slot 'a' has no choices; at least one is needed"),
        ({"a": []}, "slot 'a' has no choices; at least one is needed"),
        ({"a": ["x"], "size": ["y"]}, "choices for 'size', which is no slot of the template; it has a"),
        ({"a": "red"}, "choices of 'a' are 'red'; a list of words is needed"),
        ({"a": 5}, "choices of 'a' are 5; a list"),
        ({"a": ["x", ""]}, "a choice of 'a' is ''; a word"),
        ({"a": ["x", 5]}, "a choice of 'a' is 5; a word"),
        ({"a": ["\ud800"]}, "a choice of 'a' is"),
        ({"a": ["x", "y", "x"]}, "choice 'x' of 'a' is given twice"),
        ({"a": ["!", "red"]}, "choice 'red' of 'a' becomes other tokens in its place than alone; put a space"),
    ],
)
def test_choices_that_do_not_fit_are_one_clear_line(choices, message):
    with pytest.raises(OptionError, match=message) as caught:
        read_slots(parse("it is [[a]]dish."), choices, words)  # "reddish" is one token
    assert "\n" not in str(caught.value)


def test_names_of_other_templates_are_no_mistake():
    assert read_slots(parse("it is [[a]]."), {"a": ["x"], "b": ["y"]}, words, frozenset("ab"))
