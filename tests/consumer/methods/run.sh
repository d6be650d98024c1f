#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: run.sh [FOLDER]
# Builds and runs the program beside this file by FetchContent, find_package(), pkg-config and as a Meson subproject,
# with the shared and the static library of each. Muster is compiled twice, which takes minutes, so no suite contains
# this. With FOLDER, a later call compiles only what has changed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$here/../../.." && pwd)
if [ $# -gt 0 ]; then
  mkdir -p "$1"
  place=$(cd "$1" && pwd)
else
  place=$(mktemp -d)
  trap 'rm -rf "$place"' EXIT
fi
# Fast to compile: the programs are small.
quick=(--buildtype=plain -Doptimization=0 -Dunity=on -Dunity_size=8)

check() { # METHOD KIND PROGRAM
  local said needs
  said=$("$3")
  [ "$said" = "rank 0: layer" ] || { echo "$1, $2: the program printed '$said'" >&2 && exit 1; }
  needs=$(readelf -d "$3" | grep -c 'NEEDED.*libmuster\.so' || true)
  [ "$needs" = "$([ "$2" = shared ] && echo 1 || echo 0)" ] || { echo "$1: the program is not linked with the $2 library" >&2 && exit 1; }
  echo "passed: $1, $2 library"
}

logged() { # COMMAND...
  "$@" >"$place/log" 2>&1 || {
    tail -n 40 "$place/log" >&2
    echo "failed: $*" >&2
    exit 1
  }
}

for kind in shared static; do
  logged cmake -S "$here" -B "$place/fetch-$kind" -DMUSTER_SOURCE="$source" -Dmuster_BUILD_FOLDER="$place/meson" \
    -Dmuster_MESON_OPTIONS="$(IFS=';' && echo "${quick[*]}")" -DBUILD_SHARED_LIBS="$([ $kind = shared ] && echo ON || echo OFF)"
  logged cmake --build "$place/fetch-$kind"
  check FetchContent $kind "$place/fetch-$kind/program"
done

logged ninja -C "$place/meson"
rm -rf "$place/installed"
DESTDIR=$place/installed logged meson install -C "$place/meson" --no-rebuild
package=$(find "$place/installed" -name musterConfig.cmake)
config=$(find "$place/installed" -name muster.pc)
for kind in shared static; do
  logged cmake -S "$here" -B "$place/find-$kind" -Dmuster_DIR="${package%/*}" \
    -Dmuster_USE_STATIC_LIBS="$([ $kind = static ] && echo ON || echo OFF)"
  logged cmake --build "$place/find-$kind"
  check find_package $kind "$place/find-$kind/program"
done

export PKG_CONFIG_PATH=${config%/*}
library=$(pkg-config --variable=libdir muster)
read -ra flags < <(pkg-config --cflags muster)
read -ra shared < <(pkg-config --libs muster)
read -ra static < <(pkg-config --static --libs muster)
logged "${CXX:-c++}" -std=c++20 "${flags[@]}" "$here/program.cpp" -o "$place/program" "${shared[@]}" "-Wl,-rpath,$library"
check pkg-config shared "$place/program"
# The folder has both libraries, and the linker would take the shared one.
static=("${static[@]/#-lmuster/$library/libmuster.a}")
logged "${CXX:-c++}" -std=c++20 "${flags[@]}" "$here/program.cpp" -o "$place/program" "${static[@]}"
check pkg-config static "$place/program"

mkdir -p "$place/project/subprojects"
ln -sfn "$source" "$place/project/subprojects/muster"
cp "$here/meson.build" "$here/program.cpp" "$place/project/"
[ -e "$place/subproject/build.ninja" ] || logged meson setup "${quick[@]}" "$place/subproject" "$place/project"
logged ninja -C "$place/subproject" program-shared program-static
for kind in shared static; do check "Meson subproject" $kind "$place/subproject/program-$kind"; done
