"""The BLAS is in the process before mlx, and the choice is told truly."""

import json
import os
import shutil
import subprocess
import sys

import pytest

import dgemma  # noqa: F401
from dgemma import backend

linux_cpu = pytest.mark.skipif(sys.platform != "linux" or backend.is_gpu(), reason="mlx's Linux CPU backend only")


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SPEED = """
import time, json, dgemma, mlx.core as mx
from dgemma import backend
a = mx.random.normal((1024, 1024)); mx.eval(a @ a)
best = 1e9
for _ in range(3):
    t = time.perf_counter(); mx.eval(a @ a); best = min(best, time.perf_counter() - t)
print(json.dumps([backend.blas().name, backend.blas().fast, 2 * 1024**3 / best / 1e9]))
"""


@linux_cpu
def test_a_fast_blas_is_really_used():
    if not backend.blas().fast:
        pytest.skip("no fast BLAS on this machine")
    name, fast, speed = json.loads(run(SPEED))
    _, slow, plain = json.loads(run(SPEED, DGEMMA_BLAS="none"))
    assert fast and not slow
    # Not a timing test: the reference BLAS is 10 to 30 times slower, whatever else the machine does.
    assert speed > 2 * plain, f"{name}: {speed:.0f} GFLOP/s against {plain:.0f} of mlx's own"


@linux_cpu
def test_what_keeps_the_fast_blas_away_is_told():
    note = "from dgemma import backend; print(backend.blas().note)"
    assert "mlx was imported before dgemma" in run("import mlx.core; import dgemma; " + note)
    caught = "import warnings, mlx.core\nwith warnings.catch_warnings(record=True) as w:\n import dgemma\nprint(len(w))"
    assert run(caught) == ("1" if backend.blas().fast else "0")
    assert "DGEMMA_BLAS=none asks for it" in run("import dgemma; " + note, DGEMMA_BLAS="none")
    assert "DGEMMA_BLAS=/no/such.so failed" in run("import dgemma; " + note, DGEMMA_BLAS="/no/such.so")


@linux_cpu
def test_it_runs_where_no_compiler_is(checkpoint, tmp_path):
    """mlx's fused CPU kernels need g++ at run time; a machine without one answers all the same."""
    assert shutil.which("g++", path=str(tmp_path)) is None
    code = f"""
from dgemma import Pipeline, backend
assert not backend.has_compiler()
print(len(Pipeline.from_pretrained({str(checkpoint)!r})("Hello.", max_new_tokens=3).tokens))
"""
    assert int(run(code, PATH=str(tmp_path))) <= 3
