"""The benchmark of ``ffserve bench``: every figure is a ratio to a yardstick of the same run.

``records`` is the data, ``contestant`` the process that each contestant runs in, ``ours``,
``peers`` and ``yardsticks`` what runs there, ``cases`` which of them meet, ``runner`` lets them
take turns, ``report`` says what came out. The repository's ``benchmarks`` adds the cases that only
developers need, the comparison with recorded ratios, and the picture.
"""
