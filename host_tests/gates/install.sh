#!/usr/bin/env bash
# install.sh BUILD CC VERSION LIBDIR: what `cmake --install` leaves is complete, can be moved, and serves hosts that link the
# library or load it, found by pkg-config or by find_package, in a folder whose name has a space. A project with the tree
# inside has the same targets, and nothing else of it.
set -euo pipefail

build=$1
cc=$2
version=$3
lib=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/pc"

# quiet COMMAND...: says what it printed only if it fails.
quiet() {
    "$@" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
}

quiet cmake --install "$build" --prefix "$work/first"
prefix="$work/the prefix"
mv "$work/first" "$prefix"

wanted=("$lib/libmoxie.so" include/moxie/abi.h include/moxie/loader.h share/moxie/loader.c "$lib/pkgconfig/moxie.pc"
    "$lib/cmake/moxie/moxieConfig.cmake" "$lib/cmake/moxie/moxieConfigVersion.cmake" share/doc/moxie/LICENSE
    share/moxie/python/pyproject.toml share/moxie/python/moxie/transformers.py)
if [ -x "$build/bin/moxie" ]; then
    wanted+=(bin/moxie)
fi
for file in "${wanted[@]}"; do
    [ -e "$prefix/$file" ] || { echo "not installed: $file"; exit 1; }
done

# Every file is of one component, for distributions that make a package of each.
for component in runtime development python documents; do
    quiet cmake --install "$build" --prefix "$work/parts/$component" --component "moxie_$component"
done
diff <(cd "$prefix" && find . ! -type d | sort) <(cd "$work/parts" && find . ! -type d | sed 's|^./[^/]*|.|' | sort) ||
    { echo "above: of no component, or of two"; exit 1; }

# expect_version PROGRAM: it runs, and speaks to the library of this version.
expect_version() {
    local seen
    seen=$(LD_LIBRARY_PATH=$prefix/$lib "$1")
    [ "$seen" = "$version" ] || { echo "$1: printed '$seen', wanted $version"; exit 1; }
}

export PKG_CONFIG_PATH=$prefix/$lib/pkgconfig
# variable NAME: pkgconf escapes spaces in it, pkg-config does not.
variable() {
    pkg-config --variable="$1" moxie | sed 's/\\\(.\)/\1/g'
}
cflags=() libs=()
eval "cflags=($(pkg-config --cflags moxie)) libs=($(pkg-config --libs moxie))"
loader=$(variable loader)
plugin=$(realpath -s "$(variable plugin)")
[ "$(pkg-config --modversion moxie)" = "$version" ] || { echo "moxie.pc: not version $version"; exit 1; }
"$cc" "${cflags[@]}" host_tests/package/linked.c "${libs[@]}" -o "$work/pc/linked"
expect_version "$work/pc/linked"
# Whatever an engine has under the names of the loader's own files.
mkdir "$work/shadow"
echo '#error the engine'\''s own' | tee "$work/shadow/loader.h" >"$work/shadow/abi.h"
"$cc" -I"$work/shadow" "${cflags[@]}" -DPLUGIN="\"$plugin\"" host_tests/package/loaded.c "$loader" -ldl \
    -o "$work/pc/loaded"
expect_version "$work/pc/loaded"

# What README.md says to an engine, with the example that it names.
doc=$prefix/share/doc/moxie
mkdir "$work/engine"
cp "$doc/hosts/example/host.c" "$work/engine"
# block LANGUAGE: what the chapter has in it.
block() {
    sed -n '/^## An installed Moxie$/,/^## What/p' "$doc/README.md" |
        awk -v fence='```'"$1" '/^```/ { inside = $0 == fence; next } inside'
}
block cmake >"$work/engine/CMakeLists.txt"
block sh >"$work/engine/build.sh"
# expect_example COMMAND...: the example runs, with the right y.
expect_example() {
    diff <("$@") <(printf 'token 0: 0.7311 3.5232\ntoken 1: 1.4621 7.0464\n') || { echo "above: $*"; exit 1; }
}
quiet cmake -S "$work/engine" -B "$work/engine/build" -G Ninja -DCMAKE_C_COMPILER="$cc" -DCMAKE_PREFIX_PATH="$prefix"
quiet cmake --build "$work/engine/build"
expect_example "$work/engine/build/engine" "$plugin"
(cd "$work/engine" && expect_example sh -e build.sh)
# And to who writes a plugin: the line of the tutorial.
line=$(grep '^cc ' "$doc/docs/tutorial/tutorial.md") || { echo "tutorial.md: no line of cc builds it"; exit 1; }
(cd "$work/engine" && eval "\"$cc\" ${line#cc }")
[ ! -e "$doc/docs/tutorial/CMakeLists.txt" ] || { echo "installed: a CMakeLists.txt that needs the tree"; exit 1; }
if [ -x "$prefix/bin/moxie" ]; then
    quiet "$prefix/bin/moxie" conform --plugin "$work/engine/libmoxie_tutorial.so" --rule entry
fi
while IFS=: read -r file link; do
    [[ $link == *:* || -e $(dirname "$file")/$link ]] || { echo "${file#"$prefix/"}: links to $link, which is not installed"; exit 1; }
done < <(grep -roE --include='*.md' '\]\([^)#]+' "$doc" "$prefix/share/moxie" | sed 's/:](/:/')

# What `pip show` says, by the setuptools that pip builds with.
if python3 -c 'import setuptools, sys; sys.exit(int(setuptools.__version__.split(".")[0]) < 61)' 2>/dev/null; then
    cp -r "$prefix/share/moxie/python" "$work/python"
    (cd "$work/python" && quiet python3 -c 'from setuptools import build_meta; build_meta.get_requires_for_build_wheel()')
    for line in "Version: $version" "License: Apache-2.0"; do
        grep -qx "$line" "$work/python/moxie.egg-info/PKG-INFO" || { echo "metadata of the Python package: no '$line'"; exit 1; }
    done
fi

quiet cmake -S host_tests/package -B "$work/cmake" -G Ninja -DCMAKE_C_COMPILER="$cc" -DCMAKE_PREFIX_PATH="$prefix"
quiet cmake --build "$work/cmake"
expect_version "$work/cmake/linked"
expect_version "$work/cmake/loaded"

# Engines are projects of C++ alone, too; their compiler is another than the one of this build.
if command -v c++ >/dev/null; then
    quiet cmake -S host_tests/package -B "$work/cxx" -G Ninja -DMOXIE_LANGUAGE=CXX -DCMAKE_PREFIX_PATH="$prefix"
    quiet cmake --build "$work/cxx"
    expect_version "$work/cxx/loaded"
    quiet cmake -S host_tests/package -B "$work/cxx_tree" -G Ninja -DMOXIE_LANGUAGE=CXX -DCMAKE_C_COMPILER="$cc" \
        -DMOXIE_TREE="$PWD" -DMOXIE_CUDA=OFF
    objects=(CMakeFiles/loaded.dir/loaded.cc.o CMakeFiles/loaded.dir/moxie/loader.cc.o)
    quiet cmake --build "$work/cxx_tree" --target "${objects[@]}"
fi

# The library itself is that of the build above: only what sees the targets is compiled.
quiet cmake -S host_tests/package -B "$work/tree" -G Ninja -DCMAKE_C_COMPILER="$cc" -DMOXIE_TREE="$PWD" -DMOXIE_CUDA=OFF
quiet cmake --build "$work/tree" --target CMakeFiles/linked.dir/linked.c.o CMakeFiles/loaded.dir/loaded.c.o
targets=$(cmake --build "$work/tree" --target help)
if foreign=$(grep -oE '^[^ ]*(test_|gate_|example_|moxie_cli)[^ ]*: phony' <<<"$targets"); then
    echo "a project with the tree inside gets more than the library:" "$foreign"
    exit 1
fi
ctest --test-dir "$work/tree" -N | grep -qx 'Total Tests: 0' || { echo "it gets tests"; exit 1; }
DESTDIR=$work/tree_prefix quiet cmake --install "$work/tree"
[ ! -e "$work/tree_prefix" ] || { echo "it gets files to install"; exit 1; }
if grep '^CMAKE_INSTALL_LIBDIR' "$work/tree/CMakeCache.txt"; then
    echo "above: written into its cache"
    exit 1
fi

if [ -x "$prefix/bin/moxie" ]; then
    "$prefix/bin/moxie" info >/dev/null
fi
# A package for users is enough for hosts that were built by one for developers.
rm -r "$prefix"
mv "$work/parts/runtime" "$prefix"
for program in "$work"/pc/* "$work"/cmake/linked "$work"/cmake/loaded; do
    expect_version "$program"
done
if [ -x "$prefix/bin/moxie" ]; then
    "$prefix/bin/moxie" info >/dev/null
    mv "$prefix/$lib" "$prefix/elsewhere"
    ! "$prefix/bin/moxie" info 2>"$work/log" || { echo "moxie info: found a library that is not there"; exit 1; }
    LD_LIBRARY_PATH=$prefix/elsewhere "$prefix/bin/moxie" info >/dev/null
fi
