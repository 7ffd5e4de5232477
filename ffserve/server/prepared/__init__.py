"""Prepared samples: who prepares which one, and how it gets into the memory that all share."""
