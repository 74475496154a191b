"""Sends requests to an object store: each with a deadline, a bounded number of tries and a reason.

A read that takes far longer than its peers is sent a second time, and the first answer counts. A
write is sent again only after an error; an earlier try may then have acted.
"""

from __future__ import annotations

import atexit
import errno
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from typing import Any, Final, Literal, TypeVar, final

from jaxckpt._core.threads import Threads, daemons
from jaxckpt.errors import StoreError
from jaxckpt.storage._credentials import SIGN_IN, Login
from jaxckpt.storage._settings import StoreSettings, endpoint_of

T = TypeVar("T")
# Why a store refused.
Reason = Literal[
    "bucket",
    "clock",
    "region",
    "addressing",
    "credentials",
    "package",
    "permission",
    "ranges",
    "load",
    "unreachable",
    "silence",
]

REQUESTS_AT_ONCE: Final = 32
_SMALL_AT_ONCE: Final = 192  # of several calls, such as reads of metadata
# A read is sent again after this many times the seconds that nine of ten of its peers took. Peers
# are the latest reads of about its size.
_HEDGE_FACTOR: Final = 1.5
_HEDGE_FLOOR_S: Final = 0.01
_HEDGE_BYTES: Final = 0.05  # of the bytes read
_PEERS: Final = 64
_LEAST_PEERS: Final = 4
_LAST_S: Final = 2.0  # how long the end of the program waits for requests under way
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_MOST_SAID: Final = 300
# In the dump of a client's internals only: nothing took the connection, and why.
_NOT_CONNECTED: Final = re.compile(r'kind: Connect,.*?(?:message|error): "([^"]*)"', re.S)
# Texts that obstore puts around the message of a store or of a credential provider.
_AROUND: Final = (
    (re.compile(r"^.*? credential provider: \w+: |^.*?\bError performing (?=[A-Z]+ )"), ""),
    (re.compile(r" in [\d.]+\w+(, after .*?)? - (Server .*? code: |HTTP error: )?"), ": "),
    (
        re.compile(
            r"(?<=: )<.*?<Code>(.*?)</Code>(?:.*?<Message>(.*?)( RequestId:.*)?</Message>)?.*"
        ),
        r"\1 \2",
    ),
)
_FINAL: Final = re.compile(
    r"status code: (?!408|409|425|429)4\d\d|code: AccessDenied|NotImplemented|non-partial"
    "|redirect without"
)
_NO_BUCKET: Final = re.compile("NoSuchBucket|bucket does not exist|ContainerNotFound")
_REGION: Final = re.compile(
    "PermanentRedirect|AuthorizationHeaderMalformed|code: 301|incorrectly configured region"
)
# The last patterns are of a machine's own service, which is asked when nothing else is set.
_CREDENTIALS: Final = re.compile(
    "credential|InvalidAccessKey|ExpiredToken|SignatureDoesNotMatch|failed to authenticate"
    "|status code: 401|az account get-access-token|token request|/latest/api/token|computeMetadata",
    re.I,
)


# Kinds of threads, so that none waits for another of its kind.
pool = partial(daemons, "jaxckpt-store", REQUESTS_AT_ONCE + _SMALL_AT_ONCE)  # wait for answers
callers = partial(daemons, "jaxckpt-calls", REQUESTS_AT_ONCE)  # send the requests of one call
outer_callers = partial(daemons, "jaxckpt-together", _SMALL_AT_ONCE)  # make several calls
# Renew leases, which must not wait for reads of a silent store.
keepers = partial(daemons, "jaxckpt-leases", _SMALL_AT_ONCE)


def all_of(threads: Threads, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Makes calls at the same time; waits for all of them, also after an error."""
    if len(calls) == 1:
        return [calls[0]()]
    tasks = [threads.submit(call) for call in calls]
    wait(tasks)
    return [task.result() for task in tasks]


_process: int | None = None  # that sent the first request


def _check_not_forked(what: str, path: str) -> None:
    """Raises StoreError in a forked child: it lacks the threads of the clients, and would hang."""
    global _process
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise StoreError(
            f"{path}: cannot {what} in a forked process: an object store was in use before the "
            "fork, and its connections do not survive that. Start the process with spawn."
        )


@atexit.register
def _end() -> None:
    """Waits briefly: a request that returns to an ending interpreter can abort the process."""
    kinds = (pool, callers, outer_callers, keepers)
    wait([call for kind in kinds for call in kind().under_way()], _LAST_S)


@final
class Requests:
    """The requests of this process to one bucket."""

    def __init__(self, scheme: str, bucket: str, settings: StoreSettings, source: Login) -> None:
        self.heard_s = 0.0  # when the store answered last
        self._scheme, self._bucket, self._name = scheme, bucket, f"{scheme}://{bucket}"
        self._settings, self._source = settings, source
        self._lock = threading.Lock()  # guards the three below
        self._peers: dict[int, deque[float]] = {}  # seconds, by the magnitude of the size
        self._read_bytes = 0
        self._hedged_bytes = 0

    def read(
        self,
        what: str,
        path: str,
        call: Callable[[], T],
        *,
        size: int = 0,
        tries: int | None = None,
    ) -> T:
        """Returns the answer to a read.

        Args:
            what: The verb, for errors.
            call: Sends the request and waits for its answer; may be called again, in any thread.
            size: Bytes expected.
            tries: How often to ask. If None, as often as in the settings.

        Raises:
            FileNotFoundError: the object does not exist.
            StoreError: the store did not answer, or refused.
        """
        return self.change(what, path, lambda: self._hedge(call, size), tries=tries)

    def change(self, what: str, path: str, call: Callable[[], T], *, tries: int | None = None) -> T:
        """Returns the answer to a request that changes something; see `read`."""
        tries = self._settings.tries if tries is None else tries
        _check_not_forked(what, path)
        started_s = time.monotonic()
        for n in range(1, tries + 1):
            try:
                answer = call()
            except Exception as error:
                waited_s = time.monotonic() - started_s
                pause_s = min(_FIRST_PAUSE_S * 2**n, _LONGEST_PAUSE_S) * random.uniform(0.5, 1)
                is_last = n == tries or waited_s + pause_s >= self._settings.timeout_s
                if is_last or not _may_pass(error):
                    # Its text is in ours, and the rest is a dump of the client's internals.
                    raise self._explained(error, what, path, waited_s, n) from None
            else:
                self.heard_s = time.monotonic()
                return answer
            time.sleep(pause_s)
        raise AssertionError

    def _hedge(self, call: Callable[[], T], size: int) -> T:
        """Sends a slow request a second time, if that is allowed; returns the first good answer."""
        started_s = time.monotonic()
        futures = {pool().submit(call)}
        if not wait(futures, self._patience_s(size)).done and self._may_hedge(size):
            futures.add(pool().submit(call))
        done, _ = wait(futures, return_when=FIRST_COMPLETED)
        if all(one.exception() for one in done):
            done, _ = wait(futures)  # the other may still succeed
        answer = min(done, key=lambda one: one.exception() is not None).result()
        with self._lock:
            peers = self._peers.setdefault(size.bit_length() // 2, deque(maxlen=_PEERS))
            peers.append(time.monotonic() - started_s)
            self._read_bytes += size
        return answer

    def _patience_s(self, size: int) -> float | None:
        """Returns after how many seconds a read is sent again; None if too few peers are known."""
        with self._lock:
            peers = sorted(self._peers.get(size.bit_length() // 2, ()))
        if len(peers) < _LEAST_PEERS:
            return None
        usual_s = peers[int(0.9 * (len(peers) - 1))]
        return max(_HEDGE_FACTOR * usual_s, _HEDGE_FLOOR_S)

    def _may_hedge(self, size: int) -> bool:
        with self._lock:
            # One more request of the usual size is always allowed.
            allowed = self._hedged_bytes + size <= max(_HEDGE_BYTES * self._read_bytes, 1 << 20)
            if allowed:
                self._hedged_bytes += size
            return allowed

    def _explained(
        self, error: Exception, what: str, path: str, waited_s: float, tries: int
    ) -> Exception:
        """Returns the error to raise: the request, the store's answer and what to do."""
        text = said(error)
        # One with a name is of a local file that is sent.
        is_missing = type(error) is FileNotFoundError and error.filename is None
        is_told = isinstance(error, errors().BaseError) or is_missing
        if not is_told:
            return error
        if isinstance(error, FileNotFoundError) and not _NO_BUCKET.search(text):
            return FileNotFoundError(errno.ENOENT, "no such object", path)
        reason = reason_of(error)
        speaker = self._source.name if "credential provider" in _text(error) else self._name
        tried = f"{tries} {'try' if tries == 1 else 'tries'}"
        return StoreError(
            f"{path}: cannot {what}: {self.advice(reason)} ({waited_s:.1f} s, {tried}). "
            f"{speaker} said: {text}",
            code=errno.EACCES if reason in ("permission", "credentials") else errno.EIO,
            client_error=error,
        )

    def advice(self, reason: Reason) -> str:
        """Returns an explanation of the problem, with the remedy."""
        return _ADVICE[reason].format(
            bucket=self._name,
            endpoint=self.endpoint,
            source=self._source.name,
            sign_in=SIGN_IN[self._scheme],
        )

    @property
    def endpoint(self) -> str:
        """Returns the endpoint and its origin, for messages."""
        return endpoint_of(self._scheme, self._bucket, self._settings)


def errors() -> Any:
    """Returns the module with the client's errors; not every machine has it."""
    import obstore.exceptions

    return obstore.exceptions


def _may_pass(error: Exception) -> bool:
    """Returns whether sending a request again may help."""
    is_final = _FINAL.search(_text(error))
    return is_conflict(error) or (isinstance(error, errors().GenericError) and not is_final)


def is_condition(error: Exception) -> bool:
    """Returns whether a store answered that the condition of a write does not hold."""
    return isinstance(error, (errors().AlreadyExistsError, errors().PreconditionError))


def is_conflict(error: Exception) -> bool:
    """Returns whether a store answered that another request for the object is under way."""
    return is_condition(error) and "status code: 409" in _text(error)


def is_beyond_the_end(error: StoreError) -> bool:
    """Returns whether a store refused a read because the object ends before it."""
    # Only the client's words: an object's name may contain anything.
    return "non-2xx status code: 416" in str(error.client_error)


def said(error: BaseException) -> str:
    """Returns the message of the store or client, on one line, without a dump of its internals."""
    text = " ".join(_text(error).split())
    for pattern, words in _AROUND:
        text = pattern.sub(words, text, count=1)
    if found := _NOT_CONNECTED.search(str(_behind(error))):
        text = f"{text}: {found[1]}"
    return text.strip()[:_MOST_SAID]


def _text(error: BaseException) -> str:
    return str(_behind(error)).partition("\n\nDebug source")[0]


def _behind(error: BaseException) -> BaseException:
    """Returns the error of the client, which has the store's whole answer."""
    return getattr(error, "client_error", None) or error.__cause__ or error


def reason_of(error: BaseException) -> Reason:
    """Returns why a store refused a request, from its message or the client's."""
    behind, text = _behind(error), _text(error)
    if _NO_BUCKET.search(text):
        return "bucket"
    if "RequestTimeTooSkewed" in text:
        return "clock"
    if _REGION.search(text):
        return "region"
    if "PathStyle" in text or "path-style" in text.lower():
        return "addressing"
    if "needs the package" in text:
        return "package"
    if isinstance(behind, errors().UnauthenticatedError) or _CREDENTIALS.search(text):
        return "credentials"
    is_denied = isinstance(behind, errors().PermissionDeniedError)
    if is_denied or re.search("status code: 403|PERMISSION_DENIED|code: AccessDenied", text):
        return "permission"
    if "non-partial" in text:
        return "ranges"
    if re.search("status code: (429|503)", text):
        return "load"
    return "unreachable" if _NOT_CONNECTED.search(str(behind)) else "silence"


_ADVICE: Final[Mapping[Reason, str]] = {
    "bucket": "there is no bucket {bucket}. Make it, or correct its name or the endpoint",
    "clock": "this machine's clock is wrong, so its signatures are refused. Set the clock",
    "region": "the bucket is in another region. Set AWS_REGION, or `region` in StoreSettings",
    "addressing": "the store wants the bucket in the host's name. Set virtual_hosted=True in "
    "StoreSettings, or AWS_VIRTUAL_HOSTED_STYLE_REQUEST=true",
    "credentials": "the credentials of {source} are missing or not accepted. {sign_in}",
    "package": "a package that reads {source} is missing. Install it",
    "permission": "no permission. `jaxckpt doctor URL` shows which one is missing",
    "ranges": "the store gives the whole object where a part was asked for. Use another store",
    "load": "the store is overloaded or limits the rate of requests",
    "unreachable": "nothing answers at {endpoint}. Correct it or start the store; if it is right, "
    "see whether this machine has to use a proxy (HTTPS_PROXY)",
    "silence": "the store did not answer in time, or not as a store does",
}
