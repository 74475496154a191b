"""Counts the trials of the fault tests in a table: tried, passed, and the behaviour of Orbax.

A test takes `trial` and wraps each thing that it tries:

    for n in ...:
        with trial(3, f"killed before change {n}"):
            ...

A failing trial does not end the test; the test fails at its end and names all failed trials. With
`--scorecard FILE` the table is written to that file, and a row with too few trials fails the run,
so that no row shrinks unnoticed.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from dataclasses import dataclass

import pytest

_PROPERTY = "scorecard"
_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One promise.

    Attributes:
        count: The least number of trials.
        orbax: The behaviour of Orbax 0.12.8, if it was measured.
        target: The `make` target that runs the trials.
    """

    title: str
    count: int
    orbax: str = "not measured"
    target: str = "faults"


ROWS = {
    "1": Row(
        title="kill -9 at random moments of a run: the newest acknowledged step and every listed "
        "step restore, and the next start recovers by itself",
        count=200,
        orbax="200 of 200; in 8 a listed step does not restore",
    ),
    "2": Row(
        title="kill -9 at random while a path is replaced: the old or the new checkpoint is there",
        count=200,
        orbax="30 of 200 (v1: 14 of 80)",
    ),
    "3": Row(
        title="kill -9 before every file change of save, retention, replacement, deletion, "
        "recovery",
        count=600,
        orbax="101 of 102, 1 unusable, in 12 a listed step does not restore; replacement 5 of 99",
    ),
    "4": Row(
        title="every write torn in half, then kill -9",
        count=60,
        orbax="20 of 20",
    ),
    "5": Row(
        title="EIO, ENOSPC, EROFS, EACCES, once or from then on, at every file event of save and "
        "restore: success or a typed error, acknowledged steps intact, exactly the steps that "
        "the policy keeps",
        count=4500,
        orbax="ENOSPC 102 of 102 intact; EIO makes 1 unusable; the wrong steps are kept in 97 of "
        "101",
    ),
    "6": Row(
        title="when a save is acknowledged, no data and no file name is still only in a cache",
        count=16,
        orbax="5 files and 6 names unsynced in each save",
    ),
    "7": Row(
        title="a power cut after every change, replayed as ext4 and strict POSIX allow",
        count=700,
        orbax="0 of 18 and 0 of 18",
    ),
    "8": Row(
        title="real power cuts on ext4, XFS and btrfs",
        count=60,
        orbax="6 of 60, 8 of 48, 0 of 8",
        target="faults-root",
    ),
    "9": Row(
        title="a disk that lies about fsync loses power: nothing is silently wrong",
        count=100,
    ),
    "10": Row(
        title="a disk fills up and has room again: the error says so, nothing is lost, saving "
        "resumes by itself with room for keep + 1.2 checkpoints",
        count=32,
        orbax="24 of 24 intact; stuck permanently with keep + 1.4 and + 1.9",
    ),
    "10r": Row(
        title="a full disk as in row 10, on a real tmpfs",
        count=32,
        orbax="as row 10",
        target="faults-root",
    ),
    "11": Row(
        title="a flipped bit anywhere, in each layout: no wrong value, no crash",
        count=500,
        orbax="190 of 400 silently wrong",
    ),
    "12": Row(
        title="files truncated, lengthened, swapped, duplicated, missing, or from another "
        "checkpoint",
        count=400,
        orbax="truncated: 150 of 150; the rest was not measured",
    ),
    "13": Row(
        title="broken metadata: 400 mutations of its structure, and cases found by hypothesis",
        count=1800,
        orbax="157 errors of many types, 1 silently wrong",
    ),
    "14": Row(
        title="hostile metadata: huge shapes, bombs, deep JSON, paths outside, links, FIFOs, "
        "devices",
        count=90,
        orbax="size bombs kill it in 3 of 3; the rest passes",
    ),
    "15": Row(
        title="no pickle, marshal, eval, exec or import anywhere",
        count=90,
    ),
    "16": Row(
        title="trees whose names nearly collide: the same tree restores, or the save is refused "
        "before it writes",
        count=1000,
        orbax="silent corruption",
    ),
    "17": Row(
        title="stray entries in a run's root are reported, and saving continues",
        count=100,
        orbax="saving stops without any message",
    ),
    "18": Row(
        title="two writers of one run, and a zombie after a restart: each step has one winner",
        count=200,
        orbax="49 of 96 saves raise; 3 of 25 steps do not restore",
    ),
    "19": Row(
        title="a process killed or stopped in each phase of save, commit, delete and restore",
        count=40,
        orbax="18 of 18 restore",
    ),
    "19r": Row(
        title="hosts killed, stopped or disconnected, with three and four hosts",
        count=27,
        orbax="18 of 18 restore",
        target="faults-root",
    ),
    "20": Row(
        title="a partition shorter than the heartbeat heals",
        count=6,
        orbax="1 of 1",
        target="faults-root",
    ),
    "21": Row(
        title="late processes, reused names, recoverable mode, the death of process 0: an error "
        "within the deadline",
        count=16,
        orbax="hangs for over 46 s",
    ),
    "22": Row(
        title="SIGTERM at random moments, with one and three processes, sent twice, with other "
        "handlers installed",
        count=75,
        orbax="one process: saves nothing",
    ),
    "27": Row(
        title="values changed, donated or deleted just after the save returned",
        count=150,
    ),
    "28": Row(
        title="the steps that are kept, compared with a model",
        count=500,
        orbax="wrong after 97 of 101 single EIO errors",
    ),
    "29": Row(
        title="save and restore use at most 1.3 times the state's memory",
        count=7,
        target="faults-root",
    ),
    "30": Row(
        title="clocks jump by 400 days: steps stay ordered by number",
        count=40,
        orbax="passes",
    ),
    "31": Row(
        title="Orbax reads what jaxckpt writes, and the reverse",
        count=200,
    ),
    "32": Row(
        title="ckpt-chaos, an independent test program",
        count=25,
        orbax="25 of 25",
    ),
    "33": Row(
        title="one run exposed to random faults of all these kinds for hours",
        count=1,
        target="soak",
    ),
    "34": Row(
        title="verify and scrub find every planted fault; damaged steps are set aside",
        count=60,
        orbax="has neither command",
    ),
    "39": Row(
        title="kill -9 before every file change of a run with a local disk in front: the newest "
        "acknowledged step restores on its host, the newest durable one anywhere",
        count=120,
    ),
    "35": Row(
        title="kill -9 before and after the store acts on each request of save, replacement, "
        "deletion and a run: every listed step restores, and the next job goes on",
        count=150,
        target="stores",
    ),
    "36": Row(
        title="429, 503, 403, resets, truncated answers, and answers that are lost, at each kind "
        "of request of save and restore and at each one of a deletion: right data or a typed error",
        count=200,
        target="stores",
    ),
    "37": Row(
        title="from some request on the store never answers: an error within the deadline",
        count=5,
        target="stores",
    ),
    "38": Row(
        title="of eight writers that create one object, or save to one path, at one moment, "
        "exactly one succeeds",
        count=210,
        target="stores",
    ),
    "41": Row(
        title="kill -9 before file changes of hosts with disks of their own: the newest step that "
        "was acknowledged restores on the same hosts",
        count=8,
    ),
    "42": Row(
        title="hosts lost with their disks: the newest durable step restores",
        count=6,
        target="faults-root",
    ),
    "43": Row(
        title="a job stands still at any file event from its commit to the end of its retention, "
        "another takes the run over: no step goes that it has listed or acknowledged",
        count=80,
    ),
    "44": Row(
        title="a disk without a free byte: commands and managers delete steps, and a job restores",
        count=5,
    ),
    "44r": Row(
        title="as row 44, on a real tmpfs",
        count=5,
        target="faults-root",
    ),
    "46": Row(
        title="kill -9 before every file change of a run that finds the steps of another run, or "
        "its own without an id, on its local disk: each run restores its own newest step",
        count=40,
    ),
    "45": Row(
        title="a job stands still at any request of a store from its commit to the end of its "
        "retention, as in row 43",
        count=12,
        target="stores",
    ),
    "40": Row(
        title="kill -9 before and after the store acts on each request of a run with a local disk "
        "in front: as in row 39",
        count=15,
        target="stores",
    ),
    "47": Row(
        title="kill -9 as soon as the save of step n has returned: step n-2 is committed, and n-1 "
        "if the drop-in saved it",
        count=24,
    ),
    "48": Row(
        title="a flipped bit in any file of a run whose steps share files, also in front of or "
        "behind a local disk, and of two processes: one of the two newest steps restores, and no "
        "value is wrong",
        count=60,
    ),
    "49": Row(
        title="restores of 2,000 leaves, of one process's checkpoint and of two processes': less "
        "than 100 kB a round stay behind",
        count=1,
    ),
    "50": Row(
        title="a job that is started twice: the first goes on, and the second saves nothing and "
        "names it",
        count=16,
    ),
    "51": Row(
        title="a step without its record: damaged to every call and command; a copy mends it",
        count=13,
    ),
    "52": Row(
        title="a run or checkpoint inside a step: refused, or kept with the step around it",
        count=24,
    ),
    "53": Row(
        title="a process killed or stopped, or a chunk damaged or unreadable, at each phase of a "
        "restore that reads each value once: no hang and no wrong value",
        count=29,
    ),
    "54": Row(
        title="a bit flips in one replica of a shard before the save: the leaf and the device are "
        "named, the step is marked, and the step before is restored",
        count=104,
    ),
    "55": Row(
        title="hosts with disks of their own that are new, fewer, more or numbered otherwise, or "
        "have a flipped bit: a step restores whose chunks are all on some disk, and no wrong value",
        count=109,
    ),
    "56": Row(
        title="kill -9 before every file change of a save, with its writes torn, or at each "
        "request: the ledger has every earlier start, and shows that this one was killed",
        count=200,
    ),
    "57": Row(
        title="disks without a process: other shares, and peers that are stopped, late or have a "
        "flipped bit: the newest step whose chunks are all on some disk, and no wrong value",
        count=63,
    ),
    "58r": Row(
        title="one of four hosts in network namespaces is killed and its disk wiped, or two are "
        "lost and one disk is a peer: the newest local step, and no value from the directory",
        count=4,
        target="faults-root",
    ),
}


class Trials:
    """Counts the trials of one test, and records the failures."""

    def __init__(self):
        self.counts = Counter()
        self.failures = []

    @contextlib.contextmanager
    def __call__(self, row, what):
        """Runs one trial for a row; an exception counts as a failure of the trial."""
        assert row in ROWS, row
        try:
            yield
        except Exception as error:
            self.counts[row, "failed"] += 1
            self.failures.append((row, what, error))
        else:
            self.counts[row, "passed"] += 1

    def check(self):
        """Raises if any trial failed."""
        if not self.failures:
            return
        lines = [
            f"row {row}, {what}:\n{''.join(traceback.format_exception(error))}"
            for row, what, error in self.failures[:_SHOWN]
        ]
        total = sum(self.counts.values())
        raise AssertionError(f"{len(self.failures)} of {total} trials failed\n" + "\n".join(lines))


@pytest.fixture
def trial(request):
    """Counts trials for the scorecard; see the module."""
    trials = Trials()
    yield trials
    counts = [[row, how, n] for (row, how), n in trials.counts.items()]
    request.node.user_properties.append((_PROPERTY, counts))


def pytest_addoption(parser):
    parser.addoption(
        "--scorecard", metavar="FILE", help="write the table to FILE; all rows must be complete"
    )
    parser.addoption("--scorecard-of", default="faults", help="the make target whose rows to print")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs the test, then fails it if any of its trials failed."""
    result = yield
    trials = pyfuncitem.funcargs.get("trial")
    if isinstance(trials, Trials):
        trials.check()
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    file = config.getoption("--scorecard")
    if hasattr(config, "workerinput") or reporter is None or file is None:
        return
    counts = Counter()
    for reports in reporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":
                for row, how, n in dict(report.user_properties).get(_PROPERTY, []):
                    counts[row, how] += n
    lines, missing = table(counts, target=config.getoption("--scorecard-of"))
    reporter.ensure_newline()
    reporter.section("scorecard")
    reporter.write_line("\n".join(lines))
    for what in missing:
        reporter.write_line(what, red=True)
    with open(file, "w") as out:
        out.write("\n".join(lines) + "\n")
    if missing:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def table(counts, *, target):
    """Returns the lines of the table in Markdown, and its problems."""
    lines = ["| | what | tried | passed | Orbax 0.12.8 |", "| --- | --- | --- | --- | --- |"]
    missing = []
    for name, row in ROWS.items():
        if row.target != target:
            continue
        passed, failed = counts[name, "passed"], counts[name, "failed"]
        tried = passed + failed
        lines.append(f"| {name} | {row.title} | {tried} | {passed} | {row.orbax} |")
        if tried < row.count:
            missing.append(f"row {name}: {tried} trials, expected at least {row.count}")
        if failed:
            missing.append(f"row {name}: {failed} of {tried} trials failed")
    return lines, missing
