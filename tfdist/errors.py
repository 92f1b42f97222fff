"""Exceptions for problems that the user can fix.

The message of each exception is a single line that states what is wrong, where, and how to fix it.
"""


class TfdistError(Exception):
    """Base class of all tfdist errors."""


class ClusterError(TfdistError, ValueError):
    """The cluster description is invalid, or differs between workers."""


class TlsError(TfdistError, ValueError):
    """TLS is misconfigured, or two workers do not trust each other's certificates."""


class RendezvousError(TfdistError, RuntimeError):
    """The workers did not find one another before the deadline."""


class PeerLostError(TfdistError, RuntimeError):
    """A worker died, or its connection broke, while the job was running."""


class GroupLostError(TfdistError, RuntimeError):
    """The remaining workers cannot continue: too few are left, or too much state is lost."""


class ProgramMismatchError(TfdistError, RuntimeError):
    """The workers run different programs: the model, dataset or order of steps differs."""


class UnsupportedError(TfdistError, RuntimeError):
    """The requested operation, model or setting is not supported here."""


class PartitionError(TfdistError, ValueError):
    """A model cannot be divided into pipeline stages as requested."""


class ScheduleError(TfdistError, ValueError):
    """A pipeline schedule lacks a pass, runs a pass too early, or would deadlock."""


class LaunchError(TfdistError, RuntimeError):
    """The launcher could not start its workers, or one of them failed."""


class NativeUnavailableError(TfdistError, RuntimeError):
    """The native collectives cannot be compiled or loaded, or are disabled."""


class ReplicaMismatchError(TfdistError):
    """The replicas of a model have different weights."""


class SnapshotError(TfdistError, ValueError):
    """A training run cannot be resumed from the snapshots in its directory."""
