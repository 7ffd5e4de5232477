"""Reading: gives requests their turns, and brings samples from the disk into memory."""
