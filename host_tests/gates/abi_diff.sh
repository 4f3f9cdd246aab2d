#!/usr/bin/env bash
# abi_diff.sh ANCHOR: abi.h says what abi/baseline says of this version of the ABI. No suppressions: those that would let
# appends pass hide removed and reordered slots too. scripts/abi_baseline writes the baseline anew.
set -euo pipefail

if ! command -v abidw >/dev/null || ! command -v abidiff >/dev/null; then
    echo "skipped: abidw and abidiff are not installed (Debian: abigail-tools)"
    exit 77
fi
version=$(sed -n 's/#define MOXIE_VERSION_M[AI][JN]OR //p' abi.h | paste -sd.)
baseline=abi/baseline/moxie-$version.abi
if [ ! -e "$baseline" ]; then
    echo "$baseline is missing: run scripts/abi_baseline and commit it with the new version"
    exit 1
fi
if ! abidiff --harmless --fail-no-debug-info "$baseline" "$1"; then
    echo "abi.h differs from $baseline. An append: run python3 abi/ledger and scripts/abi_baseline, commit both." \
        "Anything else is a break: bump MOXIE_VERSION_MINOR too."
    exit 1
fi
