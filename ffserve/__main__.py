"""``python -m ffserve`` is ``ffserve``."""

from ffserve.cli import main

if __name__ == "__main__":
    main()
