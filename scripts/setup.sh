# shellcheck shell=bash disable=SC2034
# Sourced by scripts/test and scripts/quickstart: finds the tools and libraries that are missing, and installs them on
# Debian and Ubuntu when it may. CUDA is never installed: without nvcc the library is built for the CPU.

have() {
    command -v "$1" >/dev/null 2>&1
}

have_cmake() {
    local version
    version=$(cmake --version 2>/dev/null | awk 'NR == 1 { print $3 }')
    [ -n "$version" ] && printf '3.25\n%s\n' "$version" | sort --check=quiet --version-sort
}

have_header() {
    printf '#include <%s>\n' "$1" | cc -E -x c - >/dev/null 2>&1
}

have_library() {
    pkg-config --exists "$1" 2>/dev/null
}

have_venv() {
    python3 -c 'import ensurepip' 2>/dev/null
}

# Prints the name of a clang that can build fuzzers; fails when there is none.
fuzz_compiler() {
    local compiler probe
    probe=$(mktemp)
    for compiler in clang clang-{21..14}; do
        have "$compiler" || continue
        echo 'int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return d == 0 && n > 0; }' |
            "$compiler" -fsanitize=fuzzer,address,undefined -x c - -o "$probe" 2>/dev/null || continue
        rm -f "$probe"
        echo "$compiler"
        return
    done
    rm -f "$probe"
    return 1
}

# Debian's package, and the command that succeeds when what it brings is there.
build_needs=(
    "cmake have_cmake"
    "ninja-build have ninja"
    "gcc have cc"
    "libc6-dev have_header stdio.h"
    "pkg-config have pkg-config"
    "libjansson-dev have_library jansson"
)
test_needs=(
    "g++ have c++"
    "check have_library check"
    "libsubunit-dev have_library libsubunit"
    "python3 have python3"
    "binutils have nm"
    "abigail-tools have abidiff"
    "pmccabe have pmccabe"
    "spin have spin"
)
# Tests that want these are skipped without them; installed along with the others where the release has them.
optional_needs=(
    "python3-venv have_venv"
    "libdlpack-dev have_header dlpack/dlpack.h"
    "clang have clang"
    "libclang-rt-dev fuzz_compiler"
    "libclang-rt-18-dev fuzz_compiler"
    "clang-format-14 have clang-format-14"
    "shellcheck have shellcheck"
    "codespell have codespell"
)

# missing_of NEED...: the packages whose command fails.
missing_of() {
    local need words
    for need in "$@"; do
        read -ra words <<<"$need"
        "${words[@]:1}" >/dev/null || printf '%s\n' "${words[0]}"
    done
}

# install_torch: what host_tests/torch.txt lists, in build/torch, unless it is there. 6 GB, as PyPI has
# torch for x86 with CUDA only.
install_torch() {
    local venv=build/torch wanted=host_tests/torch.txt seconds=600 code=0

    cmp -s $wanted $venv/installed && return
    rm -rf $venv
    if [ "$(df -Pk build | awk 'NR == 2 { print $4 }')" -lt $((12 << 20)) ]; then
        echo "torch needs 12 GB on this disk while it is installed"
        return 1
    fi
    python3 -m venv $venv &&
        timeout --foreground $seconds $venv/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --no-compile \
            --only-binary=:all: --timeout 15 --retries 1 -r $wanted &&
        cp $wanted $venv/installed && return || code=$?
    # Which pip does not say.
    [ $code -ne 124 ] || echo "pip took more than $seconds s"
    rm -rf $venv
    return 1
}

# How this user runs a command as root without being asked for a password; fails when there is no way.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    else
        sudo -n "$@"
    fi
}

may_install() {
    have apt-get && { [ "$(id -u)" -eq 0 ] || { have sudo && sudo -n true 2>/dev/null; }; }
}

# setup NEED...: every need is met when it returns; otherwise it says what to run and exits 1.
setup() {
    local missing optional package
    mapfile -t missing < <(missing_of "$@")
    [ ${#missing[@]} -eq 0 ] && return

    if may_install; then
        echo "installing: ${missing[*]}"
        as_root apt-get update -qq || echo "apt-get update failed; trying with the lists that are there" >&2
        mapfile -t optional < <(missing_of "${optional_needs[@]}")
        for package in "${optional[@]}"; do
            apt-cache show "$package" >/dev/null 2>&1 && missing+=("$package")
        done
        as_root env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends "${missing[@]}" || true
        hash -r
        mapfile -t missing < <(missing_of "$@")
        [ ${#missing[@]} -eq 0 ] && return
    fi
    {
        echo "missing: ${missing[*]}"
        if have apt-get; then
            echo "run this, then start again:"
            echo "    sudo apt-get update && sudo apt-get install -y ${missing[*]}"
        else
            echo "install them (named here as on Debian 12), then start again"
        fi
        if [[ " ${missing[*]} " == *" cmake "* ]] && have cmake; then
            echo "cmake must be 3.25 or newer; this is $(cmake --version | awk 'NR == 1 { print $3 }')"
        fi
    } >&2
    exit 1
}
