"""The command line: what goes to stdout and what to stderr, exit codes, help, output files, conversations."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

import dgemma
from dgemma import Pipeline, arguments, cli, files, hub, talk, terminal, vision
from dgemma.errors import OptionError

SHORT = ("--max-tokens", "8", "--steps", "2")


@pytest.fixture(autouse=True)
def demo(checkpoint, pictures, monkeypatch):
    """Every command runs on a tiny checkpoint, in a folder with pictures."""
    monkeypatch.setattr(hub, "DEMO", checkpoint)
    monkeypatch.chdir(pictures)
    for name in ("NO_COLOR", "DGEMMA_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command in this process: exit code, stdout, stderr."""

    def call(*argv: str, stdin: str | bytes | None = None) -> tuple[int, str, str]:
        if stdin is not None:
            data = stdin if isinstance(stdin, bytes) else stdin.encode()
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        code = cli.main(argv)
        return code, *capsys.readouterr()

    return call


def help_of(*command: str) -> str:
    top = cli.parser()
    found = top if not command else top._subparsers._group_actions[0].choices[command[0]]
    return found.format_help()


def example_lines() -> list[str]:
    texts = [help_of(), *(help_of(name) for name in ("generate", "chat", "info", "doctor"))]
    return [line.strip() for text in texts for line in text.partition("examples:\n")[2].splitlines()]


# -- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", dict.fromkeys(example_lines()))
def test_every_example_of_the_help_runs(line, run, tmp_path, pictures, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for picture in pictures.iterdir():
        os.symlink(picture, tmp_path / picture.name)
    echo, pipe, command = line.rpartition(" | ")
    stdin = shlex.split(echo)[1] + "\n" if pipe else ""
    argv = shlex.split(command)
    assert argv[0] == "dgemma"
    code, out, err = run(*argv[1:], stdin=stdin)
    assert code == 0
    if argv[1:] and argv[1] in ("generate", "info", "doctor") and "--output" not in argv:
        assert out
    if "--output" in argv:
        assert (tmp_path / argv[argv.index("--output") + 1]).read_text() and not out


@pytest.mark.parametrize("command", ["generate", "chat", "info", "doctor"])
def test_every_option_has_a_help_text(command):
    actions = cli.parser()._subparsers._group_actions[0].choices[command]._actions
    assert all(action.help for action in actions)


def test_help_needs_no_transformers():
    code = "import sys; from dgemma import cli; cli.main(['--help']); sys.exit('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("usage: dgemma") and not done.stderr


def test_version(run):
    assert run("--version") == (0, f"dgemma {dgemma.__version__}\n", "")


def test_the_budgets_of_the_help_are_those_of_the_eyes():
    assert arguments.BUDGETS == vision.BUDGETS


# -- generate ---------------------------------------------------------------------------------------------------------


def test_generate_prints_the_answer_and_nothing_else(run, checkpoint):
    answer = Pipeline.from_pretrained(checkpoint)("Hello", max_new_tokens=8, steps=2, seed=3)
    assert run("generate", *SHORT, "--seed", "3", "Hello") == (0, answer.text + "\n", "")


def test_generate_with_a_picture_and_a_system_turn_is_the_pipeline_with_them(run, checkpoint):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image", "image": "shapes.png"}, {"type": "text", "text": "What?"}]},
    ]
    answer = Pipeline.from_pretrained(checkpoint)(messages, max_new_tokens=8, steps=2)
    code, out, err = run("generate", *SHORT, "--image", "shapes.png", "--system", "Be brief.", "--json", "What?")
    found = json.loads(out)
    assert (code, err) == (0, "") and tuple(found["tokens"]) == answer.tokens
    assert found["image_tokens"] == answer.image_tokens > 0 and found["prompt_tokens"] == answer.prompt_tokens


def test_json_is_one_object(run):
    code, out, err = run("generate", *SHORT, "--seed", "3", "--json", "Hello")
    assert code == 0 and err == "" and out.count("\n") == 1
    assert list(json.loads(out)) == [
        "text", "tokens", "thinking", "tool_calls", "finish_reason", "stop_string", "prompt_tokens", "image_tokens", "generated_tokens", "blocks", "steps",
        "tokens_per_forward", "redrawn", "seconds", "peak_memory", "seed", "model",
    ]  # fmt: skip


def test_the_prompt_may_come_from_stdin(run):
    assert run("generate", *SHORT, "-", stdin="\ufeffHello\n") == run("generate", *SHORT, "Hello")


def test_stats_go_to_stderr(run):
    code, out, err = run("generate", *SHORT, "--stats", "Hello")
    assert code == 0 and err.count("\n") == 1 and re.match(r"8 tokens in 1 block and \d+ steps? \(", err)


def test_text_is_printed_as_blocks_finish(checkpoint, monkeypatch):
    """The first block is on stdout before the second is written."""
    seen, out = [], io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    stream = Pipeline.stream

    def spied(self, *args, **settings):
        for event in stream(self, *args, **settings):
            seen.append((type(event).__name__, len(out.getvalue())))
            yield event

    monkeypatch.setattr(Pipeline, "stream", spied)
    assert cli.main(["generate", "--steps", "2", "Hello"]) == 0
    texts = [i for i, (name, _) in enumerate(seen) if name == "Text"]
    assert len(texts) >= 2 and seen[texts[0] + 1][1] > 0


# -- watch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("no_colour", [False, True])
def test_watch_writes_a_line_a_step_where_there_is_no_terminal(run, monkeypatch, no_colour):
    if no_colour:
        monkeypatch.setenv("NO_COLOR", "1")
    plain = run("generate", *SHORT, "Hello")
    code, out, err = run("generate", *SHORT, "--watch", "Hello")
    assert (code, out) == plain[:2] and "\x1b" not in err
    line = r"block 1, step \d/2, t 0\.\d\d, entropy \d\.\d{3}, accepted \d/8 \| "
    assert err and all(re.match(line, one) for one in err.splitlines())


def on_a_terminal(monkeypatch, *argv: str) -> tuple[int, str]:
    """Exit code, and what a terminal got as stdout and stderr together."""
    master, slave = pty.openpty()
    with open(slave, "w", encoding="utf-8") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setenv("TERM", "xterm")
        code = cli.main(argv)
        screen.flush()
        os.set_blocking(master, False)
        got = b""
        while True:
            try:
                got += os.read(master, 65536)
            except BlockingIOError:
                break
    os.close(master)
    return code, got.decode().replace("\r\n", "\n")


def test_watch_redraws_in_place_on_a_terminal_and_leaves_the_answer(run, monkeypatch):
    _, answer, _ = run("generate", *SHORT, "Hello")
    code, got = on_a_terminal(monkeypatch, "generate", *SHORT, "--watch", "--quiet", "Hello")
    assert code == 0 and got.count("\x1b[?2026h") >= 1 and got.endswith(f"A\x1b[?25h{answer}")


def test_watch_under_no_color_writes_no_escapes_even_on_a_terminal(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    code, got = on_a_terminal(monkeypatch, "generate", *SHORT, "--watch", "--quiet", "Hello")
    assert code == 0 and "\x1b" not in got


def test_a_terminal_is_told_what_it_took_unless_quiet(monkeypatch):
    _, got = on_a_terminal(monkeypatch, "generate", *SHORT, "Hello")
    assert "tokens/forward" in got
    _, got = on_a_terminal(monkeypatch, "generate", *SHORT, "--quiet", "Hello")
    assert "tokens/forward" not in got


def test_progress_shows_on_a_terminal_after_a_while_and_goes_away(monkeypatch):
    master, slave = pty.openpty()
    monkeypatch.setattr(terminal, "PATIENCE", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with open(slave, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        with terminal.Progress() as progress:
            progress.now("loading demo")
            time.sleep(0.6)
            progress.hide()
            time.sleep(0.4)
        got = os.read(master, 65536).decode()
    os.close(master)
    assert "loading demo, 0 s" in got and got.endswith("\r\x1b[K")


def test_progress_is_gone_before_text_comes():
    calls = []

    class Note:
        def __getattr__(self, name):
            return lambda *_, **__: calls.append(name)

    terminal.show([dgemma.Text(0, "Hello")], terminal.Transcript(0), Note(), Note(), None)
    assert calls == ["now", "hide", "say", "hide", "say", "end"]


# -- ends that are not the end -----------------------------------------------------------------------------------------


def interrupt_after(monkeypatch, events: int) -> None:
    """Ctrl-C when a stream has given so many events."""
    stream = Pipeline.stream

    def cut(self, *args, **settings):
        for number, event in enumerate(stream(self, *args, **settings), 1):
            yield event
            if number == events:
                raise KeyboardInterrupt

    monkeypatch.setattr(Pipeline, "stream", cut)


def test_an_interrupted_answer_keeps_its_finished_blocks(run, monkeypatch):
    _, whole, _ = run("generate", "--steps", "1", "Hello")
    interrupt_after(monkeypatch, 4)  # prefilled, step, block, text
    code, out, err = run("generate", "--steps", "1", "Hello")
    assert code == 130 and err == "dgemma: interrupted in block 1, step 1\n"
    assert out.strip() and whole.startswith(out.rstrip("\n"))


def test_an_interrupted_answer_is_a_partial_object(run, monkeypatch):
    interrupt_after(monkeypatch, 4)
    code, out, err = run("generate", "--steps", "1", "--json", "Hello")
    found = json.loads(out)
    assert code == 130 and err.count("\n") == 1
    assert found["finish_reason"] == "interrupted" and found["text"]
    assert len(found["tokens"]) == 8 and found["steps"] == [1]


def test_an_answer_interrupted_before_its_first_block_prints_nothing(run, monkeypatch):
    interrupt_after(monkeypatch, 1)
    assert run("generate", "Hello") == (130, "", "dgemma: interrupted before the first step\n")


def test_an_interrupted_answer_reaches_its_file(run, monkeypatch, tmp_path):
    interrupt_after(monkeypatch, 4)
    code, out, _ = run("generate", "--steps", "1", "--output", str(tmp_path / "a.txt"), "Hello")
    assert code == 130 and out == "" and (tmp_path / "a.txt").read_text().strip()


def command_line(*argv: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from dgemma.cli import main; sys.exit(main())", *argv]


def test_a_real_ctrl_c_while_writing(checkpoint):
    # Blocks that never settle: the second takes seconds, however late the signal comes.
    never = ("--steps", "1000", "--stability", "1000")
    argv = command_line("generate", "--model", str(checkpoint), "--max-tokens", "4000", *never, "--watch", "Hello")
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    seen = [process.stderr.readline()]
    while seen[-1].startswith("block 1,"):
        seen.append(process.stderr.readline())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and seen[-1].startswith("block 2,")
    assert out.strip() and re.fullmatch(r"dgemma: interrupted in block 2, step \d+", err.splitlines()[-1])


def test_nobody_reads_on(checkpoint):
    process = subprocess.Popen(
        command_line("info", str(checkpoint)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert process.wait(60) == 141 and process.stderr.read() == ""


def test_a_failure_is_one_line_and_exit_code_1(run, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("[metal::malloc] no\nmemory")

    monkeypatch.setattr(Pipeline, "stream", fail)
    code, out, err = run("generate", "Hello")
    assert (code, out) == (1, "")
    assert err == "dgemma: failed (RuntimeError: [metal::malloc] no memory); DGEMMA_DEBUG=1 shows where\n"
    monkeypatch.setenv("DGEMMA_DEBUG", "1")
    assert "Traceback" in run("generate", "Hello")[2]


def test_out_of_memory_is_one_line_and_exit_code_1(run, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(Pipeline, "stream", fail)
    code, _, err = run("generate", "Hello")
    assert code == 1 and err.startswith("dgemma: out of memory; ") and err.count("\n") == 1


# -- output files -----------------------------------------------------------------------------------------------------


def test_output_is_written_whole_and_replaces(run, tmp_path):
    _, text, _ = run("generate", *SHORT, "Hello")
    (tmp_path / "a.txt").write_text("old")
    assert run("generate", *SHORT, "--output", str(tmp_path / "a.txt"), "Hello") == (0, "", "")
    assert (tmp_path / "a.txt").read_text() == text and os.listdir(tmp_path) == ["a.txt"]


def test_output_as_json(run, tmp_path):
    assert run("generate", *SHORT, "--json", "--output", str(tmp_path / "a.json"), "Hello") == (0, "", "")
    assert json.loads((tmp_path / "a.json").read_text())["generated_tokens"] == 8


def test_output_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    files.write_whole(str(tmp_path / "link"), "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


# -- info and doctor --------------------------------------------------------------------------------------------------


def test_info_counts_without_reading_a_weight(run, checkpoint, monkeypatch):
    from dgemma import weights

    monkeypatch.setattr(weights.mx, "load", None)
    code, out, err = run("info", str(checkpoint), "--json")
    found = json.loads(out)
    parts = found["parameters"]
    assert (code, err) == (0, "")
    assert parts["total"] == sum(n for name, n in parts.items() if name not in ("total", "active")) > parts["active"]
    assert found["text"]["pattern"] == "ssF" and found["canvas_length"] == 8 and found["vision"]["pooling"] == 3
    assert found["tokens"]["image"] == {"id": 8, "name": "<|image|>"}
    assert found["bytes"]["on_disk"] == (checkpoint / "model.safetensors").stat().st_size


def test_info_agrees_with_the_loaded_model(run, checkpoint):
    from mlx.utils import tree_flatten

    model = Pipeline.from_pretrained(checkpoint).model
    found = json.loads(run("info", str(checkpoint), "--json")[1])
    loaded = [array for _, array in tree_flatten(model.parameters())]
    assert found["parameters"]["total"] == sum(array.size for array in loaded)
    assert found["bytes"]["in_memory"] == sum(array.nbytes for array in loaded)


def test_info_of_a_checkpoint_that_reads_text_only(run, text_checkpoint):
    code, out, _ = run("info", str(text_checkpoint))
    assert code == 0 and "vision               none: reads text only" in out


def test_doctor_measures_and_judges(run):
    code, out, err = run("doctor", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "") and found["gflops"]["cpu float32"] > 0 and found["verdict"]
    assert {"python", "mlx", "transformers", "dgemma"} <= set(found["versions"])


def test_doctor_says_what_is_missing(monkeypatch):
    from dgemma import backend, doctor

    slow = backend.Blas(name="mlx's own", path=None, fast=False, note="no faster one found: pip install mkl")
    monkeypatch.setattr(backend, "blas", lambda: slow)
    monkeypatch.setattr(backend, "has_compiler", lambda: False)
    monkeypatch.setattr(backend, "is_gpu", lambda: False)
    monkeypatch.setattr(doctor, "gflops", lambda *_: 8.0)
    found = doctor.examine()
    assert found["verdict"] == "works, but slowly: 8 GFLOP/s on the CPU; see advice"
    assert "pip install mkl" in found["advice"][0]
    assert "advice               a faster BLAS" in doctor.text(found)


# -- chat -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipe(checkpoint):
    return Pipeline.from_pretrained(checkpoint)


@pytest.fixture
def conversation(pipe):
    return talk.Conversation(pipe, {"max_new_tokens": 8, "steps": 2, "seed": 5})


def say(events) -> str:
    return list(events)[-1].answers[0].text


def test_a_conversation_is_the_pipeline_on_its_messages(conversation, pipe):
    first = say(conversation.ask("One"))
    second = say(conversation.ask("Two"))
    messages = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Two"},
    ]
    assert second == pipe(messages, max_new_tokens=8, steps=2, seed=5).text


def test_pictures_stay_in_the_history(conversation, pictures):
    conversation.attach(["shapes.png", "digits.png"])
    say(conversation.ask("What?"))
    assert conversation.pictures == []
    say(conversation.ask("And now?"))
    assert list(conversation.history())[0] == "user: [shapes.png] [digits.png] What?"


def test_retry_draws_another_answer_to_the_same_message(conversation, pipe):
    say(conversation.ask("One"))
    again = say(conversation.retry())
    assert again == pipe("One", max_new_tokens=8, steps=2, seed=6).text
    assert [m["role"] for m in conversation.session.messages] == ["user", "assistant"]
    assert say(conversation.retry()) == pipe("One", max_new_tokens=8, steps=2, seed=7).text


def test_what_fails_leaves_the_conversation_as_it_was(conversation):
    say(conversation.ask("One"))
    conversation.attach(["shapes.png"])
    before = list(conversation.history())
    for wrong in (
        lambda: conversation.attach(["shapes.png", "nowhere.png"]),
        lambda: say(conversation.ask("a" * 5000)),
        lambda: say(conversation.ask(" ")),
        lambda: say(conversation.ask("a<turn|>b")),
    ):
        with pytest.raises(dgemma.UserError):
            wrong()
        assert list(conversation.history()) == before


def test_an_abandoned_answer_leaves_the_conversation_as_it_was(conversation):
    conversation.attach(["shapes.png"])
    events = conversation.ask("One")
    next(events)
    events.close()
    assert conversation.session.messages == [] and len(conversation.pictures) == 1


def test_an_answer_abandoned_later_keeps_what_was_finished(pipe):
    conversation = talk.Conversation(pipe, {"max_new_tokens": 64, "steps": 3, "seed": 5})
    conversation.attach(["shapes.png"])
    for event in conversation.ask("One"):
        if getattr(event, "block", 0) == 2:
            break
    assert [m["role"] for m in conversation.session.messages] == ["user", "assistant"] and conversation.pictures == []


def test_edit_asks_something_else_about_the_same_pictures(conversation):
    conversation.attach(["shapes.png"])
    say(conversation.ask("One"))
    say(conversation.edit("Two"))
    assert list(conversation.history())[0] == "user: [shapes.png] Two"


def test_save_and_load(conversation, pipe, tmp_path):
    conversation.attach(["shapes.png"])
    say(conversation.ask("One"))
    conversation.save(str(tmp_path / "talk.safetensors"))
    before, on = list(conversation.history()), say(conversation.ask("Two"))
    other = talk.Conversation(pipe, {"max_new_tokens": 8, "steps": 2, "seed": 5})
    other.load(str(tmp_path / "talk.safetensors"))
    assert list(other.history()) == before and say(other.ask("Two")) == on


def test_chat_resumes(run, tmp_path, monkeypatch):
    file = str(tmp_path / "talk.safetensors")
    code, first, err = run("chat", *SHORT, stdin=f"Hello\n/save {file}\n")
    assert (code, err) == (0, "")
    code, out, err = run("chat", *SHORT, "--resume", file, "--stats", stdin="/history\n/retry\n")
    assert code == 0 and f"user: Hello\nassistant: {first}" in out and "encoded before" in err
    monkeypatch.setattr(talk, "load", lambda *_: pytest.fail("the weights were read"))
    code, _, err = run("chat", "--resume", file + "x", stdin="Hello\n")
    assert code == 2 and len(err.splitlines()) == 1 and "talk.safetensorsx" in err
    code, _, err = run("chat", "--resume", file, "--system", "Be brief.", stdin="Hello\n")
    assert (code, err.splitlines()[0][:32]) == (2, "dgemma: --system and --resume: a")


def test_chat_from_a_script(run):
    script = '/image "shapes.png"\nWhat?\n/history\n/retry\n\n/reset\n/history\n/exit\nnot read\n'
    code, out, err = run("chat", *SHORT, stdin=script)
    assert (code, err) == (0, "")
    assert "user: [shapes.png] What?\nassistant: " in out and out.endswith("nothing has been said\n")


def test_chat_goes_on_after_a_mistake_and_remembers_it_in_the_exit_code(run):
    code, out, err = run("chat", *SHORT, stdin="/image nowhere.png\n/dance\n/retry\n/edit x\n/save\n/load a.txt\n//Hello\n")
    assert code == 2 and out.strip()
    assert err.splitlines() == [
        "dgemma: nowhere.png: no such image file",
        "dgemma: unknown command /dance; /help lists them, and a message may begin with //",
        "dgemma: there is no answer yet to try again; ask something first",
        "dgemma: there is no message yet to edit; ask something first",
        "dgemma: /save needs a file; /save talk.safetensors",
        "dgemma: a.txt: cannot be read (No such file or directory)",
    ]


def test_chat_refuses_a_line_that_is_no_text_and_goes_on(run):
    code, out, err = run("chat", *SHORT, stdin=b"Hello\n\xff\xfe\n/save ~nosuchuser/x\n/history\n")
    assert code == 2 and "user: Hello\nassistant: " in out
    assert [line.partition(":")[0] for line in err.splitlines()] == ["dgemma"] * 2 and "no Unicode text" in err


def test_ctrl_c_at_the_prompt_loses_nothing(monkeypatch, capsys):
    typed = iter(["One", KeyboardInterrupt, "Two", EOFError])

    def types(_):
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", types)
    assert list(talk.lines(live=True)) == ["One", "Two"]


def test_a_failure_at_a_terminal_loses_nothing(run, monkeypatch):
    typed = iter(["Hello", "Again", "/history"])
    monkeypatch.setattr(talk, "lines", lambda live: typed)

    class Terminal(io.TextIOWrapper):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(io.BytesIO()))
    whole, calls = talk.Conversation.ask, []

    def fails(self, text):
        calls.append(text)
        if len(calls) == 2:
            raise RuntimeError("[metal::malloc]\nout of memory")
        return whole(self, text)

    monkeypatch.setattr(talk.Conversation, "ask", fails)
    code, out, err = run("chat", *SHORT)
    assert code == 0 and "user: Hello\nassistant: " in out
    assert err.splitlines()[1:] == ["dgemma: failed (RuntimeError: [metal::malloc] out of memory); the conversation is as it was"]


@pytest.mark.parametrize(
    "text, names",
    [
        ("a.png", ["a.png"]),
        ("a.png b.png", ["a.png", "b.png"]),
        ("'a b.png' c.png", ["a b.png", "c.png"]),
        ("it's.png", ["it's.png"]),
    ],
)
def test_file_names_after_image(text, names):
    assert talk.file_names(text) == names


def test_a_file_name_with_spaces_needs_no_quotes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a b.png").touch()
    assert talk.file_names("~/a b.png") == ["~/a b.png"]
    assert talk.home("~/a b.png") == str(tmp_path / "a b.png")


def test_every_chat_command_is_in_its_help(run):
    code, out, _ = run("chat", stdin="/help\n")
    assert code == 0 and out == talk.HELP + "\n"


def test_a_parser_error_is_an_option_error():
    with pytest.raises(OptionError, match="see dgemma generate --help"):
        cli.parser().parse_args(["generate"])
