"""The loop on tiny random models: what is pinned, seeded, cut, redrawn, and that rows never feel their neighbours."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import dgemma  # noqa: F401
from dgemma import kernels, weights
from dgemma.config import GenerationConfig
from dgemma.denoise import Block, Done, Prefilled, denoise
from dgemma.errors import OptionError
from dgemma.sampler import ConfidenceThreshold, EntropyBound
from dgemma.step import Options, Step, begin_block, lay_out, read
from dgemma.stopping import StableAndConfident, StepsOnly
from oracle import tiny

C = tiny.CANVAS
OPTIONS = replace(Options.of(GenerationConfig()), max_new_tokens=2 * C, max_denoising_steps=5, end_token_ids=())


@pytest.fixture(scope="module")
def model(checkpoint):
    return weights.load(checkpoint, dtype=mx.float32)


def ids_of(length, seed=0):
    return np.random.RandomState(seed).randint(tiny.FIRST_TEXT, 90, (1, length))


def run(model, ids, options=OPTIONS, seeds=(0,), **more):
    """All events of a run, and each row's tokens."""
    events = list(denoise(model, ids, [], options=options, seeds=seeds, **more))
    rows = [[] for _ in seeds]
    for event in events:
        if isinstance(event, Block):
            for row, tokens in zip(event.rows, event.tokens):
                rows[row] += tokens
    return events, rows


def steps_of(events):
    return [event for event in events if isinstance(event, Step)]


def test_events_come_in_order(model):
    events, (tokens,) = run(model, ids_of(9))
    assert isinstance(events[0], Prefilled) and events[0].prompt_tokens == (9,)
    assert isinstance(events[-1], Done) and events[-1].reasons == ("length",)
    assert [e.block for e in events if isinstance(e, Block)] == [0, 1]
    for block in (0, 1):
        numbers = [s.step for s in steps_of(events) if s.block == block]
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) <= 5
    last = [s for s in steps_of(events) if s.block == 0][-1]
    assert tokens[:C] == last.best[0].tolist(), "the most likely canvas is what is emitted"


def test_the_same_seed_says_the_same(model):
    assert run(model, ids_of(9), seeds=(4,))[1] == run(model, ids_of(9), seeds=(4,))[1]
    assert run(model, ids_of(9), seeds=(4,))[1] != run(model, ids_of(9), seeds=(5,))[1]


def test_nothing_reads_the_global_seed(model):
    mx.random.seed(1)
    first = run(model, ids_of(9))[1]
    mx.random.seed(2)
    assert run(model, ids_of(9))[1] == first


def padded(*lengths):
    longest = max(lengths)
    rows = [np.pad(ids_of(n, seed=n), ((0, 0), (longest - n, 0))) for n in lengths]
    return np.concatenate(rows), [longest - n for n in lengths]


def test_a_row_depends_on_its_own_seed_only(model):
    ids, padding = padded(9, 17, 30)
    together = run(model, ids, seeds=(7, 8, 9), padding=padding)[1]
    for row, length in enumerate((9, 17, 30)):
        assert run(model, ids_of(length, seed=length), seeds=(7 + row,))[1] == [together[row]]


def test_rows_that_end_early_leave_the_batch_and_change_nothing(model):
    ids, padding = padded(9, 17, 30)
    free = run(model, ids, seeds=(7, 8, 9), padding=padding)[1]
    ending = replace(OPTIONS, end_token_ids=(free[1][3],), max_redraws=0)  # the second row ends in its first block
    events, rows = run(model, ids, ending, seeds=(7, 8, 9), padding=padding)
    assert rows[1] == free[1][: free[1].index(free[1][3])] and events[-1].reasons[1] == "stop"
    blocks = [event for event in events if isinstance(event, Block)]
    assert 1 in blocks[0].rows and 1 not in blocks[-1].rows
    for row, length in enumerate((9, 17, 30)):
        assert run(model, ids_of(length, seed=length), ending, seeds=(7 + row,))[1] == [rows[row]]


@pytest.mark.parametrize("most", [1, C - 1, C, C + 1, 2 * C - 1, 3 * C])
def test_max_new_tokens_is_exact(model, most):
    events, (tokens,) = run(model, ids_of(9), replace(OPTIONS, max_new_tokens=most))
    assert len(tokens) == most and events[-1].reasons == ("length",)
    assert sum(isinstance(event, Block) for event in events) == -(-most // C)


def test_a_shorter_answer_is_the_beginning_of_a_longer_one(model):
    long = run(model, ids_of(9), replace(OPTIONS, max_new_tokens=3 * C))[1][0]
    assert run(model, ids_of(9), replace(OPTIONS, max_new_tokens=C + 3))[1][0] == long[: C + 3]


def test_pins_hold_their_token_at_every_step(model):
    pins = {0: 33, 5: 44, C + 2: 55}
    events, (tokens,) = run(model, ids_of(9), pins=[pins])
    assert {p: tokens[p] for p in pins} == pins
    for step in steps_of(events):
        for position, token in pins.items():
            if position // C == step.block:
                assert step.canvas[0, position % C] == step.best[0, position % C] == token
                assert step.accepted[0, position % C] and step.entropy[0, position % C] == 0


def test_pins_reach_the_other_positions(model):
    assert run(model, ids_of(9))[1] != run(model, ids_of(9), pins=[{3: 33}])[1]


def test_pins_do_not_crowd_out_the_surest_free_position(model):
    sure_only = replace(OPTIONS, sampler=ConfidenceThreshold(1.0))
    events, _ = run(model, ids_of(9), sure_only, pins=[{6: 33}])
    for step in steps_of(events):
        assert step.accepted[0].sum() >= 2 or step.block == 1, "the pin and the surest free position"


def test_a_pinned_end_token_is_no_reason_to_draw_again(model):
    events, (tokens,) = run(model, ids_of(9), replace(OPTIONS, end_token_ids=(33,)), pins=[{0: 33}])
    assert tokens == [] and events[-1].redrawn == (0,)


def test_events_cannot_change_what_is_written(model):
    for event in denoise(model, ids_of(9), [], options=OPTIONS, seeds=[0]):
        if isinstance(event, Step):
            for array in (event.canvas, event.best, event.entropy, event.accepted, event.active):
                with pytest.raises(ValueError, match="read-only"):
                    array[0] = 1


def test_rows_that_rest_repeat_what_they_last_showed(model):
    ids, padding = padded(9, 9, 9)
    firsts = [run(model, ids_of(9, seed=9), seeds=(seed,))[1][0][0] for seed in (0, 1, 2)]
    easily = replace(OPTIONS, end_token_ids=(firsts[0],), rule=StableAndConfident(1, 2.0))
    events, _ = run(model, ids, easily, seeds=(0, 1, 2), padding=padding)
    last, rested = {}, 0
    for step in steps_of(events):
        for i, row in enumerate(step.rows):
            now = [array[i].tolist() for array in (step.canvas, step.best, step.entropy, step.accepted)]
            if not step.active[i]:
                rested += 1
                assert now == last[row, step.block], (step.block, step.step, row)
            last[row, step.block] = now
    assert rested > 0


def test_a_seed_canvas_is_where_the_first_block_begins(model):
    canvas = np.full((1, C), 20)
    seen = []

    class Spy(type(model)):
        def canvas_hidden(self, tokens, caches, belief=None):
            seen.append(np.array(tokens))
            return super().canvas_hidden(tokens, caches, belief)

    model.__class__, kept = Spy, model.__class__
    try:
        run(model, ids_of(9), canvas=canvas)
    finally:
        model.__class__ = kept
    assert np.array_equal(seen[0], canvas) and not np.array_equal(seen[-1], canvas)


def test_an_empty_answer_is_drawn_again_at_most_twice(model):
    first = [run(model, ids_of(9), seeds=(seed,))[1][0][0] for seed in range(6)]
    everything = tuple(range(96))
    events, (tokens,) = run(model, ids_of(9), replace(OPTIONS, end_token_ids=everything))
    assert tokens == [] and events[-1].redrawn == (2,) and events[-1].reasons == ("stop",)
    taken = [step.step for step in steps_of(events)]
    assert taken.count(1) == 3, "three canvases were begun"
    block = next(event for event in events if isinstance(event, Block))
    assert block.steps == (len(taken),), "the steps of thrown away canvases count"
    events, _ = run(model, ids_of(9), replace(OPTIONS, end_token_ids=everything, max_redraws=0))
    assert events[-1].redrawn == (0,)
    events, _ = run(model, ids_of(9), replace(OPTIONS, end_token_ids=(first[0],)))
    assert events[-1].redrawn[0] >= 1


def test_a_redraw_leaves_the_neighbours_alone(model):
    ids, padding = padded(9, 9)
    alone = [run(model, ids_of(9, seed=9), seeds=(seed,))[1][0] for seed in (0, 1)]
    assert alone[0][0] != alone[1][0]
    ending = replace(OPTIONS, end_token_ids=(alone[0][0],))
    events, rows = run(model, ids, ending, seeds=(0, 1), padding=padding)
    singles = [run(model, ids_of(9, seed=9), ending, seeds=(seed,)) for seed in (0, 1)]
    assert rows == [single[1][0] for single in singles]
    assert events[-1].redrawn == tuple(single[0][-1].redrawn[0] for single in singles) and events[-1].redrawn[0] > 0


def test_steps_are_capped_and_counted(model):
    events, _ = run(model, ids_of(9), replace(OPTIONS, rule=StepsOnly(), max_denoising_steps=3))
    assert [event.steps for event in events if isinstance(event, Block)] == [(3,), (3,)]
    temperatures = [step.temperature for step in steps_of(events)][:3]
    np.testing.assert_allclose(temperatures, [0.8, 0.4 + 0.4 * 2 / 3, 0.4 + 0.4 / 3])


def test_a_settled_row_stops_and_keeps_its_canvas(model):
    sure = replace(OPTIONS, rule=StableAndConfident(0, 100.0))
    events, _ = run(model, ids_of(9), sure)
    assert [event.steps for event in events if isinstance(event, Block)] == [(1,), (1,)]


@pytest.mark.parametrize("sampler", [EntropyBound(0.1), EntropyBound(1e9), ConfidenceThreshold(0.5)])
def test_accepted_positions_are_drawn_and_the_rest_is_noise(model, sampler):
    events, _ = run(model, ids_of(9), replace(OPTIONS, sampler=sampler))
    accepted = [step.accepted[0].sum() for step in steps_of(events)]
    assert min(accepted) >= 1
    if sampler == EntropyBound(1e9):
        assert set(accepted) == {C}


def test_closing_the_stream_stops_between_steps(model):
    stream = denoise(model, ids_of(9), [], options=OPTIONS, seeds=[0])
    assert isinstance(next(stream), Prefilled) and isinstance(next(stream), Step)
    stream.close()
    assert next(stream, None) is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; at least 1 is needed"),
        ({"max_denoising_steps": -3}, "max_denoising_steps is -3; at least 1 is needed"),
        ({"t_min": 0.0}, "t_min is 0.0 and t_max 0.8; 0 < t_min <= t_max is needed"),
        ({"t_max": float("nan")}, "t_min is 0.4 and t_max nan"),
        ({"t_max": 0.3}, "t_min is 0.4 and t_max 0.3"),
    ],
)
def test_options_are_checked(change, message):
    with pytest.raises(OptionError, match=message):
        replace(OPTIONS, **change)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"seeds": (0, 1)}, "1 prompt\\(s\\), 2 seed\\(s\\)"),
        ({"pins": [{}, {}]}, "2 set\\(s\\) of pins"),
        ({"pins": [{2 * C: 1}]}, f"pin {2 * C} -> 1: positions run to {2 * C - 1}, tokens to 95"),
        ({"pins": [{0: 96}]}, "pin 0 -> 96"),
        ({"pins": [{-1: 5}]}, "pin -1 -> 5"),
        ({"canvas": np.zeros((1, C + 1), int)}, f"the seed canvas has shape \\(1, {C + 1}\\); \\(1, {C}\\) is needed"),
        ({"canvas": np.full((1, C), 96)}, "the seed canvas holds tokens outside 0..95"),
    ],
)
def test_inputs_are_checked(model, more, message):
    with pytest.raises(OptionError, match=message):
        run(model, ids_of(9), **({"seeds": (0,)} | more))


def test_one_step_is_a_pure_function_of_its_state(model):
    caches = model.make_caches()
    model.prefill(ids_of(9), [], caches)
    key = mx.random.key(5)
    state = begin_block(model, [key], np.array([True]), None, None, None)
    outcomes = []
    for _ in range(2):
        after, step = read(lay_out(model, caches, state, 1, OPTIONS), state, (0,), 0, OPTIONS)
        outcomes.append((step.canvas.tolist(), step.entropy.tolist(), after.active.tolist(), [key.tolist() for key in after.keys]))
    assert outcomes[0] == outcomes[1] and state.steps.tolist() == [0] and key.tolist() == mx.random.key(5).tolist()


SETTLING = replace(OPTIONS, max_denoising_steps=12, rule=StableAndConfident(1, 4.4))  # on noise: some rows sooner than others


@pytest.mark.parametrize("options", [OPTIONS, SETTLING, replace(OPTIONS, max_denoising_steps=1)], ids=["all", "settling", "one"])
@pytest.mark.parametrize("lengths", [(9,), (9, 4, 13)])
def test_steps_laid_out_ahead_are_the_same_steps(model, monkeypatch, options, lengths):
    ids, padding = padded(*lengths)
    told = []
    for lazy in (False, True):
        monkeypatch.setattr(kernels, "LAZY", lazy)
        events, rows = run(model, ids, options, seeds=range(len(lengths)), padding=padding, pins=[{3: 7} for _ in lengths])
        shown = [(s.block, s.step, s.active.tolist(), s.canvas.tolist(), s.entropy.tolist()) for s in steps_of(events)]
        told.append((shown, rows, [e.steps for e in events if isinstance(e, Block)]))
    assert told[0] == told[1]
    if options is SETTLING and len(lengths) > 1:
        assert len({tuple(s[2]) for s in told[0][0]}) > 1, "one row settles before another"


def test_a_reader_who_leaves_between_steps_leaves_the_model_usable(model, monkeypatch):
    monkeypatch.setattr(kernels, "LAZY", True)
    events = denoise(model, ids_of(9), [], options=OPTIONS, seeds=(0,))
    assert next(events) and next(events)
    events.close()
    assert run(model, ids_of(9))[1] == run(model, ids_of(9))[1]
