#!/usr/bin/env bash
# Coverage-guided fuzzing of the C core (libFuzzer, AddressSanitizer, UBSan) and of the daemon's
# decoders, its greeting and the formats (atheris): two targets at a time, each for SECONDS.
#
#   bash tests/fuzzing/run.sh [SECONDS [TARGET...]]     targets: core frames daemon files index
#
# It begins with tests/fuzzing/corpus, and adds to it what reaches new code, the smallest inputs
# first, up to 1 MiB for each target. An input that fails is left in build/fuzzing, and its name and
# trace are printed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
seconds=${1:-60}
targets=("${@:2}")
[ ${#targets[@]} -gt 0 ] || targets=(core daemon frames files index)
folder=build/fuzzing
corpus=tests/fuzzing/corpus
most_size=$((1 << 20))
mkdir -p "$folder"

command -v clang >/dev/null || {
    sudo=; [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq -y install clang >/dev/null
}
.venv/bin/python -c 'import atheris' 2>/dev/null || .venv/bin/pip -q install 'atheris>=3'
clang -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
    -Iffserve/engine/{records,memory,reading} \
    -DFFS_HAVE_ZLIB -DFFS_HAVE_ISAL tests/fuzzing/core.c \
    ffserve/engine/records/{codec,example,checksum,inflate,tar}.c ffserve/engine/memory/shm.c \
    -lz -lisal -o "$folder/core"

run() { # run TARGET FOLDER FLAGS...
    if [ "$1" = core ]; then
        "$folder/core" "${@:2}"
    else
        PYTHONPATH=$PWD .venv/bin/python tests/fuzzing/targets.py "$@"
    fi
}

keep() { # keep TARGET FOUND FLAGS...: copy to the corpus what reaches code that nothing in it reaches
    # -merge=1 starts processes by the name of the program, and Python targets have none. So this is
    # such a process: to each file of the list it notes what that adds to those before it.
    local list=$folder/$1.list known new size number name
    mapfile -t known < <(find "$corpus/$1" -type f | LC_ALL=C sort)
    mapfile -t new < <(find "$2" -type f -printf '%s %p\n' | LC_ALL=C sort -n | cut -d' ' -f2-)
    printf '%s\n' $((${#known[@]} + ${#new[@]})) ${#known[@]} "${known[@]}" "${new[@]}" >"$list"
    run "$1" "$2" "${@:3}" -merge_inner=1 -merge_control_file="$list" || return 1
    size=$(find "$corpus/$1" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum + 0 }')
    for number in $(awk -v known=${#known[@]} '$1 == "FT" && NF > 2 && $2 >= known { print $2 }' "$list"); do
        name=${new[number - ${#known[@]}]}
        size=$((size + $(stat -c %s "$name")))
        [ "$size" -le "$most_size" ] || return 0
        cp "$name" "$corpus/$1" || return 1
    done
}

fuzz() { # fuzz TARGET
    local found=$folder/$1-found log=$folder/$1.log before
    local flags=(-max_len=16384 -rss_limit_mb=4096 -timeout=60 -artifact_prefix="$folder/$1-")
    rm -rf "$found"
    mkdir -p "$found" "$corpus/$1"
    before=$(find "$corpus/$1" -type f | wc -l)
    if ! run "$1" "$found" "$corpus/$1" "${flags[@]}" -max_total_time="$seconds" >"$log" 2>&1 ||
        ! keep "$1" "$found" "${flags[@]}" >>"$log" 2>&1; then
        tail -n 60 "$log"
        echo "fuzzing: $1 FAILED (see $log)"
        return 1
    fi
    echo "fuzzing: $1 passed: $(grep -oE 'Done [0-9]+ runs in [0-9]+ second' "$log" | head -1)s," \
        "$(($(find "$corpus/$1" -type f | wc -l) - before)) inputs added to the corpus"
}

status=0
for ((k = 0; k < ${#targets[@]}; k += 2)); do
    pids=()
    for target in "${targets[@]:k:2}"; do fuzz "$target" & pids+=($!); done
    for pid in "${pids[@]}"; do wait "$pid" || status=1; done
done
exit $status
