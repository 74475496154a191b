"""One checkpoint on disk: found, read, written, committed.

transaction  begin, commit or abort; its docstring is the commit, line by line
commit       which of the two ways to commit and to delete a checkpoint has
by_rename    the first way, and recovery after a crash
by_marker    the second, in stores
attempt      what both share, and the error of a failed save
removal      one item deleted; what lies in a checkpoint without being part of it
writer       one process's share of the arrays
data_files   its files, written in one pass; TensorStore compresses
checksums    the checksums of all chunks, in one file
pace         a limit to the bytes written in a second
places       the tables of what each process wrote, united into the one database
read_back    files that steps share, read back and mended
find         what a path means
item         the items of what was found, opened
found        a checkpoint that was found: its listings, its record, its items
native       trees that jaxckpt wrote
foreign      all others
reader       leaves within a budget, or as a stream
contents     the files of a checkpoint, checked while they are copied
chunks       our chunks, read straight into the memory where they stay
regions      everything else, by TensorStore
tensors      safetensors files
damage       which leaf and file an error is about
"""
