"""DiffusionGemma on MLX."""

from . import backend as _backend

_backend.prepare()  # before anything imports mlx: see backend.py
