"""What `docs/stores.md` says holds: its program, its permissions, and what it costs in requests.

`pytest -m stores -s tests/stores/test_page.py -k requests` prints what was counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import jaxckpt
from jaxckpt.cli._bucket_checks import _PERMISSIONS
from jaxckpt.storage import _credentials as credentials_module
from jaxckpt.storage import _requests as requests_module
from tests.commandline import cli
from tests.stores.proxy import Answer
from tests.stores.rounds import Rounds

PAGE = (Path(__file__).parents[2] / "docs" / "stores.md").read_text("utf-8")
KINDS = ("writes", "lists", "reads", "deletes", "in a row")
TREE = {"w": np.ones((64, 64), np.float32), "b": np.zeros(64), "step": 1}


def told():
    """The table of the page: by what is done, the most requests of each kind."""
    rows = re.findall(r"^\| (.+?) \|" + r" (\d+) \|" * 6 + "$", PAGE, re.MULTILINE)
    return {
        name: dict(zip(("total", *KINDS), map(int, counts), strict=True)) for name, *counts in rows
    }


def kind_of(request):
    if "delete" in request.path or request.method == "DELETE":
        return "deletes"
    if request.method in ("PUT", "POST"):
        return "writes"
    return "lists" if "list-type" in request.path else "reads"


@pytest.mark.parametrize("name", ["moto_server", "gcs_server"])
def test_requests_are_at_most_those_of_the_page(request, proxied, limits, name):
    """Of a tree of three leaves, one process; the first save to a bucket also tries it out."""
    # A read that takes long on a busy machine would be sent again.
    limits(requests_module, _LEAST_PEERS=math.inf)
    server, proxy = proxied(request.getfixturevalue(name))
    url = f"{server.scheme}://{server.bucket}"
    counted = {}

    def count(what, call):
        proxy.rounds = rounds = Rounds()
        result = call()
        proxy.rounds = None
        counted[what] = Counter(kind_of(one) for some in rounds.requests for one in some)
        counted[what]["in a row"] = len(rounds.requests)
        return result

    count("the first save to a bucket", lambda: jaxckpt.save(f"{url}/first", TREE))
    count("`save`", lambda: jaxckpt.save(f"{url}/a", TREE))
    count("`restore(path, like)`", lambda: jaxckpt.restore(f"{url}/a", TREE))
    count("`open`", lambda: jaxckpt.open(f"{url}/a"))
    count("`verify`", lambda: jaxckpt.verify(f"{url}/a"))
    keep = jaxckpt.KeepPolicy(last=2)
    manager = count("opening a manager", lambda: jaxckpt.CheckpointManager(f"{url}/run", keep=keep))

    def save(step):
        manager.save(step, TREE)
        manager.wait_until_finished()

    save(1)
    count("a manager's step", lambda: save(2))
    count("a manager's step that deletes another", lambda: save(3))
    count("`manager.restore(like)`", lambda: manager.restore(TREE))
    count("`manager.latest_step()`", manager.latest_step)
    count("`manager.delete(step)`", lambda: manager.delete(2))
    save(4)
    count("closing a manager", manager.close)
    again = count("opening a manager of a run", lambda: jaxckpt.CheckpointManager(f"{url}/run"))
    again.close()
    count("`jaxckpt ls` of two steps; `gc -n` reads one more", lambda: cli("ls", f"{url}/run"))
    count("`jaxckpt du` of two steps", lambda: cli("du", f"{url}/run"))
    count("`jaxckpt rm` of a step", lambda: cli("rm", "-y", f"{url}/run", 3))

    for what, found in counted.items():
        print(f"{what}: {found.total() - found['in a row']} {dict(found)}")
    assert counted.keys() == told().keys()
    # Threads that start late, on a busy machine, make another round of the same requests.
    late = Counter({"in a row": 2})
    above = {
        what: dict(found)
        for what, found in counted.items()
        if found.total() - found["in a row"] > told()[what]["total"]
        or any(found[kind] > told()[what][kind] + late[kind] for kind in KINDS)
    }
    assert above == {}


@pytest.mark.parametrize("name", ["moto_server", "gcs_server"])
def test_the_program_of_the_page_runs_with_a_bucket(request, use_store, name):
    """The page itself names a store in memory, which needs nothing."""
    server = use_store(request.getfixturevalue(name))
    program = "".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
    assert "memory://training/vit" in program

    exec(program.replace("memory://training", f"{server.scheme}://{server.bucket}"), {})

    assert jaxckpt.open(f"{server.scheme}://{server.bucket}/vit").path.endswith("/vit/3")


@pytest.mark.parametrize("name", ["moto_server", "gcs_server"])
def test_readers_need_no_permission_to_write(request, proxied, name):
    """Those to get and to list are enough for all that reads."""
    server, proxy = proxied(request.getfixturevalue(name))
    run = f"{server.scheme}://{server.bucket}/run"
    with jaxckpt.CheckpointManager(run) as manager:
        manager.save(1, TREE)
    for method in ("PUT", "POST", "DELETE"):
        proxy.add(Answer(403), method=method)

    assert jaxckpt.restore(run, TREE)["step"] == 1
    assert jaxckpt.verify(run).ok
    assert [cli(verb, run)[0] for verb in ("ls", "show", "du")] == [0, 0, 0]
    with jaxckpt.CheckpointManager(run, mode="r") as reader:
        assert reader.restore(TREE)["step"] == 1


def test_the_page_lists_how_to_sign_in():
    """And each variable about asking the machine, whose last ones are other names of the first."""
    variables = [names[0] for names in credentials_module._ADDRESSES.values()]
    variables += credentials_module._NO_MACHINE.values()
    variables += [f"{prefix}_SKIP_SIGNATURE" for prefix in credentials_module._PREFIXES.values()]
    texts = [credentials_module.SIGN_IN[scheme] for scheme in credentials_module._PREFIXES]
    ways = [re.findall(r"`(.+?)`|([A-Z_]{9,})", text) for text in texts]

    wanted = {*variables, *("".join(found) for way in ways for found in way)}
    assert len(wanted) == 18
    assert {one for one in wanted if f"`{one}" not in PAGE} == set()


def test_the_page_lists_the_permissions_of_the_doctor():
    """Every one that it may ask for."""
    asked = {
        permission
        for of_store in _PERMISSIONS.values()
        for text in of_store.values()
        for permission in re.findall(r"[a-z0-9]+[:.][A-Za-z.]+", text)
    }

    assert len(asked) == 9
    assert {one for one in asked if f"`{one}`" not in PAGE} == set()
