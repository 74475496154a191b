"""Spells every file name and JSON key of a checkpoint, Orbax's and ours.

These modules turn bytes into frozen values and back; nothing here reads or writes a file. Decoders
raise `CorruptCheckpoint` for a malformed file and `UnsupportedFormat` for one of a newer release.

    names        file and directory names, and which of them are temporary or reserved
    jsontext     JSON with limits on size and depth
    tree         `_METADATA`: the tree, its leaves and its container types
    sharding     `_sharding`: how each jax.Array was laid out over devices
    arrays       zarr array metadata, and the bytes of one small chunk
    ocdbt        the database of the chunks, encoded and decoded
    step         `_CHECKPOINT_METADATA`, and our own record of a checkpoint's files
    run          the small files in the root of a run
    ledger       the starts of a run, one line each
    msgpack      the format of Orbax before 0.5.16 and of `flax.training.checkpoints`
    safetensors  safetensors headers and indexes
    typed_json   Python values as JSON, for data iterator states
"""
