"""This version reads what each release of jaxckpt wrote, as docs/compatibility.md promises."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import jaxckpt
from jaxckpt.format import step, tree
from tests.golden.fixture import golden_names
from tests.golden.ours import SAMPLES, described, run_facts

ROOT = Path(__file__).parents[1]
NAMES = golden_names(of="jaxckpt")


@pytest.fixture
def sample(golden_folder):
    """Gives the folder of a sample and what is expected of it."""

    def find(name):
        folder = golden_folder(name)
        return folder / "ckpt", json.loads((folder / "expected.json").read_text())

    return find


def missing(version):
    """Returns the layouts of which a version has no golden checkpoint."""
    return {f"jaxckpt-{version}-{what}" for what in SAMPLES} - {*NAMES}


def test_this_version_has_golden_checkpoints():
    """A new version cannot be released without; docs/releasing.md has the command."""
    assert missing(jaxckpt.__version__) == set(), "run python -m tests.golden.ours"
    assert len(missing("99.0.0")) == len(SAMPLES)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_a_release_restores(sample, name):
    """Values, types, dtypes, key types, containers and shardings; every checksum is right."""
    ckpt, expected = sample(name)

    for read in expected["reads"]:
        path = ckpt / read["path"]
        assert described(jaxckpt.restore(path, **read["options"])) == read["tree"], read["path"]
        assert read.get("unverified") or jaxckpt.verify(path).ok


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name.endswith(("-run", "-files", "-disk"))]
)
def test_a_run_of_a_release_goes_on(sample, name, tmp_path):
    """A manager finds its steps, metrics, items and metadata, and saves the next step."""
    ckpt, expected = sample(name)
    root = shutil.copytree(ckpt, tmp_path / "copy")
    facts = expected["run"]
    local = facts.pop("local", None)
    keep = jaxckpt.KeepPolicy(best=2, metric="loss") if facts["best"] else None

    with jaxckpt.CheckpointManager(
        root / facts.pop("path"), local=local and root / local, keep=keep or jaxckpt.KeepPolicy()
    ) as manager:
        assert json.loads(json.dumps(run_facts(manager))) == facts
        assert manager.problems == []
        manager.save(facts["steps"][-1] + 1, manager.restore()).result()
        manager.wait_until_finished()
        assert manager.all_steps() == [*facts["steps"], facts["steps"][-1] + 1]


@pytest.mark.multihost
@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("-two-hosts")])
def test_the_disks_of_two_hosts_of_a_release_restore(sample, name, tmp_path, run_processes):
    """Each process reads its own disk, which has a newer step than the directory."""
    root = shutil.copytree(sample(name)[0], tmp_path / "copy")

    done = run_processes("golden:resume_apart", args=[root])

    for process in done:
        assert process.result["step"] == 3
        assert process.result["same"]
        assert f"host{process.index}/local" in process.result["from"]


def test_every_release_has_a_row_in_the_docs():
    """And no other has."""
    page = (ROOT / "docs" / "compatibility.md").read_text()
    released = [name for name in NAMES if ".dev" not in name]
    versions = {re.match(r"jaxckpt-([\d.]+)-", name)[1] for name in released}

    assert set(re.findall(r"^\| jaxckpt (\d[\d.]*) \|", page, re.MULTILINE)) == versions


def test_the_docs_have_the_versions_of_the_files():
    """Those that this release writes, and the releases of Orbax whose checkpoints are here."""
    page = " ".join((ROOT / "docs" / "compatibility.md").read_text().split())
    releases = {re.match(r"orbax-([\d.]+)-", name)[1] for name in golden_names()}

    assert f"| `_jaxckpt.json` | {step.VERSION} |" in page
    assert f"| `_METADATA` | {tree.VERSION} |" in page
    assert [release for release in releases if release not in page] == []


def test_a_newer_record_is_refused_and_nothing_happens(sample, tmp_path):
    """As docs/compatibility.md says: no older step instead, and nothing set aside."""
    [name] = [name for name in NAMES if name == f"jaxckpt-{jaxckpt.__version__}-shared-files"]
    root = shutil.copytree(sample(name)[0], tmp_path / "run")
    record = root / "4" / "_jaxckpt.json"
    newer = record.read_text().partition("\n")[0].replace('"version":1,', '"version":99,')
    record.write_text(f"{newer}\n{step.digest(newer.encode())}\n")

    with (
        jaxckpt.CheckpointManager(root) as manager,
        pytest.raises(jaxckpt.UnsupportedFormat, match=rf"{record}: written by a newer jaxckpt"),
    ):
        manager.restore()

    assert {path.name for path in root.iterdir() if path.is_dir()} == {"1", "2", "3", "4"}
