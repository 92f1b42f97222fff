"""MUNGE, by which Slurm's hosts recognize a user: passes a secret on to processes of one user only.

A credential can be decoded by the named user alone, on hosts that share the cluster's key, and
tells who has encoded it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile

from tfdist.errors import ClusterError

_SECONDS = 30.0


def seal(secret: str) -> str:
    """A credential with a secret for processes of this user.

    Raises:
        ClusterError: MUNGE does not work on this host.
    """
    return _run(["munge", f"--restrict-uid={os.getuid()}"], secret)


def unseal(credential: str) -> str:
    """The secret in a credential.

    Raises:
        ClusterError: MUNGE does not work on this host, or another user has encoded it.
    """
    with tempfile.NamedTemporaryFile("r") as metadata:
        secret = _run(["unmunge", f"--metadata={metadata.name}", "--keys=UID"], credential)
        uid = metadata.read().rpartition("(")[2].partition(")")[0]
    if uid != str(os.getuid()):
        raise ClusterError(
            f"The process that answers as rank 0 belongs to another user. Received: user id {uid}. "
            "Set MASTER_PORT to another port for all workers."
        )
    return secret


def _run(command: list[str], text: str) -> str:
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        problem = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        problem = str(error)
    if problem:
        raise ClusterError(
            f"MUNGE does not work on this host: {problem.splitlines()[0]}. Start munged, or export "
            "TFDIST_SECRET before srun."
        )
    return done.stdout
