"""Remote files: objects of any URL, block by block in a store on a local disk, or by ranges.

`urls.py` knows the names, `schemes/` what is special about each protocol, `origin.py` lists,
identifies and reads objects at their origin, for most of them by HTTP (`web.py`, `web_files.py`),
or by a cache that nodes share (`cache_network.py`).
`blocks.py` keeps one object on disk, `directory.py` all objects of a store within its limit, and
`fetching.py` brings blocks from one to the other. `ranges.py` reads without a store. The reasons
are in `docs/decisions/store.md` and `docs/decisions/origins.md`.
"""
