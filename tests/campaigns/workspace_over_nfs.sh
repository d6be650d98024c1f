#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# workspace_over_nfs.sh BUILD [COUNT] [SEED]: runs workspace_campaign over NFS. It starts nfs-ganesha on free ports of
# this host, mounts its export twice with nfs_mount (each with a cache of 3 s) like two hosts, and distributes the ranks
# over both. Needs root, nfs-ganesha-vfs and rpcbind, /dev/fuse, and a build with libnfs and libfuse3. Run it by hand.
set -eu
build=$1
count=${2:-10}
seed=${3:-1}
for program in ganesha.nfsd rpcbind fusermount3; do
  command -v "$program" > /dev/null || { echo "skipped: $program is not installed"; exit 77; }
done
[ -x "$build/tests/campaigns/nfs_mount" ] || { echo "skipped: nfs_mount was not built (libnfs, libfuse3)"; exit 77; }

work=$(mktemp -d)
started=()
finish() {
  for point in "$work/a" "$work/b"; do fusermount3 -u -z "$point" 2> /dev/null || true; done
  for pid in "${started[@]}"; do kill "$pid" 2> /dev/null || true; done
  for pid in "${started[@]}"; do wait "$pid" 2> /dev/null || true; done
  rm -rf "$work"
}
trap finish EXIT
mkdir "$work/export" "$work/a" "$work/b"

cat > "$work/ganesha.conf" << END
NFS_CORE_PARAM {
  Protocols = 3;
  NFS_Port = 22049;
  MNT_Port = 22050;
  Enable_NLM = false;
  Enable_RQUOTA = false;
  Bind_addr = 127.0.0.1;
}
NFS_KRB5 { Active_krb5 = false; }
EXPORT {
  Export_Id = 7;
  Path = $work/export;
  Pseudo = /workspace;
  Access_Type = RW;
  Squash = No_Root_Squash;
  SecType = sys;
  Protocols = 3;
  Transports = TCP;
  FSAL { Name = VFS; }
}
END
if ! rpcinfo -p 127.0.0.1 > /dev/null 2>&1; then
  mkdir -p /run/rpcbind
  rpcbind -f &
  started+=($!)
  sleep 1
fi
ganesha.nfsd -F -f "$work/ganesha.conf" -L "$work/ganesha.log" -p "$work/ganesha.pid" &
started+=($!)

for point in "$work/a" "$work/b"; do
  for try in $(seq 40); do
    "$build/tests/campaigns/nfs_mount" 127.0.0.1 "$work/export" "$point" 3 2> "$work/mount.log" &
    mount_pid=$!
    sleep 0.5
    if kill -0 "$mount_pid" 2> /dev/null && mountpoint -q "$point"; then
      started+=("$mount_pid")
      break
    fi
    wait "$mount_pid" 2> /dev/null || true
    if [ "$try" = 40 ]; then
      cat "$work/mount.log" >&2
      tail -n 5 "$work/ganesha.log" >&2
      exit 1
    fi
  done
done
status=0
"$build/tests/campaigns/workspace_campaign" "$count" "$seed" "$work/a/w" "$work/b/w" || status=$?
exit "$status"
