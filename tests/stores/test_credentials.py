"""Where the credentials of a bucket come from, and what an error says if there are none.

All servers are on loopback. Whatever a client sends elsewhere goes to a proxy, which counts it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import traceback
from http.server import BaseHTTPRequestHandler

import numpy as np
import pytest

import jaxckpt
from jaxckpt.errors import StoreError
from jaxckpt.storage import StoreSettings, kvstore, locate, use_store
from jaxckpt.storage._credentials import _system, clouds_of, source_of
from jaxckpt.storage._settings import endpoint_of, settings_of
from tests.commandline import said_json
from tests.stores.loopback import LoopbackServer

TREE = {"w": np.arange(12.0), "step": 3}
SOON = "2090-01-01T00:00:00Z"
KEYS = {"AccessKeyId": "given-key", "SecretAccessKey": "given-secret", "Token": "given-token"}
STS = f"""<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult>
<Credentials><AccessKeyId>role-key</AccessKeyId><SecretAccessKey>s</SecretAccessKey>
<SessionToken>t</SessionToken><Expiration>{SOON}</Expiration></Credentials>
</AssumeRoleResult></AssumeRoleResponse>"""
SSO = {"accessKeyId": "sso-key", "secretAccessKey": "s", "sessionToken": "t", "expiration": 3e12}
TOKEN = {"access_token": "given-token", "token_type": "Bearer", "expires_in": 3600}
# What the services of the clouds answer, by a part of the path.
ANSWERS = {
    "/federation/credentials": json.dumps({"roleCredentials": SSO}),
    "/latest/api/token": "imds",
    "/security-credentials/the-role": json.dumps({**KEYS, "Expiration": SOON, "Code": "Success"}),
    "/security-credentials/": "the-role",
    "/computeMetadata/": json.dumps(TOKEN),
    "/msi": json.dumps({**TOKEN, "expires_on": "3000000000", "resource": "r"}),
    "/oauth": json.dumps({**TOKEN, "issued_token_type": "urn:ietf:params:oauth:token-type:jwt"}),
    "comp=list": "<EnumerationResults><Blobs/></EnumerationResults>",
    "list-type": "<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated>"
    "</ListBucketResult>",
}


class _Service(BaseHTTPRequestHandler):
    """Answers as a bucket without objects, and as what gives credentials for it."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        seen = self.server.requests.add(self.command, self.path)
        self.server.signed.append(self.headers.get("Authorization", ""))
        body = next((a for part, a in ANSWERS.items() if part in self.path), "")
        if self.command == "POST" and self.path == "/":
            body = STS
        seen.status = self.server.status if "list" in self.path else 200 if body else 404
        self.send_response(seen.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body.encode())

    do_GET = do_PUT = do_POST = do_HEAD = do_CONNECT = answer

    def log_message(self, *_):
        pass


class Service(LoopbackServer):
    def __init__(self):
        super().__init__(_Service)
        self.status = 200  # of listings
        self.signed: list[str] = []  # the Authorization of each request


@pytest.fixture
def service():
    with Service() as running:
        yield running


@pytest.fixture
def machine(monkeypatch):
    """What the system says of the machine, which shows its cloud; nothing at first."""
    machine = {"text": ""}
    monkeypatch.setattr("jaxckpt.storage._credentials._system", lambda: machine["text"])
    return machine


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path, service, machine):
    """A user without credentials, on no cloud; the proxy counts what would leave the machine."""
    clouds = ("AWS_", "GOOGLE_", "AZURE_", "TENSORSTORE_", "GCE_", "CLOUDSDK_", "NO_GCE_CHECK")
    for name in [name for name in os.environ if name.startswith(clouds)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    with Service() as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, proxy.url)
            monkeypatch.setenv(name.lower(), proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "127.0.0.1")
        for scheme in ("az", "gs", "s3"):
            use_store(f"{scheme}://", StoreSettings(endpoint=service.url, tries=1))
        yield proxy


def error_of(url):
    """The text of the error that a user sees, with its traceback."""
    with pytest.raises(StoreError) as caught:
        jaxckpt.open(url)
    return "".join(traceback.format_exception(caught.value))


def asked(service, scheme):
    """Lists a bucket, and returns how the request was signed."""
    storage, path = locate(f"{scheme}://bucket/x")
    assert storage.files(path) == {}
    [last] = [
        signed
        for request, signed in zip(service.requests.all(), service.signed, strict=True)
        if "list" in request.path
    ][-1:]
    return last


# --- no credentials ----------------------------------------------------------------------------

WAYS = {
    "az": ("az login", "AZURE_STORAGE_ACCOUNT_KEY"),
    "gs": ("gcloud auth application-default login", "GOOGLE_APPLICATION_CREDENTIALS"),
    "s3": ("aws sso login", "AWS_PROFILE", "AWS_ACCESS_KEY_ID"),
}


@pytest.mark.parametrize("scheme", WAYS)
def test_no_metadata_address_is_asked(service, elsewhere, scheme):
    """Nor anything else: without credentials, no request is sent. The error names the ways in."""
    text = error_of(f"{scheme}://bucket/x")

    assert elsewhere.requests.all() == []
    assert service.requests.all() == []
    assert [way for way in WAYS[scheme] if way not in text] == []
    assert "credentials of the environment are missing" in text or "azure-identity" in text


def test_the_control_sees_a_metadata_address(service, elsewhere, monkeypatch):
    """As the proxy would, were it asked."""
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://169.254.169.254")

    assert "given-key" in asked(service, "s3")
    assert elsewhere.requests.count(path="169.254.169.254/latest/api/token") == 1


@pytest.mark.parametrize("scheme", WAYS)
@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_names_the_ways_of_its_scheme_only(service, monkeypatch, scheme, status):
    """Not those of the other clouds."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "a")
    monkeypatch.setenv("AZURE_STORAGE_TOKEN", "a")
    service.status = status

    text = error_of(f"{scheme}://bucket/x")

    others = [way for other in WAYS.keys() - {scheme} for way in WAYS[other]]
    assert [way for way in others if way in text] == []
    if status == 401:
        assert [way for way in WAYS[scheme] if way not in text] == []
    else:
        assert "jaxckpt doctor" in text


@pytest.mark.parametrize("scheme", WAYS)
def test_our_error_ends_the_traceback(service, monkeypatch, scheme):
    """It has what the store said, shortened; nothing of the client's own error is shown."""
    monkeypatch.setenv(f"{'AWS' if scheme == 's3' else 'GOOGLE'}_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
    service.status = 403

    text = error_of(f"{scheme}://bucket/x")

    assert text.count("Traceback") == 1
    assert "Debug" not in text
    assert "obstore" not in text
    assert text.splitlines()[-1].startswith("jaxckpt.errors.StoreError: ")
    assert "403 Forbidden" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("scheme", "variable"),
    [
        ("az", "AZURE_STORAGE_ENDPOINT"),
        ("gs", "STORAGE_EMULATOR_HOST"),
        ("s3", "AWS_ENDPOINT_URL"),
        ("s3", "StoreSettings"),
    ],
)
def test_nobody_at_an_endpoint(monkeypatch, scheme, variable):
    """Which endpoint, what has set it, and what to do."""
    from jaxckpt.storage import _settings

    settings = StoreSettings(endpoint="http://127.0.0.1:9", credentials="anonymous", tries=1)
    use_store(f"{scheme}://", settings)
    if variable != "StoreSettings":
        monkeypatch.delitem(_settings._given, f"{scheme}://")
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
        monkeypatch.setenv(f"{'GOOGLE' if scheme == 'gs' else 'AWS'}_SKIP_SIGNATURE", "1")
        monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "1")

    _, found = said_json("doctor", f"{scheme}://bucket/x")
    [answers] = [one for one in found["checks"] if one["name"] == "answers"]

    assert f"http://127.0.0.1:9 (from {variable})" in answers["advice"]
    assert "start the store" in answers["advice"]
    assert "Connection refused" in answers["error"]


@pytest.mark.parametrize("given", [{"timeout_s": 9}, {"region": "there"}])
def test_what_settings_lack_comes_from_the_environment(monkeypatch, given):
    variables = {"AWS_REGION": "here", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    for name, value in {**variables, "JAXCKPT_SINGLE_WRITER": "1"}.items():
        monkeypatch.setenv(name, value)
    use_store("s3://bucket", StoreSettings(credentials="anonymous", **given))

    settings = settings_of("s3", "bucket")

    assert settings.timeout_s == given.get("timeout_s", 300)
    assert settings.region == given.get("region", "here")
    assert settings.endpoint == variables["AWS_ENDPOINT_URL"]
    assert settings.single_writer
    assert "AWS_ENDPOINT_URL" in endpoint_of("s3", "bucket", settings)
    assert (kvstore("s3://bucket/a") or {})["endpoint"] == variables["AWS_ENDPOINT_URL"]


def test_an_emulator_of_google_needs_no_scheme(monkeypatch):
    monkeypatch.delenv("TENSORSTORE_GCS_HTTP_URL", raising=False)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "localhost:4443")
    use_store("gs://bucket", StoreSettings())

    assert settings_of("gs", "bucket").endpoint == "http://localhost:4443"


def test_given_settings_win(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "here")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    use_store("s3://bucket", StoreSettings(region="there", endpoint="http://127.0.0.1:8"))

    settings = settings_of("s3", "bucket")

    assert (settings.region, settings.endpoint) == ("there", "http://127.0.0.1:8")
    assert endpoint_of("s3", "bucket", settings).endswith("(from StoreSettings)")


@pytest.mark.parametrize("bucket", ["ab", "Training", "UP", "a b", "-ab"])
def test_the_name_of_a_bucket(bucket):
    """Is checked before any request, also by `use_store`."""
    for call in (
        lambda: jaxckpt.open(f"s3://{bucket}/x"),
        lambda: use_store(f"s3://{bucket}", StoreSettings()),
    ):
        with pytest.raises(ValueError, match="3 or more of a-z and 0-9") as caught:
            call()
        assert ("Did you mean s3://training?" in str(caught.value)) == (bucket == "Training")


# --- sign-ins ------------------------------------------------------------------------------------


@pytest.fixture
def aws(tmp_path, monkeypatch, service):
    """Writes `~/.aws`: `aws(config, keys)`."""

    def write(config, keys=""):
        (tmp_path / ".aws" / "sso" / "cache").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".aws" / "config").write_text(config)
        (tmp_path / ".aws" / "credentials").write_text(keys)
        for name in ("SSO", "STS", "SSO_OIDC"):
            monkeypatch.setenv(f"AWS_ENDPOINT_URL_{name}", service.url)

    return write


STATIC = "aws_access_key_id = {}-key\naws_secret_access_key = s\n"
SSO_PROFILE = """
[profile dev]
sso_session = home
sso_account_id = 123456789012
sso_role_name = Training
region = eu-central-1
[sso-session home]
sso_start_url = https://home.awsapps.com/start
sso_region = eu-central-1
"""


def sign_in(home, expires=SOON):
    """Leaves what `aws sso login` does."""
    name = hashlib.sha1(b"home").hexdigest()
    token = {"startUrl": "https://home.awsapps.com/start", "region": "eu-central-1"}
    token |= {"accessToken": "token", "expiresAt": expires}
    (home / ".aws" / "sso" / "cache" / f"{name}.json").write_text(json.dumps(token))


def test_the_default_profile(service, elsewhere, aws):
    """Is used where nothing else has credentials."""
    aws("", "[default]\n" + STATIC.format("default"))

    assert "default-key" in asked(service, "s3")
    assert elsewhere.requests.all() == []


def test_a_named_profile(service, aws, monkeypatch):
    """With its region and its own endpoint, whatever is given in variables counts before."""
    aws(
        f"[default]\nregion = r1\n[profile dev]\nregion = r2\nservices = own\n"
        f"[services own]\ns3 =\n  endpoint_url = {service.url}\n",
        f"[default]\n{STATIC.format('default')}[dev]\n{STATIC.format('dev')}",
    )
    monkeypatch.setenv("AWS_PROFILE", "dev")
    use_store("s3://", StoreSettings(tries=1))
    assert "dev-key" in asked(service, "s3")
    assert "/r2/s3/" in asked(service, "s3")

    monkeypatch.setenv("AWS_REGION", "r3")
    assert "/r3/s3/" in asked(service, "s3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "variable-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_ENDPOINT_URL", service.url)
    assert "variable-key" in asked(service, "s3")


def test_a_profile_that_assumes_a_role(service, aws, monkeypatch):
    """Asks STS."""
    aws(
        "[profile train]\nrole_arn = arn:aws:iam::123456789012:role/t\nsource_profile = base\n"
        "region = us-east-1\n",
        "[base]\n" + STATIC.format("base"),
    )
    monkeypatch.setenv("AWS_PROFILE", "train")

    assert "role-key" in asked(service, "s3")


def listed(*hidden):
    """Runs `jaxckpt ls` in a process that finds the user's home, without some packages."""
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden}))"
    code += "; from jaxckpt.cli import main; sys.exit(main(['ls', 's3://bucket/x']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return " ".join(done.stderr.split())


def test_a_sign_in_by_sso(service, elsewhere, aws, monkeypatch, tmp_path):
    """Is used and refreshed; an error names the profile, and why it has no credentials."""
    aws(SSO_PROFILE)
    monkeypatch.setenv("AWS_PROFILE", "dev")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", service.url)
    sign_in(tmp_path, expires="2020-01-01T00:00:00Z")
    text = listed()
    assert "the credentials of the AWS profile dev are missing or not accepted" in text
    assert "aws sso login" in text
    assert "has expired" in text
    assert service.requests.count(path="list") == 0

    sign_in(tmp_path)
    listed()

    assert service.requests.count(path="/federation/credentials") == 1
    assert "sso-key" in service.signed[-1]
    assert elsewhere.requests.all() == []


def test_a_profile_needs_a_package(aws, monkeypatch):
    """Which is named, before any request."""
    aws("", "[default]\n" + STATIC.format("default"))

    text = listed("boto3")

    assert "a package that reads the AWS profile default is missing" in text
    assert "pip install boto3" in text


def test_a_profile_that_is_not_there(aws, monkeypatch):
    """Is not taken for another one."""
    aws("", "[default]\n" + STATIC.format("default"))
    monkeypatch.setenv("AWS_PROFILE", "unknown")

    code, found = said_json("doctor", "s3://bucket/x")
    [check] = [one for one in found["checks"] if one["name"] == "credentials"]

    assert (code, check["state"]) == (1, "failed")
    assert "the AWS profile unknown" in check["advice"]
    assert "could not be found" in check["error"]


def test_foreign_checkpoints_are_read_through_obstore(
    moto_server, elsewhere, aws, monkeypatch, tmp_path
):
    """Where TensorStore cannot have the credentials, as on Azure."""
    ocp = pytest.importorskip("orbax.checkpoint")
    server = moto_server.with_new_bucket()
    use_store("s3://", StoreSettings(endpoint=server.url))
    aws("", "[default]\n" + STATIC.format("default"))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", TREE)
    storage, path = locate(f"s3://{server.bucket}/orbax")
    storage.write(f"{path}/commit_success.txt", b"")
    for file in (tmp_path / "orbax").rglob("*"):
        if file.is_file():
            storage.write(f"{path}/{file.relative_to(tmp_path / 'orbax')}", file.read_bytes())

    found = jaxckpt.restore(path)

    assert kvstore(path) is None
    assert np.array_equal(found["w"], TREE["w"])
    assert elsewhere.requests.all() == []


def test_a_profile_without_credentials(service, aws, monkeypatch):
    """One that only has a region is none: the machine is asked as before."""
    aws("[default]\nregion = eu-central-1\n[profile dev]\nregion = eu-central-1\n")
    monkeypatch.setenv("AWS_PROFILE", "dev")
    assert "nobody signed in" in error_of("s3://bucket/x")

    monkeypatch.setenv("AWS_METADATA_ENDPOINT", service.url)

    assert "given-key" in asked(service, "s3")


def test_a_machine_of_aws_comes_before_the_default_profile(service, aws, machine, monkeypatch):
    """As before profiles were read; a profile that is named comes first."""
    aws("", f"[default]\n{STATIC.format('default')}")
    machine["text"] = EC2
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", service.url)
    assert "given-key" in asked(service, "s3")

    monkeypatch.setenv("AWS_PROFILE", "default")
    assert "default-key" in asked(service, "s3")

    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert "default-key" in asked(service, "s3")


def test_the_variables_of_containers(service, aws, monkeypatch):
    """Come before profiles, as they did."""
    aws("", f"[default]\n{STATIC.format('default')}")
    monkeypatch.setenv("AWS_PROFILE", "default")
    for variables, name in (
        (("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",), "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
        (("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"), "AWS_WEB_IDENTITY_TOKEN_FILE"),
    ):
        for variable in variables:
            monkeypatch.setenv(variable, "x")
        assert source_of("s3", "default").name == name
    assert source_of("s3", "environment").name == "AWS_WEB_IDENTITY_TOKEN_FILE"


EC2 = "sys_vendor Amazon EC2\n"


@pytest.mark.parametrize(
    ("system", "cloud"),
    [
        (EC2, "s3"),
        ("product_version 4.11.amazon\n\nuuid ec2e1916-9099-7caf-fd21-012345abcdef", "s3"),
        ("resolv.conf nameserver 10.0.0.2\nsearch eu-west-1.compute.internal", "s3"),
        ("sys_vendor Google\n\nproduct_name Google Compute Engine", "gs"),
        ("resolv.conf search svc.cluster.local c.project.internal google.internal", "gs"),
        (
            "sys_vendor Microsoft Corporation\nchassis_asset_tag 7783-7084-3265-9085-8269-3286-77",
            "az",
        ),
        ("resolv.conf search x.fx.internal.cloudapp.net", "az"),
        ("sys_vendor Microsoft Corporation\nproduct_name Virtual Machine", None),
        ("sys_vendor Google\nproduct_name Eve", None),  # a Chromebook
        ("sys_vendor LENOVO\nresolv.conf search corp.google.com amazon.com", None),
    ],
)
def test_machines_of_clouds_are_recognized(system, cloud):
    """By their firmware, or by the names that the cloud gives to its machines."""
    assert clouds_of(system) == ({cloud} if cloud else set())


def test_what_the_system_shows_is_read(tmp_path):
    """Each file with its name before it, if it is there."""
    for name, text in (("product_name", "Google Compute Engine"), ("sys_vendor", "Google")):
        (tmp_path / name).write_text(f"{text}\n")
    names = ("sys_vendor", "missing", "product_name")

    assert clouds_of(_system(tuple(str(tmp_path / name) for name in names))) == {"gs"}


@pytest.mark.parametrize("way", ["GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "HOME"])
def test_a_sign_in_by_gcloud(elsewhere, monkeypatch, tmp_path, way):
    """Its file is found, and leads to Google, not to a metadata address."""
    file = tmp_path / ".config" / "gcloud" / "application_default_credentials.json"
    file.parent.mkdir(parents=True)
    user = {"type": "authorized_user", "client_id": "a", "client_secret": "b", "refresh_token": "c"}
    file.write_text(json.dumps(user))
    if way == "CLOUDSDK_CONFIG":
        monkeypatch.setenv("HOME", "/nowhere")
    if way != "HOME":
        monkeypatch.setenv(way, str(file if way.endswith("S") else file.parent))

    assert "are missing or not accepted" in error_of("gs://bucket/x")

    assert {request.path for request in elsewhere.requests.all()} == {"accounts.google.com:443"}


def test_workload_identity_federation(service, elsewhere, monkeypatch, tmp_path):
    """A file that obstore cannot read is given to google-auth."""
    pytest.importorskip("google.auth")
    (tmp_path / "token").write_text("subject")
    file = tmp_path / "config.json"
    pool = "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q"
    kind = "urn:ietf:params:oauth:token-type:jwt"
    source = {"file": str(tmp_path / "token")}
    config = {"type": "external_account", "audience": pool, "subject_token_type": kind}
    config |= {"token_url": f"{service.url}/oauth", "credential_source": source}
    file.write_text(json.dumps(config))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))

    assert asked(service, "gs") == "Bearer given-token"
    assert service.requests.count(path="/oauth") == 1
    assert elsewhere.requests.all() == []


def test_machines_of_google_and_azure(service, monkeypatch):
    """Are asked where a variable has their metadata address, and not if it is switched off."""
    monkeypatch.setenv("GCE_METADATA_HOST", service.url.removeprefix("http://"))
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"{service.url}/msi")

    assert asked(service, "gs") == "Bearer given-token"
    assert asked(service, "az") == "Bearer given-token"
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    assert "nobody signed in" in error_of("gs://bucket/x")


def test_a_sign_in_by_az(service, elsewhere, monkeypatch, tmp_path):
    """Needs no package; azure-identity finds it too."""
    program = tmp_path / "az"
    token = {"accessToken": "given-token", "expiresOn": "2090-01-01 00:00:00.000000"}
    token |= {"expires_on": 3000000000, "subscription": "s", "tenant": "t", "tokenType": "Bearer"}
    program.write_text(f"#!/bin/sh\necho '{json.dumps(token)}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    assert asked(service, "az") == "Bearer given-token"
    assert elsewhere.requests.all() == []


def test_a_certificate_of_azure(elsewhere, monkeypatch, tmp_path):
    """Is read by azure-identity alone."""
    pytest.importorskip("azure.identity")
    monkeypatch.setenv("AZURE_CLIENT_CERTIFICATE_PATH", str(tmp_path / "missing.pem"))
    monkeypatch.setenv("AZURE_CLIENT_ID", "client")
    monkeypatch.setenv("AZURE_TENANT_ID", "tenant")

    text = error_of("az://bucket/x")

    assert "missing.pem" in text.partition("said:")[2]
    assert elsewhere.requests.all() == []
