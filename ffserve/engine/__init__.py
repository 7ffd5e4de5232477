"""Reading extents of files, checksums, and copying out of shared memory (a C core, ``ring``)."""
