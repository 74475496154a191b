"""How fast jaxckpt is, next to Orbax and to plain file I/O: `python -m benchmarks --help`."""
