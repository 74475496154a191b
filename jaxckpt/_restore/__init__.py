"""One restore, from what is wanted to the tree.

restore      `restore`: find, match, read, build
match        what is wanted against what was saved: every misfit at once
mismatch     the words of that error
placement    which sharding each leaf gets here
once         several processes read each value once
turn         which thread may carry values
carry        how XLA carries it to the others
"""
