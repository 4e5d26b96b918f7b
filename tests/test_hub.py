"""Repositories on the hub: what is fetched when, what a broken download leaves, and what each refusal says.

A small hub of our own on 127.0.0.1 serves a tiny checkpoint in two shards, as the real one does: small files directly,
large ones by a redirect to another host. Each run is a process, since huggingface_hub reads its environment at import.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pty
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from safetensors.numpy import load_file, save_file

from dgemma import cli
from dgemma import hub as hub_module
from dgemma.errors import CheckpointError, OptionError
from dgemma.pipeline import Pipeline, Unloaded
from dgemma.stored import check_file, shards, tensors

ID, COMMIT, GATED = "someone/tiny", "c0ffee" + "0" * 34, "someone/gated"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SMALL = {"config.json", "generation_config.json", "model.safetensors.index.json", "processor_config.json",
         "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}  # fmt: skip


# -- a small hub ------------------------------------------------------------------------------------------------------


@dataclass
class Hub:
    """What the hub serves, how it misbehaves, and what it was asked for."""

    files: dict[str, bytes]
    port: int = 0
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range
    allowance: int | None = None  # bytes of large files that it still gives before it breaks every connection
    most: int | None = None  # bytes of large files that it gives in one answer before it breaks the connection
    stalls: bool = False  # when the allowance is used up it says nothing more, instead of breaking the connection
    ranges: bool = True  # False: it answers requests for a part with the whole
    status: int | None = None  # of every answer
    busy: int = 0  # how many requests for large files it still answers with 503
    tokens_at_cdn: list[str | None] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def of(self, kind: str) -> list[tuple[str, str | None]]:
        """GET requests for the bytes of large (kind "cdn") or small ("resolve") files: name and range."""
        return [(path.rpartition("/")[2], part) for method, path, part in self.asked if method == "GET" and f"/{kind}/" in path]

    def take(self, wanted: int) -> int:
        """How many of `wanted` bytes of a large file are given in this answer."""
        with self.lock:
            given = wanted if self.most is None else min(wanted, self.most)
            if self.allowance is not None:
                given = min(given, self.allowance)
                self.allowance -= given
            return given


class Handler(BaseHTTPRequestHandler):
    """The endpoints that huggingface_hub asks."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def log_message(self, *_):
        pass

    def answer(self):
        hub, path = self.server.hub, urlsplit(self.path).path
        hub.asked.append((self.command, path, self.headers.get("Range")))
        if hub.status:
            return self.send(hub.status, b"{}")
        if path.startswith("/api/models/"):
            return self.tell(path.removeprefix("/api/models/"))
        if path.startswith("/cdn/"):
            hub.tokens_at_cdn.append(self.headers.get("Authorization"))
            return self.give(path.rpartition("/")[2])
        if path.count("/") < 5:
            return self.send(404, b"{}")
        owner, name, _, revision, file = path[1:].split("/", 4)
        if f"{owner}/{name}" == GATED:
            return self.send(403, b"", {"X-Error-Code": "GatedRepo"})
        if file not in hub.files:
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = hub.files[file]
        if not file.endswith(".safetensors"):
            return self.send(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})
        linked = {"X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Linked-Size": str(len(data))}
        place = f"http://localhost:{hub.port}/cdn/{file}"  # another host than 127.0.0.1
        self.send(302, b"", linked | {"X-Repo-Commit": COMMIT, "Location": place})

    def tell(self, what: str):
        hub = self.server.hub
        owner, name, kind, revision = what.split("/")[:4]
        if f"{owner}/{name}" not in (ID, GATED):
            return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", COMMIT):
            return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        entries = []
        for path, data in hub.files.items():
            entry = {"type": "file", "path": path, "rfilename": path, "size": len(data), "oid": "0" * 40, "blobId": "0" * 40}
            if path.endswith(".safetensors"):
                sha = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"oid": sha, "sha256": sha, "size": len(data), "pointerSize": 134}
            entries.append(entry)
        found = entries if kind == "tree" else {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": entries}
        self.send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def give(self, name: str):
        """The bytes of a large file, or of the part that was asked for; broken off where the hub's bounds say so."""
        hub = self.server.hub
        if hub.busy:
            hub.busy -= 1
            return self.send(503, b"")
        data = next(data for path, data in hub.files.items() if path.rpartition("/")[2] == name)
        size, part = len(data), re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        status, extra = 200, {}
        if part and hub.ranges:
            begin, end = int(part[1]), min(int(part[2] or size - 1), size - 1)
            data, status = data[begin : end + 1], 206
            extra = {"Content-Range": f"bytes {begin}-{end}/{size}"}
        given = hub.take(len(data))
        if given == len(data):
            return self.send(status, data, extra)
        self.close_connection = True
        if given or hub.stalls:
            self.head(status, len(data), extra)
            self.wfile.write(data[:given])
            self.wfile.flush()
        if hub.stalls:
            time.sleep(60)

    def send(self, status: int, data: bytes, extra: dict | None = None):
        self.head(status, len(data), extra or {})
        if self.command == "GET":
            self.wfile.write(data)

    def head(self, status: int, length: int, extra: dict):
        self.send_response(status)
        for name, value in ({"Content-Length": str(length)} | extra).items():
            self.send_header(name, value)
        self.end_headers()


class Server(ThreadingHTTPServer):
    """Says nothing of clients that go away."""

    daemon_threads = True

    def handle_error(self, *_):
        pass


@pytest.fixture(scope="module")
def sharded(checkpoint, tmp_path_factory) -> Path:
    """The tiny checkpoint in two shards."""
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("hub") / "tiny"))
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, index = sorted(whole), {}
    for file, part in zip(SHARDS, (names[::2], names[1::2])):
        save_file({name: whole[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.fixture
def hub(sharded):
    """A hub that serves it, and beside it what many repositories hold and no runtime needs."""
    files = {path.name: path.read_bytes() for path in sharded.iterdir()}
    files |= {"README.md": b"# tiny", "pytorch_model.bin": b"pickle", "original/consolidated.safetensors": b"x" * 999}
    server = Server(("127.0.0.1", 0), Handler)
    server.hub = Hub(files, server.server_port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield server.hub
    server.shutdown()
    server.server_close()


PREPARED = "import sys; from dgemma import download; download.WAIT, download.TIMEOUT = 0.01, 2.0\n"
MAIN = PREPARED + "from dgemma.cli import main; sys.exit(main())"
FETCH = PREPARED + (
    "from dgemma import cli, hub; cli.quieten()\n"
    "try: print(hub.resolve(*sys.argv[1:]))\n"
    "except Exception as error: sys.exit(cli.report(error))\n"
    "except KeyboardInterrupt as stop: sys.exit(cli.complain(stop, 130))"
)


@pytest.fixture
def start(hub, tmp_path):
    """Starts a process that has a cache of its own and knows our hub only."""

    def call(code: str, *argv: str, preexec=None, stderr=subprocess.PIPE, **environment: str) -> subprocess.Popen:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_", "HUGGING"))}
        own = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
        return subprocess.Popen(
            [sys.executable, "-c", code, *argv],
            env=kept | own | environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=preexec,
        )

    return call


@pytest.fixture
def run(start):
    """Runs one to its end: exit code, stdout, stderr."""

    def call(code: str, *argv: str, **more) -> tuple[int, str, str]:
        process = start(code, *argv, **more)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    return call


@pytest.fixture
def cache(tmp_path) -> Path:
    """Where the repository is in the cache."""
    return tmp_path / "hf" / "hub" / "models--someone--tiny"


def refused(done: tuple[int, str, str]) -> str:
    """The one line of a run that failed."""
    code, out, err = done
    assert (code, out) == (2, "") and err.startswith("dgemma: ") and err.count("\n") == 1, done
    return err.removeprefix("dgemma: ").rstrip("\n")


def whole_files(cache: Path) -> set[str]:
    """The files of weights that the snapshot shows."""
    return {path.name for path in (cache / "snapshots" / COMMIT).glob("**/*.safetensors")}


# -- what is fetched when -----------------------------------------------------------------------------------------------


def test_info_reads_headers_and_fetches_no_weights(run, hub, sharded, cache):
    code, out, err = run(MAIN, "info", ID, "--json")
    assert (code, err) == (0, "")
    here = json.loads(run(MAIN, "info", str(sharded), "--json")[1])
    found = json.loads(out)
    assert found["bytes"].pop("to_download") == sum((sharded / name).stat().st_size for name in SHARDS)
    assert here["bytes"].pop("to_download") == 0
    assert {**found, "model": "", "folder": ""} == {**here, "model": "", "folder": ""}
    assert {name for name, _ in hub.of("resolve")} == SMALL | set(SHARDS)  # of these, where they are
    assert sorted(hub.of("cdn")) == [(name, "bytes=0-100000") for name in SHARDS]
    assert whole_files(cache) == set()
    assert re.search(r"on disk +([\d.]+ kB) in 2 file\(s\), F32; \1 still to be downloaded\n", run(MAIN, "info", ID)[1])


MANY = PREPARED + (
    "import json, time; from dgemma import cli\n"
    "for argv in json.loads(sys.argv[1]): sys.stderr.write(f'{cli.main(argv)} '); sys.stderr.flush()\n"
)


def test_mistakes_are_said_before_any_weights_are_fetched(run, hub, pictures):
    ask = ["generate", "--model", ID]
    mistakes = [
        ([*ask, "--t-min", "5", "Hi"], "--t-min is 5.0 and --t-max 0.8"),
        ([*ask, "--chunk", "0", "Hi"], "chunk is 0; at least 1 is needed"),
        (["chat", "--model", ID, "--seed", "-1"], "seed is -1; 0 to 2**64 - 1 is allowed"),
        ([*ask, " "], "the prompt is empty; ask something"),
        ([*ask, "a" * 5000], "the prompt has 5016 tokens and the answer may take 16; the context is 4096"),
        ([*ask, "--image", "nowhere.png", "Hi"], "nowhere.png: no such image file"),
        ([*ask, "--image", str(pictures / "shapes.png"), "a <|image|> b"], "message 1 spells <|image|>"),
    ]
    _, out, err = run(MANY, json.dumps([argv for argv, _ in mistakes]))
    lines = err.splitlines()
    codes = [line.partition(" ")[0] for line in lines[1:]]
    assert (out, codes) == ("", ["2"] * len(mistakes)), err
    for line, (_, says) in zip(lines, mistakes):
        assert f"dgemma: {says}" in line
    assert {part for _, part in hub.of("cdn")} <= {"bytes=0-100000"}  # headers
    assert not [name for name, part in hub.of("resolve") if name in SHARDS and part is None]


def test_options_are_checked_before_even_the_headers(run, hub):
    code = PREPARED + (
        "from dgemma.hub import find; from dgemma.pipeline import Unloaded; from dgemma import OptionError\n"
        "one = Unloaded(find(sys.argv[1]))\n"
        "try: one.check_request('Hi', None, steps=0)\n"
        "except OptionError as error: print(error)"
    )
    assert run(code, ID)[1] == "max_denoising_steps is 0; at least 1 is needed\n"
    assert hub.of("cdn") == [] and {name for name, _ in hub.of("resolve")} == SMALL


def test_an_answer_then_the_same_without_the_network(run, hub, sharded, cache):
    ask = ["generate", "--model", ID, "--max-tokens", "8", "--steps", "2", "--json", "Hi"]
    code, out, err = run(MAIN, *ask, HF_TOKEN="hf_secret")
    assert (code, err) == (0, "")
    assert hub.tokens_at_cdn and set(hub.tokens_at_cdn) == {None}  # the token is for the hub alone
    assert sorted(name for name, part in hub.of("cdn") if part is None) == list(SHARDS)
    assert whole_files(cache) == set(SHARDS) and not list(cache.glob("blobs/*.incomplete"))
    hub.asked.clear()
    pinned = [*ask[:3], "--revision", COMMIT, *ask[3:]]
    again = run(MAIN, *pinned, HF_HUB_OFFLINE="1")
    assert hub.asked == [] and json.loads(again[1])["tokens"] == json.loads(out)["tokens"]
    local = Pipeline.from_pretrained(sharded)("Hi", max_new_tokens=8, steps=2)
    assert json.loads(out)["tokens"] == list(local.tokens)


def test_a_second_run_fetches_nothing(run, hub, sharded):
    first = run(FETCH, ID)
    assert first[0] == 0 and Path(first[1].strip()).name == COMMIT
    assert {name for name, _ in hub.of("resolve")} == SMALL | set(SHARDS)  # no README, no pickle, nothing of original/
    for name in SMALL | set(SHARDS):
        assert (Path(first[1].strip()) / name).read_bytes() == (sharded / name).read_bytes()
    hub.asked.clear()
    assert run(FETCH, ID) == first
    assert hub.of("resolve") == hub.of("cdn") == []
    for revision in ((), (COMMIT,), ("main",)):
        hub.asked.clear()
        assert run(FETCH, ID, *revision, HF_HUB_OFFLINE="1") == first and hub.asked == []


def test_the_eyes_that_optiq_keeps_apart_are_fetched(run, hub):
    hub.files["optiq/optiq_vision.safetensors"] = hub.files[SHARDS[0]]
    hub.files["optiq/notes.json"] = b"{}"
    code, out, _ = run(PREPARED + "from dgemma import hub; print(sorted(hub.find(sys.argv[1]).absent))", ID)
    assert out == f"{[*SHARDS, 'optiq/optiq_vision.safetensors']}\n"
    assert not any(name.endswith((".bin", "notes.json")) for name, _ in hub.of("resolve"))


# -- downloads that break off -----------------------------------------------------------------------------------------


def test_a_connection_that_breaks_is_taken_up_where_it_broke(run, hub, sharded):
    hub.most = 70_000
    code, out, err = run(FETCH, ID)
    assert (code, err) == (0, "")
    for name in SHARDS:
        size = (sharded / name).stat().st_size
        parts = [part for asked, part in hub.of("cdn") if asked == name]
        assert parts == [None] + [f"bytes={n}-" for n in range(70_000, size, 70_000)]
        assert (Path(out.strip()) / name).read_bytes() == (sharded / name).read_bytes()


def test_a_hub_that_is_busy_is_asked_again(run, hub, cache):
    hub.busy = 3
    assert run(FETCH, ID)[0] == 0 and whole_files(cache) == set(SHARDS) and hub.busy == 0


def test_a_terminal_sees_how_far_it_is(start, hub):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with open(slave, "w") as screen:
        process = start(FETCH, ID, stderr=screen)
        assert process.wait(timeout=120) == 0
    got = os.read(master, 65536).decode()
    os.close(master)
    assert re.search(rf"downloading {ID}: 100%.*53\dk/53\dk", got), got


def test_a_download_that_breaks_off_is_one_line_and_the_next_run_goes_on(run, hub, sharded, cache):
    hub.allowance = 300_000
    says = refused(run(FETCH, ID))
    assert says.startswith(f"{ID}: the download stopped at 0.3 of 0.5 MB (")
    assert says.endswith("); what has come is kept, and the same command goes on from there")
    assert len(whole_files(cache)) < 2
    kept = {path.name: path.stat().st_size for path in cache.glob("blobs/*.incomplete")}
    assert kept and sum(path.stat().st_size for path in cache.glob("blobs/*") if len(path.name) >= 64) == 300_000

    offline = refused(run(FETCH, ID, HF_HUB_OFFLINE="1"))
    assert offline.startswith(f"{ID}: shard model-0000") and " is missing; the index lists 2 files in the cache (" in offline
    assert offline.endswith(f"unset HF_HUB_OFFLINE, or run hf download {ID} where there is network and give the folder that it names")

    hub.allowance = None
    hub.asked.clear()
    code, out, err = run(FETCH, ID)
    assert (code, err) == (0, "")
    sums = {hashlib.sha256((sharded / name).read_bytes()).hexdigest(): name for name in SHARDS}
    begun = {sums[name.removesuffix(".incomplete")]: size for name, size in kept.items() if size}
    assert {name: part for name, part in hub.of("cdn") if part} == {name: f"bytes={size}-" for name, size in begun.items()}
    for name in SHARDS:
        assert (Path(out.strip()) / name).read_bytes() == (sharded / name).read_bytes()
    assert not list(cache.glob("blobs/*.incomplete"))


def test_ctrl_c_is_one_line_and_the_next_run_goes_on(start, run, hub, sharded, cache):
    hub.allowance, hub.stalls = 400_000, True
    process = start(PREPARED + "download.TRIES = 99\n" + FETCH, ID)  # only Ctrl-C ends it
    until = time.monotonic() + 60
    while hub.allowance and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == f"dgemma: while downloading {ID}; what has come is kept, and the same command goes on from there\n"
    kept = sum(path.stat().st_size for path in cache.glob("blobs/*.incomplete"))
    assert kept > 0
    hub.allowance, hub.stalls = None, False
    hub.asked.clear()
    assert run(FETCH, ID)[0] == 0
    assert [part for _, part in hub.of("cdn") if part and not part.startswith("bytes=0-")]
    assert whole_files(cache) == set(SHARDS)


def test_a_disk_that_fills_is_one_line_and_the_next_run_goes_on(run, hub, sharded, cache):
    """A limit on the size of files stands for a real full disk: no root is needed."""
    limit = 100_000
    says = refused(run(FETCH, ID, preexec=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))))
    assert re.fullmatch(
        f"{ID}: the download stopped at 0.[12] of 0.5 MB \\(File too large\\); make room, or set HF_HOME to a folder on a "
        "larger disk; what has come is kept, and the same command goes on from there",
        says,
    )
    assert whole_files(cache) == set()
    hub.asked.clear()
    assert run(FETCH, ID)[0] == 0 and [part for _, part in hub.of("cdn") if part]
    assert whole_files(cache) == set(SHARDS)


def test_a_disk_that_is_too_small_is_refused_before_it_is_full(run, hub, cache):
    small = PREPARED + "import shutil; shutil.disk_usage = lambda _: shutil._ntuple_diskusage(9, 9, 1000)\n" + FETCH
    says = refused(run(small, ID))
    assert says.startswith(f"{ID}: it cannot be fetched (0.0 GB are to come, 0.0 GB are free); make room, or set HF_HOME to")
    assert hub.of("cdn") == []


def test_a_hub_that_gives_no_parts_gives_the_whole(run, hub, sharded, cache):
    hub.ranges = False
    blob = cache / "blobs" / hashlib.sha256((sharded / SHARDS[0]).read_bytes()).hexdigest()
    blob.parent.mkdir(parents=True)
    blob.with_name(blob.name + ".incomplete").write_bytes(b"other bytes")
    code, out, _ = run(FETCH, ID)
    assert code == 0 and (SHARDS[0], "bytes=11-") in hub.of("cdn")
    assert (Path(out.strip()) / SHARDS[0]).read_bytes() == (sharded / SHARDS[0]).read_bytes()


def test_a_part_that_is_damaged_is_thrown_away(run, hub, sharded, cache):
    blob = cache / "blobs" / hashlib.sha256((sharded / SHARDS[0]).read_bytes()).hexdigest()
    blob.parent.mkdir(parents=True)
    part = blob.with_name(blob.name + ".incomplete")
    part.write_bytes(b"other bytes")
    says = refused(run(FETCH, ID))
    assert f"{SHARDS[0]} came damaged and was thrown away)" in says
    assert not part.exists() and SHARDS[0] not in whole_files(cache)
    assert run(FETCH, ID)[0] == 0 and whole_files(cache) == set(SHARDS)


def test_two_programs_do_not_write_one_file(run, hub, sharded, cache):
    lock = cache.parent / ".locks" / cache.name / f"{hashlib.sha256((sharded / SHARDS[0]).read_bytes()).hexdigest()}.lock"
    lock.parent.mkdir(parents=True)
    from filelock import FileLock

    with FileLock(lock):
        says = refused(run(PREPARED + "download.PATIENCE = 0.2\n" + FETCH, ID))
    assert "(another program is downloading it)" in says and SHARDS[0] not in whole_files(cache)


def test_generate_says_what_ctrl_c_interrupted(checkpoint, monkeypatch, capsys):
    def stop(_):
        raise KeyboardInterrupt("while downloading a/b; what has come is kept")

    monkeypatch.setattr(Unloaded, "fetch", stop)
    assert cli.main(["generate", "--model", str(checkpoint), "Hi"]) == 130
    assert capsys.readouterr().err == "dgemma: interrupted while downloading a/b; what has come is kept\n"


# -- what the hub refuses ---------------------------------------------------------------------------------------------


def test_repositories_that_are_not_to_be_had(run, hub):
    assert refused(run(FETCH, GATED)) == (
        f"{GATED}: gated; accept its licence at https://huggingface.co/{GATED}, then run: hf auth login"
    )
    assert refused(run(FETCH, "someone/else")) == (
        "someone/else: no such folder here and no such repository on the Hugging Face hub; "
        "if it is a private one, run: hf auth login"
    )
    assert refused(run(FETCH, ID, "v9")) == f"{ID}: the hub has no revision 'v9' of it"


@pytest.mark.parametrize("status", [401, 403])
def test_a_hub_that_wants_a_login(run, hub, status):
    hub.status = status
    says = refused(run(FETCH, ID))
    assert says.startswith(f"{ID}: ") and re.search("run:? hf auth login", says)


def test_without_the_network_and_nothing_in_the_cache(run, hub):
    assert refused(run(FETCH, ID, HF_HUB_OFFLINE="1")) == (
        f"{ID}: no such folder here, and it cannot be fetched from the Hugging Face hub (HF_HUB_OFFLINE is "
        f"set); unset HF_HUB_OFFLINE, or run hf download {ID} where there is network and give the folder that it names"
    )
    says = refused(run(FETCH, ID, HF_ENDPOINT="http://127.0.0.1:9"))
    assert says.startswith(f"{ID}: no such folder here, and it cannot be fetched from the Hugging Face hub (")
    assert says.endswith(f"; connect, or run hf download {ID} where there is network and give the folder that it names")


def test_a_hub_that_is_ill_leaves_the_cache_to_use(run, hub):
    first = run(FETCH, ID)
    hub.status = 500
    assert run(FETCH, ID) == first


# -- headers in place of files ----------------------------------------------------------------------------------------


def test_headers_stand_for_files_that_are_still_to_come(sharded, tmp_path):
    folder = Path(shutil.copytree(sharded, tmp_path / "part"))
    headers = {SHARDS[1]: check_file(folder / SHARDS[1])}
    whole = tensors(folder)
    (folder / SHARDS[1]).unlink()
    assert tensors(folder, headers) == whole
    with pytest.raises(CheckpointError, match=f"shard {SHARDS[1]} is missing; the index lists 2 files"):
        tensors(folder)
    first = next(name for name in headers[SHARDS[1]] if name != "__metadata__")
    headers[SHARDS[1]][first]["data_offsets"] = [0, 1]
    with pytest.raises(CheckpointError, match="damaged header"):
        tensors(folder, headers)


def test_files_to_come_are_chosen_as_files_are(tmp_path):
    names = ["model.safetensors", "original/a.safetensors", "optiq/optiq_vision.safetensors", "optiq/other.safetensors", "a.bin"]
    assert [path.relative_to(tmp_path).as_posix() for path in shards(tmp_path, names)] == [names[0], names[2]]
    with pytest.raises(CheckpointError, match="no \\*.safetensors file; a.bin is a pickle"):
        shards(tmp_path, ["a.bin"])


@pytest.mark.parametrize("metadata", ["pt", {"dgemma": []}])
def test_headers_of_the_hub_are_not_believed(sharded, metadata):
    header = check_file(sharded / SHARDS[1]) | {"__metadata__": metadata}
    with pytest.raises(CheckpointError, match="damaged header"):
        tensors(sharded, {SHARDS[1]: header})


@pytest.mark.parametrize("name", [None, "demo", "folder"])
def test_only_the_hub_has_revisions(checkpoint, name):
    with pytest.raises(OptionError, match="revision is 'v9', and .* is here; only hub repositories have them"):
        hub_module.find(checkpoint if name == "folder" else name, "v9")


@pytest.mark.parametrize("name", ["a--b/c..d", "\u00e9/\u00fc", "a/" + "b" * 200])
def test_names_that_no_repository_has(name):
    with pytest.raises(CheckpointError, match=f"{name}: no such folder here, and no name that the hub could have \\("):
        hub_module.find(name)


def test_folders_are_whole(checkpoint):
    found = hub_module.find(checkpoint)
    assert found == hub_module.Found(folder=checkpoint) and found.headers() == {} and found.fetch() == checkpoint
