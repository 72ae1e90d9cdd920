"""Where an evaluation's samples come from: a live sampler, or a saved model whose engines are started when a sample is missing."""

from __future__ import annotations

import os
import re
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import psutil

from rlkit import localhead
from rlkit.config import as_plain
from rlkit.context import Owner
from rlkit.eval.spec import engine_facts


class Source(ABC):
    """Where samples come from. ``name`` and ``facts`` are known before any engine runs; ``sampler`` starts them when first asked for."""

    name: str
    facts: dict[str, Any]
    policy_version: int | None = None  # of a live sampler

    def __enter__(self) -> Source:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """End what was started for this evaluation."""

    @property
    @abstractmethod
    def sampler(self) -> Any:
        """The running engines."""


class Live(Source):
    """A running sampler. Trained weights are known to its learner only, so two evaluations of them are never taken for one."""

    def __init__(self, sampler: Any) -> None:
        info = sampler.info[0]
        self._sampler, self.name, self.policy_version = sampler, info["name"], sampler.version
        kind = sampler.spec.engine
        self.facts = {
            "model": {"name": info["name"], "fingerprint": info["fingerprint"]}
            if sampler.version == 0
            else {"name": info["name"], "base": info["fingerprint"], "policy_version": sampler.version, "live": uuid.uuid4().hex},
            "engine": engine_facts(kind, as_plain(sampler.spec)),
        }

    @property
    def sampler(self) -> Any:
        return self._sampler

    def __exit__(self, *_: object) -> None:
        """Its run goes on."""


class Saved(Source):
    """A model on disk or on the hub. Its engines are started when a sample is missing, and ended with the evaluation."""

    def __init__(self, model: str | Path, engine: dict[str, Any], cluster: Any) -> None:
        from rlkit import models
        from rlkit.cluster import Cluster, current, load_spec

        self._cluster: Any = cluster if isinstance(cluster, Cluster) else (current() if cluster is None else None)
        self._own = self._cluster is None and cluster is None  # then one is started, so that ending it takes nothing from anybody
        self._config = self._cluster.spec if self._cluster is not None else load_spec(_config_here() if self._own else cluster)
        self._owner: Owner | None = None
        self._made: Any = None
        found = models.resolve(str(model))
        self._path, self.name = str(found.path), found.name
        self._spec = self._config.sampler.but(**engine)
        self.facts = {
            "model": {"name": found.name, "fingerprint": found.fingerprint},
            "engine": engine_facts(self._spec.engine, as_plain(self._spec)),
        }

    @property
    def sampler(self) -> Any:
        if self._made is None:
            from rlkit.cluster import connect
            from rlkit.sampler import Sampler

            if self._own:
                _end_orphans()
                self._config = self._config.but(name=f"eval-{os.getpid()}-{uuid.uuid4().hex[:6]}", dashboard=False)
            if self._cluster is None:
                self._cluster = connect(self._config)
            self._owner = Owner(f"eval-{uuid.uuid4().hex[:8]}", cluster=self._cluster)
            self._made = Sampler.start(self._path, self._spec, self._owner)
        return self._made

    def __exit__(self, *_: object) -> None:
        from rlkit import actors

        if self._own and self._cluster is not None:
            self._cluster.shutdown()
            localhead.forget(self._cluster.spec.name)
        elif self._owner is not None:
            actors.end(actors.started_with(self._owner.namespace, ""))


def _end_orphans() -> None:
    """End the clusters of evaluations that were killed; nobody else uses them."""
    for head in localhead.living():
        made_by = re.fullmatch(r"eval-(\d+)-[0-9a-f]+", head.name)
        if made_by and not psutil.pid_exists(int(made_by[1])):
            localhead.stop(head.name)
            localhead.forget(head.name)


def _config_here() -> str:
    """The shipped config that suits this machine."""
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    return "one_gpu" if NvidiaGPUAcceleratorManager.get_current_node_num_accelerators() > 0 else "laptop"
