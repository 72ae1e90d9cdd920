"""How much memory the cluster's GPUs have, and how large a model is: asked where the GPUs and the model's files are."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from rlkit import actors, models

ASK_S = 60.0  # for an answer of a node that may have to start a process


def here() -> float | None:
    """GiB of this machine's smallest GPU by its driver, whatever Ray shows of it; None when there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    done = subprocess.run(
        [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=ASK_S, check=False
    )
    found = [float(line) for line in done.stdout.split() if line.replace(".", "", 1).isdigit()]  # MiB; "[N/A]" where it does not say
    return min(found) / 1024 if found else None


def smallest(node_ids: Sequence[str]) -> float | None:
    """GiB of the smallest GPU of these nodes; None when none says."""
    found = [value for value in _ask(here, node_ids) if value is not None]
    return min(found) if found else None


def size_of(model: str, node_ids: Sequence[str]) -> models.ModelSize:
    """Size of a model as the first of these nodes finds it.

    Raises:
        ModelError: it is not there, or incomplete.
    """
    size: models.ModelSize = _ask(_size, node_ids[:1], model)[0]
    return size


def _size(model: str) -> models.ModelSize:
    return models.size(models.resolve(model).path)


def _ask(question: Any, node_ids: Sequence[str], *args: Any) -> list[Any]:
    """``question(*args)`` on each of these nodes."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(question)
    refs = [
        ask.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*args) for node in node_ids
    ]
    return actors.wait(refs, what="the nodes to tell of their GPUs and the model", timeout_s=ASK_S, setting="nothing: this limit is fixed")
