#!/usr/bin/env bash
# Searches the models beside it with spin: no error in the protocol as it is, one in each protocol with a rule less.
#   check.sh          what a test has time for
#   check.sh --long   more steps, slots and failures: minutes, and up to 3 GB
# One line per search: states, depth, seconds, MB, and what was searched. Exits 77 without spin or a compiler.
set -euo pipefail

folder=$(dirname "$(realpath "$0")")
compiler=${CC:-cc}
memory_mb=2000
depth_max=100000

for tool in spin "$compiler"; do
    if ! command -v "$tool" >/dev/null; then
        echo "skipped: $tool is not installed"
        exit 77
    fi
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# search OPTIONS MODEL DEFINITION...: compiles so, and leaves what the search said in $work/said.
search() {
    local options model=$2 ends=()
    read -ra options <<<"$1"
    shift 2

    # exchange judges its own last states: a dead rank is stuck by right.
    [ "$model" = exchange ] && ends=(-E)
    rm -f "$work"/*
    (
        cd "$work"
        spin -a "$@" "$folder/$model.pml" >generated || { cat generated && exit 1; }
        # Every process can be stopped anywhere, so there is no partial order to reduce by.
        "$compiler" "${options[@]}" -w -DSAFETY -DNOREDUCE -DMEMLIM=$memory_mb -o pan pan.c
        ./pan "${ends[@]}" -m$depth_max >said
    )
    printf '%10s %6s %8s %6s  %s\n' "$(figure ' *([0-9.e+]+) states, stored.*')" "$(figure '.*depth reached ([0-9]+),.*')" \
        "$(figure '.*elapsed time ([0-9.e+-]+) seconds.*')" "$(figure ' *([0-9]+)[0-9.]*\ttotal actual memory usage.*')" "$model $*"
}

# figure PATTERN: the first number that it captures in what the search said.
figure() {
    sed -nE "s/$1/\1/p" "$work/said" | head -n 1
}

failed=0
holds() {
    search "-O1 -DCOLLAPSE" "$@"
    if ! grep -q 'errors: 0$' "$work/said" || grep -qE 'not completed|too small|out of memory|memory limit' "$work/said"; then
        echo "not shown for $*:"
        grep -v "^Depth=" "$work/said"
        failed=1
    fi
}

# reaches_all MODEL DEFINITION...: holds, and no statement was left out of the search.
reaches_all() {
    holds "$@"
    if grep -E '^\s.*\.pml:[0-9]+, state' "$work/said"; then
        echo "never reached in $*"
        failed=1
    fi
}

breaks() {
    search "-O0 -DHC4" "$@" # found soon: to compile takes longer; a hash tells states apart, which may miss an error but makes none
    if ! grep -qE 'assertion violated|invalid end state' "$work/said"; then
        echo "no error found in $*"
        failed=1
    fi
}

printf '%10s %6s %8s %6s  %s\n' states depth seconds MB search
if [ "${1-}" = --long ]; then
    memory_mb=3000
    holds exchange -DR=2 -DSTEPS=4 -DFAILURES=2
    holds exchange -DR=2 -DSLOTS=2
    holds exchange -DR=3 -DSTEPS=4 -DFAILURES=0 -DWAKES=0
    holds exchange -DR=3 -DSTEPS=3 -DIDLE=0
    holds exchange -DR=3 -DIDLE=0 -DFAILURES=2 -DWAKES=0
    holds exchange -DR=3 -DSTEPS=1 -DIDLE=0 -DFAILURES=2
    holds exchange -DR=3 -DSTEPS=1
    holds exchange -DR=3 -DSTEPS=1 -DSLOTS=2 -DIDLE=0
    holds exchange -DDEVICE=1 -DR=3 -DIDLE=0
    holds exchange -DWORDS=1 -DR=2 -DSTEPS=4 -DFAILURES=2
    holds exchange -DWORDS=1 -DR=2 -DSLOTS=2
    holds exchange -DWORDS=1 -DR=3 -DIDLE=0
    holds exchange -DWORDS=1 -DR=3 -DSTEPS=3 -DIDLE=0
    holds exchange -DWORDS=1 -DR=3 -DSTEPS=1 -DWAKES=0
    holds exchange -DWORDS=1 -DR=3 -DSTEPS=1 -DIDLE=0 -DFAILURES=2
    exit $failed
fi

reaches_all exchange -DR=2
holds exchange -DR=2 -DSTEPS=3 -DIDLE=0 -DFAILURES=2
holds exchange -DR=2 -DSLOTS=2 -DIDLE=0
holds exchange -DR=3 -DFAILURES=0 -DWAKES=0
reaches_all exchange -DR=3 -DIDLE=0
holds exchange -DR=3 -DSTEPS=1 -DIDLE=0 -DFAILURES=2 -DWAKES=0
for rule in NO_DISPATCH_WAIT NO_COMBINE_WAIT ANY_GENERATION NO_CHECK_AT_SEND NO_CHECK_IN_WAIT GENERATION_BEFORE_ACTIVE \
    FLAG_BEFORE_ROWS FLAG_BEFORE_RESULTS READ_MASKED SUM_MASKED ONE_SLAB KEEP_EPOCH TELL_PEERS_ONLY NAME_FIRST_SILENT; do
    breaks exchange -DR=3 -DIDLE=0 -D$rule
done
breaks exchange -DR=3 -DIDLE=1 -DSILENT_WHEN_IDLE
breaks exchange -DR=2 -DIDLE=0 -DFAILURES=2 -DLEFT_OUT_LATER_ONLY
breaks exchange -DR=2 -DSLOTS=2 -DIDLE=0 -DONE_WINDOW

reaches_all exchange -DDEVICE=1 -DR=2

reaches_all exchange -DWORDS=1 -DR=2
holds exchange -DWORDS=1 -DR=2 -DSTEPS=3 -DIDLE=0 -DFAILURES=2
holds exchange -DWORDS=1 -DR=2 -DSLOTS=2 -DIDLE=0
holds exchange -DWORDS=1 -DR=3 -DFAILURES=0 -DWAKES=0
reaches_all exchange -DWORDS=1 -DR=3 -DSTEPS=1 -DIDLE=0
holds exchange -DWORDS=1 -DR=3 -DIDLE=0 -DWAKES=0
holds exchange -DWORDS=1 -DR=3 -DSTEPS=1 -DIDLE=0 -DFAILURES=2 -DWAKES=0
for rule in FLAG_IS_ENOUGH COUNT_IS_ENOUGH ANY_GENERATION NO_CHECK_IN_WAIT GENERATION_BEFORE_ACTIVE ONE_SLAB KEEP_EPOCH TELL_PEERS_ONLY \
    NAME_FIRST_SILENT; do
    breaks exchange -DWORDS=1 -DR=3 -DIDLE=0 -D$rule
done
breaks exchange -DWORDS=1 -DR=2 -DNO_COMBINE_FLAG
breaks exchange -DWORDS=1 -DR=2 -DSLOTS=2 -DIDLE=0 -DONE_WINDOW

reaches_all bell
for rule in TICKET_AFTER_LOOK COUNT_AFTER_SLEEPING LOOK_BEFORE_RINGING SLEEP_WITHOUT_COMPARING; do
    breaks bell -D$rule
done
exit $failed
