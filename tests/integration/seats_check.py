"""What test_seats.py runs in a process of its own: ``python seats_check.py ADDRESS TOKEN_PATH STORAGE``; prints what it saw as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import ray

import rlkit as rl
from rlkit import actors, seats
from rlkit.config import EngineSpec, TrainSpec
from rlkit.errors import ResourceError
from rlkit.models import ModelSize
from rlkit.placement import plan

SMALL = ModelSize(135_000_000, 30, 576, 49_152, 3, 64, True)
ENGINE = EngineSpec(engines=2, gpus_per_engine=0.5, cpus_per_engine=0.1)
RANKS = TrainSpec(ranks=2, gpus_per_rank=0.4, cpus_per_rank=0.1)


class Looker:
    """Says which cards it sees."""

    def sees(self) -> tuple[str, str]:
        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "unset")


def layout(cluster: rl.Cluster, sampler: EngineSpec = ENGINE, learner: TrainSpec = RANKS) -> Any:
    return plan(cluster.nodes, SMALL, sampler, learner, checked=False)


def free_gpus(wanted: float) -> float:
    """How many Ray counts as free, when it has come to ``wanted`` or 20 s have passed."""
    deadline = time.monotonic() + 20
    while (found := ray.available_resources().get("GPU", 0.0)) != wanted and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def sharing(cluster: rl.Cluster) -> dict[str, Any]:
    space = actors.namespace("sharing")
    seating = seats.Seating(space)
    before = seating.of("engine-0")
    held = seating.take(layout(cluster))
    left = free_gpus(2.0)
    names = ("engine-0", "engine-1", "rank-0", "rank-1", "reference-0")
    made = {n: actors.spawn(Looker, n, space, seat=seating.of(n)) for n in names}
    saw = dict(zip(made, ray.get([h.sees.remote() for h in made.values()]), strict=True))
    others = [ray.remote(Looker).options(num_gpus=1, num_cpus=0).remote() for _ in range(2)]
    elsewhere = ray.get([h.sees.remote() for h in others])
    again = seats.Seating(space)  # as from another kernel
    again.take(layout(cluster))
    same = [again.of(n) for n in names] == [seating.of(n) for n in names]
    for handle in others:
        ray.kill(handle)
    actors.end(list(made.values()))
    seats.release(space)
    released = free_gpus(4.0)
    seats.release(space)  # nothing is held: nothing happens
    return {"before": before, "held": held, "left": left, "saw": saw, "elsewhere": elsewhere, "same": same, "released": released}


def over_two_cards(cluster: rl.Cluster) -> dict[str, Any]:
    space = actors.namespace("both")
    seating = seats.Seating(space)
    seating.take(layout(cluster, ENGINE.but(engines=1, tensor_parallel_size=2), RANKS.but(ranks=1, gpus_per_rank=1)))
    seat, rank = seating.of("engine-0"), seating.of("rank-0")
    seats.release(space)
    return {"cards": seat.cards if seat else None, "rank": rank, "released": free_gpus(4.0)}


def refused(cluster: rl.Cluster) -> dict[str, Any]:
    one, two = actors.namespace("one"), actors.namespace("two")
    holder = actors.spawn(Looker, "engine-0", one)
    seats.Seating(one).take(layout(cluster))
    seats.HOLD_WAIT_S = 1.0
    try:
        seats.Seating(two).take(layout(cluster))
        text = ""
    except ResourceError as error:
        text = str(error)
    seats.HOLD_WAIT_S = 10.0
    seats.release(one)
    released = free_gpus(4.0)  # what was asked for in vain is not held later
    actors.end([holder])
    return {"text": text, "released": released}


def growing(cluster: rl.Cluster) -> dict[str, Any]:
    run = rl.Run("growing", cluster, resume=False)
    run._seating.take(layout(cluster, ENGINE.but(engines=1), RANKS.but(ranks=2)))
    before, two = run.seat("rank-1"), free_gpus(2.0)
    run._seating.take(layout(cluster, ENGINE.but(engines=4), RANKS.but(ranks=4)))
    four = free_gpus(0.0)
    nodes = {seat.node_id for i in range(4) if (seat := run.seat(f"rank-{i}")) is not None}
    same = run.seat("rank-1") == before
    # All parts are made again with whole cards: what was held is given back, and Ray places them.
    whole = run._seating.take(layout(cluster, ENGINE.but(gpus_per_engine=1), RANKS.but(gpus_per_rank=1)), empty=True)
    back, seat = free_gpus(4.0), run.seat("rank-1")
    run._seating.take(layout(cluster), empty=True)
    again = free_gpus(2.0)
    run.close()
    closed = free_gpus(4.0)
    return {"two": two, "four": four, "nodes": len(nodes), "same": same, "whole": [whole, back, seat], "again": again, "closed": closed}


def main() -> None:
    address, token_path, storage = sys.argv[1:]
    cluster = rl.connect(address, token_path=token_path, storage=storage)
    nodes = sorted(n.id for n in cluster.nodes)
    found = {check.__name__: check(cluster) for check in (sharing, over_two_cards, refused, growing)}
    print(json.dumps({"nodes": nodes, **found}))


if __name__ == "__main__":
    main()
