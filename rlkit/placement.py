"""Who sits where and what it takes, worked out from numbers alone: no Ray, no model is loaded.

`plan` seats engines, ranks and reference in the order in which they are started, on the first node and GPU with room, and predicts the
memory of each. It refuses what cannot fit, naming the numbers and the setting to change. The bytes are those of `rlkit.footprint`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlkit import footprint
from rlkit.config import EngineSpec, TrainSpec
from rlkit.errors import ResourceError
from rlkit.footprint import PHASES, Role, Size
from rlkit.preflight import Node
from rlkit.reprs import gib, html_table

EPS = 1e-6
Card = tuple[int, int]  # (node, card on it), both counted from 0


@dataclass(frozen=True)
class Measured:
    """Bytes on one card in one phase: of a role's process, and of everybody."""

    held: float
    card: float


def measured_of(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Measured]]:
    """role -> phase -> the most that a run's phase events tell of its GPU memory; an evaluation's rollouts are not counted."""
    out: dict[str, dict[str, Measured]] = {}
    for event in events:
        if event["kind"] != "phase" or event["phase"] not in PHASES:
            continue
        for key in [k for k in event if k.startswith("memory/") and k.endswith("/card_gib")]:
            role = key.split("/")[1]
            held, card = (float(event[f"memory/{role}/{what}"]) * 2**30 for what in ("reserved_gib", "card_gib"))
            before = out.setdefault(role, {}).get(event["phase"], Measured(0.0, 0.0))
            out[role][event["phase"]] = Measured(max(before.held, held), max(before.card, card))
    return out


@dataclass(frozen=True)
class Placement:
    """Seats of every role. Its repr is a table; ``colocated`` says whether an engine shares a GPU (or, on CPU, a node) with a rank."""

    nodes: tuple[Node, ...]
    roles: tuple[Role, ...]
    zero_stage: int
    gpu_memory: float | None  # bytes a GPU
    measured: Mapping[str, Mapping[str, Measured]] = field(default_factory=dict)  # role -> phase -> what a run saw

    @property
    def spread(self) -> dict[int, tuple[int, ...]]:
        """node -> cards of it that roles have shares of, when those are more than one in all: Ray would put the shares onto the first."""
        cards = sorted({(r.node, card) for r in self.roles if r.shares for card in r.gpu_ids})
        return {at: tuple(card for n, card in cards if n == at) for at, _ in cards} if len(cards) > 1 else {}

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
        """One a role, and with GPUs one a card: name, seat, CPUs, GPUs, memory. What was measured of a role is what torch's allocator held
        at its fullest, on the fullest of its cards; of a card, what all processes held at the end of a phase."""
        out = []
        for role in self.roles:
            node = self.nodes[role.node]
            seat = f"{node.host or node.ip}" + (f" GPU {', '.join(map(str, role.gpu_ids))}" if role.gpu_ids else "")
            text = f"{_size(sum(role.parts.values()))}: " + ", ".join(f"{name} {_size(n)}" for name, n in role.parts.items() if n > 0)
            if role.gpu_ids and role.name in self.measured:
                found = {phase: m.held for phase, m in self.measured[role.name].items()}
                text += "; a card " + _both({p: n / len(role.gpu_ids) for p, n in role.phases.items()}, found)
            out.append((role.name, seat, f"{role.cpus:g}", f"{role.gpus:g}", text))
        for at, gpu in sorted({(r.node, gpu) for r in self.roles for gpu in r.gpu_ids}):
            here = [m for r in self.roles if r.node == at and gpu in r.gpu_ids for m in self.measured.get(r.name, {}).items()]
            seen = {phase: max(m.card for p, m in here if p == phase) for phase in PHASES if any(p == phase for p, _ in here)}
            predicted = {phase: sum(parts.values()) for phase, parts in self.card(at, gpu).items()}
            node = self.nodes[at]
            out.append(("all of it", f"{node.host or node.ip} GPU {gpu}", "", "", _both(predicted, seen)))
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
    checked: bool = True,
) -> Placement:
    """Seat ``sampler``, ``learner`` and ``references`` frozen models on ``nodes``.

    Args:
        nodes: of a `Cluster`, or made up.
        size: of the model, as `rlkit.models.size` gives it.
        gpu_memory_gib: memory of one GPU; None leaves memory on GPUs unchecked (Ray does not know it).
        with_learner: False seats engines and references alone.
        checked: False leaves memory unchecked, also on hosts.

    Raises:
        ResourceError: something has no seat or does not fit; names the numbers and the settings.
    """
    gpu_memory = None if gpu_memory_gib is None else gpu_memory_gib * 2**30
    wanted = [footprint.engine(i, size, sampler, gpu_memory) for i in range(sampler.engines or 1)]
    keeps = not sampler.sleep_level and not learner.offload_between_turns
    wanted += [footprint.rank(i, size, learner, keeps) for i in range(learner.world if with_learner else 0)]
    wanted += [footprint.reference(i, size, cpus_per_reference, gpus_per_reference) for i in range(references)]
    roles = _seat(list(nodes), wanted)
    made = Placement(tuple(nodes), tuple(roles), learner.zero_stage, gpu_memory)
    if checked:
        _check_gpus(made, sampler, learner)
        _check_hosts(made, sampler, learner)
    return made


def _seat(nodes: list[Node], wanted: list[Role]) -> list[Role]:
    """Whole cards and CPUs in order, on the first node with room; then those that share cards, dealt over what is left."""
    cpus = [n.cpus for n in nodes]
    cards = [(at, card) for at, node in enumerate(nodes) for card in range(int(node.gpus))]
    seated: dict[str, Role] = {}

    def refuse(role: Role) -> ResourceError:
        free = [sum(at == node for node, _ in cards) for at in range(len(nodes))]
        left = "; ".join(f"{n.host or n.ip} {c:g} CPUs, {g} GPUs" for n, c, g in zip(nodes, cpus, free, strict=True))
        kind = role.name.split("-")[0]
        unit = "gpus" if role.gpus else "cpus"
        fixes = {"engine": f"sampler.engines or sampler.{unit}_per_engine", "rank": f"learner.ranks or learner.{unit}_per_rank"}
        return ResourceError(
            f"No seat for {role.name}, which asks for {role.cpus:g} CPUs and {role.gpus:g} GPUs on one node. Left after {len(seated)} of "
            f"{len(wanted)} roles: {left or 'no nodes'}. Lower {fixes.get(kind, f'references or {unit}_per_reference')}, or use a "
            "larger cluster."
        )

    for role in [r for r in wanted if not r.shares]:
        for at in range(len(nodes)):
            free = [card for card in cards if card[0] == at]
            if len(free) >= role.gpus - EPS and cpus[at] >= role.cpus - EPS:
                break
        else:
            raise refuse(role)
        taken = free[: round(role.gpus)]
        cards = [card for card in cards if card not in taken]
        cpus[at] -= role.cpus
        seated[role.name] = replace(role, node=at, gpu_ids=tuple(card for _, card in taken))
    sharing = [role for role in wanted if role.shares]
    dealt = deal(cards, [(role.name, role.gpus / role.cards, role.cards) for role in sharing])
    for role in sharing:
        at = dealt[role.name][0][0] if dealt is not None else -1
        if dealt is None or cpus[at] < role.cpus - EPS:
            raise refuse(role)
        cpus[at] -= role.cpus
        seated[role.name] = replace(role, node=at, gpu_ids=tuple(card for _, card in dealt[role.name]))
    return [seated[role.name] for role in wanted]


def deal(cards: Sequence[Card], shares: Sequence[tuple[str, float, int]]) -> dict[str, tuple[Card, ...]] | None:
    """name -> cards, for roles of (name, share of each card, number of cards): evenly, over the fewest cards that hold them all.

    Roles of a kind (the name up to its last ``-``) go round: with as many cards as ranks each has its own, and engine i shares it with
    rank i. The cards of one role are on one node. None when they do not fit.
    """
    there = {node: [card for card in cards if card[0] == node] for node, _ in cards}
    fullest = [card for found in sorted(there.values(), key=len, reverse=True) for card in found]  # room for roles over several cards
    return _deal(cards, shares) or _deal(fullest, shares) or (None if shares else {})


def _deal(cards: Sequence[Card], shares: Sequence[tuple[str, float, int]]) -> dict[str, tuple[Card, ...]] | None:
    for n in range(1, len(cards) + 1):
        load = dict.fromkeys(cards[:n], 0.0)
        turn: dict[str, int] = {}
        out: dict[str, tuple[Card, ...]] = {}
        for name, share, count in shares:
            kind = name.rpartition("-")[0]
            begin = turn.get(kind, 0)
            turn[kind] = begin + count
            mine = tuple(cards[(begin + i) % n] for i in range(count))
            if len(set(mine)) < count or len({node for node, _ in mine}) > 1:
                break
            for card in mine:
                load[card] += share
            out[name] = mine
        else:
            if all(taken <= 1 + EPS for taken in load.values()):
                return out
    return None


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
        if learner.zero_stage < 3 and learner.world > 1:
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


def _both(predicted: Mapping[str, float], measured: Mapping[str, float]) -> str:
    """Bytes by phase, with those that were measured in brackets."""
    return ", ".join(f"{p} {_size(n)}" + (f" ({_size(measured[p])} measured)" if p in measured else "") for p, n in predicted.items())


def _size(n_bytes: float) -> str:
    return gib(n_bytes) if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
