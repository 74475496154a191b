"""The figures in the prose come from the scorecard, the results of the benchmarks, or the code.

Each claim is made here as it has to stand in the page. A figure that is in no claim needs a command
that gives it in the same section, or it is a mistake.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from statistics import median

import pytest

import jaxckpt
from benchmarks import chart
from jaxckpt._core import pinned, plan
from jaxckpt._disk import data_files, read_back
from jaxckpt._run import reach, uploader
from jaxckpt._save import job
from jaxckpt.cli import _checks
from jaxckpt.format import ocdbt, sharding, tree
from jaxckpt.multihost import _protocol
from jaxckpt.storage import _object, _requests
from tests.faults.scorecard import ROWS

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((chart.RESULTS / "tmpfs.json").read_text())["studies"]
WORKLOADS = ("large", "gpt2", "small")
SAVE, BLOCKED, RESTORE = "save, committed", "save_async blocks", "restore, same mesh"
RESTORES = (RESTORE, "restore on 2x4", "restore on 1 device")
ORBAX = ("orbax v1", "orbax v0")
SETTINGS = jaxckpt.StoreSettings()


def page(name: str) -> str:
    """The text of a page in one line, without code."""
    text = re.sub(r"^```.*?^```|^    .*?$", "", (ROOT / name).read_text("utf-8"), flags=re.S | re.M)
    return " ".join(text.split())


# --- from the results --------------------------------------------------------------------------


def middle(workload: str, figure: str, peer: str = "jaxckpt") -> float:
    return median(RESULTS[workload][figure].get(peer) or [0.0])


def times(workload: str, figure: str, peer: str) -> float:
    """How many times jaxckpt's figure that of a peer is."""
    return middle(workload, figure, peer) / middle(workload, figure)


def ratio(value: float) -> str:
    return f"{value:.{value < 9.95:d}f}"


def span(values: list[float], digits: int = 1) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def seconds(value: float) -> str:
    if value >= 0.1:
        return f"{value:.2f} s" if value < 0.995 else f"{value:.1f} s"
    return f"{value * 1e3:.1f} ms" if value < 0.00995 else f"{value * 1e3:.0f} ms"


def speed_table() -> list[str]:
    """The rows of the table of the README."""
    told = ("restore, same mesh", "restore, 4x2 onto 2x4", "restore onto 1 device")
    labels = dict(zip(RESTORES, told, strict=True))
    rows = []
    for figure in (SAVE, BLOCKED, *RESTORES):
        cells = []
        for workload in WORKLOADS:
            peers = [peer for peer in ORBAX if middle(workload, figure, peer)]
            beside = " / ".join(f"{ratio(times(workload, figure, peer))}x" for peer in peers)
            cells.append(f"{seconds(middle(workload, figure))} ({beside})")
        label = labels.get(figure, figure.replace("save_async", "`save_async`"))
        rows.append(f"| {label} | {' | '.join(cells)} |")
    plain = [
        [middle(workload, figure, "roofline") for figure in (SAVE, RESTORE)]
        for workload in WORKLOADS
    ]
    cells = [f"{write:.2f} s ({read:.2f} s)" for write, read in plain]
    return [*rows, f"| plain write (and read) | {' | '.join(cells)} |"]


def second() -> list[float]:
    return [
        median(found["first"]) / median(found["second"]) for found in RESULTS["second"].values()
    ]


def processes(figures: tuple[str, ...]) -> list[float]:
    return [
        median(found[figure][peer]) / median(found[figure]["jaxckpt"])
        for found in RESULTS["processes"].values()
        for figure in figures
        for peer in ORBAX
    ]


def memory(peer: str) -> dict[str, float]:
    """MB above the arrays, by verb."""
    return {verb: size / 1e6 for verb, size in RESULTS["memory"]["gpt2"][peer].items()}


def growth() -> float:
    """Bytes over the second half of many saves in a row, in MB."""
    after = RESULTS["memory"]["after each save"]
    return (after[-1] - after[len(after) // 2 - 1]) / 1e6


def share(what: str) -> float:
    """The percentage of the samples of a profile that were in `to_device`."""
    found = RESULTS["profile"][what]
    return 100 * found["`_core.transfer.to_device`"] / sum(found.values())


def slower(figure: str) -> list[float]:
    found = RESULTS["interference"][figure]
    return [median(found[peer]) / median(found["jaxckpt"]) for peer in ORBAX]


LARGE = ("large", "gpt2")
STEPS = RESULTS["interference"]["slower"]
PLAIN = [1 / times(name, SAVE, "roofline") for name in LARGE]
READS = [1 / times(name, figure, "roofline") for name in LARGE for figure in RESTORES]
SCALE, MERGE = RESULTS["scale"]["4096"], RESULTS["merge"]["512"]
LARGEST = max(value for key, found in RESULTS["memory"].items() if " on " in key for value in found)

IMPORTS, MEMORY = RESULTS["imports"], {peer: memory(peer) for peer in ("jaxckpt", "v1")}

FROM_RESULTS = {
    "README.md": speed_table(),
    "benchmarks/README.md": [
        f"a save takes {span(PLAIN, 2)} of the time of writing the same bytes",
        f"A restore takes {span(READS)} times as long as `readinto`",
        f"a save is {times('small', SAVE, 'orbax v1'):.0f} times as fast as Orbax's, and a restore "
        f"{times('small', RESTORE, 'orbax v1'):.0f} times. {share('small: restore'):.0f} % of the "
        "restore makes eight replicas",
        f"plans {span(second(), 0)} times as fast as the first",
        f"saving 1.5 GB needs {MEMORY['jaxckpt']['save']:.0f} MB of additional memory, and "
        f"restoring it {MEMORY['jaxckpt']['restore']:.0f} MB beside the restored arrays (Orbax v1: "
        f"{MEMORY['v1']['save'] / 1e3:.1f} GB and {MEMORY['v1']['restore'] / 1e3:.1f} GB)",
        f"One array of 1 GB is saved and restored with at most {math.ceil(LARGEST / 1e6)} MB more",
        f"saves of 260 MB the process grew by {growth():.0f} MB",
        f"costs concurrent training {span(slower('lost'))} times as much",
        f"each step takes {median(STEPS['jaxckpt']):.2f} times as long (Orbax "
        f"{span([median(STEPS[peer]) for peer in ORBAX], 2)})",
        f"`import jaxckpt` takes {math.ceil(median(IMPORTS['import jaxckpt']) * 1e3)} ms on top of "
        "jax; "
        "importing everything that saves and restores takes "
        f"{median(IMPORTS['everything that a manager, a save and a restore need']):.2f} s",
        f"saves {span(processes((SAVE,)))} times and restores "
        f"{span(processes(RESTORES[:2]))} times as fast as Orbax",
        f"one process plans 10,000 leaves in {SCALE['plan']:.1f} s",
        f"metadata in {SCALE['metadata']:.1f} s, hears all reports of a meeting in "
        f"{RESULTS['meetings']['4096']['process 0']:.2f} s, and unites the tables of 512 processes "
        f"in {MERGE['merge']:.2f} s, {MERGE['each key'] * 1e6:.0f} us per key",
        f"would take more than {sharding._MAX_BYTES >> 20} MB",
    ],
}


# --- from the scorecard ------------------------------------------------------------------------


def scorecard() -> dict[str, tuple[str, str]]:
    """What RELIABILITY.md says was tried and passed, by row."""
    text = (ROOT / "RELIABILITY.md").read_text("utf-8")
    found = re.findall(r"^\| (\d+r?) \| .+ \| (\d+) \| (\d+) \| .+ \|$", text, re.MULTILINE)
    return {row: (tried, passed) for row, tried, passed in found}


# The row of the scorecard behind each row of the README's table of faults.
FAULTS = {
    "kill -9 during an overwrite": "2",
    "kill -9 before every file change": "3",
    "a real power cut": "8",
    "a flipped bit": "11",
    "full disk": "10",
    "two writers of one run": "18",
    "SIGTERM at a random moment": "22",
}


def test_the_faults_of_the_readme_are_those_of_the_scorecard() -> None:
    """Tried and passed; every figure about Orbax is in the scorecard too."""
    table = (ROOT / "README.md").read_text("utf-8").partition("| fault |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (?!---)(.+?) \| (\d+) of (\d+) \| (.+) \|$", table, re.MULTILINE)

    assert len(rows) == len(FAULTS)
    for title, passed, tried, orbax in rows:
        [row] = [row for name, row in FAULTS.items() if title.startswith(name)]
        assert scorecard()[row] == (tried, passed), title
        theirs = re.findall(r"[\d.]+", ROWS[row].orbax)
        assert set(re.findall(r"(?<!ext)\b[\d.]*\d", orbax)) <= set(theirs), title


def test_rows_that_are_mentioned_exist() -> None:
    """A trial that a page counts as "N of M ... row R" is one of that row."""
    text = " ".join(page(name) for name in PAGES)

    mentioned = re.findall(r"\brows? (\d+r?)(?: and (\d+r?))?", text)
    trials = re.findall(r"(\d+ of \d+)[^|]{,60}, row (\d+)", text)

    assert {row for rows in mentioned for row in rows if row} <= scorecard().keys()
    assert trials
    assert [count for count, row in trials if count not in ROWS[row].orbax] == []


# --- from the code -----------------------------------------------------------------------------

WORDS = {2: "two", 9: "nine"}
LEASE, STALL, TIMEOUT = SETTINGS.lease_s, SETTINGS.stall_s, SETTINGS.timeout_s
MINUTES = _protocol.DEFAULT_TIMEOUT_S / 60
MIB, PART, FILE = 1 << 20, _object._PART_BYTES >> 20, ocdbt.DATA_FILE_BYTES >> 20
ON_AZURE = data_files._UPLOADS * _object._PARTS_AT_ONCE * PART
HEDGE_S, HEDGE = _requests._HEDGE_FLOOR_S, _requests._HEDGE_BYTES

FROM_CODE = {
    "README.md": [
        f"a name at most {tree._MAX_NAME_BYTES >> 10} kB",
        f"a quarter of the host's memory, or {pinned._POOL_GB * pinned._SHARE:.0f} GB on GPUs",
    ],
    "RELIABILITY.md": [
        f"has a limit (`timeout_s`, {MINUTES:.0f} minutes)",
        f"leases of {LEASE:.0f} s by the store's clock",
        f"{TIMEOUT:.0f} s for each call, {MINUTES:.0f} minutes in which TensorStore completes no",
        f"also every request: {TIMEOUT:.0f} s in all, {STALL:.0f} s without a byte",
        f"at most {WORDS[read_back.TRUSTED]} further steps have the damage",
        f"each process reads at most {read_back.MOST_BYTES // MIB} MiB after a save",
        f"`StoreError` after {TIMEOUT:.0f} s",
        f"continues with its local steps after {reach.AWAY_S:.0f} s",
    ],
    "docs/checkpoints.md": [
        f"Every wait has a limit of {MINUTES:.0f} minutes",
        f"It uses at most {data_files._MOST_COMPRESSING} cores",
    ],
    "docs/runs.md": [
        f"each process reads at most {read_back.MOST_BYTES // MIB} MiB",
        f"two system calls for each file of {FILE} MiB or larger array",
        f"10 GiB that did not change take {(10 << 10) // FILE} links",
    ],
    "docs/stores.md": [
        f"every {LEASE / 4:.0f} s (`lease_s / 4`). A lease that was not renewed for {LEASE:.0f} s",
        f"with one write every {LEASE / 4:.0f} s",
        f"after at most {LEASE:.0f} s: at the opening",
        f"| a try ends, and a request is not tried again | after {TIMEOUT:.0f} s |",
        f"| a try that moves no byte is given up | after {STALL:.0f} s |",
        f"| tries of a request, with growing pauses | {SETTINGS.tries} |",
        f"more than {HEDGE_S:.2f} s, is sent a second time, and the first answer counts. At most "
        f"{HEDGE * 100:.0f} % of the bytes",
        f"have {SETTINGS.tries} tries too, and are given up after {STALL:.0f} s without a byte",
        f"two more if it has more than {PART} MiB and then one for each {PART} MiB",
        f"in files of {data_files.COPIED_BYTES.start // MIB} MiB to "
        f"{data_files.COPIED_BYTES.stop // 10**9} GB",
        f"raises `StoreError` after {TIMEOUT:.0f} s",
        f"written and read by obstore, those of more than {PART} MiB in parts",
        f"sends files of up to {_object._MOST_GRPC_BYTES // MIB} MiB",
        f"of at most {plan.MAX_CHUNK_BYTES >> 30} GiB, is an object; smaller chunks are put "
        f"together into objects of about {FILE} MiB",
        f"in blocks of {PART} MiB, four at a time, so that this takes at most {ON_AZURE} MiB",
    ],
    "docs/tiers.md": [
        f"The directory may not answer for {reach.AWAY_S:.0f} s",
        f"sends nothing for {_object._PEER.stall_s:.0f} s",
        f"{WORDS[uploader._MOST_WAITING].title()} steps wait for their upload at most",
        f"`custom_metadata` of up to {job.MOST_TOLD_BYTES >> 10} KiB",
    ],
    "docs/cli.md": [
        f"less than {_checks._SLOW_BYTES_PER_S / 1e6:.0f} MB/s, or more than {_checks._SLOW_S} s",
        f"{_checks.LARGE_BYTES // MIB} MiB with TensorStore",
        f"Files have at most {FILE} MiB",
    ],
    "docs/orbax.md": [f"`timeout_s=`, also {MINUTES:.0f} minutes"],
}


# --- every page ----------------------------------------------------------------------------------

PAGES = [
    *("README.md", "RELIABILITY.md", "benchmarks/README.md"),
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
# Examples, and statements of manuals.
NOT_OURS = {
    "docs/runs.md": [
        "With steps of 2 s and saves of 20 s, the total is 1 + 2 + 2 + 20 + 20 s, so request 60 s",
        "120 s before the time limit (up to 60 s earlier, according to its manual)",
        "from SIGTERM to SIGKILL, 30 s by default",
    ],
    "docs/stores.md": ["(or 1 MiB)"],
}
FIGURE = re.compile(
    r"\d(?:[\d,.]*\d)?(?: to [\d.]+)? ?(?:times\b|%|ms\b|us\b|µs\b|s\b|[kKMG]i?B\b|x\b|MB/s)"
)
COMMAND = re.compile(
    r"python -m benchmarks|`[a-z]+ --|`make \w|python -m pytest|`(?:pytest )?tests/"
)


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        (name, claim)
        for claims in (FROM_RESULTS, FROM_CODE)
        for name, found in claims.items()
        for claim in found
    ],
)
def test_a_claim_stands_in_its_page(name: str, claim: str) -> None:
    """With the figure that its source has now."""
    assert claim in page(name)


def without_source(name: str, text: str) -> list[str]:
    """Returns the figures of a page in sections that have neither a claim nor a command."""
    found = []
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    parts = r"^#+ |^- " if name.startswith("benchmarks/") else r"^#+ "  # each study has its bullet
    for section in re.split(parts, text, flags=re.MULTILINE):
        if COMMAND.search(section):
            continue
        prose = re.sub(r"^    .*$", "", section, flags=re.MULTILINE)
        prose = " ".join(prose.split())
        for claims in (FROM_RESULTS, FROM_CODE, NOT_OURS):
            for claim in claims.get(name, []):
                prose = prose.replace(claim, "")
        prose = re.sub(r"`[^`]*`", "", prose)
        found += [f"{section.partition(chr(10))[0]}: {figure}" for figure in FIGURE.findall(prose)]
    return found


@pytest.mark.parametrize("name", PAGES)
def test_every_figure_has_a_source(name: str) -> None:
    assert without_source(name, (ROOT / name).read_text("utf-8")) == []


def test_a_figure_without_a_source_is_found() -> None:
    """But not where the section has a command."""
    assert without_source("docs/x.md", "# A\n\nTwice: 2.5 times.\n") == ["A: 2.5 times"]
    assert without_source("docs/x.md", "# A\n\n2.5 times (`make bench`).\n") == []
