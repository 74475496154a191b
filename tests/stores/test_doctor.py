"""`jaxckpt doctor` of a bucket: what fails is named with what to do, and nothing remains there."""

from __future__ import annotations

import os
import signal
import sys

import pytest

import jaxckpt
from jaxckpt.errors import StoreError
from jaxckpt.storage import StoreSettings
from jaxckpt.storage._credentials import source_of
from jaxckpt.storage._requests import Requests, errors, reason_of
from tests.commandline import cli, said_json
from tests.stores.clients import Obstore
from tests.stores.proxy import Answer, Delay
from tests.stores.servers import ACCESS_KEY, SECRET_KEY

CHECKS = [
    *("obstore", "answers", "credentials", "bucket", "list", "create", "seen at once"),
    *(
        "create again",
        "compare-and-swap",
        "read a range",
        "copy",
        "both clients",
        "write 64 MiB",
        "read 64 MiB",
    ),
    *("small read", "clock", "delete"),
]
ANY_SPEED = ("ok", "slow")


def url_of(server):
    return f"{server.scheme}://{server.bucket}/run"


def examined(url):
    """The exit code, and what each check found."""
    code, found = said_json("doctor", url)
    assert [check["name"] for check in found["checks"]] == CHECKS
    assert found["ok"] == (code == 0)
    return code, {check["name"]: check for check in found["checks"]}


def not_fine(found):
    """The states other than those of a good place."""
    return {name: one["state"] for name, one in found.items() if one["state"] not in ANY_SPEED}


@pytest.mark.parametrize("store", ["moto", "gcs", "azurite", "seaweedfs"])
def test_a_good_bucket_passes_every_check(request, use_store, store):
    """The figures are in bytes a second and seconds; nothing remains."""
    server = use_store(request.getfixturevalue(f"{store}_server"))

    code, found = examined(url_of(server))

    assert (code, not_fine(found)) == (0, {})
    assert found["write 64 MiB"]["unit"] == "B/s"
    assert found["small read"]["value"] > 0
    assert abs(found["clock"]["value"]) < 60
    assert Obstore(server).names() == []


def test_objects_that_are_there_stay(moto_server, use_store):
    """Also those under the root itself."""
    server = use_store(moto_server)
    for name in ("run", "run/1/data", "other"):
        Obstore(server).put(name, b"1")

    assert examined(url_of(server))[0] == 0

    assert Obstore(server).names() == ["other", "run", "run/1/data"]


def test_the_table_has_a_line_for_each_check(moto_server, use_store):
    """And, below, what the store said about those that failed."""
    server = use_store(moto_server)
    code, out, _ = cli("doctor", url_of(server))
    assert code == 0
    assert len(out.splitlines()) == len(CHECKS) + 2
    assert out.splitlines()[-1] == f"{url_of(server)}: 17 checks, all is well"

    code, out, _ = cli("doctor", "s3://no-such-bucket/run")
    assert code == 1
    assert "there is no bucket s3://no-such-bucket. Make it" in out
    assert "\nbucket: " in out
    assert "NoSuchBucket" in out
    assert out.splitlines()[-1] == "s3://no-such-bucket/run: 17 checks, 1 failed"


def test_a_bucket_that_is_not_there_is_not_made(seaweedfs_server, use_store):
    """SeaweedFS makes a bucket for the first object in it, so nothing may be written."""
    use_store(seaweedfs_server)
    for _ in range(2):
        code, found = examined("s3://no-such-bucket")

        assert code == 1
        assert found["credentials"]["state"] == "ok"
        assert found["bucket"]["state"] == "failed"
        assert found["create"]["text"] == "needs: bucket"


@pytest.mark.parametrize("variable", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
def test_wrong_credentials(seaweedfs_server, use_store, monkeypatch, variable):
    """Are not taken for a missing permission; no secret is printed."""
    server = use_store(seaweedfs_server)
    monkeypatch.setenv(variable, "a wrong one")

    code, found = examined(url_of(server))

    assert code == 1
    assert found["answers"]["state"] == "ok"
    assert found["credentials"]["state"] == "failed"
    assert "AWS_ACCESS_KEY_ID" in found["credentials"]["advice"]
    assert found["bucket"]["state"] == "skipped"
    right = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}
    assert Obstore(server, **right).names() == []
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in str(found)


def test_no_credentials(moto_server, use_store, monkeypatch):
    """Where the machine has none to give either."""
    server = use_store(moto_server)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")

    code, found = examined(url_of(server))

    assert (code, found["credentials"]["state"]) == (1, "failed")


@pytest.mark.parametrize("is_there", [False, True])
def test_a_bad_file_of_credentials(gcs_server, use_store, monkeypatch, tmp_path, is_there):
    """Is named by `doctor`, and by a save."""
    server = use_store(gcs_server)
    monkeypatch.delenv("GOOGLE_BEARER_TOKEN")
    monkeypatch.delenv("GOOGLE_AUTH_TOKEN_FOR_TESTING")
    file = tmp_path / "credentials.json"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    if is_there:
        file.write_text("{}")

    code, found = said_json("doctor", url_of(server))

    [check] = found["checks"]
    assert (code, check["name"], check["state"]) == (1, "credentials", "failed")
    assert ("missing field" if is_there else str(file)) in check["error"]
    with pytest.raises(StoreError, match="GOOGLE_APPLICATION_CREDENTIALS"):
        jaxckpt.save(url_of(server), {"a": 1})


@pytest.mark.parametrize("store", ["moto_server", "gcs_server"])
@pytest.mark.parametrize(
    ("check", "method", "path", "s3", "gs"),
    [
        ("list", "GET", "list-type", "s3:ListBucket", "storage.objects.list"),
        ("create", "PUT", "/marker", "s3:PutObject", "storage.objects.create"),
        ("read a range", "GET", "/data", "s3:GetObject", "storage.objects.get"),
        ("both clients", "", "by", "s3:PutObject", "storage.objects.create"),
        ("copy", "PUT", "/copy", "s3:PutObject", "storage.objects.create"),
    ],
)
def test_a_missing_permission_is_named(request, proxied, store, check, method, path, s3, gs):
    """With the permission of the store; nothing remains."""
    server, proxy = proxied(request.getfixturevalue(store))
    proxy.add(Answer(403), method=method, path=path)

    code, found = examined(url_of(server))

    assert (code, found[check]["state"]) == (1, "failed")
    assert (s3 if server.scheme == "s3" else gs) in found[check]["advice"]
    assert "403" in found[check]["error"]
    proxy.heal()
    assert Obstore(server).names() == []


def test_what_cannot_be_deleted_is_named(moto_server, proxied):
    """It stays, and the user is told where."""
    server, proxy = proxied(moto_server)
    proxy.add(Answer(403), method="POST", path="delete")

    code, found = examined(url_of(server))

    assert (code, found["delete"]["state"]) == (1, "failed")
    assert "s3:DeleteObject" in found["delete"]["advice"]
    left = Obstore(server).names()
    assert left
    assert all(name.startswith("run/.jaxckpt-tmp-") for name in left)
    assert left[0].rpartition("/")[0] in found["delete"]["advice"]


@pytest.mark.parametrize("single_writer", [False, True])
def test_a_store_without_conditional_writes(rclone_server, use_store, monkeypatch, single_writer):
    """Fails, unless the user allows it; rclone reads ranges wrong, too."""
    server = use_store(rclone_server)
    if single_writer:
        monkeypatch.setenv("JAXCKPT_SINGLE_WRITER", "1")

    _, found = examined(url_of(server))

    for check in ("create again", "compare-and-swap"):
        assert found[check]["state"] == ("missing" if single_writer else "failed")
        assert "two jobs could both commit" in found[check]["advice"]
        assert "JAXCKPT_SINGLE_WRITER=1" in found[check]["advice"]
    assert "the whole object where a part was asked for" in found["read a range"]["advice"]
    assert Obstore(server).names() == []


@pytest.mark.parametrize("what", ["lists", "reads"])
def test_a_store_that_lags(gcs_server, use_store, what):
    """The next job would resume at an older step."""
    server = use_store(gcs_server)
    bucket = server.running.bucket(server.bucket)
    for name in ("run", "x"):
        Obstore(server).put(name, b"1")
    bucket.freeze(**{what: True})

    code, found = examined(url_of(server))

    assert (code, found["seen at once"]["state"]) == (1, "failed")
    assert "resume at an older step" in found["seen at once"]["advice"]
    bucket.thaw()
    assert Obstore(server).names() == ["run", "x"]


def test_an_endpoint_that_does_not_answer(use_store, moto_server, monkeypatch):
    """Is told from a missing bucket or permission."""
    server = use_store(moto_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")

    code, found = examined(url_of(server))

    assert (code, found["answers"]["state"]) == (1, "failed")
    assert found["credentials"]["state"] == "skipped"


def test_a_slow_store_passes(moto_server, proxied):
    """With what to do about it."""
    server, proxy = proxied(moto_server)
    proxy.add(Delay(0.3), method="GET", path="/data")

    code, found = examined(url_of(server))

    assert (code, found["small read"]["state"]) == (0, "slow")
    assert found["small read"]["value"] >= 0.3
    assert "nearer" in found["small read"]["advice"]
    assert Obstore(server).names() == []


@pytest.mark.parametrize("store", ["moto_server", "gcs_server"])
def test_ctrl_c_leaves_nothing(request, proxied, store):
    """Even while an object is on its way, which is there only after the signal."""
    server, proxy = proxied(request.getfixturevalue(store))
    interrupted = []

    def interrupt(_):
        interrupted.append(True)
        os.kill(os.getpid(), signal.SIGINT)
        return True

    proxy.add(Delay(1.0), path="/large", when=interrupt, times=1)
    # A shell starts what runs in its background with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    code, _, err = cli("doctor", url_of(server))

    signal.signal(signal.SIGINT, before)
    assert interrupted == [True]
    assert (code, err.strip()) == (130, "Interrupted.")
    [written] = proxy.requests.all(path="large")[:1]
    assert written.status == 200
    assert Obstore(server).names() == []


def test_the_extra_is_not_installed(monkeypatch):
    """Then that is all it says."""
    monkeypatch.setitem(sys.modules, "obstore", None)

    code, found = said_json("doctor", "s3://bucket/run")

    assert (code, found["ok"]) == (1, False)
    [check] = found["checks"]
    assert "pip install obstore" in check["advice"]


@pytest.mark.parametrize(
    "url", ["s3://", "gs://a", "s3://bucket/../x", "hf://bucket", "memory://a"]
)
def test_a_wrong_url_is_wrong_usage(url):
    """It ends with 2, and nothing is tried."""
    assert cli("doctor", url)[0] == 2


_EACH = "DeleteObjects request failed for key a: Access Denied (code: AccessDenied)"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("status code: 403 Forbidden: <Code>SignatureDoesNotMatch</Code>", "credentials"),
        ("status code: 403 Forbidden: <Code>RequestTimeTooSkewed</Code>", "clock"),
        ("status code: 403 Forbidden: <Code>AccessDenied</Code>", "permission"),
        ("403 Forbidden: Server failed to authenticate the request.", "credentials"),
        ("status code: 403: <Code>AuthorizationPermissionMismatch</Code>", "permission"),
        (_EACH, "permission"),
        ("status code: 404 Not Found: <Code>ContainerNotFound</Code>", "bucket"),
        ("status code: 301 Moved Permanently", "region"),
        ("redirect without LOCATION, normally an incorrectly configured region", "region"),
        ("status code: 401 Unauthorized", "credentials"),
        ("status code: 400 Bad Request: <Code>ExpiredToken</Code>", "credentials"),
        ("'az account get-access-token' command failed", "credentials"),
        ("error sending request in 301.2ms", "silence"),
    ],
)
def test_a_refusal_has_a_reason(text, reason):
    """Which decides what the user is told to do."""
    assert reason_of(RuntimeError(text)) == reason


def test_s3_refuses_to_delete_each_object_for_itself():
    """Its answer has the status 200. It is not asked again."""
    requests = Requests("s3", "b", StoreSettings(), source_of("s3", None))

    def delete():
        raise errors().GenericError(_EACH)

    with pytest.raises(StoreError, match=r"no permission.*, 1 try\)"):
        requests.change("delete", "s3://b/a", delete)
