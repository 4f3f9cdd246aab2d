#!/usr/bin/env bash
# Shell scripts pass shellcheck.
set -euo pipefail

if ! command -v shellcheck >/dev/null; then
    echo "skipped: shellcheck is not installed"
    exit 77
fi
shellcheck -x scripts/* .ci/run host_tests/gates/*.sh host_tests/model/*.sh
