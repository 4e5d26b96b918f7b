"""Draws the sample pictures in examples/demo/pictures/ and writes answers.json: {file: {question: right answer}}.

    python examples/demo/samples.py

All handwriting is from the held-out digits; "coffee" and "zebra" are words that were never trained on.
"""

import json
import pathlib
import random

from PIL import Image, ImageDraw

import pictures
import questions

FOLDER = pathlib.Path(__file__).parent / "pictures"
PAPER = (250, 246, 236)


def arranged(size, paper, spots):
    """A scene with everything where it is wanted: spots are (shape, colour, x, y, radius, turn) from left to right."""
    sharp = 4
    image = Image.new("RGB", (size[0] * sharp, size[1] * sharp), paper)
    pen = ImageDraw.Draw(image)
    for shape, colour, x, y, q, turn in spots:
        if shape == "circle":
            pen.ellipse([(x - q) * sharp, (y - q) * sharp, (x + q) * sharp, (y + q) * sharp], pictures.COLOURS[colour])
        else:
            corners = pictures.outline(shape, x, y, q, turn)
            pen.polygon([(a * sharp, b * sharp) for a, b in corners], pictures.COLOURS[colour])
    return pictures.Picture(image.resize(size, Image.LANCZOS), "scene", [s[:2] for s in spots])


def scenes():
    return {
        "three_shapes.png": arranged((640, 400), PAPER, [
            ("circle", "red", 150, 215, 92, 0), ("star", "blue", 345, 130, 84, 8),
            ("triangle", "yellow", 505, 265, 88, -6)]),
        "one_star.png": arranged((320, 240), (235, 240, 250), [("star", "purple", 170, 125, 70, 5)]),
        "two_shapes.png": arranged((400, 300), PAPER, [
            ("square", "green", 110, 185, 62, 7), ("circle", "orange", 285, 105, 58, 0)]),
        "five_shapes.png": arranged((640, 360), PAPER, [
            ("diamond", "purple", 75, 110, 58, 0), ("circle", "green", 195, 250, 56, 0),
            ("star", "red", 320, 105, 62, 0),
            ("square", "blue", 445, 255, 54, 6), ("triangle", "black", 560, 115, 58, 0)]),
        "dark.png": arranged((480, 320), (22, 24, 44), [
            ("triangle", "pink", 110, 190, 62, 5), ("circle", "white", 245, 95, 48, 0),
            ("star", "yellow", 375, 205, 66, -8)]),
        "panorama.png": arranged((900, 200), (226, 236, 246), [
            ("star", "blue", 90, 110, 52, 0), ("square", "red", 300, 75, 42, 8), ("diamond", "green", 510, 120, 50, 0),
            ("circle", "black", 760, 95, 48, 0)]),
        "portrait.png": arranged((220, 800), (170, 210, 240), [
            ("square", "yellow", 65, 150, 44, 0), ("circle", "purple", 110, 405, 42, 0),
            ("triangle", "red", 155, 650, 46, 0)]),
        "tiny.png": arranged((480, 360), (240, 240, 240), [
            ("circle", "red", 90, 250, 14, 0), ("diamond", "blue", 240, 90, 15, 0),
            ("star", "orange", 390, 280, 16, 0)]),
    }


def writing():
    """Rows of held-out digits and signs; the seeds were chosen by eye for clear handwriting on a light page."""
    row = lambda number, seed: pictures.digit_row(random.Random(seed), held_out=True, number=number)
    word = lambda text, seed: pictures.sign(random.Random(seed), text=text)
    return {"digits_407.png": row("407", 117), "digits_407_again.png": row("407", 126), "digits_92.png": row("92", 54),
            "digits_35816.png": row("35816", 174),
            "sign_coffee.png": word("coffee", 8), "sign_zebra.png": word("zebra", 12)}


def main():
    FOLDER.mkdir(exist_ok=True)
    answers, shown = {}, scenes() | writing()
    r = random.Random(0)
    for name, p in shown.items():
        p.image.save(FOLDER / name, optimize=True)
        answers[name] = {q.text: q.answer for _ in range(12) for q in questions.about(r, p, free=False)}
    pairs = [("three_shapes.png", "five_shapes.png", questions.compare_scenes),
             ("digits_407.png", "digits_407_again.png", questions.compare_numbers),
             ("digits_407.png", "digits_92.png", questions.compare_numbers)]
    for a, b, compare in pairs:
        q = compare(shown[a], shown[b])
        answers[f"{a} {b}"] = {q.text: q.answer}
    (FOLDER / "answers.json").write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    main()
