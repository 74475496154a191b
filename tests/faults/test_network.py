"""Hosts with their own addresses are killed, stopped or disconnected, which needs root.

Each host is a network namespace; all are connected by a bridge in another namespace, so nothing
leaves this machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults import coverage_children
from tests.faults import dead_children as children
from tests.faults.jobs import HANGS, started
from tests.faults.zygote import Zygote
from tests.waiting import stop_process

pytestmark = pytest.mark.faults_root

AT_ONCE = 4
HEARTBEAT_S = 5
TIMEOUT_S = 3.0
FIRST = "10.77.0.10"


class Network:
    """So many hosts; use it as a context manager."""

    def __init__(self, count):
        self._count = count
        self._name = f"jaxckpt-{os.getpid()}-{os.urandom(3).hex()}"

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self):
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge", "up")
        for index in range(self._count):
            host = self._host(index)
            ip("netns", "add", host)
            ends = [f"port{index}", "type", "veth", "peer", "name", "eth", "netns", host]
            ip("-n", self._switch, "link", "add", *ends)
            ip("-n", self._switch, "link", "set", f"port{index}", "master", "bridge", "up")
            ip("-n", host, "addr", "add", f"10.77.0.{10 + index}/24", "dev", "eth")
            ip("-n", host, "link", "set", "eth", "up")
            ip("-n", host, "link", "set", "lo", "up")

    @property
    def _switch(self):
        return f"{self._name}-switch"

    def _host(self, index):
        return f"{self._name}-{index}"

    @property
    def options(self):
        """Returns the options of a job."""
        files = [f"/run/netns/{self._host(index)}" for index in range(self._count)]
        return {"count": self._count, "namespaces": files, "address": FIRST}

    def limit(self, line):
        """Limits what each host sends, in MB/s."""
        for index in range(self._count):
            rate = ["rate", f"{line * 8:g}mbit", "burst", "128kb", "latency", "400ms"]
            there = ["netns", "exec", self._host(index), "tc", "qdisc", "add", "dev", "eth"]
            ip(*there, "root", "tbf", *rate)

    @contextlib.contextmanager
    def serving(self, index, directory):
        """Serves files of a directory at port 8000 of a host; yields the process."""
        there = ["ip", "netns", "exec", self._host(index)]
        command = [sys.executable, "-m", "tests.static_server", str(directory), "0.0.0.0", "8000"]
        with subprocess.Popen([*there, *command], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                yield process
            finally:
                process.kill()

    def cut(self, index):
        """Takes the link of a host down."""
        ip("-n", self._switch, "link", "set", f"port{index}", "down")

    def heal(self, index):
        ip("-n", self._switch, "link", "set", f"port{index}", "up")

    def __exit__(self, *_):
        for name in [*map(self._host, range(self._count)), self._switch]:
            with contextlib.suppress(AssertionError):
                ip("netns", "del", name)


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory):
    """Calls a function with each of some arguments, a zygote before them; yields the futures."""
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed")
    try:
        with Network(1):
            pass
    except AssertionError as error:
        pytest.skip(f"no network namespaces here: {error}")
    with contextlib.ExitStack() as stack:
        free = [
            stack.enter_context(Zygote(tmp_path_factory.mktemp("zygote"))) for _ in range(AT_ONCE)
        ]

        def call(function, *args):
            zygote = free.pop()
            try:
                return function(zygote, *args)
            finally:
                free.append(zygote)

        pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        yield lambda function, cases: [(case, pool.submit(call, function, *case)) for case in cases]


def lose(zygote, root, count, how, victim, phase, timeout_s):
    """Loses one host of some as a phase begins; how all others ended, and how long that took."""
    root.mkdir()
    who = children.who_pauses(phase, victim)
    with (
        Network(count) as network,
        started(
            zygote,
            children.lose_one,
            args=[root, phase, who, timeout_s],
            heartbeat_s=HEARTBEAT_S,
            **network.options,
        ) as job,
    ):
        job.wait_for(who, "paused")
        start_s = time.monotonic()
        if how == "cut":
            network.cut(victim)
        else:
            getattr(job, how)(victim)
        job.release("on")
        job.wait_for_others()  # if it was cut off, it is one of them
        took_s = time.monotonic() - start_s
        acked = [step for step in (1, 2, 3) if job.has_reached(f"acked-{step}")]
        return acked[-1], took_s, job.wait()


CASES = {
    # Jax ends them: the manager would wait for longer.
    "three, by jax": (3, [0, 2], ["writing", "renaming"], 60.0),
    "four, by jax": (4, [0, 3], ["writing"], 60.0),
    # The manager tells them first.
    "three": (3, [1], ["writing", "deleting", "restoring"], TIMEOUT_S),
}


@pytest.mark.parametrize("what", CASES)
def test_a_host_is_lost(trial, side_by_side, zygote, ram_path, what):
    """All others end by the heartbeat and 5 s; what was acknowledged restores, and a job saves."""
    count, victims, phases, timeout_s = CASES[what]
    cases = [
        (ram_path / f"{how}-{victim}-{phase}", count, how, victim, phase, timeout_s)
        for how in ("kill", "stop", "cut")
        for victim in victims
        for phase in phases
    ]
    for case, future in side_by_side(lose, cases):
        root, _, how, victim, phase, _ = case
        with trial("19r", f"{what}: {how} {victim} while {phase}"):
            acked, took_s, ends = future.result()
            for index, end in enumerate(ends):
                assert end.status != HANGS, (index, end.out)
            assert took_s < HEARTBEAT_S + 5
            new = zygote.run(children.go_on, root, acked)
            assert new["newest"] in (acked, acked + 1)
            assert new["left"] == []


def test_the_disk_of_a_killed_host_is_wiped(trial, side_by_side, zygote, ram_path):
    """Four hosts, HSDP: the newest local step is back, and no value is read in the directory."""
    del side_by_side  # skips where there are no namespaces
    hosts = [0, 1, 2, 3]
    for victim in (1, 2):
        root = ram_path / str(victim)
        args = [root, hosts, 4, 2, False]
        with Network(4) as network, trial("58r", f"host {victim}"):
            options = {"heartbeat_s": HEARTBEAT_S, "limit_s": 60, **network.options}
            with started(zygote, coverage_children.train, args=args, **options) as job:
                for host in hosts:
                    job.wait_for(host, "saved 3")
                job.kill(victim)
                job.wait()
            shutil.rmtree(root / f"host{victim}")
            args[2] = 1
            with started(zygote, coverage_children.train, args=args, **options) as job:
                ends = job.wait()
            assert [end.status for end in ends] == [0] * 4, ends
            (start,) = {end.result["start"] for end in ends}
            assert start in (3, 4)
            assert {end.result["read"] for end in ends} == {0}


def test_a_lost_half_is_on_a_peer(trial, side_by_side, zygote, ram_path):
    """Two of four hosts are lost; a server of files on one has its disk, until it stops."""
    del side_by_side
    hosts = [0, 1, 2, 3]
    with Network(4) as network:
        options = {"limit_s": 60, **network.options}
        args = [ram_path, hosts, 3, 2, False, 1 << 30, ["http://10.77.0.10:8000"]]
        with started(zygote, coverage_children.train, args=args, **options) as job:
            assert [end.status for end in job.wait()] == [0] * 4
        there = {"namespaces": options["namespaces"][1::2], "address": "10.77.0.11", "count": 2}
        args[1:4] = [1, 3], 0, 2
        with network.serving(0, ram_path / "host0/local") as server:
            for what, wanted in (("a peer", 3), ("a peer that is stopped", 2)):
                with trial("58r", what):
                    started_s = time.monotonic()
                    now = {**options, **there}
                    with started(zygote, coverage_children.train, args=args, **now) as job:
                        ends = job.wait()
                    assert [end.status for end in ends] == [0] * 2, ends
                    assert {end.result["start"] for end in ends} == {wanted}
                    assert {end.result["read"] == 0 for end in ends} == {wanted == 3}
                    assert time.monotonic() - started_s < 60
                stop_process(server.pid)


def partition(zygote, root, victim, seconds):
    """Cuts a host off for so long while all save; what they say."""
    root.mkdir()
    with (
        Network(3) as network,
        started(
            zygote, children.save_on, args=[root, 5, 30], heartbeat_s=30, **network.options
        ) as job,
    ):
        for index in range(3):
            job.wait_for(index, "acked-5")
        network.cut(victim)
        job.release("on")
        time.sleep(seconds)  # that is how long it is cut off
        network.heal(victim)
        return job.wait()


def test_a_partition_that_heals(trial, side_by_side, zygote, ram_path):
    """A partition shorter than the heartbeat delays the saves: they continue and end as usual."""
    cases = [
        (ram_path / f"{victim}-{seconds}", victim, seconds)
        for victim in (0, 1, 2)
        for seconds in (2, 4)
    ]
    for case, future in side_by_side(partition, cases):
        root, victim, seconds = case
        with trial("20", f"host {victim} cut off for {seconds} s"):
            for end in future.result():
                assert (end.status, end.result) == (0, [None] * 30), end.out
            new = zygote.run(children.go_on, root, 30)
            assert (new["newest"], new["left"]) == (30, [])


def test_a_partition_that_does_not_heal_is_heard_of(trial, side_by_side, ram_path):
    """A control: the network is really cut, and no step is saved through it."""
    ((_, future),) = side_by_side(lose, [(ram_path / "run", 3, "cut", 2, "writing", TIMEOUT_S)])
    acked, _, ends = future.result()

    assert acked == 2
    assert all(end.status != 0 or end.result["lost"]["error"] is not None for end in ends)
