"""The checks of `ffserve doctor`: faults of this machine, of the daemon, and of data.

`probe.py` asks file systems, each in a process of its own, since they may never answer. `case.py`
gathers what is known of the machine and of the daemon, `checks.py` judges it.
"""
