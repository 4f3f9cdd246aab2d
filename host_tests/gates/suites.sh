#!/usr/bin/env bash
# Every source file of the library has a suite of its name: plugin/X.c, abi/X.c and kernels/X.h, once kernels/cpu/X.c
# exists, are tested by host_tests/test_X.c.
set -euo pipefail

failed=0
for file in abi/*.c plugin/*.c kernels/cpu/*.c; do
    [ -e "$file" ] || continue
    name=$(basename "$file" .c)
    case $file in
    kernels/*) [ -e "kernels/$name.h" ] || continue ;; # a part of another family
    esac
    [ -e "host_tests/test_$name.c" ] && continue
    grep -qxF "suites $file" host_tests/gates/pending.txt 2>/dev/null && continue
    echo "$file: no host_tests/test_$name.c"
    failed=1
done
exit $failed
