"""Runtimes that take turns: each in a process of its own, A B A B, so that a slow minute of the machine meets all of them.

Where the memory holds them together, all are loaded once and take turns at each job; else a process is loaded, does all
jobs once, and ends before the next one has its turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .errors import Failure

Note = Callable[[str], None]  # told what is being done


@dataclass(frozen=True, kw_only=True)
class Job:
    """One thing to measure: a request to peers.Runtime.measure."""

    what: str  # "answer", "canvas_pass" or "image"
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.what.replace('_', ' ')}, {', '.join(f'{name} {value:,}' for name, value in self.sizes.items())}"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A runtime: the command that starts its process, and what its environment has besides."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Record:
    """What one runtime did: who it is, and for each job the replies of its turns, or why there are none."""

    about: dict[str, Any] = field(default_factory=dict)
    replies: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by the job's place in the list
    failures: dict[int, str] = field(default_factory=dict)


class Worker:
    """The process of one runtime, alive inside `with`; it is loaded on entry. Failure when it cannot be."""

    def __init__(self, contender: Contender, load: Mapping[str, Any]):
        self.name, self._contender, self._load = contender.name, contender, load
        self._errors = tempfile.TemporaryFile()

    def __enter__(self) -> Worker:
        self._process = subprocess.Popen(
            self._contender.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **self._contender.environment},
            start_new_session=True,  # Ctrl-C is this process's to handle
        )
        try:
            self.about = self.ask(do="load", **self._load)
            if "error" in self.about:
                raise Failure(f"{self.name} cannot load the checkpoint: {self.about['error']}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The reply to a request; {"error": ...} when it failed. Failure when the process has ended."""
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Failure(f"{self.name} ended with code {self._process.wait()}{self._last_words()}")
        return json.loads(line)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


def compete(
    contenders: Sequence[Contender], load: Mapping[str, Any], jobs: Sequence[Job], *,
    turns: int, seconds: float, together: bool, note: Note = lambda _: None,
) -> dict[str, Record]:  # fmt: skip
    """Every job `turns` times by every runtime, for about `seconds` each; a record for each name.

    A job that a runtime fails at is noted, not asked of it again, and the others go on. Failure when one cannot load, or ends.
    """
    records = {contender.name: Record() for contender in contenders}
    for group, rounds in ([(contenders, turns)] if together else [([one], 1) for one in contenders] * turns):
        with _loaded(group, load, note) as workers:
            for worker in workers:
                records[worker.name].about = worker.about
            for number, job in enumerate(jobs):
                for _ in range(rounds):
                    for worker in workers:
                        note(f"{number + 1} of {len(jobs)}, {worker.name}: {job}")
                        _measure(worker, number, job, seconds, records[worker.name])
    return records


@contextmanager
def _loaded(contenders: Sequence[Contender], load: Mapping[str, Any], note: Note) -> Iterator[list[Worker]]:
    """A worker for each, all of them loaded."""
    if not contenders:
        yield []
        return
    note(f"loading {contenders[0].name}")
    with Worker(contenders[0], load) as first, _loaded(contenders[1:], load, note) as others:
        yield [first, *others]


def _measure(worker: Worker, number: int, job: Job, seconds: float, record: Record) -> None:
    if number in record.failures:
        return
    reply = worker.ask(do="measure", what=job.what, seconds=seconds, **job.sizes)
    if "error" in reply:
        record.failures[number] = reply["error"]
    else:
        record.replies.setdefault(number, []).append(reply)
