"""Kills a process at one of its requests to a store."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from jaxckpt.format import names
from jaxckpt.storage import locate
from jaxckpt.storage._locks import steady_s
from tests.stores.children import LEASE_S
from tests.stores.proxy import Hang
from tests.waiting import wait_until


def kill(zygote, proxy, number, function, *args, applied=True, said=None):
    """Runs a function of `children`, and kills it at its n-th request, the first being 0.

    Args:
        applied: Whether the store acts on that request.
        said: Takes what the function said.

    Returns:
        Whether it was killed: otherwise it ended before that request.
    """
    proxy.heal()
    proxy.requests.clear()
    fault = proxy.add(Hang(applied=applied), number=number)
    pid = zygote.start(function, *args)
    wait_for(fault, pid)
    if fault.done:
        # The store's own work shows nowhere; if it comes later still, that is a fault too.
        time.sleep(0.02 if applied else 0)
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(pid, signal.SIGKILL)
    words, status = zygote.answers()
    proxy.heal()
    assert status != 0 or words[-1] == {"done": True}
    if said is not None:
        said += words
    return status != 0


def end_leases(url):
    """Lets the leases of killed processes end for this one: the store's clock goes on at once.

    The store's times have whole seconds.
    """
    storage, path = locate(url)
    storage._probe(f"{path}/f")  # which finds out what time it is there
    storage._clock += LEASE_S + 2


def lease_of(url):
    """Returns a function: whether others may take the lock that a writer has, if it stands still.

    The store's times have whole seconds.
    """
    storage, path = locate(f"{url}/{names.WRITER}")
    storage._probe(path)
    try:
        renewed_s = storage._head(path)["last_modified"].timestamp()
    except FileNotFoundError:
        return lambda: True
    return lambda: steady_s() + storage._clock > renewed_s + LEASE_S + 1


def wait_for_lease(url):
    wait_until(lease_of(url))


def wait_for(fault, pid):
    """Waits until a fault has happened or the process has ended."""
    wait_until(lambda: fault.done or not _lives(pid))


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second between opening and reading it
        return False
