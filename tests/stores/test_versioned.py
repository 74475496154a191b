"""Buckets with versions: what is deleted or replaced is gone, whatever the store keeps."""

from __future__ import annotations

import pytest

import jaxckpt
from jaxckpt.errors import CheckpointNotFound
from tests.commandline import cli
from tests.stores.children import is_state, state
from tests.stores.servers import ACCESS_KEY, REGION, SECRET_KEY
from tests.stores.test_leftovers import steps_with_files

boto3 = pytest.importorskip("boto3")


@pytest.fixture(params=["moto_server", "seaweedfs_server"])
def bucket(request, use_store):
    """A bucket with versions: its URL, and a client that shows them."""
    server = use_store(request.getfixturevalue(request.param))
    keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
    client = boto3.client("s3", endpoint_url=server.url, region_name=REGION, **keys)
    enabled = {"Status": "Enabled"}
    client.put_bucket_versioning(Bucket=server.bucket, VersioningConfiguration=enabled)
    yield f"s3://{server.bucket}", client
    client.close()


def test_a_step_that_is_deleted_stays_deleted(bucket):
    """Its number can be saved again; `gc` deletes, and counts what there still is."""
    url, client = bucket
    run = f"{url}/run"
    with jaxckpt.CheckpointManager(run, keep=jaxckpt.KeepPolicy(last=2)) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step)).result()
        manager.delete(3)
        manager.save(3, state(30)).result()
    with jaxckpt.CheckpointManager(run) as manager:  # takes the lock with a condition
        assert manager.all_steps() == [2, 3]
        assert is_state(manager.restore(), 30)
        manager.save(4, state(4)).result()

    assert cli("gc", run, "--last", "1", "--yes")[0] == 0

    assert steps_with_files(run) == {"4"}
    with pytest.raises(CheckpointNotFound):
        jaxckpt.restore(f"{run}/3")
    kept = client.list_object_versions(Bucket=url.removeprefix("s3://"))
    assert any("/3/" in one["Key"] for one in kept["DeleteMarkers"])  # a control: it has versions


def test_a_checkpoint_is_replaced(bucket):
    """Files that are created if absent are absent after a deletion."""
    url, _ = bucket
    jaxckpt.save(f"{url}/a", state(1))

    jaxckpt.save(f"{url}/a", state(2), overwrite="delete_first")

    assert is_state(jaxckpt.restore(f"{url}/a"), 2)
    assert jaxckpt.verify(f"{url}/a").ok
