"""Cleaning up after a head: its processes, whoever leads them."""

from __future__ import annotations

import os
import subprocess

import psutil

from rlkit import localhead
from rlkit.eval import sources


def test_members_of_a_dead_head_are_ended_even_when_nobody_reaps_its_leader(tmp_path, monkeypatch):
    """In a container without an init the killed leader stays a zombie, and its pid taken."""
    monkeypatch.setenv("RLKIT_HOME", str(tmp_path))
    leader = subprocess.Popen(["bash", "-c", "sleep 300 & echo $!; wait"], start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    member = psutil.Process(int(leader.stdout.readline()))
    process = psutil.Process(leader.pid)
    head = localhead.Head("gone", "", 0, "", leader.pid, process.create_time(), "", str(tmp_path / "temp"), {})
    assert localhead.alive(head)
    process.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        pass
    assert not localhead.alive(head)
    assert member.is_running()
    localhead._clean(head)
    assert not localhead._runs(member)
    leader.wait()


def test_a_process_that_has_the_pid_of_a_dead_head_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("RLKIT_HOME", str(tmp_path))
    other = subprocess.Popen(["sleep", "300"], start_new_session=True)
    started = psutil.Process(other.pid).create_time()
    head = localhead.Head("gone", "", 0, "", other.pid, started - 3600, "", str(tmp_path / "temp"), {})
    assert not localhead.alive(head)
    localhead._clean(head)
    assert other.poll() is None
    other.kill()
    other.wait()


def test_clusters_of_killed_evaluations_are_ended(monkeypatch):
    """Those whose process is gone; not those of one that runs, and none that somebody named."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = [f"eval-{gone.pid}-0a1b2c", f"eval-{os.getpid()}-0a1b2c", "eval-mine", "laptop"]
    heads = [localhead.Head(name, "", 0, "", 0, 0.0, "", "", {}) for name in names]
    ended: list[str] = []
    monkeypatch.setattr(localhead, "living", lambda: heads)
    monkeypatch.setattr(localhead, "stop", ended.append)
    monkeypatch.setattr(localhead, "forget", lambda name: None)
    sources._end_orphans()
    assert ended == names[:1]
