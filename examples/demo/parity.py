"""Checks that the trainer's fused forward computes what transformers computes on the same parameters.

    python examples/demo/parity.py [--device cuda]

Takes real rows of every kind (one picture, two pictures, 140 soft tokens, later canvases, second turns), runs both, in
float32, without and with self-conditioning, and prints the largest difference of the canvas logits.
"""

import argparse
import random

import torch

import pool
import vocabulary
from fused import MARKS, SOFT_MARK, Fused, new_model


def transformers_logits(model, row, canvas, signal):
    """Canvas logits [1, 32, vocab] of one row by transformers' own encoder and decoder, as `generate` calls them."""
    from transformers import DynamicCache

    device = canvas.device
    marks = row["prompt"][row["prompt"] != 0]
    ids = torch.where(marks >= SOFT_MARK, vocabulary.IMAGE, marks)[None].to(device)
    inputs = dict(mm_token_type_ids=(ids == vocabulary.IMAGE).long())
    shown = sorted({(int(m) - SOFT_MARK) // MARKS for m in marks if m >= SOFT_MARK})
    if shown:
        pixels, places = [], []
        for i in shown:
            n, width = int(row["count"][i]), int(row["width"][i])
            index = torch.arange(row["pixels"].shape[1])
            place = torch.stack([index % width, index // width], -1)
            places.append(torch.where((index < n)[:, None], place, -1))
            pixels.append(row["pixels"][i].float() / 255)
        inputs |= dict(pixel_values=torch.stack(pixels).to(device), image_position_ids=torch.stack(places).to(device))
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    l = ids.shape[1]
    positions = torch.arange(l, device=device)[None]
    _, masks = model._prepare_encoder_inputs(
        input_ids=ids, attention_mask=torch.ones_like(ids, dtype=torch.bool), encoder_position_ids=positions,
        past_key_values=cache, is_prefill=True, canvas_length=32, batch_size=1, **inputs)
    model.model.encoder(input_ids=ids, attention_mask=masks, past_key_values=cache, position_ids=positions, **inputs)
    return model(decoder_input_ids=canvas, self_conditioning_logits=signal, past_key_values=cache,
                 decoder_position_ids=torch.arange(l, l + 32, device=device)[None]).logits


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--device", default="cpu")
    p.add_argument("--rows", type=int, default=6)
    device = p.parse_args().device
    tokenizer = vocabulary.build_tokenizer()
    encoder, r = vocabulary.Encoder(tokenizer), random.Random(3)
    model = new_model(tokenizer.get_vocab_size()).eval().to(device)
    net = Fused(model, torch.float32, pool.LONG.prompt + 32, compiled=False)
    generator = torch.Generator().manual_seed(5)
    for kind in (pool.SHORT, pool.LONG, pool.LARGE):
        arrays = pool.arrays_in(None, kind, 1)
        pool.fill(encoder, r, kind, arrays, 0)
        slot = {k: torch.from_numpy(a[0]) for k, a in arrays.items() if a.ndim > 1}
        worst = 0.0
        with torch.no_grad():
            b = kind.pictures
            flat = {k: slot[k].to(device) for k in ("pixels", "width", "count")}
            _, soft = net.vision(flat["pixels"], flat["width"], flat["count"], torch.ones(b, device=device),
                                 torch.zeros(b, device=device), torch.zeros((), device=device))
            n = int(arrays["rows"][0])
            ids = slot["prompt"][:n].long().to(device)
            kept, _ = net.encode(ids, net.soft_rows(ids, soft.reshape(1, -1, soft.shape[-1]), kind.budget))
            caches, masks = net.join([ids], [kept])
            canvas = torch.randint(0, 384, (n, 32), generator=generator).to(device)
            signal = (3 * torch.randn(n, 32, 384, generator=generator)).to(device)
            for sc in (None, signal):
                ours, _ = net.decode(canvas, caches, masks, sc)
                for j in range(n):
                    row = dict(slot, prompt=slot["prompt"][j].long())
                    theirs = transformers_logits(model, row, canvas[j:j + 1], None if sc is None else sc[j:j + 1])
                    worst = max(worst, float((theirs[0] - ours[j]).abs().max() / theirs.abs().max()))
        print(f"{kind.name}: {n} rows, largest difference / largest logit = {worst:.2e}", flush=True)
        assert worst < 1e-4, "the fused forward is not transformers' forward"


if __name__ == "__main__":
    main()
