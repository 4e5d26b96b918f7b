"""Draw how an answer settles: python examples/watch_canvas.py PICTURE [QUESTION] [--out canvas]

Writes canvas.gif (a frame a step) and canvas.png (chosen steps, one below the other). A cell is a position of the canvas,
coloured by the entropy of what the model believes there, in nats; bold tokens are accepted, the dim ones are the noise that
the next step reads in their place.
"""

import argparse
import math
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from dgemma import Block, DgemmaError, Finished, Pipeline, Step
from dgemma.vision import load_image

PAPER, INK, FAINT = (14, 17, 27), (226, 230, 240), (118, 126, 148)
# From sure to unsure. Lightness falls evenly, so that the order survives a grey print and colour-blind eyes.
HEAT = [(253, 231, 150), (250, 190, 110), (240, 138, 96), (208, 87, 106), (150, 57, 121), (92, 42, 116), (46, 32, 84)]
TICKS = (0, 0.1, 1, 3)
PAD, GAP, LINE, SIDE = 30, 6, 42, 350  # pixels
SIZE, SMALL, WIDEST = 23, 20, 140


@dataclass
class Frame:
    """A canvas after a step, or at last as the block that it became: what to write into each cell, and how."""

    block: int
    title: str
    words: list[str]
    entropy: list[float]
    accepted: list[bool]


def record(pipe, events):
    """The frames of every step and of every finished block of a stream's first row, and the answer."""
    frames, newest = [], None
    for event in events:
        if isinstance(event, Step):
            newest, accepted = event, event.accepted[0].tolist()
            title = f"block {event.block + 1}   step {event.step}   temperature {event.temperature:.2f}   "
            title += f"accepted {sum(accepted)} of {len(accepted)}"
            frames.append(Frame(event.block, title, words(pipe, event.canvas[0]), event.entropy[0].tolist(), accepted))
        elif isinstance(event, Block):
            best, entropy = words(pipe, newest.best[0]), newest.entropy[0].tolist()
            title = f"block {event.block + 1}   written: the most likely token everywhere"
            frames.append(Frame(event.block, title, best, entropy, [True] * len(best)))
        elif isinstance(event, Finished):
            return frames, event.answers[0]


def words(pipe, ids):
    return [clean(piece) for piece in pipe.processor.pieces(ids)]


def clean(piece):
    """A token as a cell shows it: control tokens as a dot, nothing longer than a cell."""
    piece = piece.strip() or "_"
    if piece.startswith("<") and piece.endswith(">") or not piece.isprintable():
        return "·"
    return piece if len(piece) <= 11 else piece[:10] + "…"


def font(size):
    return ImageFont.load_default(size)


def heat(nats, top):
    """The colour of an entropy between 0 and `top`; the root spreads out the small ones, where decisions fall."""
    place = math.sqrt(min(max(nats, 0), top) / top) * (len(HEAT) - 1)
    low = min(int(place), len(HEAT) - 2)
    return mix(HEAT[low], HEAT[low + 1], place - low)


def mix(one, other, share):
    return tuple(round(a + (b - a) * share) for a, b in zip(one, other))


def lightness(colour):
    return (0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]) / 255


class Columns:
    """Where the cells of a block stand: as wide as the widest word that any step writes there, wrapped into lines."""

    def __init__(self, frames, width):
        measure = font(SIZE).getlength
        self.boxes, x, y = [], 0, 0
        for words in zip(*(frame.words for frame in frames)):
            wide = min(max(max(measure(word) for word in words) + 16, 30), WIDEST)
            if x + wide > width:
                x, y = 0, y + LINE
            self.boxes.append((x, y, wide))
            x += wide + GAP
        self.height = y + LINE - GAP

    def draw(self, draw, left, top, frame, nats):
        for (x, y, wide), word, entropy, accepted in zip(self.boxes, frame.words, frame.entropy, frame.accepted):
            colour = heat(entropy, nats)
            fill = colour if accepted else mix(colour, PAPER, 0.62)
            box = (left + x, top + y, left + x + wide, top + y + LINE - GAP)
            draw.rounded_rectangle(box, 6, fill)
            size = SIZE
            while font(size).getlength(word) > wide - 8:
                size -= 1
            ink = (PAPER if lightness(fill) > 0.45 else INK) if accepted else mix(colour, INK, 0.35)
            middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
            if accepted:
                draw.text(middle, word, ink, font(size), "mm", stroke_width=0.5, stroke_fill=ink)
            else:
                draw.text(middle, word, mix(ink, fill, 0.2), font(size), "mm")


def side(draw, sheet, image, talk, height, nats):
    """The picture, what was said about it and the legend, left of the canvas."""
    width = SIDE - PAD
    shown = image.copy()
    shown.thumbnail((width, 260))
    sheet.paste(shown, (PAD, PAD))
    y = PAD + shown.height + 18
    for text, ink in zip(talk, (INK, HEAT[0])):
        for line in wrapped(text, width, SIZE):
            draw.text((PAD, y), line, ink, font(SIZE))
            y += 30
        y += 14
    y = max(y, height - PAD - 122)
    draw.text((PAD, y), "entropy, nats", FAINT, font(SMALL))
    for i in range(width):
        draw.line((PAD + i, y + 28, PAD + i, y + 44), heat((i / width) ** 2 * nats, nats))
    for tick in (*TICKS, round(nats, 1)):
        x = PAD + math.sqrt(tick / nats) * (width - 1)
        draw.text((x, y + 50), f"{tick:g}", FAINT, font(SMALL), "la" if tick == 0 else "ra" if tick > TICKS[-1] else "ma")
    sure, unsure = heat(0, nats), heat(1.5, nats)
    for x, word, fill, ink in ((0, "accepted", sure, PAPER), (136, "noise", mix(unsure, PAPER, 0.62), mix(unsure, INK, 0.35))):
        draw.rounded_rectangle((PAD + x, y + 82, PAD + x + 126, y + 82 + LINE - GAP), 6, fill)
        bold = 0.5 if word == "accepted" else 0
        draw.text((PAD + x + 63, y + 82 + (LINE - GAP) / 2), word, ink, font(SIZE), "mm", stroke_width=bold, stroke_fill=ink)


def wrapped(text, width, size):
    """Lines of `text` at most `width` pixels wide."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font(size).getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def chosen(frames, rows):
    """At most `rows` frames: the first and the last of the first block, and evenly spread ones between."""
    first = [frame for frame in frames if frame.block == 0]
    if len(first) <= rows:
        return first
    return [first[round(i * (len(first) - 1) / (rows - 1))] for i in range(rows)]


def strip(frames, image, talk, nats, width=1680, rows=7):
    """The steps of the first block below each other."""
    shown = chosen(frames, rows)
    columns = Columns(shown, width - SIDE - 2 * PAD)
    each = columns.height + 30 + 22
    height = max(2 * PAD + each * len(shown) - 22, 560)
    sheet = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    side(draw, sheet, image, talk, height, nats)
    for i, frame in enumerate(shown):
        top = PAD + i * each
        draw.text((SIDE + PAD, top), frame.title, FAINT, font(SMALL))
        columns.draw(draw, SIDE + PAD, top + 30, frame, nats)
    return sheet


def film(frames, image, talk, nats, width=1280):
    """One image a step: finished blocks stand above the one being written."""
    blocks = {block: Columns([f for f in frames if f.block == block], width - SIDE - 2 * PAD) for block in {f.block for f in frames}}
    last = {frame.block: frame for frame in frames}
    height = max(2 * PAD + 40 + sum(columns.height + 24 for columns in blocks.values()), 520)
    for frame in frames:
        sheet = Image.new("RGB", (width, height), PAPER)
        draw = ImageDraw.Draw(sheet)
        side(draw, sheet, image, talk[:1], height, nats)
        draw.text((SIDE + PAD, PAD), frame.title, FAINT, font(SMALL))
        top = PAD + 40
        for block in range(frame.block + 1):
            blocks[block].draw(draw, SIDE + PAD, top, frame if block == frame.block else last[block], nats)
            top += blocks[block].height + 24
        yield sheet


def save(frames, image, talk, nats, out):
    """OUT.png and OUT.gif."""
    strip(frames, image, talk, nats).save(f"{out}.png", optimize=True)
    sheets = [sheet.quantize(200, dither=Image.Dither.NONE) for sheet in film(frames, image, talk, nats)]
    pause = [450] * (len(sheets) - 1) + [4000]
    sheets[0].save(f"{out}.gif", save_all=True, append_images=sheets[1:], duration=pause, loop=0, optimize=True)


def main():
    parser = argparse.ArgumentParser(description="Draw how an answer settles.")
    parser.add_argument("picture")
    parser.add_argument("question", nargs="?", default="Tell a short story about this picture.")
    parser.add_argument("--out", default="canvas", help="where to write, without the ending; default: canvas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a folder or a hub id; default: the demo checkpoint that ships with dgemma")
    args = parser.parse_args()
    try:
        image, pipe = load_image(args.picture), Pipeline.from_pretrained(args.model)
        frames, answer = record(pipe, pipe.stream(args.question, images=[image], seed=args.seed))
    except DgemmaError as error:
        parser.exit(2, f"watch_canvas: {error}\n")
    try:
        save(frames, image, (args.question, answer.text), math.log(pipe.model.config.text.vocab_size), args.out)
    except OSError as error:
        parser.exit(2, f"watch_canvas: {args.out}: cannot be written ({error.strerror or error})\n")
    print(answer.text)
    print(f"{args.out}.gif, {args.out}.png: {answer.blocks} blocks, {sum(answer.steps)} steps")


if __name__ == "__main__":
    main()
