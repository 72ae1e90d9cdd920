"""The page of GPU figures is what its script makes of the committed results."""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_the_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("benchmark_table", FOLDER / "table.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_table"] = made
    spec.loader.exec_module(made)
    assert made.PAGE.read_text() == made.page(), "run: python benchmarks/table.py"
