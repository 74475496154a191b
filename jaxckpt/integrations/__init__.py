"""Interfaces to other libraries, and drawings. No other module imports these.

gin              `CheckpointManager`, `SavePolicy` and `KeepPolicy` as gin configurables
ml_collections   `manager_config`: all their fields as a `ConfigDict`
metrics          TensorBoard, Prometheus, OpenTelemetry: durations of saves and restores
notebook         a checkpoint and a manager as HTML, for `_repr_html_`
plots            matplotlib: a metric over steps, times by phase, a sharding
report           a run as one HTML page
"""
