"""Interfaces to other libraries and platforms. No other module imports these.

gin              `CheckpointManager` and the classes of its options as gin configurables
ml_collections   `manager_config`: all their fields as a `ConfigDict`
metrics          TensorBoard, Prometheus, OpenTelemetry: durations of saves and restores
notices          what cloud providers say of the end of a spot instance
"""
