"""What is wrong with this machine, this daemon, these files: `ffserve doctor`.

`probe.py` asks file systems, each in a process of its own, since they may never answer. `case.py`
gathers what is known of the machine and of the daemon, `checks.py` judges it.
"""
