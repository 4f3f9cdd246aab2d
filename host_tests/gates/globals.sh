#!/usr/bin/env bash
# globals.sh OBJECT...: the library has no mutable globals, thread-local ones included. Constant tables that hold
# pointers lie in .data.rel.ro, which is read-only once loaded.
set -euo pipefail

for folder in abi plugin kernels/cpu; do
    if [[ " $*" != *"/$folder/"* ]]; then
        echo "no object of $folder/: the gate looks in the wrong place"
        exit 1
    fi
done
failed=0
for object in "$@"; do
    # name | value | class | type | size | line | section
    found=$(nm --format=sysv "$object" | tr -d ' ' |
        awk -F'|' 'NF == 7 && $3 ~ /^[bBdDcCsSgG]$/ && $7 !~ /^\.data\.rel\.ro/ { print "  " $1 " in " $7 }')
    [ -z "$found" ] && continue
    printf '%s: mutable globals\n%s\n' "$object" "$found"
    failed=1
done
exit $failed
