"""Files: what the daemon has open, how it was opened and checked, and whether it is still sound."""
