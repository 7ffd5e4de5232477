"""Life of the daemon: start, memory that outlives it, hand-over to a successor, its log."""
