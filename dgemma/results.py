"""What a bench found, as numbers and as a table: medians, the best, and ratios to each peer.

A cell is one quantity at one size. Its ratio to a peer is ours over theirs, taken turn by turn, since turns that stood
beside each other met the same machine; the ratio told is the median of those, and in brackets that of the best. On a busy
machine only the latter means much: threads that wait for each other suffer more from neighbours than a single one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from .render import size
from .turns import Job, Record

UNITS = {  # in the order of the table
    "prefill": "ms", "canvas pass": "ms", "step": "ms", "block": "ms", "tokens per second": "tokens/s", "peak memory": "bytes",
    "image": "ms", "image, peak memory": "bytes",
}  # fmt: skip
BUSY = 0.5  # of the cores, busy before anything began
MEASURED = {"answer": ("prefill", "step", "block"), "canvas_pass": ("pass",), "image": ("image",)}


def cells(jobs: Sequence[Job], records: Mapping[str, Record], canvas: int, ours: str) -> list[dict[str, Any]]:
    """Every quantity at every size, ready for JSON."""
    found = []
    for number, job in enumerate(jobs):
        turns = {name: record.replies[number] for name, record in records.items() if number in record.replies}
        for name in MEASURED[job.what]:
            found.append(_cell({"pass": "canvas pass"}.get(name, name), job, _times(turns, name), ours))
        if job.what == "answer":
            written = 1e3 * canvas * job.sizes["batch"]
            rates = {name: [[written / ms for ms in turn] for turn in of] for name, of in _times(turns, "block").items()}
            found.append(_cell("tokens per second", job, rates, ours))
        if job.what != "canvas_pass":
            peaks = {name: [[reply["peak"]] for reply in replies] for name, replies in turns.items()}
            found.append(_cell("peak memory" if job.what == "answer" else "image, peak memory", job, peaks, ours))
    order = list(UNITS)
    return sorted((cell for cell in found if cell["runtimes"]), key=lambda cell: order.index(cell["what"]))


def _times(turns: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> dict[str, list[list[float]]]:
    """The milliseconds of one quantity, turn by turn, of each runtime that has them."""
    return {who: [reply["ms"][name] for reply in replies] for who, replies in turns.items() if replies[0]["ms"].get(name)}


def _cell(what: str, job: Job, turns: Mapping[str, list[list[float]]], ours: str) -> dict[str, Any]:
    best = max if UNITS[what] == "tokens/s" else min
    runtimes: dict[str, dict[str, Any]] = {}
    for name, samples in turns.items():
        everything = [value for turn in samples for value in turn]
        runtimes[name] = {"median": median(everything), "best": best(everything), "turns": samples}
        if name != ours and ours in turns:
            pairs = zip(turns[ours], samples)
            runtimes[name]["ratio"] = median(median(mine) / median(theirs) for mine, theirs in pairs)
            runtimes[name]["best_ratio"] = runtimes[ours]["best"] / runtimes[name]["best"]
    sizes = dict(job.sizes)
    if job.what == "image":
        sizes["image_tokens"] = sizes["columns"] * sizes["rows"] // 9
    return {"what": what, "unit": UNITS[what], **sizes, "runtimes": runtimes}


# -- the table --------------------------------------------------------------------------------------------------------


def text(found: Mapping[str, Any], ours: str) -> str:
    """What `bench.measure` found, for a person; the table is Markdown."""
    model, settings = found["model"], found["settings"]
    packed = f"{model['bits']} bit, " if model["bits"] else ""
    lines = [
        f"{model['name']} ({model['parameters'] / 1e6:,.1f} M parameters, canvas {model['canvas_length']}), {packed}"
        f"{model['dtype']}; {found['machine']['cpu']}, {found['machine']['cores']} cores",
        *(_runtime(name, about) for name, about in found["runtimes"].items()),
        f"median (best) of {settings['turns']} turns of {settings['seconds']:g} s, "
        f"{'all loaded' if settings['together'] else 'one loaded at a time'}; a block has {settings['steps']} steps; "
        f"ratio: {ours} / peer",
        *_busy(found["machine"]),
        "",
        *_table(found, ours),
        *(f"left out: {line}" for line in found["left_out"]),
        *(
            f"failed: {name}, {job}: {why}"
            for name, about in found["runtimes"].items()
            for job, why in about["failures"].items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _busy(machine: Mapping[str, Any]) -> list[str]:
    load, cores = machine["load"], machine["cores"]
    if load is None or load < BUSY * cores:
        return []
    return [f"others were at work here (load {load:.1f} on {cores} cores): trust the best more than the medians"]


def _runtime(name: str, about: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    own = f", kernels {about['kernels']}, BLAS {about['blas']}" if "kernels" in about else ""
    return f"{name}: {versions} on {about['device']}{own}"


def _table(found: Mapping[str, Any], ours: str) -> list[str]:
    """Rows of the table, aligned."""
    peers = [name for name in found["runtimes"] if name != ours]
    head = ["what", "prefix", "batch", ours, *(one for name in peers for one in (name, "ratio"))]
    rows = [head]
    for cell in found["cells"]:
        image = "image_tokens" in cell
        what = f"{cell['what']} of {cell['image_tokens']}" if cell["what"] == "image" else cell["what"]
        what = f"image of {cell['image_tokens']}, peak memory" if cell["what"] == "image, peak memory" else what
        row = [f"{what}, {cell['unit']}" if cell["unit"] == "ms" else what]
        row += ["", ""] if image else [f"{cell['prefix']:,}", str(cell["batch"])]
        for name in [ours, *peers]:
            row.append(_value(cell["runtimes"].get(name), cell["unit"]))
            if name != ours:
                row.append(_ratio(cell["runtimes"].get(name), cell["unit"]))
        rows.append(row)
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table whose columns also align as they stand: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    rule = "|" + "|".join("-" * (width + 1 + (i == 0)) + ":" * (i > 0) for i, width in enumerate(widths)) + "|"
    first, *others = ("| " + " | ".join(_padded(*cell) for cell in zip(row, widths, range(len(row)))) + " |" for row in rows)
    return [first, rule, *others]


def _padded(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def _value(of: Mapping[str, Any] | None, unit: str) -> str:
    if of is None:
        return "-"
    if unit == "bytes":
        return size(of["median"])
    return f"{number(of['median'])} ({number(of['best'])})"


def _ratio(of: Mapping[str, Any] | None, unit: str) -> str:
    if of is None or "ratio" not in of:
        return ""
    return f"{of['ratio']:.2f}" if unit == "bytes" else f"{of['ratio']:.2f} ({of['best_ratio']:.2f})"


def number(value: float) -> str:
    """Three digits, or all before the point."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 4
    return f"{value:,.{digits}f}"
