"""Draws the pictures that the demo checkpoint is trained and measured on, together with the truth about them.

Three kinds: scenes of 1-6 coloured shapes, rows of 1-5 handwritten digits (scikit-learn's scans of real handwriting;
the last 397 are held out) and one printed word. Every function takes a `random.Random` and returns a `Picture`.
"""

import functools
import importlib.util
import math
import pathlib
import random
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw, ImageFont

COLOURS = {
    "red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 205, 40),
    "purple": (140, 60, 180), "orange": (240, 140, 30), "black": (20, 20, 20), "pink": (245, 130, 180),
    "white": (250, 250, 250),
}
SHAPES = ["circle", "square", "triangle", "star", "diamond"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TRAIN_DIGITS = 1400  # of 1797; the rest is never trained on
PATCH = 16
POOL = 3

TRAIN_WORDS = (
    "lamp stop open exit cafe book tree house water bread milk apple river stone cloud light night happy small north "
    "south train hotel music paper table chair phone world heart dance fresh daily bank park shop sale free sign push "
    "pull road city king queen gold moon fish bird lion bear wolf deer salt mint rice corn soup cake tea menu pizza "
    "taxi bus boat plane ticket summer winter spring autumn garden window kitchen doctor school market bakery flower"
).split()
HELD_OUT_WORDS = (
    "coffee museum beach forest candle rocket pencil tiger lemon honey castle bridge office ocean island velvet "
    "guitar zebra planet copper silver jacket butter magic quiet wagon hammer yellow pepper falcon"
).split()

# Patch classes of the auxiliary loss: 0 is background, then shape x colour, ten digits, 26 letters.
DIGIT_CLASS = 1 + len(SHAPES) * len(COLOURS)
LETTER_CLASS = DIGIT_CLASS + 10
N_CLASSES = LETTER_CLASS + 26
MAX_ORDER = 8  # objects are numbered 1..8 in reading order; 0 is background


@dataclass
class Picture:
    """A picture and what is true of it.

    image:   RGB picture
    kind:    "scene", "digits" or "word"
    objects: the scene's (shape, colour) pairs from left to right
    text:    the number or the word that is written
    labels:  "L" picture of the same size, i where object i (1-based, reading order) is drawn
    classes: patch class of each label value; classes[0] == 0 is background
    notes:   what is unusual about it: "dark", "panorama", "tiny", "held out", ...
    """

    image: Image.Image
    kind: str
    objects: list = field(default_factory=list)
    text: str = ""
    labels: Image.Image = None
    classes: list = field(default_factory=lambda: [0])
    notes: set = field(default_factory=set)


# ---------------------------------------------------------------------------------------------- sizes and colours
def target_size(width, height, budget=70):
    """Width and height in pixels to which Gemma4's image processor resizes a picture for a budget of soft tokens."""
    side = PATCH * POOL
    factor = math.sqrt(budget * side * side / (width * height))
    h, w = int(factor * height // side) * side, int(factor * width // side) * side
    if h == 0:
        h, w = side, min(int(width // height) * side, budget * side)
    elif w == 0:
        w, h = side, min(int(height // width) * side, budget * side)
    return w, h


def shrink(width, height, budget=70):
    """Resized pixels per original pixel, roughly; used to keep things large enough to be seen."""
    w, h = target_size(width, height, budget)
    return min(w / width, h / height)


def canvas_size(r):
    """Random width and height of a picture, and the note on its shape."""
    t = r.random()
    if t < 0.5:
        return r.choice([256, 320, 384, 420, 640]), r.choice([192, 240, 256, 320, 400]), None
    if t < 0.64:
        return r.randint(600, 960), r.randint(160, 240), "panorama"
    if t < 0.73:
        return r.randint(160, 240), r.randint(600, 960), "portrait"
    w = r.randint(200, 640)
    return w, int(min(700, max(160, w * r.uniform(0.5, 1.9)))), None


def background(r):
    """Random background colour and the note on it."""
    t = r.random()
    if t < 0.5:
        v = r.randint(225, 255)
        return (v, v, r.randint(215, 255)), None
    if t < 0.62:
        return tuple(r.randint(0, 50) for _ in range(3)), "dark"
    if t < 0.68:
        return (0, 0, 0), "dark"
    if t < 0.82:
        v = r.randint(70, 190)
        return tuple(max(0, min(255, v + r.randint(-6, 6))) for _ in range(3)), "grey"
    base = r.choice([(170, 210, 240), (245, 230, 200), (200, 240, 210), (20, 30, 90), (110, 25, 30), (20, 100, 100),
                     (245, 210, 220), (90, 60, 30), (60, 90, 60), (210, 200, 240), (180, 150, 100), (70, 110, 160)])
    return tuple(max(0, min(255, c + r.randint(-15, 15))) for c in base), "coloured"


def distance(a, b):
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)))


def jitter(r, colour, amount=10):
    return tuple(max(0, min(255, c + r.randint(-amount, amount))) for c in colour)


def visible_colours(paper, least=115):
    """Names of the colours that cannot be mistaken for, or lost on, this background."""
    return [name for name, rgb in COLOURS.items() if distance(rgb, paper) >= least]


def ink_colour(r, paper):
    """A colour for writing that stands out in brightness, not only in hue."""
    light = lambda c: 0.3 * c[0] + 0.59 * c[1] + 0.11 * c[2]
    good = [c for c in COLOURS.values() if abs(light(c) - light(paper)) > 85]
    return jitter(r, r.choice(good))


def speckle(r, image):
    """Adds a little sensor noise to one picture in four."""
    if r.random() > 0.25:
        return image
    a = np.asarray(image)
    rng = np.random.default_rng(r.getrandbits(32))
    s = r.randint(3, 14)
    noise = rng.integers(-s, s + 1, a.shape, dtype=np.int16)
    return Image.fromarray(np.clip(a + noise, 0, 255).astype(np.uint8))


# ---------------------------------------------------------------------------------------------- scenes
def outline(kind, cx, cy, radius, turn):
    """Corner points of a shape, turned by `turn` degrees; a circle is given as a polygon too."""
    if kind == "circle":
        pts = [(360 * i / 40, radius) for i in range(40)]
    elif kind == "square":
        pts = [(45 + 90 * i, radius * 1.2) for i in range(4)]
    elif kind == "triangle":
        pts = [(-90 + 120 * i, radius * 1.05) for i in range(3)]
    elif kind == "diamond":
        pts = [(0, radius * 0.72), (90, radius * 1.1), (180, radius * 0.72), (270, radius * 1.1)]
    else:
        pts = [(-90 + 36 * i, radius * 1.08 if i % 2 == 0 else radius * 0.44) for i in range(10)]
    return [(cx + d * math.cos(math.radians(a + turn)), cy + d * math.sin(math.radians(a + turn))) for a, d in pts]


def place(r, n, w, h, least):
    """Centres and radii of n shapes in free layout, sorted from left to right.

    Shapes never touch, and neighbours in reading order differ clearly in x, so that the order is beyond dispute.
    """
    most = max(least * 1.1, min(0.4 * h, 0.52 * w / n, 0.4 * w))
    for attempt in range(60):
        upper = most * (0.97 ** attempt)
        if r.random() < 0.4:  # all about as large as fits
            radii = [max(least, upper * r.uniform(0.65, 1.0)) for _ in range(n)]
        else:  # anything between tiny and large
            radii = [math.exp(r.uniform(math.log(least), math.log(max(upper, least * 1.05)))) for _ in range(n)]
        xs = [r.uniform(q * 1.15 + 2, max(w - q * 1.15 - 2, q * 1.15 + 2.1)) for q in radii]
        ys = [r.uniform(q * 1.15 + 2, max(h - q * 1.15 - 2, q * 1.15 + 2.1)) for q in radii]
        spots = sorted(zip(xs, ys, radii))
        apart = all(b[0] - a[0] >= max(0.45 * max(a[2], b[2]), 0.9 * least) for a, b in zip(spots, spots[1:]))
        clear = all(math.hypot(a[0] - b[0], a[1] - b[1]) > 1.18 * (a[2] + b[2])
                    for i, a in enumerate(spots) for b in spots[:i])
        if apart and clear:
            return spots
    cell = w / n  # fall back to one column each
    q = max(min(cell * 0.4, h * 0.4), least * 0.9)
    low, high = q * 1.2, max(h - q * 1.2, q * 1.2 + 1)
    return [(cell * (i + 0.5), r.uniform(low, high), q * r.uniform(0.8, 1)) for i in range(n)]


def scene(r, n=None, size=None, paper=None):
    """A scene of n shapes, all of different colours."""
    n = n or r.randint(1, 6)
    w, h, note = (*size, None) if size else canvas_size(r)
    paper, tone = (paper, None) if paper else background(r)
    while len(visible_colours(paper)) < n:  # every shape needs a colour of its own that shows up
        paper, tone = background(r)
    least = 9.5 / shrink(w, h)  # about one patch across after resizing
    sharp = 2 if r.random() < 0.5 else 1
    image = Image.new("RGB", (w * sharp, h * sharp), paper)
    labels = Image.new("L", (w, h), 0)
    pen, marker = ImageDraw.Draw(image), ImageDraw.Draw(labels)
    picture = Picture(image, "scene", labels=labels, notes={note, tone} - {None})
    tilt = 0 if r.random() < 0.5 else 12
    for i, (x, y, q) in enumerate(place(r, n, w, h, least)):
        kind = r.choice(SHAPES)
        colour = r.choice([c for c in visible_colours(paper) if c not in [o[1] for o in picture.objects]])
        corners = outline(kind, x, y, q, r.uniform(-tilt, tilt))
        pen.polygon([(a * sharp, b * sharp) for a, b in corners], fill=jitter(r, COLOURS[colour]))
        marker.polygon(corners, fill=i + 1)
        picture.objects.append((kind, colour))
        picture.classes.append(1 + SHAPES.index(kind) * len(COLOURS) + list(COLOURS).index(colour))
        if q < 1.5 * least:
            picture.notes.add("tiny")
    if sharp == 2:
        image = image.resize((w, h), Image.BOX)
    picture.image = speckle(r, image)
    return picture


# ---------------------------------------------------------------------------------------------- handwriting
@functools.lru_cache(None)
def handwriting():
    """scikit-learn's 1797 handwritten digits: uint8 [1797, 8, 8] (255 is ink) and their values."""
    from sklearn.datasets import load_digits  # here, since only handwriting needs it (the `evaluate` extra)

    data = load_digits()
    return (data.images * (255 / 16.0)).round().astype(np.uint8), data.target.astype(int)


def warp(r, digit, size):
    """Elastic and affine distortion of an 8x8 digit, drawn at size x size.

    The page is cut into 3x3 cells whose corners move: all together (rotation, shear, scale) and each a little alone.
    """
    pad = 2
    source = Image.fromarray(np.pad(digit, pad))
    turn, shear = math.radians(r.gauss(0, 8)), r.gauss(0, 0.12)
    sx, sy = r.uniform(0.84, 1.14), r.uniform(0.86, 1.12)
    wobble = abs(r.gauss(0, 0.16))
    corner = {}
    for i in range(4):
        for j in range(4):
            x, y = (i / 3 - 0.5) * 8 / sx, (j / 3 - 0.5) * 8 / sy
            x += shear * y
            x, y = x * math.cos(turn) - y * math.sin(turn), x * math.sin(turn) + y * math.cos(turn)
            corner[i, j] = (x + 4 + pad + r.gauss(0, wobble), y + 4 + pad + r.gauss(0, wobble))
    edge = [round(size * i / 3) for i in range(4)]
    mesh = [((edge[i], edge[j], edge[i + 1], edge[j + 1]),
             (*corner[i, j], *corner[i, j + 1], *corner[i + 1, j + 1], *corner[i + 1, j]))
            for i in range(3) for j in range(3)]
    return source.transform((size, size), Image.MESH, mesh, Image.BICUBIC)


def find_digit(r, value, held_out):
    """Index of a random scan, of the given value if one is asked for."""
    _, values = handwriting()
    while True:
        i = r.randrange(TRAIN_DIGITS, len(values)) if held_out else r.randrange(TRAIN_DIGITS)
        if value is None or values[i] == value:
            return i


def blend(paper, ink, cover):
    """Ink over paper; cover is an "L" mask."""
    a = np.asarray(cover, np.float32)[..., None] / 255
    return Image.fromarray((np.array(paper) * (1 - a) + np.array(ink) * a).round().astype(np.uint8))


def digit_row(r, held_out=False, number=None, most=5):
    """A row of handwritten digits. Scans of the training part are distorted, held-out ones are shown as they are."""
    scans, values = handwriting()
    n = len(number) if number else r.randint(1, most)
    size = r.choice([48, 64, 80, 96])
    step = round(size * r.uniform(0.86, 1.05))
    paper, tone = background(r)
    w, h = step * (n - 1) + size + r.randint(4, 40), size + r.randint(4, 36)
    if r.random() < 0.35:  # free layout: the row somewhere on a larger page
        w, h = int(w * r.uniform(1.0, 1.5)), int(h * r.uniform(1.0, 2.0))
    cover, labels = Image.new("L", (w, h), 0), Image.new("L", (w, h), 0)
    marker = ImageDraw.Draw(labels)
    picture = Picture(None, "digits", labels=labels, notes={tone} - {None} | ({"held out"} if held_out else set()))
    x = r.randint(0, max(1, w - step * (n - 1) - size))
    y0, slope = r.randint(0, max(1, h - size)), r.uniform(-0.05, 0.05)
    for q in range(n):
        i = find_digit(r, int(number[q]) if number else None, held_out)
        if held_out or r.random() < 0.1:
            glyph = Image.fromarray(scans[i]).resize((size, size), Image.BICUBIC)
        else:
            glyph = warp(r, scans[i], size)
        strength = r.uniform(0.75, 1.0) if r.random() < 0.7 or held_out else r.uniform(0.95, 1.35)
        y = min(max(0, round(y0 + slope * (x - w / 2) + r.uniform(-0.04, 0.04) * size)), max(0, h - size))
        glyph = glyph.point(lambda v: min(255, int(v * strength)))
        cover.paste(glyph, (x, y), glyph)
        marker.rectangle([x + size * 0.06, y, x + size * 0.94, y + size], fill=q + 1)
        picture.classes.append(DIGIT_CLASS + int(values[i]))
        picture.text += str(values[i])
        x += step
    picture.image = speckle(r, blend(paper, ink_colour(r, paper), cover))
    return picture


# ---------------------------------------------------------------------------------------------- print
@functools.lru_cache(None)
def font_files():
    """Pillow's own font (None) and, where matplotlib is installed, the fonts that it brings along."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None:
        return [None]
    folder = pathlib.Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"
    names = ["DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono", "STIXGeneral"]
    return [None, None] + [str(folder / f"{n}.ttf") for n in names if (folder / f"{n}.ttf").exists()]


@functools.lru_cache(None)
def font(file, size):
    return ImageFont.load_default(size) if file is None else ImageFont.truetype(file, size)


def random_letters(r):
    while True:
        text = "".join(r.choice(LETTERS) for _ in range(r.randint(3, 7)))
        if text not in HELD_OUT_WORDS and text not in ("user", "model", "system"):
            return text


def sign(r, words="train", text=None):
    """One printed word in small letters, one of `words`: "train" (mostly random), "held out", "listed" or "random"."""
    if text is None:
        if words == "held out":
            text = r.choice(HELD_OUT_WORDS)
        elif words == "random" or (words == "train" and r.random() < 0.6):
            text = random_letters(r)
        else:
            text = r.choice(TRAIN_WORDS)
    face = font(r.choice(font_files()), r.randint(30, 56))
    x0, y0, x1, y1 = face.getbbox(text)
    w, h = x1 + r.randint(14, 60), y1 + r.randint(14, 50)
    if r.random() < 0.3:
        w, h = int(w * r.uniform(1.0, 1.35)), int(h * r.uniform(1.0, 1.8))
    w = max(w, 110)
    x, y = r.randint(5, max(5, w - x1 - 5)), r.randint(2, max(2, h - y1 - 4))
    cover, labels = Image.new("L", (w, h), 0), Image.new("L", (w, h), 0)
    ImageDraw.Draw(cover).text((x, y), text, font=face, fill=255)
    marker = ImageDraw.Draw(labels)
    paper, tone = background(r)
    picture = Picture(None, "word", text=text, labels=labels, notes={tone} - {None})
    for i, letter in enumerate(text):
        a, b = x + face.getlength(text[:i]), x + face.getlength(text[: i + 1])
        marker.rectangle([a, y + y0, b, y + y1], fill=i + 1)
        picture.classes.append(LETTER_CLASS + LETTERS.index(letter))
    if r.random() < 0.5:
        turn = r.uniform(-5, 5) * min(1.0, 2.5 * h / w)
        cover = cover.rotate(turn, Image.BICUBIC)
        picture.labels = labels.rotate(turn, Image.NEAREST)
    picture.image = speckle(r, blend(paper, ink_colour(r, paper), cover))
    return picture


# ---------------------------------------------------------------------------------------------- patches
def patches(picture, budget=70):
    """What the vision tower sees and what the auxiliary losses ask for.

    Returns pixels uint8 [n, 768], patches per row, class uint8 [n] and reading order uint8 [n] of every patch.
    """
    w, h = target_size(*picture.image.size, budget)
    a = np.asarray(picture.image.resize((w, h), Image.BICUBIC), np.uint8)
    cols, rows = w // PATCH, h // PATCH
    pixels = a.reshape(rows, PATCH, cols, PATCH, 3).transpose(0, 2, 1, 3, 4).reshape(rows * cols, -1)
    order = np.asarray(picture.labels.resize((cols, rows), Image.NEAREST)).reshape(-1)
    return pixels, cols, np.array(picture.classes, np.uint8)[order], order


def contact_sheet(seed, path, n=40):
    """A sheet of random pictures, to look at them."""
    r = random.Random(seed)
    sheet = Image.new("RGB", (8 * 240, (n // 8) * 200), "white")
    for i in range(n):
        p = r.choice([scene, scene, digit_row, sign])(r)
        p.image.thumbnail((230, 170))
        sheet.paste(p.image, (i % 8 * 240, i // 8 * 200))
        label = p.text or " ".join(c[0] + "-" + s for s, c in p.objects)
        ImageDraw.Draw(sheet).text((i % 8 * 240, i // 8 * 200 + 175), label[:60], fill="black")
    sheet.save(path)
