"""Looks at checkpoints: open, verify, diff, statistics. Needs no devices.

open          `open`, from metadata alone
tree_text     leaves nested by name
verify        every checksum
value_stream  values in blocks, on the host, and their statistics
diff          two checkpoints compared
"""
