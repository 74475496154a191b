"""Runs moto's server at the port given, one request at a time.

By itself it compares and writes in two steps, and of many conditional writers two may win.
"""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import run_simple

_app: Any = DomainDispatcherApplication(create_backend_app)
_lock = threading.Lock()  # held by the request that is answered


def _one_at_a_time(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    # Before the lock: a client that stops while it sends must not stop the others.
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    with _lock:
        return list(_app({**environ, "wsgi.input": io.BytesIO(body)}, start_response))


if __name__ == "__main__":
    run_simple(
        "127.0.0.1",
        int(sys.argv[1]),
        _one_at_a_time,
        threaded=True,
        request_handler=MotoRequestHandler,
    )
