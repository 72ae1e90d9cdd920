"""Cards that a run holds whole, so that its engines, ranks and references can share each of them.

Ray puts fractions of GPUs onto the first card with room: two engines that ask for half a card each get the same one, and no actor can have
halves of two cards. So when shares are dealt over several cards (`rlkit.placement.deal`) the run reserves those cards, with placement
groups that outlive the kernel as its actors do, and tells each process which of them it sees. Ray then counts the cards as taken, by nobody
else, until `release`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlkit import actors
from rlkit.errors import ResourceError
from rlkit.placement import Placement

HOLD_WAIT_S = 10.0


@dataclass(frozen=True)
class Seat:
    """A node and the ids of its cards that a process may see there."""

    node_id: str
    cards: tuple[str, ...]

    @property
    def env(self) -> dict[str, str]:
        """Ray gives an actor that asks for no GPU an empty list of them, unless it is told to leave the variable alone."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.cards), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class Seating:
    """Where a run's processes sit when shares of cards are dealt over several of them. With whole cards, or one card, Ray places."""

    def __init__(self, space: str) -> None:
        self._space = space
        self._layout: Placement | None = None
        self._held: Mapping[str, Sequence[str]] = {}

    def take(self, layout: Placement, empty: bool = False) -> bool:
        """Hold the cards that ``layout`` shares; returns whether processes get their seats here from now on.

        ``empty``: nobody sits yet, so cards that an earlier layout held are given back first.

        Raises:
            ResourceError: not so many are free.
        """
        if empty:
            release(self._space)
        spread = layout.spread
        self._layout = layout
        ips = {layout.nodes[at].id: layout.nodes[at].ip for at in spread}
        self._held = hold(self._space, {layout.nodes[at].id: len(cards) for at, cards in spread.items()}, ips)
        return bool(spread)

    def of(self, name: str) -> Seat | None:
        """The seat of an actor by its name. A reference, which is in no layout, shares a held card."""
        if self._layout is None or not self._held:
            return None
        role = next((r for r in self._layout.roles if r.name == name), None)
        if role is not None and role.shares:
            node = self._layout.nodes[role.node]
            held = dict(zip(self._layout.spread[role.node], self._held[node.id], strict=False))
            return Seat(node.id, tuple(held[card] for card in role.gpu_ids))
        if role is None and name.startswith("reference-"):
            cards = [(node_id, card) for node_id, found in self._held.items() for card in found]
            node_id, card = cards[int(name.rpartition("-")[2]) % len(cards)]
            return Seat(node_id, (card,))
        return None


def hold(space: str, wanted: Mapping[str, int], ips: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Reserve ``wanted`` cards on each node (by id) for the run in namespace ``space``; those that it holds already stay.

    ``ips`` are the nodes' addresses. Returns node id -> ids of the cards held there, always in the same order.

    Raises:
        ResourceError: a node has not so many free cards.
    """
    from ray.util import placement_group

    begun = [(node_id, _groups(space, node_id)) for node_id in wanted]
    for node_id, groups in begun:
        missing = wanted[node_id] - sum(g.bundle_count for g in groups)
        if missing > 0:
            here = [{"ray.io/node-id": node_id}] * missing
            name = f"{_prefix(space, node_id)}{len(groups)}"
            made = placement_group([{"GPU": 1.0}] * missing, "STRICT_PACK", name, lifetime="detached", bundle_label_selector=here)
            groups.append(made)
    deadline = time.monotonic() + HOLD_WAIT_S
    for node_id, groups in begun:
        for group in groups:
            if not group.wait(max(0.1, deadline - time.monotonic())):
                _remove(group)
                others = ", ".join(r for r in actors.runs() if r != space.removeprefix(actors.PREFIX)) or "none"
                raise ResourceError(
                    f"The run needs {wanted[node_id]} whole GPUs of {ips[node_id]}, to share each between engine and rank, and not so many "
                    f"are free. Other living runs: {others}; end one with rlkit kill NAME, or lower sampler.engines and learner.ranks. "
                    "Parts of this run that sit on a share of a card already must be made again: run.close(), then its cells."
                )
    return {node_id: tuple(card for group in groups for card in _cards(group)) for node_id, groups in begun}


def release(space: str) -> None:
    """Give the cards of a run back."""
    for group in _groups(space):
        _remove(group)


def _groups(space: str, node_id: str = "") -> list[Any]:
    """The run's living placement groups, those of one node or all, in the order in which they were made."""
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, placement_group_table

    prefix = _prefix(space, node_id)
    found = [(g["name"], key, g["bundles"]) for key, g in placement_group_table().items() if g["state"] != "REMOVED"]
    mine = sorted((name, key, bundles) for name, key, bundles in found if name.startswith(prefix))
    return [PlacementGroup(PlacementGroupID.from_hex(key), list(bundles.values())) for _, key, bundles in mine]


def _prefix(space: str, node_id: str) -> str:
    return f"{space}/cards/{node_id}/" if node_id else f"{space}/cards/"


def _remove(group: Any) -> None:
    from ray.util import remove_placement_group

    remove_placement_group(group)


def _cards(group: Any) -> Sequence[str]:
    """The ids of a group's cards, asked on the cards themselves."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def card() -> str:
        return str(ray.get_gpu_ids()[0])

    there = ray.remote(card)
    calls = [
        there.options(num_cpus=0, num_gpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, i)).remote()
        for i in range(group.bundle_count)
    ]
    return actors.wait(calls, what=f"the ids of {len(calls)} card(s)", timeout_s=60.0, setting="nothing: this limit is fixed")
