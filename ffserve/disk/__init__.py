"""Local files: opening them, writing them whole, index files, the tables of an open file."""
