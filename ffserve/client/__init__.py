"""What runs in the training processes: the reader, the writers, the drop-in."""
