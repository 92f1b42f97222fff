"""Who listens at this process's address while no connections of the job are being made there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Tenant(Protocol):
    """Listens at the address, and makes room on request."""

    def pause(self) -> None:
        """Stops listening; returns once the address is free."""

    def resume(self) -> None:
        """Listens again."""


class OwnAddress:
    """This process's address, at which one thing at a time can listen.

    Firewalls may allow no other port between the workers, so what connects them has precedence.
    """

    def __init__(self) -> None:
        self._tenant: Tenant | None = None

    @property
    def tenant(self) -> Tenant | None:
        """Who listens here, if anyone does."""
        return self._tenant

    def let(self, tenant: Tenant) -> None:
        """Lets a tenant listen whenever nothing else does."""
        self._tenant = tenant
        tenant.resume()

    def release(self) -> None:
        """Forgets the tenant, which listens on: the next session of this process has it."""
        self._tenant = None

    @contextlib.contextmanager
    def free(self) -> Iterator[None]:
        """Keeps the address free of the tenant inside a `with` block."""
        if self._tenant:
            self._tenant.pause()
        try:
            yield
        finally:
            if self._tenant:
                self._tenant.resume()

    def evict(self) -> None:
        """Frees the address for good."""
        tenant, self._tenant = self._tenant, None
        if tenant:
            tenant.pause()
