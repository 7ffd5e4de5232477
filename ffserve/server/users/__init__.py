"""Users: who is at the other end of a connection, what they may read, what is charged to them."""
