"""The recipes in `examples/` handle the real signals that Slurm and Kubernetes send."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import jaxckpt
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "preemptible.py"
SLURM = ROOT / "examples" / "slurm.sh"
KUBERNETES = ROOT / "examples" / "kubernetes.yaml"
STEPS = 1200
STEPS_OF_TWO = 300  # each waits for the other; a notice takes both some tenths of a second
SAVE_EVERY = 500

# Starts a process for each task, hands signals on, and ends with the worst status, as srun does.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i "$@" & tasks+=($!); done
trap 'again=1; kill -USR1 "${tasks[@]}"' USR1
worst=0
for task in "${tasks[@]}"; do
    again=1
    while ((again)); do again=0; wait "$task"; code=$?; done
    ((code > worst)) && worst=$code
done
exit $worst
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo 127.0.0.1; else echo "$@" >> "$REQUEUED"; fi
"""


def options(steps=STEPS):
    return ["--steps", str(steps), "--save-every", str(SAVE_EVERY)]


class Turn:
    """One life of a training: its process, and the losses that it has printed by step."""

    def __init__(self, command, env):
        self.losses: dict[int, str] = {}
        self.output = ""
        # A group of its own, so that nothing outlives the test.
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pipesize=4096,  # of about 100 steps: what is not read holds the training up
            cwd=ROOT,
            env=env,
            start_new_session=True,
        )

    def read_to(self, step=None):
        """Reads on until it has printed this step, or to its end."""
        for line in self.process.stdout:
            self.output += line
            if found := re.fullmatch(r"step (\d+): loss (.*)\n", line):
                self.losses[int(found[1])] = found[2]
                if int(found[1]) == step:
                    return

    def end(self):
        """Reads the rest; returns the exit status."""
        self.read_to()
        return self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture
def env(tmp_path):
    """With stubs of Slurm's commands, and the Python of the tests."""
    path = tmp_path / "bin"
    path.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (path / name).write_text(text, encoding="ascii")
        (path / name).chmod(0o755)
    (path / "python").symlink_to(sys.executable)
    return {
        **{k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")},
        "PATH": f"{path}:{os.environ['PATH']}",
        # Also what a link to the interpreter of a virtual environment no longer finds.
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "REQUEUED": str(tmp_path / "requeued"),
    }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Returns the losses of an uninterrupted training."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    with Turn([sys.executable, SCRIPT, "--run", run, *options()], env) as turn:
        assert turn.end() == 0, turn.output
    assert sorted(turn.losses) == list(range(1, STEPS + 1))
    return turn.losses


def check_that_the_second_goes_on(first, second, wanted):
    """From the very next step, with the same losses to the end."""
    stopped_at = max(first.losses)
    assert 5 <= stopped_at < max(wanted)
    assert min(second.losses) == stopped_at + 1
    assert {**first.losses, **second.losses} == wanted


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_a_stopped_training_goes_on_with_the_same_losses(tmp_path, env, uninterrupted, number):
    """The step that it was at is saved; the exit status says that there is more to do."""
    command = [
        sys.executable,
        SCRIPT,
        "--run",
        tmp_path / "run",
        "--requeue-code",
        "77",
        *options(),
    ]
    with Turn(command, env) as first:
        first.read_to(5)
        first.process.send_signal(number)
        assert first.end() == 77, first.output

    with jaxckpt.CheckpointManager(tmp_path / "run", mode="r") as manager:
        assert manager.all_steps() == [max(first.losses)]
    with Turn(command, env) as second:
        assert second.end() == 0, second.output
    check_that_the_second_goes_on(first, second, uninterrupted)


def slurm_job(env, run, tasks, steps=STEPS, *, arguments=None):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = SLURM.read_text(encoding="utf-8").replace(":12345", f":{port}")
    env = {
        **env,
        "RUN": str(run),
        "SLURM_NTASKS": str(tasks),
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "here",
    }
    return Turn(["bash", "-c", script, "slurm.sh", *(arguments or options(steps))], env)


def check_requeue(tmp_path, env, tasks, steps, wanted):
    requeued, run = tmp_path / "requeued", tmp_path / "run"
    with slurm_job(env, run, tasks, steps) as first:
        first.read_to(5)
        os.kill(first.process.pid, signal.SIGUSR1)  # to the script alone: `B:`
        assert first.end() == 85, first.output

    assert requeued.read_text(encoding="ascii") == "requeue 42\n"
    with slurm_job(env, run, tasks, steps) as second:
        assert second.end() == 0, second.output
    assert requeued.read_text(encoding="ascii") == "requeue 42\n"
    check_that_the_second_goes_on(first, second, wanted)


def test_slurm_requeues_what_the_time_limit_stopped(tmp_path, env, uninterrupted):
    """The script gets SIGUSR1, hands it on, and asks for another turn; once."""
    check_requeue(tmp_path, env, 1, STEPS, uninterrupted)


@pytest.mark.multihost
def test_slurm_requeues_a_job_of_two_tasks(tmp_path, env):
    """Both get the signal, save one step, and ask for one more turn."""
    with slurm_job(env, tmp_path / "whole", 2, STEPS_OF_TWO) as whole:
        assert whole.end() == 0, whole.output

    check_requeue(tmp_path, env, 2, STEPS_OF_TWO, whole.losses)


@pytest.mark.multihost
def test_slurm_goes_on_after_a_kill(tmp_path, env):
    """With a local disk for each of two tasks: at a step newer than all in the run's directory."""
    env = {**env, "LOCAL": f"{tmp_path}/node"}
    steps = [*options(STEPS_OF_TWO), "--local-every", "20", "--save-every", str(STEPS_OF_TWO)]
    with slurm_job(env, tmp_path / "run", 2, arguments=steps) as first:
        first.read_to(STEPS_OF_TWO // 2)
        wait_for_step_after(STEPS_OF_TWO // 4, env["LOCAL"])
        os.killpg(first.process.pid, signal.SIGKILL)
        first.end()
    assert jaxckpt.CheckpointManager(tmp_path / "run", mode="r").all_steps() == []

    with slurm_job(env, tmp_path / "run", 2, arguments=steps) as second:
        assert second.end() == 0, second.output
    assert min(second.losses) > STEPS_OF_TWO // 4 + 1
    assert {**first.losses, **second.losses}.keys() == {*range(1, STEPS_OF_TWO + 1)}
    together = first.losses.keys() & second.losses.keys()
    assert all(first.losses[step] == second.losses[step] for step in together)


def test_slurm_does_not_requeue_what_failed(tmp_path, env):
    """A crash ends the job with its own status."""
    with slurm_job(env, "/dev/null/run", 1) as turn:
        assert turn.end() == 1, turn.output

    assert not (tmp_path / "requeued").exists()


def test_slurm_does_not_requeue_what_was_cancelled(tmp_path, env):
    """`scancel` sends SIGTERM to the tasks: they save, and that was it."""
    with slurm_job(env, tmp_path / "run", 1) as turn:
        turn.read_to(5)
        os.kill(child_of(child_of(turn.process.pid)), signal.SIGTERM)
        assert turn.end() == 85, turn.output

    assert not (tmp_path / "requeued").exists()
    with jaxckpt.CheckpointManager(tmp_path / "run", mode="r") as manager:
        assert manager.all_steps() == [max(turn.losses)]


def child_of(pid):
    """The only child of a process."""
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return int(child)


class Kubelet:
    """Runs the pods of the Job in the manifest, one after the other."""

    def __init__(self, run, env):
        yaml = pytest.importorskip("yaml")
        self.spec = yaml.safe_load(KUBERNETES.read_text(encoding="utf-8"))["spec"]
        pod = self.spec["template"]["spec"]
        assert pod["restartPolicy"] == "Never"
        self.grace_s = pod["terminationGracePeriodSeconds"]
        [container] = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {"/runs": "runs", "/scratch": "scratch"}
        assert {*mounts.values()} == {volume["name"] for volume in pod["volumes"]}
        self.name = container["name"]
        self.local = f"{run} local"
        self.command = [
            word.replace("/runs/a", str(run)).replace("/scratch/a", self.local)
            for word in container["command"]
        ]
        self.env = env
        # Process 1 of a namespace of its own, as in a container, where that is allowed.
        inside = ["unshare", "--pid", "--fork", "--kill-child"]
        tried = shutil.which("unshare") and subprocess.run([*inside, "true"], check=False)
        self.inside = inside if tried and tried.returncode == 0 else []

    def start(self):
        return Turn([*self.inside, *self.command, *options()], self.env)

    def process_1(self, pod):
        return child_of(pod.process.pid) if self.inside else pod.process.pid

    def evict(self, pod):
        """SIGTERM; SIGKILL if it is still there when its time is up. Returns its status."""
        os.kill(self.process_1(pod), signal.SIGTERM)
        pod.read_to()
        try:
            return pod.process.wait(self.grace_s)
        except subprocess.TimeoutExpired:
            pod.process.kill()
            return pod.process.wait()

    def ignores(self, status):
        """Whether this ending is none of the failures that the Job counts."""
        codes = [rule["onExitCodes"] for rule in self.spec["podFailurePolicy"]["rules"][:1]]
        return any(
            code["containerName"] == self.name
            and code["operator"] == "In"
            and status in code["values"]
            for code in codes
        )


def test_kubernetes_goes_on_after_an_eviction(tmp_path, env, uninterrupted):
    """The pod saves and ends in its grace period; the next one ends the Job."""
    kubelet = Kubelet(tmp_path / "run", env)
    with kubelet.start() as first:
        first.read_to(5)
        status = kubelet.evict(first)

    assert kubelet.ignores(status), first.output
    with kubelet.start() as second:
        assert second.end() == 0, second.output
    check_that_the_second_goes_on(first, second, uninterrupted)


def wait_for_step_after(step, run):
    with jaxckpt.CheckpointManager(run, mode="r") as manager:
        wait_until(lambda: any(newer > step for newer in manager.all_steps()))


@pytest.mark.parametrize("node", ["same", "other"])
def test_kubernetes_goes_on_after_a_kill(tmp_path, env, uninterrupted, node):
    """Without notice: the next pod resumes from the newest complete step, which its node may have.

    On the same node that is at most some steps ago; the last one may not have been committed yet.
    """
    kubelet = Kubelet(tmp_path / "run", env)
    with kubelet.start() as first:
        first.read_to(STEPS // 2)
        wait_for_step_after(SAVE_EVERY, kubelet.local)  # a disk may be slower than the training
        os.kill(kubelet.process_1(first), signal.SIGKILL)
        assert not kubelet.ignores(first.end())
    if node == "other":
        shutil.rmtree(kubelet.local)

    with kubelet.start() as second:
        assert second.end() == 0, second.output
    if node == "other":
        assert min(second.losses) in (1, SAVE_EVERY + 1)
    else:
        assert min(second.losses) > SAVE_EVERY + 1
        assert min(second.losses) % 10 == 1
    assert {**first.losses, **second.losses} == uninterrupted
