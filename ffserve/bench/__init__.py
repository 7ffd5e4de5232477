"""The benchmark harness: every figure is a ratio to a yardstick of the same run.

`processes` starts daemons and other children, `harness` lets contestants take turns and computes
rows, `contestants` and `peers` run in the contestants' processes, `rows` lists what `ffserve bench`
measures, `report` presents the result. The repository's `benchmarks` adds rows for developers.
"""
