"""jaxckpt in the words of other libraries, and how it looks; nothing else imports these.

gin              `CheckpointManager`, `SavePolicy` and `KeepPolicy` as gin's configurables
ml_collections   `manager_config`: every field of them as a `ConfigDict`
metrics          TensorBoard, Prometheus, OpenTelemetry: how long saves and restores took
notebook         a checkpoint and a manager as HTML; what `_repr_html_` of them returns
plots            matplotlib: a metric over steps, times by phase, a sharding
report           a run as one HTML page
"""
