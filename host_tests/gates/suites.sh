#!/usr/bin/env bash
# Every source file of the library has a suite of its name: abi/X.c, plugin/X.c, and kernels/cpu/X.c where kernels/X.h
# exists, are tested by host_tests/test_X.c. X_PART.c beside X.c is a part of X, and is tested with it.
set -euo pipefail

failed=0
for file in abi/*.c plugin/*.c kernels/cpu/*.c; do
    [ -e "$file" ] || continue
    folder=$(dirname "$file")
    name=$(basename "$file" .c)
    if [[ $file == kernels/* && ! -e kernels/$name.h ]]; then
        continue # an instruction set or a helper of a family
    fi
    whole=${name%%_*}
    [ -e "host_tests/test_$name.c" ] && continue
    [ "$whole" != "$name" ] && [ -e "$folder/$whole.c" ] && [ -e "host_tests/test_$whole.c" ] && continue
    echo "$file: no host_tests/test_$name.c"
    failed=1
done
exit $failed
