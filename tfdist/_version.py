"""The version of tfdist, and the newest tested versions of its dependencies. Imports no module."""

__version__ = "0.1.0"

NEWEST_TESTED = {"tensorflow": "2.21", "keras": "3.15"}
"""The newest versions that the tests have been run with."""


def is_newer(found: str, tested: str) -> bool:
    """Whether the version `found` is newer than the release `tested`. Ignores patch versions.

    Example:
        >>> is_newer("3.15.4", "3.15"), is_newer("3.16.0", "3.15")
        (False, True)
    """
    return [int(part) for part in found.split(".")[:2]] > [int(part) for part in tested.split(".")]
