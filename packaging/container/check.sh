#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: check.sh [PROGRAM]
# Checks files that need other machines: export.yaml by the schemas of Kubernetes, the workflows by the schema of GitHub,
# and the command of the two pods in two network namespaces, with the program `muster` on PATH or PROGRAM. It needs root.
# check-image.sh builds the image. tests/mpi/slurm.sh submits export.sbatch.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
program=$(readlink -f "${1:-$(command -v muster)}")
place=$(mktemp -d)
hosts=(muster-check-$$-0 muster-check-$$-1)
made_data=$([ -e /data ] || echo /data)
trap '[ -z "$made_data" ] || rmdir "$made_data" 2>/dev/null || true; for host in "${hosts[@]}"; do ip netns del "$host" 2>/dev/null || true; done; rm -rf "$place"' EXIT

python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q check-jsonschema kubernetes-validate pyyaml
"$place/venv/bin/kubernetes-validate" "$here/export.yaml"
"$place/venv/bin/check-jsonschema" --builtin-schema vendor.github-workflows "$here"/../../.github/workflows/*.yml
# The command, as a pod runs it.
"$place/venv/bin/python" - "$here/export.yaml" >"$place/command" <<'END'
import sys, yaml
job = [each for each in yaml.safe_load_all(open(sys.argv[1])) if each["kind"] == "Job"][0]
print(job["spec"]["template"]["spec"]["containers"][0]["command"][2])
END

mkdir "$place/data" "$place/bin"
ln -s "$program" "$place/bin/muster"
PATH=$place/bin:$PATH
python3 "$here/../../examples/make_model.py" "$place/data/source"
muster shard "$place/data/source" --to tp=4,pp=2 --plan auto --out "$place/data/shards" >/dev/null
for host in "${hosts[@]}"; do ip netns add "$host" && ip -n "$host" link set lo up; done
ip link add "mc$$-0" netns "${hosts[0]}" type veth peer name "mc$$-1" netns "${hosts[1]}"
for index in 0 1; do
  ip -n "${hosts[$index]}" addr add "10.213.7.$((index + 1))/24" dev "mc$$-$index"
  ip -n "${hosts[$index]}" link set "mc$$-$index" up
done
printf '127.0.0.1 localhost\n10.213.7.1 muster-export-0.muster-export\n' >"$place/hosts"
pod() { # INDEX: runs the command with the names, the host name and the volume of a pod
  ip netns exec "${hosts[$1]}" unshare --mount --uts bash -c '
    hostname "muster-export-$2" && mount --bind "$1/hosts" /etc/hosts && mkdir -p /data && mount --bind "$1/data" /data &&
    JOB_COMPLETION_INDEX=$2 exec sh -c "$(cat "$1/command")"' bash "$place" "$1"
}
pod 1 &
pod 0
wait $!
muster diff "$place/data/source" "$place/data/model"
echo "the examples work"
