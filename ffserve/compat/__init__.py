"""Readers and writers under the names of other packages: ffrecord and pyrecordio."""
