"""`jaxckpt migrate` finds each use of Orbax, and changes the imports and nothing else."""

from __future__ import annotations

import ast
import os
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxckpt.orbax
from jaxckpt.cli._migrate.command import _changed, _files_in, _lack, _read_file
from jaxckpt.cli._migrate.source import parse
from tests.commandline import cli, said_json

PROGRAM = """\
import orbax.checkpoint as ocp

with ocp.Known(1) as manager:
    manager.save(args=ocp.args.Known())
"""


@pytest.fixture(autouse=True)
def drop_in(monkeypatch):
    """The drop-in has `Known` in each place that a test asks for, and `Told` says why not."""
    known = {"Known": object()}
    args, itself = types.ModuleType("jaxckpt.orbax.args"), types.ModuleType("jaxckpt.orbax")
    vars(args).update(known)
    vars(itself).update(known)

    def missing(name):
        if name == "Told":
            raise NotImplementedError("use jaxckpt.verify instead")
        raise AttributeError(name)

    entries = {**known, "args": args, "v1": args, "checkpoint": itself, "__getattr__": missing}
    for name, value in entries.items():
        monkeypatch.setitem(vars(jaxckpt.orbax), name, value)


def a_file(folder, text, name="train.py"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def names_in(text):
    return [(use.line, use.name) for use in parse(text.encode()).uses]


# --- imports --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "use"),
    [
        ("import orbax.checkpoint as ocp", "import jaxckpt.orbax as ocp", "ocp"),
        ("import os, orbax.checkpoint as ocp", "import os, jaxckpt.orbax as ocp", "ocp"),
        ("import orbax.checkpoint", "from jaxckpt import orbax", "orbax.checkpoint"),
        ("import orbax.checkpoint.args", "from jaxckpt import orbax", "orbax.checkpoint"),
        ("import orbax", "from jaxckpt import orbax", "orbax.checkpoint"),
        ("import orbax as o", "from jaxckpt import orbax as o", "o.checkpoint"),
        ("from orbax import checkpoint", "from jaxckpt import orbax as checkpoint", "checkpoint"),
        ("from orbax import (checkpoint as ocp)", "from jaxckpt import (orbax as ocp)", "ocp"),
        ("from orbax.checkpoint import v1 as o", "from jaxckpt.orbax import v1 as o", "o"),
        (
            "from orbax.checkpoint.experimental import v1 as o",
            "from jaxckpt.orbax import v1 as o",
            "o",
        ),
        ("import orbax.checkpoint.experimental.v1 as o", "import jaxckpt.orbax.v1 as o", "o"),
        ("import orbax.checkpoint.args as o", "import jaxckpt.orbax.args as o", "o"),
        (
            "from orbax.checkpoint._src.checkpoint_managers import preservation_policy as o",
            "from jaxckpt.orbax.checkpoint_managers import preservation_policy as o",
            "o",
        ),
        (
            "import orbax.checkpoint._src.checkpoint_managers.save_decision_policy as o",
            "import jaxckpt.orbax.policies as o",
            "o",
        ),
        (
            "from orbax.checkpoint import (\n  args as o, # why\n)",
            "from jaxckpt.orbax import (\n  args as o, # why\n)",
            "o",
        ),
    ],
)
def test_an_import_is_changed_and_its_names_are_followed(old, new, use):
    """However the module is imported; the program below the import stays as it is."""
    source = parse(f"# -*- a -*-\n{old} # b\nx = {use}.Known.field\n".encode())

    assert source.rewritten() == f"# -*- a -*-\n{new} # b\nx = {use}.Known.field\n".encode()
    assert any(use.name.endswith(".Known.field") for use in source.uses)
    assert parse(source.rewritten()).changes == ()


@pytest.mark.parametrize(
    "text",
    [
        "import orbax.export as e\ne.Known",
        "import orbax\norbax.export.Known",
        "from orbax import export",
        "from .orbax.checkpoint import Known",
        "from . import checkpoint",
        "import orbaxes.checkpoint as ocp\nocp.Known",
        "ocp.Known",
        "",
    ],
)
def test_what_is_not_orbax_checkpoint_is_left_alone(text):
    """Orbax's other packages, and a program's own modules."""
    source = parse(text.encode())

    assert (source.uses, source.changes) == ((), ())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("from orbax import checkpoint as ocp, export", "line of its own"),
        ("import orbax.checkpoint, os", "line of its own"),
        ("import orbax.export\nimport orbax.checkpoint", "another package"),
        ("from orbax . checkpoint import Known", "only a person"),
        ("from \\\n orbax.checkpoint import Known", "only a person"),
    ],
)
def test_an_import_that_takes_a_person(text, problem):
    """It is found, and said to be so."""
    [change] = parse(text.encode()).changes

    assert problem in change.problem
    assert change.new == change.old


def test_a_name_is_followed_by_scope():
    """Arguments, local names and class bodies hide the import, a global name does not."""
    text = """\
try:
    import orbax.checkpoint as ocp
except ImportError:
    ocp = None
def f(ocp): return ocp.hidden
def g():
    ocp = 1
    return lambda: ocp.hidden
def h():
    global late
    from orbax.checkpoint import args as late
class A:
    from orbax.checkpoint import Known as hidden
    x = hidden.field
    def m(self): return hidden, ocp.seen, late.seen
def k(x=ocp.seen): return [ocp.seen(x) for x in ocp.Known]
"""

    assert [name for _, name in names_in(text)] == [
        "jaxckpt.orbax.args",
        "jaxckpt.orbax.Known",
        "jaxckpt.orbax.Known.field",
        *("jaxckpt.orbax.args.seen", "jaxckpt.orbax.seen"),
        *("jaxckpt.orbax.Known", "jaxckpt.orbax.seen"),
    ]


def test_names_that_were_imported_one_by_one_are_followed():
    """Each use has its line; a name under which nothing can be followed is one that lacks."""
    text = (
        "from orbax.checkpoint import Known as K, other\nfrom orbax.checkpoint import *\nK(other)"
    )

    assert names_in(text) == [
        *((1, "jaxckpt.orbax.Known"), (1, "jaxckpt.orbax.other"), (2, "jaxckpt.orbax.*")),
        *((3, "jaxckpt.orbax.Known"), (3, "jaxckpt.orbax.other")),
    ]


ENDS = st.sampled_from(["\n", "\r\n", "\r"])
LINES = st.sampled_from(
    [
        "import orbax.checkpoint as ocp",
        "s = 'ü\x0c\u2028é'; import orbax.checkpoint as ocp; t = 'ß'",
        "if 1: from orbax import checkpoint as ocp",
        "x = (ocp.Known,\t'é')  # import orbax.checkpoint as ocp",
        "'''import orbax.checkpoint as ocp'''",
        "",
    ]
)


@given(
    lines=st.lists(st.tuples(LINES, ENDS)),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "latin-1", "cp1252", "utf-16"]),
)
def test_every_other_byte_stays(lines, encoding):
    """Encodings, byte order marks, ends of lines, and what looks like an import."""
    cookie = "" if encoding.startswith("utf-8") else f"# coding: {encoding}\n"
    text = cookie + "".join(line + end for line, end in lines)
    data = text.encode(encoding, "ignore")
    if encoding == "utf-16":
        with pytest.raises((SyntaxError, ValueError)):
            parse(data)
        return

    source = parse(data)

    assert len(source.changes) == sum(
        line.startswith(("import", "s =", "if 1")) for line, _ in lines
    )
    rewritten = source.rewritten()
    ast.parse(rewritten)
    restored = rewritten.replace(b"import jaxckpt.orbax", b"import orbax.checkpoint")
    assert restored.replace(b"from jaxckpt import orbax", b"from orbax import checkpoint") == data


# --- the command ----------------------------------------------------------------------------------


def test_a_dry_run_shows_and_changes_nothing(tmp_path):
    """Each use with its place, and the import as it would be."""
    path = a_file(tmp_path, PROGRAM)

    code, out, err = cli("migrate", tmp_path)

    assert (code, err, path.read_text()) == (0, "", PROGRAM)
    rows = [line.split() for line in out.splitlines()]
    assert rows[1:3] == [[f"{path}:3", "Known", "yes"], [f"{path}:4", "args.Known", "yes"]]
    assert f"{path}:1: import orbax.checkpoint as ocp  ->  import jaxckpt.orbax as ocp" in out
    assert out.splitlines()[-1] == "1 file read, 1 to change: pass --write to change imports"


def test_write_changes_the_import(tmp_path):
    """And keeps the mode; the next run finds nothing to do."""
    path = a_file(tmp_path, PROGRAM)
    path.chmod(0o750)

    code, out, _ = cli("migrate", path, "--write")

    assert (code, out.splitlines()[-1]) == (0, "1 file read, 1 changed")
    assert path.read_text() == PROGRAM.replace("orbax.checkpoint", "jaxckpt.orbax")
    assert path.stat().st_mode & 0o777 == 0o750
    assert os.listdir(tmp_path) == ["train.py"]
    assert cli("migrate", path, "--write")[1].splitlines()[-1] == "1 file read, 1 unchanged"


def test_a_name_that_the_drop_in_lacks(tmp_path):
    """The file is left alone unless asked, and the reason is the drop-in's."""
    text = f"{PROGRAM}ocp.Unknown\nocp.Told\n"
    path = a_file(tmp_path, text)

    code, out, _ = cli("migrate", path, "--write")

    assert (code, path.read_text()) == (1, text)
    assert [f"{path}:5", "Unknown", "no"] in [line.split() for line in out.splitlines()]
    assert "use jaxckpt.verify instead" in out
    assert f"{path}: by hand: jaxckpt.orbax lacks Told, Unknown" in out

    code, _, _ = cli("migrate", path, "--write", "--anyway")

    assert (code, path.read_text()) == (1, text.replace("orbax.checkpoint", "jaxckpt.orbax"))


def test_the_report_is_the_drop_in_s(tmp_path, monkeypatch):
    """A name that the drop-in gains is carried."""
    path = a_file(tmp_path, "import orbax.checkpoint as ocp\nocp.Unknown")
    before = cli("migrate", path)[0]

    monkeypatch.setitem(vars(jaxckpt.orbax), "Unknown", 1)

    assert (before, cli("migrate", path)[0]) == (1, 0)


def test_json(tmp_path):
    """With each name, and what stays as it is."""
    flax = "from flax.training import orbax_utils\norbax_utils.save_args_from_target(1)\n"
    path = a_file(tmp_path, f"{PROGRAM}{flax}import_module('orbax.checkpoint.args')\n")

    code, facts = said_json("migrate", path)

    [file] = facts.pop("files")
    assert (code, facts) == (0, {"write": False, "read": 1})
    assert file.pop("path") == str(path)
    assert [name["carried"] for name in file["names"]] == [True, True, None, None]
    assert file.pop("names")[2:] == [
        {
            "line": 6,
            "name": "flax.training.orbax_utils.save_args_from_target",
            "carried": None,
            "why": "Flax's own; the drop-in takes what it returns",
        },
        {"line": 7, "name": "orbax.checkpoint.args", "carried": None, "why": "a string"},
    ]
    old, new = "import orbax.checkpoint as ocp", "import jaxckpt.orbax as ocp"
    assert file == {
        "state": "to change",
        "why": [],
        "changes": [{"line": 1, "old": old, "new": new}],
    }


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"import orbax.checkpoint as ocp\nprint 'a'\n", "line 2"),
        (b"# coding: nothing\nimport orbax.checkpoint", "not Python"),
        (b"# coding: rot13\nvzcbeg beonk.purpxcbvag\n", "rot13"),
        (b"import orbax.checkpoint\n\xff", "0xff"),
        (b"\x00", "null bytes"),
        (b"(" * 5000, "not Python"),
        (b"-" * 200_000 + b"1", ""),
    ],
    ids=["python2", "coding", "no text", "bytes", "null", "brackets", "deep"],
)
def test_a_file_that_is_not_python(tmp_path, data, why):
    """It is named and left alone; exit code 2. With --partly the others are changed."""
    bad, good = a_file(tmp_path, data, "bad.py"), a_file(tmp_path, PROGRAM)

    code, out, _ = cli("migrate", tmp_path, "--write", "--partly")

    assert code == 2
    assert why in out
    assert f"{bad}: error: " in out
    assert bad.read_bytes() == data
    assert "jaxckpt" in good.read_text()


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("import orbax.checkpoint as ocp\nocp.Unknown", False),
        ("import orbax.checkpoint\nprint 'a'", False),
        ("print 'a'", True),
        ("import orbax.export as e\ne.Known", True),
    ],
    ids=["by hand", "error", "error without Orbax", "another package"],
)
def test_a_program_is_changed_whole_or_not_at_all(tmp_path, text, changed):
    """If a file below a path keeps Orbax, none there changes; another path does."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    a_file(one, text, "a.py")
    good, apart = a_file(one, PROGRAM), a_file(other, PROGRAM)

    _, out, _ = cli("migrate", one, other, "--write")

    assert ("jaxckpt" in good.read_text()) == changed
    assert (f"Nothing below {one} was changed" in out) == (not changed)
    assert "jaxckpt" in apart.read_text()


def test_what_is_no_file_of_python(tmp_path):
    """A notebook, a fifo and a missing file; nothing is waited for."""
    notebook = a_file(tmp_path, "{}", "a.ipynb")
    os.mkfifo(tmp_path / "fifo.py")

    assert "a notebook" in cli("migrate", notebook)[1]
    assert "not a regular file" in cli("migrate", tmp_path)[1]
    code, _, err = cli("migrate", a_file(tmp_path, PROGRAM), tmp_path / "missing", "--write")
    assert code == 2
    assert err == f"error: {tmp_path}/missing: No such file or directory\n"
    assert (tmp_path / "train.py").read_text() == PROGRAM


def test_a_file_that_is_not_writable(tmp_path):
    """It is left alone, for root too."""
    path = a_file(tmp_path, PROGRAM)
    path.chmod(0o444)

    code, out, _ = cli("migrate", tmp_path, "--write")

    assert code == 1
    assert "not writable" in out
    assert path.read_text() == PROGRAM


def test_links(tmp_path):
    """One out of the path is left alone; one within it stays a link to the changed file."""
    outside, root = a_file(tmp_path, PROGRAM, "outside.py"), tmp_path / "root"
    root.mkdir()
    inside = a_file(root, PROGRAM, "inside.py")
    (root / "a.py").symlink_to(inside)
    (root / "b.py").symlink_to(outside)
    (root / "c").symlink_to(tmp_path)

    code, out, _ = cli("migrate", root, "--write", "--partly")

    assert code == 1
    assert f"{root}/b.py: by hand: a symbolic link to {outside}" in out
    assert outside.read_text() == PROGRAM
    assert "jaxckpt" in inside.read_text()
    assert (root / "a.py").is_symlink()
    assert cli("migrate", root / "b.py", "--write")[0] == 1
    assert outside.read_text() == PROGRAM


def test_a_directory_without_what_others_installed(tmp_path):
    """Nor hidden directories; a file that is named twice is read once."""
    for place in (".git", "env", "a/site-packages/x", "node_modules", "a/b"):
        (tmp_path / place).mkdir(parents=True)
        a_file(tmp_path / place, PROGRAM)
    (tmp_path / "env" / "pyvenv.cfg").touch()

    _, facts = said_json("migrate", tmp_path, tmp_path / "a")

    assert [file["path"] for file in facts["files"]] == [str(tmp_path / "a" / "b" / "train.py")]


def test_a_failed_write_leaves_the_file(tmp_path):
    """And nothing beside it."""
    path = a_file(tmp_path, PROGRAM)

    resource = pytest.importorskip("resource")
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(PROGRAM) // 2, most))  # as on a full disk
    try:
        code, out, _ = cli("migrate", path, "--write")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))

    assert code == 2
    assert f"{path}: error: not changed: File too large" in out
    assert (path.read_text(), os.listdir(tmp_path)) == (PROGRAM, ["train.py"])


def test_a_directory_that_cannot_be_listed(tmp_path):
    """It may have what must be changed by hand, so that nothing is."""
    with pytest.raises(FileNotFoundError):
        [*_files_in(str(tmp_path / "away"))]


def test_a_file_that_is_written_meanwhile(tmp_path):
    """It stays as it is, whether it still is Python or not."""
    path = a_file(tmp_path, "import orbax.checkpoint as ocp\nx = ocp.Known\n")
    read = _read_file(str(path), str(tmp_path), anyway=False)

    for text in ("import orbax.checkpoint as ocp\n", "import ("):
        path.write_text(text)
        changed = _changed(read, anyway=False)
        assert (changed.state, changed.why) == ("error", ["not changed: it was written meanwhile"])
        assert path.read_text() == text


def test_nothing_is_run_or_imported(tmp_path):
    """Neither the file nor what it imports."""
    mark = tmp_path / "mark"
    path = a_file(tmp_path, f"import os, orbax.checkpoint as ocp\nopen({str(mark)!r}, 'w')\n")

    assert cli("migrate", path)[0] == 0
    assert not mark.exists()


def test_only_modules_of_the_drop_in_are_imported():
    """Not those that one of them happens to use, whatever the file goes on to name."""
    assert _lack("jaxckpt.orbax.handlers.jax.collect_profile") == ""


def test_no_file_uses_orbax(tmp_path):
    """Said so, with exit code 0."""
    a_file(tmp_path, "print()")

    assert cli("migrate", tmp_path)[:2] == (0, "1 file read, none uses Orbax\n")
