#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: run.sh BUILD-FOLDER COMPILER...
# Installs Muster into a temporary folder, builds a project against it that uses only pkg-config, and runs it; then the
# same with CMake.
set -euo pipefail
build=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

DESTDIR=$place meson install -C "$build" --no-rebuild --quiet
config=$(find "$place" -name muster.pc)
[ -n "$config" ] || {
  echo "no muster.pc was installed"
  exit 1
}
export PKG_CONFIG_PATH=${config%/*}
version=$(pkg-config --modversion muster)
read -ra cflags < <(pkg-config --cflags muster)
read -ra libs < <(pkg-config --libs muster)
# If the library is built with sanitizers, the program needs them, too.
sanitize=$(meson introspect "$build" --buildoptions |
  python3 -c 'import json, sys; print([o["value"] for o in json.load(sys.stdin) if o["name"] == "b_sanitize"][0])')
[ "$sanitize" = none ] || cflags+=("-fsanitize=$sanitize")
library=$(find "$place" -name 'libmuster.so' -printf '%h')
"$@" -std=c++20 -Wall -Wextra -Werror "${cflags[@]}" "$here/main.cpp" -o "$place/consumer" "${libs[@]}" "-Wl,-rpath,$library"

# Code for devices is in a separate library, which needs no toolkit.
if pkg-config --exists muster-cuda; then
  read -ra device_libs < <(pkg-config --libs muster-cuda)
  "$@" -std=c++20 -Wall -Wextra -Werror "${cflags[@]}" "$here/devices.cpp" -o "$place/devices" "${device_libs[@]}" \
    "-Wl,-rpath,$library"
  "$place/devices"
fi

# The libraries export no symbols of their dependencies, and a program needs no private symbols of Muster.
for file in "$library"/libmuster*.so; do
  foreign=$(nm -DC --defined-only "$file" | cut -c20- |
    grep -vE '^((non-virtual thunk to|vtable for|VTT for|typeinfo for|typeinfo name for|guard variable for) )?muster(::|_hdf5_|_cuda_)|^MUSTER_') || true
  [ -z "$foreign" ] || {
    echo "$file exports what is not Muster's: $foreign"
    exit 1
  }
done
private=$(nm -D --with-symbol-versions --undefined-only "$place/consumer" | grep MUSTER_PRIVATE) || true
[ -z "$private" ] || {
  echo "programs need what no public header declares: $private"
  exit 1
}

program=$(find "$place" -name muster -type f -path '*bin*')
said=$("$place/consumer" "$place/state.h5")
[ "$said" = "$version" ]
# The installed program finds its library without environment variables.
said=$("$program" --version)
[ "$said" = "muster $version" ]
export LD_LIBRARY_PATH=$library
# If MPI is available: an MPI program, which uses only the other pkg-config file.
if pkg-config --exists muster-mpi; then
  read -r package _ < <(pkg-config --print-requires muster-mpi | grep -v '^muster' || echo mpi)
  read -ra mpi < <(pkg-config --cflags "$package")
  read -ra cflags < <(pkg-config --cflags muster-mpi)
  read -ra libs < <(pkg-config --libs muster-mpi)
  [ "$sanitize" = none ] || cflags+=("-fsanitize=$sanitize")
  "$@" -std=c++20 -Wall -Wextra -Werror "${cflags[@]}" "${mpi[@]/#-I/-isystem}" "$here/mpi.cpp" -o "$place/mpi" "${libs[@]}" \
    "-Wl,-rpath,$library"
  if "$here/../mpi/launch.sh" --check; then
    said=$(ASAN_OPTIONS=detect_leaks=0 "$here/../mpi/launch.sh" -n 2 "$place/mpi")
    [ "$said" = "2 ranks" ]
  else
    echo "the program of MPI was built, and not run"
  fi
fi
# The same program with the CMake package file, which finds the moved tree relative to itself.
package=$(find "$place" -name musterConfig.cmake)
devices=OFF
[ -z "$(find "$place" -name libmuster-cuda.so)" ] || devices=ON
flags=
[ "$sanitize" = none ] || flags=-fsanitize=$sanitize
# The compiler may have a wrapper (ccache) in front.
CXX=${*: -1} cmake -S "$here" -B "$place/cmake" -Dmuster_DIR="${package%/*}" -DWITH_DEVICES=$devices \
  -DCMAKE_CXX_FLAGS="$flags" >"$place/cmake.log" 2>&1 &&
  cmake --build "$place/cmake" >>"$place/cmake.log" 2>&1 || {
  cat "$place/cmake.log"
  exit 1
}
said=$("$place/cmake/consumer" "$place/state.h5")
[ "$said" = "$version" ]
[ $devices = OFF ] || "$place/cmake/devices"

private=$(find "$place" -path '*include*' -name '*.hpp' -not -path '*/include/muster/*')
[ -z "$private" ] || {
  echo "private headers were installed: $private"
  exit 1
}
echo "installed, built against and run: muster $version"
