"""Samples of the daemon: the connection to it, its mapped memory, prepared samples."""
