"""S3 by moto, in which a conditional write is atomic, as it is in a real store.

moto checks the condition (`If-Match`, `If-None-Match`) and then writes, in one thread for each request. So of
three processes that create the same object at once, two may succeed. Here one write is done after another.

`python moto_store.py PORT`
"""

import io
import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import run_simple

READS = ("GET", "HEAD")


class AtomicWrites:
    """A WSGI application that does one write after another, and any number of reads beside them."""

    def __init__(self, application: Any) -> None:
        """Take the application that answers the requests."""
        self._application = application
        self._writing = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer a request."""
        if environ["REQUEST_METHOD"] in READS:
            answer: Iterable[bytes] = self._application(environ, start_response)
            return answer
        # The body is read before, so that a client which is stopped in the middle of it holds up nobody.
        if length := environ.get("CONTENT_LENGTH"):
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(length)))
        with self._writing:
            return [*self._application(environ, start_response)]


def main() -> None:
    """Serve until the process is killed."""
    os.environ["MOTO_PORT"] = sys.argv[1]
    application = AtomicWrites(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    main()
