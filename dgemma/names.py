"""The names of a checkpoint's tensors, and ours.

Hugging Face's files and mlx-vlm's name one tensor differently in three places, and all spellings are read: what stands
before `decoder` and the vision tower; the experts' matrices, with or without `.weight`, gate and up as one tensor or two,
stacked or one tensor an expert; and second copies of tied weights, which are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import CheckpointError

# Stored -> ours: the decoder's weights serve both passes, the encoder adds a scalar a layer and the eyes.
RENAMES = (
    (re.compile(r"^(?:language_model\.)?(?:model\.)?encoder\.language_model\.layers\.(\d+)\.layer_scalar$"),
     r"layers.\1.encoder_layer_scalar"),
    (re.compile(r"^(?:language_model\.)?(?:model\.)?decoder\."), ""),
    (re.compile(r"^(?:model\.)?(?:encoder\.)?(vision_tower|embed_vision)\."), r"\1."),
)  # fmt: skip
# Second copies of tied weights, which some writers store: the encoder's text stack and the head repeat the decoder.
TIED = re.compile(r"^(?:language_model\.)?(?:model\.)?encoder\.language_model\.|^(?:language_model\.)?lm_head\.")
ROTARY = ".rotary_emb."  # angles, which are computed here
EYES = ("vision_tower.", "embed_vision.")
EXPERT = re.compile(r"^(.*\.experts)\.(?:([0-9]{1,8})\.)?(gate_up|gate|up|down)_proj(?:\.(weight|scales|biases))?$")


@dataclass(frozen=True)
class Recipe:
    """How one of our tensors is made of stored ones: `parts` are joined along the rows (axis -2).

    A part is one stored tensor or, when `stacked`, one for each expert in order.
    """

    parts: tuple[tuple[str, ...], ...]
    stacked: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Every stored tensor of it."""
        return tuple(name for part in self.parts for name in part)


def ours(name: str) -> str:
    """Our name of a stored tensor or module."""
    for pattern, new in RENAMES:
        found, count = pattern.subn(new, name)
        if count:
            return found
    return name


def module(path: str) -> str:
    """Our path of a stored module, as config.json's quantization names it; an expert's or a half's is the whole stack's."""
    renamed = ours(path)
    expert = EXPERT.match(renamed)
    return f"{expert[1]}.{'down' if expert[3] == 'down' else 'gate_up'}_proj" if expert else renamed


def stored(name: str) -> str:
    """The name that Hugging Face's files give our tensor `name`: what messages say, and what convert writes."""
    if name.startswith(EYES):
        return f"model.encoder.{name}"
    layer = re.fullmatch(r"layers\.(\d+)\.encoder_layer_scalar", name)
    return f"model.encoder.language_model.layers.{layer[1]}.layer_scalar" if layer else f"model.decoder.{name}"


def recipes(names: Iterable[str]) -> dict[str, Recipe]:
    """Our tensors, and what each is made of. CheckpointError when an expert's tensor is missing or stands there twice."""
    found: dict[str, Recipe] = {}
    halves: dict[str, dict[tuple[str, int | None], str]] = {}  # ours -> (gate, up or whole; expert) -> stored
    for name in names:
        new = ours(name)
        if ROTARY in name or (new == name and TIED.search(name)):
            continue
        expert = EXPERT.match(new)
        if expert is None:
            if new in found:
                raise CheckpointError(f"tensors {found[new].names[0]} and {name} are the same weight")
            found[new] = Recipe(((name,),))
            continue
        stack, number, kind, part = expert.groups()
        target = f"{stack}.{'down' if kind == 'down' else 'gate_up'}_proj.{part or 'weight'}"
        pieces, piece = halves.setdefault(target, {}), (kind, None if number is None else int(number))
        if piece in pieces:
            raise CheckpointError(f"tensors {pieces[piece]} and {name} are the same weight")
        pieces[piece] = name
    return found | {target: _joined(target, pieces) for target, pieces in halves.items()}


def _joined(target: str, pieces: dict[tuple[str, int | None], str]) -> Recipe:
    """The recipe of an experts' tensor: gate before up, experts in order."""
    kinds = {kind for kind, _ in pieces}
    numbers = {number for _, number in pieces}
    order = ("gate", "up") if kinds & {"gate", "up"} else tuple(kinds)
    stacked = None not in numbers
    experts = sorted(numbers) if stacked else [None]
    wanted = {(kind, number) for kind in order for number in (range(len(experts)) if stacked else experts)}
    if wanted != set(pieces):
        odd = sorted(map(str, wanted ^ set(pieces)))[0]
        raise CheckpointError(f"tensor {stored(target)}: its parts do not match, {odd} (part, expert) is missing or extra")
    return Recipe(tuple(tuple(pieces[kind, number] for number in experts) for kind in order), stacked)
