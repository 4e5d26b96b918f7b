"""Ask a question about a picture: python examples/describe_image.py PICTURE [QUESTION] [--model MODEL]"""

import argparse
import os
import sys

from dgemma import DgemmaError, Pipeline, Text
from dgemma.vision import load_image


def sketch(image, width=44):
    """The picture in coloured half blocks, two pixels a character."""
    small = image.resize((width, max(2, width * image.height // image.width // 2 * 2)))
    ink = lambda x, y: ";".join(map(str, small.getpixel((x, y))))  # noqa: E731
    rows = range(0, small.height, 2)
    return "\n".join("".join(f"\x1b[38;2;{ink(x, y)};48;2;{ink(x, y + 1)}m▀" for x in range(width)) + "\x1b[0m" for y in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0] + ".")
    parser.add_argument("picture")
    parser.add_argument("question", nargs="?", default="What is in this image?")
    parser.add_argument("--model", help="a folder or a hub id; default: the demo checkpoint that ships with dgemma")
    args = parser.parse_args()
    try:
        image = load_image(args.picture)
        if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
            print(sketch(image))
        print(f"{args.picture}: {args.question}")
        pipe = Pipeline.from_pretrained(args.model)
        for event in pipe.stream(args.question, images=[image]):
            if isinstance(event, Text):  # a block at a time
                print(event.delta, end="", flush=True)
        print()
    except DgemmaError as error:
        parser.exit(2, f"describe_image: {error}\n")


if __name__ == "__main__":
    main()
