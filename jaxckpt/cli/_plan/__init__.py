"""`jaxckpt plan`: what saves and restores would take on a cluster that is not there.

cluster   hosts and devices that only have numbers, and the mesh over them
tree      the leaves to plan for: of a checkpoint, or of a user's function
loads     the bytes and requests of each host, by the planner and the writer of a real save; pure
forecast  seconds, memory, the best interval and goodput from rates: arithmetic; pure
command   the options, and how a forecast is printed
"""
