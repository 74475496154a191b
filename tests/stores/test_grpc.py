"""TensorStore reaches Google Cloud Storage over gRPC where the settings ask for it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import jaxckpt
from jaxckpt.errors import SaveFailed
from jaxckpt.format import names
from jaxckpt.storage import locate
from tests.stores import gcs_grpc

TREE = {"w": np.arange(1 << 20, dtype=np.float32), "b": np.arange(10.0), "step": 3}


@pytest.fixture
def reached(gcs_server, use_store):
    """The URL of a new bucket, and the names of the methods that are called."""
    server = use_store(gcs_server)
    with gcs_grpc.serving(server.running) as (target, calls):
        reach(server, target)
        yield f"gs://{server.bucket}", calls


def reach(server, target):
    settings = jaxckpt.StoreSettings(
        endpoint=server.url, grpc_endpoint=target, timeout_s=1.0, tries=2
    )
    jaxckpt.use_store("gs://", settings)


def same(found):
    return found.keys() == TREE.keys() and all(np.array_equal(found[k], TREE[k]) for k in TREE)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_checkpoint_is_saved_restored_and_converted(reached, tmp_path, compression):
    """TensorStore writes and reads over gRPC, all else sees the same objects over HTTP."""
    url, calls = reached

    jaxckpt.save(f"{url}/a", TREE, compression=compression)
    assert set(calls) == {"write"}
    jaxckpt.convert(f"{url}/a", f"{url}/b", ocdbt=False)  # its chunks are read by TensorStore
    assert same(jaxckpt.restore(f"{url}/b"))
    assert "read" in calls
    jaxckpt.convert(f"{url}/b", tmp_path / "c")

    for path in (f"{url}/a", f"{url}/b", tmp_path / "c"):
        assert same(jaxckpt.restore(path))
        assert jaxckpt.verify(path).ok


def test_a_file_too_large_for_memory_goes_over_http(reached, limits):
    """In parts, as without gRPC; the limit is lowered instead of sending 256 MiB."""
    limits("jaxckpt.storage._object", _MOST_GRPC_BYTES=1 << 20)
    url, calls = reached

    jaxckpt.save(f"{url}/a", {"w": TREE["w"]})

    assert calls == ["write"]  # of the nodes
    assert np.array_equal(jaxckpt.restore(f"{url}/a")["w"], TREE["w"])


def test_a_run_keeps_its_last_steps(reached):
    """And is read back without gRPC."""
    url, _ = reached
    with jaxckpt.CheckpointManager(f"{url}/run", keep=jaxckpt.KeepPolicy(last=2)) as manager:
        for step in range(4):
            manager.save(step, TREE)
    jaxckpt.use_store("gs://", jaxckpt.StoreSettings(endpoint=locate(url)[0].settings.endpoint))

    assert same(jaxckpt.restore(f"{url}/run"))
    assert {name for name in locate(url)[0].entries(f"{url}/run") if name.isdecimal()} == {"2", "3"}


def test_a_store_that_does_not_answer_fails_the_save(gcs_server, use_store):
    """Each try has `timeout_s`; nothing is committed."""
    over = threading.Event()
    server = use_store(gcs_server)
    with gcs_grpc.serving(server.running, writes_end=over) as (target, calls):
        reach(server, target)
        with pytest.raises(SaveFailed, match="nothing was read or written for 1 s"):
            jaxckpt.save(f"gs://{server.bucket}/a", TREE)
        over.set()
        assert calls == ["write"] * 2

    storage, path = locate(f"gs://{server.bucket}/a")
    assert {*storage.files(path)} == {names.WRITER}  # the store may still act on the request


@pytest.mark.parametrize(
    ("url", "target"), [("s3://", "dns:///storage.example.com"), ("gs://", "storage.example.com")]
)
def test_a_wrong_setting_is_refused(url, target):
    """It is for gs:// only, and names how the target is found."""
    with pytest.raises(ValueError, match="grpc_endpoint"):
        jaxckpt.use_store(url, jaxckpt.StoreSettings(grpc_endpoint=target))
