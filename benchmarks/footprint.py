"""Measures the host memory of one save and one restore, with a separate process for each peer.

In one process the second peer would get the memory that malloc kept from the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_TIMEOUT_S = 600.0


def measure_footprints(
    peers: Sequence[str], *, workload: str, scale: float, root: Path
) -> dict[str, dict[str, float]]:
    """Returns peak bytes by peer: above the state, and for a restore also above its result."""
    found = {}
    for peer in peers:
        command = [sys.executable, "-m", "benchmarks.footprint", peer, workload, str(scale)]
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        }
        done = subprocess.run(
            [*command, str(root)],
            env=env,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        found[peer] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(peer_name: str, workload: str, scale: float, root: Path) -> dict[str, float]:
    import jax

    from benchmarks.peers import PEERS
    from benchmarks.timing import peak_rss
    from benchmarks.workloads import abstract, build, make_mesh, total_bytes

    tree = build(workload, scale=scale, mesh=make_mesh(4, 2))
    like, size = abstract(tree, make_mesh(4, 2)), total_bytes(tree)
    peer = PEERS[peer_name]()
    with tempfile.TemporaryDirectory(dir=root, prefix="bench-") as folder:
        path = Path(folder, "x")
        with peak_rss() as saving:
            peer.save(path, tree)()
        with peak_rss() as restoring:
            restored = jax.block_until_ready(peer.restore(path, like))
        del restored
    peer.close()
    return {"save": saving[0], "restore": restoring[0] - size, "state": size}


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]))))
