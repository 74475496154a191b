"""Follows how far a save or a restore is, and shows it.

meter        measures a save or restore and calls `on_progress`
bar          a progress bar
"""
