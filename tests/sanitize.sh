#!/usr/bin/env bash
# Build the C core with a sanitizer, outside of any installation, and run its tests over it.
#
#   bash tests/sanitize.sh address [pytest options]     AddressSanitizer and UBSan
#   bash tests/sanitize.sh thread  [pytest options]     ThreadSanitizer
#
# Leaks are not checked, because the interpreter does not free all of its memory. ThreadSanitizer
# cannot follow threads started in a forked child, so it skips tests that do that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kind=${1:?address or thread}
shift
tests=(tests/engine/test_engine.py tests/engine/test_direct_reply.py tests/engine/test_shm.py tests/engine/test_codec.py tests/formats/test_tfrecord_format.py)
tests+=(tests/engine/test_arrays.py tests/cache/test_slots.py tests/cache/test_next_use.py tests/formats/test_recordio_scan.py tests/reads/test_chunks.py tests/engine/test_fuse.py)
tests+=(tests/formats/test_tfrecord_compressed.py tests/unit/test_columns.py)
folder=build/$kind
case $kind in
    address)
        flags=address,undefined
        preload="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
        export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
        export PYTHONMALLOC=malloc
        left_out=()
        ;;
    thread)
        flags=thread
        preload=$(gcc -print-file-name=libtsan.so)
        export TSAN_OPTIONS=halt_on_error=1:allocator_may_return_null=1:exitcode=66:report_thread_leaks=0
        left_out=(-k "not fork and not taken_for_another")
        ;;
    *)
        echo "sanitize: address or thread, not $kind" >&2
        exit 2
        ;;
esac
CC=gcc .venv/bin/python -m ffserve.engine.build_core --sanitize "$flags" -o "$folder"
# From that folder, since a child that runs "python -c" has the working directory first in its path;
# and not "python -m pytest", which has it too.
tests=("${tests[@]/#/$PWD/}")
cd "$folder"
PYTHONPATH=$PWD LD_PRELOAD=$preload exec ../../.venv/bin/pytest -q -p no:cacheprovider \
    -c ../../pyproject.toml "${left_out[@]}" "${tests[@]}" "$@"
