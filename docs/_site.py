"""Adds pages from outside this directory to the site; named under `hooks` in mkdocs.yml.

The README and similar files become pages as they are, so that each is written only once. So do the
notebooks, with their committed outputs; no notebook is run. All examples are on one page.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Maps each file of the repository to its page.
PAGES = {
    "README.md": "index.md",
    "RELIABILITY.md": "reliability.md",
    "benchmarks/README.md": "benchmarks.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
}
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml"}  # of the examples
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # terminal escape codes


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages and their pictures."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        _add(files, config, page, _relink(text, (ROOT / source).parent, files, config))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = f"notebooks/{notebook.stem}.md"
        parts: list[str] = []
        for i, cell in enumerate(json.loads(notebook.read_text("utf-8"))["cells"]):
            if cell["cell_type"] == "markdown":
                text = "".join(cell["source"])
                parts.append(_relink(text, notebook.parent, files, config, depth=1))
            else:
                parts += _code(cell, page.replace(".md", f"-{i}"), files, config)
        _add(files, config, page, "\n\n".join(parts))
    _add(files, config, "examples.md", "\n\n".join(_examples()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points the links of a page in this directory to files outside it at their pages."""
    source = Path(page.file.abs_src_path or "")
    if not source.is_relative_to(ROOT / "docs"):
        return markdown  # made above
    depth = page.file.src_uri.count("/")
    return _relink(markdown, source.parent, files, config, depth)


def _examples() -> Iterator[str]:
    """Yields the page of the examples in pieces; each file has a heading to link to."""
    yield "# Examples\n\nComplete programs and job files, the shortest first."
    for path in sorted((ROOT / "examples").iterdir(), key=lambda path: path.stat().st_size):
        if language := LANGUAGES.get(path.suffix):
            yield f"## {path.name}\n\n```{language}\n{path.read_text('utf-8')}```"


def _add(files: Files, config: MkDocsConfig, name: str, content: str | bytes) -> None:
    files.append(File.generated(config, name, content=content))


def _relink(text: str, folder: Path, files: Files, config: MkDocsConfig, depth: int = 0) -> str:
    """Points links to files of the repository at their pages.

    If a file has no page, its link becomes plain text.

    Args:
        folder: The folder that links are relative to.
        depth: How many folders the page is below the top of the site.
    """

    def relinked(found: re.Match[str]) -> str:
        image, words, target, anchor = found.groups()
        if re.match(r"[a-z]+:", target) or not (folder / target).exists():
            return found[0]  # a link to another site, or a mistake, which mkdocs reports
        path = (folder / target).resolve().relative_to(ROOT).as_posix()
        if image and "</text>" in (svg := (ROOT / path).read_text("utf-8", "replace")):
            return f'<div class="drawing">{svg.strip()}</div>'  # a reader can select its text
        if image:
            if files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
            page = path
        elif path.startswith("docs/"):
            page = path.removeprefix("docs/")
        elif path.startswith("notebooks/") and path.endswith(".ipynb"):
            page = path.removesuffix("ipynb") + "md"
        elif path.startswith("examples/"):
            page, anchor = "examples.md", f"#{slugify(Path(path).name, '-')}"
        elif path in PAGES:
            page = PAGES[path]
        else:
            return words
        return f"{image}[{words}]({'../' * depth}{page}{anchor or ''})"

    return LINK.sub(relinked, text)


def _code(cell: dict[str, Any], name: str, files: Files, config: MkDocsConfig) -> Iterator[str]:
    """Yields a code cell and its outputs as Markdown."""
    yield f"```python\n{''.join(cell['source'])}\n```"
    for i, output in enumerate(cell["outputs"]):
        data = output.get("data", {})
        if "image/png" in data:
            picture = f"{name}-{i}.png"
            _add(files, config, picture, base64.b64decode(data["image/png"]))
            yield f"![What the cell above draws]({picture.rpartition('/')[2]})"
        elif "text/html" in data:
            # In Markdown, an empty line ends a block of HTML.
            html = re.sub(r"\n\s*\n", "\n", "".join(data["text/html"]))
            # A shadow root, so that the styles of this site do not apply inside it.
            html = f'<template shadowrootmode="open">{html}</template>'
            yield f'<div class="output"><div>{html}</div></div>'
        else:
            words = "".join(output.get("text") or data.get("text/plain") or [])
            yield f"```{{ .text .output }}\n{COLOURS.sub('', words).rstrip()}\n```"
