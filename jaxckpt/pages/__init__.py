"""Runs and checkpoints drawn for people. The drawings need no data of the steps but their metadata.

overview   a run at a glance
goodput    how much of a run's time has trained, and what would raise that
report     a run as one HTML page
notebook   a checkpoint and a manager as HTML, for `_repr_html_`
plots      matplotlib: a metric over steps, times by phase, a sharding
_goodput   the goodput of a run and of a plan
_steps     the steps of a run as a table and marks
_html      text, styles and tables
_svg       charts and shardings
_palette   one colour per meaning
"""
