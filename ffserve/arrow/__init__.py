"""Record files as Arrow tables: columns of records, partitioned directories, output of many tasks.

The engines for tables (``ffserve.spark``, ``ffserve.ray``) are thin layers over it.
``table_reading`` divides files into tasks and reads those, ``table_writing`` writes the files of a
task; ``columns``, ``hive`` and ``staged_output`` are below them. Needs pyarrow.
"""
