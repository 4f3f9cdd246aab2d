#!/usr/bin/env bash
# driver.sh COMMAND STUB: the command is linked to nothing of CUDA, and every function it looks up in the driver's library
# is in the toolkit's stub of it.
set -euo pipefail

status=0
if readelf -dW "$1" | grep -E 'NEEDED.*\[lib(cu|nv)'; then
    echo "$1 is linked to CUDA"
    status=1
fi
names=$(grep -oE '"cu[A-Z][A-Za-z0-9_]*"' hosts/cli/cuda_driver.c | tr -d '"' | sort)
if [ "$(wc -l <<<"$names")" -lt 20 ]; then
    echo "hosts/cli/cuda_driver.c names fewer functions than a device needs: the gate looks in the wrong place"
    status=1
fi
missing=$(comm -23 <(echo "$names") <(nm -D --defined-only -P "$2" | awk '{ print $1 }' | sort))
if [ -n "$missing" ]; then
    echo "$2 has none of these:"
    echo "$missing"
    status=1
fi
exit $status
