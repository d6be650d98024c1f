# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts of this folder.

failures=0
# check WHAT CONDITION...: a failed one is told, and the rest still runs.
check() {
  local what=$1
  shift
  "$@" || {
    echo "FAILED: $what"
    failures=$((failures + 1))
  }
}
