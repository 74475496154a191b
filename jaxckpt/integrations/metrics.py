"""Exports the durations of saves and restores: each function here returns an `on_commit`.

    CheckpointManager(root, on_commit=to_writer(SummaryWriter("logs")))

Durations of restores are in `manager.timings`; the same functions accept them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jaxckpt.errors import needing
from jaxckpt.types import Timing

OnCommit = Callable[[Timing], None]


def scalars(timing: Timing) -> dict[str, float]:
    """Returns one number per fact, named for dashboards.

    Example:
        >>> from jaxckpt.types import Timing
        >>> timing = Timing(
        ...     kind="save", path="/run/7", step=7, total_bytes=10**9, seconds=2.0,
        ...     phases={"snapshot": 0.1, "write": 1.9},
        ... )
        >>> scalars(timing)["checkpoint/save_gb_per_s"], len(scalars(timing))
        (0.5, 5)
    """
    name = f"checkpoint/{timing.kind}"
    return {
        f"{name}_seconds": timing.seconds,
        f"{name}_bytes": float(timing.total_bytes),
        f"{name}_gb_per_s": timing.gb_per_s,
        **{f"{name}_{phase}_seconds": seconds for phase, seconds in timing.phases.items()},
    }


def to_writer(writer: Any) -> OnCommit:  # the libraries share no type
    """Sends to a writer like TensorBoard's (`add_scalar`), clu's (`write_scalars`) or a wandb run.

    A wandb run gets the numbers with the row that the training logs next, and the step among them:
    it refuses rows of earlier steps, and a commit comes after its step.

    Raises:
        TypeError: the writer has none of these methods.
    """
    if not any(hasattr(writer, name) for name in ("write_scalars", "add_scalar", "log")):
        raise TypeError(
            f"{writer!r} has neither write_scalars (clu), nor add_scalar (TensorBoard), nor log "
            "(a wandb run)"
        )

    def send(timing: Timing) -> None:
        step, found = timing.step or 0, scalars(timing)
        if hasattr(writer, "write_scalars"):
            writer.write_scalars(step, found)
            return
        if not hasattr(writer, "add_scalar"):
            writer.log({**found, f"checkpoint/{timing.kind}_step": step}, commit=False)
            return
        for name, value in found.items():
            writer.add_scalar(name, value, step)

    return send


def to_prometheus(registry: Any = None) -> OnCommit:  # a prometheus_client.CollectorRegistry
    """Sends to prometheus_client, whose server the program starts (extra `prometheus`).

    Metrics, with the label `kind`: `jaxckpt_phase_seconds` (a histogram, with `phase`),
    `jaxckpt_bytes_total`, `jaxckpt_last_step`.
    """
    with needing("prometheus-client", "to_prometheus"):
        import prometheus_client as client

    seconds, size, step = _instruments(client.REGISTRY if registry is None else registry)

    def send(timing: Timing) -> None:
        for phase, took_s in timing.phases.items():
            seconds.labels(timing.kind, phase).observe(took_s)
        size.labels(timing.kind).inc(timing.total_bytes)
        if timing.step is not None:
            step.labels(timing.kind).set(timing.step)

    return send


@functools.cache  # a registry takes metrics of one name only once, also of a second manager
def _instruments(registry: Any) -> tuple[Any, Any, Any]:
    import prometheus_client as client

    about = {"registry": registry}
    seconds = client.Histogram(
        "jaxckpt_phase_seconds", "Of a save or restore, by phase", ["kind", "phase"], **about
    )
    size = client.Counter("jaxckpt_bytes", "Saved or restored by this process", ["kind"], **about)
    step = client.Gauge("jaxckpt_last_step", "Last saved or restored", ["kind"], **about)
    return seconds, size, step


def to_opentelemetry(meter: Any = None) -> OnCommit:  # an opentelemetry.metrics.Meter
    """Sends to OpenTelemetry (extra `opentelemetry`). If None, uses the global provider's meter.

    Instruments, with the attribute `kind`: `jaxckpt.phase.duration` (a histogram in s, with
    `phase`) and `jaxckpt.io` (a counter in bytes).
    """
    with needing("opentelemetry-api", "to_opentelemetry"):
        from opentelemetry import metrics

    meter = metrics.get_meter("jaxckpt") if meter is None else meter
    seconds = meter.create_histogram("jaxckpt.phase.duration", "s", "Of a save or restore")
    size = meter.create_counter("jaxckpt.io", "By", "Saved or restored by this process")

    def send(timing: Timing) -> None:
        for phase, took_s in timing.phases.items():
            seconds.record(took_s, {"kind": timing.kind, "phase": phase})
        size.add(timing.total_bytes, {"kind": timing.kind})

    return send
