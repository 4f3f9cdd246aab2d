#!/usr/bin/env bash
# install.sh BUILD CC VERSION: what `cmake --install` leaves is complete, can be moved, and serves hosts that link the
# library or load it, found by pkg-config or by find_package. A project with the tree inside has the same targets, and
# nothing else of it.
set -euo pipefail

build=$1
cc=$2
version=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/pc"

cmake --install "$build" --prefix "$work/first" >/dev/null
mv "$work/first" "$work/prefix"
prefix=$work/prefix

wanted=(lib/libmoxie.so include/moxie/abi.h include/moxie/loader.h share/moxie/loader.c lib/pkgconfig/moxie.pc
    lib/cmake/moxie/moxieConfig.cmake lib/cmake/moxie/moxieConfigVersion.cmake share/doc/moxie/LICENSE
    share/moxie/python/pyproject.toml share/moxie/python/moxie/transformers.py)
if [ -x "$build/bin/moxie" ]; then
    wanted+=(bin/moxie)
fi
for file in "${wanted[@]}"; do
    [ -e "$prefix/$file" ] || { echo "not installed: $file"; exit 1; }
done

# expect_version PROGRAM: it runs, and speaks to the library of this version.
expect_version() {
    local seen
    seen=$(LD_LIBRARY_PATH=$prefix/lib "$1")
    [ "$seen" = "$version" ] || { echo "$1: printed '$seen', wanted $version"; exit 1; }
}

export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
read -ra cflags < <(pkg-config --cflags moxie)
read -ra libs < <(pkg-config --libs moxie)
include=$(pkg-config --variable=includedir moxie)
loader=$(pkg-config --variable=loader moxie)
plugin=$(pkg-config --variable=plugin moxie)
[ "$(pkg-config --modversion moxie)" = "$version" ] || { echo "moxie.pc: not version $version"; exit 1; }
"$cc" "${cflags[@]}" host_tests/package/linked.c "${libs[@]}" -o "$work/pc/linked"
expect_version "$work/pc/linked"
"$cc" "${cflags[@]}" -I"$include/moxie" -DPLUGIN="\"$plugin\"" host_tests/package/loaded.c "$loader" -ldl \
    -o "$work/pc/loaded"
expect_version "$work/pc/loaded"

cmake -S host_tests/package -B "$work/cmake" -G Ninja -DCMAKE_C_COMPILER="$cc" -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
cmake --build "$work/cmake" >/dev/null
expect_version "$work/cmake/linked"
expect_version "$work/cmake/loaded"

# The library itself is that of the build above: only what sees the targets is compiled.
cmake -S host_tests/package -B "$work/tree" -G Ninja -DCMAKE_C_COMPILER="$cc" -DMOXIE_TREE="$PWD" -DMOXIE_CUDA=OFF \
    >/dev/null
cmake --build "$work/tree" --target CMakeFiles/linked.dir/linked.c.o CMakeFiles/loaded.dir/loaded.c.o >/dev/null
targets=$(cmake --build "$work/tree" --target help)
if foreign=$(grep -oE '^[^ ]*(test_|gate_|example_host|moxie_cli)[^ ]*: phony' <<<"$targets"); then
    echo "a project with the tree inside gets more than the library:" "$foreign"
    exit 1
fi
ctest --test-dir "$work/tree" -N | grep -qx 'Total Tests: 0' || { echo "it gets tests"; exit 1; }
DESTDIR=$work/tree_prefix cmake --install "$work/tree" >/dev/null
[ ! -e "$work/tree_prefix" ] || { echo "it gets files to install"; exit 1; }
if grep '^CMAKE_INSTALL_LIBDIR' "$work/tree/CMakeCache.txt"; then
    echo "above: written into its cache"
    exit 1
fi

if [ -x "$prefix/bin/moxie" ]; then
    "$prefix/bin/moxie" info >/dev/null
fi
