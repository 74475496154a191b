"""A call names the package that it misses; README lists the extras, and the Makefile the groups."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
GROUPS = PYPROJECT["dependency-groups"]

# Asks for credentials as obstore does, which is hidden too.
ASKED = (
    "from jaxckpt.storage._credentials import source_of; "
    "(lambda *a: source_of(*a).options['credential_provider']())"
)
# The call that needs each extra, and the text of its error.
NEEDS = {
    "aws": (f"{ASKED}('s3', 'default', {{'AWS_PROFILE': 'x'}})", "pip install boto3"),
    "azure": (
        f"{ASKED}('az', 'default', {{'AZURE_CLIENT_CERTIFICATE_PATH': 'x'}})",
        "pip install azure-identity",
    ),
    "cli": ("from jaxckpt.cli import main; print(main(['ls', '.']))", "pip install click rich"),
    "cloud": ("import jaxckpt; jaxckpt.open('s3://bucket/x')", "pip install obstore"),
    "gcloud": (
        f"{ASKED}('gs', 'default', {{'GOOGLE_APPLICATION_CREDENTIALS': 'adc.json'}})",
        "pip install 'google-auth[requests]'",
    ),
    "flax": ("import flax", "No module named"),  # nothing of jaxckpt imports it
    "gin": ("import jaxckpt.integrations.gin", "pip install gin-config"),
    "legacy": ("import jaxckpt; jaxckpt.open('old.msgpack')", "pip install msgpack"),
    "ml-collections": ("import jaxckpt.integrations.ml_collections", "pip install ml-collections"),
    "notebook": (
        "from jaxckpt.pages import plots; plots._axes(None)",
        "pip install matplotlib",
    ),
    "opentelemetry": (
        "from jaxckpt.integrations.metrics import to_opentelemetry as f; f()",
        "pip install opentelemetry-api",
    ),
    "orbax": ("import jaxckpt.orbax", "pip install 'etils[epath]'"),
    "prometheus": (
        "from jaxckpt.integrations.metrics import to_prometheus as f; f()",
        "pip install prometheus-client",
    ),
}
HIDDEN = (
    *("azure", "botocore", "click", "etils", "flax", "gin", "google", "matplotlib"),
    *("ml_collections", "msgpack", "obstore", "opentelemetry", "prometheus_client", "rich"),
)

# Runs each call where these packages are not installed, and prints its error.
PROGRAM = f"""
import importlib.util, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HIDDEN!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in {HIDDEN!r} else found(name, *a)
sys.meta_path.insert(0, Hidden())
sys.stderr = sys.stdout
for extra, (call, _) in {NEEDS!r}.items():
    print("##", extra)
    try:
        exec(call, {{}})
    except Exception as error:
        print(error)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each call prints without the packages, by extra."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "old.msgpack").write_bytes(b"\x81\xa1a\x01")
    (folder / "adc.json").write_text('{"type": "external_account"}')
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, capture_output=True, text=True, check=True
    )
    return dict(part.split("\n", 1) for part in done.stdout.split("## ")[1:])


@pytest.mark.parametrize("extra", NEEDS)
def test_a_missing_package_is_named(said, extra):
    """With the command that installs it; the name of an extra is of no use without an index."""
    assert NEEDS[extra][1] in said[extra]
    assert "extra" not in said[extra]


def test_every_extra_is_in_the_table_and_in_the_readme():
    """And `all` has each of them but the one for GPUs."""
    public = EXTRAS.keys() - {"all", "cuda12"}
    [everything] = EXTRAS["all"]
    readme = (ROOT / "README.md").read_text()

    assert public == NEEDS.keys()
    assert set(everything.removeprefix("jaxckpt[").removesuffix("]").split(",")) == public
    assert [one for one in (*public, "all", "cuda12") if f"`{one}`" not in readme] == []


def test_what_only_a_checkout_needs_is_in_groups():
    """The Makefile installs each group, and cuda12, the only extra that no group has."""
    stamps = re.findall(r"/\.installed-([\w-]+)", (ROOT / "Makefile").read_text())

    assert set(stamps) == {*GROUPS, "cuda12"}
    assert EXTRAS.keys() & GROUPS.keys() == set()
