"""jaxckpt's options in the words of configuration libraries; nothing else imports them.

gin              `CheckpointManager`, `SavePolicy` and `KeepPolicy` as gin's configurables
ml_collections   `manager_config`: every field of them as a `ConfigDict`
"""
