#!/usr/bin/env bash
# Functions have at most 70 lines, files at most 600, lines of abi.h at most 100 columns.
set -euo pipefail

status=0
files=()
while IFS= read -r -d '' file; do
    files+=("${file#./}")
done < <(find . \( -path ./build -o -path ./.git \) -prune -o -type f \( -name '*.[ch]' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \) -print0)
mapfile -d '' -t scripts < <(find . \( -path ./build -o -path ./.git \) -prune -o -type f -name '*.py' -print0)

for file in "${files[@]}" "${scripts[@]#./}"; do
    lines=$(wc -l <"$file")
    if [ "$lines" -gt 600 ]; then
        echo "$file has $lines lines, at most 600 are wanted"
        status=1
    fi
done
awk 'length > 100 { print "abi.h:" FNR ": " length " columns"; bad = 1 } END { exit bad }' abi.h || status=1

if ! command -v pmccabe >/dev/null; then
    echo "pmccabe is missing: install it to check the length of functions"
    [ "$status" -ne 0 ] || status=77
    exit $status
fi
# Fields: two complexities, statements, first line, lines, place. What pmccabe says of macros that
# expand to functions is of no interest.
pmccabe "${files[@]}" 2>/dev/null | awk '$5 > 70 { print $6, $7 ": " $5 " lines, at most 70 are wanted"; bad = 1 } END { exit bad }' || status=1
exit $status
