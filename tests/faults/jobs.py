"""Jobs of several real processes over `jax.distributed`, forked: they start in a third of a second.

A child of a zygote forks the members, reports when each of them ends, and kills members that hang.
A member runs a plain function of some module, called with a `Member` of `tests.multiprocess`:

    with started(zygote, children.save, count=3, args=[root]) as job:
        job.wait_for(1, "writing")     # a point that the function has reached
        job.kill(1)                    # or job.stop(1), SIGSTOP
        ended = job.wait()             # [Ended(status, result, out), ...]
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import math
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import multiprocess
from tests.faults.zygote import say
from tests.multiprocess import Member
from tests.waiting import stop_process, wait_until, waited_until

_START_TRIES = 3
HANGS = "hangs"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a member ended.

    Attributes:
        status: Its exit status, -n for signal n, or HANGS.
        result: What its function returned; None if it did not return.
        out: What it printed.
    """

    status: int | str
    result: Any
    out: str


@contextlib.contextmanager
def started(zygote, function, **options):
    """A job whose members are connected; at the end all that is left of it is killed."""
    with tempfile.TemporaryDirectory(prefix="jaxckpt-job-") as directory:
        job = Job(zygote, Path(directory), function, **options)
        try:
            job.start()
            yield job
        finally:
            job.close()


class Job:
    """See `started`."""

    def __init__(
        self,
        zygote,
        directory,
        function,
        *,
        count=3,
        devices=2,
        args=(),
        heartbeat_s=100,
        limit_s=40,
        recoverable=False,
        namespaces=(),
        address="127.0.0.1",
    ):
        """Says what runs.

        Args:
            devices: Of each member.
            limit_s: After so long what still runs hangs, and is killed.
            recoverable: Whether the others live on when one dies.
            namespaces: Files of the network namespaces that the members live in.
            address: Where the others find member 0.
        """
        self.count = count
        self._zygote = zygote
        self._directory = directory
        self._port = None
        self._options = {
            "function": f"{function.__module__}:{function.__name__}",
            "count": count,
            "devices": devices,
            "args": json.loads(json.dumps(list(args), default=os.fspath)),
            "heartbeat_s": heartbeat_s,
            "limit_s": limit_s,
            "recoverable": recoverable,
            "namespaces": list(namespaces),
            "address": address,
        }
        self._over = True
        self._stopped = set()

    def start(self):
        """Starts the members; another program may take the port meanwhile, so it may try again."""
        for attempt in range(_START_TRIES):
            self._path = self._directory / str(attempt)
            self._path.mkdir()
            self._port = multiprocess._reserve_port()
            port = self._port.getsockname()[1]
            options = {**self._options, "port": port, "path": str(self._path)}
            self._zygote.start(supervise, options)
            self._over, self._ended = False, {}
            self.pids = self._zygote.answer()["members"]
            wait_until(lambda: self._has_failed() or self._is_connected())
            if not self._has_failed():
                return
            self.close()
        raise AssertionError(f"did not start\n{self._outs()}")

    def _has_failed(self):
        return any((self._path / f"{index}.failed").exists() for index in range(self.count))

    def _is_connected(self):
        return all((self._path / f"{n}.at.connected").exists() for n in range(self.count))

    def wait_for(self, index, point):
        """Waits until a member has reached a point; fails if it ends before, or hangs."""

        def is_there():
            has_ended = (self._path / f"{index}.ended").exists()
            if (self._path / f"{index}.at.{point}").exists():
                return True
            assert not has_ended, f"{index} ended before {point!r}\n{self._outs()}"
            return False

        wait_until(is_there, limit_s=self._options["limit_s"] + 30)

    def has_reached(self, point):
        """Whether any member has."""
        return any((self._path / f"{index}.at.{point}").exists() for index in range(self.count))

    def has_returned(self, index):
        """Whether the function of a member has; the member may wait for others to end."""
        return (self._path / f"{index}.result").exists()

    def release(self, point):
        """Lets all members that wait for it continue."""
        (self._path / f"go.{point}").touch()

    def kill(self, index):
        os.kill(self.pids[index], signal.SIGKILL)

    def stop(self, index):
        stop_process(self.pids[index])
        self._stopped.add(index)

    def resume(self, index):
        os.kill(self.pids[index], signal.SIGCONT)
        self._stopped.discard(index)

    def signal(self, index, number):
        os.kill(self.pids[index], number)

    def wait_for_others(self):
        """Waits until all members have ended except the stopped ones."""
        while running := set(range(self.count)) - self._ended.keys() - self._stopped:
            if running == {0}:  # the coordinator goes last
                self.release("last")
            self._read()

    def wait(self):
        """Waits until all members have ended; kills the stopped ones."""
        self.wait_for_others()
        for index in self._stopped - self._ended.keys():
            self.kill(index)
        while not self._over:
            self._read()
        return [self.ended(index) for index in range(self.count)]

    def ended(self, index):
        """How a member ended that has."""
        file = self._path / f"{index}.result"
        result = json.loads(file.read_text()) if file.exists() else None
        out = (self._path / f"{index}.out").read_text(errors="replace")
        return Ended(self._ended[index], result, out)

    def _read(self):
        word = self._zygote.answer()
        if "status" in word:
            self._over = True
        else:
            self._ended[word["member"]] = word["ended"]

    def close(self):
        """Kills what still runs."""
        if not self._over:
            for index in set(range(self.count)) - self._ended.keys():
                with contextlib.suppress(ProcessLookupError):
                    self.kill(index)
            while not self._over:
                self._read()
        if self._port is not None:
            self._port.close()
            self._port = None

    def _outs(self):
        return "\n".join(
            f"--- {file.name}\n{file.read_text(errors='replace')}"
            for file in sorted(self._path.glob("*.out"))
        )


# --- inside the processes ----------------------------------------------------------------------


def supervise(options):
    """Forks the members and says how each of them ends."""
    pids = []
    for index in range(options["count"]):
        pid = os.fork()
        if pid == 0:
            _be_member(index, options)
        pids.append(pid)
    say(members=pids)
    running = dict(enumerate(pids))
    deadline = time.monotonic() + options["limit_s"]

    def have_ended():
        hangs = time.monotonic() > deadline
        for index, pid in list(running.items()):
            if hangs:
                _show_threads(pid)
                os.kill(pid, signal.SIGKILL)
            found, status = os.waitpid(pid, 0 if hangs else os.WNOHANG)
            if found:
                del running[index]
                Path(options["path"], f"{index}.ended").touch()
                say(member=index, ended=HANGS if hangs else os.waitstatus_to_exitcode(status))
        return not running

    waited_until(have_ended, limit_s=math.inf)


def _show_threads(pid):
    os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGUSR2)
    time.sleep(0.3)  # it is killed next; this lets it print


def _be_member(index, options):
    """Runs the function of a member; never returns."""
    path = Path(options["path"])
    out = os.open(path / f"{index}.out", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    status = 1
    try:
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
        if options["namespaces"]:
            enter(options["namespaces"][index], options["address"])
        me = Member(index=index, count=options["count"], path=path)
        _connect(me, options)
        me.reach("connected")
        module, _, name = options["function"].partition(":")
        result = getattr(importlib.import_module(module), name)(me, *options["args"])
        partial = path / f"{index}.partial"
        partial.write_text(json.dumps(result))
        partial.rename(path / f"{index}.result")
        status = 0
    except BaseException:
        traceback.print_exc()
        (path / f"{index}.failed").touch()
    sys.stdout.flush()
    sys.stderr.flush()
    if index == 0 and status == 0:
        me.wait_for("last")
    os._exit(status)  # without JAX's shutdown, which would wait for those who are dead


def enter(namespace, address):
    """Moves this process into a network namespace, in which its host is called as its address.

    Args:
        address: Of any host there. Gloo listens at the address of this host's name.
    """
    with open(namespace) as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns")
        if libc.unshare(0x04000000):  # CLONE_NEWUTS
            raise OSError(ctypes.get_errno(), "unshare")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect((address, 1))  # sends nothing
        socket.sethostname(one.getsockname()[0])


def _connect(me, options):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]  # it would get what gRPC says to the others
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options['devices']}"
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_recoverability", options["recoverable"])
    jax.distributed.initialize(
        f"{options['address']}:{options['port']}",
        num_processes=me.count,
        process_id=me.index,
        initialization_timeout=30,
        heartbeat_timeout_seconds=options["heartbeat_s"],
        shutdown_timeout_seconds=5,
    )
