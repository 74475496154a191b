"""Compares the speed of jaxckpt with Orbax and plain file I/O: `python -m benchmarks --help`."""
