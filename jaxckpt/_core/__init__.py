"""Boxes, plans and trees, which never touch the disk; and copies from device to host."""
