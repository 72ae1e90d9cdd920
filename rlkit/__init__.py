"""rlkit: notebook-first reinforcement learning of language models on a Ray cluster.

    import rlkit as rl
    cluster = rl.connect("cluster_configs/laptop.yaml")
    run = rl.Run("quickstart", cluster)

Every name below is loaded when it is first used, so that ``import rlkit`` stays light: torch, ray, vllm and deepspeed are not touched.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "Batch": "types",
    "Cluster": "cluster",
    "ClusterSpec": "config",
    "EngineSpec": "config",
    "Learner": "learner",
    "Prompt": "types",
    "Reference": "reference",
    "Rollouts": "types",
    "Run": "run",
    "Sample": "types",
    "SampleSpec": "config",
    "Sampler": "sampler",
    "Scored": "types",
    "Tasks": "tasks",
    "TrainSpec": "config",
    "UpdateStats": "types",
    "advantages": "estimators",
    "attach": "attaching",
    "connect": "cluster",
    "load_tasks": "tasks",
    "score": "scoring",
}
_MODULES = ("errors", "headless", "losses", "rewards", "templates", "watch")

__all__ = [
    "Batch",
    "Cluster",
    "ClusterSpec",
    "EngineSpec",
    "Learner",
    "Prompt",
    "Reference",
    "Rollouts",
    "Run",
    "Sample",
    "SampleSpec",
    "Sampler",
    "Scored",
    "Tasks",
    "TrainSpec",
    "UpdateStats",
    "advantages",
    "attach",
    "connect",
    "errors",
    "headless",
    "load_tasks",
    "losses",
    "rewards",
    "score",
    "templates",
    "watch",
]

if TYPE_CHECKING:
    from rlkit import errors, headless, losses, rewards, templates, watch
    from rlkit.attaching import attach
    from rlkit.cluster import Cluster, connect
    from rlkit.config import ClusterSpec, EngineSpec, SampleSpec, TrainSpec
    from rlkit.estimators import advantages
    from rlkit.learner import Learner
    from rlkit.reference import Reference
    from rlkit.run import Run
    from rlkit.sampler import Sampler
    from rlkit.scoring import score
    from rlkit.tasks import Tasks, load_tasks
    from rlkit.types import Batch, Prompt, Rollouts, Sample, Scored, UpdateStats


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"rlkit.{name}")
    if name in _WHERE:
        return getattr(import_module(f"rlkit.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'rlkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
