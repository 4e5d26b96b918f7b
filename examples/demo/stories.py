"""The two tasks with many right answers: captions and short stories about a scene of shapes.

A small grammar samples them; the checker reads any text back with the same grammar and compares it with the scene.
The tokens of an answer depend on each other: every shape is used once, in any order; no adjective or deed repeats;
names stay true to the end; "a" or "an" follows the colour. Filling every place with its likeliest word on its own
(which is what one or two denoising steps do) breaks these rules; negotiating them takes steps.
"""

import re

CAPTION_OPENERS = ["Here we see", "This picture shows", "The picture shows", "We can see", "Someone has drawn",
                   "The artist drew"]
PLAIN_ADJECTIVES = ["neat", "plain", "lovely", "bold", "cheerful", "tidy", "simple", "graceful"]
SEEMS = ["looks", "seems", "feels", "appears"]
MOODS = ["calm", "proud", "happy", "shy", "sleepy", "brave", "quiet", "curious"]
EXCLAIM = ["What", "Such"]
PRAISE = ["charming", "pretty", "pleasant", "gentle"]
VIEW = ["scene", "drawing", "view", "picture"]

NAMES = ["Mia", "Leo", "Ada", "Tom", "Zoe", "Max", "Ivy", "Sam", "Eva", "Ben", "Lily", "Hugo", "Nora", "Otto", "Ruby",
         "Finn"]
STORY_OPENERS = ["One day", "One night", "Long ago", "Last spring", "Last winter", "This morning"]
LIVED = ["lived", "worked", "slept", "played"]
PLACE_ADJECTIVES = ["quiet", "sunny", "distant", "hidden", "little", "busy"]
PLACES = ["village", "forest", "valley", "town", "garden", "castle"]
MET = ["met", "found", "saw", "heard", "followed", "helped"]
LIKED = ["loved", "liked", "wanted", "enjoyed"]
THINGS = ["music", "honey", "books", "rain", "snow", "cakes", "songs", "flowers"]
BUILT = ["built", "painted", "opened", "repaired"]
BUILT_ADJECTIVES = ["tall", "tiny", "golden", "secret", "wooden", "shiny"]
BUILDINGS = ["tower", "bridge", "boat", "house", "theatre", "shop"]
NEAR = ["river", "lake", "hill", "sea", "road", "wood"]
DEEDS = ["sang", "danced", "laughed", "cooked", "drew", "jumped", "whistled", "clapped"]
TIMES = ["dusk", "dawn", "night", "noon", "midnight", "last"]
THANKED = ["hugged", "thanked", "kissed", "praised"]
RESTED = ["slept", "rested", "smiled", "sighed"]


def article(word):
    return "an" if word[0] in "aeiou" else "a"


def phrase(shape, colour):
    """("circle", "red") -> "a red circle"."""
    return f"{article(colour)} {colour} {shape}"


def join(parts):
    """["x", "y", "z"] -> "x, y and z"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


# ---------------------------------------------------------------------------------------------- sampling
def sample_caption(r, objects):
    """One of the many captions that are true of these (shape, colour) pairs, given from left to right."""
    n = len(objects)
    order = r.sample(range(n), n)
    adjectives = r.sample(PLAIN_ADJECTIVES, n)
    parts = [f"a {adj} {objects[i][1]} {objects[i][0]}" for i, adj in zip(order, adjectives)]
    if n == 2:
        body = f"{parts[0]} {'left' if order[0] < order[1] else 'right'} of {parts[1]}"
    else:
        body = join(parts)
    text = [f"{r.choice(CAPTION_OPENERS)} {body}."]
    if r.random() < 0.8:
        shape, colour = r.choice(objects)
        text.append(f"The {colour} {shape} {r.choice(SEEMS)} {r.choice(MOODS)}.")
    if n < 4 and r.random() < 0.7:
        text.append(f"{r.choice(EXCLAIM)} a {r.choice(PRAISE)} {r.choice(VIEW)}!")
    return " ".join(text)


def sample_story(r, objects):
    """One of the many stories in which every one of these shapes appears exactly once."""
    n = len(objects)
    shapes = [phrase(*o) for o in r.sample(objects, n)]
    names = r.sample(NAMES, n)
    text = [f"{r.choice(STORY_OPENERS)}, {shapes[0]} named {names[0]} {r.choice(LIVED)} in a "
            f"{r.choice(PLACE_ADJECTIVES)} {r.choice(PLACES)}."]
    for i in range(1, n):
        text.append(f"{r.choice(names[:i])} {r.choice(MET)} {shapes[i]} named {names[i]}, who {r.choice(LIKED)} "
                    f"{r.choice(THINGS)}.")
    text.append(f"{'Soon ' + names[0] if n == 1 else 'Together they'} {r.choice(BUILT)} a {r.choice(BUILT_ADJECTIVES)} "
                f"{r.choice(BUILDINGS)} near the {r.choice(NEAR)}.")
    deeds = r.sample(DEEDS, max(2, n))
    if n == 1:
        text.append(f"{names[0]} {deeds[0]} and {deeds[1]}.")
        text.append(f"At {r.choice(TIMES)}, {names[0]} {r.choice(RESTED)}.")
    else:
        text.append(join([f"{a} {b}" for a, b in zip(r.sample(names, n), deeds)]) + ".")
        a, b = r.sample(names, 2)
        text.append(f"At {r.choice(TIMES)}, {a} {r.choice(THANKED)} {b}.")
    return " ".join(text) + " The end."


# ---------------------------------------------------------------------------------------------- checking
def one_of(words, name=None):
    group = "|".join(words)
    return f"(?P<{name}>{group})" if name else f"(?:{group})"


WORD = "[A-Za-z]+"
NAME = one_of(NAMES)


def read(pattern, text):
    """The match of a sentence pattern at the start of the text and what follows it, or (None, text)."""
    m = re.match(pattern + r"(?: |$)", text)
    return (m, text[m.end():]) if m else (None, text)


def parse_items(body, item):
    """Splits "x, y and z" and matches every part; None where one does not fit."""
    parts = re.split(r", | and ", body)
    if body != join(parts):
        return None
    matches = [re.fullmatch(item, p) for p in parts]
    return None if None in matches else [m.groups() for m in matches]


def check_caption(text, objects):
    """What is wrong with a caption of this scene, as a list of words; empty when it is right."""
    item = rf"a ({'|'.join(PLAIN_ADJECTIVES)}) ({WORD}) ({WORD})"
    m, rest = read(rf"{one_of(CAPTION_OPENERS)} (?P<body>[a-z ,]+)\.", text)
    if not m:
        return ["grammar"]
    body, relation = m["body"], re.fullmatch(rf"({item}) (left|right) of ({item})", m["body"])
    if relation:
        items = [re.fullmatch(item, relation[1]).groups(), re.fullmatch(item, relation[6]).groups()]
    else:
        items = parse_items(body, item)
    if items is None or (len(items) == 2) != bool(relation):
        return ["grammar"]
    faults = []
    seen = [(s, c) for _, c, s in items]
    if sorted(seen) != sorted(objects):
        faults.append("shapes")
    elif relation and (objects.index(seen[0]) < objects.index(seen[1])) != (relation[5] == "left"):
        faults.append("relation")
    if len({a for a, _, _ in items}) < len(items):
        faults.append("repeated adjective")
    m, rest = read(rf"The ({WORD}) ({WORD}) {one_of(SEEMS)} {one_of(MOODS)}\.", rest)
    if m and (m[2], m[1]) not in objects:
        faults.append("second sentence")
    m, rest = read(rf"{one_of(EXCLAIM)} a {one_of(PRAISE)} {one_of(VIEW)}!", rest)
    return faults + (["grammar"] if rest else [])


def check_story(text, objects):
    """What is wrong with a story about this scene, as a list of words; empty when it is right."""
    shape = rf"(?P<a>an?) (?P<colour>{WORD}) (?P<shape>{WORD}) named (?P<name>{NAME})"
    m, rest = read(rf"{one_of(STORY_OPENERS)}, {shape} {one_of(LIVED)} in a {one_of(PLACE_ADJECTIVES)} "
                   rf"{one_of(PLACES)}\.", text)
    if not m:
        return ["grammar"]
    faults, seen, names = [], [], []
    while m:
        if m["a"] != article(m["colour"]):
            faults.append("article")
        if "who" in m.groupdict() and m["who"] not in names:
            faults.append("unknown name")
        seen.append((m["shape"], m["colour"]))
        names.append(m["name"])
        m, rest = read(rf"(?P<who>{NAME}) {one_of(MET)} {shape}, who {one_of(LIKED)} {one_of(THINGS)}\.", rest)
    if sorted(seen) != sorted(objects):
        faults.append("shapes")
    if len(set(names)) < len(names):
        faults.append("repeated name")
    return faults + check_ending(rest, names)


def check_ending(rest, names):
    """The part of a story after the introductions: what they built, what each did, how it ends."""
    subject = "Together they" if len(names) > 1 else f"Soon {names[0]}"
    m, rest = read(rf"{subject} {one_of(BUILT)} a {one_of(BUILT_ADJECTIVES)} {one_of(BUILDINGS)} near the "
                   rf"{one_of(NEAR)}\.", rest)
    if not m:
        return ["grammar"]
    faults = []
    if len(names) == 1:
        m, rest = read(rf"{names[0]} {one_of(DEEDS, 'x')} and {one_of(DEEDS, 'y')}\.", rest)
        if m and m["x"] == m["y"]:
            faults.append("repeated deed")
    else:
        m, rest = read(r"(?P<body>[A-Za-z ,]+)\.", rest)
        items = parse_items(m["body"], rf"({NAME}) ({'|'.join(DEEDS)})") if m else None
        if items is None:
            return ["grammar"]
        if sorted(a for a, _ in items) != sorted(names):
            faults.append("names")
        if len({b for _, b in items}) < len(items):
            faults.append("repeated deed")
    if not m:
        return faults + ["grammar"]
    if len(names) == 1:
        m, rest = read(rf"At {one_of(TIMES)}, {names[0]} {one_of(RESTED)}\.", rest)
    else:
        m, rest = read(rf"At {one_of(TIMES)}, (?P<x>{NAME}) {one_of(THANKED)} (?P<y>{NAME})\.", rest)
        if m and (m["x"] == m["y"] or m["x"] not in names or m["y"] not in names):
            faults.append("last names")
    if not m or rest != "The end.":
        faults.append("grammar")
    return faults
