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

skip() { echo "SKIPPED: $*" >&2; exit 77; }
fail() { echo "FAILED: $*" >&2; exit 1; }
# Removes the variables of a job in which this test runs.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT MUSTER_JOB

work=$(mktemp -d "${TMPDIR:-/tmp}/muster-minilm-XXXXXX") || fail "no temporary directory"
trap 'rm -rf "$work"' EXIT

command -v "$python" > /dev/null || skip "no Python ($python) to fetch the model with"
status=0
model=$("$python" "$(dirname "${BASH_SOURCE[0]}")/minilm.py") || status=$?
[ $status != 77 ] || skip "the model is not available"
[ $status = 0 ] || fail "minilm.py: status $status"

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
