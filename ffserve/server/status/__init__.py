"""Status: the daemon's reports on itself, to commands, to Prometheus and to browsers."""
