"""dgemma bench and profile: tiny runs of the real thing, turns, sums, mistakes. Nothing here is timed."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
import tempfile
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import dgemma
from dgemma import arguments, backend, bench, breakdown, cli, geometry, hub, kernels, parts, peers, results, terminal, weights
from dgemma.config import ModelConfig
from dgemma.runtime import Dgemma, endless
from dgemma.turns import Contender, Job, Record, compete
from dgemma.vision import preprocess
from oracle import tiny
from test_cli import help_of

QUICK = ("--prefix", "20", "--batch", "1", "--image-budget", "70", "--turns", "1", "--seconds", "0.01")


@pytest.fixture(autouse=True)
def demo(checkpoint, tmp_path, monkeypatch):
    """The demo is a tiny checkpoint, "small" has two tiny layers, and temporary folders are looked at."""
    monkeypatch.setattr(hub, "DEMO", checkpoint)
    text, *others = geometry.GEOMETRIES["small"]
    few = text | {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512}
    monkeypatch.setitem(geometry.GEOMETRIES, "small", (few, *others))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capfd):
    """Runs a command in this process: exit code, stdout, stderr."""

    def call(*argv: str) -> tuple[int, str, str]:
        code = cli.main(argv)
        return code, *capfd.readouterr()

    return call


# -- bench, whole -----------------------------------------------------------------------------------------------------


def test_a_tiny_bench_measures_everything_and_leaves_nothing_behind(run, tmp_path):
    argv = ("bench", "--geometry", "small", *QUICK, "--batch", "1", "2", "--steps", "4", "--turns", "2", "--json", "found.json")
    code, out, err = run(*argv)
    assert (code, err) == (0, "")
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == ["machine", "model", "settings", "runtimes", "cells", "left_out"]
    assert found["model"]["name"] == "small" and found["model"]["canvas_length"] == 32
    assert found["runtimes"]["dgemma"]["versions"]["dgemma"] == dgemma.__version__
    twice = ("prefill", "canvas pass", "step", "block", "tokens per second", "peak memory")
    told = [(cell["what"], cell.get("batch")) for cell in found["cells"]]
    assert told == [(what, batch) for what in twice for batch in (1, 2)] + [("image", None), ("image, peak memory", None)]
    for cell in found["cells"]:
        ours = cell["runtimes"]["dgemma"]
        assert len(ours["turns"]) == 2 and ours["median"] > 0
    steps = next(cell for cell in found["cells"] if cell["what"] == "step")
    assert all(len(turn) % 2 == 0 for turn in steps["runtimes"]["dgemma"]["turns"]), "of the 3 times between 4 steps the last does not count"
    assert "| prefill, ms " in out and "| image of 60, ms " in out and "small (" in out
    assert os.listdir(tmp_path / "temporary") == []


def test_the_weights_are_the_same_for_the_same_seed(tmp_path):
    written = weights.load(geometry.write("small", tmp_path / "out", dtype=mx.float32, seed=3))
    drawn = geometry.in_memory("small", mx.float32, seed=3)
    ids = np.arange(20)[None]
    for a, b in zip(*((model.canvas_hidden(mx.array(ids), model.make_caches()) for model in (written, drawn)))):
        assert mx.array_equal(a, b)


def test_the_geometries_of_the_help_are_those_that_there_are():
    assert set(arguments.GEOMETRIES) == {"demo", *geometry.GEOMETRIES}


@pytest.mark.parametrize("name", ["bench", "profile"])
def test_every_example_of_the_help_runs(run, name):
    for line in help_of(name).partition("examples:\n")[2].splitlines():
        code, out, err = run(*shlex.split(line)[1:])
        assert (code, err) == (0, "") and out
    assert all(action.help for action in cli.parser()._subparsers._group_actions[0].choices[name]._actions)


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, said",
    [
        ("bench --steps 2", "steps is 2; at least 3 is needed"),
        ("bench --turns 0", "turns is 0; at least 1 is needed"),
        ("bench --seconds 0", "seconds is 0.0; a number above 0 is needed"),
        ("bench --batch 0", "one of the batches is 0; at least 1 is needed"),
        ("bench --prefix 5000", "prefix 5,000 is more than the 4,088 tokens that this checkpoint reads before a canvas"),
        ("bench --bits 7", "7 bits in groups of 64"),
        ("bench --dtype int8", "dtype is 'int8'; allowed: "),
        ("bench --model nowhere/at/all", "nowhere/at/all"),
        ("bench --geometry small --model x", "argument --model: not allowed with argument --geometry"),
        ("bench --json nowhere/x.json", "nowhere/x.json: there is no folder "),
        ("bench --peer jax", "unknown peer 'jax'; allowed: transformers, mlx-vlm, mlx-vlm+blas"),
        ("bench --peer transformers=./none", "--peer transformers: ./none does not run as a Python"),
        ("profile --prefix 5000", "prefix 5,000 is more than the 4,088 tokens"),
        ("profile --batch 0", "one of the batches is 0"),
        ("profile --geometry none", "argument --geometry: invalid choice: 'none'"),
    ],
)
def test_a_mistake_is_one_line(run, argv, said):
    code, out, err = run(*shlex.split(argv))
    assert (code, out) == (2, "") and err.count("\n") == 1 and said in err


def test_a_picture_that_a_checkpoint_cannot_read_is_a_mistake(checkpoint, text_checkpoint):
    opened = weights.Checkpoint.open(checkpoint)
    small = replace(opened.config, vision=replace(opened.config.vision, position_embedding_size=96))
    for config, said in (
        (small, "image budget 1,120 is 120 patches wide; this checkpoint has 96 positions a side"),
        (weights.Checkpoint.open(text_checkpoint).config, "image budget 1,120 is for a checkpoint with a vision tower"),
    ):
        with pytest.raises(dgemma.OptionError, match=said):
            bench.plan(replace(opened, config=config), bench.Settings(prefixes=(9,), budgets=(1120,)))
    _, left_out = bench.plan(replace(opened, config=small), bench.Settings(prefixes=(9,)))
    assert [line.partition(" is ")[0] for line in left_out] == ["image budget 1,120"]


def test_a_peer_that_is_not_installed_is_one_line(run, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -S -E \"$@\"\n")
    bare.chmod(0o755)
    for name, lacks in (("transformers", "transformers and no torch"), ("mlx-vlm", "mlx_vlm")):
        code, out, err = run("bench", "--peer", f"{name}={bare}")
        assert (code, out) == (2, "")
        assert err == f"dgemma: --peer {name}: {bare} has no {lacks}; give --peer {name}=PYTHON that has\n"


def test_a_peer_is_named_once_and_transformers_reads_nothing_packed():
    with pytest.raises(dgemma.OptionError, match="named twice"):
        bench.Settings(peers=(("mlx-vlm", "a"), ("mlx-vlm", "b")))
    with pytest.raises(dgemma.OptionError, match="transformers reads no weights packed by mlx"):
        bench.Settings(subject=bench.Subject(bits=4), peers=(("transformers", "a"),))


@pytest.mark.parametrize("name", ["bench", "profile"])
def test_weights_that_the_memory_cannot_hold_are_refused_before_they_are_made(run, name, tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "free_memory", lambda: 20_000_000_000)
    monkeypatch.setattr(geometry, "parameters", None)
    code, out, err = run(name, "--geometry", "full")
    assert (code, out) == (2, "") and err.startswith("dgemma: geometry full takes ") and "20.00 GB of memory are free" in err
    assert os.listdir(tmp_path / "temporary") == []


def test_usual_sizes_that_do_not_fit_are_left_out(checkpoint):
    opened = weights.Checkpoint.open(checkpoint)
    jobs, left_out = bench.plan(opened, bench.Settings())
    prefixes = {job.sizes["prefix"] for job in jobs if job.what == "answer"}
    assert prefixes == {256, 1024}
    assert [line.partition(" is ")[0] for line in left_out] == ["prefix 8,192", "prefix 32,768"]
    batches = [(job.sizes["prefix"], job.sizes["batch"]) for job in jobs if job.what == "canvas_pass"]
    assert batches == [(256, 1), (1024, 1), (1024, 4), (1024, 8)]


@pytest.mark.parametrize("budget", [70, 140, 280, 560, 1120])
def test_a_picture_fills_its_budget_as_a_photograph_would(budget):
    columns, rows = bench.grid(budget)
    photograph = np.zeros((640, 960, 3), np.uint8)
    assert preprocess(photograph, budget=budget).grid == (columns, rows)


# -- inputs -----------------------------------------------------------------------------------------------------------


def test_prompts_are_the_same_everywhere_and_have_no_place_for_an_image():
    ids = peers.tokens(0, 3, 500, 40, [20, 21])
    assert (ids == peers.tokens(0, 3, 500, 40, [20, 21])).all() and not np.isin(ids, [20, 21]).any()
    assert ids.shape == (3, 500) and ids.min() >= peers.FIRST and ids.max() < 40


def test_a_peer_that_cuts_patches_itself_gets_the_picture_that_ours_were_cut_from():
    picture = np.random.RandomState(0).randint(0, 256, (16 * 18, 16 * 30, 3)).astype(np.uint8)
    cut = preprocess(picture, budget=70)
    assert cut.grid == (30, 18)
    np.testing.assert_allclose(peers.whole(cut.pixels, 30, 18)[0], picture.transpose(2, 0, 1) / 255, atol=1e-6)


def test_the_config_that_mlx_vlm_reads_says_the_same(tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    copy.mkdir()
    tiny.write_checkpoint(source, "wide")
    config = json.loads((source / "config.json").read_text())
    full = {"head_dim": 32, "num_key_value_heads": 1}
    for name in ("global_head_dim", "num_global_key_value_heads"):
        config["text_config"].pop(name, None)
    config["text_config"]["per_layer_config"] = {"2": full}
    (source / "config.json").write_text(json.dumps(config))
    peers.released_spelling(source, copy)
    assert ModelConfig.read(copy).text == ModelConfig.read(source).text
    assert "per_layer_config" not in (copy / "config.json").read_text()


# -- turns ------------------------------------------------------------------------------------------------------------

STAND_IN = """
import json, os, sys
name, log = sys.argv[1:]
for line in sys.stdin:
    request = json.loads(line)
    print(name, request["do"], request.get("what", os.getpid()), file=open(log, "a"))
    if request.get("what") == "die":
        sys.exit("out of memory")
    if request["do"] == "load":
        reply = {"versions": {}, "device": name} if request["folder"] else {"error": "no such folder"}
    else:
        reply = {"error": "too long"} if (name, request["what"]) == ("b", "hard") else {"ms": {"image": [2.0]}, "peak": 7}
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def contenders(tmp_path):
    """Two runtimes that do nothing but keep a log; and the log."""
    script, log = tmp_path / "stand_in.py", tmp_path / "log"
    script.write_text(STAND_IN)
    return [Contender(name=name, command=[sys.executable, str(script), name, str(log)]) for name in "ab"], log


def jobs_of(*what):
    return [Job(what=one, sizes={}) for one in what]


@pytest.mark.parametrize("together", [True, False])
def test_runtimes_take_turns(contenders, together):
    pair, log = contenders
    records = compete(pair, {"folder": "f"}, jobs_of("x", "y"), turns=2, seconds=1, together=together)
    lines = [line.split() for line in log.read_text().splitlines()]
    measured = [(name, what) for name, do, what in lines if do == "measure"]
    if together:
        assert measured == [(name, what) for what in "xy" for name in "abab"]
    else:
        assert measured == [(name, what) for name in "abab" for what in "xy"]
    assert len({process for _, do, process in lines if do == "load"}) == (2 if together else 4)
    assert all(len(record.replies[number]) == 2 for record in records.values() for number in (0, 1))
    assert records["b"].about["device"] == "b"


def test_a_job_that_fails_is_noted_and_the_rest_goes_on(contenders):
    pair, log = contenders
    records = compete(pair, {"folder": "f"}, jobs_of("hard", "y"), turns=3, seconds=1, together=True)
    assert records["b"].failures == {0: "too long"} and list(records["b"].replies) == [1]
    assert list(records["a"].replies) == [0, 1] and log.read_text().count("b measure hard") == 1


def test_a_runtime_that_ends_or_cannot_load_is_a_failure(contenders):
    pair, _ = contenders
    with pytest.raises(dgemma.Failure, match="a ended with code 1: out of memory"):
        compete(pair, {"folder": "f"}, jobs_of("die"), turns=1, seconds=1, together=True)
    with pytest.raises(dgemma.Failure, match="a cannot load the checkpoint: no such folder"):
        compete(pair, {"folder": ""}, jobs_of("x"), turns=1, seconds=1, together=True)


def test_an_interrupt_ends_the_processes(contenders):
    pair, log = contenders

    def note(doing):
        if "b: x" in doing:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compete(pair, {"folder": "f"}, jobs_of("x"), turns=1, seconds=1, together=True, note=note)
    for line in log.read_text().splitlines():
        if " load " in line:
            with pytest.raises(ProcessLookupError):
                os.kill(int(line.split()[-1]), 0)


def test_a_job_says_what_it_is():
    assert str(Job(what="canvas_pass", sizes={"prefix": 1024, "batch": 1})) == "canvas pass, prefix 1,024, batch 1"


# -- sums -------------------------------------------------------------------------------------------------------------


def test_ratios_are_taken_turn_by_turn():
    job = Job(what="answer", sizes={"prefix": 10, "batch": 2, "steps": 3})
    ours, theirs = Record(about={"versions": {}, "device": "CPU"}), Record(about={"versions": {}, "device": "CPU"})
    for record, blocks in ((ours, (10.0, 30.0, 10.0)), (theirs, (20.0, 60.0, 40.0))):  # the second turn met a slow minute
        record.replies[0] = [{"ms": {"prefill": [1.0], "step": [b / 3], "block": [b]}, "peak": 5} for b in blocks]
    del theirs.replies[0][0]["ms"]["step"], theirs.replies[0][1]["ms"]["step"], theirs.replies[0][2]["ms"]["step"]
    found = {cell["what"]: cell["runtimes"] for cell in results.cells([job], {"dgemma": ours, "x": theirs}, 32, "dgemma")}
    assert found["block"]["x"]["ratio"] == 0.5 and found["block"]["dgemma"]["median"] == 10.0
    assert found["tokens per second"]["dgemma"]["best"] == 6400.0 and found["tokens per second"]["x"]["ratio"] == 2.0
    assert found["block"]["x"]["best_ratio"] == 0.5 and found["tokens per second"]["x"]["best_ratio"] == 2.0
    assert list(found["step"]) == ["dgemma"] and found["peak memory"]["x"]["ratio"] == 1.0


@pytest.mark.parametrize("load, said", [(0.4, False), (3.0, True), (None, False)])
def test_a_busy_machine_is_told(load, said):
    machine = {"cpu": "x", "cores": 2, "system": "Linux", "load": load}
    model = {"name": "demo", "parameters": 1, "canvas_length": 8, "bits": None, "dtype": "float32"}
    settings = {"turns": 1, "seconds": 1.0, "together": True, "steps": 3}
    found = {"machine": machine, "model": model, "settings": settings, "runtimes": {}, "cells": [], "left_out": []}
    assert ("others were at work here (load 3.0 on 2 cores)" in results.text(found, "dgemma")) == said


@pytest.mark.parametrize(
    "value, said", [(12345.6, "12,346"), (99.96, "100.0"), (3.14159, "3.14"), (0.01234, "0.0123"), (-261.2, "-261")]
)
def test_numbers_are_short(value, said):
    assert results.number(value) == said


# -- profile ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runtime(checkpoint):
    driven = Dgemma()
    driven.load(str(checkpoint), "float32", [7, 8, 9])
    return driven


def test_the_parts_of_a_step_make_the_pass(runtime):
    caches, canvas, logits = runtime.prefilled(30, 2)
    model = runtime.model
    belief = model.soft_embed(mx.softmax(logits, axis=-1))
    met = list(parts.walk(model, canvas, caches, belief))
    ours = model.norm(met[-1].frame(met[-1].x)[-1])
    np.testing.assert_allclose(np.array(ours), np.array(model.canvas_hidden(canvas, caches, belief)), atol=1e-5)


def test_what_a_part_cannot_avoid(runtime):
    caches, canvas, logits = runtime.prefilled(30, 2)
    text = runtime.model.config.text
    found = {part.name: part for part in parts.step_parts(runtime.model, canvas, caches, logits)}
    assert list(found) == [
        "embedding, self-conditioning", "sliding attention", "full attention", "dense MLP", "router", "experts",
        "norms, residuals, merge", "head", "sampler", "soft embedding",
    ]  # fmt: skip
    rows, table = 2 * runtime.canvas, 4 * text.vocab_size * text.hidden_size
    assert found["head"].operations == 2 * rows * text.vocab_size * text.hidden_size
    assert found["head"].nbytes == table + 4 * rows * (text.hidden_size + text.vocab_size)
    assert found["experts"].operations == 6 * rows * text.top_k_experts * text.hidden_size * text.moe_intermediate_size * 3
    layers = [layer.kind for layer in text.layers]
    assert [found[f"{kind} attention"].layers for kind in ("sliding", "full")] == [2, 1] and len(layers) == 3
    for part in found.values():
        assert part.run() and part.times == 1


def test_wide_parts_are_run_as_much_at_a_time_as_the_loop_does(runtime, monkeypatch):
    caches, canvas, logits = runtime.prefilled(30, 2)
    monkeypatch.setattr(kernels, "WIDE", 4 * runtime.vocabulary)
    head = next(part for part in parts.step_parts(runtime.model, canvas, caches, logits) if part.name == "head")
    assert head.times == canvas.size / 4 and head.run()[0].shape == (4, runtime.vocabulary)


def test_profile_tells_every_part(run):
    argv = ("--geometry", "small", "--prefix", "20", "--image-budget", "70", "--seconds", "0.01", "--json")
    code, out, err = run("profile", *argv)
    found = json.loads(out)
    assert (code, err) == (0, "") and found["image"]["image_tokens"] == 60
    for whole in (found["step"], found["image"]):
        assert all(part["ms"] > 0 and part["bytes"] > 0 and part["gflops"] > 0 for part in whole["parts"])


def test_what_the_parts_leave_of_the_whole_is_the_rest(monkeypatch):
    calls = []
    takes = {"whole": 10.0 * breakdown.STREAK, "a": 1.0, "b": 2.0}
    monkeypatch.setattr(breakdown, "_milliseconds", lambda thing: (thing(), takes[calls[-1]])[1])
    made = [
        parts.Part(name=name, layers=1, run=lambda name=name: calls.append(name), nbytes=3e6, operations=4e6, times=times)
        for name, times in (("a", 1.0), ("b", 3.0))
    ]
    found = breakdown.told(made, lambda: calls.append("whole"), 0.001, terminal.Progress())
    assert (found["whole_ms"], found["rest_ms"]) == (10.0, 3.0) and calls[: 2 * breakdown.STREAK + 4] == [*["whole"] * breakdown.STREAK, "a", "b"] * 2
    first, second = found["parts"]
    assert (first["ms"], first["share"], first["gb_per_second"], first["gflops"]) == (1.0, 0.1, 3.0, 4.0)
    assert (second["ms"], second["bytes"], second["gb_per_second"]) == (6.0, 9e6, 1.5)


def test_a_block_has_exactly_its_steps(runtime):
    found = runtime.answer(prefix=20, batch=2, steps=5)
    assert {name: len(taken) for name, taken in found.items()} == {"prefill": 1, "step": 3, "block": 1}  # the last is told sooner: not counted
    settled = np.zeros((2, runtime.canvas))
    assert not endless(runtime.canvas, 5).rule.settled([settled] * 9, settled).any(), "however sure it is"


# -- the peers, where they are installed -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["transformers", "mlx-vlm"])
def test_a_peer_does_every_job(name, checkpoint):
    if any(importlib.util.find_spec(needed) is None for needed in peers.NEEDS[name]):
        pytest.skip(f"{name} is not installed")
    contender = Contender(name=name, command=peers.command(sys.executable, name))
    jobs = [
        Job(what="answer", sizes={"prefix": 20, "batch": 1, "steps": 3}),
        Job(what="canvas_pass", sizes={"prefix": 20, "batch": 2}),
        Job(what="image", sizes={"columns": 6, "rows": 3}),
    ]
    load = {"folder": str(checkpoint), "dtype": "float32", "reserved": [7, 8, 9]}
    record = compete([contender], load, jobs, turns=1, seconds=0.01, together=True)[name]
    assert not record.failures
    assert [sorted(record.replies[number][0]["ms"]) for number in range(3)] == [["block", "prefill", "step"], ["pass"], ["image"]]
