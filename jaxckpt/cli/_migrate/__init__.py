"""`jaxckpt migrate`: finds files that use Orbax, and changes their imports to the drop-in.

source    what a Python file uses of Orbax, and its imports of the drop-in; pure
command   finds the files, asks the drop-in for each name, writes and prints
"""
