"""What a kill right after a save returned may cost: the saves that were still to be written."""

from __future__ import annotations

import pytest

from tests.faults import queue_children as children


@pytest.mark.parametrize(("kind", "behind"), [("native", 2), ("v0", 1), ("v1", 1)])
def test_a_kill_when_a_save_has_returned(zygote, ram_path, trial, kind, behind):
    """The step before the previous one is committed; through the drop-in, the previous one is."""
    for last in range(1, 9):
        root = ram_path / str(last)
        with trial("47", f"{kind}, a kill after save({last})"):
            zygote.start(children.save_and_die, root, kind, last)
            assert zygote.answers() == ([], -9)

            steps = zygote.run(children.tell_committed, root)["steps"]

            newest = max(steps, default=0)
            assert steps == [*range(1, newest + 1)]
            assert newest >= last - behind
