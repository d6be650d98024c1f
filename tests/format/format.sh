#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks the format of the given sources, or of all sources in git: format.sh SOURCE-ROOT [FILE...]
# Versions of clang-format differ in details, so only one version decides.
set -euo pipefail
cd "$1"
shift
major=$(clang-format --version 2>/dev/null | sed -n 's/.*version \([0-9]*\).*/\1/p')
if [ "$major" != 14 ]; then
  echo "skipped: the format is checked with clang-format 14; here is ${major:-none}"
  exit 77
fi
if [ $# -gt 0 ]; then
  exec clang-format --dry-run -Werror "$@"
fi
git rev-parse --git-dir >/dev/null 2>&1 || {
  echo "skipped: the format is checked over the files that git knows; this is no git checkout"
  exit 77
}
git ls-files -z '*.cpp' '*.hpp' | xargs -0 -r clang-format --dry-run -Werror
