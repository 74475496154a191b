"""Facts about object stores and their clients that jaxckpt relies on, found in running stores."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import obstore
import pytest
import tensorstore as ts
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError

from tests.stores import servers
from tests.stores.clients import Obstore, TensorStore, context, spec
from tests.stores.gcs_server import LEAST_PART_BYTES
from tests.stores.servers import ServerFailed

S3 = ["seaweedfs_server", "moto_server"]
BOTH_CLIENTS = [(name, client) for name in [*S3, "gcs_server"] for client in (Obstore, TensorStore)]
# SeaweedFS and Azurite do not list a name with a backslash.
ODD_NAME = "a b+c/é~'&<>?#*%2F,=;:@!$()|^`[]{}\""
THREADS = 4


@pytest.fixture
def store(request, use_store):
    """The store that the test names, with a new bucket."""
    return use_store(request.getfixturevalue(request.param))


@pytest.fixture
def client(request, use_store):
    """A client of a store, with a new bucket."""
    name, kind = request.param
    return kind(use_store(request.getfixturevalue(name)))


def every_store(test):
    names = [*S3, "gcs_server"]
    return pytest.mark.parametrize("store", names, indirect=True)(test)


def every_client(test):
    pairs = [*BOTH_CLIENTS, ("azurite_server", Obstore)]
    ids = [f"{name.removesuffix('_server')}-{kind.__name__}" for name, kind in pairs]
    return pytest.mark.parametrize("client", pairs, ids=ids, indirect=True)(test)


# Conditions


@every_client
def test_create_keeps_the_first_object(client):
    """The second creator is refused, and the object stays as the first one wrote it."""
    results = [client.create("marker", b"first"), client.create("marker", b"second")]

    assert results == [True, False]
    assert client.get("marker") == b"first"


@every_client
def test_swap_refuses_a_stale_version(client):
    """An object is replaced only if it is still the version that the writer has seen."""
    old = client.put("lease", b"1")
    results = [client.swap("lease", b"2", old), client.swap("lease", b"3", old)]

    assert results == [True, False]
    assert client.get("lease") == b"2"


@every_client
def test_swap_does_not_create(client):
    """The version of another object does not fit one that is missing."""
    old = client.put("other", b"1")

    assert not client.swap("missing", b"2", old)
    assert client.names() == ["other"]


@pytest.mark.parametrize("verb", ["create", "swap"])
@every_client
def test_one_of_many_writers_wins(client, verb, request):
    """Of writers at the same moment, exactly one hears that it won, and its data is stored."""
    is_slow = "seaweedfs" in request.node.name  # a contended round takes it a second
    for number in range(2 if is_slow else 50):
        winners = race(client, verb, f"marker-{number}")

        assert len(winners) == 1
        assert client.get(f"marker-{number}") == b"writer %d" % winners[0]


def race(client, verb, name):
    """Returns the numbers of the writers that hear that they won."""
    token = client.put(name, b"before") if verb == "swap" else None
    ready = threading.Barrier(THREADS)

    def write(number):
        data = b"writer %d" % number
        ready.wait()
        return client.swap(name, data, token) if token else client.create(name, data)

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(write, range(THREADS)))
    return [number for number, won in enumerate(results) if won]


@pytest.mark.parametrize("store", S3, indirect=True)
def test_on_s3_equal_bytes_are_the_same_version(store):
    """So only unique contents show that another writer has been there in between."""
    client = Obstore(store)
    old = client.put("lease", b"1")
    client.put("lease", b"2")
    client.put("lease", b"1")

    assert client.swap("lease", b"3", old)


@pytest.mark.parametrize("store", ["gcs_server", "azurite_server"], indirect=True)
def test_elsewhere_each_write_is_a_version(store):
    """On GCS and Azure equal bytes that are written again are another version."""
    client = Obstore(store)
    old = client.put("lease", b"1")
    client.put("lease", b"1")

    assert not client.swap("lease", b"3", old)


# Reads, lists, copies and deletes


@every_client
def test_ranges(client):
    """A range that ends after the object is cut off there."""
    client.put("data", bytes(range(100)))

    assert client.get_range("data", 10, 13) == bytes([10, 11, 12])
    if isinstance(client, Obstore):  # TensorStore refuses such a range
        assert client.get_range("data", 98, 200) == bytes([98, 99])


@pytest.mark.parametrize("name", ["seaweedfs_server", "gcs_server"])
def test_long_listings_and_bulk_deletes(request, proxied, name):
    """A listing with sizes and a delete take a request per 1000 objects; on GCS, one a delete."""
    store, proxy = proxied(request.getfixturevalue(name))
    sizes = {f"many/{number:04}": number % 7 for number in range(1100)}
    client = Obstore(store)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda item: client.put(item[0], bytes(item[1])), sizes.items()))
    proxy.requests.clear()

    assert client.sizes() == sizes
    assert proxy.requests.count() == 2

    assert TensorStore(store).names() == sorted(sizes)

    proxy.requests.clear()
    obstore.delete(client.store, list(sizes))
    assert proxy.requests.count() == (1100 if store.scheme == "gs" else 2)
    assert client.names() == []


@pytest.mark.parametrize("store", [*S3, "gcs_server", "azurite_server"], indirect=True)
def test_folders_are_listed_by_whole_segments(store):
    """A prefix of obstore is a folder: `run/1` does not list `run/10`."""
    client = Obstore(store)
    for name in ("run/1/a", "run/1/b/c", "run/10/a", "run/x"):
        client.put(name, b"")

    found = obstore.list_with_delimiter(client.store, "run")
    assert sorted(found["common_prefixes"]) == ["run/1", "run/10"]
    assert [entry["path"] for entry in found["objects"]] == ["run/x"]
    below = [entry["path"] for page in obstore.list(client.store, "run/1") for entry in page]
    assert sorted(below) == ["run/1/a", "run/1/b/c"]


@pytest.mark.parametrize("store", [*S3, "gcs_server", "azurite_server"], indirect=True)
def test_copies_are_made_by_the_store(store):
    """A copy that must not replace anything works as well, on S3 if it is asked for by its name."""
    options = {"copy_if_not_exists": "multipart"} if store.scheme == "s3" else {}
    client = Obstore(store, **options)
    client.put("from", b"1")
    client.put("taken", b"2")

    obstore.copy(client.store, "from", "to/a b&é")
    obstore.copy(client.store, "from", "new", overwrite=False)
    with pytest.raises(AlreadyExistsError):
        obstore.copy(client.store, "from", "taken", overwrite=False)

    assert {name: client.get(name) for name in client.names()} == {
        "from": b"1",
        "new": b"1",
        "taken": b"2",
        "to/a b&é": b"1",
    }


@every_store
def test_deleting_a_missing_object(store):
    """Succeeds on S3, and is an error on GCS."""
    client = Obstore(store)
    if store.scheme == "s3":
        obstore.delete(client.store, "missing")
        return
    with pytest.raises(FileNotFoundError):
        obstore.delete(client.store, "missing")


@every_store
def test_both_clients_see_the_same_object(store):
    """Also under names with characters that have to be escaped."""
    other, chunks = Obstore(store), TensorStore(store)
    other.put(ODD_NAME, b"by obstore")
    chunks.put(f"{ODD_NAME}/2", b"by tensorstore")

    assert chunks.get(ODD_NAME) == b"by obstore"
    assert other.get(f"{ODD_NAME}/2") == b"by tensorstore"
    assert other.names() == chunks.names() == [ODD_NAME, f"{ODD_NAME}/2"]


@every_store
def test_large_objects(store):
    """An object that obstore uploads in parts is read by TensorStore, whole and in part."""
    data = np.random.default_rng(0).bytes(2 * LEAST_PART_BYTES + 100)
    Obstore(store).put("large", data)

    assert TensorStore(store).get("large") == data
    assert (
        TensorStore(store).get_range("large", LEAST_PART_BYTES - 1, LEAST_PART_BYTES + 1)
        == (data[LEAST_PART_BYTES - 1 : LEAST_PART_BYTES + 1])
    )


@every_store
def test_ocdbt(store):
    """An array that TensorStore writes in OCDBT is read back equal."""
    wanted = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    array = {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": spec(store, "array/")},
        "metadata": {"shape": [64, 64], "chunks": [16, 16], "dtype": "<f4"},
    }

    ts.open(array, create=True, context=context()).result().write(wanted).result()

    found = ts.open(array, context=context()).result().read().result()
    assert np.array_equal(found, wanted)


# The servers themselves


@pytest.mark.parametrize("kind", [Obstore, TensorStore])
def test_rclone_is_not_a_store_for_checkpoints(rclone_server, use_store, kind):
    """It ignores conditions: creating twice succeeds, and so does a stale swap."""
    client = kind(use_store(rclone_server))

    assert client.create("marker", b"first")
    assert client.create("marker", b"second")
    assert client.get("marker") == b"second"

    old = client.put("lease", b"1")
    assert client.swap("lease", b"2", old)
    assert client.swap("lease", b"3", old)


def test_seaweedfs_checks_signatures(seaweedfs_server, use_store):
    """So the tests would notice a client that signs something else than it sends."""
    store = use_store(seaweedfs_server)
    client = Obstore(store, secret_access_key="wrong", retry_config={"max_retries": 0})

    with pytest.raises(PermissionDeniedError):
        client.put("a", b"")


def test_gcs_refuses_another_token(gcs_server, use_store):
    """The clients have to be given the token of the tests."""
    client = Obstore(use_store(gcs_server), bearer_token="wrong")

    with pytest.raises(Exception, match="Invalid credentials"):
        client.get("a")


def test_gcs_counts_requests_and_waits(use_store):
    """Its requests can be counted, and each answer delayed."""
    with servers.gcs() as started:
        store = use_store(started)
        started.running.requests.clear()
        client = Obstore(
            store,
            client_options={"timeout": "200ms", "allow_http": True},
            retry_config={"max_retries": 0},
        )
        client.put("a/b", b"123")

        (request,) = started.running.requests.all(method="PUT")
        assert (request.status, request.received_bytes) == (200, 3)
        assert started.running.requests.count(path="a%2Fb") == 1

        started.running.delay_s = 1.0
        with pytest.raises(GenericError, match="error sending request"):
            client.get("a/b")


def test_gcs_parts_of_an_upload_have_a_least_size(gcs_server, use_store):
    """As in the real one: smaller parts are refused when the upload is finished."""
    client = Obstore(use_store(gcs_server))

    with pytest.raises(GenericError, match="EntityTooSmall"):
        obstore.put(client.store, "a", bytes(1000), chunk_size=400)
    assert client.names() == []


def test_a_server_that_does_not_start_shows_its_output():
    """The error has what the program printed."""
    with (
        pytest.raises(ServerFailed, match="unknown command"),
        servers.running("rclone", ["nonsense"], port=9),
    ):
        pass


def test_a_server_ends_with_its_context():
    """Nothing listens at its port afterwards."""
    with servers.gcs() as own, servers.rclone() as other:
        urls = [own.url, other.url]

    for url in urls:
        with pytest.raises(ConnectionRefusedError):
            servers.send(url, "GET", "/", {})
