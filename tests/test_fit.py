"""The memory contract: what can be exact is, it grows where it should and nowhere else, and generate keeps to it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dgemma import backend, fit, weights
from dgemma.attention import Packing
from dgemma.cli import main
from dgemma.convert import convert
from dgemma.errors import OptionError
from dgemma.fit import Job
from dgemma.formats import Format

GB = 10**9


@pytest.fixture(scope="module")
def opened(checkpoint):
    return weights.Checkpoint.open(checkpoint)


@pytest.mark.parametrize("unpack", [True, False])
def test_the_weights_are_exact(tmp_path, monkeypatch, unpack):
    folder = convert("demo", tmp_path / "packed", Format(bits=4, group_size=32)).folder
    monkeypatch.setattr(weights.Checkpoint, "unpacks", lambda self, dtype: unpack)
    opened = weights.Checkpoint.open(folder)
    loaded = sum(array.nbytes for _, array in tree_flatten(weights.load(opened, dtype=mx.float32).parameters()))
    assert fit.need(opened, Job(context=10), mx.float32).weights == loaded
    assert (loaded > 4 * 7_000_000) == unpack


@pytest.mark.parametrize("length, chunk", [(5, None), (100, None), (100, 16), (300, 64), (513, 200)])
def test_the_caches_are_exact(opened, length, chunk):
    model = weights.load(opened, dtype=mx.float32)
    caches = model.make_caches()
    model.prefill(np.random.RandomState(0).randint(10, 90, (1, length)), [], caches, chunk)
    said = fit.need(opened, Job(context=length, chunk=chunk), mx.float32)
    full = sum(cache.nbytes for cache in caches if not hasattr(cache, "window"))
    sliding = sum(cache.nbytes for cache in caches if hasattr(cache, "window"))
    last = length % chunk or chunk if chunk else length
    most = opened.config.text.sliding_window - 1
    assert said.full_caches == full
    # The contract holds for any length up to this one, so it counts a whole last chunk.
    assert said.sliding_caches * min(length, most + last) == sliding * min(length, most + min(length, chunk or 1024))


def test_it_grows_with_what_is_asked_and_sliding_layers_do_not(opened):
    job = Job(context=2000)
    base = fit.need(opened, job)
    assert fit.need(opened, replace(job, context=3000)).peak > base.peak
    assert fit.need(opened, replace(job, batch=2)).caches == 2 * base.caches - (base.sliding_caches * 2 - fit.need(
        opened, replace(job, batch=2)).sliding_caches)
    assert fit.need(opened, replace(job, images=4)).images > fit.need(opened, replace(job, images=1)).images > 0
    assert fit.need(opened, replace(job, context=3000)).sliding_caches == base.sliding_caches
    assert fit.need(opened, replace(job, chunk=64)).prefill < base.prefill


def test_a_large_image_is_one_pass(opened):
    assert Job(context=5000, images=1, image_tokens=1120, chunk=100).passed == 1120
    assert Job(context=50, images=0, chunk=100).passed == 50


def test_the_longest_prompt_fits_and_the_next_does_not(opened):
    job = Job(context=1)
    room = fit.need(opened, replace(job, context=1000)).peak
    longest = fit.longest(opened, job, room)
    assert fit.need(opened, replace(job, context=longest)).peak <= room
    assert fit.need(opened, replace(job, context=longest + 1)).peak > room
    assert fit.longest(opened, job, 1000) == 0
    assert fit.longest(opened, job, 10**15) == opened.config.text.max_position_embeddings - opened.config.canvas_length


@pytest.mark.parametrize("change", [{"context": 0}, {"images": -1}, {"batch": 0}, {"image_tokens": 0}, {"chunk": 0}])
def test_jobs_are_checked(change):
    (name, value), = change.items()
    with pytest.raises(OptionError, match=f"{name} is {value}; at least"):
        Job(**{"context": 5, **change})


@pytest.mark.parametrize("name", ["context", "images", "batch", "image_tokens"])
def test_absurd_jobs_are_refused(name):
    with pytest.raises(OptionError, match=f"{name} is 10{{400}}; at most 2,147,483,647 is possible"):
        Job(**{"context": 5, name: 10**400})


def refused(capsys, *argv):
    """The one line with which `dgemma fit` refuses."""
    code, (printed, said) = main(["fit", *argv]), capsys.readouterr()
    assert (code, printed, said.count("\n")) == (2, "", 1), (code, printed, said)
    return said.removeprefix("dgemma: ").rstrip("\n")


def test_jobs_that_a_checkpoint_never_gets_are_refused(capsys, text_checkpoint):
    blind = "images is 2; this checkpoint has no vision tower: it reads text only"
    assert refused(capsys, str(text_checkpoint), "--images", "2") == blind
    many = "images of 70 tokens, 100 of them, take 7,200; context is 10"
    assert refused(capsys, "--context", "10", "--images", "100") == many
    assert refused(capsys, "--chunk", "0") == "chunk is 0; at least 1 is needed"
    most = "this checkpoint reads at most 4,064 tokens before a canvas"
    assert refused(capsys, "--context", "4065") == f"context is 4,065; {most}"
    assert main(["fit", "--context", "4064"]) == 0


def test_more_images_than_the_context_holds_never_fit(opened):
    assert fit.longest(opened, Job(context=1, images=100), 10**15) == 0


def test_the_command(capsys):
    assert main(["fit", "--context", "2000", "--images", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["longest_context"] == 4096 - 32 and found["bytes"]["peak"] > found["bytes"]["weights"]
    assert main(["fit", "--context", "2000"]) == 0
    assert "it fits; the longest such prompt has 4,064 tokens" in capsys.readouterr().out
    assert main(["fit", "--context", "5000"]) == 2
    assert "context is 5,000; this checkpoint reads at most 4,064 tokens before a canvas" in capsys.readouterr().err


def test_what_cannot_fit_is_refused_before_loading(monkeypatch, capsys):
    monkeypatch.setattr(backend, "free_memory", lambda: 20_000_000)  # the demo's weights take 28.5 MB
    monkeypatch.setattr(weights, "load", lambda *_: pytest.fail("loaded"))
    assert main(["generate", "Count from 3 to 5."]) == 2
    said = capsys.readouterr().err
    assert "(28.5 MB of weights) and 20.0 MB of memory are free; no prompt fits: take a smaller checkpoint" in said
    assert said.count("\n") == 1 and "--force tries all the same" in said
    monkeypatch.setattr(backend, "free_memory", lambda: 32_000_000)  # room for the weights and a short prompt
    assert main(["generate", "Count from 3 to 5. " * 40]) == 2
    assert re.search("; prompt and answer of [1-9][0-9,]* tokens together would fit; --force", capsys.readouterr().err)
    monkeypatch.setattr(backend, "free_memory", lambda: 20_000_000)
    assert main(["chat"]) == 2
    assert main(["fit"]) == 2
    assert "it does not fit; no prompt of this kind fits" in capsys.readouterr().out


def test_force_tries_all_the_same(monkeypatch, capsys):
    monkeypatch.setattr(backend, "free_memory", lambda: 20_000_000)
    assert main(["generate", "--force", "Count from 3 to 5."]) == 0
    assert capsys.readouterr().out == "3, 4, 5.\n"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("length", [5, 100])
def test_packed_caches_are_counted(opened, bits, length):
    model, packing = weights.load(opened, dtype=mx.float32), Packing(bits, 32)
    caches = model.make_caches(packing=packing)
    model.prefill(np.random.RandomState(0).randint(10, 90, (1, length)), [], caches)
    said = fit.need(opened, Job(context=length, packing=packing), mx.float32)
    assert said.full_caches == sum(cache.nbytes for cache in caches if not hasattr(cache, "window"))
    assert said.sliding_caches == sum(cache.nbytes for cache in caches if hasattr(cache, "window"))


def test_fit_reads_how_caches_are_packed(capsys):
    sizes = []
    for more in ([], ["--kv-bits", "8"], ["--kv-bits", "4"]):
        assert main(["fit", "demo", "--context", "2000", "--json", *more]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["bytes"]["full_caches"])
    assert sizes[0] > 2 * sizes[1] > 2 * sizes[2]
    assert main(["fit", "demo", "--kv-group-size", "32"]) == 2
    assert "give --kv-bits (8 or 4)" in capsys.readouterr().err
