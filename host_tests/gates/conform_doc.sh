#!/usr/bin/env bash
# conform_doc.sh MOXIE [--write]: the table of rules in docs/conform.md is what `moxie conform --list` prints.
set -euo pipefail

document=docs/conform.md
# shellcheck disable=SC2016 # the back-quotes are Markdown
rules=$("$1" conform --list | sed -E 's/^([a-z0-9-]+) +(.*[^ ]) *$/| `\1` | \2 |/')
begin='| --- | --- |'
if [ "${2:-}" = --write ]; then
    head=$(sed "/^$begin\$/q" "$document")
    printf '%s\n%s\n' "$head" "$rules" >"$document"
fi
if ! diff <(sed "1,/^$begin\$/d" "$document") <(printf '%s\n' "$rules"); then
    echo "$document differs from moxie conform --list; write it again: host_tests/gates/conform_doc.sh MOXIE --write"
    exit 1
fi
