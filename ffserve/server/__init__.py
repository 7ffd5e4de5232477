"""The daemon: sessions over a Unix socket, on top of the cache and the engines."""
