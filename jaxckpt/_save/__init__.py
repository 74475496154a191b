"""One save, from the caller's tree to the commit."""
