"""A run: when to save, what to keep, who may write, where to go on.

Rules, which are pure:

    schedule     when to save
    retention    what to keep, and why
    copies       which copy to read and what to upload, if a run has two tiers

One directory of steps:

    listing      the root, listed: which entries are steps, how they are named, what is beside
    index        which steps exist, for managers and commands alike
    facts        what is stored with a step, and with the run
    root         the directory as a manager opens it, and what goes after a commit
    identity     the id of a run, and how it got to its steps
    owner        which job may write
    leftovers    what earlier jobs left unfinished
    opening      which manager of a process may write
    ledger       the starts of the run, and what became of each
    deletion     what goes, and what is set aside
    one_step     a pin, and the deletion of one item
    leases       how readers keep a step
    items        the items of a step beside its state

A manager:

    manager      `CheckpointManager`, which is these put together
    config       its arguments: checked, from dicts, compared between processes
    saver        the saving half of a manager
    taking       the copies of what a call of save is given
    due          which calls save, alike in all processes
    position     which step may come next
    incremental  what a step shares with earlier steps
    comparisons  when replicas are compared, and what that found
    preemption   being told to stop
    roots        all directories of a run opened, and what all disks together have
    by_hand      pins, deletions and scrubs by hand, in all roots and on the disks of hosts
    candidates   which copies of steps a restore tries, and in which order
    readings     what is read of a step: its state, or its items
    resume       the newest complete step, or the step before it

A local tier in front of the directory:

    tiers        where a step is saved, and goes then
    local        which steps on a disk are of this run
    shares       what each process saved on the disk of its own host
    peers        where else there may be steps of this run
    disks        what the disk of a process has of a step, for other processes
    coverage     a step restored from the disks of all hosts together
    scratch      the copies of a step that a process makes for that
    upload       a step copied to another root
    uploader     which steps a manager uploads, in one thread, and which is next
    sender       sends one step, or the part of it on this disk
    reach        a root that may not answer

Calls on a whole run:

    scrub        a step verified, and damaged steps set aside
    heal         a copy mended from another
    fork         a run that begins with a step of another
"""
