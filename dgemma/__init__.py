"""DiffusionGemma, Google's block-diffusion multimodal language model, on MLX.

    from dgemma import Pipeline
    pipe = Pipeline.from_pretrained()
    print(pipe("What is in this image?", images=["shapes.png"]).text)
"""

from . import backend as _backend

_backend.prepare()  # a fast BLAS has to be in the process before mlx is: see backend.py

from .errors import (  # noqa: E402
    CheckpointError,
    DgemmaError,
    Failure,
    ImageError,
    OptionError,
    OutputError,
    PromptError,
    UserError,
)
from .pipeline import Answer, Block, Finished, Pipeline, Prefilled, Seconds, Step, Text  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "Block",
    "CheckpointError",
    "DgemmaError",
    "Failure",
    "Finished",
    "ImageError",
    "OptionError",
    "OutputError",
    "Pipeline",
    "Prefilled",
    "PromptError",
    "Seconds",
    "Step",
    "Text",
    "UserError",
]
