"""Looks at checkpoints: open, verify, diff, statistics. Needs no devices."""
