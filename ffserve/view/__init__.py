"""A read-only view of record files as a file system (FUSE), for programs that want files.

The door is `supervisor.View`; ``ffserve mount`` is its command.
"""
