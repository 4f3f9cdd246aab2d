#!/usr/bin/env bash
# cuda.sh CC: what MOXIE_CUDA says is understood in every spelling or refused, and an nvcc that is too old, or that does not
# work, leaves the build for the CPU as it is. Why there are no GPU kernels is said. MOXIE_CLI has the same spellings.
set -euo pipefail

cc=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# nvcc RELEASE: the nvcc on PATH is of this release and compiles nothing.
nvcc() {
    cat >"$work/bin/nvcc" <<END
#!/bin/sh
[ "\$1" = --version ] || exit 1
echo "Cuda compilation tools, release $1, V$1.89"
END
    chmod +x "$work/bin/nvcc"
}

# expect CODE TEXT VALUE OPTION...: with MOXIE_CUDA=VALUE the configuration ends with CODE and says TEXT, however it breaks
# lines.
expect() {
    local code=0 said
    cmake -S . -B "$work/build" -G Ninja -DCMAKE_C_COMPILER="$cc" -DMOXIE_TESTS=OFF -DMOXIE_CLI=OFF "-DMOXIE_CUDA=$3" \
        "${@:4}" >"$work/said" 2>&1 || code=$?
    said=$(tr -s ' \n' ' ' <"$work/said")
    [[ $code -eq $1 && $said == *"$2"* ]] && return
    echo "MOXIE_CUDA='$3' ${*:4}: wanted exit code $1 and '$2', got $code and:"
    cat "$work/said"
    failed=1
}

mkdir "$work/bin"
export PATH="$work/bin:$PATH"
unset CUDACXX CUDA_PATH

nvcc 11.8
old="$work/bin/nvcc is that of CUDA 11.8: CUDA 12.5 or newer is wanted; put its nvcc first on PATH"
for word in AUTO auto; do
    expect 0 "GPU kernels: no, because $old" $word
done
for word in ON on 1 TRUE yes; do
    expect 1 "MOXIE_CUDA is '$word', but $old" $word
done
for word in OFF off 0 False no ''; do
    expect 0 "GPU kernels: no, because MOXIE_CUDA is '$word'" "$word"
done
expect 1 "MOXIE_CUDA is 'maybe': it may be AUTO; ON," maybe
PKG_CONFIG_LIBDIR=$work expect 0 "jansson (Debian: libjansson-dev) and pkg-config: it is left out" OFF -DMOXIE_CLI=auto
PKG_CONFIG_LIBDIR=$work expect 1 "-DMOXIE_CLI=OFF builds without it" OFF -DMOXIE_CLI=yes
expect 1 "MOXIE_CLI is 'maybe': it may be AUTO; ON," OFF -DMOXIE_CLI=maybe
nvcc 12.5
expect 0 "GPU kernels: no, because $work/bin/nvcc of CUDA 12.5 compiles nothing here" AUTO

# One that is not on PATH, but where CMake looks for programs by itself, as /usr/local/bin.
mkdir "$work/path" "$work/system"
mv "$work/bin" "$work/system"
IFS=: read -ra folders <<<"$PATH"
for folder in "${folders[@]}"; do
    find "$folder" -maxdepth 1 ! -name nvcc ! -type d -exec ln -s -t "$work/path" {} + 2>/dev/null || true
done
export PATH=$work/path
rm -r "$work/build"
expect 0 "GPU kernels: no, because there is no nvcc on PATH or in CUDACXX" AUTO "-DCMAKE_INSTALL_PREFIX=$work/system"
CUDA_PATH=$work/system expect 0 "$work/system/bin/nvcc of CUDA 12.5 compiles nothing here" AUTO
CUDACXX=$work/system/bin/nvcc expect 0 "$work/system/bin/nvcc of CUDA 12.5 compiles nothing here" AUTO

if ! grep -q 'CUDA 12\.5' README.md; then
    echo "README.md: does not say which CUDA is wanted"
    failed=1
fi
exit $failed
