#!/usr/bin/env bash
# calls.sh debug|release OBJECT...: the library never prints, ends the process, starts another, reads or changes what
# belongs to the whole process, or writes without a bound. Assertions are for debug builds.
set -euo pipefail

build=$1
shift
calls=(
    printf vprintf fprintf vfprintf dprintf vdprintf puts fputs putchar fputc putc perror stdout stderr
    __printf_chk __vprintf_chk __fprintf_chk __vfprintf_chk
    abort exit _exit _Exit quick_exit atexit on_exit raise err errx verr verrx error __stack_chk_fail_local
    system popen fork vfork execve execv execvp posix_spawn posix_spawnp
    signal sigaction sigprocmask setlocale getenv secure_getenv setenv unsetenv putenv chdir umask
    srand rand random srandom strtok gethostbyname
    gets strcpy strcat sprintf vsprintf __strcpy_chk __strcat_chk __sprintf_chk __vsprintf_chk alloca
)
if [ "$build" = release ]; then
    calls+=(__assert_fail)
fi

for folder in abi plugin kernels/cpu; do
    if [[ " $*" != *"/$folder/"* ]]; then
        echo "no object of $folder/: the gate looks in the wrong place"
        exit 1
    fi
done
failed=0
for object in "$@"; do
    undefined=$(nm --undefined-only --format=posix "$object" | awk '{ print $1 }')
    found=$(grep -xF -f <(printf '%s\n' "${calls[@]}") <<<"$undefined" || true)
    # A variable that NCCL reads as the ranks join takes the deadline from that call, so it is looked at before.
    [[ $object == */transport_nccl.c.o ]] && found=$(grep -vxF getenv <<<"$found" || true)
    [ -z "$found" ] && continue
    printf '%s: calls %s\n' "$object" "$(tr '\n' ' ' <<<"$found")"
    failed=1
done
exit $failed
