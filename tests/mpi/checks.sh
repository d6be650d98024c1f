# SPDX-License-Identifier: Apache-2.0
# The scripts of this folder source this file.

failures=0
# check WHAT CONDITION...: reports a failed condition, and continues.
check() {
  local what=$1
  shift
  "$@" || {
    echo "FAILED: $what"
    failures=$((failures + 1))
  }
}
