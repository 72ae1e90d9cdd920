"""Views over a run, imported as ``rlkit.widgets``. They read the run's event log and change nothing."""

from rlkit.widgets.curves import Curves

__all__ = ["Curves"]
