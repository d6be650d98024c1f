# SPDX-License-Identifier: Apache-2.0
# Functions that ./tools/demo and ./tools/test share. Sourced by bash.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The lists of Debian packages. cmake is included because Meson finds some of the libraries only through it.
build_packages=(g++ meson ninja-build pkg-config cmake libboost-dev libfmt-dev libxxhash-dev libre2-dev nlohmann-json3-dev libcli11-dev libhdf5-dev libisal-dev libzstd-dev zlib1g-dev libmpich-dev)
test_packages=(doctest-dev clang-format python3-dev python3-pip python3-venv python3-torch hdf5-tools libfuse3-dev fuse3 mpich iproute2 util-linux)
tidy_packages=(clang-tidy)
fuzz_packages=(clang)

project_version() { sed -nE "s/^  version: '(.*)',/\1/p" "$root/meson.build"; }

say() { printf '== %s\n' "$*"; }
die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 2
}

# install_missing PACKAGE...: installs missing packages; uses the network only if one is missing.
install_missing() {
  if ! command -v dpkg-query >/dev/null; then
    say "not a Debian system: these have to be there already: $*"
    return 0
  fi
  local package missing=()
  for package in "$@"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || die "missing packages, and no sudo to install them: ${missing[*]}"
    as_root=(sudo)
  fi
  say "installing Debian packages: ${missing[*]}"
  "${as_root[@]}" apt-get update -q
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${missing[@]}"
}

# build DIR [MESON-OPTION...]: configures the build if necessary, and compiles. CC and CXX take effect on the first
# call.
build() {
  local dir=$1
  shift
  if [ ! -f "$dir/build.ninja" ]; then
    rm -rf "$dir"
    say "configuring $(basename "$dir")"
    meson setup "$@" "$dir" "$root" >"$dir.log" 2>&1 || {
      cat "$dir.log" >&2
      rm -f "$dir.log"
      die "configuring $dir failed"
    }
    mv "$dir.log" "$dir/setup.log"
  elif [ -n "$(find "$root/include/muster" "$root/tools" "$root/tests" -type d -newer "$dir/build.ninja" -print -quit)" ]; then
    # For new files: some lists of files are made when the build is configured.
    meson setup --reconfigure "$@" "$dir" "$root" >"$dir/setup.log" 2>&1 || {
      cat "$dir/setup.log" >&2
      die "configuring $dir again failed"
    }
  fi
  say "building in $(basename "$dir")"
  local started=$SECONDS
  ninja -C "$dir" >"$dir/ninja.log" 2>&1 || {
    grep -v '^\[' "$dir/ninja.log" >&2
    die "building in $dir failed"
  }
  say "built in $((SECONDS - started)) s"
}
