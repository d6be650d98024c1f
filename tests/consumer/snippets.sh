#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: snippets.sh SOURCE-ROOT COMPILER-WITH-FLAGS...
# Compiles the C++ examples in README.md and the manuals. Each block is compiled as the body of a function, after
# declarations of the names in its text. A block that is marked as a program is compiled on its own.
set -euo pipefail
root=$1
shift
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cat >"$place/names.hpp" <<'END'
#include <muster/muster.hpp>
struct CUstream_st;
inline std::shared_ptr<muster::SyncGroup> group;
inline std::vector<int> ranks;
inline int rank, size, step;
inline std::string run_id;
inline muster::Config layer;
inline std::vector<muster::Config> layers;
inline muster::Tensor weight, gradient, shard;
inline const void *data, *device_pointer;
inline CUstream_st* stream;
inline std::vector<float> scales;
inline muster::NFSWorkspace workspace;
inline muster::LayerSource next_layer;
inline muster::LayerConsumer consume;
muster::Config quantised(const muster::Config&);
void train_one_step();
std::string name_of(int rank, const std::string& path);
template <class... Values>
void use(const Values&...) {}
END
count=0
for document in README.md $(find docs -name "*.md" | sort); do
  awk -v document="$document" '
    /^```cpp$/ {
      inside = 1
      body = body sprintf("void snippet_%d();\nvoid snippet_%d() {\n#line %d \"%s\"\n", NR, NR, NR + 1, document)
      next
    }
    /^```cpp program$/ {
      inside = 1
      body = body sprintf("namespace snippet_%d {\n#line %d \"%s\"\n", NR, NR + 1, document)
      next
    }
    /^```$/ && inside { inside = 0; body = body "}\n"; next }
    inside && /^#include/ { head = head $0 "\n"; body = body "\n"; next }
    inside { body = body $0 "\n" }
    END { printf "%s#include \"names.hpp\"\n%s", head, body }' "$root/$document" >"$place/snippets.cpp"
  "$@" -std=c++20 -fsyntax-only -Wall -Wextra -Werror -Wno-unused -I"$place" "$place/snippets.cpp"
  count=$((count + $(grep -cE '^(void|namespace) .* \{$' "$place/snippets.cpp")))
done
[ "$count" -ge 10 ]
echo "$count snippets compile"
