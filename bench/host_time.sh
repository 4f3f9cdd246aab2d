#!/usr/bin/env bash
# The library's own time on the host at a few sizes, one JSON object per line.
#   bench/host_time.sh BUILD_DIR > bench/results/DATE-host-time.json
set -euo pipefail
for tokens in 1 16 1024 4096; do
    for format in bf16 fp8; do
        "$1/bin/host_time" "$tokens" "$format"
    done
done
