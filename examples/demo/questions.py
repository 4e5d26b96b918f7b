"""The questions of fixed wording, and their answers, about the pictures of pictures.py.

A conversation is a list of (pictures, question, answer) turns; only the last answer is asked for. `TASKS` names every
task in the order of the training log; the tasks in `FREE` have many right answers (stories.py).
"""

from dataclasses import dataclass

import pictures
import stories

TASKS = ["describe", "count", "colour", "list", "digits", "how many digits", "word", "random letters",
         "how many letters", "counting", "more shapes", "same number", "second turn", "caption", "story"]
FREE = ("caption", "story")
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight"]

CAPTION = "Caption this picture."
STORY = "Tell a short story about this picture."
MORE = "Which picture has more shapes?"
SAME = "Are the two numbers the same?"


@dataclass
class Question:
    """task, wording and the one right answer, or, for a free task, one sampled right answer."""

    task: str
    text: str
    answer: str


def describe(objects):
    seen = [stories.phrase(*o) for o in objects]
    return "I see " + (f"{seen[0]} left of {seen[1]}." if len(seen) == 2 else stories.join(seen) + ".")


def about_scene(r, objects, free=True):
    """Every question that a scene of these (shape, colour) pairs answers."""
    n, out = len(objects), []
    if n <= 3:
        wording = r.choice(["Describe the picture.", "What is in this image?"])
        out.append(Question("describe", wording, describe(objects)))
    out.append(Question("count", "How many shapes are there?",
                        f"There {'is' if n == 1 else 'are'} {NUMBERS[n]} shape{'' if n == 1 else 's'}."))
    kinds = [k for k, _ in objects]
    single = [o for o in objects if kinds.count(o[0]) == 1]
    if single:
        k, c = r.choice(single)
        out.append(Question("colour", f"What color is the {k}?", f"The {k} is {c}."))
    if n >= 4:
        items = ", then ".join(stories.phrase(*o) for o in objects)
        out.append(Question("list", "List every shape from left to right.",
                            f"There are {NUMBERS[n]} shapes in the picture. From left to right: {items}."))
    if free and n <= 4:
        out.append(Question("caption", CAPTION, stories.sample_caption(r, objects)))
    if free and n <= 5:
        out.append(Question("story", STORY, stories.sample_story(r, objects)))
    return out


def about_digits(r, number):
    n = len(number)
    wording = r.choice(["What number is written here?", "Read the number."])
    return [Question("digits", wording, f"The number is {number}."),
            Question("how many digits", "How many digits are there?",
                     f"There {'is' if n == 1 else 'are'} {NUMBERS[n]} digit{'' if n == 1 else 's'}.")]


def about_sign(r, word):
    task = "word" if word in pictures.TRAIN_WORDS + pictures.HELD_OUT_WORDS else "random letters"
    return [Question(task, "What does the sign say?", f'The sign says "{word}".'),
            Question("how many letters", "How many letters are there?", f"There are {NUMBERS[len(word)]} letters.")]


def about(r, picture, free=True):
    """Every question about one picture."""
    if picture.kind == "scene":
        return about_scene(r, picture.objects, free)
    return about_digits(r, picture.text) if picture.kind == "digits" else about_sign(r, picture.text)


def counting(r):
    """"Count from 3 to 14.", answered in text alone over one to three canvases."""
    a = r.randint(0, 60)
    b = min(99, a + (r.randint(4, 14) if r.random() < 0.5 else r.randint(4, 28)))
    return Question("counting", f"Count from {a} to {b}.", ", ".join(map(str, range(a, b + 1))) + ".")


def compare_scenes(first, second):
    a, b = len(first.objects), len(second.objects)
    if a == b:
        answer = f"Both pictures have {NUMBERS[a]} shape{'' if a == 1 else 's'}."
    else:
        which = "first" if a > b else "second"
        answer = f"The {which} picture has more shapes: {NUMBERS[max(a, b)]} against {NUMBERS[min(a, b)]}."
    return Question("more shapes", MORE, answer)


def compare_numbers(first, second):
    if first.text == second.text:
        answer = f"Yes, both numbers are {first.text}."
    else:
        answer = f"No, the first number is {first.text} and the second number is {second.text}."
    return Question("same number", SAME, answer)


def picture_pair(r, held_out=False):
    """Two pictures to be compared, and the question."""
    if r.random() < 0.5:
        a = pictures.scene(r)
        n = None if r.random() < 0.8 else len(a.objects)  # equal counts would be rare by chance
        b = pictures.scene(r, n)
        return a, b, compare_scenes(a, b)
    a = pictures.digit_row(r, held_out, most=3)
    t = r.random()
    if t < 0.45:
        number = a.text
    elif t < 0.7:  # one digit differs
        i = r.randrange(len(a.text))
        number = a.text[:i] + r.choice("0123456789") + a.text[i + 1:]
    else:
        number = None
    b = pictures.digit_row(r, held_out, number, most=3)
    return a, b, compare_numbers(a, b)


def second_turn(r, picture):
    """An answered first question about a picture and a different second one: (history, question)."""
    first, second = r.sample(about(r, picture), 2)
    if second.task in FREE or first.task == "story":
        plain = [q for q in about(r, picture, free=False)]
        if len(plain) < 2:
            plain = plain * 2
        first, second = r.sample(plain, 2)
    return [first], Question("second turn", second.text, second.answer)


def corpus(r, n=4000):
    """Sample texts that contain every word of every task; the vocabulary is made from them."""
    for _ in range(n):
        objects = [(r.choice(pictures.SHAPES), c) for c in r.sample(list(pictures.COLOURS), r.randint(1, 6))]
        number = "".join(r.choice("0123456789") for _ in range(r.randint(1, 5)))
        asked = about_scene(r, objects) + about_digits(r, number) + [counting(r)]
        asked += about_sign(r, pictures.random_letters(r))[1:]
        a, b = (pictures.Picture(None, "scene", objects[: r.randint(1, len(objects))]) for _ in "ab")
        asked += [compare_scenes(a, b)]
        a, b = (pictures.Picture(None, "digits", text=r.choice(["7", "8"])) for _ in "ab")
        asked += [compare_numbers(a, b)]
        for q in asked:
            yield q.text
            yield q.answer
    yield 'What does the sign say?'
    yield 'The sign says "x".'
