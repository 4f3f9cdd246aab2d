#!/usr/bin/env bash
# No common misspelling in prose, comments or names.
set -euo pipefail

if ! command -v codespell >/dev/null; then
    echo "skipped: codespell is not installed"
    exit 77
fi
folders=()
for folder in abi plugin kernels hosts host_tests bench cmake docs scripts; do
    [ -d "$folder" ] && folders+=("$folder")
done
# unittest's assertIn is a mistake to 2.3 alone.
codespell --ignore-words-list assertin --skip '*.safetensors,*.json,*.abi,*.pyc,*.dict,*/fuzz/corpus/*' abi.h CMakeLists.txt README.md CHANGELOG.md "${folders[@]}"
