"""Which formulation runs: the few operations that are written once per backend, chosen here and nowhere else.

`plain` is mlx as its authors tune it, and runs on Apple GPUs. `cpu` and `cuda` serve mlx's other backends. The environment variable
DGEMMA_KERNELS=plain|cpu|cuda overrides the choice, to measure one against the other. The choice is made once, for mlx's default
device at import.
"""

from __future__ import annotations

import os

import mlx.core as mx

from . import backend, cpu, cuda, plain

VARIABLE = "DGEMMA_KERNELS"
CHOICES = {"plain": plain, "cpu": cpu, "cuda": cuda}

name = os.environ.get(VARIABLE) or ("cpu" if not backend.is_gpu() else "cuda" if mx.cuda.is_available() else "plain")
if name not in CHOICES:
    raise ImportError(f"{VARIABLE}={name}: allowed are {', '.join(CHOICES)}")
_chosen = CHOICES[name]
if name == "cpu":
    backend.one_blas_thread()  # dgemma.strips shares products out itself

LAZY = name != "cpu"  # whether the formulations only lay out what is to be computed; those of the CPU compute at once
# Numbers of the widest temporaries: 256 positions of the released vocabulary, 256 MiB in float32. The CUDA formulations hold
# two of bfloat16, and read the table of embeddings once for all positions of a piece.
WIDE = 1 << (28 if name == "cuda" else 26)

add_normed = _chosen.add_normed
attention = _chosen.attention
believe = _chosen.believe
experts = _chosen.experts
geglu = _chosen.geglu
heads = _chosen.heads
linear = _chosen.linear
merge = _chosen.merge
mix = _chosen.mix
rms_norm = _chosen.rms_norm
rotate = _chosen.rotate
route = _chosen.route
scores = _chosen.scores
softcap = _chosen.softcap
softmax = _chosen.softmax
