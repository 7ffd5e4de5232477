"""Run the code blocks of one document in order: `run_document.py BLOCKS.json` in a prepared folder.

All Python blocks of a document share one namespace, and all blocks share one folder. `ffserve
serve` in a shell block starts a daemon in the background, which is ended with the document.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

PRELUDE = """
set -euo pipefail
ffserve() {
    if [ "$1" = serve ]; then
        case "$*" in *--arena*) ;; *) set -- "$@" --arena 32MiB ;; esac
        command ffserve "$@" 2> daemon.log & echo $! > daemon.pid
        for _ in $(seq 600); do [ -S "$FFSERVE_SOCKET" ] && return; sleep 0.05; done
        cat daemon.log; return 1
    fi
    command ffserve "$@"
}
"""


def main() -> int:
    """Run the blocks; stop at the first that fails and say where it stands."""
    with open(sys.argv[1]) as file:
        blocks = json.load(file)
    namespace = {"__name__": "__main__"}
    try:
        for place, language, text in blocks:
            print(f"---- {place}", flush=True)
            if language == "python":
                exec(compile(text, place, "exec"), namespace)
            else:
                subprocess.run(["bash", "-c", PRELUDE + text], check=True)
    finally:
        _end_daemon()
    return 0


def _end_daemon() -> None:
    if not os.path.exists("daemon.pid"):
        return
    with open("daemon.pid") as file:
        pid = int(file.read())
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:  # the document stopped it
        return
    for _ in range(600):
        if not os.path.exists(os.environ["FFSERVE_SOCKET"]):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
