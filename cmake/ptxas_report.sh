#!/usr/bin/env bash
# ptxas_report.sh COMPILER ARGUMENT...: compiles, and keeps what `ptxas -v` says in OBJECT.ptxas, where gate_budget reads
# it. What else the compiler says is passed on.
set -uo pipefail

object=
previous=
for word in "$@"; do
    [ "$previous" = -o ] && object=$word
    previous=$word
done
"$@" 2>"$object.ptxas"
status=$?
grep -vE '^ptxas info |^ +[0-9]+ bytes stack frame' "$object.ptxas" >&2
exit $status
