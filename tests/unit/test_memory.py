"""Memory of a process, a step and a host."""

from __future__ import annotations

import pytest

from rlkit import memory
from rlkit.errors import ResourceError

GIB = 2**30


def test_a_steps_peaks_over_its_phases():
    phases = [
        {"phase": "rollout", "seconds": 1.0} | memory.named("engine-0", {"allocated_gib": 9.0, "rss_gib": 3.0, "card_gib": 30.0}),
        {"phase": "update"} | memory.named("rank-0", {"allocated_gib": 20.0, "rss_gib": 5.0, "card_gib": 41.0}),
        {"phase": "sync"} | memory.named("engine-1", {"allocated_gib": 12.0, "card_gib": 33.0}),
    ]
    assert phases[1]["memory/rank-0/card_gib"] == 41.0
    assert memory.step_metrics(phases) == {"memory/engine_peak_gib": 12.0, "memory/learner_peak_gib": 20.0, "memory/card_used_gib": 41.0}
    on_cpu = [memory.named("engine-0", {"rss_gib": 3.0}), memory.named("rank-0", {"rss_gib": 2.0})]
    assert memory.step_metrics(on_cpu) == {"memory/engine_peak_gib": 3.0, "memory/learner_peak_gib": 2.0}
    assert memory.step_metrics([{"phase": "reward"}]) == {}


def test_a_meter_on_the_cpu_sees_the_process():
    meter = memory.Meter("cpu")
    meter.begin()
    held = bytearray(64 * 2**20)
    assert meter.end()["rss_gib"] > len(held) / GIB


def test_the_host_is_that_of_the_cgroup_when_it_is_smaller(tmp_path, monkeypatch):
    import psutil

    free, total = memory.host_memory()
    assert 0 < free <= total <= psutil.virtual_memory().total
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.host_memory()[1] == psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB * 3 // 4}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 4}\n")
    assert memory.host_memory() == (GIB // 2, GIB)  # three quarters are in use, of which one is file cache


def test_what_the_host_has_no_room_for_is_refused():
    memory.check_host(9 * GIB, "it", "", (10 * GIB, 20 * GIB))
    with pytest.raises(ResourceError, match=r"states would take 9\.5 GiB of host memory; of this node's 20\.0 GiB, 10\.0 GiB are free"):
        memory.check_host(9.5 * GIB, "rank-0's states", "Do less.", (10 * GIB, 20 * GIB))
