"""Finds the credentials for a bucket. Takes the first that exist of:

1. no credentials, if the settings or a variable ask for anonymous access;
2. variables that hold keys or tokens, or name a file of them;
3. credentials that the user names: `AWS_PROFILE`, or the file that gcloud writes at a sign-in;
4. the machine's own, if a variable has its metadata address or the system shows its cloud;
5. a sign-in that the user does not name: the default profile of AWS, or `az login`.

So a metadata address is asked only where there should be one; elsewhere a client would wait for it
in vain. obstore reads 2 and 4 itself, as TensorStore does; the rest comes from the cloud's library.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Final, Literal

from jaxckpt.errors import needing

Credentials = Literal["default", "environment", "anonymous"]
Environment = Mapping[str, str]

# The variables that hold credentials; with a "+", all of them have to be set. obstore reads them.
_VARIABLES: Final = {
    "az": """AZURE_STORAGE_ACCOUNT_KEY AZURE_STORAGE_ACCESS_KEY AZURE_STORAGE_MASTER_KEY
        AZURE_STORAGE_SAS_TOKEN AZURE_STORAGE_SAS_KEY AZURE_STORAGE_TOKEN AZURE_CLIENT_SECRET
        AZURE_STORAGE_CLIENT_SECRET AZURE_FEDERATED_TOKEN_FILE AZURE_USE_AZURE_CLI
        AZURE_CREDENTIAL_TYPE AZURE_FABRIC_TOKEN_SERVICE_URL AZURE_STORAGE_USE_EMULATOR""",
    "gs": """GOOGLE_AUTH_TOKEN_FOR_TESTING GOOGLE_BEARER_TOKEN GOOGLE_SERVICE_ACCOUNT
        GOOGLE_SERVICE_ACCOUNT_PATH GOOGLE_SERVICE_ACCOUNT_KEY SERVICE_ACCOUNT""",
    "s3": """AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_WEB_IDENTITY_TOKEN_FILE+AWS_ROLE_ARN
        AWS_CONTAINER_CREDENTIALS_RELATIVE_URI
        AWS_CONTAINER_CREDENTIALS_FULL_URI+AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE""",
}
# Those that TensorStore reads too, and the type that its credentials then have.
_BY_TENSORSTORE: Final = {
    "AWS_ACCESS_KEY_ID": "environment",
    "AWS_SECRET_ACCESS_KEY": "environment",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "ecs",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "ecs",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "default",
}
_PREFIXES: Final = {"az": "AZURE", "gs": "GOOGLE", "s3": "AWS"}
# The variable that forbids asking a metadata address, and the variables that hold an address.
_NO_MACHINE: Final = {"gs": "NO_GCE_CHECK", "s3": "AWS_EC2_METADATA_DISABLED"}
_ADDRESSES: Final = {
    "az": ("AZURE_MSI_ENDPOINT", "AZURE_IDENTITY_ENDPOINT", "IDENTITY_ENDPOINT"),
    "gs": ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"),
    "s3": ("AWS_METADATA_ENDPOINT",),
}
# Signs of a cloud in the firmware, and in the names of machines and pods.
_SIGNS: Final = {
    "az": r"(?m)^chassis_asset_tag 7783-7084-3265-9085-8269-3286-77|\bcloudapp\.net\b",
    "gs": r"(?m)^product_name Google|\bgoogle\.internal\b",
    "s3": r"(?mi)^(sys_vendor|\w+_version) .*amazon|^uuid ec2|\b(ec2|compute)\.internal\b",
}
_FIRMWARE: Final = "sys_vendor product_name product_version bios_version chassis_asset_tag"
_SYSTEM: Final = (
    *(f"/sys/class/dmi/id/{name}" for name in _FIRMWARE.split()),
    "/sys/hypervisor/uuid",
    "/etc/resolv.conf",
)
# Of peers, which are servers rather than buckets; see `_run.peers`.
PEER_USER: Final = "JAXCKPT_PEER_USER"
PEER_PASSWORD: Final = "JAXCKPT_PEER_PASSWORD"
# Advice for errors where no credentials are found.
SIGN_IN: Final = {
    **dict.fromkeys(("http", "https"), f"Set {PEER_USER} and {PEER_PASSWORD}"),
    "az": "Run `az login`, or set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    "gs": "Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "Run `aws configure` or `aws sso login` and set AWS_PROFILE, or set AWS_ACCESS_KEY_ID "
    "and AWS_SECRET_ACCESS_KEY",
}
# Keys of an AWS profile that show that it has credentials.
_SIGNED_IN: Final = {
    *("aws_access_key_id", "role_arn", "sso_session", "sso_start_url"),
    *("credential_process", "login_session"),
}
# botocore refreshes credentials when 10 minutes are left, so they are always good for as long.
_FRESH: Final = timedelta(minutes=10)
_SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_write"


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Names where the credentials for a bucket come from.

    Attributes:
        name: As messages have it. Sources of the same name are the same.
        options: For obstore's client.
        tensorstore: The type of TensorStore's credentials; None if it cannot have these, so that
            obstore reads everything.
        region: That a profile of AWS has, as for `StoreSettings`.
        endpoint: As the region.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    tensorstore: str | None = None
    region: str | None = None
    endpoint: str | None = None


def source_of(scheme: str, wanted: Credentials, env: Environment = os.environ) -> Login:
    """Returns where the credentials for the buckets of a scheme come from, without asking there."""
    if scheme not in _PREFIXES:
        return _basic(env)
    if wanted == "anonymous" or is_true(env, f"{_PREFIXES[scheme]}_SKIP_SIGNATURE"):
        by = "anonymous" if scheme == "s3" else None
        return Login(name="anonymous access", options={"skip_signature": True}, tensorstore=by)
    for names in _VARIABLES[scheme].split():
        if all(map(env.get, names.split("+"))):
            name = names.partition("+")[0]
            testing = name == "GOOGLE_AUTH_TOKEN_FOR_TESTING"
            options = {"bearer_token": env[name]} if testing else {}
            return Login(name=name, options=options, tensorstore=_BY_TENSORSTORE.get(name))
    find = {"az": _azure, "gs": _google, "s3": _amazon}[scheme]
    return find(env, wanted == "default") or _asking("the environment", partial(_nothing, scheme))


def _basic(env: Environment) -> Login:
    name, user = f"{PEER_USER} and {PEER_PASSWORD}", env.get(PEER_USER)
    if not user:
        return Login(name=name)
    both = base64.b64encode(f"{user}:{env.get(PEER_PASSWORD, '')}".encode()).decode()
    header = {"default_headers": {"Authorization": f"Basic {both}"}}
    return Login(name=name, options={"headers": header})


def is_true(env: Environment, name: str) -> bool:
    """Returns whether a variable is set to 1, true or yes."""
    return env.get(name, "").lower() in ("1", "true", "yes")


def _asking(name: str, make: Callable[[], Callable[[], Any]], **more: str | None) -> Login:
    """Returns a source that obstore asks, from its threads, whenever it needs credentials.

    Args:
        make: Imports the library of the cloud, and returns what to ask; called once it succeeds.
    """
    made = cache(make)
    return Login(name=name, options={"credential_provider": lambda: made()()}, **more)


def _nothing(scheme: str) -> Callable[[], Any]:
    raise LookupError(
        "no variable has any, nobody signed in, and this does not look like a machine of that cloud"
        f" (if it is one, set {_ADDRESSES[scheme][0]} to its metadata address)"
    )


# --- the machine's own -------------------------------------------------------------------------


def _machine(scheme: str, env: Environment, by: str | None) -> Login | None:
    if is_true(env, _NO_MACHINE.get(scheme, "")):
        return None
    is_there = scheme in clouds_of(_system())
    if is_there or any(map(env.get, _ADDRESSES[scheme])):  # which TensorStore would not follow
        return Login(name="this machine", tensorstore=by if is_there else None)
    return None


def clouds_of(system: str) -> set[str]:
    """Returns the schemes of the clouds that a machine is of, from the texts of `_system`."""
    return {scheme for scheme, sign in _SIGNS.items() if re.search(sign, system)}


@cache
def _system(files: Sequence[str] = _SYSTEM) -> str:
    """Returns the system's texts that may show its cloud, without a request."""
    lines = []
    for path in files:
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            lines.append(f"{os.path.basename(path)} {file.read(1 << 12)}")
    return "\n".join(lines)


# --- AWS ---------------------------------------------------------------------------------------


def _amazon(env: Environment, default: bool) -> Login | None:
    if not default:
        return None
    named = env.get("AWS_PROFILE") or env.get("AWS_DEFAULT_PROFILE")
    profile = _profile(named or "default", env)
    if named and profile:
        return profile
    return _machine("s3", env, "imds") or profile


def _profile(name: str, env: Environment) -> Login | None:
    """Returns a profile as a source; None if it exists without credentials."""
    config = _read(env.get("AWS_CONFIG_FILE") or "~/.aws/config")
    keys = _read(env.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials")
    section = name if name == "default" else f"profile {name}"
    found = {**config.get(section, {}), **keys.get(name, {})}
    if (found or name == "default") and not _SIGNED_IN & found.keys():
        return None
    services = config.get(f"services {found.get('services')}", {})
    own = re.search(r"^\s*endpoint_url\s*=\s*(\S+)", services.get("s3", ""), re.M)
    return _asking(
        f"the AWS profile {name}",
        partial(_boto3, name),
        region=found.get("region"),
        endpoint=own[1] if own else found.get("endpoint_url"),
    )


def _read(path: str) -> Mapping[str, Mapping[str, str]]:
    from configparser import ConfigParser, Error  # for these alone

    parser = ConfigParser(interpolation=None, strict=False, default_section="")
    with contextlib.suppress(OSError, Error, UnicodeError):  # the library of AWS names them
        parser.read(os.path.expanduser(path), encoding="utf-8")
    return {name: dict(section) for name, section in parser.items()}


def _boto3(profile: str) -> Callable[[], Any]:
    with needing("boto3", f"the AWS profile {profile}"):
        import botocore.session
        from obstore.auth.boto3 import Boto3CredentialProvider
    session = botocore.session.Session(profile=profile)
    # A profile that is not complete must not end at a metadata address.
    session.get_component("credential_provider").remove("iam-role")
    return Boto3CredentialProvider(session, ttl=_FRESH)


# --- Google Cloud ------------------------------------------------------------------------------


def _google(env: Environment, default: bool) -> Login | None:
    path = env.get("GOOGLE_APPLICATION_CREDENTIALS")
    if not path and default:
        folder = env.get("CLOUDSDK_CONFIG") or "~/.config/gcloud"
        path = os.path.expanduser(f"{folder}/application_default_credentials.json")
        path = path if os.path.isfile(path) else ""
    if not path:
        return _machine("gs", env, "default") if default else None
    if _kind(path) in ("authorized_user", "service_account", ""):  # or obstore reports the problem
        options = {"application_credentials": path}
        return Login(name=path, options=options, tensorstore="default")
    return _asking(path, partial(_google_auth, path))


def _kind(path: str) -> str:
    """Returns the kind of credentials in a file of Google Cloud; empty if it is another file."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return ""
    return str(found.get("type", "")) if isinstance(found, dict) else ""


def _google_auth(path: str) -> Callable[[], Any]:
    with needing("'google-auth[requests]'", path):
        import google.auth
        from google.auth.credentials import with_scopes_if_required
        from obstore.auth.google import GoogleCredentialProvider
    with warnings.catch_warnings():  # it warns of files that others chose
        warnings.simplefilter("ignore", DeprecationWarning)
        credentials, _ = google.auth.load_credentials_from_file(path)
    # Only now: with a scope, it would ask Google for the name of the project.
    scoped: Any = with_scopes_if_required(credentials, [_SCOPE])
    return GoogleCredentialProvider(scoped)


# --- Azure -------------------------------------------------------------------------------------


def _azure(env: Environment, default: bool) -> Login | None:
    if certificate := env.get("AZURE_CLIENT_CERTIFICATE_PATH"):
        return _asking(certificate, _azure_identity)
    if not default:
        return None
    if machine := _machine("az", env, None):
        return machine
    if find_spec("azure") and find_spec("azure.identity"):
        return _asking("azure-identity", _azure_identity)
    if shutil.which("az"):
        return Login(name="az login", options={"use_azure_cli": True})
    return None


def _azure_identity() -> Callable[[], Any]:
    with needing("azure-identity", "AZURE_CLIENT_CERTIFICATE_PATH"):
        import azure.identity  # pyright: ignore[reportMissingImports]  # no part of `test`
        from obstore.auth.azure import AzureCredentialProvider
    find = azure.identity.DefaultAzureCredential(exclude_managed_identity_credential=True)
    return AzureCredentialProvider(find)
