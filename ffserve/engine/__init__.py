"""The engine: a C core, and one Python face per subject.

``io``: reading files. ``shm``: the directory and the arena in shared memory. ``codec``: checksums,
and scanners of frames and chunks. ``slots``: the cache's tables.
"""
