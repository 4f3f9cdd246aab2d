#!/usr/bin/env bash
# abi.h compiles alone, in every language that it promises, without implicit padding, and in two
# translation units of one program. The loader compiles as C99 and as C++11.
set -euo pipefail

source_dir=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
strict=(-Wall -Wextra -Wpedantic -Werror -I "$source_dir")

printf '#include "abi.h"\nmoxie_host *one(void);\nmoxie_host *one(void) { return 0; }\n' >"$work/one.c"
printf '#include "abi.h"\nint main(void) { return MOXIE_OK; }\n' >"$work/two.c"
cp "$work/one.c" "$work/one.cc"
cp "$work/two.c" "$work/two.cc"

# compile COMPILER STANDARD SUFFIX
compile() {
    local unit
    for unit in one two; do
        "$1" -std="$2" "${strict[@]}" -Wpadded -c "$work/$unit.$3" -o "$work/$unit.o"
    done
    "$1" "$work/one.o" "$work/two.o" -o "$work/program"
    "$work/program"
}

for compiler in gcc clang; do
    command -v $compiler >/dev/null || continue
    for standard in c99 c11 c17; do
        compile $compiler $standard c
    done
    $compiler -std=c99 "${strict[@]}" -c "$source_dir/abi/loader.c" -o "$work/loader.o"
done
for compiler in g++ clang++; do
    command -v $compiler >/dev/null || continue
    for standard in c++11 c++14 c++17 c++20; do
        compile $compiler $standard cc
    done
    $compiler -x c++ -std=c++11 "${strict[@]}" -c "$source_dir/abi/loader.c" -o "$work/loader.o"
done
