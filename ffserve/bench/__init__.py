"""The measurements of `ffserve bench`: this machine's memory and disk, and ffserve beside them.

`samples` has the data, `ceilings` the rates of memory and disk, `child_processes` the daemons,
`machine` the facts on which figures depend, and `rows` what is compared. The repository's
`benchmarks` builds on these: it compares ffserve with other packages.
"""
