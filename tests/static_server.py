"""A static server of files with ranges and a password, as a program or in a thread of a test."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import os
import re
import subprocess
import sys
import threading

RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Files(http.server.SimpleHTTPRequestHandler):
    """Serves files of a directory, and lists none.

    Args:
        login: "user:password", or "".
        seen: Receives the path and the headers of each request.
        change: Takes a path and the bytes to send, and returns the bytes that are sent.
        has_ranges: Whether it sends parts of files.
        moved: The URL of another server, to which it redirects; or "".
    """

    protocol_version = "HTTP/1.1"

    def __init__(
        self, *args, login="", seen=None, change=None, has_ranges=True, moved="", **options
    ):
        self.login, self.has_ranges, self.moved = login, has_ranges, moved
        self.seen = [] if seen is None else seen
        self.change = change or (lambda path, data: data)
        super().__init__(*args, **options)

    def do_GET(self):
        self.seen.append((self.path, dict(self.headers)))
        wanted = f"Basic {base64.b64encode(self.login.encode()).decode()}"
        if self.login and self.headers["Authorization"] != wanted:
            return self.answer(401, b"", {"WWW-Authenticate": 'Basic realm="files"'})
        if self.moved:
            return self.answer(302, b"", {"Location": self.moved + self.path})
        file = self.translate_path(self.path)
        if not os.path.isfile(file):
            return self.answer(404, b"")
        with open(file, "rb") as opened:
            data, asked = opened.read(), RANGE.fullmatch(self.headers["Range"] or "")
        if not (asked and self.has_ranges):
            return self.answer(200, self.change(self.path, data))
        first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
        sent = self.change(self.path, data[first : last + 1])
        return self.answer(206, sent, {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def answer(self, status, data, headers=None):
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": len(data)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args):
        """Says nothing."""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Says nothing of a client that has gone."""


def made(directory, host="127.0.0.1", port=0, **options):
    return Server((host, port), functools.partial(Files, directory=directory, **options))


@contextlib.contextmanager
def served(directory, **options):
    """Serves a directory from a thread; yields the URL."""
    with made(directory, **options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def serving(directory):
    """Serves a directory from a process; yields the URL and the process."""
    command = [sys.executable, "-m", "tests.static_server", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


if __name__ == "__main__":
    where = {"host": sys.argv[2], "port": int(sys.argv[3])} if len(sys.argv) > 2 else {}
    with made(sys.argv[1], **where) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()
