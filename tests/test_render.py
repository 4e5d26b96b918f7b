"""Events -> strings: colours by entropy, wrapping, the region that is redrawn, statistics."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dgemma import Answer, Seconds, Step, render
from dgemma.render import Cell, Inks, Screen

WORDS = {0: "<pad>", 1: "<eos>", 2: "red", 3: " circle", 4: "a\nb", 5: "漢", 6: "\x1b[31m"}
INKS = Inks(lambda ids: [WORDS[i] for i in ids], frozenset({0, 1}))


def a_step(canvas, entropy, accepted) -> Step:
    return Step(
        block=0,
        step=3,
        temperature=0.75,
        rows=(0,),
        active=np.array([True]),
        canvas=np.array([canvas]),
        best=np.array([canvas]),
        entropy=np.array([entropy], dtype=np.float32),
        accepted=np.array([accepted]),
    )


def an_answer(**changes) -> Answer:
    usual = {
        "text": "red",
        "tokens": (2,),
        "finish_reason": "stop",
        "prompt_tokens": 70,
        "image_tokens": 60,
        "steps": (2, 3),
        "redrawn": 0,
        "seed": 7,
        "seconds": Seconds(load=1.0, images=0.25, prefill=0.5, denoise=2.0),
        "peak_memory": 44_350_640,
    }
    return Answer(**(usual | changes))


class Terminal:
    """As much of a terminal as a Screen needs: text, line feeds, cursor up, erase to the end of line and of screen."""

    def __init__(self, columns: int, lines: int):
        self.columns, self.rows, self.line, self.column = columns, [[" "] * columns for _ in range(lines)], 0, 0

    def write(self, text: str) -> None:
        import re

        for escape, char in re.findall(r"(\x1b\[\??[0-9;]*[A-Za-z])|([^\x1b])", text):
            if escape.endswith("A"):
                up = int(escape[2:-1])
                assert up <= self.line, "the cursor would leave the screen"
                self.line -= up
            elif escape.endswith("K"):
                self.rows[self.line][self.column :] = [" "] * (self.columns - self.column)
            elif escape.endswith("J"):
                self.rows[self.line :] = [[" "] * self.columns for _ in self.rows[self.line :]]
            elif char == "\n":
                self.column, self.line = 0, self.line + 1
                if self.line == len(self.rows):
                    self.rows, self.line = self.rows[1:] + [[" "] * self.columns], self.line - 1
            elif char == "\r":
                self.column = 0
            elif char:
                assert self.column < self.columns, "a row is wider than the terminal"
                self.rows[self.line][self.column] = char
                self.column += 1

    def text(self) -> list[str]:
        return [line for line in ("".join(row).rstrip() for row in self.rows) if line]


def test_a_position_is_coloured_by_its_entropy_and_noise_is_grey():
    step = a_step([2, 3, 2, 3, 2], [0.0, 0.2, 1.0, 2.0, 0.0], [True, True, True, True, False])
    assert [cell.style for cell in render.step_cells(step, INKS)] == ["", "36", "33", "35", "90"]
    assert [cell.open for cell in render.step_cells(step, INKS)] == [False, True, True, True, True]


def test_control_tokens_are_dots_and_nothing_in_a_token_steers_the_terminal():
    assert INKS.words([0, 1, 2, 4, 6]) == ["·", "·", "red", "a↵b", "[31m"]


def test_an_entropy_that_is_not_a_number_is_drawn_as_the_least_certain():
    assert render.step_cells(a_step([2], [float("nan")], [True]), INKS)[0].style == "35"


def test_a_step_on_one_line_has_no_escapes_and_hides_noise():
    line = render.step_line(a_step([2, 3, 4, 0], [0.0, 0.0, 3.0, 0.0], [True, True, False, True]), 48, INKS)
    assert line == "block 1, step 3/48, t 0.75, entropy 0.750, accepted 3/4 | red circle░·"


@pytest.mark.parametrize("width", [2, 3, 7, 80])
def test_wrapped_rows_fit_and_lose_nothing(width):
    cells = [Cell("red circle"), Cell("漢字漢", "33"), Cell("e\u0301tude\nnext", "36")]
    rows = render.wrap(cells, width)
    assert all(sum(render.cells_of(cell.text) for cell in row) <= width for row in rows)
    assert "".join(cell.text for row in rows for cell in row) == "red circle漢字漢e\u0301tudenext"


def test_neighbours_of_one_style_share_their_escapes():
    row = [Cell("a"), Cell("b", "33"), Cell("c", "33"), Cell("d")]
    assert render.paint(row) == "a\x1b[33mbc\x1b[0md"
    assert render.paint([Cell("a", "90")]) == "\x1b[90ma\x1b[0m"


def test_a_canvas_longer_than_the_terminal_shows_where_it_is_settling():
    rows = [[Cell(str(i), open=i >= 30)] for i in range(40)]
    assert [row[0].text for row in render.view(rows, 5)] == ["29", "30", "31", "32", "33"]
    assert [row[0].text for row in render.view([[Cell(str(i))] for i in range(40)], 5)] == ["35", "36", "37", "38", "39"]
    assert render.view(rows[:3], 5) == rows[:3]


@pytest.mark.parametrize("size", [(20, 6), (40, 3), (12, 24), (3, 2)])
def test_the_region_is_redrawn_in_place_and_taken_away(size):
    columns, lines = size
    screen, terminal = Screen(), Terminal(columns, lines)
    terminal.write("before\n"[: columns - 1] if columns > 7 else "")
    for count in (100, 3, 50, 1, 200):
        terminal.write(screen.frame("title", [Cell("x" * count, "33")], columns, lines))
        assert terminal.text().count("title"[: max(2, columns - 1)]) == (1 if lines > 2 else 0)
    terminal.write(screen.clear(columns))
    assert not any("x" in line for line in terminal.text())


def test_a_terminal_that_became_narrower_is_cleared_to_the_top_of_the_region():
    screen = Screen()
    screen.frame("t" * 30, [Cell("x" * 70)], 80, 24)
    assert screen.frame("t", [Cell("x")], 40, 24).startswith(render.BEGIN_FRAME + "\r\x1b[3A")  # 30 -> 1 row, 70 -> 2


def test_a_screen_that_drew_nothing_writes_nothing():
    assert Screen().clear(80) == ""


def test_printable_keeps_text_and_drops_what_steers_a_terminal():
    assert render.printable("a\x1b[31m\x07b\nc\td\x9bé漢\r") == "a[31mb\nc\tdé漢"


def test_one_line_is_one_line():
    assert render.one_line("a\nb\r\n\tc\x1bd  e") == "a b c d e"


def test_statistics_say_what_an_answer_took():
    assert render.stats(an_answer()) == (
        "1 token in 2 blocks and 5 steps (0.2 tokens/forward); prompt 70 (60 of images); "
        "load 1.00 s, images 0.25 s, prefill 0.50 s, denoising 2.00 s; peak memory 44.4 MB"
    )
    assert render.stats(an_answer(redrawn=1, finish_reason="length")).endswith(
        "; an empty answer was redrawn 1 time; cut at the longest answer allowed"
    )


def test_json_is_one_line_and_survives_half_a_surrogate():
    line = render.json_line(render.as_json(an_answer(text="é\ud800\n"), "demo"))
    assert line.count("\n") == 1 and "é" in line
    found = json.loads(line.encode("utf-8"))
    assert found["text"] == "é\ud800\n" and found["steps"] == [2, 3] and found["seconds"]["prefill"] == 0.5
    assert found["model"] == "demo" and found["generated_tokens"] == 1 and found["blocks"] == 2 and found["seed"] == 7


@pytest.mark.parametrize("count, text", [(0, "0 B"), (999, "999 B"), (14_276_304, "14.3 MB"), (52e9, "52.00 GB")])
def test_sizes(count, text):
    assert render.size(count) == text
