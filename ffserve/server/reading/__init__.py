"""Reading: which request gets the next turn, and how its samples come from the disk into memory."""
