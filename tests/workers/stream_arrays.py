"""Sends one large array through an import, a copy and an export; tells what memory that took."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jaxckpt

ARRAY_BYTES = 512 << 20


def main(folder: Path) -> None:
    header = {"w": {"dtype": "F32", "shape": [128, 1 << 20], "data_offsets": [0, ARRAY_BYTES]}}
    text = json.dumps(header).encode()
    with (folder / "in.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + ARRAY_BYTES)  # zeros, which take no room

    there = folder / "a"
    jaxckpt.import_safetensors(folder / "in.safetensors", there)
    jaxckpt.convert(there, there, overwrite=True)
    good = jaxckpt.verify(there).ok
    jaxckpt.convert(there, there, ocdbt=False, overwrite=True)
    jaxckpt.export_safetensors(there, folder / "out.safetensors")

    # Not what `getrusage` tells, which is what the parent had, if that was more.
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    told = {
        "array_bytes": ARRAY_BYTES,
        "peak_bytes": int(peak.split()[1]) << 10,
        "jax": "jax" in sys.modules,
        "good": good and (folder / "out.safetensors").stat().st_size > ARRAY_BYTES,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
