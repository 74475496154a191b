"""On gs://, Orbax reads what jaxckpt writes and the other way round, through its own code."""

from __future__ import annotations

import pytest

import jaxckpt
from jaxckpt.errors import StoreError
from jaxckpt.storage import locate
from tests.stores.children import reach
from tests.stores.orbax_on_gs import ITEMS, is_state, like, run_orbax, state
from tests.stores.proxy import Hang

pytest.importorskip("gcsfs")


@pytest.fixture
def server(gcs_server, use_store):
    return use_store(gcs_server)


@pytest.fixture
def root(server):
    return f"gs://{server.bucket}/runs"


@pytest.fixture(scope="module")
def orbax_server(gcs_server):
    """A store with a bucket to which Orbax wrote."""
    made = gcs_server.with_new_bucket()
    run_orbax("write", f"gs://{made.bucket}/runs", made)
    return made


@pytest.fixture
def written(orbax_server, server, root):
    """What Orbax wrote, in the bucket of this test."""
    buckets = server.running
    for entry in buckets.bucket(orbax_server.bucket).list().objects:
        buckets.bucket(server.bucket).put(entry.name, entry.data)
    return root


def delete(url):
    storage, path = locate(url)
    storage.delete_files([path])


def test_orbax_reads_what_we_write(server, root):
    """In every layout, v0 and v1, bit for bit; a step without its marker is not listed."""
    for name, item in ITEMS.items():
        jaxckpt.save(f"{root}/{name}", state(1), item=item)
    for run, item in (("run", "state"), ("run default", "default")):
        with jaxckpt.CheckpointManager(f"{root}/{run}", item=item) as manager:
            for step in (1, 2, 3):
                manager.save(step, state(step), metrics={"loss": 1 / step})
        delete(f"{root}/{run}/3/commit_success.txt")  # as a writer killed before the commit
    files = locate(root)[0].files(root)

    found = run_orbax("read", root, server)

    lists = {name: found.pop(name) for name in [*found] if not isinstance(found[name], bool)}
    assert all(found.values()), found
    assert lists == {
        "run, steps": [1, 2],
        "run default, steps": [1, 2],
        "run, v1, steps": [1, 2],
        "run, metrics": {"loss": 0.5},
        "run default, metrics": {"loss": 0.5},
    }
    assert locate(root)[0].files(root) == files


def test_orbax_reads_what_we_convert(server, root, tmp_path):
    """The item of a copy in a bucket is complete for Orbax, too."""
    jaxckpt.save(tmp_path / "a", state(1))

    jaxckpt.convert(tmp_path / "a", f"{root}/a")

    assert {"a/commit_success.txt", "a/state/commit_success.txt"} <= {*locate(root)[0].files(root)}


def test_we_read_what_orbax_writes(written):
    """Every kind, bit for bit; `verify`, `convert` and a manager take them as they do locally."""
    places = ["StandardCheckpointer", "PyTreeCheckpointer", "v1"]
    for place in places:
        assert is_state(jaxckpt.restore(f"{written}/{place}", like()), 1)
    for place in ("run0", "run1", "run0/3", "run0/3/default", "run1/3/state"):
        assert is_state(jaxckpt.restore(f"{written}/{place}", like()), 3)
        assert jaxckpt.verify(f"{written}/{place}").ok
    jaxckpt.convert(f"{written}/run0/2", f"{written}/copy")
    assert is_state(jaxckpt.restore(f"{written}/copy", like()), 2)

    for run in ("run0", "run1"):
        with jaxckpt.CheckpointManager(f"{written}/{run}", mode="r") as manager:
            assert manager.all_steps() == [1, 2, 3]
            assert is_state(manager.restore(like()), 3)
            assert not manager.problems


@pytest.mark.parametrize("place", ["StandardCheckpointer", "v1"])
def test_a_black_hole_is_an_error_within_the_deadline(orbax_server, proxied, trial, place):
    """TensorStore reads it, and would try eight times for a minute each."""
    server, proxy = proxied(orbax_server)
    buckets = server.running
    for entry in buckets.bucket(orbax_server.bucket).list().objects:
        buckets.bucket(server.bucket).put(entry.name, entry.data)
    url = f"gs://{server.bucket}/runs/{place}"
    assert is_state(jaxckpt.restore(url, like()), 1)
    reach(url, server.env, timeout_s=1.0)
    hole = proxy.add(Hang(), path="/storage/v1/")  # which is TensorStore's protocol

    with trial("37", f"no answer to TensorStore in a restore of Orbax's {place}"):
        with pytest.raises(StoreError, match=r"nothing was read or written for 1 s"):
            jaxckpt.restore(url, like())
        assert hole.done
        proxy.heal()
        reach(url, server.env)
        assert is_state(jaxckpt.restore(url, like()), 1)


def test_we_continue_what_orbax_began(written):
    """Its steps stay, and the next one is saved beside them, for both."""
    with jaxckpt.CheckpointManager(
        f"{written}/run0", item="default", keep=jaxckpt.KeepPolicy(last=1)
    ) as manager:
        assert is_state(manager.restore(like()), 3)
        manager.save(4, state(4))
        manager.save(5, state(5))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3, 5]
        manager.delete(1)

    assert jaxckpt.CheckpointManager(f"{written}/run0", mode="r").all_steps() == [2, 3, 5]
    assert not [name for name in locate(written)[0].files(f"{written}/run0") if name[:2] == "1/"]


@pytest.mark.parametrize("run", ["run0", "run1"])
def test_a_half_step_of_orbax_is_none(written, run):
    """Without the marker that Orbax writes last it is not listed, restored or replaced."""
    item = "default" if run == "run0" else "state"
    delete(f"{written}/{run}/3/commit_success.txt")
    files = locate(written)[0].files(f"{written}/{run}/3")

    for place in ("3", f"3/{item}"):
        with pytest.raises(jaxckpt.CheckpointNotFound, match=r"commit_success.txt"):
            jaxckpt.restore(f"{written}/{run}/{place}", like())
    assert is_state(jaxckpt.restore(f"{written}/{run}", like()), 2)
    with jaxckpt.CheckpointManager(f"{written}/{run}", item=item) as manager:
        assert manager.all_steps() == [1, 2]
        assert is_state(manager.restore(like()), 2)
        assert "/3 is not a committed step" in str(manager.problems)
        with pytest.raises(jaxckpt.StepExists, match=r"not committed.*delete it first"):
            manager.save(3, state(3)).result()

    assert locate(written)[0].files(f"{written}/{run}/3") == files
