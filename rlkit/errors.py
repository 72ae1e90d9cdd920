"""Every error that rlkit raises on purpose, as one tree.

    RlkitError
    ├── ConfigError             (ValueError)   a setting that is unknown, out of range or contradicts another
    ├── ClusterError
    │   ├── ConnectError        (ConnectionError) nothing answers at the address
    │   ├── AuthError           the cluster wants a token that is missing or wrong
    │   ├── VersionMismatchError   Ray or Python differ between this process and the cluster
    │   └── ResourceError       the cluster lacks GPUs, CPUs, memory or nodes that the config asks for
    ├── DataError               (ValueError)   a task file, row or prompt that cannot be used
    ├── ModelError              a model path without weights, config or tokenizer
    ├── RolloutError            generation failed, or was asked for something impossible
    │   └── TooLongError        no prompt leaves room for a response in the engines' context
    ├── RewardError             a reward crashed, or returned NaN, infinity or the wrong shape
    ├── BatchError              (ValueError)   steps out of order, or a batch that cannot be trained on
    │   └── StaleBatchError     the batch was sampled by a policy version that is too old
    ├── LearnerError            the update failed
    │   └── LogprobGapError     sampler and learner disagree about the log-probs of the same tokens
    ├── SyncError               the weights that an engine holds are not the learner's
    ├── RunError                (RuntimeError) a run in the wrong state for what was asked
    │   ├── RunBusyError        another kernel is driving the run
    │   └── SpecChangedError    the same part of a run was asked for again with other settings
    ├── CheckpointError         a checkpoint that could not be written or read
    ├── ActorDiedError          a process of the run is gone
    ├── OutOfMemoryError        (MemoryError)  a GPU is full; names the phase, the numbers and the setting to change
    ├── NotebookError           a cell of a notebook that was run headless failed
    └── DeadlineError           (TimeoutError) a wait that ran past its limit

Each message says what was found, what is allowed and what to do. All of them hold only their message, so they can be pickled and
travel from a worker to the notebook unchanged.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RlkitError(Exception):
    """Base of every error that rlkit raises on purpose."""


class ConfigError(RlkitError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class ClusterError(RlkitError):
    """The cluster cannot be used as asked."""


class ConnectError(ClusterError, ConnectionError):
    """Nothing that speaks Ray answers at the address."""


class AuthError(ClusterError):
    """The cluster's token is missing or wrong."""


class VersionMismatchError(ClusterError):
    """Ray or Python differ between this process and the cluster."""


class ResourceError(ClusterError):
    """The cluster does not have what the config asks for."""


class DataError(RlkitError, ValueError):
    """A task file, a row or a prompt cannot be used."""


class ModelError(RlkitError):
    """A model cannot be found or is incomplete."""


class RolloutError(RlkitError):
    """Generation failed or was asked for something impossible."""


class TooLongError(RolloutError):
    """No prompt of a call leaves room for a response in the engines' context."""


class RewardError(RlkitError):
    """A reward crashed or returned something that is not a finite number a sample."""


class BatchError(RlkitError, ValueError):
    """Steps were called out of order, or the batch cannot be trained on."""


class StaleBatchError(BatchError):
    """The batch was sampled by a policy version older than ``max_lag`` allows."""


class LearnerError(RlkitError):
    """An update failed."""


class LogprobGapError(LearnerError):
    """Sampler and learner log-probs of the same tokens are further apart than ``max_logprob_gap``."""


class SyncError(RlkitError):
    """An engine does not hold the learner's weights."""


class RunError(RlkitError, RuntimeError):
    """The run is in the wrong state for what was asked."""


class RunBusyError(RunError):
    """Another kernel is driving this run."""


class SpecChangedError(RunError):
    """A part of the run exists with other settings than those asked for now."""


class CheckpointError(RlkitError):
    """A checkpoint could not be written or read."""


class ActorDiedError(RlkitError):
    """A process of the run has died."""


class OutOfMemoryError(RlkitError, MemoryError):
    """A GPU has no room for what a phase asked for; the message names phase, numbers and the setting to change."""


class NotebookError(RlkitError):
    """A cell of a notebook that was run headless failed, or its kernel died."""


class DeadlineError(RlkitError, TimeoutError):
    """A wait ran past its limit; the message names what was waited for and the setting that holds the limit."""


def nearest(word: str, known: Iterable[str]) -> str:
    """``", did you mean 'x'?"`` for the known word closest to ``word``, or an empty string when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""
