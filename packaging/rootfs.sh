# SPDX-License-Identifier: Apache-2.0
# Debian root file systems in the folder $work. Sourced after tools/lib.sh by the scripts that make or check packages.

# root_file_system NAME PACKAGES [SUITE [ARCHITECTURE]]: makes one with these packages, unless it has been made. The default is
# Debian 12 for the processor of this machine.
root_file_system() {
  [ "$(id -u)" = 0 ] || die "making a root file system needs root: run it as root"
  install_missing mmdebstrap arch-test iproute2
  if [ "$(cat "$work/$1.made-of" 2>/dev/null)" = "$*" ] && [ -e "$work/$1.tar" ]; then return 0; fi
  say "making the root file system '$1'"
  rm -rf "$work/$1.part"
  mmdebstrap -q --variant=minbase --architectures="${4:-$(dpkg --print-architecture)}" --include="$2" "${3:-bookworm}" "$work/$1.part" >"$work/$1.log" 2>&1 || {
    rm -rf "$work/$1.part"
    tail -n 20 "$work/$1.log" >&2
    die "mmdebstrap failed: the log is $work/$1.log"
  }
  tar -C "$work/$1.part" --exclude='./dev/*' -cf "$work/$1.tar.part" .
  rm -rf "$work/$1.part"
  mv "$work/$1.tar.part" "$work/$1.tar"
  echo "$*" >"$work/$1.made-of"
}

unpack_root_file_system() { # NAME FOLDER
  tar -C "$2" -xf "$work/$1.tar"
  chmod 755 "$2"
}

# run_in FOLDER [with-network] SCRIPT: runs the script in namespaces of its own, whose mounts end with it.
run_in() {
  local folder=$1 network=--net
  shift
  if [ "$1" = with-network ]; then
    network=
    shift
  fi
  printf 'set -eo pipefail\n%s\n' "$1" >"$folder/run.sh"
  # shellcheck disable=SC2086
  unshare --mount --pid --ipc $network --kill-child bash -c '
    set -e
    [ "$2" = "" ] || ip link set lo up
    mount -t tmpfs tmpfs "$1/dev"
    for name in null zero full urandom random tty; do
      touch "$1/dev/$name"
      mount --bind "/dev/$name" "$1/dev/$name"
    done
    ln -s /proc/self/fd "$1/dev/fd"
    mkdir "$1/dev/shm"
    mount -t tmpfs tmpfs "$1/dev/shm"
    mount -t proc proc "$1/proc"
    mount -t tmpfs tmpfs "$1/tmp"
    exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 chroot "$1" bash /run.sh' \
    bash "$folder" "$network"
}
