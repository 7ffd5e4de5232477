"""Remote files: objects of any fsspec URL, block by block in a store on a local disk, or by ranges.

`urls.py` knows the names, `schemes/` what is special about each protocol, `origin.py` lists,
identifies and reads objects at their origin, `blocks.py` keeps one object on disk, `directory.py`
all objects of a store within its limit, and `fetching.py` brings blocks from one to the other.
`ranges.py` reads without a store. `docs/decisions/store.md` has the reasons. fsspec is imported
when the first URL is opened.
"""
