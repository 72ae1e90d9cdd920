"""Views over a run, imported as ``rlkit.widgets``.

They read a run's event log and its monitors through `rlkit.watch`, live or from disk, and change nothing but by `RunControls`' buttons.
"""

from rlkit.widgets.controls import RunControls
from rlkit.widgets.curves import RewardCurves
from rlkit.widgets.dashboard import Comparison, Dashboard, compare
from rlkit.widgets.gpus import GpuMonitor, PhaseTimeline
from rlkit.widgets.health import Health
from rlkit.widgets.rollouts import RolloutBrowser

__all__ = ["Comparison", "Dashboard", "GpuMonitor", "Health", "PhaseTimeline", "RewardCurves", "RolloutBrowser", "RunControls", "compare"]
