"""What does a conversation cost when it is remembered? Ten turns with two pictures, warm beside cold.

    python benchmarks/sessions.py                 the tables of docs/sessions.md; exit code 1 if warm and cold ever differ
    python benchmarks/sessions.py --checkpoint DIR --turns 1 --snapshot-bytes 1000000000

Every question is put to a session that remembers, to one that forgets all that is encoded before each turn, and with the whole
history to the pipeline. Milliseconds are those from a question to the first step: pictures and prompt encoded. Then turn 5 is
answered again by both, the warm one is saved, and a new process loads it and goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from dgemma import Answer, Pipeline
from dgemma.session import Session

PICTURES = Path(__file__).resolve().parent.parent / "examples" / "demo" / "pictures"
ASKED = (
    ("What is in this image?", "three_shapes.png"),
    ("What color is the star?", None),
    ("Tell a short story about this picture.", None),
    ("How many shapes are there?", None),
    ("Caption this picture.", None),
    ("What is in this image?", "five_shapes.png"),
    ("How many shapes are there?", None),
    ("Count from 3 to 24.", None),
    ("Caption this picture.", None),
    ("What color is the circle?", None),
)
AGAIN, ON = 4, "Count from 1 to 12."  # which turn is answered again, counted from 0; what is asked after loading


def ask(chat: Session, number: int) -> tuple[Answer, float]:
    """The answer to a question, and the seconds until the first step could begin."""
    text, picture = ASKED[number]
    answer = chat.send(text, [str(PICTURES / picture)] if picture else None)
    return answer, answer.seconds.images + answer.seconds.prefill


def talks(pipe: Pipeline, turns: int, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], Session, Session]:
    """A line for each question, `turns` times over with the shortest times kept, and the sessions at its end."""
    lines: list[dict[str, Any]] = []
    for _ in range(turns):
        warm, cold = pipe.chat(**settings), pipe.chat(**settings)
        for number in range(len(ASKED)):
            cold.forget()
            (answer, seconds), (other, longer) = ask(warm, number), ask(cold, number)
            alone = pipe(warm.messages[:-1])  # no session: the whole history as one prompt, in passes of its own
            line = {
                "whole": [alone.seconds.images + alone.seconds.prefill], "alike": alone.tokens == answer.tokens,
                "text": answer.text, "prompt": answer.prompt_tokens, "encoded": answer.prompt_tokens - answer.cached_tokens,
                "same": (answer.tokens, answer.steps) == (other.tokens, other.steps), "warm": [seconds], "cold": [longer],
                "snapshots": warm.snapshot_bytes, "held": warm.nbytes,
            }  # fmt: skip
            if len(lines) > number:
                line |= {name: lines[number][name] + line[name] for name in ("warm", "cold", "whole")}
                lines[number] = line
            else:
                lines.append(line)
    return lines, warm, cold


def later(warm: Session, cold: Session, checkpoint: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Turn AGAIN answered again, saved, and gone on with by another process."""
    cold.forget()
    again, other = warm.regenerate(AGAIN), cold.regenerate(AGAIN)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chat.safetensors"
        began = time.perf_counter()
        warm.save(path)
        saved, size = time.perf_counter() - began, path.stat().st_size
        command = [sys.executable, __file__, "--go-on", str(path), "--settings", json.dumps(settings)]
        ran = subprocess.run(command + (["--checkpoint", checkpoint] if checkpoint else []), capture_output=True, text=True, check=True)
    on, here = json.loads(ran.stdout), warm.send(ON)
    return {
        "again": {"prompt": again.prompt_tokens, "encoded": again.prompt_tokens - again.cached_tokens, "same": again.tokens == other.tokens},
        "saved": {"seconds": saved, "bytes": size},
        "loaded": on | {"same": on["tokens"] == list(here.tokens) and on["encoded"] == here.prompt_tokens - here.cached_tokens},
    }  # fmt: skip


def go_on(path: str, checkpoint: str | None, settings: dict[str, Any]) -> None:
    """What the new process does."""
    pipe = Pipeline.from_pretrained(checkpoint)
    began = time.perf_counter()
    chat = pipe.load_chat(path, **settings)
    seconds = time.perf_counter() - began
    answer = chat.send(ON)
    encoded = answer.prompt_tokens - answer.cached_tokens
    print(json.dumps({"tokens": answer.tokens, "prompt": answer.prompt_tokens, "encoded": encoded, "seconds": seconds}))


def table(lines: list[dict[str, Any]]) -> str:
    """The lines as Markdown."""
    rows = [
        "| turn | question | prompt, tokens | encoded | warm, ms | cold, ms | pipeline, ms | identical | copies, bytes |",
        "|---|---|--:|--:|--:|--:|--:|---|--:|",
    ]
    for number, (line, (text, picture)) in enumerate(zip(lines, ASKED), 1):
        question = f"{picture}: {text}" if picture else text
        times = " | ".join(f"{1e3 * median(line[name]):.1f}" for name in ("warm", "cold", "whole"))
        same = "all three" if line["same"] and line["alike"] else "warm, cold" if line["same"] else "NO"
        rows.append(f"| {number} | {question} | {line['prompt']} | {line['encoded']} | {times} | {same} | {line['snapshots']:,} |")
    return "\n".join(rows)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a folder; default the demo")
    parser.add_argument("--turns", type=int, default=5, help="how often the whole conversation is led; medians are told")
    parser.add_argument("--snapshot-bytes", type=int, default=1 << 31)
    parser.add_argument("--kv-bits", type=int)
    parser.add_argument("--json", help="write all numbers to a file")
    parser.add_argument("--go-on", help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.go_on:
        go_on(args.go_on, args.checkpoint, args.settings)
        return 0
    settings = {"snapshot_bytes": args.snapshot_bytes} | ({"kv_bits": args.kv_bits} if args.kv_bits else {})
    pipe = Pipeline.from_pretrained(args.checkpoint)
    lines, warm, cold = talks(pipe, args.turns, settings)
    found = {"window": pipe.model.config.text.sliding_window, "lines": lines, "later": later(warm, cold, args.checkpoint, settings)}
    print(table(lines), json.dumps(found["later"], indent=1), sep="\n\n")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    same = [*(line["same"] for line in lines), found["later"]["again"]["same"], found["later"]["loaded"]["same"]]
    return 0 if all(same) and max(line["snapshots"] for line in lines) <= args.snapshot_bytes else 1


if __name__ == "__main__":
    sys.exit(main())
