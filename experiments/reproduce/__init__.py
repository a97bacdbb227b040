"""Published results reproduced at a size for 2 CPU cores, one a file."""
