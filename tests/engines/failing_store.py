"""An object store that speaks S3, and fails now and then: moto's server, behind a WSGI layer."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

# Of the reads of objects, each fifth gets no answer but "try again later".
_EVERY = 5


class FailingStore:
    """Fails some reads.

    Attributes:
        failed: how many reads of objects have failed.
    """

    def __init__(self) -> None:
        self._store = DomainDispatcherApplication(create_backend_app)
        self._numbers = itertools.count(1)
        self.failed = 0

    def __call__(self, environment, start_response):
        """A request, as WSGI has it."""
        listing = "list-type" in environment["QUERY_STRING"]
        reading = environment["REQUEST_METHOD"] == "GET" and not listing
        if reading and next(self._numbers) % _EVERY == 0:
            self.failed += 1
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"]
        return self._store(environment, start_response)


@contextlib.contextmanager
def failing_store() -> Iterator[tuple[FailingStore, str]]:
    """The store, and its address."""
    store = FailingStore()
    server = make_server("127.0.0.1", 0, store, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield store, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
