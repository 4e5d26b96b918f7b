"""Events -> terminal: what a stream of events looks like, as strings. Nothing here writes or asks the machine anything.

    answer      stats, as_json
    canvas      step_cells -> wrap -> paint, and Screen, which redraws in place
    any text    printable, one_line: what may go to a terminal
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:  # `dgemma --help` needs neither numpy nor mlx
    from .pipeline import Answer
    from .step import Step
    from .tools import ToolCall

NOISE, PLAIN = "90", ""  # SGR parameters: grey, the terminal's own
# A position is drawn by its entropy in nats: the first bound that it stays below names the colour.
HEAT = ((0.05, PLAIN), (0.5, "36"), (1.5, "33"), (float("inf"), "35"))
CONTROL, BREAK, HIDDEN = "·", "↵", "░"  # a control token, a line break inside a canvas, noise where there is no colour
BEGIN_FRAME, END_FRAME = "\x1b[?2026h\x1b[?25l", "\x1b[?2026l"  # one update at once, where the terminal knows how
SHOW_CURSOR, ERASE_ROW = "\x1b[?25h", "\x1b[K\n"

Pieces = Callable[[Sequence[int]], list[str]]  # Processor.pieces


# -- text -------------------------------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """`text` without the control characters that would steer a terminal; line breaks and tabs stay."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs"))


def one_line(text: object) -> str:
    """`text` on one line: line breaks and control characters become spaces, runs of them one."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def cells_of(char: str) -> int:
    """Terminal columns that a character takes: 0, 1 or 2."""
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf", "Cc", "Cs"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


# -- answers ----------------------------------------------------------------------------------------------------------


def as_json(answer: Answer, model: str) -> dict:
    """An answer as the object that `--json` prints."""
    return {
        "text": answer.text,
        "tokens": list(answer.tokens),
        "thinking": answer.thinking,
        "tool_calls": [call_object(call) for call in answer.tool_calls],
        "finish_reason": answer.finish_reason,
        "stop_string": answer.stop_string,
        "prompt_tokens": answer.prompt_tokens,
        "image_tokens": answer.image_tokens,
        "generated_tokens": answer.generated_tokens,
        "blocks": answer.blocks,
        "steps": list(answer.steps),
        "tokens_per_forward": round(answer.tokens_per_forward, 3),
        "redrawn": answer.redrawn,
        "seconds": {name: round(value, 4) for name, value in asdict(answer.seconds).items()},
        "peak_memory": answer.peak_memory,
        "seed": answer.seed,
        "model": model,
    }


def call_object(call: ToolCall) -> dict:
    """A tool call as an object: name and arguments; one with a problem also has that, and its text."""
    found = {"name": call.name, "arguments": call.arguments}
    return found if call.complete else found | {"problem": call.problem, "text": call.text}


def json_line(value: dict) -> str:
    """One JSON object on one line; half surrogates are escaped, everything else stands as it is."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n"


def stats(answer: Answer) -> str:
    """What an answer took, on one line."""
    seconds, steps = answer.seconds, sum(answer.steps)
    parts = [
        f"{_count(answer.generated_tokens, 'token')} in {_count(answer.blocks, 'block')} and {_count(steps, 'step')} "
        f"({answer.tokens_per_forward:.1f} tokens/forward)",
        f"prompt {answer.prompt_tokens} ({answer.image_tokens} of images"
        + (f", {answer.cached_tokens} encoded before)" if answer.cached_tokens else ")"),
        f"load {seconds.load:.2f} s, images {seconds.images:.2f} s, prefill {seconds.prefill:.2f} s, "
        f"denoising {seconds.denoise:.2f} s",
        f"peak memory {size(answer.peak_memory)}",
    ]
    if answer.redrawn:
        parts.append(f"an empty answer was redrawn {_count(answer.redrawn, 'time')}")
    if answer.finish_reason == "length":
        parts.append("cut at the longest answer allowed")
    return "; ".join(parts)


def size(count: float) -> str:
    """Bytes with a decimal unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.2f} GB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# -- the canvas -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A piece of text in one style: SGR parameters, "" for plain. `open` marks what may still change."""

    text: str
    style: str = PLAIN
    open: bool = False


@dataclass(frozen=True)
class Inks:
    """How to write a token: `pieces` gives the text of ids, `controls` are the ids drawn as a dot."""

    pieces: Pieces
    controls: frozenset[int]

    def words(self, ids: Sequence[int]) -> list[str]:
        """One short printable string a token."""
        ids = [int(i) for i in ids]
        words = (piece.replace("\n", BREAK).replace("\t", " ") for piece in self.pieces(ids))
        return [CONTROL if i in self.controls else printable(word) for i, word in zip(ids, words)]


def step_cells(step: Step, inks: Inks, row: int = 0) -> list[Cell]:
    """The canvas of one row after a step: accepted tokens coloured by their entropy, noise grey."""
    return [
        Cell(word, _heat(entropy) if accepted else NOISE, not accepted or entropy >= HEAT[0][0])
        for word, entropy, accepted in zip(inks.words(step.canvas[row]), step.entropy[row], step.accepted[row])
    ]


def _heat(entropy: float) -> str:
    return next(style for bound, style in HEAT if entropy < bound) if entropy == entropy else HEAT[-1][1]


def step_title(step: Step, steps: int, row: int = 0) -> str:
    """Where the sampler stands, in words."""
    accepted, entropy = step.accepted[row], step.entropy[row]
    return (
        f"block {step.block + 1}, step {step.step}/{steps}, t {step.temperature:.2f}, "
        f"entropy {entropy.mean():.3f}, accepted {int(accepted.sum())}/{len(accepted)}"
    )


def step_line(step: Step, steps: int, inks: Inks, row: int = 0) -> str:
    """A step on one line without escapes, for a log or a terminal that wants no colour."""
    words = inks.words(step.canvas[row])
    canvas = "".join(word if kept else HIDDEN for word, kept in zip(words, step.accepted[row]))
    return f"{step_title(step, steps, row)} | {canvas}"


def wrap(cells: Sequence[Cell], width: int) -> list[list[Cell]]:
    """Rows of at most `width` columns; a "\\n" begins a new row."""
    rows: list[list[Cell]] = [[]]
    used = 0
    for cell in cells:
        for char in cell.text:
            columns = cells_of(char)
            if char == "\n" or used + columns > width:
                rows.append([])
                used = 0
            if char != "\n":
                rows[-1].append(Cell(char, cell.style, cell.open))
                used += columns
    return rows


def paint(row: Sequence[Cell]) -> str:
    """A row with its escapes; neighbours of one style share them."""
    parts, style = [], PLAIN
    for cell in row:
        if cell.style != style:
            parts.append(f"\x1b[{cell.style or 0}m")
            style = cell.style
        parts.append(cell.text)
    return "".join(parts) + ("\x1b[0m" if style else "")


def view(rows: list[list[Cell]], height: int) -> list[list[Cell]]:
    """The `height` rows to show of a canvas that may be longer: from just above the first that has not settled."""
    if len(rows) <= height:
        return rows
    first = next((i for i, row in enumerate(rows) if any(cell.open for cell in row)), len(rows))
    start = min(max(0, first - 1), len(rows) - height)
    return rows[start : start + height]


class Screen:
    """A region at the bottom of a terminal that is redrawn in place; its methods return what to write.

    It stays lower than the terminal is high, so that moving the cursor up never meets the edge.
    """

    def __init__(self) -> None:
        self._widths: list[int] = []  # columns of each row now on the screen; the cursor stands below the last

    def frame(self, title: str, cells: Sequence[Cell], columns: int, lines: int) -> str:
        """The region with new content, for a terminal of `columns` x `lines`."""
        width = max(2, columns - 1)  # the last column stays free: terminals differ in what a full row does to the cursor
        rows = [[Cell(title[:width], NOISE)]] if lines > 2 else []
        rows += view(wrap(cells, width), max(1, lines - 1 - len(rows)))
        back = self._back(columns)
        self._widths = [sum(cells_of(char) for cell in row for char in cell.text) for row in rows]
        return BEGIN_FRAME + back + "".join(f"{paint(row)}\x1b[K\n" for row in rows) + "\x1b[J" + END_FRAME

    def clear(self, columns: int) -> str:
        """Take the region away, and give the cursor back. Row by row: some terminals keep a screen erased at once."""
        up = self._height(columns)
        back, self._widths = self._back(columns), []
        return f"{back}{ERASE_ROW * up}{back}{SHOW_CURSOR}" if up else ""

    def _back(self, columns: int) -> str:
        """Up to the region's first row."""
        up = self._height(columns)
        return f"\r\x1b[{up}A" if up else ""

    def _height(self, columns: int) -> int:
        """Lines that the region takes: a terminal that became narrower has wrapped the rows it shows."""
        return sum(max(1, -(-width // columns)) for width in self._widths)
