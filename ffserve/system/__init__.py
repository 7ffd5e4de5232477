"""Machine and processes: memory limits, shared memory, the socket's place, worker processes."""
