#!/usr/bin/env bash
# Every C file is as clang-format 14 leaves it. abi.h is laid out by hand: its comments are the documentation.
set -euo pipefail

# Versions differ in what they print, so only 14 counts.
formatter=
for candidate in clang-format-14 clang-format; do
    if command -v "$candidate" >/dev/null && "$candidate" --version | grep -q 'version 14\.'; then
        formatter=$candidate
        break
    fi
done
if [ -z "$formatter" ]; then
    echo "skipped: clang-format 14 is not installed"
    exit 77
fi

failed=0
while IFS= read -r -d '' file; do
    "$formatter" --dry-run -Werror "$file" >/dev/null 2>&1 && continue
    echo "$file: run $formatter -i $file"
    failed=1
done < <(find abi plugin kernels hosts host_tests bench docs \( -name '*.[ch]' -o -name '*.cc' \) -print0 2>/dev/null | sort -z)
exit $failed
