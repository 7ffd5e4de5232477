"""Files: which files the daemon has open, for whom, and whether they are sound."""
