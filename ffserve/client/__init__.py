"""The client: sources of samples, and the connections of a training process to the daemon."""
