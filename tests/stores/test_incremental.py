"""The store itself copies what has not changed since the step before."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt.errors import SaveFailed
from jaxckpt.testing import simulate
from tests.stores.proxy import Answer
from tests.strategies import same

FROZEN = 4 * (1 << 20) * 4


@pytest.fixture
def kept():
    return {f"w{i}": jnp.arange(1 << 20, dtype=jnp.float32) + i for i in range(4)}


@pytest.fixture(params=["moto_server", "gcs_server", "azurite_server", "seaweedfs_server"])
def store(request, proxied):
    server, proxy = proxied(request.getfixturevalue(request.param))
    return f"{server.scheme}://{server.bucket}/run", proxy


def state(step, kept):
    return {"kept": kept, "changes": jnp.full(1000, step), "step": step}


def sent_bytes(proxy):
    return sum(request.received_bytes for request in proxy.requests.all())


def test_what_is_frozen_is_sent_once(store, kept):
    """And each step is complete by itself."""
    root, proxy = store
    sent = []
    with jaxckpt.CheckpointManager(root) as manager:
        for step in range(1, 4):
            proxy.requests.clear()
            manager.save(step, state(step, kept)).result()
            sent.append(sent_bytes(proxy))
        manager.delete(1)
        manager.delete(2)
        manager.save(4, state(4, kept)).result()

    assert sent[0] > FROZEN
    assert all(found < 100_000 for found in sent[1:])
    for step in (3, 4):
        assert same(jaxckpt.restore(f"{root}/{step}"), state(step, kept))
        assert jaxckpt.verify(f"{root}/{step}").ok


def test_compressed_arrays_are_sent_once(store):
    """In objects of several parts, whose size is known only when they are sent."""
    root, proxy = store
    noise = np.random.default_rng(0).standard_normal((4, 1 << 20), np.float32)
    kept, sent = {f"w{i}": jnp.asarray(one) for i, one in enumerate(noise)}, []
    with jaxckpt.CheckpointManager(root, compression="zstd") as manager:
        for step in range(1, 4):
            proxy.requests.clear()
            manager.save(step, state(step, kept)).result()
            sent.append(sent_bytes(proxy))

    assert sent[0] > 8 << 20
    assert all(found < 100_000 for found in sent[1:])
    for step in (1, 2, 3):
        assert same(jaxckpt.restore(f"{root}/{step}"), state(step, kept))
        assert jaxckpt.verify(f"{root}/{step}").ok


def test_a_copy_that_was_not_made_is_noticed(store, kept):
    """The store said that it was. The step fails, the one before stays, and the next is whole."""
    root, proxy = store
    said = "does not see state/d/"
    if root.startswith("az:"):  # where each copy is waited for
        jaxckpt.use_store("az://", jaxckpt.StoreSettings(stall_s=1.0))
        said = "accepted a copy, and did not make it"
    with jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=2)) as manager:
        for step in (1, 2):
            manager.save(step, state(step, kept)).result()
        lie = proxy.add(Answer(200), when=lambda request: request.is_copy, times=1)
        with pytest.raises(SaveFailed, match=said):
            manager.save(3, state(3, kept)).result()
        manager.wait_until_finished()
        assert lie.done == 1
        assert manager.all_steps() == [1, 2]
        assert same(manager.restore(), state(2, kept))
        manager.save(4, state(4, kept)).result()

    assert jaxckpt.verify(f"{root}/4").ok


def test_a_store_that_does_not_copy_is_sent_everything(store, kept, caplog):
    """The step at which that shows fails, and none after it."""
    root, proxy = store
    refused = proxy.add(Answer(403), when=lambda request: request.is_copy)
    with jaxckpt.CheckpointManager(root) as manager:
        manager.save(1, state(1, kept)).result()
        with caplog.at_level(logging.CRITICAL), pytest.raises(SaveFailed, match="did not copy"):
            manager.save(2, state(2, kept)).result()
        for step in (3, 4):
            manager.save(step, state(step, kept)).result()
        assert manager.all_steps() == [1, 3, 4]
    assert refused.done

    for step in (1, 3, 4):
        assert same(jaxckpt.restore(f"{root}/{step}"), state(step, kept))


@pytest.mark.parametrize("copies", [True, False])
def test_an_upload_from_a_local_tier(store, kept, tmp_path, copies):
    """It sends what changed; if the store does not copy the rest, it sends that too."""
    root, proxy = store
    sent = []

    if not copies:
        proxy.add(Answer(403), when=lambda request: request.is_copy)
    with jaxckpt.CheckpointManager(root, local=tmp_path / "local") as manager:
        for step in range(1, 6):
            proxy.requests.clear()
            manager.save(step, state(step, kept)).durable()
            sent.append(sent_bytes(proxy))
            manager.wait_until_finished()
        assert not manager.problems

    assert all(found > FROZEN for found in (sent[:2] if copies else sent))
    assert not copies or all(found < 100_000 for found in sent[2:])
    for step in range(1, 6):
        assert same(jaxckpt.restore(f"{root}/{step}"), state(step, kept))
        assert jaxckpt.verify(f"{root}/{step}").ok


def test_several_processes(store, mesh):
    """Each refers to the files of its own database."""
    root, proxy = store
    sharding = NamedSharding(mesh, PartitionSpec("x", "y"))
    kept = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    sent = []

    def state(step):
        changes = np.full((64, 64), step, np.float32)
        return {"kept": jax.device_put(kept, sharding), "w": jax.device_put(changes, sharding)}

    def run(processes):
        with jaxckpt.CheckpointManager(root) as manager:
            for step in range(1, 4):
                manager.save(step, state(step)).result()
                if processes.index == 0:
                    sent.append(sent_bytes(proxy))

    simulate(4, run)
    assert sent[0] > kept.nbytes
    assert sent[-1] - sent[0] < 0.1 * kept.nbytes
    for step in range(1, 4):
        assert same(jaxckpt.restore(f"{root}/{step}", state(step)), state(step))
        assert jaxckpt.verify(f"{root}/{step}").ok
