"""A read-only view of record files as a file system (FUSE), for programs that want files.

Other packages use `supervisor.View`; its command is ``ffserve mount``.
"""
