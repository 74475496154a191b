"""Every file name and JSON key of a checkpoint, Orbax's and ours, is spelled in this package.

Nothing here reads or writes a file: these modules turn bytes into frozen values and back.

    names       file and directory names; what is temporary, what is committed
    jsontext    JSON with limits on size and depth
    tree        `_METADATA`: the tree and its leaves, and the types of its containers
    sharding    `_sharding`: how each jax.Array was laid out over devices
    arrays      zarr array metadata, and the bytes of one small chunk
    step        `_CHECKPOINT_METADATA`, and our own record of a checkpoint's files
    msgpack     what Orbax before 0.5.16 and `flax.training.checkpoints` wrote
"""
