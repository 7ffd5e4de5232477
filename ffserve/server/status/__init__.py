"""Status: what the daemon says about itself, to commands, to Prometheus and to browsers."""
