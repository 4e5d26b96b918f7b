"""Make the goldens of typed reads anew, by brute force through transformers: python tests/oracle/make_reads.py

Needs the `dev` extra (torch). `--live` writes nothing and prints how far dgemma is from what would be written.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLX_ENABLE_TF32", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dgemma  # noqa: E402, F401  before torch: it loads the BLAS that mlx then uses
from oracle import brute_reads, cases, our_reads, reads, record, reference  # noqa: E402

GOLDENS = Path(__file__).resolve().parent / "goldens" / "reads"


def main() -> None:
    """All reads: into files, or against dgemma."""
    live, models, worst = "--live" in sys.argv[1:], {}, {}
    GOLDENS.mkdir(exist_ok=True)
    for read in reads.READS.values():
        name = cases.CASES[read.case].model
        if name not in models:
            models[name] = reference.load(name)
        found = brute_reads.measure(models[name], read)
        if not live:
            record.save(GOLDENS / f"{read.name}.npz", found)
            continue
        for kind, size in our_reads.differences(our_reads.measure(read), found).items():
            worst[kind] = max(worst.get(kind, (0.0, "")), (size, read.name))
    for kind, (size, where) in worst.items():
        print(f"{kind:<60}{size:>10.1e}   {where}")
    print(f"{len(reads.READS)} reads {'compared' if live else 'written to ' + str(GOLDENS)}")


if __name__ == "__main__":
    main()
