"""One checkpoint on disk: found, read, written, committed."""
