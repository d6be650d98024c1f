#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: exports.sh VERSION SOVERSION HEADER... > MAP
# Writes what Muster's libraries export, as the linker's version script. What the headers declare is for programs; what
# else is in namespace muster is for its own libraries and tests, under another name in each version. All else is local.
set -euo pipefail
version=$1 soversion=$2
shift 2
# The headers are formatted: classes and functions of a namespace are at the begin of a line. A namespace of its own
# (`namespace muster::dist {`) is for programs as a whole.
namespaces=$(sed -nE 's/^namespace muster::(\w+) .*/\1/p' "$@" | sort -u)
classes=$(sed -nE 's/^(class|struct) (\w+).*/\2/p' "$@" | sort -u)
functions=$(sed -nE 's/^[^ ("/][^("/]* [*&]?([a-z0-9_]+)\(.*/\1/p' "$@" | sort -u)
# Where two patterns fit, the later one counts.
cat <<END
MUSTER_PRIVATE_$version {
  global:
    extern "C++" { muster::*; *?for?muster::*; *?thunk?to?muster::*; };
    muster_hdf5_*; muster_cuda_*; muster_mpi_*;
  local: *;
};
MUSTER_$soversion {
  global:
    extern "C++" {
$(for name in $namespaces; do echo "      muster::$name::*; *?for?muster::$name::*;"; done)
$(for name in $classes; do echo "      muster::$name::*; *?for?muster::$name;"; done)
$(for name in $functions; do echo "      muster::$name[!a-z0-9_]*; muster::detail::$name[!a-z0-9_]*;"; done)
      muster::operator[!a-z]*;
    };
};
END
