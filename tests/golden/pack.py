"""Packs samples into an archive in this directory, deterministically.

    python tests/golden/pack.py <directory of samples> <archive>

A sample is a directory `<name>/` with `ckpt/`, `expected.npz` and `expected.json`. `index.json`
lists the samples of each archive; it is updated.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import tarfile
from pathlib import Path

HERE = Path(__file__).parent
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}]


def tar(samples: Path) -> bytes:
    """All files below, and empty directories, in order of name; no owners, no times, no modes.

    Hard links stay links.
    """
    buffer, names = io.BytesIO(), dict[int, str]()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as out:
        for path in sorted(samples.rglob("*")):
            info = tarfile.TarInfo(path.relative_to(samples).as_posix())
            if path.is_dir():
                if not any(path.iterdir()):
                    info.type, info.mode = tarfile.DIRTYPE, 0o755
                    out.addfile(info)
                continue
            if (first := names.setdefault(path.stat().st_ino, info.name)) != info.name:
                info.type, info.linkname = tarfile.LNKTYPE, first
                out.addfile(info)
                continue
            content = path.read_bytes()
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def pack(samples: Path, archive: str) -> None:
    """Writes the archive and its names in the index."""
    packed = lzma.compress(tar(samples), format=lzma.FORMAT_XZ, filters=FILTERS)
    (HERE / archive).write_bytes(packed)
    index = HERE / "index.json"
    archives = json.loads(index.read_text()) if index.exists() else {}
    archives[archive] = sorted(path.name for path in samples.iterdir())
    index.write_text(json.dumps(archives, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("samples", type=Path)
    parser.add_argument("archive")
    arguments = parser.parse_args()
    pack(arguments.samples, arguments.archive)
