"""What watching costs the node: CPU time of a run's monitor and recorder, in percent of one core, on a real local Ray.

    python benchmarks/monitor_cost.py [--seconds 60]

The monitor samples once a second and hands every sample to the recorder, which writes it down. Measured in one run, each for as long: the
recorder alone, recorder and monitor, and both while a view polls four times a second. A Ray actor that does nothing costs something too: an
idle one is measured beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

import machine
import psutil

import rlkit as rl
from rlkit import actors, localhead

POLLS_PER_S = 4


class Idle:
    """An actor that does nothing."""


def pid_of(actor: str, head: int) -> int:
    """The process of the only actor of this class below the local head's process."""
    found = [p.pid for p in psutil.Process(head).children(recursive=True) if " ".join(p.cmdline()[:1]).startswith(f"ray::{actor}")]
    if len(found) != 1:
        raise SystemExit(f"There are {len(found)} processes of actor {actor}.")
    return found[0]


def percent(pids: dict[str, int], seconds: float, source: Any = None) -> dict[str, float]:
    """Percent of a core that each process used, over ``seconds`` in which ``source`` is polled, if there is one."""
    before, begun = {name: cpu(pid) for name, pid in pids.items()}, time.monotonic()
    seen = 0
    while time.monotonic() - begun < seconds:
        if source is not None:
            seen += len(source.poll().monitor)
        time.sleep(1 / POLLS_PER_S)
    took = time.monotonic() - begun
    if source is not None and seen < 0.8 * seconds:
        raise SystemExit(f"Only {seen} samples came in {seconds:.0f} s.")
    return {name: round(100 * (cpu(pid) - before[name]) / took, 3) for name, pid in pids.items()}


def cpu(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return used.user + used.system


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RLKIT_HOME"] = f"{folder}/home"
        cluster = rl.connect(rl.ClusterSpec(name="monitor-cost", storage=folder, dashboard=False))
        try:
            run = rl.Run("cost", cluster)
            idle = actors.spawn(Idle, "idle", run.namespace)
            time.sleep(10)  # what starting leaves to do
            (head,) = localhead.living()
            pids = {"recorder": pid_of("Recorder", head.pid), "idle_actor": pid_of("Idle", head.pid)}
            result: dict[str, Any] = {"alone": percent(pids, args.seconds)}
            run.start_monitors()
            time.sleep(10)
            pids["monitor"] = pid_of("Monitor", head.pid)
            result["monitored"] = percent(pids, args.seconds)
            source = rl.watch.source(run)
            result["monitored_and_watched"] = percent(pids, args.seconds, source)
            source.close()
            result = {"seconds_each": args.seconds, "polls_per_second": POLLS_PER_S, "percent_of_a_core": result}
            actors.end([idle])
            run.close()
        finally:
            cluster.shutdown()
    print(json.dumps(result))
    machine.save("monitor_cost", result)


if __name__ == "__main__":
    main()
