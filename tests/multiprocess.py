"""Starts real multi-process JAX jobs on this machine's CPU, for tests; never hangs, never leaks.

A job is `count` Python processes over `jax.distributed`, each with `devices_per_process` virtual
CPU devices. Each one calls the same function of a file in `tests/workers/`:

    # tests/workers/saves.py
    def save_twice(me, root):            # me: Member; then the `args` of the caller, through JSON
        processes = jaxckpt.multihost.current()
        ...
        me.reach("written")              # the test may job.wait_for(1, "written")
        me.wait_for("go")                # until the test says job.release("go")
        return {"steps": [1, 2]}         # JSON; becomes `.result`

    # tests/test_saves.py
    @pytest.mark.multihost
    def test_two_saves(run_processes, tmp_path):
        done = run_processes("saves:save_twice", count=2, args=[tmp_path])
        assert done[0].result == {"steps": [1, 2]}

    def test_a_kill(start_processes, tmp_path):
        job = start_processes("saves:save_twice", count=3, args=[tmp_path])
        job.wait_for(1, "written")       # a point that the worker has reached
        job.kill(1)                      # SIGKILL; job.stop(1) and job.resume(1): SIGSTOP, SIGCONT
        done = job.wait(check=False)     # [Finished(index, returncode, stdout, result), ...]

The processes are forked from one that has imported JAX and jaxckpt already: a start costs a tenth
of the time. With `fresh=True` each is a new interpreter, for tests of how one ends, and so that a
set has another order in each.

Run as a script, this file is the first thing that each of the processes executes.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib.util
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn, Self

from tests.waiting import stop_process, waited_until

TESTS = Path(__file__).resolve().parent
_START_TRIES = 3
_START_TIMEOUT_S = 60.0
# What is left of a job when one of its processes has failed gets this long to end by itself.
_GRACE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One process that ended. `result` is what its function returned; None if it did not return."""

    index: int
    returncode: int
    stdout: str  # with stderr
    result: Any


class JobFailed(AssertionError):
    """A process of a job failed, or the job ran out of time. The message has every output."""


class Job:
    """A job that runs. Use it as a context manager, or let the fixture end it."""

    def __init__(
        self,
        worker: str,
        *,
        count: int = 2,
        devices_per_process: int = 4,
        args: Sequence[object] = (),
        timeout_s: float = 240.0,
        heartbeat_s: int = 100,
        fresh: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the processes and returns when all of them are connected.

        Args:
            worker: "file:function", the file in tests/workers, or an absolute path.
            args: Handed to the function after `me`, through JSON; paths become strings.
            timeout_s: For the whole job, from now. Then every process is killed. Stay below
                pytest's `faulthandler_timeout`, which ends the whole test run.
            heartbeat_s: After so long without a sign of life from one, JAX aborts all the others.
            fresh: Whether each process is a new interpreter instead of a fork.
            env: Added to the environment of every process.
        """
        self.worker = worker
        self.count = count
        self._deadline = time.monotonic() + timeout_s
        self._directory = tempfile.TemporaryDirectory(prefix="jaxckpt-job-")
        self._port: socket.socket | None = None
        self.processes: Sequence[subprocess.Popen[bytes] | Forked] = []
        self._start_processes = _start_fresh if fresh else _fork
        options = {
            "worker": worker,
            "count": count,
            "args": list(args),
            "timeout_s": timeout_s,
            "heartbeat_s": heartbeat_s,
            "env": _environment(devices_per_process, env or {}),
        }
        try:
            self._start(options)
        except BaseException:
            self.close()
            raise

    def reached(self, index: int, point: str) -> bool:
        """Says whether process `index` has called `me.reach(point)`."""
        return (self._path / f"{index}.at.{point}").exists()

    def wait_for(self, index: int, point: str) -> None:
        """Waits until process `index` has reached `point`; fails if it ends before."""
        process = self.processes[index]
        waited_until(
            lambda: self.reached(index, point) or process.poll() is not None,
            limit_s=self._left_s(),
        )
        if not self.reached(index, point):
            ended = process.poll()
            why = "ran out of time" if ended is None else f"ended with {ended}"
            self._fail(f"process {index} {why} before it reached {point!r}")

    def release(self, point: str) -> None:
        """Lets every process that waits in `me.wait_for(point)` continue."""
        (self._path / f"go.{point}").touch()

    def kill(self, index: int) -> None:
        """Kills one process at once (SIGKILL)."""
        self._signal(index, signal.SIGKILL)
        self.processes[index].wait()

    def stop(self, index: int) -> None:
        """Makes one process hang (SIGSTOP); `wait` kills it when all the others have ended."""
        self._note_casualty()
        stop_process(self.processes[index].pid)
        self._stopped.add(index)

    def resume(self, index: int) -> None:
        """Undoes `stop`."""
        self._signal(index, signal.SIGCONT)
        self._stopped.discard(index)

    def wait(self, *, check: bool = True) -> list[Finished]:
        """Waits until every process has ended.

        Args:
            check: Fail, with all outputs, when a process ended with other than 0. Then the others
                get a few seconds to end too. Without it, only running out of time fails.
        """

        def have_ended() -> bool:
            running = self._running()
            awake = [i for i in running if i not in self._stopped]
            # The coordination service lives in process 0: it may go only when nobody needs it.
            if awake == [0]:
                self.release("last")
            if not awake:
                for index in running:
                    self.kill(index)
            return not running

        def ended_or_failed() -> bool:
            return have_ended() or any(p.returncode for p in self.processes)

        ended = waited_until(ended_or_failed, limit_s=self._left_s())
        if any(p.returncode for p in self.processes):
            self._note_casualty()
            grace_s = _GRACE_S if check else self._left_s()
            ended = waited_until(have_ended, limit_s=min(grace_s, self._left_s())) or check
        if not ended:
            self._fail(f"ran out of time; still running: {self._running()}")
        if check and any(p.returncode for p in self.processes):
            self._fail("a process failed")
        return [
            Finished(
                index=index,
                returncode=process.returncode,
                stdout=self._output(index),
                result=self._result(index),
            )
            for index, process in enumerate(self.processes)
        ]

    def outputs(self) -> str:
        """Everything that the processes have printed so far, for an error message."""
        lines = []
        for index, process in enumerate(self.processes):
            lines += [
                f"\n--- process {index}: {_ending(process.poll())} ---",
                self._output(index).rstrip(),
            ]
        return "\n".join(lines)

    def close(self) -> None:
        """Kills what still runs and removes the job's files."""
        self._kill_all()
        if self._port is not None:
            self._port.close()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, options: Mapping[str, object]) -> None:
        """Launches the processes until all are connected; a strange port or a busy machine may
        take a second try."""
        outputs = ""
        for attempt in range(_START_TRIES):
            self._path = Path(self._directory.name, str(attempt))
            self._path.mkdir()
            self._launch(options)
            if self._has_started():
                return
            outputs = self.outputs()
            self._kill_all()
        raise JobFailed(f"{self.worker}: did not start in {_START_TRIES} tries{outputs}")

    def _launch(self, options: Mapping[str, object]) -> None:
        if self._port is not None:
            self._port.close()
        self._port = _reserve_port()
        options = {**options, "port": self._port.getsockname()[1], "path": str(self._path)}
        self._stopped: set[int] = set()
        self.processes = self._start_processes(json.dumps(options, default=os.fspath), self.count)

    def _has_started(self) -> bool:
        """Waits until all are connected; False when one ended before or it takes too long."""

        def are_there() -> bool:
            return all(self.reached(index, "connected") for index in range(self.count))

        def one_has_ended() -> bool:
            return any(
                p.poll() is not None and not self.reached(i, "connected")
                for i, p in enumerate(self.processes)
            )

        limit_s = min(self._left_s(), _START_TIMEOUT_S)
        waited_until(lambda: are_there() or one_has_ended(), limit_s=limit_s)
        return are_there()

    def _signal(self, index: int, number: signal.Signals) -> None:
        if number != signal.SIGCONT:
            self._note_casualty()
        self.processes[index].send_signal(number)

    def _note_casualty(self) -> None:
        """Records a dead process, so that no process calls JAX's shutdown: it would hang."""
        (self._path / "casualty").touch()

    def _running(self) -> list[int]:
        return [i for i, p in enumerate(self.processes) if p.poll() is None]

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _fail(self, why: str) -> NoReturn:
        alive = [p for p in self.processes if p.poll() is None]
        for process in alive:  # makes it print where each of its threads is
            process.send_signal(signal.SIGUSR1)
        if alive:
            time.sleep(0.5)
        outputs = self.outputs()
        self._kill_all()
        raise JobFailed(f"{self.worker}: {why}{outputs}")

    def _kill_all(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()

    def _output(self, index: int) -> str:
        return (self._path / f"{index}.out").read_text(encoding="utf-8", errors="replace")

    def _result(self, index: int) -> Any:
        path = self._path / f"{index}.result"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def run_processes(
    worker: str,
    *,
    count: int = 2,
    devices_per_process: int = 4,
    args: Sequence[object] = (),
    timeout_s: float = 240.0,
    heartbeat_s: int = 100,
    fresh: bool = False,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> list[Finished]:
    """Runs a job to its end: `Job`, then `Job.wait`.

    Raises:
        JobFailed: a process ended with other than 0 (unless `check=False`), or time ran out.
    """
    with Job(
        worker,
        count=count,
        devices_per_process=devices_per_process,
        args=args,
        timeout_s=timeout_s,
        heartbeat_s=heartbeat_s,
        fresh=fresh,
        env=env,
    ) as job:
        return job.wait(check=check)


def _start_fresh(encoded: str, count: int) -> list[subprocess.Popen[bytes]]:
    """Starts new interpreters."""
    options = json.loads(encoded)
    processes = []
    for index in range(count):
        with Path(options["path"], f"{index}.out").open("wb") as out:
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, str(index), encoded],
                    stdin=subprocess.DEVNULL,
                    stdout=out,  # a file: a full pipe would block the worker
                    stderr=subprocess.STDOUT,
                    env=options["env"],
                )
            )
    return processes


def _fork(encoded: str, count: int) -> list[Forked]:
    """Has the process that has imported everything fork."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(encoded.encode() + b"\n")
    server.stdin.flush()
    path = Path(json.loads(encoded)["path"])
    pids = json.loads(server.stdout.readline())
    return [Forked(pid, path / f"{index}.ended") for index, pid in enumerate(pids)]


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    """Starts the process that forks, which ends with this one."""
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(1, {}),
    )
    atexit.register(server.communicate)
    return server


class Forked:
    """A process that another one has forked, with what `Job` needs of `subprocess.Popen`."""

    def __init__(self, pid: int, ended: Path) -> None:
        """The parent writes to `ended` how it ended."""
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended

    def poll(self) -> int | None:
        if self.returncode is None and self._ended.exists():
            self.returncode = int(self._ended.read_text())
        return self.returncode

    def wait(self) -> None:
        waited_until(lambda: self.poll() is not None, limit_s=math.inf)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def load(path: Path) -> ModuleType:
    """Imports a file by its path, whatever `sys.path` says."""
    spec = importlib.util.spec_from_file_location(f"jaxckpt_tests_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _reserve_port() -> socket.socket:
    """A free loopback port that stays ours as long as the socket is open.

    gRPC binds with SO_REUSEPORT, so the coordinator can bind it too; as this socket never
    listens, every connection goes to the coordinator, and no other job is given the number.
    """
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


def _environment(devices: int, extra: Mapping[str, str]) -> dict[str, str]:
    # A proxy would get the loopback traffic of gRPC.
    env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    path = [str(TESTS.parent), *filter(None, [env.get("PYTHONPATH")])]
    return {
        **env,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        **extra,
    }


def _ending(returncode: int | None) -> str:
    if returncode is None:
        return "still running"
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit status {returncode}"


# ---- what follows runs inside the processes of a job ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The first argument of a worker function."""

    index: int
    count: int
    path: Path

    def reach(self, point: str) -> None:
        """Tells the test that this process is at `point`."""
        (self.path / f"{self.index}.at.{point}").touch()

    def wait_for(self, point: str) -> None:
        """Waits until the test calls `job.release(point)`; the job's time limit ends the wait."""
        waited_until((self.path / f"go.{point}").exists, limit_s=math.inf)

    def die(self) -> NoReturn:
        """Kills this process at once, as a power cut would."""
        (self.path / "casualty").touch()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def _serve() -> tuple[int, dict[str, Any]]:
    """Forks the processes of a job for each line on stdin; returns only in these."""
    import tensorstore  # noqa: F401

    import jaxckpt

    warnings.simplefilter("ignore")  # of JAX, about forks: none of its threads runs yet
    for name in jaxckpt.__all__:
        getattr(jaxckpt, name)
    gc.freeze()  # no fork looks through, and so copies, what has been imported
    running: dict[int, Path] = {}
    while True:
        if select.select([0], [], [], 0.005 if running else None)[0]:
            encoded = sys.stdin.buffer.readline()
            if not encoded:
                os._exit(0)
            options = json.loads(encoded)
            pids = []
            for index in range(options["count"]):
                if not (pid := os.fork()):
                    return index, options
                running[pid] = Path(options["path"], f"{index}.ended")
                pids.append(pid)
            os.write(1, json.dumps(pids).encode() + b"\n")
        _note_ended(running)


def _note_ended(running: dict[int, Path]) -> None:
    while running and (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
        pid, status = ended
        path = running.pop(pid)
        if path.parent.exists():
            partial = path.with_suffix(".ending")
            partial.write_text(str(os.waitstatus_to_exitcode(status)))
            partial.rename(path)


def _become_member(index: int, options: Mapping[str, Any]) -> None:
    """Gives a fork what a new interpreter gets when it is started."""
    warnings.resetwarnings()
    os.environ.clear()
    os.environ.update(options["env"])
    out = os.open(Path(options["path"], f"{index}.out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)


def _main(index: int, options: Mapping[str, Any]) -> None:
    me = Member(index=index, count=options["count"], path=Path(options["path"]))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Should the test run itself be killed, nobody else ends this process.
    faulthandler.dump_traceback_later(options["timeout_s"] + 30, exit=True)
    _connect(me, port=options["port"], heartbeat_s=options["heartbeat_s"])
    me.reach("connected")
    try:
        function = _function(options["worker"])
        result = function(me, *options["args"])
    except BaseException:
        traceback.print_exc()
        (me.path / "casualty").touch()
        _leave(me, 1)
    partial = me.path / f"{me.index}.partial"
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.rename(me.path / f"{me.index}.result")

    def all_have_ended() -> bool:
        return all((me.path / f"{index}.result").exists() for index in range(me.count))

    is_dead = (me.path / "casualty").exists
    waited_until(lambda: is_dead() or all_have_ended(), limit_s=math.inf)
    if is_dead():
        _leave(me, 0)
    # Else the interpreter ends as a user's does, with JAX's own shutdown at exit.


def _connect(me: Member, *, port: int, heartbeat_s: int) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    gpu = None if os.environ["JAX_PLATFORMS"] == "cpu" else me.index
    if "ONE_GPU" in os.environ:
        gpu = 0
        os.environ["NCCL_HOSTID"] = f"host-{me.index}"  # NCCL gives each host's process a GPU
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        num_processes=me.count,
        process_id=me.index,
        local_device_ids=gpu,
        initialization_timeout=int(_START_TIMEOUT_S),
        heartbeat_timeout_seconds=heartbeat_s,
        shutdown_timeout_seconds=20,
    )


def _function(worker: str) -> Callable[..., object]:
    file, _, name = worker.rpartition(":")
    path = TESTS / "workers" / file
    return getattr(load(path.with_name(path.name.removesuffix(".py") + ".py")), name)


def _leave(me: Member, status: int) -> NoReturn:
    """Exits at once, without JAX's shutdown, which would wait for dead processes."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if me.index == 0:
        me.wait_for("last")
    os._exit(status)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _main(int(sys.argv[1]), json.loads(sys.argv[2]))
    else:
        member = _serve()
        _become_member(*member)
        _main(*member)
