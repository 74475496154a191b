"""A damaged step in a bucket is set aside, with all of its files, and its number is free again."""

from __future__ import annotations

import pytest

import jaxckpt
from jaxckpt.errors import CorruptCheckpoint
from jaxckpt.format import names
from jaxckpt.storage import _requests as requests_module
from jaxckpt.storage import locate
from tests.commandline import cli
from tests.stores.children import is_state, reach, state
from tests.stores.proxy import Answer


@pytest.fixture(params=["moto_server", "gcs_server"])
def run(request, proxied):
    """A run with the steps 1 to 3 behind a proxy: `url, proxy`."""
    server, proxy = proxied(request.getfixturevalue(request.param))
    url = f"{server.scheme}://{server.bucket}/run"
    reach(url, server.env)
    with jaxckpt.CheckpointManager(url) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    yield url, proxy
    proxy.heal()


def contents(url):
    storage, path = locate(url)
    return {f: storage.read(f"{path}/{f}", max_bytes=1 << 30) for f in storage.files(path)}


def largest(url):
    """The data file with the large array."""
    return max(((len(data), file) for file, data in contents(url).items()))[1]


def damage(url):
    storage, path = locate(url)
    file = largest(url)
    data = bytearray(contents(url)[file])
    data[len(data) // 2] ^= 1
    storage.write(f"{path}/{file}", bytes(data))
    return contents(url)


def set_aside(url):
    return [name for name in locate(url)[0].entries(url) if names.is_set_aside(name)]


def test_a_resumed_job_saves_the_number_of_a_damaged_step_again(run):
    """The step before is restored; every file of the damaged one stays, to look at."""
    url, _ = run
    damaged = damage(f"{url}/3")

    with jaxckpt.CheckpointManager(url) as manager:
        assert is_state(manager.restore(), 2)
        assert manager.all_steps() == [1, 2]
        manager.save(3, state(3)).result()
        assert any("was set aside as" in problem for problem in manager.problems)

    (aside,) = set_aside(url)
    assert contents(f"{url}/{aside}") == damaged
    with pytest.raises(CorruptCheckpoint):
        jaxckpt.restore(f"{url}/{aside}")
    assert "large" in jaxckpt.verify(f"{url}/{aside}").problems[0].message
    assert is_state(jaxckpt.restore(f"{url}/3"), 3)
    with jaxckpt.CheckpointManager(url) as manager:
        assert manager.latest_step() == 3
        assert any("set aside earlier" in problem for problem in manager.problems)


def test_a_copy_that_was_not_made_is_noticed(run):
    """The store said that it was. The damaged step stays where it is."""
    url, proxy = run
    damaged = damage(f"{url}/3")

    lie = proxy.add(Answer(200), when=lambda request: request.is_copy, times=1)
    with jaxckpt.CheckpointManager(url) as manager:
        assert is_state(manager.restore(), 2)
        assert any("the copy is not whole" in problem for problem in manager.problems)

    assert lie.done == 1
    assert contents(f"{url}/3") == damaged
    assert set_aside(url) == []


@pytest.mark.parametrize("status", [403, 503])
def test_a_step_that_cannot_be_read_now_is_not_set_aside(run, status):
    """No permission and an outage are errors, and all stays as it is."""
    url, proxy = run
    before = contents(url)
    proxy.add(Answer(status), method="GET", path=largest(f"{url}/3"))

    with jaxckpt.CheckpointManager(url) as manager:
        with pytest.raises(OSError, match=r"3/"):
            manager.restore()
        assert manager.all_steps() == [1, 2, 3]

    proxy.heal()
    assert set_aside(url) == []
    changing = {names.OWNER, names.LOCK, names.LEDGER}
    assert {f: data for f, data in contents(url).items() if f not in changing} == {
        f: data for f, data in before.items() if f not in changing
    }
    assert is_state(jaxckpt.restore(url), 3)


def test_a_step_that_cannot_be_copied_stays(run):
    """And is reported; the job goes on from the step before."""
    url, proxy = run
    damaged = damage(f"{url}/3")
    proxy.add(Answer(403), method="PUT", path="jaxckpt-bad")

    with jaxckpt.CheckpointManager(url) as manager:
        assert is_state(manager.restore(), 2)
        assert any("cannot be set aside" in problem for problem in manager.problems)
        assert manager.all_steps() == [1, 2, 3]

    assert contents(f"{url}/3") == damaged
    assert set_aside(url) == []


def test_scrub_sets_a_damaged_step_aside(run):
    """Also one that is not the newest."""
    url, _ = run
    damaged = damage(f"{url}/2")

    code, out, err = cli("scrub", url, "--yes")

    assert code == 1, (out, err)
    (aside,) = set_aside(url)
    assert contents(f"{url}/{aside}") == damaged
    with jaxckpt.CheckpointManager(url, mode="r") as manager:
        assert manager.all_steps() == [1, 3]


@pytest.mark.parametrize("file", ["data", names.TREE_METADATA, names.OCDBT_MANIFEST])
def test_a_step_whose_objects_are_listed_and_said_to_be_missing_stays(run, limits, file):
    """It is no damage: no older step is restored."""
    url, proxy = run
    limits(requests_module, _FIRST_PAUSE_S=0.001)
    path = largest(f"{url}/3") if file == "data" else f"state/{file}"
    proxy.add(Answer(404), method="GET", path=f"/3/{path}")

    with jaxckpt.CheckpointManager(url) as manager:
        with pytest.raises(OSError, match="listed"):
            manager.restore()
        proxy.heal()
        assert is_state(manager.restore(), 3)

    assert set_aside(url) == []


def test_scrub_names_a_step_whose_marker_is_listed_and_not_read(run):
    """It is not left out as if somebody had deleted it."""
    url, proxy = run
    damage(f"{url}/2")
    for method in ("GET", "HEAD"):
        proxy.add(Answer(404), method=method, path=f"run/2/{names.COMMIT_MARKER}")

    code, out, err = cli("scrub", "-n", url)

    assert code == 2, (out, err)
    assert "UNREADABLE" in out
    assert "3 steps read" in out


def test_heal_names_a_step_that_it_cannot_read(run):
    """It does not say that no step is damaged."""
    url, proxy = run
    copy = f"{url}-copy"
    assert cli("upload", url, copy)[0] == 0
    proxy.add(Answer(403), method="GET", path=largest(f"{url}/2"))

    code, out, err = cli("heal", copy, url)

    assert code == 1, (out, err)
    assert "step 2 is not mended: it cannot be read:" in out
    proxy.heal()
    damage(f"{copy}/1")
    proxy.add(Answer(403), method="GET", path=f"copy/2/{largest(f'{copy}/2')}", times=1)
    code, out, err = cli("heal", copy, url)
    assert code == 0, (out, err)
    assert "mended step 1" in out
    assert "step 2" not in out


def test_a_step_whose_marker_is_said_to_be_missing_is_not_deleted(run):
    """Without its marker, half a step would stay. S3 never says so."""
    url, proxy = run
    missing = proxy.add(Answer(404), method="DELETE", path=f"/2/{names.COMMIT_MARKER}", times=1)

    code, _, err = cli("rm", "-y", url, "2")

    if missing.done:
        assert code == 2
        assert "calls it missing, and shows it" in err
        assert jaxckpt.verify(f"{url}/2").ok
        assert cli("rm", "-y", url, "2")[0] == 0
    with jaxckpt.CheckpointManager(url, mode="r") as manager:
        assert manager.all_steps() == [1, 3]
