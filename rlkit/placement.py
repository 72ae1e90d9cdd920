"""Who sits where and what it takes, worked out from numbers alone: no Ray, no model is loaded.

`plan` seats engines, ranks and reference in the order in which they are started, on the first node and GPU with room, and predicts the
memory of each. It refuses what cannot fit, naming the numbers and the setting to change. The bytes are those of `rlkit.footprint`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlkit import footprint
from rlkit.config import EngineSpec, TrainSpec
from rlkit.errors import ResourceError
from rlkit.footprint import PHASES, Role, Size
from rlkit.preflight import Node
from rlkit.reprs import gib, html_table

EPS = 1e-6


@dataclass(frozen=True)
class Placement:
    """Seats of every role. Its repr is a table; ``colocated`` says whether an engine shares a GPU (or, on CPU, a node) with a rank."""

    nodes: tuple[Node, ...]
    roles: tuple[Role, ...]
    zero_stage: int
    gpu_memory: float | None  # bytes a GPU

    @property
    def colocated(self) -> bool:
        def seats(prefix: str) -> set[tuple[int, int]]:
            return {(r.node, g) for r in self.roles if r.name.startswith(prefix) for g in (r.gpu_ids or (-1,))}

        return bool(seats("engine-") & seats("rank-"))

    def card(self, node: int, gpu: int) -> dict[str, dict[str, float]]:
        """phase -> role -> bytes on one GPU."""
        here = [r for r in self.roles if r.node == node and gpu in r.gpu_ids]
        return {phase: {r.name: r.phases.get(phase, 0.0) / len(r.gpu_ids) for r in here} for phase in PHASES}

    def peaks(self) -> dict[str, float]:
        """phase -> bytes on the fullest GPU; empty without GPUs."""
        cards = [self.card(at, gpu) for at, node in enumerate(self.nodes) for gpu in range(int(node.gpus))]
        return {phase: max(sum(card[phase].values()) for card in cards) for phase in PHASES} if cards else {}

    def caption(self) -> str:
        peaks = ", ".join(f"{phase} {_size(n)}" for phase, n in self.peaks().items())
        of = f" of {_size(self.gpu_memory)}" if self.gpu_memory else ""
        fullest = f"; fullest GPU: {peaks}{of}" if peaks else ""
        return f"ZeRO-{self.zero_stage}, engines and ranks {'share seats' if self.colocated else 'apart'}{fullest}"

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        out = []
        for role in self.roles:
            node = self.nodes[role.node]
            seat = f"{node.host or node.ip}" + (f" GPU {', '.join(map(str, role.gpu_ids))}" if role.gpu_ids else "")
            parts = ", ".join(f"{name} {_size(n)}" for name, n in role.parts.items() if n > 0)
            out.append((role.name, seat, f"{role.cpus:g}", f"{role.gpus:g}", f"{_size(sum(role.parts.values()))}: {parts}"))
        return out

    def __repr__(self) -> str:
        header = ("role", "seat", "CPUs", "GPUs", "predicted memory")
        rows = [header, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.caption(), *lines])

    def _repr_html_(self) -> str:
        return html_table(["role", "seat", "CPUs", "GPUs", "predicted memory"], self.rows(), self.caption())


def plan(
    nodes: Sequence[Node],
    size: Size,
    sampler: EngineSpec,
    learner: TrainSpec,
    *,
    references: int = 0,
    cpus_per_reference: float = 1.0,
    gpus_per_reference: float = 0.0,
    gpu_memory_gib: float | None = None,
    with_learner: bool = True,
) -> Placement:
    """Seat ``sampler``, ``learner`` and ``references`` frozen models on ``nodes``.

    Args:
        nodes: of a `Cluster`, or made up.
        size: of the model, as `rlkit.models.size` gives it.
        gpu_memory_gib: memory of one GPU; None leaves memory on GPUs unchecked (Ray does not know it).
        with_learner: False seats engines and references alone.

    Raises:
        ResourceError: something has no seat or does not fit; names the numbers and the settings.
    """
    gpu_memory = None if gpu_memory_gib is None else gpu_memory_gib * 2**30
    wanted = [footprint.engine(i, size, sampler, gpu_memory) for i in range(sampler.engines or 1)]
    wanted += [footprint.rank(i, size, learner) for i in range(learner.ranks if with_learner else 0)]
    wanted += [footprint.reference(i, size, cpus_per_reference, gpus_per_reference) for i in range(references)]
    roles = _seat(list(nodes), wanted)
    made = Placement(tuple(nodes), tuple(roles), learner.zero_stage, gpu_memory)
    _check_gpus(made, sampler, learner)
    _check_hosts(made, sampler, learner)
    return made


def _seat(nodes: list[Node], wanted: list[Role]) -> list[Role]:
    cpus = [n.cpus for n in nodes]
    gpus = [[1.0] * int(n.gpus) for n in nodes]
    out: list[Role] = []
    for role in wanted:
        for at in range(len(nodes)):
            ids = _pick(gpus[at], role.gpus)
            if ids is not None and cpus[at] >= role.cpus - EPS:
                break
        else:
            left = "; ".join(f"{n.host or n.ip} {c:g} CPUs, {sum(g):g} GPUs" for n, c, g in zip(nodes, cpus, gpus, strict=True))
            kind = role.name.split("-")[0]
            unit = "gpus" if role.gpus else "cpus"
            fixes = {"engine": f"sampler.engines or sampler.{unit}_per_engine", "rank": f"learner.ranks or learner.{unit}_per_rank"}
            raise ResourceError(
                f"No seat for {role.name}, which asks for {role.cpus:g} CPUs and {role.gpus:g} GPUs on one node. Left after {len(out)} of "
                f"{len(wanted)} roles: {left or 'no nodes'}. Lower {fixes.get(kind, f'references or {unit}_per_reference')}, or use a "
                "larger cluster."
            )
        cpus[at] -= role.cpus
        for gpu in ids:
            gpus[at][gpu] -= role.gpus if role.gpus < 1 else 1.0
        out.append(replace(role, node=at, gpu_ids=ids))
    return out


def _pick(free: list[float], gpus: float) -> tuple[int, ...] | None:
    """The GPUs of a node for one role: a fraction shares one, whole ones are its own. None when they are not there."""
    if gpus == 0:
        return ()
    if gpus < 1:
        fit = [i for i, f in enumerate(free) if f >= gpus - EPS]
        return (fit[0],) if fit else None
    whole = [i for i, f in enumerate(free) if f >= 1 - EPS]
    return tuple(whole[: round(gpus)]) if len(whole) >= gpus - EPS else None


def _check_gpus(made: Placement, sampler: EngineSpec, learner: TrainSpec) -> None:
    if made.gpu_memory is None:
        return
    for at, node in enumerate(made.nodes):
        for gpu in range(int(node.gpus)):
            phase, here = max(made.card(at, gpu).items(), key=lambda item: sum(item[1].values()))
            if sum(here.values()) > made.gpu_memory * (1 + EPS):
                shares = ", ".join(f"{name} {_size(n)}" for name, n in here.items())
                raise ResourceError(
                    f"GPU {gpu} of {node.host or node.ip} has {_size(made.gpu_memory)} and would hold {_size(sum(here.values()))} "
                    f"in the {phase} phase ({shares}). {_advice(here, sampler, learner, on_gpu=True)}"
                )


def _check_hosts(made: Placement, sampler: EngineSpec, learner: TrainSpec) -> None:
    for at, node in enumerate(made.nodes):
        here = {r.name: sum(r.host.values()) for r in made.roles if r.node == at and r.host}
        if node.memory and sum(here.values()) > node.memory:
            shares = ", ".join(f"{name} {_size(n)}" for name, n in here.items())
            raise ResourceError(
                f"{node.host or node.ip} has {_size(node.memory)} of memory and would hold {_size(sum(here.values()))} ({shares}). "
                f"{_advice(here, sampler, learner, on_gpu=False)}"
            )


def _advice(here: Mapping[str, float], sampler: EngineSpec, learner: TrainSpec, *, on_gpu: bool) -> str:
    kinds = {name.split("-")[0] for name in here}
    ways = []
    if "rank" in kinds:
        if learner.zero_stage < 3 and learner.ranks > 1:
            ways.append("raise learner.zero_stage to 3")
        ways.append("raise learner.ranks over more GPUs or nodes")
        if on_gpu and learner.zero_stage > 0 and not learner.offload_optimizer:
            ways.append("set learner.offload_optimizer")
        if not learner.gradient_checkpointing:
            ways.append("set learner.gradient_checkpointing")
        ways.append("lower learner.micro_batch_tokens")
    if kinds >= {"engine", "rank"} and on_gpu:
        if not sampler.sleep_level:
            ways.append("set sampler.sleep_level to 2")
        if not learner.offload_between_turns and not learner.offload_param:
            ways.append("set learner.offload_between_turns")
    if "engine" in kinds:
        ways.append("lower sampler.gpu_memory_utilization" if on_gpu and sampler.kv_cache_gib is None else "lower sampler.kv_cache_gib")
        if on_gpu and sampler.tensor_parallel_size == 1:
            ways.append("raise sampler.tensor_parallel_size")
    if "reference" in kinds:
        ways.append("give the reference its own GPU or node")
    return "Any of these helps: " + "; ".join(ways) + "."


def _size(n_bytes: float) -> str:
    return gib(n_bytes) if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
