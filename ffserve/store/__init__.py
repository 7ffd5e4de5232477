"""The local store of remote files: objects of any fsspec URL, block by block, on a local disk.

`urls.py` knows the names, `origin.py` the remote side (fsspec), `blocks.py` one object on disk,
`directory.py` all objects of a store and their limit, `fetching.py` brings blocks from one to the
other. `docs/decisions/store.md` has the reasons. fsspec is imported when the first URL is opened.
"""
