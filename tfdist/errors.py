"""The exceptions that tfdist raises for what a user can mend.

Each message is one line: what is wrong, where, and the remedy.
"""

from __future__ import annotations


class TfdistError(Exception):
    """Base class of every error that tfdist itself raises."""


class ClusterError(TfdistError, ValueError):
    """The description of the cluster is wrong, or two workers hold different ones."""


class TlsError(TfdistError, ValueError):
    """TLS is set up wrongly here, or two workers do not trust each other's certificates."""


class RendezvousError(TfdistError, RuntimeError):
    """The workers did not find one another within the deadline."""


class PeerLostError(TfdistError, RuntimeError):
    """A worker of the running group died, or its connection broke."""


class ProgramMismatchError(TfdistError, RuntimeError):
    """The workers run different programs: another model, dataset or order of steps."""


class UnsupportedError(TfdistError, RuntimeError):
    """The chosen communication cannot carry what was asked of it."""


class PartitionError(TfdistError, ValueError):
    """A model cannot be divided into pipeline stages as asked."""


class ScheduleError(TfdistError, ValueError):
    """A schedule of the pipeline lacks a pass, runs one too early, or would never end."""


class LaunchError(TfdistError, RuntimeError):
    """The launcher could not start its workers, or one of them failed."""


class NativeUnavailableError(TfdistError, RuntimeError):
    """The native collectives cannot be compiled or loaded here, or are switched off."""


class ReplicaMismatchError(TfdistError):
    """The replicas of a model do not hold the same weights."""
