"""The environment variables that a job takes along to other hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfdist._src.cluster.auth.handshake import VARIABLE as SECRET

# They must be the same for all workers, but for these: of one host, of one launcher, and the
# secret, which is passed on in other ways, or made anew.
_SETTINGS = "TFDIST_"
_NOT_SENT = frozenset(
    {"TFDIST_HOST", "TFDIST_GENERATION", "TFDIST_PROGRESS_FILE", "TFDIST_WITNESS", SECRET}
)


def forwarded(environment: Mapping[str, str], chosen: Sequence[str]) -> dict[str, str]:
    """The variables to send: the settings of tfdist, and the chosen ones.

    Args:
        environment: that of the command.
        chosen: `"NAME"`, or `"NAME=VALUE"`.

    Raises:
        ValueError: a chosen variable is not set.

    Example:
        >>> forwarded({"TFDIST_CODEC": "fp16", "A": "1", "B": "2"}, ["A", "C=3"])
        {'TFDIST_CODEC': 'fp16', 'A': '1', 'C': '3'}
    """
    sent = {
        name: value
        for name, value in environment.items()
        if name.startswith(_SETTINGS) and name not in _NOT_SENT
    }
    for choice in chosen:
        name, given, value = choice.partition("=")
        if not name:
            raise ValueError(f"-x must be NAME or NAME=VALUE. Received: {choice!r}")
        if not given and name not in environment:
            raise ValueError(
                f"-x {name}: this variable is not set; set it, or pass -x {name}=VALUE"
            )
        sent[name] = value if given else environment[name]
    return sent
