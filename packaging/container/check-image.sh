#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: check-image.sh [DIST]
# Builds the image with buildah from the wheel of Python 3.11 in DIST (build-wheels/dist), and exports shards in it as
# its user. The base image is made from Debian's packages, so no registry is needed. It needs root, and keeps that base
# in build-container.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../tools/lib.sh"
source "$root/packaging/rootfs.sh"
dist=$(cd "${1:-$root/build-wheels/dist}" && pwd)
wheel=$(ls "$dist/muster-$(project_version)"-cp311-*_"$(uname -m)".whl) || die "Debian's Python is 3.11: build its wheel first, by tools/wheels --python 3.11"
work=$root/build-container
mkdir -p "$work"
root_file_system base apt
install_missing buildah
place=$(mktemp -d)
trap 'rm -rf --one-file-system "$place"' EXIT

# Nothing stays in the storage of the user, and no mount remains if the check is killed.
image() { buildah --root "$place/storage" --runroot "$place/run" --storage-driver vfs "$@"; }
container=$(image from scratch)
image add -q "$container" "$work/base.tar" / >/dev/null
# The published base image has such settings. Without them, the image would contain files that it does not have in fact.
echo 'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };
Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";' >"$place/apt"
printf 'path-exclude /usr/share/%s/*\n' doc locale man >"$place/dpkg"
image add -q "$container" "$place/apt" /etc/apt/apt.conf.d/docker-clean >/dev/null
image add -q "$container" "$place/dpkg" /etc/dpkg/dpkg.cfg.d/docker >/dev/null
image commit -q --rm "$container" debian:bookworm-slim >/dev/null
mkdir -p "$place/context/build-wheels/dist"
cp "$wheel" "$place/context/build-wheels/dist/"
say "building the image"
image build --isolation chroot --pull-never -f "$root/packaging/container/Containerfile" -t muster "$place/context" \
  >"$work/build.log" 2>&1 || {
  tail -n 20 "$work/build.log" >&2
  die "the image was not built: the log is $work/build.log"
}

# The volume belongs to the group of the user, as with fsGroup in export.yaml.
mkdir -m 2775 "$place/data"
chgrp 1000 "$place/data"
container=$(image from --pull-never muster)
image run --isolation chroot --volume "$root/examples:/examples:ro" --volume "$place/data:/data" "$container" -- sh -euc '
  [ "$(id -u)" = 1000 ]
  muster --version
  python -c "import muster; assert muster.__version__"
  python /examples/make_model.py /data/source
  muster shard /data/source --to tp=4,pp=2 --plan auto --out /data/shards >/dev/null
  muster run -n 4 -- muster export /data/shards --out /data/model
  muster diff /data/source /data/model'
base=$(image from --pull-never debian:bookworm-slim)
size() { du -sm "$(image mount "$1")" | cut -f 1; }
size_after=$(size "$container")
size_before=$(size "$base")
added=$((size_after - size_before))
image umount --all >/dev/null
say "the image works, and adds $added MiB to its base (at most 100)"
[ "$added" -le 100 ]
