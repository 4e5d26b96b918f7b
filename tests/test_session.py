"""Conversations: warm equals cold whatever is done to them, a turn is whole or has not been, a file is what was saved."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import scripted
from conftest import add_words
from dgemma import Block, Finished, Pipeline, SessionError, Step, memory, session
from dgemma.errors import OptionError, OutputError, PromptError
from dgemma.memory import Memory
from dgemma.session import fingerprint
from dgemma.vision import Patches
from oracle import tiny

RED, BLUE = (np.full((60, 40, 3), colour, dtype=np.uint8) for colour in ([200, 0, 0], [0, 0, 200]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A window of 12, a canvas of 8: every ring has wrapped by the end of the first prompt."""
    return add_words(tiny.write_checkpoint(tmp_path_factory.mktemp("session"), "ring"), max_new_tokens=24)


@pytest.fixture(scope="module")
def pipe(folder):
    return Pipeline.from_pretrained(folder)


def said(chat):
    """The conversation, pictures by their digests."""
    shown = lambda part: part["image"].digest if isinstance(part.get("image"), Patches) else part
    content = lambda one: one if isinstance(one, str) else [shown(part) for part in one]
    return [(message["role"], content(message["content"])) for message in chat.messages]


# -- turns ------------------------------------------------------------------------------------------------------------


def test_a_conversation_is_what_the_pipeline_would_say_to_its_messages(pipe):
    chat = pipe.chat(system="Be brief.")
    for number, images in enumerate([[RED], None, [BLUE, RED], None]):
        before = chat.messages
        answer = chat.send(f"Question {number}?", images)
        parts = [{"type": "image", "image": image} for image in images or []] + [{"type": "text", "text": f"Question {number}?"}]
        alone = pipe([*before, {"role": "user", "content": parts}])
        assert (answer.text, answer.tokens, answer.steps) == (alone.text, alone.tokens, alone.steps)
        assert (alone.prompt_tokens, alone.cached_tokens) == (answer.prompt_tokens, 0)
        assert chat.messages[-1] == answer.message
    assert len(chat.turns) == 4 and [turn.seed for turn in chat.turns] == [0] * 4


def test_only_what_is_new_is_encoded(pipe):
    chat = pipe.chat()
    first = chat.send("The first question, which is rather long?", [RED])
    second = chat.send("And?")
    whole_blocks = max(0, len(first.steps) - 1) * tiny.CANVAS  # the last one was not needed
    assert second.cached_tokens in range(first.prompt_tokens, first.prompt_tokens + whole_blocks + 1)


def test_finished_blocks_stay_as_they_were_written():
    """On the demo, whose words survive a tokenizer; of random weights half a character may be all that is kept."""
    chat = Pipeline.from_pretrained().chat()
    first = chat.send("Count from 3 to 24.")
    written = 32 * (len(first.steps) - 1)
    assert written and chat.send("Count from 1 to 5.").cached_tokens == first.prompt_tokens + written


def test_stream_gives_what_send_gives(pipe):
    one, other = pipe.chat(), pipe.chat()
    events = list(one.stream("Hello?", [RED]))
    assert events[-1].answers[0].text == other.send("Hello?", [RED]).text and said(one) == said(other)
    assert {type(event).__name__ for event in events} >= {"Prefilled", "Step", "Block", "Finished"}


def test_regenerate_takes_the_next_seed_and_drops_what_follows(pipe):
    chat = pipe.chat(seed=5)
    for number in range(4):
        chat.send(f"Question {number}?")
    before = said(chat)
    answer = chat.regenerate(1)
    assert answer.seed == 6 and said(chat)[:3] == before[:3] and len(chat.turns) == 2
    assert answer.cached_tokens == answer.prompt_tokens  # the prompt is as it was: nothing to encode
    assert chat.regenerate().seed == 7 and chat.regenerate(seed=5).text == before[3][1]


def test_edit_keeps_the_pictures_unless_told_otherwise(pipe):
    chat = pipe.chat()
    chat.send("What is this?", [RED])
    chat.edit(0, "What is that?")
    assert said(chat)[0][1][0] == pipe.processor.pictured(chat.messages[:1])[0]["content"][0]["image"].digest
    chat.edit(0, "What is that?", images=[])
    assert said(chat)[0] == ("user", [{"type": "text", "text": "What is that?"}])
    chat.edit(-1, "And this?", images=[BLUE])
    assert len(said(chat)[0][1]) == 2 and len(chat.turns) == 1


def test_an_edit_encodes_from_where_it_differs(pipe):
    chat = pipe.chat()
    for number in range(5):
        ended = chat.send(f"Question {number}, long enough for a ring of twelve?").prompt_tokens
        if number == 1:
            there = ended
    assert chat.edit(2, "Something else?").cached_tokens >= there


def test_history_may_come_along(pipe):
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image", "image": RED}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "Red."},
    ]
    chat = pipe.chat(messages=talk)
    assert chat.send("Really?").text == pipe([*talk, {"role": "user", "content": "Really?"}]).text
    assert [turn.reply["content"] for turn in chat.turns][0] == "Red."


def test_what_is_given_and_what_is_shown_can_be_changed_without_changing_the_conversation(pipe):
    asked, stop = [{"role": "user", "content": [{"type": "text", "text": "One?"}]}], ["zzz"]
    chat = pipe.chat(stop=stop)
    chat.send(asked)
    before = said(chat)
    asked[0]["content"][0]["text"] = "Two?"
    stop.append(5)
    for shown in (chat.messages, [*chat.turns[0].asked, chat.turns[0].reply]):
        shown[0]["content"].append({"type": "text", "text": "!"})
        shown[0]["content"][0]["text"] = shown[1]["content"] = "changed"
    assert said(chat) == before
    assert chat.send("Three?").text == pipe.chat(messages=chat.messages[:2]).send("Three?").text


def test_a_picture_cannot_be_changed_in_place(pipe):
    """Its digest is what the caches know it by."""
    chat = pipe.chat()
    chat.send("What is it?", [RED])
    with pytest.raises(ValueError, match="read-only"):
        chat.messages[0]["content"][0]["image"].pixels[:] = 0


def test_content_in_all_its_forms(pipe, tmp_path):
    """Parts that are plain strings, pictures in an answer, nothing said beside calls."""
    parts = ["What is ", {"type": "text", "text": "it?"}]
    told = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "image", "image": BLUE}, "This."]}]
    chat = pipe.chat(messages=told)
    answer = chat.send([{"role": "user", "content": ["And?"]}])
    assert answer.text == pipe([*told, {"role": "user", "content": ["And?"]}]).text
    chat.save(tmp_path / "chat.safetensors")
    again = pipe.load_chat(tmp_path / "chat.safetensors")
    assert said(again) == said(chat) and again.edit(1, "Or?").text == chat.edit(1, "Or?").text


def test_seeds_and_settings_of_any_kind_of_number(pipe, tmp_path):
    told = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    for seed in ([3], np.uint64(3), np.int8(3)):
        chat = pipe.chat(messages=told, seed=seed, confidence=np.float32(0.5), max_new_tokens=np.int64(5))
        assert chat.regenerate().seed == 4
        chat.save(tmp_path / "chat.safetensors")
        assert pipe.load_chat(tmp_path / "chat.safetensors").regenerate().seed == 5


def test_all_that_the_system_says_before_the_first_turn_stays(pipe):
    told = [{"role": "system", "content": "B."}, {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    chat = pipe.chat(system="A.", messages=told)
    chat.edit(0, "Or?")
    assert [message["content"] for message in chat.messages[:2]] == ["A.", "B."]


def test_settings_of_the_chat_hold_unless_others_are_given(pipe):
    chat = pipe.chat(max_new_tokens=5, seed=3)
    assert (len(chat.send("One?").tokens), chat.turns[0].seed) == (5, 3)
    assert len(chat.send("Two?", max_new_tokens=8, seed=None).tokens) == 8


def test_packed_caches(pipe):
    chat = pipe.chat(kv_bits=8)
    chat.send("One?")
    packed = chat.nbytes
    plain = pipe.chat()
    plain.send("One?")
    assert packed < plain.nbytes
    assert chat.send("Two?", kv_bits=4).cached_tokens == 0  # packed otherwise: encoded anew


def test_results_of_tools_are_a_turn():
    words = scripted.processor()
    call = words.tokenizer.encode('<|tool_call>call:add{a:1,b:2}<tool_call|>', add_special_tokens=False)
    pipe = scripted.pipeline([*call, 6], [6])
    add = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    answer = pipe([{"role": "user", "content": "1 + 2?"}], tools=[add])
    assert answer.tool_calls[0].arguments == {"a": 1, "b": 2}
    asked = pipe.processor.prompt(
        [{"role": "user", "content": "1 + 2?"}, answer.message, {"role": "tool", "name": "add", "content": "3"}], tools=[add]
    )
    assert "response:add" in words.tokenizer.decode(list(asked.ids))


# -- stopping ---------------------------------------------------------------------------------------------------------


def stop_after(chat, blocks, **settings):
    """Break a stream off in the middle of the block after so many."""
    events = chat.stream("Tell me everything.", max_new_tokens=64, steps=4, **settings)
    for event in events:
        if isinstance(event, Step) and event.block == blocks and event.step == 2:
            break
    events.close()


def test_a_stream_closed_in_its_first_block_has_not_been(pipe):
    chat = pipe.chat()
    chat.send("Hello?")
    before = said(chat)
    stop_after(chat, 0)
    assert said(chat) == before
    warm = chat.send("And?")
    cold = pipe.chat(messages=chat.messages[:2]).send("And?")
    assert warm.text == cold.text and warm.cached_tokens > 0


def test_a_stream_closed_later_keeps_its_finished_blocks(pipe):
    chat, whole = pipe.chat(), pipe.chat()
    full = whole.send("Tell me everything.", max_new_tokens=64, steps=4)
    assert len(full.steps) >= 4  # of random weights: what follows needs that many blocks
    stop_after(chat, 2)
    assert chat.messages[-1]["content"] == pipe.processor.decode(full.tokens[: 2 * tiny.CANVAS])
    assert chat.cached_tokens > 0
    chat.send("Go on.")
    assert len(chat.turns) == 2


def test_a_block_counts_from_the_moment_of_its_event(pipe):
    chat = pipe.chat()
    for event in chat.stream("Tell me everything.", max_new_tokens=64, steps=4):
        if isinstance(event, Block):
            break
    assert len(chat.turns) == 1 and chat.messages[-1]["content"] == pipe.processor.decode(event.tokens[0])


def test_ctrl_c_inside_a_step(pipe, monkeypatch):
    chat = pipe.chat()
    chat.send("Hello?")
    whole, calls = type(pipe.model).canvas_hidden, []

    def breaks(self, *args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(self, *args)

    monkeypatch.setattr(type(pipe.model), "canvas_hidden", breaks)
    with pytest.raises(KeyboardInterrupt):
        chat.send("And?")
    monkeypatch.undo()
    assert len(chat.turns) == 1 and chat.send("And?").cached_tokens > 0


@pytest.mark.parametrize("where", ["prefill", "write", "cut back", "between"])
def test_ctrl_c_anywhere_in_the_caches_costs_only_time(pipe, tmp_path, monkeypatch, where):
    """Layers of different lengths are neither answered from nor saved."""
    chat = pipe.chat(steps=3, max_new_tokens=20)
    for number in range(3):
        chat.send(f"Question {number}, long enough for a ring of twelve?")
    kind = type(chat._memory.caches[-1])
    layers = sum(type(cache) is kind for cache in chat._memory.caches)
    target, name, after = {
        "prefill": (kind, "append_window", 0),
        "write": (kind, "append_window", layers),
        "cut back": (memory, "back", 1),
        "between": (Memory, "_passed", 0),
    }[where]
    whole, calls = getattr(target, name), []

    def breaks(*args):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(target, name, breaks)
    with pytest.raises(KeyboardInterrupt):
        chat.edit(1, "Something else that is asked?")
    monkeypatch.undo()
    chat.save(tmp_path / "chat.safetensors")
    again = pipe.load_chat(tmp_path / "chat.safetensors")
    assert said(again) == said(chat)
    cold = pipe.load_chat(tmp_path / "chat.safetensors")
    cold.forget()
    assert len({one.edit(1, "Another?").tokens for one in (chat, again, cold)}) == 1


def test_ctrl_c_before_the_first_event_or_between_two_leaves_the_chat_free(pipe, monkeypatch):
    chat = pipe.chat(max_new_tokens=5)
    with monkeypatch.context() as patch:
        patch.setattr(session, "Answering", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            chat.send("Hello?")
    with monkeypatch.context() as patch:
        stream = chat.stream
        patch.setattr(chat, "stream", lambda *args: Interrupted(stream(*args)))
        with pytest.raises(KeyboardInterrupt) as held:  # its traceback is held, as by an interactive session
            chat.send("Hello?")
    assert chat.send("Hello?").text and held and len(chat.turns) == 1


class Interrupted:
    """Events, between the second and the third of which Ctrl-C comes."""

    def __init__(self, events):
        self._events, self._given = events, 0

    def __iter__(self):
        return self

    def __next__(self):
        self._given += 1
        if self._given == 3:
            signal.raise_signal(signal.SIGINT)
        return next(self._events)

    def close(self):
        self._events.close()


def test_nothing_is_forgotten_while_an_answer_is_written(pipe):
    chat = pipe.chat()
    events = chat.stream("Hello?")
    next(events)
    with pytest.raises(PromptError, match="is writing another answer"):
        chat.forget()
    assert list(events)[-1].answers[0].tokens == pipe("Hello?").tokens


def test_an_error_leaves_the_conversation_as_it_was(pipe, monkeypatch):
    chat = pipe.chat()
    chat.send("Hello?")
    before = said(chat)
    monkeypatch.setattr(type(pipe.model), "scores", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        chat.send("And?")
    monkeypatch.undo()
    assert said(chat) == before and chat.send("And?").text == pipe.chat(messages=chat.messages[:2]).send("And?").text


def test_one_stream_at_a_time(pipe):
    chat = pipe.chat()
    events = chat.stream("Hello?")
    next(events)
    with pytest.raises(PromptError, match="is writing another answer"):
        chat.send("And?")
    events.close()
    stale = chat.stream("Hello?")
    chat.send("First?")
    with pytest.raises(PromptError, match="has gone on since this stream was made"):
        next(stale)
    assert len(chat.turns) == 1


def test_a_stream_left_at_its_last_event_is_at_its_end(pipe):
    chat = pipe.chat()
    events = chat.stream("Hello?")
    while not isinstance(next(events), Finished):
        pass
    other = chat.stream("And?")
    next(other)
    events.close()  # of no effect on the one that is written now
    with pytest.raises(PromptError, match="is writing another answer"):
        chat.send("And?")
    assert isinstance(list(other)[-1], Finished) and len(chat.turns) == 2


# -- any order --------------------------------------------------------------------------------------------------------


def act(chat, operation, rng, pipe, tmp_path):
    """One random operation; the chat to go on with."""
    settings = {"steps": 3, "max_new_tokens": int(rng.choice([6, 8, 20])), "chunk": rng.choice([None, 5, 100])}
    images = [[], [], [RED], [BLUE, RED]][rng.randint(4)]
    text = "?" * int(rng.randint(1, 30))
    turn = int(rng.randint(max(1, len(chat.turns))))
    patience = int(rng.randint(1, 12))
    if operation == "send" or not chat.turns:
        chat.send(text, images, **settings)
    elif operation == "regenerate":
        chat.regenerate(turn, **settings)
    elif operation == "edit":
        chat.edit(turn, text, None if rng.rand() < 0.5 else images, **settings)
    elif operation == "cancel":
        events = chat.stream(text, images, **settings)
        for _, event in zip(range(patience), events):
            pass
        events.close()
    else:
        chat.save(tmp_path / "chat.safetensors")
        chat = pipe.load_chat(tmp_path / "chat.safetensors")
    return chat


@pytest.mark.parametrize("seed", range(16))
def test_any_order_of_operations_warm_as_cold(pipe, tmp_path, seed):
    """A session, and one that is made to forget all that is encoded before each operation: the same turns, to the token."""
    chats = []
    for cold in (False, True):
        rng = np.random.RandomState(seed)
        budget, every = int(rng.choice([0, 100_000, 1 << 30])), int(rng.choice([8, 1024]))
        kv = {} if rng.rand() < 0.7 else {"kv_bits": 8, "kv_group_size": 32, "kv_start": int(rng.choice([0, 60]))}
        chat = pipe.chat(system="Be brief.", snapshot_bytes=budget, snapshot_every=every, **kv)
        for _ in range(8):
            if cold:
                chat.forget()
            operation = rng.choice(["send", "send", "regenerate", "edit", "cancel", "file"])
            chat = act(chat, operation, rng, pipe, tmp_path)
            assert chat.snapshot_bytes <= budget
        if cold:
            chat.forget()
        chat.send("And?")
        chats.append(chat)
    warm, cold = chats
    assert said(warm) == said(cold) and [turn.seed for turn in warm.turns] == [turn.seed for turn in cold.turns]
    assert warm._memory.cuts == cold._memory.cuts  # both encoded in the same passes
    for a, b in zip(warm._memory.caches, cold._memory.caches):  # and hold the same, to the last bit
        assert a.offset == b.offset
        one, other = (mx.array(cache.capture_rows().keys.unpacked() if cache.is_packed else cache.capture_rows().keys) for cache in (a, b))
        length = min(one.shape[2], other.shape[2])  # right after a cut a ring may hold a row less, which nothing reads
        assert np.array_equal(np.array(one[:, :, one.shape[2] - length :]), np.array(other[:, :, other.shape[2] - length :]))


# -- on a disk --------------------------------------------------------------------------------------------------------


def test_saved_and_loaded_in_another_process(pipe, folder, tmp_path):
    chat = pipe.chat(system="Be brief.", seed=4, stop=["zzz"])
    for number in range(4):
        chat.send(f"Question {number}?", [RED] if number == 1 else None)
    chat.save(tmp_path / "chat.safetensors")
    code = f"""
import json
from dgemma import Pipeline
chat = Pipeline.from_pretrained({str(folder)!r}).load_chat({str(tmp_path / "chat.safetensors")!r})
shown = [m["content"] for m in chat.messages if isinstance(m["content"], str)]
again, on = chat.regenerate(2), chat.send("And?")
print(json.dumps([shown, again.text, again.cached_tokens, on.text, on.cached_tokens, [turn.seed for turn in chat.turns]]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown = [m["content"] for m in chat.messages if isinstance(m["content"], str)]
    again, on = chat.regenerate(2), chat.send("And?")
    here = [shown, again.text, again.cached_tokens, on.text, on.cached_tokens, [turn.seed for turn in chat.turns]]
    assert json.loads(ran.stdout) == here and again.cached_tokens == again.prompt_tokens


def test_ten_turns_with_two_pictures_on_the_demo(tmp_path):
    """What docs/sessions.md tells: the script fails if warm, cold, saved and loaded ever differ, or copies outgrow their bytes."""
    script = Path(__file__).parents[1] / "benchmarks" / "sessions.py"
    command = [sys.executable, str(script), "--turns", "1", "--snapshot-bytes", "1500000", "--json", str(tmp_path / "found.json")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    encoded = [line["encoded"] for line in found["lines"]]
    assert encoded[0] == found["lines"][0]["prompt"] and all(count < 100 for count in encoded[1:])
    assert found["lines"][4]["prompt"] > 3 * found["window"] and found["later"]["again"]["encoded"] == 0
    assert found["later"]["loaded"]["encoded"] < 40


def test_an_empty_session_can_be_saved(pipe, tmp_path):
    pipe.chat(system="Be brief.").save(tmp_path / "chat.safetensors")
    chat = pipe.load_chat(tmp_path / "chat.safetensors")
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert chat.send("Hello?").text == pipe.chat(system="Be brief.").send("Hello?").text


def test_settings_are_saved_and_can_be_given_anew(pipe, tmp_path):
    chat = pipe.chat(seed=9, max_new_tokens=5, snapshot_bytes=12345)
    chat.send("Hello?")
    chat.save(tmp_path / "chat.safetensors")
    loaded = pipe.load_chat(tmp_path / "chat.safetensors", max_new_tokens=3, snapshot_bytes=0, seed=None)
    answer = loaded.send("And?")
    assert (answer.seed, len(answer.tokens), loaded.snapshot_bytes) == (9, 3, 0)


def test_another_checkpoint_is_refused(pipe, tmp_path, tmp_path_factory):
    chat = pipe.chat()
    chat.send("Hello?")
    chat.save(tmp_path / "chat.safetensors")
    other = add_words(tiny.write_checkpoint(tmp_path_factory.mktemp("other"), "ring"))
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if "embed_tokens" in name)
    weights[name][-1, -1] += np.float32(1e-3)  # one number of one token, trained
    save_file(weights, other / "model.safetensors")
    for changed in (Pipeline.from_pretrained(other), Pipeline.from_pretrained(str(other), image_attention="bidirectional")):
        with pytest.raises(SessionError, match="another checkpoint, dtype or image attention"):
            changed.load_chat(tmp_path / "chat.safetensors")
    assert fingerprint(pipe.model) == fingerprint(pipe.model)


@pytest.fixture()
def saved(pipe, tmp_path):
    chat = pipe.chat()
    chat.send("Hello?", [RED])
    chat.save(tmp_path / "chat.safetensors")
    return tmp_path / "chat.safetensors"


def test_every_damage_is_one_line(pipe, saved):
    whole = saved.read_bytes()
    rng = np.random.RandomState(0)
    places = [0, 7, 8, 9, len(whole) - 1, *rng.randint(0, len(whole), 60), *rng.randint(0, 4000, 40)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.randint(8))
        saved.write_bytes(damaged)
        with pytest.raises(SessionError) as error:
            pipe.load_chat(saved)
        assert "\n" not in str(error.value) and saved.name in str(error.value)
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:length])
        with pytest.raises(SessionError, match="chat.safetensors"):
            pipe.load_chat(saved)
    saved.write_bytes(whole + b"x")
    with pytest.raises(SessionError):
        pipe.load_chat(saved)


def test_arrays_that_change_places_are_damage(pipe, saved):
    """A header that is whole, as are all bytes, but says keys where values lie."""
    whole = saved.read_bytes()
    swapped = whole.replace(b"now.0.keys.0", b"now.0.KEYS.0").replace(b"now.0.values.0", b"now.0.keys.0")
    swapped = swapped.replace(b"now.0.KEYS.0", b"now.0.values.0")
    assert swapped != whole and len(swapped) == len(whole)
    saved.write_bytes(swapped)
    with pytest.raises(SessionError, match="is damaged"):
        pipe.load_chat(saved)


@pytest.mark.parametrize("change", ["version", "format", "model"])
def test_other_files_are_told_apart(pipe, saved, folder, change):
    if change == "model":
        path, message = folder / "model.safetensors", "not a dgemma session"
    else:
        path = saved
        old = {"version": b'"version": "1"', "format": b'"format": "dgemma session"'}[change]
        new = {"version": b'"version": "2"', "format": b'"format": "dgemma-session"'}[change]
        whole = saved.read_bytes()
        assert old in whole
        saved.write_bytes(whole.replace(old, new))
        message = {"version": "version '2'; this dgemma reads version 1", "format": "not a dgemma session"}[change]
    with pytest.raises(SessionError, match=message):
        pipe.load_chat(path)


def test_a_forged_file_is_refused(pipe, saved, monkeypatch):
    """Right owner, right digest, and rows that no such cache can hold."""
    from dgemma import archive
    from dgemma.session import FORMAT, VERSION

    owner = fingerprint(pipe.model)
    record, arrays = archive.read(saved, FORMAT, VERSION, owner)
    for change in (
        lambda r, a: a.update({"now.0.keys.0": a["now.0.keys.0"][:, :, :-2]}),
        lambda r, a: a.update({"now.0.values.0": a["now.0.values.0"].astype(mx.float16)}),
        lambda r, a: a.pop("now.2.keys.0"),
        lambda r, a: r["memory"].update(length=10**9),
        lambda r, a: r.update(turns=[1]),
        lambda r, a: r.pop("memory"),
        lambda r, a: r["memory"].update(cuts="x"),
        lambda r, a: r["memory"].update(cuts=[float(cut) for cut in r["memory"]["cuts"]]),
        lambda r, a: r["memory"].update(length=True),
        lambda r, a: r["memory"]["kept"].append(3),
        lambda r, a: r["turns"][0].update(seed="x"),
        lambda r, a: r["turns"][0].update(reply=[5]),
        lambda r, a: r["turns"][0]["asked"][0].update(role="nobody"),
        lambda r, a: a.update({name: rows[:, :-1] for name, rows in a.items() if name.startswith("image ")}),
        lambda r, a: a.update({name: rows[:, :-1] for name, rows in a.items() if name.startswith("pixels ")}),
        lambda r, a: a.update({name: rows.reshape(-1) for name, rows in a.items() if name.startswith("positions ")}),
        lambda r, a: a.update({name: rows[::-1] for name, rows in a.items() if name.startswith("positions ")}),
    ):
        forged, tensors = json.loads(json.dumps(record)), dict(arrays)
        change(forged, tensors)
        archive.write(saved, FORMAT, VERSION, owner, forged, tensors)
        with pytest.raises(SessionError, match="holds what no session can"):
            pipe.load_chat(saved)


@pytest.mark.parametrize("change", [("record", "{"), ("record", "[" * 100000), ("record", None), ("owner", None), ("dtype", "F64")])
def test_a_file_forged_to_its_digest_is_one_line(pipe, saved, change):
    from dgemma import archive

    whole = saved.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    fields, data = header["__metadata__"], whole[8 + length :]
    fields.pop("digest")
    key, value = change
    if key == "dtype":
        data += bytes(8)
        header["more"] = {"dtype": "X9", "shape": [8], "data_offsets": [len(data) - 8, len(data)]}
    elif value is None:
        fields.pop(key)
    else:
        fields[key] = value
    digest = archive._digest(fields, {name: entry for name, entry in header.items() if name != "__metadata__"})
    digest.update(data)
    fields["digest"] = digest.hexdigest()
    text = json.dumps(header).encode()
    saved.write_bytes(struct.pack("<Q", len(text)) + text + data)
    with pytest.raises(SessionError, match="chat.safetensors") as error:
        pipe.load_chat(saved)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [None, 5, b"x", "", "/", "\0", "~nosuchuser/x", "a" * 5000, "\ud800", "pipe"])
def test_names_that_are_no_files(pipe, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(OutputError):
        pipe.chat().save(name)
    with pytest.raises(SessionError):
        pipe.load_chat(name)
    assert os.listdir() == ["pipe"]


def test_a_file_may_be_saved_while_it_is_read(pipe, saved, tmp_path, monkeypatch):
    from dgemma import archive

    chat = pipe.load_chat(saved)
    chat.send("And?")
    whole, calls = archive.stored.check_file, []

    def saves(path):
        found = whole(path)
        if not calls:
            calls.append(1)
            chat.save(saved)
        return found

    monkeypatch.setattr(archive.stored, "check_file", saves)
    assert said(pipe.load_chat(saved)) == said(chat)


def test_threads_may_save_to_one_file_and_names_may_be_long(pipe, tmp_path):
    chat, path = pipe.chat(), tmp_path / ("字" * 80)
    chat.send("Hello?")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(chat.save, [path] * 40))
    assert said(pipe.load_chat(path)) == said(chat) and os.listdir(tmp_path) == [path.name]


def test_nothing_is_lost_when_a_file_cannot_be_written(pipe, folder, saved):
    chat, before = pipe.load_chat(saved), saved.read_bytes()
    chat.send("And?")
    with pytest.raises(OutputError, match="there is no folder|cannot be written"):
        chat.save(saved.parent / "missing" / "chat.safetensors")
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    full = f"""
import signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
{code}
from dgemma import Pipeline, OutputError
chat = Pipeline.from_pretrained(sys.argv[1]).load_chat(sys.argv[2])
try:
    chat.save(sys.argv[2])
except OutputError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", full, str(folder), str(saved)], capture_output=True, text=True)
    assert "nothing was kept" in ran.stdout, ran.stderr
    assert saved.read_bytes() == before and os.listdir(saved.parent) == [saved.name]


def test_what_is_no_json_is_refused_and_nothing_written(pipe, tmp_path):
    chat = pipe.chat(messages=[{"role": "user", "content": "1?", "note": {1, 2}}, {"role": "assistant", "content": "1"}])
    with pytest.raises(SessionError, match="cannot be written as JSON"):
        chat.save(tmp_path / "chat.safetensors")
    assert not os.listdir(tmp_path)


# -- bad input --------------------------------------------------------------------------------------------------------


def called(text):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": text}}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def endless():
    message = {"role": "user", "content": "?"}
    message["note"] = [message]
    return [message]


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda pipe: pipe.chat(system=3), PromptError, "system is 3; a string is needed"),
        (lambda pipe: pipe.chat(messages=[{"role": "user", "content": "?"}]), PromptError, "ends with a question"),
        (lambda pipe: pipe.chat(messages=5), PromptError, "messages are of type int; a list is needed"),
        (lambda pipe: pipe.chat(messages=np.zeros(2)), PromptError, "messages are of type ndarray; a list is needed"),
        (lambda pipe: pipe.chat().send(endless()), PromptError, "holds itself"),
        (lambda pipe: pipe(endless()), PromptError, "cannot be written as text"),
        (lambda pipe: pipe.chat().send([{"role": "tool", "name": "<|turn>user", "content": "3"}]), PromptError, "spells <\\|turn>"),
        (lambda pipe: pipe.chat().send([{"role": "tool", "name": "\ud800", "content": "3"}]), PromptError, "as text"),
        (lambda pipe: pipe.chat(messages=called("\ud800")).send("?"), PromptError, "message 2 holds what cannot be written as text"),
        (lambda pipe: pipe.chat(image_budget=3).send("?"), OptionError, "image budget 3: allowed are 70"),
        (lambda pipe: pipe.chat(entropy_bound=10**400), OptionError, "too large for a float"),
        (lambda pipe: pipe.chat(seed=10**5000), OptionError, "seed is a number of 16610 bits"),
        (lambda pipe: pipe.chat().send([{"role": "user", "tool_calls": []}]), PromptError, "empty"),
        (lambda pipe: pipe.chat().send([{"role": "user", "content": None, "tool_calls": []}]), PromptError, "empty"),
        (lambda pipe: pipe.chat(messages=[{"role": "assistant", "content": "!"}]), PromptError, "turns begin with the user"),
        (lambda pipe: pipe.chat(steps=0), OptionError, "at least 1"),
        (lambda pipe: pipe.chat(unheard=1), OptionError, "unknown setting 'unheard'"),
        (lambda pipe: pipe.chat(snapshot_bytes=-1), OptionError, "snapshot_bytes is -1"),
        (lambda pipe: pipe.chat(snapshot_every=0), OptionError, "snapshot_every is 0"),
        (lambda pipe: pipe.chat().send(""), PromptError, "empty"),
        (lambda pipe: pipe.chat().send(None), PromptError, "a string or a list of messages is needed"),
        (lambda pipe: pipe.chat().send([]), PromptError, "no messages"),
        (lambda pipe: pipe.chat().send([{"role": "assistant", "content": "!"}]), PromptError, "a turn asks as user or tool"),
        (lambda pipe: pipe.chat().send([{"role": "system", "content": "!"}]), PromptError, "a turn asks as user or tool"),
        (lambda pipe: pipe.chat().send("a <|turn> b"), PromptError, "spells <\\|turn>"),
        (lambda pipe: pipe.chat().send("?", ["missing.png"]), Exception, "missing.png"),
        (lambda pipe: pipe.chat().send("?" * 5000), PromptError, "the context is 4096"),
        (lambda pipe: pipe.chat().regenerate(), OptionError, "0 turn\\(s\\); send something first"),
        (lambda pipe: pipe.chat().edit(3, "?"), OptionError, "turn is 3; this chat has 0"),
        (lambda pipe: pipe.chat().regenerate("last"), OptionError, "a whole number is needed"),
        (lambda pipe: pipe.load_chat("missing.safetensors"), SessionError, "missing.safetensors"),
        (lambda pipe: pipe.load_chat("."), SessionError, "not a file"),
        (lambda pipe: pipe.load_chat("any", system="Be brief."), OptionError, "system is part of what was saved"),
        (lambda pipe: pipe.load_chat("any", messages=[]), OptionError, "messages is part of what was saved"),
    ],
)
def test_bad_input(pipe, make, error, message):
    with pytest.raises(error, match=message) as found:
        make(pipe)
    assert "\n" not in str(found.value)


def test_bad_input_in_a_conversation_changes_nothing(pipe):
    chat = pipe.chat()
    chat.send("Hello?", [RED])
    before, cached = said(chat), chat.cached_tokens
    for wrong in (
        lambda: chat.send(" "), lambda: chat.send("?", ["missing.png"]), lambda: chat.edit(0, " "), lambda: chat.edit(5, "?"),
        lambda: chat.send("?", steps=0), lambda: chat.regenerate(1), lambda: chat.edit(0, "?", ["missing.png"]),
    ):  # fmt: skip
        with pytest.raises(Exception):
            wrong()
        assert said(chat) == before and chat.cached_tokens == cached


def test_patches_of_another_model_are_refused(pipe):
    chat = pipe.chat()
    chat.send("Hello?", [RED])
    (part, _) = chat.messages[0]["content"]
    strange = Patches(pixels=part["image"].pixels[:, :100], positions=part["image"].positions, soft_tokens=4, size=(1, 1), resized=(1, 1))
    with pytest.raises(Exception, match="patches of another model"):
        chat.send("And?", [strange])
