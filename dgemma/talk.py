"""`dgemma generate` and `dgemma chat`: one answer, and a conversation.

What can be checked is checked before the weights are read: a mistyped option must not cost a minute of loading.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dgemma.attention import Packing

from . import backend, fit, render
from .errors import OptionError, PromptError, UserError
from .files import check_output, write_whole
from .hub import find
from .messages import Message, conversation, image_parts
from .pipeline import Event, Pipeline, Unloaded
from .presets import spell_out
from .processor import Prompt
from .session import check_file
from .settings import packing_of
from .terminal import Progress, Speaker, Transcript, Watch, show

Settings = dict[str, Any]


# -- generate ---------------------------------------------------------------------------------------------------------


def generate(args: argparse.Namespace, settings: Settings) -> int:
    """Answer one prompt; returns the exit code."""
    if args.output:
        check_output(args.output)
    text = read_stdin() if args.prompt == "-" else args.prompt
    messages = begin(args.system) + conversation(text, args.image)
    settings = settings | ({"tools": read_tools(args.tools)} if args.tools else {})
    images = [home(path) for path in args.image]
    transcript, speaker = Transcript(args.seed), Speaker(wanted=not (args.json or args.output))
    interrupted = ""
    try:
        with Progress(wanted=not args.quiet) as progress:
            unloaded = prepare(args, progress)
            (prompt,) = unloaded.check_request(messages, images, **settings)
            job = job_of(prompt, settings.get("max_new_tokens", unloaded.options.max_new_tokens), args.chunk, packing_of(dict(settings)))
            pipe = load(unloaded, args, progress, job)
            transcript = Transcript(args.seed, pipe.load_seconds, prompt.image_tokens)
            watch = watcher(pipe, settings) if args.watch else None
            events = pipe.stream(messages, images, **settings)
            show(events, transcript, speaker, progress, watch, thoughts=bool(args.think) and not args.quiet)
    except KeyboardInterrupt as stop:
        interrupted = str(stop) or transcript.where  # a download says where it was
    deliver(args, transcript)
    warn_of_calls(transcript)
    if interrupted:
        print(f"dgemma: interrupted {interrupted}", file=sys.stderr)
    elif args.stats or (sys.stderr.isatty() and not args.quiet and not args.json):
        print(render.stats(transcript.answer()), file=sys.stderr)
    return 130 if interrupted else 0


def read_tools(name: str) -> list[Any]:
    """Tool declarations from a JSON file: a list of them, or one."""
    try:
        found = json.loads(Path(home(name)).read_text(encoding="utf-8"))
    except OSError as error:
        raise PromptError(f"{name}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are both
        raise PromptError(f"{name}: is no JSON ({error})") from None
    return found if isinstance(found, list) else [found]


def warn_of_calls(transcript: Transcript) -> None:
    """Say which tool calls nobody can carry out, and what was written of them."""
    for call in transcript.answer().tool_calls:
        if not call.complete:
            print(f"dgemma: {call.problem}: {render.one_line(call.text)}", file=sys.stderr)


def deliver(args: argparse.Namespace, transcript: Transcript) -> None:
    """The answer as JSON, to a file, or both; plain text has gone to stdout already."""
    answer = transcript.answer()
    if args.json:
        written = render.json_line(render.as_json(answer, args.model or "demo"))
    else:
        written = answer.text if answer.text.endswith("\n") else answer.text + "\n"
        calls = [render.json_line(render.call_object(call)) for call in answer.tool_calls if call.complete]
        written = "".join([written, *calls] if answer.text else calls or [written])
    if args.output and (args.json or answer.text or transcript.finished is not None):
        write_whole(args.output, written)
    elif args.json:
        sys.stdout.write(written)
        sys.stdout.flush()


def prepare(args: argparse.Namespace, progress: Progress) -> Unloaded:
    """The checkpoint before its weights."""
    if args.quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    found = find(args.model, args.revision)  # what is fetched shows its own progress
    progress.now(f"loading {args.model or 'demo'}")
    return Unloaded(found)


def job_of(prompt: Prompt, new_tokens: int, chunk: int | None, packing: Packing | None = None) -> fit.Job:
    """What answering a prompt asks of the memory."""
    largest = max((image.soft_tokens for image in prompt.images), default=1)
    return fit.Job(
        context=len(prompt.ids) + new_tokens, images=len(prompt.images), image_tokens=largest, batch=1, chunk=chunk,
        packing=packing,
    )  # fmt: skip


def load(unloaded: Unloaded, args: argparse.Namespace, progress: Progress, job: fit.Job) -> Pipeline:
    """The pipeline, its weights fetched and read, if the memory can hold it and the job."""
    unloaded.check(args.image_attention)
    if not args.force:
        fit.check(unloaded.opened, job)
    if unloaded.found.absent:
        progress.hide()  # the download has a line of its own
        unloaded.fetch()
    label = f"loading {args.model or 'demo'}"
    progress.now(label)
    return unloaded.load(args.image_attention, progress=progress.share(label))


def watcher(pipe: Pipeline, settings: Settings) -> Watch:
    """What draws this checkpoint's canvases."""
    special = (i for i, token in pipe.processor.tokenizer.added_tokens_decoder.items() if token.special)
    steps = spell_out(settings).get("steps") or pipe.options.max_denoising_steps
    return Watch(render.Inks(pipe.processor.pieces, frozenset(special)), steps)


def begin(system: str | None) -> list[Message]:
    """The messages before the first turn."""
    return [] if system is None else [{"role": "system", "content": system}]


def home(path: str) -> str:
    """`path` with a leading ~ spelled out, for shells that did not (--image=~/cat.png)."""
    return os.path.expanduser(path) if path.startswith("~") else path


def read_stdin() -> str:
    """The prompt from stdin."""
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").rstrip("\n")
    except UnicodeDecodeError as error:
        raise PromptError(f"stdin is not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x})") from None


# -- chat -------------------------------------------------------------------------------------------------------------

HELP = """\
/image FILE ...  attach pictures to the next message (quote names with spaces)
/drop            detach them
/retry           answer the last message again, from another seed
/edit TEXT       ask that in place of the last message, about the same pictures
/history         show the conversation
/save FILE       keep the conversation, and all that is encoded of it, in a file
/load FILE       go on with one that was kept
/reset           begin anew
/exit            leave (so do end of input and Ctrl-D); Ctrl-C stops an answer
A message that begins with a slash is written with two: //"""


class Conversation:
    """A session, and pictures for its next message. A verb that fails leaves everything as it was."""

    def __init__(self, pipe: Pipeline, settings: Settings, system: str | None = None):
        self.pipe, self._settings, self._system = pipe, settings, system
        self.reset()

    def reset(self) -> None:
        """Forget every turn and every picture."""
        self.session = self.pipe.chat(self._system, **self._settings)
        self.pictures: list[dict[str, Any]] = []  # image parts that hold their patches: the file may be gone at the next turn

    def attach(self, names: Sequence[str]) -> None:
        """Pictures for the next message; all of them or, when one is bad, none."""
        parts = [{"type": "image", "image": home(name), "name": name} for name in names]
        asked = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
        (message,) = self.pipe.processor.pictured(asked, budget=self._settings.get("image_budget"))
        self.pictures += image_parts([message])

    def ask(self, text: str) -> Iterator[Event]:
        """Events of the answer to a message."""
        before = self.session.turns
        try:
            yield from self.session.stream(text, self.pictures)
        finally:
            if self.session.turns != before:
                self.pictures = []

    def retry(self) -> Iterator[Event]:
        """Events of another answer to the last message."""
        if not self.session.turns:
            raise PromptError("there is no answer yet to try again; ask something first")
        yield from self.session.stream_regenerate()

    def edit(self, text: str) -> Iterator[Event]:
        """Events of the answer to another message in place of the last."""
        if not self.session.turns:
            raise PromptError("there is no message yet to edit; ask something first")
        yield from self.session.stream_edit(-1, text)

    def save(self, name: str) -> None:
        """Keep the session in a file."""
        self.session.save(home(name))

    def load(self, name: str) -> None:
        """Go on with a session that was kept, with this conversation's settings."""
        self.session, self.pictures = self.pipe.load_chat(home(name), **self._settings), []

    def history(self) -> Iterator[str]:
        """The conversation, a line a turn; and what waits for the next one."""
        for message in self.session.messages:
            content = message["content"]
            if not isinstance(content, str):
                images = [f"[{part.get('name', 'image')}]" for part in image_parts([message])]
                content = " ".join([*images, *(part["text"] for part in content if part["type"] == "text")])
            yield f"{message['role']}: {content}"
        if self.pictures:
            yield f"attached to the next message: {', '.join(part['name'] for part in self.pictures)}"


def chat(args: argparse.Namespace, settings: Settings) -> int:
    """Talk until the input ends; returns the exit code: 2 when a script's line was refused."""
    if args.resume and args.system is not None:
        raise OptionError("--system and --resume: a conversation that was kept has its own system turn; give one of them")
    if args.resume:
        check_file(home(args.resume))
    with Progress(wanted=not args.quiet) as progress:
        unloaded = prepare(args, progress)
        unloaded.check_settings(settings)
        context = unloaded.opened.config.canvas_length  # a turn is as long as it will be
        job = fit.Job(context=context, chunk=args.chunk, packing=packing_of(dict(settings)))
        talk = Conversation(load(unloaded, args, progress, job), settings, args.system)
        if args.resume:
            talk.load(args.resume)
    live = sys.stdin.isatty()
    sys.stdin.reconfigure(errors="surrogateescape")  # what is no UTF-8 is refused with its line, not with all that follow
    if live:
        print(f"{args.model or 'demo'} on {backend.device_name()}. /help lists the commands.", file=sys.stderr)
    refused = False
    for line in lines(live):
        before = talk.session.turns
        try:
            if not obey(line, talk, args, settings):
                break
        except UserError as error:
            print(f"dgemma: {render.one_line(error)}", file=sys.stderr)
            refused = not live
        except KeyboardInterrupt:
            if not live:
                raise
            kept = "the conversation is as it was" if talk.session.turns == before else "what was finished is kept; /retry answers again"
            print(f"dgemma: stopped; {kept}", file=sys.stderr)
        except Exception as error:  # noqa: BLE001: a failure must not take what was said with it
            if not live or isinstance(error, OSError):  # that is the terminal's
                raise
            print(f"dgemma: failed ({render.one_line(f'{type(error).__name__}: {error}')}); the conversation is as it was", file=sys.stderr)
    return 2 if refused else 0


def obey(line: str, talk: Conversation, args: argparse.Namespace, settings: Settings) -> bool:
    """Do what one line says; False: leave."""
    verb, _, rest = line.strip().partition(" ")
    if not verb:
        return True
    if verb == "/exit":
        return False
    if verb == "/help":
        print(HELP)
    elif verb == "/reset":
        talk.reset()
    elif verb == "/history":
        print(render.printable("\n".join(talk.history()) or "nothing has been said"))
    elif verb == "/drop":
        talk.pictures = []
    elif verb == "/image":
        talk.attach(file_names(rest.strip()))
    elif verb == "/retry":
        answer(talk.retry(), talk, args, settings)
    elif verb == "/edit":
        answer(talk.edit(rest.strip()), talk, args, settings)
    elif verb in ("/save", "/load"):
        if not rest.strip():
            raise PromptError(f"{verb} needs a file; {verb} talk.safetensors")
        talk.save(rest.strip()) if verb == "/save" else talk.load(rest.strip())
    elif verb.startswith("/") and not verb.startswith("//"):
        raise PromptError(f"unknown command {verb}; /help lists them, and a message may begin with //")
    else:
        answer(talk.ask(line[1:] if verb.startswith("//") else line), talk, args, settings)
    sys.stdout.flush()
    return True


def answer(events: Iterator[Event], talk: Conversation, args: argparse.Namespace, settings: Settings) -> None:
    """Play one answer."""
    transcript = Transcript(args.seed)
    watch = watcher(talk.pipe, settings) if args.watch else None
    with Progress(wanted=not args.quiet) as progress, closing(events):
        show(events, transcript, Speaker(), progress, watch, thoughts=bool(args.think) and not args.quiet)
    warn_of_calls(transcript)
    if not transcript.text.strip() and not transcript.calls:
        print("dgemma: the answer is empty; /retry draws another", file=sys.stderr)
    if args.stats:
        print(render.stats(transcript.answer()), file=sys.stderr)


def file_names(text: str) -> list[str]:
    """The files that follow /image: one name as it stands, or several as a shell would split them."""
    if not text:
        raise PromptError("/image needs a file; /image cat.png")
    if os.path.exists(home(text)):
        return [text]
    try:
        return shlex.split(text)
    except ValueError:  # a quote that is not closed belongs to the name
        return [text]


def lines(live: bool) -> Iterator[str]:
    """Lines of input; a terminal gets a prompt and line editing."""
    if not live:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    try:
        import readline  # noqa: F401: input() edits lines once it is imported
    except ImportError:
        pass
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # too late for an answer, or a line thought better of: not a reason to lose what was said
            print()

