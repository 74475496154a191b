"""Jobs that read what none of their processes has: from other shares on a disk, and from peers."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import random
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from jaxckpt.format import names
from tests.faults.coverage_children import resume
from tests.faults.test_coverage import FOUR, STEPS, run
from tests.run.test_peers import NOWHERE, restored, train
from tests.static_server import served, serving
from tests.waiting import stop_process, wait_until

LIMIT_S = 60


def host_of(root, host):
    return root / f"host{host}" / "local"


CASES = {
    # what: hosts, copies of the state, hosts of the next job, hosts that are peers, and the start
    "one process of two, each with all": ([0, 1], 2, [0], [], 3),
    "one process of two, each with a half": ([0, 1], 1, [1], [], 2),
    "one process and a peer, each with a half": ([0, 1], 1, [1], [0], 3),
    "a new process and two peers": ([0, 1], 1, [5], [0, 1], 3),
    "two of four, and a peer with the other half": (FOUR, 2, [1, 3], [0], 3),
    "new processes and peers in turn": (FOUR, 2, [5, 6, 7], [3, 2], 3),
    "two processes instead of one": ([0], 1, [5, 0], [], 3),
}


@pytest.mark.parametrize("what", CASES)
def test_a_disk_without_a_process_is_read(trial, zygote, ram_path, what):
    """No value is read in the directory, unless no disk has it."""
    hosts, copies, then, peers, wanted = CASES[what]
    run(zygote, ram_path, hosts, STEPS, copies, False, 1 << 30, [NOWHERE], count=len(hosts))
    with trial("57", what), contextlib.ExitStack() as stack:
        urls = [stack.enter_context(served(host_of(ram_path, host))) for host in peers]
        copies = min(copies, 2 * len(then))
        said = run(zygote, ram_path, then, 1, copies, False, 1 << 30, urls, count=len(then))
        assert [one["start"] for one in said] == [wanted] * len(then)
        assert {one["read"] == 0 for one in said} == {wanted == 3}
        assert not [*ram_path.glob("host*/local/**/*tmp*")]


def test_a_disk_that_is_full_while_peers_are_read_hides_no_step(zygote, ram_path):
    """It is not the fault of the peers, and the directory has an older step only."""
    run(zygote, ram_path, [0, 1], STEPS, 1, False, 1 << 30, [NOWHERE], count=2)
    with served(host_of(ram_path, 0)) as one, served(host_of(ram_path, 1)) as other:
        two = {"count": 2, "function": resume}
        full = [6, "write", "/1/", errno.ENOSPC, 9, [one, other]]  # in its second copy
        for said in run(zygote, ram_path, [5, 6], 1, *full, **two):
            assert os.strerror(errno.ENOSPC) in said
            assert "host6" in said
        healthy = [None, "", "", 0, 0, [one, other]]
        assert run(zygote, ram_path, [7, 8], 1, *healthy, **two) == [STEPS, STEPS]


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_a_flipped_bit_on_a_peer_is_never_loaded(trial, ram_path, part):
    """The next peer has the good one; 25 flips in each part."""
    train(ram_path)
    for seed in range(25 * part, 25 * part + 25):
        with trial("57", f"flipped {seed}"):
            draw = random.Random(seed)
            bad = ram_path / f"bad{seed}"
            shutil.copytree(ram_path / "host0", bad)
            files = sorted(p for p in (bad / "3").rglob("*") if p.is_file() and p.stat().st_size)
            file = draw.choices(files, [p.stat().st_size for p in files])[0]
            data = bytearray(file.read_bytes())
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            file.chmod(0o644)
            file.write_bytes(data)
            with served(bad) as wrong, served(ram_path / "host0") as right:
                start, read, _ = restored(ram_path, [wrong, right], host=f"new{seed}")
            assert (start, read) == (3, 0)
            shutil.rmtree(ram_path / f"new{seed}")


@pytest.mark.parametrize("other", ["a peer", "the directory"])
def test_a_stopped_server_is_left_out(trial, ram_path, other):
    train(ram_path)
    with (
        trial("57", f"stopped, {other}"),
        serving(ram_path / "host0") as (url, process),
        served(ram_path / "host0") as good,
    ):
        stop_process(process.pid)
        started_s = time.monotonic()
        start, _, problems = restored(ram_path, [url, good] if other == "a peer" else [url])
        assert time.monotonic() - started_s < LIMIT_S
        assert start == (3 if other == "a peer" else 2)
        assert any(url in text and "left out" in text for text in problems)


@pytest.mark.parametrize("at", [names.RUN, names.RECORD, names.TREE_METADATA, "a value"])
def test_a_server_that_stops_while_it_sends_is_left_out(trial, ram_path, at):
    """What it sends is late, so the next peer is read."""
    train(ram_path)
    goes_on = threading.Event()

    def late(path, data):
        if path.endswith(at) or (at == "a value" and "/d/" in path and len(data) > 1 << 13):
            goes_on.wait(LIMIT_S)
        return data

    with (
        trial("57", f"stopped while it sends {at}"),
        served(ram_path / "host0", change=late) as url,
        served(ram_path / "host0") as good,
    ):
        started_s = time.monotonic()
        start, read, problems = restored(ram_path, [url, good])
        assert time.monotonic() - started_s < LIMIT_S
        goes_on.set()
        assert (start, read) == (3, 0)
        assert any(url in text and "left out" in text for text in problems)


# --- servers of other programs ---------------------------------------------------------------

NGINX = """daemon off; pid {folder}/pid; error_log stderr; worker_processes 1; {user}
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
    uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            root {root};
            auth_basic files;
            auth_basic_user_file {folder}/users;
            disable_symlinks on;
            limit_except GET {{ deny all; }}
        }}
    }}
}}
"""


def nginx(root, folder, port):
    words = ["openssl", "passwd", "-apr1", "s3cret"]
    password = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    (folder / "users").write_text(f"ann:{password}")
    user = "user root;" if os.getuid() == 0 else ""
    config = NGINX.format(folder=folder, root=root, port=port, user=user)
    (folder / "nginx.conf").write_text(config)
    return ["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)]


def rclone(root, folder, port):
    login = ["--user", "ann", "--pass", "s3cret", "--config", str(folder / "none")]
    return [
        "rclone",
        "serve",
        "webdav",
        str(root),
        "--read-only",
        f"--addr=127.0.0.1:{port}",
        *login,
    ]


def answers(port):
    with (
        contextlib.suppress(OSError),
        contextlib.closing(socket.create_connection(("127.0.0.1", port), 1)),
    ):
        return True
    return False


@contextlib.contextmanager
def program(command, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = command(folder / "host0", folder, port)
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: answers(port))
            yield port
        finally:
            process.terminate()


def status_of(port, method, path, headers=None):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request(method, path, b"x" if method == "PUT" else None, headers or {})
        return connection.getresponse().status


@pytest.mark.parametrize("command", [rclone, nginx])
def test_a_usual_server_is_a_peer(ram_path, monkeypatch, command):
    """It refuses strangers and writes."""
    train(ram_path)
    monkeypatch.setenv("JAXCKPT_PEER_USER", "ann")
    with program(command, ram_path) as port:
        url, basic = f"http://127.0.0.1:{port}", {"Authorization": "Basic YW5uOnMzY3JldA=="}
        monkeypatch.setenv("JAXCKPT_PEER_PASSWORD", "wr0ng")
        assert restored(ram_path, [url], host="stranger")[0] == 2
        monkeypatch.setenv("JAXCKPT_PEER_PASSWORD", "s3cret")
        assert restored(ram_path, [url])[:2] == (3, 0)
        assert status_of(port, "GET", "/_jaxckpt.run") == 401
        assert status_of(port, "GET", "/_jaxckpt.run", basic) == 200
        assert status_of(port, "PUT", "/_jaxckpt.run", basic) >= 400
        assert status_of(port, "DELETE", "/_jaxckpt.run", basic) >= 400
    assert Path(ram_path / "host0" / "_jaxckpt.run").exists()
