#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: check.sh [RECIPE...]
# Checks recipes of this folder on Debian 12, as root: wrap, conan, conda, spack, nix, vcpkg; without arguments, all.
# README.md says which check each recipe passes. Muster is compiled without optimization: once each for wrap and spack,
# twice for conan, and each time takes minutes. SPACK_ROOT names a checkout of Spack 0.23, and VCPKG_ROOT one of vcpkg.
# Without the former, the recipe for Spack is left out.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$here/../.." && pwd)
methods=$source/tests/consumer/methods
version=$(sed -n "s/^  version: '\(.*\)',/\1/p" "$source/meson.build")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

passed() { echo "passed: $1: $2"; }
left_out() { echo "left out: $1: $2"; }
failed() { echo "failed: $1: $2" >&2 && exit 1; }

logged() { # COMMAND...
  "$@" >"$place/log" 2>&1 || {
    tail -n 40 "$place/log" >&2
    echo "failed: $*" >&2
    exit 1
  }
}

check_output() { # RECIPE KIND COMMAND...
  local said
  said=$("${@:3}" 2>>"$place/log") || failed "$1" "the program of the $2 library does not run"
  [ "$said" = "rank 0: layer" ] || failed "$1" "the program of the $2 library printed '$said'"
}

python_has() { # PACKAGE...: installs packages of PyPI
  [ -d "$place/venv" ] || logged python3 -m venv "$place/venv"
  "$place/venv/bin/pip" install -q "$@" >"$place/log" 2>&1
}

check_wrap() {
  local project=$place/wrap kind
  mkdir -p "$project/subprojects/packagefiles"
  cp "$methods/meson.build" "$methods/program.cpp" "$project/"
  cp "$here/muster.wrap" "$project/subprojects/"
  git -C "$source" archive --format=tar --prefix="muster-$version/" HEAD | gzip -9n >"$project/subprojects/packagefiles/muster-$version.tar.gz"
  # Only Muster: with --wrap-mode=forcefallback, Meson would download the wraps of Muster's own dependencies, too.
  logged meson setup --buildtype=plain -Doptimization=0 -Dunity=on -Dunity_size=8 --force-fallback-for=muster "$project/build" "$project"
  logged ninja -C "$project/build" program-shared program-static
  for kind in shared static; do check_output wrap $kind "$project/build/program-$kind"; done
  passed wrap "Meson unpacks the source archive, and programs with the shared and the static library run"
}

check_conan() {
  python_has conan || { left_out conan "pip cannot install Conan" && return; }
  export CONAN_HOME=$place/conan
  local conan=$place/venv/bin/conan shared folder reference
  mkdir -p "$CONAN_HOME/profiles" "$place/stub"
  # The pkg-config names are those of Conan Center. Meson takes the folder of Boost from its pkg-config file.
  cat >"$place/stub/conanfile.py" <<'PY'
import os
from conan import ConanFile

packages = {
    "cli11": ("CLI11", []), "fmt": ("fmt", ["fmt"]), "hdf5": ("hdf5", ["hdf5"]), "isa-l": ("libisal", ["isal"]), "re2": ("re2", ["re2"]),
    "xxhash": ("libxxhash", ["xxhash"]), "zlib": ("zlib", ["z"]), "zstd": ("libzstd", ["zstd"]),
}


class Stub(ConanFile):
    options = {"header_only": [True, False]}
    default_options = {"header_only": False}

    def package_id(self):
        self.info.clear()

    def package(self):
        os.symlink("/usr/include", os.path.join(self.package_folder, "include"))
        os.symlink("/usr/lib/x86_64-linux-gnu", os.path.join(self.package_folder, "lib"))

    def package_info(self):
        name, self.cpp_info.libs = packages.get(self.name, (self.name, []))
        self.cpp_info.set_property("pkg_config_name", name)
        if self.name == "hdf5":
            self.cpp_info.includedirs = ["include/hdf5/serial"]
            self.cpp_info.libdirs = ["lib/hdf5/serial"]
PY
  printf "[built-in options]\noptimization = '0'\nunity = 'on'\nunity_size = 8\n" >"$place/quick.ini"
  logged "$conan" profile detect
  cat >>"$CONAN_HOME/profiles/default" <<PROFILE
[conf]
tools.meson.mesontoolchain:extra_machine_files=["$place/quick.ini"]
tools.build:jobs=$(nproc)
tools.cmake.cmake_layout:test_folder=\$TMP
PROFILE
  logged "$conan" remote disable '*'
  # Of a range of versions, the stub has the lowest.
  for reference in $(grep -oE '"[a-z0-9_-]+/(\[>=)?[0-9.]+' "$here/conanfile.py" | tr -d '"[>='); do
    logged "$conan" export "$place/stub" --name "${reference%/*}" --version "${reference#*/}"
  done
  for shared in True False; do
    # Without Debian's own pkg-config files, which would hide a wrong name.
    PKG_CONFIG_LIBDIR=$place logged "$conan" create "$here" -s compiler.cppstd=20 -o "muster/*:shared=$shared" --build=missing
    grep -q '^rank 0: layer$' "$place/log" || failed conan "the program of test_package printed something else"
  done
  for folder in "$CONAN_HOME"/p/b/muste*/p; do
    logged "$folder/bin/muster" --version
    [ -x "$folder/libexec/muster/muster-hdf5-reader" ] || failed conan "the package lacks muster-hdf5-reader"
  done
  passed conan "'conan create' builds the shared and the static library with stubs of the dependencies, and test_package runs"
}

check_conda() {
  python_has py-rattler-build || { left_out conda "pip cannot install rattler-build" && return; }
  logged "$place/venv/bin/python" - "$here/recipe.yaml" <<'PY'
import sys
from rattler_build import Stage0Recipe, VariantConfig

compilers = "{c_compiler: [gcc], cxx_compiler: [gxx], c_stdlib: [sysroot], c_stdlib_version: ['2.28'], python: ['3.10.*', '3.12.*']}"
rendered = Stage0Recipe.from_file(sys.argv[1]).render(VariantConfig.from_yaml(compilers))
assert len(rendered) == 2, rendered
PY
  passed conda "rattler-build renders the recipe for two versions of Python"
}

check_spack() {
  [ -n "${SPACK_ROOT:-}" ] || { left_out spack "SPACK_ROOT names no checkout" && return; }
  # Spack downloads Clingo otherwise.
  python_has clingo || { left_out spack "pip cannot install Clingo" && return; }
  export SPACK_PYTHON=$place/venv/bin/python SPACK_USER_CACHE_PATH=$place/spack-cache
  export SPACK_USER_CONFIG_PATH=$place/spack SPACK_SYSTEM_CONFIG_PATH=$place/none
  local spack=$SPACK_ROOT/bin/spack external config
  mkdir -p "$place/spack" "$place/repo/packages/muster" "$place/spack-source"
  printf 'repo:\n  namespace: muster_check\n' >"$place/repo/repo.yaml"
  sed 's/"-Dtests=false"/&, "-Dunity=on", "-Dunity_size=8", "-Doptimization=0"/' "$here/package.py" >"$place/repo/packages/muster/package.py"
  printf 'repos:\n- %s\n' "$place/repo" >"$place/spack/repos.yaml"
  printf 'bootstrap:\n  enable: false\n' >"$place/spack/bootstrap.yaml"
  printf 'config:\n  install_tree: {root: %s}\n  build_stage: [%s]\n' "$place/spack-tree" "$place/spack-stage" >"$place/spack/config.yaml"
  printf 'packages:\n  all: {providers: {zlib-api: [zlib], pkgconfig: [pkg-config], mpi: [mpich]}}\n' >"$place/spack/packages.yaml"
  # As Debian 12 has them.
  for external in boost@1.74.0 cli11@2.1.2 cmake@3.25.1 fmt@9.1.0 hdf5@1.10.8~mpi isa-l@2.30.0 meson@1.0.1 mpich@4.0.2 ninja@1.11.1 \
    nlohmann-json@3.11.2 pkg-config@1.8.1 python@3.11.2 re2@2022-06-01 xxhash@0.8.1 zlib@1.2.13 zstd@1.5.4; do
    printf '  %s: {buildable: false, externals: [{spec: %s, prefix: /usr}]}\n' "${external%%@*}" "$external" >>"$place/spack/packages.yaml"
  done
  logged "$spack" compiler find /usr/bin
  logged "$spack" spec "muster@$version+mpi+cuda+python"
  git -C "$source" archive HEAD | tar -x -C "$place/spack-source"
  (cd "$place/spack-source" && logged "$spack" dev-build "muster@$version~mpi~cuda~python")
  config=$(find "$place/spack-tree" -name muster.pc)
  local flags
  read -ra flags < <(PKG_CONFIG_PATH=${config%/*} pkg-config --cflags --libs muster)
  logged "${CXX:-c++}" -std=c++20 "$methods/program.cpp" -o "$place/spack-program" "${flags[@]}" "-Wl,-rpath,${config%/pkgconfig/*}"
  check_output spack shared "$place/spack-program"
  passed spack "all variants resolve, and 'spack dev-build' installs a library with which a program runs"
}

check_nix() {
  if ! command -v nix-instantiate >/dev/null; then
    DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends nix-bin >"$place/log" 2>&1 || { left_out nix "apt-get cannot install nix-bin" && return; }
  fi
  logged nix-instantiate --parse "$here/flake.nix"
  passed nix "the flake is a valid expression"
}

check_vcpkg() {
  local installed=$place/vcpkg/packages ports
  mkdir -p "$installed/libexec/muster"
  touch "$installed/libexec/muster/muster-hdf5-reader"
  # The functions that the portfile calls, with no effect.
  {
    sed -nE 's/^(vcpkg_[a-z_]+)\(.*/function(\1)\nendfunction()/p' "$here/vcpkg/portfile.cmake"
    printf 'set(CURRENT_PACKAGES_DIR "%s")\ninclude("%s")\n' "$installed" "$here/vcpkg/portfile.cmake"
  } >"$place/vcpkg/port.cmake"
  logged cmake -P "$place/vcpkg/port.cmake"
  [ -e "$installed/tools/muster/hdf5/muster-hdf5-reader" ] || failed vcpkg "the HDF5 reader is not beside the command"
  ports=$(python3 -c 'import json, sys; print(*(each if isinstance(each, str) else each["name"] for each in json.load(open(sys.argv[1]))["dependencies"]))' "$here/vcpkg/vcpkg.json")
  passed vcpkg "the manifest is JSON, and CMake runs the portfile with functions that do nothing"
  [ -n "${VCPKG_ROOT:-}" ] || { left_out "names of vcpkg" "VCPKG_ROOT names no checkout" && return; }
  for port in $ports; do [ -e "$VCPKG_ROOT/ports/$port/vcpkg.json" ] || failed vcpkg "there is no port $port"; done
  sed -nE 's/^(vcpkg_[a-z_]+)\(.*/\1/p' "$here/vcpkg/portfile.cmake" | while read -r function; do
    grep -rqE "^ *function\($function\b" "$VCPKG_ROOT/scripts/cmake" "$VCPKG_ROOT"/ports/vcpkg-* || failed vcpkg "there is no function $function"
  done
  passed "names of vcpkg" "vcpkg has the ports and the functions"
}

[ $# -gt 0 ] || set -- wrap conan conda spack nix vcpkg
for recipe in "$@"; do
  [[ $recipe =~ ^(wrap|conan|conda|spack|nix|vcpkg)$ ]] || failed "$recipe" "there is no such recipe"
  "check_$recipe"
done
