"""Boxes, plans and trees, which never touch the disk; and copies from device to host.

pytree       a pytree as a flat list of leaves, and back; the allow-list of classes is here
plain        lists and dicts of leaves, by their key types alone
box          half-open boxes of indices; shards and chunks are boxes
plan         which process writes which chunk, and which chunk a shard needs
spread       how processes divide the reading, so that every value is read once
cast         which dtypes may become which, and which values may not
select       `only` and `skip`
text         sizes, times and tables in messages
check        arguments, and the errors about them
log          the log that all modules write to
collector    pauses Python's collector while many objects are made
notebook     where the surface registers how an object is drawn
transfer     device to host and back; nothing else touches device buffers
threads      threads for calls: of one save or restore, and daemons for calls that may hang
pinned       the copies of accelerators, which nobody waits for
fingerprint  whether a shard still has its bits
"""
