"""Notices of cloud providers that a spot instance ends soon, for `CheckpointManager(notice=...)`.

Each function returns a function that asks the instance's metadata server. It is never called unless
you pass it: on other machines that address may not answer. The formats follow the providers'
documentation; they were tried on loopback only:

    aws      /latest/meta-data/spot/instance-action (IMDSv2), two minutes ahead
    azure    /metadata/scheduledevents, at least 30 seconds ahead
    gcp      /computeMetadata/v1/instance/preempted, 30 seconds ahead

Example:
    >>> from jaxckpt.integrations import notices
    >>> notices.gcp("http://127.0.0.1:9")()  # nothing answers there
    Traceback (most recent call last):
    urllib.error.URLError: ...
"""

from __future__ import annotations

import datetime
import http
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final

__all__ = ["aws", "azure", "gcp"]

Notice = Callable[[], float | None]

_LINK_LOCAL: Final = "http://169.254.169.254"
_TIMEOUT_S: Final = 2.0
_MAX_BYTES: Final = 1 << 20
_TOKEN_S: Final = 21_600
# Google gives no time.
_GCP_LEFT_S: Final = 30.0
# No system proxy may come between an instance and its own metadata.
_opener: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def gcp(url: str = "http://metadata.google.internal") -> Notice:
    """Returns the notice of Compute Engine: 30 s once the instance is being preempted."""

    def notice() -> float | None:
        path = f"{url}/computeMetadata/v1/instance/preempted"
        told = _ask(path, {"Metadata-Flavor": "Google"})
        return _GCP_LEFT_S if told is not None and told.strip() == "TRUE" else None

    return notice


def aws(url: str = _LINK_LOCAL) -> Notice:
    """Returns the notice of EC2: the time until a spot instance is stopped or terminated."""
    token: dict[str, Any] = {"value": None, "until_s": 0.0}

    def notice() -> float | None:
        if time.monotonic() >= token["until_s"]:
            wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            token["value"] = _ask(f"{url}/latest/api/token", wanted, method="PUT")
            token["until_s"] = time.monotonic() + _TOKEN_S / 2
        headers = {"X-aws-ec2-metadata-token": str(token["value"])}
        until_s, token["until_s"] = token["until_s"], 0.0  # so that a new token follows an error
        told = _ask(f"{url}/latest/meta-data/spot/instance-action", headers)
        token["until_s"] = until_s
        return None if told is None else _left_s(json.loads(told)["time"])

    return notice


def azure(url: str = _LINK_LOCAL) -> Notice:
    """Returns the notice of Azure: the time until this spot machine is evicted."""
    headers, api = {"Metadata": "true"}, "api-version=2021-02-01"

    def notice() -> float | None:
        told = _ask(f"{url}/metadata/scheduledevents?api-version=2020-07-01", headers)
        events = [] if told is None else json.loads(told)["Events"]
        found = [one for one in events if one["EventType"] == "Preempt"]
        if found:  # all machines of a set hear of each other's events
            name = _ask(f"{url}/metadata/instance/compute/name?{api}&format=text", headers)
            found = [one for one in found if name is None or _is_named(name, one)]
        return min((_left_s(one["NotBefore"]) for one in found), default=None)

    return notice


def _is_named(machine: str, event: Mapping[str, Any]) -> bool:
    names = [name.lower() for name in event.get("Resources", ())]
    return not names or machine.lower() in names


def _ask(url: str, headers: Mapping[str, str], *, method: str = "GET") -> str | None:
    """Returns the answer; None if the address does not exist, which means no notice."""
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with _opener.open(request, timeout=_TIMEOUT_S) as answer:
            return answer.read(_MAX_BYTES).decode()
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.NOT_FOUND:
            return None
        raise


def _left_s(when: str) -> float:
    """Returns the seconds until a time such as 2017-09-18T08:22:00Z, or as in an HTTP header."""
    if not when:  # Azure: the event has begun
        return 0.0
    try:
        at = datetime.datetime.fromisoformat(when)
    except ValueError:
        at = parsedate_to_datetime(when)
    at = at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)
    return max(0.0, (at - datetime.datetime.now(datetime.UTC)).total_seconds())
