"""The benchmark harness: every figure is a ratio to a yardstick of the same run.

`measuring` lets contestants take turns and computes rows, `contestants` and `peers` run in the
contestants' processes, `kinds` has the kinds of groups that rows are made of, `report` presents the
result. Data, daemons, memcpy and fio are those of `ffserve bench` (`ffserve/bench/`).
"""
