"""What is worked out without touching the disk: boxes, plans, trees; and device to host."""
