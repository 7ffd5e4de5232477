"""Commands about the daemon: run it, install it, watch it, change it, stop it, find its faults."""
