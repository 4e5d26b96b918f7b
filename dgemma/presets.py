"""Named settings: how many denoising steps a text may cost. docs/steps.md has the curves that they were chosen from.

Without a preset a checkpoint is sampled as its own generation config says (the model card's settings); a preset changes
what it names and leaves the rest. The numbers below are the demo checkpoint's; larger checkpoints were not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from .errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Settings of Pipeline.__call__ that go together; None leaves one as the checkpoint has it."""

    steps: int | None = None
    t_min: float | None = None
    t_max: float | None = None
    stability: int | None = None
    confidence: float | None = None

    def settings(self) -> dict[str, Any]:
        """What the preset changes, by the names of Pipeline.__call__."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.settings().items())


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "quality": Preset(stability=2),
        "balanced": Preset(stability=0),
        "fast": Preset(steps=16, stability=0, confidence=0.1),
    }
)


def spell_out(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` of a call with `preset`, if it is among them, replaced by what it stands for; those beside it win.

    A setting of None counts as not given. OptionError when no preset has that name.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    name = given.pop("preset", None)
    if name is None:
        return given
    if not isinstance(name, str) or name not in PRESETS:
        raise OptionError(f"preset is {name!r}; one of {', '.join(PRESETS)} is needed (none: the checkpoint's own settings)")
    return PRESETS[name].settings() | given
