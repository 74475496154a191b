"""The version, which only this module names."""

__version__ = "0.1.0"
