#!/usr/bin/env bash
# Coverage-guided fuzzing of the C core (libFuzzer, AddressSanitizer, UBSan) and of the daemon's
# decoders, its greeting and the formats (atheris): two targets at a time, each for SECONDS.
#
#   bash tests/fuzzing/run.sh [SECONDS [TARGET...]]     targets: core frames daemon files index
#
# It begins with tests/fuzzing/corpus, and adds to it what reaches new code. An input that fails is
# left in build/fuzzing, and its name and trace are printed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
seconds=${1:-60}
targets=("${@:2}")
[ ${#targets[@]} -gt 0 ] || targets=(core daemon frames files index)
folder=build/fuzzing
corpus=tests/fuzzing/corpus
mkdir -p "$folder"

command -v clang >/dev/null || {
    sudo=; [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq -y install clang >/dev/null
}
.venv/bin/python -c 'import atheris' 2>/dev/null || .venv/bin/pip -q install 'atheris>=3'
clang -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Iffserve/engine \
    -DFFS_HAVE_ZLIB -DFFS_HAVE_ISAL tests/fuzzing/core.c \
    ffserve/engine/{codec,shm,checksum,inflate}.c -lz -lisal -o "$folder/core"

run() { # run TARGET FOLDER FLAGS...
    if [ "$1" = core ]; then
        "$folder/core" "${@:2}"
    else
        PYTHONPATH=$PWD .venv/bin/python tests/fuzzing/targets.py "$@"
    fi
}

fuzz() { # fuzz TARGET
    local found=$folder/$1-found log=$folder/$1.log
    local flags=(-max_len=16384 -rss_limit_mb=4096 -timeout=60 -artifact_prefix="$folder/$1-")
    rm -rf "$found"
    mkdir -p "$found" "$corpus/$1"
    if ! run "$1" "$found" "$corpus/$1" "${flags[@]}" -max_total_time="$seconds" >"$log" 2>&1 ||
        ! run "$1" "$corpus/$1" "$found" "${flags[@]}" -merge=1 >>"$log" 2>&1; then
        tail -n 60 "$log"
        echo "fuzzing: $1 FAILED (see $log)"
        return 1
    fi
    echo "fuzzing: $1 passed: $(grep -oE 'Done [0-9]+ runs in [0-9]+ second' "$log" | tail -1)s"
}

status=0
for ((k = 0; k < ${#targets[@]}; k += 2)); do
    pids=()
    for target in "${targets[@]:k:2}"; do fuzz "$target" & pids+=($!); done
    for pid in "${pids[@]}"; do wait "$pid" || status=1; done
done
exit $status
