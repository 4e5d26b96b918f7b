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
    SessionError,
    UserError,
)

__version__ = "0.1.0"
_PIPELINE = (
    "Answer", "Block", "Called", "Finished", "Pipeline", "Prefilled", "Seconds", "Step", "Text", "Thought", "ToolCall",
)  # fmt: skip
_PIPELINE += ("Filled", "Read", "Revision", "Session", "SlotRead", "Turn")
__all__ = sorted(
    ["CheckpointError", "DgemmaError", "Failure", "ImageError", "OptionError", "OutputError", "PromptError"]
    + ["SessionError", "UserError"]
    + list(_PIPELINE)
)


def __getattr__(name: str) -> object:
    """The pipeline's names, imported at their first use: `dgemma --help` and `dgemma info` need none of them."""
    if name in _PIPELINE:
        from . import pipeline  # here, as the docstring says

        return getattr(pipeline, name)
    raise AttributeError(f"module 'dgemma' has no attribute {name!r}")
