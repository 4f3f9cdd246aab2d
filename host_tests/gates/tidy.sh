#!/usr/bin/env bash
# tidy.sh BUILD: the library's sources pass clang-tidy with the checks of .clang-tidy.
set -euo pipefail

tidy=$(command -v clang-tidy-14 || command -v clang-tidy) || { echo "clang-tidy is not installed"; exit 1; }
find abi plugin kernels/cpu -name '*.c' -print0 2>/dev/null |
    xargs -0 -n 1 -P "$(nproc)" "$tidy" --quiet -p "$1"
