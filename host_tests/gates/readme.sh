#!/usr/bin/env bash
# The program in README.md is main() of hosts/example/host.c, which is built and run, and what any document links to exists.
# No text holds what a merge left.
set -euo pipefail

failed=0
if ! diff <(awk '/^```/ { inside = $0 == "```c"; next } inside' README.md) <(awk '/^int main/, 0' hosts/example/host.c); then
    echo "README.md: the C block differs from main() of hosts/example/host.c"
    failed=1
fi
while IFS=: read -r file link; do
    [[ $link == *:* || -e $(dirname "$file")/$link ]] && continue
    echo "$file: links to $link, which does not exist"
    failed=1
done < <(grep -roE --include='*.md' --exclude-dir=build --exclude-dir=.git '\]\([^)#]+' . | sed 's/:](/:/')
if grep -rnE '^(<<<<<<<|>>>>>>>) ' --include='*.md' --include='*.[ch]' --include='*.cu' --include='*.cuh' --include='*.py' \
    --include='*.txt' --include='*.sh' --exclude-dir=build --exclude-dir=.git .; then
    echo "above: what a merge left"
    failed=1
fi
exit $failed
