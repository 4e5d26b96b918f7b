"""transformers' DiffusionGemma in float32, made to measure the same things and to take the same draws as dgemma.

`measure` and `generate` have twins of the same name and result in `ours.py`; every number is filed under the same key.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import torch
from PIL import Image
from transformers import DynamicCache
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
)
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import (
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextRouter,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from oracle import tiny
from oracle.cases import BIDIRECTIONAL, ENCODER_WINDOW, Picture, Policy, Prompt
from oracle.record import Run, answers

MASKED = torch.finfo(torch.float32).min


class Oracle(DiffusionGemmaForBlockDiffusion):
    """The reference, with its draws replaced by a `Draws` and its loop watched. Nothing of its mathematics changes."""

    image_attention = ENCODER_WINDOW
    draws = None  # a Draws, set by `generate`; transformers evaluates annotations, so there is none here

    def _prepare_sampler(self, generation_config):
        sampler = EntropyBoundSampler(
            config=generation_config.sampler_config,
            canvas_length=self.config.canvas_length,
            vocab_size=self.config.text_config.vocab_size,
            max_denoising_steps=generation_config.max_denoising_steps,
        )
        # The loop asks for a canvas at the start of a block, and once more a step to renoise with.
        sampler.initialize_canvas = lambda batch_size, device: self.draws.canvas()
        return sampler

    def _prepare_encoder_inputs(self, **inputs):
        ids, masks = super()._prepare_encoder_inputs(**inputs)
        if inputs["is_prefill"] and self.image_attention == BIDIRECTIONAL:
            images = (ids == self.config.image_token_id).long()
            masks = google_masks(images, inputs["attention_mask"], self.config.text_config.sliding_window)
        return ids, masks

    def _prepare_denoiser_inputs(self, **inputs):
        self.draws.begin_block()
        return super()._prepare_denoiser_inputs(**inputs)

    def _denoising_step(self, *, finished_denoising, sampler, **inputs):
        self.draws.begin_step(finished_denoising)
        made = super()._denoising_step(finished_denoising=finished_denoising, sampler=sampler, **inputs)
        self.draws.end_step(logits=made[2], accepted=sampler.accepted_token_mask)
        return made

    def _finalize_canvas(self, **inputs):
        block = inputs["input_ids"][:, -self.config.canvas_length :].tolist()
        ids, finished = DiffusionGemmaForBlockDiffusion._finalize_canvas(**inputs)
        self.draws.end_block(block, finished)
        return ids, finished


def load(name: str) -> Oracle:
    """A tiny model by the name of its configuration, through a real checkpoint folder."""
    with tempfile.TemporaryDirectory() as folder:
        return load_folder(tiny.write_checkpoint(folder, name, tower=True))


def load_folder(folder: str | Path) -> Oracle:
    """A checkpoint in float32; a weight that transformers misses, or does not know, is an error."""
    torch.set_num_threads(1)  # one order of summation, hence the same bits each time
    model, info = Oracle.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
        output_loading_info=True,
    )  # fmt: skip
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            raise ValueError(f"{folder}: {problem}: {sorted(info[problem])}")
    # With padded rows and eager attention, 5.17's `generate` asks for a float mask of an integer dtype and fails.
    decoder, make = model.model.decoder, model.model.decoder.create_diffusion_decoder_attention_mask
    decoder.create_diffusion_decoder_attention_mask = lambda inputs_embeds, **rest: make(
        inputs_embeds=inputs_embeds.float(), **rest
    )
    return model.eval()


def cut(image: np.ndarray, budget: int) -> Picture:
    """The patches that transformers' own image processor makes of a picture uint8 [H, W, 3], without its padding."""
    made = Gemma4ImageProcessorPil(max_soft_tokens=budget)(images=[Image.fromarray(image)], return_tensors="np")
    places = np.asarray(made["image_position_ids"])[0]
    real = places[:, 0] >= 0
    pixels = np.asarray(made["pixel_values"], np.float32)[0, real]
    return Picture(pixels=pixels, positions=places[real].astype(np.int32))


# What a forward pass computes -------------------------------------------------------------------------------------


@torch.no_grad()
def measure(model: Oracle, prompt: Prompt, canvases: list[np.ndarray], image_attention: str) -> dict[str, np.ndarray]:
    """Everything that is compared of one prompt and two canvases [B, C], by name; real rows only, padding cut off.

    vision/I [n, D]; hidden/R [L, D] after the last norm; cache/N/keys/R and values [K, S, E] in temporal order, with
    block/ in front once the second canvas is committed; logits/first, logits/conditioned, block/logits/first [B, C, V].
    """
    found = {f"vision/{i}": array for i, array in enumerate(features(model, prompt))}
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    hidden = encode(model, prompt.ids, prompt.padding, prompt, cache, image_attention)
    found |= {f"hidden/{row}": hidden[row, pad:] for row, pad in enumerate(prompt.padding)}
    found |= caches(cache, prompt.lengths)
    first = logits(model, canvases[0], cache, prompt.padding, None)
    found["logits/first"] = first
    found["logits/conditioned"] = logits(model, canvases[1], cache, prompt.padding, first / 0.7)
    block = encode(model, canvases[1], prompt.padding, None, cache, image_attention)
    found |= {f"block/hidden/{row}": block[row] for row in range(len(block))}
    found |= {f"block/{k}": v for k, v in caches(cache, [n + block.shape[1] for n in prompt.lengths]).items()}
    found["block/logits/first"] = logits(model, canvases[0], cache, prompt.padding, None)
    return found


def features(model: Oracle, prompt: Prompt) -> list[np.ndarray]:
    """Each image's rows of the prompt, [n, D]. They go through the tower as one padded batch, as in `generate`."""
    if not prompt.pictures:
        return []
    pixels, places = _pixels(prompt)
    rows = model.model.encoder.get_image_features(pixels, places, return_dict=True).pooler_output.numpy()
    return np.split(rows, np.cumsum([picture.soft_tokens for picture in prompt.pictures])[:-1])


def encode(model: Oracle, ids, padding, prompt: Prompt | None, cache, image_attention: str) -> np.ndarray:
    """The encoder pass over ids [B, L], after what `cache` holds; last hidden states [B, L, D]."""
    stored, (rows, length) = cache.get_seq_length(), ids.shape
    inputs = {"input_ids": torch.from_numpy(ids).long()}
    images = torch.zeros(ids.shape, dtype=torch.long)
    if prompt is not None and prompt.pictures:
        images = (inputs["input_ids"] == model.config.image_token_id).long()
        inputs["pixel_values"], inputs["image_position_ids"] = _pixels(prompt)
    real = _real(padding, stored + length)
    places = torch.arange(stored, stored + length)[None]
    # A plain forward builds the image-block masks and drops them; only `generate`, which makes them first, has them.
    masks = model.model.encoder.create_masks_for_generate(
        config=model.config,
        inputs_embeds=torch.empty(rows, length, 0),
        attention_mask=real,
        past_key_values=cache,
        position_ids=places,
        mm_token_type_ids=images,
    )
    if image_attention == BIDIRECTIONAL and stored == 0:
        masks = google_masks(images, real, model.config.text_config.sliding_window)
    # `generate` counts positions from the padding on. Rotary attention knows only differences, so a row may count
    # from its own first token, as dgemma's do; the cached keys then agree.
    places = places - torch.tensor(padding)[:, None]
    made = model.model.encoder(attention_mask=masks, past_key_values=cache, position_ids=places, **inputs)
    return made.last_hidden_state.numpy()


def google_masks(images: torch.Tensor, real: torch.Tensor, window: int) -> dict[str, torch.Tensor]:
    """The masks of Google's JAX implementation (gemma/diffusion), for which transformers has no switch; [B, 1, L, L].

    Full layers are causal. Sliding layers see |q - k| < window and (k <= q or both in one image).
    """
    length = images.shape[1]
    starts = torch.diff(images, prepend=torch.zeros(len(images), 1, dtype=torch.long)) == 1
    block = torch.where(images == 1, torch.cumsum(starts, dim=1), -1)
    q, k = torch.arange(length)[:, None], torch.arange(length)[None]
    same = (block[:, :, None] == block[:, None, :]) & (block[:, :, None] >= 0)
    causal = (k <= q)[None].expand_as(same)
    sliding = ((q - k).abs() < window)[None] & (causal | same)
    seen = {tiny.FULL: causal, tiny.SLIDING: sliding}
    return {
        kind: torch.where(mask & real[:, None, :], 0.0, MASKED)[:, None]  # [B, 1, L, L]
        for kind, mask in seen.items()
    }


def logits(model: Oracle, canvas: np.ndarray, cache, padding, conditioning: np.ndarray | None) -> np.ndarray:
    """Soft-capped logits [B, C, V] of a canvas [B, C]; `conditioning` are processed logits [B, C, V] or None."""
    signal = None if conditioning is None else torch.from_numpy(conditioning)
    stored, length = cache.get_seq_length(), canvas.shape[1]
    made = model(
        decoder_input_ids=torch.from_numpy(canvas).long(),
        past_key_values=cache,
        self_conditioning_logits=signal,
        decoder_attention_mask=_real(padding, stored + length),
        decoder_position_ids=torch.arange(stored, stored + length)[None] - torch.tensor(padding)[:, None],
    )
    return made.logits.numpy()


def caches(cache: DynamicCache, lengths: list[int]) -> dict[str, np.ndarray]:
    """Keys and values [K, S, E] of each layer and row, oldest first; a row's padding, on the left, is cut off."""
    found = {}
    for index, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            stored = getattr(layer, name).numpy()
            for row, length in enumerate(lengths):
                found[f"cache/{index}/{name}/{row}"] = stored[row, :, -min(length, stored.shape[2]) :]
    return found


def _pixels(prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
    """The images as one batch, shorter ones padded as the image processor pads them: pixels 0, positions -1."""
    most = max(len(picture.pixels) for picture in prompt.pictures)
    pixels = np.zeros((len(prompt.pictures), most, 768), np.float32)
    places = np.full((len(prompt.pictures), most, 2), -1, np.int64)
    for i, picture in enumerate(prompt.pictures):
        pixels[i, : len(picture.pixels)], places[i, : len(picture.pixels)] = picture.pixels, picture.positions
    return torch.from_numpy(pixels), torch.from_numpy(places)


def _real(padding: list[int], length: int) -> torch.Tensor:
    """[B, length] bool: False on the padding at the left."""
    return torch.arange(length)[None] >= torch.tensor(padding)[:, None]


# Whole generations ------------------------------------------------------------------------------------------------


@torch.no_grad()
def generate(
    model: Oracle, prompt: Prompt, seeds: tuple[int, ...], policy: Policy, image_attention: str = ENCODER_WINDOW
) -> Run:
    """The reference's own loop on our draws."""
    model.image_attention = image_attention
    model.draws = draws = Draws(seeds, model.config, policy, prompt.padding)
    inputs = {"input_ids": torch.from_numpy(prompt.ids).long()}
    if any(prompt.padding):
        inputs["attention_mask"] = _real(prompt.padding, prompt.ids.shape[1])
    if prompt.pictures:
        inputs["pixel_values"], inputs["image_position_ids"] = _pixels(prompt)
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).long()
    config = DiffusionGemmaGenerationConfig(
        max_new_tokens=policy.max_new_tokens,
        max_denoising_steps=policy.max_denoising_steps,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=policy.entropy_bound),
        t_min=policy.t_min,
        t_max=policy.t_max,
        stability_threshold=policy.stability,
        confidence_threshold=policy.confidence,
        eos_token_id=list(policy.end_token_ids),
        pad_token_id=model.config.text_config.pad_token_id,
    )
    hooks = [router.register_forward_hook(draws.routed) for router in _routers(model)]
    try:
        with patch.object(torch, "multinomial", draws.tokens):
            model.generate(generation_config=config, **inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return draws.run()


def _routers(model: Oracle) -> list[torch.nn.Module]:
    return [module for module in model.modules() if isinstance(module, DiffusionGemmaTextRouter)]


@dataclass
class Margins:
    """How close a run came to going another way, over everything that mattered to it. Rounding differs between
    implementations and machines; a run that is nowhere close must come out the same on all of them."""

    draw: float = np.inf  # from a drawn number to the nearest border between two tokens
    best: float = np.inf  # between the two largest logits, where a block may end
    accept: float = np.inf  # from a position's cumulative entropy to the bound
    stop: float = np.inf  # from a mean entropy to the confidence threshold
    route: float = np.inf  # between the scores of the last expert chosen and of the first one passed over

    def note(self, name: str, distances: torch.Tensor) -> None:
        if distances.numel():
            setattr(self, name, min(getattr(self, name), distances.min().item()))


class Draws:
    """One key a row, split as dgemma's denoising loop documents it, and the log of what the loop did with it.

    Block start: key, k = split(key); canvas = floor(uniform([C]) * V). Step: key, k = split(key); u = uniform([2, C]);
    u[0] picks each token by inverse CDF, u[1] renoises. Rows that are done draw nothing; they are handed zeros.
    """

    def __init__(self, seeds: tuple[int, ...], config, policy: Policy, padding: list[int]):
        self.keys = [mx.random.key(seed) for seed in seeds]
        self.length, self.vocabulary = config.canvas_length, config.text_config.vocab_size
        self.policy, self.padding = policy, torch.tensor(padding)
        self.finished = torch.zeros(len(seeds), dtype=torch.bool)  # whole answers
        self.active = ~self.finished  # rows of the step that is running
        self.uniforms: torch.Tensor | None = None  # [B, 2, C] within a step, None at a block's start
        self.gaps: list[torch.Tensor] = []  # [B] each: between the two largest logits, a step of the block
        self.blocks: list[list[list[int]]] = []
        self.steps: list[list[int]] = []
        self.margins = Margins()

    def begin_block(self) -> None:
        self.uniforms, self.gaps = None, []
        self.active = ~self.finished
        self.steps.append([0] * len(self.keys))

    def begin_step(self, denoised: torch.Tensor) -> None:
        self.active = ~(denoised | self.finished)
        self.uniforms = self._uniforms((2, self.length))
        self.steps[-1] = [steps + bool(active) for steps, active in zip(self.steps[-1], self.active)]

    def canvas(self) -> torch.Tensor:
        """Uniformly drawn tokens [B, C]."""
        drawn = self._uniforms((self.length,)) if self.uniforms is None else self.uniforms[:, 1]
        return torch.floor(drawn * self.vocabulary).long()

    def tokens(self, probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        """In torch.multinomial's place: probabilities [B * C, V] -> tokens [B * C, 1]."""
        sums = probabilities.cumsum(dim=-1)
        mark = self.uniforms[:, 0].reshape(-1, 1) * sums[:, -1:]
        self.distances = ((sums - mark).abs().amin(dim=-1) / sums[:, -1]).view(-1, self.length)
        return (sums <= mark).sum(dim=-1, keepdim=True)

    def end_step(self, logits: torch.Tensor, accepted: torch.Tensor) -> None:
        """Notes the margins of the active rows: processed logits [B, C, V], accepted [B, C]."""
        on, margins = self.active, self.margins
        if not on.any():  # finished answers keep the reference's loop turning for nothing
            return
        entropy = torch.distributions.Categorical(logits=logits).entropy()  # [B, C]
        rising = entropy[on].sort(dim=-1).values
        top = logits.topk(2, dim=-1).values
        self.gaps.append((top[..., 0] - top[..., 1]).amin(dim=-1))  # [B]
        margins.note("draw", self.distances[on][accepted[on]])
        margins.note("accept", (rising.cumsum(dim=-1) - rising - self.policy.entropy_bound).abs())
        margins.note("stop", (entropy.mean(dim=-1)[on] - self.policy.confidence).abs())
        # The most likely tokens matter only where the block may end: they are emitted if they have stood long enough.
        ending = on & (entropy.mean(dim=-1) < 2 * self.policy.confidence)
        if len(self.gaps) == self.policy.max_denoising_steps:
            ending = on
        margins.note("best", torch.stack(self.gaps[-1 - self.policy.stability :])[:, ending])

    def end_block(self, block: list[list[int]], finished: torch.Tensor) -> None:
        self.blocks.append(block)
        self.finished = finished.clone()
        self.active = ~self.finished  # these are encoded next

    def routed(self, router: torch.nn.Module, inputs: tuple, output: tuple) -> None:
        """Notes the margins of a router's choices for real positions of the rows at work; `output[0]` [B * L, X]."""
        scores = output[0].log().view(len(self.keys), -1, output[0].shape[-1])  # [B, L, X]
        length = scores.shape[1]
        # Before the first block it is the prompt that is read, padding and all.
        first = self.padding if not self.steps else torch.zeros_like(self.padding)
        real = (torch.arange(length)[None] >= first[:, None]) & self.active[:, None]
        top = scores[real].topk(router.config.top_k_experts + 1, dim=-1).values
        self.margins.note("route", top[:, -2] - top[:, -1])

    def run(self) -> Run:
        """What the loop made, as dgemma reports it."""
        return answers(self.blocks, self.steps, self.policy, self.margins)

    def _uniforms(self, shape: tuple[int, ...]) -> torch.Tensor:
        """[B, *shape]: fresh numbers for the active rows, zeros for the others."""
        made = np.zeros((len(self.keys), *shape), np.float32)
        for row in torch.nonzero(self.active).flatten().tolist():
            self.keys[row], key = mx.random.split(self.keys[row])
            made[row] = np.array(mx.random.uniform(shape=shape, key=key))
        return torch.from_numpy(made)
