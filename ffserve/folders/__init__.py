"""Packed folders: many small files in one record file, with their names."""
