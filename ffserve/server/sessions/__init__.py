"""Sessions: the event loop, the clients' connections, and what each message of them causes."""
