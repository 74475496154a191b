"""Holds the settings that reach a bucket, one object for both clients: obstore and TensorStore."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, get_args

from jaxckpt.errors import StoreError, UnsupportedFormat
from jaxckpt.storage._credentials import (
    PEER_PASSWORD,
    PEER_USER,
    Credentials,
    Login,
    is_true,
    source_of,
)

SCHEMES: Final = ("az", "gs", "s3")
_MOST: Final = 1e9  # seconds, or tries
_PEER: Final = re.compile(r"https?://[^/?#@\s]+(/[^?#\s]*)?", re.I)
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Describes how to reach the buckets of an object store, and how long to wait for it.

    What is None or False here, the standard environment variables decide, such as
    `AWS_ENDPOINT_URL`, `AWS_REGION`, `GOOGLE_APPLICATION_CREDENTIALS` and
    `AZURE_STORAGE_ACCOUNT_NAME`. A container of Azure is a bucket too.

    Attributes:
        endpoint: `http://` or `https://` and a host, on Azure maybe with a path. If it is nowhere
            given, the provider's own.
        grpc_endpoint: If given, TensorStore speaks gRPC to Google Cloud Storage, at this target:
            `google-c2p:///storage.googleapis.com` on its own machines,
            `dns:///storage.googleapis.com` elsewhere.
        region: Of an S3 bucket.
        account: The storage account of an Azure container.
        virtual_hosted: Whether an S3 bucket's name is part of the host's name instead of the path.
        credentials: `"default"`: the first that there are of variables, a sign-in and the machine's
            role; `"environment"`: environment variables only; `"anonymous"`: none. Never stored.
        single_writer: Whether you guarantee that only one job writes to these buckets at a time. A
            store whose conditional writes do not work is refused without it.
        timeout_s: Seconds after which a try ends and a request is not tried again, or a call to a
            network file system fails.
        stall_s: Seconds without a byte after which a try is given up.
        tries: How often a request is sent before it has failed.
        lease_s: Seconds after which the lock of a writer that no longer renews it is over.
    """

    endpoint: str | None = None
    grpc_endpoint: str | None = None
    region: str | None = None
    account: str | None = None
    virtual_hosted: bool = False
    credentials: Credentials = "default"
    single_writer: bool = False
    timeout_s: float = 300.0
    stall_s: float = 60.0
    tries: int = 8
    lease_s: float = 60.0

    def __post_init__(self) -> None:
        if self.endpoint is not None and not re.match(r"https?://[^/]+(/[^?#]*)?$", self.endpoint):
            raise ValueError(f"endpoint must be an http(s):// URL of a host, got {self.endpoint!r}")
        if self.grpc_endpoint is not None and ":///" not in self.grpc_endpoint:
            raise ValueError(f"grpc_endpoint must have ':///', got {self.grpc_endpoint!r}")
        for name in ("timeout_s", "stall_s", "tries", "lease_s"):
            if not isinstance(value := getattr(self, name), int | float) or not 0 < value < _MOST:
                raise ValueError(f"{name} must be above 0 and below {_MOST:g}, got {value!r}")
        if not isinstance(self.tries, int):
            raise ValueError(f"tries must be an int, got {self.tries!r}")
        if self.credentials not in (known := get_args(Credentials)):
            raise ValueError(f"credentials must be one of {known}, got {self.credentials!r}")


_default: Final = StoreSettings()
_given: dict[str, StoreSettings] = {}  # by "scheme://bucket" or "scheme://"


def use_store(url: str, settings: StoreSettings) -> None:
    """Sets how this process reaches a bucket, or all buckets of a scheme.

    Every process calls it before the bucket's first use.

    Args:
        url: Such as `s3://bucket` or `s3://`; or `file://`, where only `timeout_s` counts.

    Raises:
        ValueError: the URL has a path or an unknown scheme, or the endpoint does not suit it.

    Example:
        >>> import jaxckpt
        >>> jaxckpt.use_store(
        ...     "s3://bucket",
        ...     jaxckpt.StoreSettings(endpoint="https://objects.example.com", region="eu-1"),
        ... )
    """
    if not isinstance(settings, StoreSettings):
        raise TypeError(f"settings must be StoreSettings(...), got {settings!r}")
    scheme, _, bucket = url.partition("://")
    is_store = scheme in SCHEMES or (scheme == "file" and not bucket)
    if not is_store or "/" in bucket.rstrip("/"):
        raise ValueError(f"url must be such as 's3://bucket', 's3://' or 'file://', got {url!r}")
    if bucket and scheme != "file":
        check_bucket(scheme, bucket.rstrip("/"), url)
    if scheme != "gs" and settings.grpc_endpoint is not None:
        raise ValueError(f"grpc_endpoint is for gs:// only, got {url!r}")
    if scheme != "az" and "/" in (settings.endpoint or "").partition("://")[2].rstrip("/"):
        raise ValueError(f"endpoint must have no path for {scheme}://, got {settings.endpoint!r}")
    _given[f"{scheme}://{bucket.rstrip('/')}"] = settings


def settings_of(scheme: str, bucket: str) -> StoreSettings:
    """Returns the settings of a bucket: those given, and from the environment what they lack."""
    return _completed(_given_for(scheme, bucket) or _default, scheme, os.environ)


def _given_for(scheme: str, bucket: str) -> StoreSettings | None:
    return _given.get(f"{scheme}://{bucket}") or _given.get(f"{scheme}://")


def limit_s() -> float:
    """Returns how long a call to a file system that may hang is waited for."""
    return _given.get("file://", _default).timeout_s


# The variables for another endpoint; the first that is set counts.
_ENDPOINTS: Final = {
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": ("TENSORSTORE_GCS_HTTP_URL", "STORAGE_EMULATOR_HOST"),
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
}


def _completed(given: StoreSettings, scheme: str, env: Mapping[str, str]) -> StoreSettings:
    endpoint = given.endpoint or next(filter(None, map(env.get, _ENDPOINTS[scheme])), None)
    is_alone = given.single_writer or is_true(env, "JAXCKPT_SINGLE_WRITER")
    settings = replace(given, single_writer=is_alone)
    if scheme == "gs":
        is_bare = endpoint is not None and "://" not in endpoint  # as Google's clients take it
        return replace(settings, endpoint=f"http://{endpoint}" if is_bare else endpoint)
    if scheme == "az":
        account = env.get("AZURE_STORAGE_ACCOUNT_NAME") or env.get("AZURE_STORAGE_ACCOUNT")
        return replace(settings, endpoint=endpoint, account=given.account or account)
    source, in_host = source_of("s3", given.credentials, env), "AWS_VIRTUAL_HOSTED_STYLE_REQUEST"
    region = given.region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    return replace(
        settings,
        endpoint=endpoint or source.endpoint,
        region=region or source.region,
        virtual_hosted=given.virtual_hosted or is_true(env, in_host),
    )


def endpoint_of(scheme: str, bucket: str, settings: StoreSettings) -> str:
    """Returns the endpoint of a bucket and its origin, for messages."""
    if scheme not in SCHEMES:
        return f"{scheme}://{bucket}"
    if settings.endpoint is None:
        return "the provider's endpoint"
    if (_given_for(scheme, bucket) or _default).endpoint is not None:
        return f"{settings.endpoint} (from StoreSettings)"
    names = [name for name in _ENDPOINTS[scheme] if os.environ.get(name)]
    return f"{settings.endpoint} (from {names[0] if names else 'the AWS profile'})"


def check_bucket(scheme: str, bucket: str, url: str) -> None:
    """Raises ValueError if a URL lacks a valid bucket."""
    if not _BUCKET.fullmatch(bucket):
        meant = bucket.lower()
        raise ValueError(
            f"{url!r} must have the form {scheme}://bucket/..., got bucket {bucket!r}. The name of "
            "a bucket has 3 or more of a-z and 0-9, and in the middle also '.', '_' and '-'."
            + (f" Did you mean {scheme}://{meant}?" if _BUCKET.fullmatch(meant) else "")
        )


def check_peer(url: str) -> str:
    """Returns the URL of a peer; ValueError if it has credentials, which the message leaves out."""
    if not isinstance(url, str) or not _PEER.fullmatch(url):
        wanted = "a peer must be http:// or https:// with a host and maybe a path, without a query"
        secret = f"one with credentials. Set {PEER_USER} and {PEER_PASSWORD} instead"
        raise ValueError(f"{wanted}, got {secret if '@' in str(url) else repr(url)}")
    return url


# --- obstore ---------------------------------------------------------------------------------


_VARIABLE: Final = {
    "az": "AZURE_STORAGE_ACCOUNT_NAME",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "AWS_REGION",
}


def open_store(
    scheme: str, bucket: str, settings: StoreSettings, source: Login, *, tries: int = 1
) -> Any:
    """Returns obstore's client of a bucket; it sends nothing yet.

    Args:
        tries: How often it sends a request itself. We do that, except with the parts of a large
            file: only then is it known whether an earlier try may have acted.

    Raises:
        UnsupportedFormat: obstore is not installed.
        StoreError: the bucket's or the credentials' settings are wrong, such as the path of a file.
    """
    try:
        from obstore.exceptions import BaseError
    except ImportError:
        raise UnsupportedFormat(f"{scheme}://{bucket} needs obstore: pip install obstore") from None
    try:
        return _client(scheme, bucket, settings, source, tries)
    except BaseError as error:
        text = str(error).partition("\n\nDebug source")[0]
        raise StoreError(
            f"{scheme}://{bucket}: {text}. Correct StoreSettings, or the variables of the "
            f"environment such as {_VARIABLE[scheme]}"
        ) from None


def _client(scheme: str, bucket: str, settings: StoreSettings, source: Login, tries: int) -> Any:
    from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

    options: dict[str, Any] = {
        "client_options": {
            "timeout": timedelta(seconds=settings.timeout_s),
            "read_timeout": timedelta(seconds=min(settings.stall_s, settings.timeout_s)),
            "connect_timeout": timedelta(seconds=min(10.0, settings.stall_s)),
            "allow_http": (settings.endpoint or f"{scheme}:").startswith("http:"),
        },
        "retry_config": {
            "max_retries": tries - 1,
            "retry_timeout": timedelta(seconds=settings.timeout_s),
        },
        **source.options,
    }
    if scheme not in SCHEMES:
        options["client_options"] |= options.pop("headers", {})
        return HTTPStore(f"{scheme}://{bucket}", **options)
    if scheme == "gs":
        if settings.endpoint:
            options["base_url"] = settings.endpoint.rstrip("/")
        return GCSStore(bucket, **options)
    if scheme == "az":
        if settings.endpoint:
            options["endpoint"] = settings.endpoint.rstrip("/")
        if settings.account:
            options["account_name"] = settings.account
        return AzureStore(bucket, **options)
    if settings.endpoint:
        options["endpoint"] = _s3_endpoint(bucket, settings)
    return S3Store(
        bucket,
        region=settings.region or "us-east-1",
        virtual_hosted_style_request=settings.virtual_hosted,
        **options,
    )


def _s3_endpoint(bucket: str, settings: StoreSettings) -> str:
    scheme, _, host = (settings.endpoint or "").rstrip("/").partition("://")
    return f"{scheme}://{bucket}.{host}" if settings.virtual_hosted else f"{scheme}://{host}"


# --- TensorStore -----------------------------------------------------------------------------


def kvstore(path: str) -> dict[str, Any] | None:
    """Returns TensorStore's spec of a directory; None if it cannot read it."""
    return _file_spec(path) if path.startswith("/") else _store_spec(path)


def _store_spec(path: str) -> dict[str, Any] | None:
    scheme, _, name = path.partition("://")
    if scheme not in SCHEMES:  # in memory
        return None
    bucket, _, key = name.partition("/")
    settings = settings_of(scheme, bucket)
    source = source_of(scheme, settings.credentials)
    bucket_spec = {"bucket": bucket, "path": f"{key}/" if key else ""}
    if (target := settings.grpc_endpoint) is not None:
        timeout = f"{settings.timeout_s:g}s"  # of each try
        return {"driver": "gcs_grpc", **bucket_spec, "endpoint": target, "timeout": timeout}
    if source.tensorstore is None:  # no driver, as for Azure, or not these credentials
        return None
    if scheme == "gs":
        _set_gcs_endpoint(settings)
        return {"driver": "gcs", **bucket_spec}
    spec: dict[str, Any] = {
        "driver": "s3",
        **bucket_spec,
        "aws_region": settings.region or "us-east-1",
        # The default chain of credentials would try others first, and log each that is missing.
        "aws_credentials": {"type": source.tensorstore},
    }
    if settings.endpoint:
        spec["endpoint"] = _s3_endpoint(bucket, settings)
        if settings.virtual_hosted:
            spec["bucket"] = ""
    return spec


def _file_spec(path: str) -> dict[str, Any]:
    with suppress(UnicodeEncodeError):
        path.encode()
        return {"driver": "file", "path": path.rstrip("/") + "/"}
    raise UnsupportedFormat(f"{path!r} is not valid UTF-8, as TensorStore wants; rename it")


def _set_gcs_endpoint(settings: StoreSettings) -> None:
    # TensorStore reads it from the environment, once for the whole process.
    name = "TENSORSTORE_GCS_HTTP_URL"
    if settings.endpoint is None:
        return
    wanted = settings.endpoint.rstrip("/")
    if os.environ.setdefault(name, wanted).rstrip("/") != wanted:
        raise UnsupportedFormat(
            f"{name} is {os.environ[name]}, but the settings of gs:// have the endpoint {wanted}. "
            "TensorStore reaches only one of them in a process: set both to the same."
        )
