"""What is special about `az://`: accounts, keys and shared access signatures, and large files."""

from __future__ import annotations

import base64
import hmac
import traceback
from urllib.parse import quote

import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt.errors import SaveFailed, StoreError
from jaxckpt.format import names
from jaxckpt.storage import StoreSettings, locate, use_store
from tests.commandline import cli
from tests.stores.proxy import Answer
from tests.stores.servers import ACCOUNT, ACCOUNT_KEY

TREE = {"w": np.arange(12.0), "step": 3}
OTHER_KEY = base64.b64encode(b"another key").decode()


@pytest.fixture
def server(azurite_server, use_store):
    return use_store(azurite_server)


def shared_signature(container, permissions):
    """A signature for a container, such as the portal makes."""
    version, end = "2021-12-02", "2090-01-01T00:00:00Z"
    resource = f"/blob/{ACCOUNT}/{container}"
    fields = [permissions, "", end, resource, "", "", "", version, "c", *[""] * 7]
    key = base64.b64decode(ACCOUNT_KEY)
    digest = base64.b64encode(hmac.digest(key, "\n".join(fields).encode(), "sha256")).decode()
    parts = {"sv": version, "se": end, "sr": "c", "sp": permissions, "sig": digest}
    return "&".join(f"{name}={quote(value, safe='')}" for name, value in parts.items()), digest


def error_of(call):
    """The text of an error with all its causes, of which a StoreError is the first."""
    with pytest.raises((StoreError, SaveFailed)) as caught:
        call()
    assert isinstance(caught.value.__cause__ or caught.value, StoreError)
    return "".join(traceback.format_exception(caught.value))


def test_the_account_is_given_or_of_the_environment(server, monkeypatch):
    """Its name is no secret, so settings have it; without one, the error says what to set."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    text = error_of(lambda: locate(f"az://{server.bucket}/a"))
    assert "Account must be specified" in text
    assert "AZURE_STORAGE_ACCOUNT_NAME" in text

    endpoint = f"{server.url}/{ACCOUNT}"
    use_store("az://", StoreSettings(endpoint=endpoint, account=ACCOUNT))
    jaxckpt.save(f"az://{server.bucket}/a", TREE)
    use_store("az://", StoreSettings(endpoint=endpoint))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", ACCOUNT)

    assert jaxckpt.restore(f"az://{server.bucket}/a")["step"] == 3


def test_a_container_that_is_not_there(server):
    """Is named, at the first request of a save, of a restore and of the commands."""
    for call in (jaxckpt.restore, lambda url: jaxckpt.save(url, TREE), jaxckpt.open):
        text = error_of(lambda call=call: call("az://no-such-container/a"))
        assert "there is no bucket az://no-such-container. Make it" in text
    assert "no bucket az://no-such-container" in cli("ls", "az://no-such-container/a")[2]


@pytest.mark.parametrize("key", [OTHER_KEY, "not base64: secret"])
def test_a_wrong_key(server, monkeypatch, key):
    """Is not taken for a missing permission, and not shown."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", key)

    text = error_of(lambda: jaxckpt.save(f"az://{server.bucket}/a", TREE))

    assert key not in text
    assert "AZURE_STORAGE_ACCOUNT" in text


def test_a_shared_signature_is_enough(server, monkeypatch):
    """To save and delete in one container; its signature is in no error."""
    signed, digest = shared_signature(server.bucket, "racwdl")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", signed)
    root = f"az://{server.bucket}/run"
    with jaxckpt.CheckpointManager(root, keep=jaxckpt.KeepPolicy(last=1)) as manager:
        for step in range(3):
            manager.save(step, TREE)
    jaxckpt.fork(f"{root}/2", f"az://{server.bucket}/other")
    assert jaxckpt.verify(f"az://{server.bucket}/other").ok

    signed, digest = shared_signature(server.bucket, "rl")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", signed)
    # As in a new process: a client reads its credentials once.
    monkeypatch.setattr("jaxckpt.storage._object._storages", {})
    assert jaxckpt.restore(root)["step"] == 3
    text = error_of(lambda: jaxckpt.save(f"az://{server.bucket}/b", TREE))
    assert "cannot create: no permission" in text
    assert digest not in text
    assert quote(digest, safe="") not in text
    assert "grant write" in cli("doctor", f"az://{server.bucket}/b")[1]


def test_a_large_file_is_written_in_parts(azurite_server, proxied, monkeypatch):
    """A part that fails is sent again, alone; each part has the deadline of a request."""
    server, proxy = proxied(azurite_server)
    values = np.random.default_rng(0).integers(0, 9, 5 << 20, np.int32)
    proxy.add(Answer(503), path="comp=block&", times=2)

    jaxckpt.save(f"az://{server.bucket}/a", {"w": values})

    sent = [r.received_bytes for r in proxy.requests.all(method="PUT", path="/d/")]
    assert max(sent) == 8 << 20
    assert sum(sent) < values.nbytes + 3 * (8 << 20)
    assert np.array_equal(jaxckpt.restore(f"az://{server.bucket}/a")["w"], values)


def test_orbax_reads_a_copy(server, tmp_path):
    """Of a step that was copied to a disk."""
    ocp = pytest.importorskip("orbax.checkpoint")
    with jaxckpt.CheckpointManager(f"az://{server.bucket}/run") as manager:
        manager.save(1, TREE, metrics={"loss": 0.5})
    storage, path = locate(f"az://{server.bucket}/run/1")
    for name, entry in storage.files(path).items():
        file = tmp_path / "1" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(storage.read(f"{path}/{name}", max_bytes=entry.size))

    found = ocp.StandardCheckpointer().restore(tmp_path / "1" / "state")

    assert np.array_equal(found["w"], TREE["w"])


def test_settings_of_a_url():
    """Only endpoints of Azure have a path, as those of emulators do."""
    use_store("az://", StoreSettings(endpoint="http://127.0.0.1:10000/devstoreaccount1"))
    for scheme in ("gs", "s3"):
        with pytest.raises(ValueError, match="no path"):
            use_store(f"{scheme}://", StoreSettings(endpoint="http://127.0.0.1:10000/path"))


def test_a_copy_that_is_only_begun_is_waited_for(azurite_server, proxied):
    """Azure may answer before it has copied; if it never does, the next steps are sent."""
    server, proxy = proxied(azurite_server)
    url = f"az://{server.bucket}"
    use_store("az://", StoreSettings(stall_s=1.0))
    frozen = jnp.ones(1 << 20)
    begun = proxy.add(Answer(202), when=lambda request: request.is_copy)
    with jaxckpt.CheckpointManager(f"{url}/run") as manager:
        manager.save(1, {"w": frozen, "step": 1}).result()
        with pytest.raises(SaveFailed, match="accepted a copy, and did not make it"):
            manager.save(2, {"w": frozen, "step": 2}).result()
        storage, path = locate(f"{url}/run/2")  # the copy may still be made
        assert [*storage.files(path)] == [names.WRITER]
        for step in (3, 4):
            manager.save(step, {"w": frozen, "step": step}).result()
        assert manager.all_steps() == [1, 3, 4]
    assert begun.done
