"""Sessions: the event loop, the clients' connections, and the handling of their messages."""
