"""An InfiniBand fabric in user space, between processes on one GPU: see README.md."""
