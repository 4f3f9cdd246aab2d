#!/usr/bin/env bash
# needed.sh LIBRARY: the library needs the C library's own parts and nothing else, and stays resident once loaded.
set -euo pipefail

allowed='^(libc|libm|libpthread|librt|libdl|ld-linux[-a-z0-9_]*)\.so\.[0-9]+$'
dynamic=$(readelf -dW "$1")
status=0
while read -r name; do
    if ! [[ $name =~ $allowed ]]; then
        echo "$1 needs $name; allowed are libc, libm, libpthread, librt, libdl and ld-linux"
        status=1
    fi
done < <(sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' <<<"$dynamic")
for flag in NOW NODELETE; do
    if ! grep -q "FLAGS_1.*\b$flag\b" <<<"$dynamic"; then
        echo "$1 was linked without -z ${flag,,}"
        status=1
    fi
done
exit $status
