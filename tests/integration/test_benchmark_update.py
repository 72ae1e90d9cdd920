"""The benchmark of the update runs, with tiny shapes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("sections", [["qwen"], ["matrix", "smollm2"]])
def test_the_benchmark_of_the_update_runs(sections):
    command = [sys.executable, str(ROOT / "benchmarks" / "update.py"), "--quick", "--only", *sections]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("qwen", "smollm2"))]
    assert {row[0] for row in rows} == set(sections) - {"matrix"}
    for row in rows:
        assert float(row[5].replace(",", "")) > 0, row
