"""Object stores keep the contract of a storage, and their locks end with whoever took them."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import Counter
from urllib.parse import unquote

import numpy as np
import obstore
import pytest

from jaxckpt.errors import SaveFailed, StoreError
from jaxckpt.storage import StoreSettings, locate, use_store
from jaxckpt.storage._locks import LeasedLock, steady_s
from jaxckpt.storage._requests import REQUESTS_AT_ONCE, callers
from tests.storage_contract import StorageContract
from tests.stores.clients import Obstore
from tests.stores.proxy import Answer, Delay, Reset
from tests.stores.servers import ACCOUNT

_numbers = itertools.count()
LIMIT = 1 << 20


class _InABucket(StorageContract):
    @pytest.fixture
    def storage(self, url):
        return locate(url)[0]

    @pytest.fixture
    def root(self, url):
        return locate(f"{url}/contract {next(_numbers)}/run")[1]


def _skip_backslash(request, store):
    if "\\" in getattr(getattr(request.node, "callspec", None), "params", {}).get("name", ""):
        pytest.skip(f"{store} takes a backslash for a slash")


class TestMoto(_InABucket):
    @pytest.fixture
    def url(self, moto_server, use_store):
        return f"s3://{use_store(moto_server).bucket}"


class TestGcs(_InABucket):
    @pytest.fixture
    def url(self, gcs_server, use_store):
        return f"gs://{use_store(gcs_server).bucket}"


class TestAzurite(_InABucket):
    @pytest.fixture
    def url(self, azurite_server, use_store):
        return f"az://{use_store(azurite_server).bucket}"

    @pytest.fixture(autouse=True)
    def no_backslash(self, request):
        _skip_backslash(request, "Azure")


class TestSeaweedFs(_InABucket):
    @pytest.fixture
    def url(self, seaweedfs_server, use_store):
        return f"s3://{use_store(seaweedfs_server).bucket}"

    @pytest.fixture(autouse=True)
    def no_backslash(self, request):
        _skip_backslash(request, "SeaweedFS")

    def test_delete_takes_a_tree_and_nothing_else(self, storage, root):
        """SeaweedFS lists a directory for a while after the last object in it was deleted."""
        for name in ("a", "a/b", "ab", "a b"):
            storage.write(f"{root}/{name}/f", b"1")

        storage.delete(f"{root}/a")

        assert storage.kind(f"{root}/a") is None
        assert storage.files(f"{root}/a") == {}
        assert [*storage.entries(f"{root}/a b")] == ["f"]
        assert [*storage.entries(f"{root}/ab")] == ["f"]


@pytest.fixture(params=["moto_server", "gcs_server", "azurite_server"])
def server(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def root(server, use_store):
    made = use_store(server)
    return f"{made.scheme}://{made.bucket}/run"


def settings(server, **more):
    path = f"/{ACCOUNT}" if server.scheme == "az" else ""
    return StoreSettings(endpoint=server.url + path, region="us-east-1", **more)


def test_the_root_of_a_bucket_is_a_directory(server, root):
    """No object has its name, so no store is asked."""
    storage, path = locate(root.rpartition("/")[0])

    assert storage.kind(path) == "dir"


def test_no_object_is_deleted_twice_because_another_is_missing(gcs_server, proxied):
    """Between the two, another writer may have created it anew."""
    server, proxy = proxied(gcs_server)
    url = f"gs://{server.bucket}"
    storage, path = locate(f"{url}/here")
    storage.create(path, b"1")

    storage.delete_files([f"{url}/missing", path, f"{url}/missing too"])

    assert storage.kind(path) is None
    deleted = Counter(one.path for one in proxy.requests.all(method="DELETE"))
    assert {n for path, n in deleted.items() if ".jaxckpt-tmp-" not in path} == {1}


# --- locks -------------------------------------------------------------------------------------


def test_a_lock_that_nobody_renews_is_taken(server, root):
    """After `lease_s` without a renewal another writer takes it, and the first one knows."""
    url = root.rpartition("/")[0]
    use_store(url, settings(server, lease_s=2))
    storage, path = locate(f"{root}/lock")
    dead = storage.hold(path)
    assert dead is not None
    dead.drop()  # as when its process is killed: nobody renews it

    assert storage.hold(path) is None
    time.sleep(4)  # the store's times have whole seconds
    taken = storage.hold(path)

    assert taken is not None
    assert storage.hold(path) is None
    taken.release()


def test_a_lock_is_renewed_until_it_is_released(server, root):
    """A lock outlives its lease while its holder lives, whatever its threads wait for."""
    url = root.rpartition("/")[0]
    use_store(url, settings(server, lease_s=2))
    storage, path = locate(f"{root}/lock")
    hold, answers = storage.hold(path), threading.Event()
    assert hold is not None
    for _ in range(2 * REQUESTS_AT_ONCE):  # reads of another store, which does not answer
        callers().submit(answers.wait)

    time.sleep(5)  # longer than the lease, which is renewed in the background meanwhile

    answers.set()
    assert storage.hold(path) is None
    hold.release()
    again = storage.hold(path)
    assert again is not None
    again.release()


@pytest.mark.parametrize("single_writer", [False, True])
def test_a_live_lock_stays_when_this_machines_clock_jumps(server, root, monkeypatch, single_writer):
    """Its age is told by the store's clock, of which this machine only counts the seconds since."""
    use_store(root.rpartition("/")[0], settings(server, single_writer=single_writer))
    storage, path = locate(f"{root}/lock")
    held = storage.hold(path)
    assert held is not None
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 7200)

    assert storage.hold(path) is None
    held.release()


def test_a_holder_that_was_replaced_does_not_come_back(server, root):
    """A process that was stopped for longer than its lease cannot renew it."""
    url = root.rpartition("/")[0]
    use_store(url, settings(server, lease_s=2))
    storage, path = locate(f"{root}/lock")
    stopped = storage.hold(path)
    assert stopped is not None
    version = stopped._version
    stopped.drop()
    storage._clock += 4  # the store's times have whole seconds
    taken = storage.hold(path)
    assert taken is not None

    stopped._version = version
    assert not stopped.renew()
    assert taken.renew()
    taken.release()


def test_a_process_that_stood_still_asks_whether_it_still_has_its_lock(server, root):
    """Nobody can take a live lease, so until then it need not ask."""
    use_store(root.rpartition("/")[0], settings(server))
    storage, path = locate(f"{root}/lock")
    hold = storage.hold(path)

    assert hold.goes_on()
    hold._asked_s -= storage.settings.lease_s  # as if so much time had passed
    assert hold.goes_on()
    storage.write(path, b"another writer's")
    assert hold.goes_on()
    hold._asked_s -= storage.settings.lease_s
    assert not hold.goes_on()
    hold.release()


def test_a_deletion_is_sent_again_only_after_a_check(gcs_server, proxied):
    """The process may have stood still between the two requests."""
    server, proxy = proxied(gcs_server)
    storage, path = locate(f"gs://{server.bucket}/here")
    storage.create(path, b"1")
    fault = proxy.add(Answer(503), method="DELETE", path="here")
    checks = itertools.count()

    def check():
        if next(checks) == 2:  # before all, before the first try, before the second
            raise SaveFailed("another writer has it")

    with pytest.raises(SaveFailed):
        storage.delete_files([path], check=check)

    assert fault.done == 1
    assert storage.kind(path) == "file"


@pytest.mark.parametrize(("found", "writes"), [({}, 1), ({"last_modified": None}, 2)])
def test_a_lease_that_an_earlier_try_renewed_is_not_counted_from_this_one(found, writes):
    """It has the time of its write then, and so is soon renewed again."""
    versions = []

    def write(*_, **__):
        versions.append(found | {"e_tag": str(len(versions))})
        return versions[-1]

    lease = LeasedLock("s3://bucket/lock", 600, {"e_tag": "0"}, write, asked_s=steady_s() - 500)

    assert lease.renew()
    assert lease.goes_on()
    assert len(versions) == writes


def test_a_lease_is_renewed_again_whatever_went_wrong():
    def write(*_, **__):
        raise RuntimeError("a panic of the client")

    lease = LeasedLock("s3://bucket/lock", 600, {"e_tag": "0"}, write, asked_s=steady_s())
    lease.due_s = math.inf  # as while it is being renewed

    lease.keep()

    assert lease.due_s < math.inf


# --- a store that answers that something else is under way -------------------------------------


@pytest.fixture
def tested(server, proxied):
    """A storage whose store has been tested, a path in it, and the proxy before it."""
    behind, proxy = proxied(server)
    url = f"{behind.scheme}://{behind.bucket}"
    use_store(url, settings(behind, lease_s=3600))  # no lock is renewed in the background
    storage, path = locate(f"{url}/here")
    storage.create(f"{url}/other", b"1")
    return storage, path, proxy


def refuse_once(proxy, status):
    return proxy.add(Answer(status), method="PUT", path="/here", times=1)


def test_a_create_that_conflicts_is_sent_again(tested):
    storage, path, proxy = tested
    fault = refuse_once(proxy, 409)

    assert storage.create(path, b"1")
    assert fault.done == 1
    assert storage.read(path, max_bytes=LIMIT) == b"1"


def test_a_create_that_conflicts_with_another_writer_has_lost(tested):
    storage, path, proxy = tested
    storage.write(path, b"another writer's")
    fault = refuse_once(proxy, 409)

    assert not storage.create(path, b"1")
    assert fault.done == 1


def test_a_write_that_conflicts_is_sent_again(tested):
    storage, path, proxy = tested
    fault = refuse_once(proxy, 409)

    storage.write(path, b"1")

    assert fault.done == 1
    assert storage.read(path, max_bytes=LIMIT) == b"1"


def test_a_lock_that_conflicts_is_taken(tested):
    """At a file that is there, and not held."""
    storage, path, proxy = tested
    storage.write(path, b"1")
    fault = refuse_once(proxy, 409)

    hold = storage.hold(path)

    assert fault.done == 1
    assert hold is not None
    hold.release()


def test_a_renewal_that_conflicts_keeps_the_lock_and_does_not_count(tested):
    """The next one does."""
    storage, path, proxy = tested
    hold = storage.hold(path)
    before_s = hold._asked_s
    fault = refuse_once(proxy, 409)

    assert hold.renew()
    assert (fault.done, hold._asked_s) == (1, before_s)
    assert hold.renew()
    assert hold._asked_s > before_s
    hold.release()


@pytest.mark.parametrize("server", ["gcs_server"], indirect=True)
def test_a_renewal_whose_answer_is_lost_does_not_count_from_the_next(tested):
    """Which is refused and finds the first one's object, where a version is not a hash of bytes."""
    storage, path, proxy = tested
    hold = storage.hold(path)
    before_s = hold._asked_s
    proxy.add(Reset(applied=True), method="PUT", path="/here")

    with pytest.raises(StoreError):
        hold.renew()
    proxy.heal()

    assert hold.renew()
    assert hold._asked_s == before_s
    hold.release()


def test_a_plain_write_that_is_refused_by_a_condition_is_told(tested):
    """Not by an error of the client's own."""
    storage, path, proxy = tested
    refuse_once(proxy, 412)

    with pytest.raises(StoreError, match=r"cannot write.*412"):
        storage.write(path, b"1")


def test_a_local_file_that_is_gone_during_an_upload_is_named(server, root):
    """Not as an object that does not exist."""
    storage, path = locate(f"{root}/large")

    def pieces():
        yield bytes(20 << 20)
        raise FileNotFoundError(2, "No such file or directory", "/local/file")

    with pytest.raises(FileNotFoundError) as caught:
        storage.write(path, pieces())

    assert caught.value.filename == "/local/file"
    assert storage.kind(path) is None


# --- what a store must be able to do -----------------------------------------------------------


def test_a_store_without_conditional_writes_is_refused(rclone_server, use_store, monkeypatch):
    """Two jobs could both commit: the reason is told, and what allows one job to go on."""
    url = f"s3://{use_store(rclone_server).bucket}/run"
    storage, path = locate(f"{url}/f")

    with pytest.raises(StoreError, match=r"two jobs could both commit.*single_writer=True"):
        storage.create(path, b"1")
    assert storage.kind(path) is None

    monkeypatch.setenv("JAXCKPT_SINGLE_WRITER", "1")
    storage, path = locate(f"{url}/f")
    assert storage.create(path, b"1")


def test_a_slow_write_makes_no_lock_look_old(server, proxied):
    """The store's clock is told by when a write was answered, not by when it was sent."""
    behind, proxy = proxied(server)
    url = f"{behind.scheme}://{behind.bucket}"
    use_store(url, settings(behind))
    storage, path = locate(f"{url}/f")
    numbers = itertools.count()
    fault = proxy.add(Delay(3.0), method="PUT", when=lambda _: next(numbers) == 2)  # a replacement

    storage.create(path, b"1")

    assert fault.done == 1
    assert storage._clock < time.time() - steady_s() + 1  # the store's times have whole seconds


@pytest.mark.parametrize("number", range(5))
def test_another_writer_deletes_the_probe(place, number):
    """Before any request of the probe: it does not count as a fault of the store."""
    url, server, proxy = place
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.at("http://{}:{}".format(*proxy.target)).env.items():
            patch.setenv(name, value)
        past_the_proxy = Obstore(server)
    requests = []

    def delete_before(request):
        if ".jaxckpt-tmp-" in unquote(request.path):
            requests.append(request)
            if len(requests) == number + 1:
                obstore.delete(past_the_proxy.store, past_the_proxy.names())
        return False

    proxy.add(Answer(500), when=delete_before)
    storage, path = locate(f"{url}/x/f")

    assert storage.create(path, b"1")
    assert storage.read(path, max_bytes=LIMIT) == b"1"
    assert len(requests) > number


def test_a_probe_that_fails_is_made_again(server, proxied):
    """A store that stops answering in the middle of it has shown nothing yet."""
    behind, proxy = proxied(server)
    url = f"{behind.scheme}://{behind.bucket}"
    use_store(url, settings(behind, tries=1))
    storage, path = locate(f"{url}/f")
    proxy.add(Answer(503), when=lambda request: request.number >= 4)  # the last of its conditions

    with pytest.raises(StoreError, match="overloaded"):
        storage.create(path, b"1")
    proxy.heal()
    proxy.requests.clear()

    assert storage.create(path, b"1")
    assert proxy.requests.count(path="jaxckpt") > 4


def test_a_renewal_whose_answer_is_lost_keeps_the_lock(server, proxied):
    """The store has the renewal; the next one finds another version, which is its own."""
    behind, proxy = proxied(server)
    url = f"{behind.scheme}://{behind.bucket}"
    use_store(url, settings(behind))
    storage, path = locate(f"{url}/lock")
    hold = storage.hold(path)
    assert hold is not None
    proxy.add(Reset(applied=True), method="PUT", path="/lock")

    with pytest.raises(StoreError):
        hold.renew()
    proxy.heal()

    assert hold.renew()
    assert storage.hold(path) is None
    hold.release()


def test_a_silent_store_is_not_the_end_of_a_file(server, proxied):
    """Whatever the object's name contains: an end that comes early counts as damage."""
    behind, proxy = proxied(server)
    url = f"{behind.scheme}://{behind.bucket}"
    use_store(url, settings(behind, tries=1))
    storage, path = locate(f"{url}/orange 416/f")
    storage.write(path, b"12345")
    proxy.add(Answer(503), path="/f")

    with pytest.raises(StoreError, match="overloaded"):
        storage.read_into(path, 3, [np.zeros(2, np.uint8)])


def test_a_read_in_parts_is_whole(server, root):
    """A read of more than one part fills its buffers in order."""
    storage, path = locate(f"{root}/large")
    data = np.random.default_rng(0).integers(0, 256, 20 << 20, np.uint8)
    storage.write(path, data.tobytes())
    buffers = [np.zeros(n, np.uint8) for n in (1, 9 << 20, 0, (11 << 20) - 7)]

    storage.read_into(path, 6, buffers)

    assert np.array_equal(np.concatenate(buffers), data[6:])
    with pytest.raises(EOFError):
        storage.read_into(path, 7, buffers)
    with pytest.raises(EOFError):
        storage.read_into(path, 1 << 30, buffers[:1])


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_refused(root, tmp_path):
    """The clients' threads are missing there, and it would hang."""
    storage, path = locate(f"{root}/f")
    storage.write(path, b"1")

    child = os.fork()
    if child == 0:
        try:
            storage.read(path, max_bytes=LIMIT)
        except StoreError as error:
            (tmp_path / "said").write_text(str(error))
        os._exit(0)
    os.waitpid(child, 0)

    assert "Start the process with spawn" in (tmp_path / "said").read_text()
