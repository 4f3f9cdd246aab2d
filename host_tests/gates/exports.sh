#!/usr/bin/env bash
# exports.sh LIBRARY: the library exports exactly one symbol.
set -euo pipefail

seen=$(nm -D --defined-only -P "$1" | awk '{ print $1 }')
if [ "$seen" != moxie_get_api_v1 ]; then
    echo "$1 exports these, and only moxie_get_api_v1 is wanted:"
    echo "$seen"
    exit 1
fi
