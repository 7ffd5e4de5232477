"""A data set: the paths that it is given by (`paths.py`), and its index space (`layout.py`)."""
