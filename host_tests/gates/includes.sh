#!/usr/bin/env bash
# Includes point down only: abi -> plugin -> the kernels' C headers. The kernels know neither, hosts
# know abi.h and abi/loader.h alone (the example as installed), other plugins abi.h alone, only tests include host_tests, and CUDA and NCCL have
# their files.
set -euo pipefail

# allowed FILE HEADER: whether FILE may include HEADER.
allowed() {
    case $1 in
        abi.h) [[ $2 == '<stddef.h>' || $2 == '<stdint.h>' ]] && return ;;
        abi/loader.*) [[ $2 == '"abi.h"' || $2 == '"loader.h"' ]] && return ;;
        abi/*) [[ $2 == '"abi.h"' || $2 == '"abi/'* || $2 == '"plugin/'* ]] && return ;;
        plugin/*) [[ $2 == '"abi.h"' || $2 == '"plugin/'* || $2 == '"kernels/'*'.h"' ]] && return ;;
        kernels/*) [[ $2 == '"kernels/'* ]] && return ;;
        hosts/*) [[ $2 == '"abi.h"' || $2 == '"abi/loader.h"' || $2 == '"hosts/'* ]] && return ;;
        host_tests/mock_plugin/*) [[ $2 == '"abi.h"' || $2 == '"host_tests/mock_plugin/'* ]] && return ;;
        docs/tutorial/*) [[ $2 == '"abi.h"' || $2 == '"docs/tutorial/'* ]] && return ;;
        host_tests/*) return 0 ;;
        *) [[ $2 == \"* && $2 != '"host_tests/'* ]] && return ;;
    esac
    case $2 in
        '<cuda'* | '<nv'*) [[ $1 == plugin/device_cuda.c || $1 == kernels/cuda/* ]] ;;
        '<moxie/abi.h>' | '<moxie/loader.h>') [[ $1 == hosts/example/* ]] ;;
        '<nccl'*) [[ $1 == plugin/transport_nccl.c ]] ;;
        '<'*) [[ $1 != abi.h ]] ;;
        *) return 1 ;;
    esac
}

status=0
seen=0
while IFS=: read -r file line text; do
    header=$(sed -E 's/^[[:space:]]*#[[:space:]]*include[[:space:]]*([<"][^>"]*[>"]).*/\1/' <<<"$text")
    seen=$((seen + 1))
    if ! allowed "${file#./}" "$header"; then
        echo "${file#./}:$line: may not include $header"
        status=1
    fi
done < <(find . \( -path ./build -o -path ./.git \) -prune -o -type f -name '*.[ch]' -print0 -o -type f -name '*.cu*' -print0 |
    xargs -0 grep -nEH '^[[:space:]]*#[[:space:]]*include')
if [ "$seen" -lt 20 ]; then
    echo "only $seen includes found: the gate looks in the wrong place"
    status=1
fi
exit $status
