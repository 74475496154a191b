"""One restore, from what is wanted to the tree."""
