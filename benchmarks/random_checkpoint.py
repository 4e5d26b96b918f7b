"""A checkpoint folder of random weights in one of dgemma's geometries (dgemma.geometry).

    python benchmarks/random_checkpoint.py full OUT --bits 4      the released geometry, vision tower included
"""

from __future__ import annotations

import argparse

from dgemma.formats import Format
from dgemma.geometry import GEOMETRIES, write


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--bits", type=int, help="pack by the default recipe with so many bits; default: bf16")
    parser.add_argument("--layers", type=int, help="of the text stack; default: all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    fmt = None if arguments.bits is None else Format.of(bits=arguments.bits)
    print(write(arguments.geometry, arguments.out, fmt, layers=arguments.layers, seed=arguments.seed))


if __name__ == "__main__":
    main()
