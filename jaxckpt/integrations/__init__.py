"""Interfaces to other libraries, and drawings. No other module imports these.

gin             `CheckpointManager`, `SavePolicy` and `KeepPolicy` as gin configurables
ml_collections  `manager_config`: all their fields as a `ConfigDict`
metrics         TensorBoard, Prometheus, OpenTelemetry: durations of saves and restores
notices         cloud providers' notices that a spot instance ends
notebook        a checkpoint and a manager as HTML, for `_repr_html_`
plots           matplotlib: a metric over steps, times by phase, a sharding
report          a run as one HTML page
_steps          the steps of a run as HTML, for both
_html           text, styles and lists of facts as HTML
_svg            small drawings
_palette        one colour per meaning
"""
