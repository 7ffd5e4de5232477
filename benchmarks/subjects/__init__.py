"""What the rows measure, by subject, where it is more than reading a record file."""
