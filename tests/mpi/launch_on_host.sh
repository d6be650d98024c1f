#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Stands in for ssh when mpiexec starts processes: [OPTION...] HOST COMMAND..., where the command is text for the host's
# shell.
set -euo pipefail
while [[ ${1:-} == -* ]]; do shift; done
host=$1
shift
exec "$(dirname "${BASH_SOURCE[0]}")/hosts.sh" on "$host" sh -c "exec $*"
