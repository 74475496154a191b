"""Follows how far a save or a restore is, and shows it."""
