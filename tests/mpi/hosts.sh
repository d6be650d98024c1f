#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Simulates several hosts on one machine, for MPI. Each host is a set of namespaces (network, UTS, IPC, PID, mounts)
# with its own /dev/shm. A bridge in one more network namespace joins them, and mpiexec runs there. Nothing is visible
# outside, so several such networks can exist at the same time. All of it ends with the process that created it, however
# that process ends. The hosts share all files, as on a file system that all of them mount.
#
# Needs root, iproute2 and util-linux. Exits with status 77 if namespaces cannot be created.
set -euo pipefail

usage() {
  cat <<'END'
usage: hosts.sh with N COMMAND...   make hosts h1 to hN and run a command beside them, which may call the following:
       hosts.sh run [MPIEXEC-ARGUMENT...]     mpiexec (launch.sh) over all hosts: -n 4 -ppn 2 ...
       hosts.sh on HOST COMMAND...            on one host
       hosts.sh limit RATE                    of each host's link, both ways: 1gbit; none: as fast as it goes
       hosts.sh cut HOST, mend HOST           pull the plug of its link; put it back
       hosts.sh bytes HOST                    bytes that it has sent and received, two numbers
       hosts.sh up N, down ID                 hosts that stay, for looking around by hand: up prints an ID, and with
                                              MUSTER_HOSTS=ID in the environment the others work from anywhere

Example: hosts.sh with 2 bash -c 'hosts.sh limit 1gbit; hosts.sh run -n 4 -ppn 2 ./program'
END
}

self=$(readlink -f "${BASH_SOURCE[0]}")
here=${self%/*}

die() {
  printf 'hosts.sh: %s\n' "$*" >&2
  exit 2
}

skip() {
  printf 'hosts.sh: skipped: %s\n' "$*" >&2
  exit 77
}

number() { # the number of a host: 2 for h2
  [[ $1 =~ ^h([1-9][0-9]*)$ ]] && [ "${BASH_REMATCH[1]}" -le "$(cat "$MUSTER_HOSTS/count")" ] || die "there is no host $1"
  printf '%s' "${BASH_REMATCH[1]}"
}

# Runs inside the network's namespaces as their first process. When it ends, all their processes end.
keep() {
  local count=$1 host
  shift
  mount --bind "$MUSTER_HOSTS/hosts" /etc/hosts
  ip link set lo up
  ip link add bridge0 type bridge
  ip address add 10.77.0.254/24 dev bridge0
  ip link set bridge0 up
  for ((host = 1; host <= count; host++)); do
    unshare --net --uts --ipc --mount --pid --fork --kill-child --mount-proc bash -c "
      hostname h$host; mount -t tmpfs -o size=256m none /dev/shm; ip link set lo up; exec sleep infinity" &
    # The sleep process is the child of unshare.
    local pid=''
    for ((turn = 0; turn < 1000; turn++)); do
      pid=$(cat "/proc/$!/task/$!/children" 2>/dev/null) && pid=${pid%% *}
      [ -z "$pid" ] || [ "$(cat "/proc/$pid/comm" 2>/dev/null)" != sleep ] || break
      sleep 0.005
    done
    echo "$pid" >"$MUSTER_HOSTS/h$host"
    ip link add "port$host" type veth peer name eth0 netns "$pid"
    ip link set "port$host" master bridge0 up
    nsenter --target "$pid" --net ip address add "10.77.0.$host/24" dev eth0
    nsenter --target "$pid" --net ip link set eth0 up
  done
  export MUSTER_HOSTS_INSIDE=$MUSTER_HOSTS
  local status=0
  "$@" || status=$?
  return "$status"
}

with() {
  local count=$1
  shift
  [[ $count =~ ^[1-9][0-9]?$ ]] || die "1 to 99 hosts can be made, not $count"
  [ "$(id -u)" -eq 0 ] || skip "making hosts needs root"
  for tool in ip tc unshare nsenter; do command -v "$tool" >/dev/null || skip "no $tool here"; done
  "$here/launch.sh" --check || exit
  unshare --net --uts --ipc --mount --pid --fork true 2>/dev/null || skip "namespaces cannot be made here"
  MUSTER_HOSTS=$(mktemp -d /tmp/muster-hosts-XXXXXX)
  export MUSTER_HOSTS
  # Deletes the folders of killed runs. They leave nothing else.
  find /tmp -maxdepth 1 -name 'muster-hosts-*' -mmin +600 -exec rm -rf {} + 2>/dev/null || true
  echo "$count" >"$MUSTER_HOSTS/count"
  echo '127.0.0.1 localhost' >"$MUSTER_HOSTS/hosts"
  echo '10.77.0.254 switch' >>"$MUSTER_HOSTS/hosts"
  for ((host = 1; host <= count; host++)); do echo "10.77.0.$host h$host" >>"$MUSTER_HOSTS/hosts"; done
  local status=0
  unshare --net --mount --pid --fork --kill-child --mount-proc "$self" keep "$count" "$@" || status=$?
  rm -rf "$MUSTER_HOSTS"
  return "$status"
}

up() {
  local before
  before=$(mktemp)
  setsid "$self" with "$1" bash -c 'echo "$MUSTER_HOSTS" >"$0"; exec sleep infinity' "$before" >/dev/null 2>&1 </dev/null &
  for ((turn = 0; turn < 1000 && $(stat -c %s "$before") == 0; turn++)); do sleep 0.01; done
  MUSTER_HOSTS=$(cat "$before")
  rm -f "$before"
  [ -n "$MUSTER_HOSTS" ] || die "the hosts were not made"
  echo "$MUSTER_HOSTS"
}

# The first process of a network, seen from outside.
keeper() {
  local process
  process=$(pgrep -f "^bash $self keep .*|^/usr/bin/env bash $self keep .*" | while read -r candidate; do
    grep -zqx "MUSTER_HOSTS=$1" "/proc/$candidate/environ" 2>/dev/null && [ "$(ps -o comm= -p "$(ps -o ppid= -p "$candidate")")" = unshare ] &&
      echo "$candidate"
  done | head -1)
  [ -n "$process" ] || die "there are no hosts $1"
  echo "$process"
}

inside() { # everything except the creation of hosts runs there
  [ -n "${MUSTER_HOSTS:-}" ] || die "no hosts here: hosts.sh with N COMMAND..."
  [ "${MUSTER_HOSTS_INSIDE:-}" != "$MUSTER_HOSTS" ] || return 0
  MUSTER_HOSTS_INSIDE=$MUSTER_HOSTS exec nsenter --target "$(keeper "$MUSTER_HOSTS")" --net --mount --pid --wd="$PWD" "$self" "$@"
}

on() {
  local pid
  number "$1" >/dev/null
  pid=$(cat "$MUSTER_HOSTS/$1")
  shift
  exec nsenter --target "$pid" --net --uts --ipc --mount --pid --wd="$PWD" "$@"
}

limit() {
  local host pid device
  for ((host = 1; host <= $(cat "$MUSTER_HOSTS/count"); host++)); do
    pid=$(cat "$MUSTER_HOSTS/h$host")
    # Limits the data that the host sends, and the data that the switch sends to it.
    for device in "nsenter --target $pid --net tc|eth0" "tc|port$host"; do
      ${device%|*} qdisc delete dev "${device#*|}" root 2>/dev/null || true
      [ "$1" = none ] || ${device%|*} qdisc add dev "${device#*|}" root tbf rate "$1" burst 256kb latency 20ms ||
        skip "this kernel has no token bucket filter (sch_tbf)"
    done
  done
}

run() {
  local names='' host
  for ((host = 1; host <= $(cat "$MUSTER_HOSTS/count"); host++)); do names+=${names:+,}h$host; done
  exec "$here/launch.sh" --over "$names" "$@"
}

command=${1:-}
[ $# -eq 0 ] || shift
case $command in
  with) with "$@" ;;
  keep) keep "$@" ;;
  up) up "$@" ;;
  down) kill -KILL "$(keeper "$1")" && rm -rf "$1" ;;
  run | on | limit | cut | mend | bytes)
    inside "$command" "$@"
    case $command in
      run) run "$@" ;;
      on) on "$@" ;;
      limit) limit "$@" ;;
      cut) ip link set "port$(number "$1")" down ;;
      mend) ip link set "port$(number "$1")" up ;;
      # The bytes that the switch has received are those that the host has sent.
      bytes) awk -v port="port$(number "$1"):" '$1 == port {print $2, $10}' /proc/net/dev ;;
    esac
    ;;
  -h | --help | '') usage ;;
  *) die "no such command: $command (hosts.sh --help)" ;;
esac
