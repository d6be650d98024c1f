#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# muster verify, muster diff and muster fingerprint in scripts: exit statuses 0, 1 and 2, the streams of the output,
# valid JSON, shards against models, and checksums that survive a failed write.
#   MUSTER_PROGRAM, MUSTER_DEMO_MODEL: the programs under test
set -u
source "$(dirname "$0")/cli.sh"

"$demo" model --megabytes 3 > /dev/null || fail "no demo model"
"$program" shard model --to 3 --plan llama --out shards > /dev/null || fail "shard"
"$program" shard model --to 4 --plan llama --out four > /dev/null || fail "shard into four"
"$program" export shards --plan llama --out parts --max-shard-size 1MB > /dev/null || fail "export"

"$program" shard model --to tp=2,pp=2 --plan llama --out stages > /dev/null || fail "shard into stages"

# Verification.
says 0 "good: " "$program" verify model
first=$(ls model/*.safetensors | head -1)
says 0 "good: " "$program" verify "$first"
says 0 "good: " "$program" verify parts
says 0 "good: " "$program" verify shards
says 0 '"good": true' "$program" verify parts --json
says 0 "good: " "$program" verify stages
says 2 "does not exist" "$program" verify nowhere
says 2 "no *.safetensors" "$program" verify .log
says 2 "cannot be combined with" "$program" verify parts --headers-only --write-checksums
says 2 "not the directory of a checkpoint" "$program" verify shards --write-checksums

says 0 "checksums written" "$program" verify parts --write-checksums
says 0 "checksums checked" "$program" verify parts
says 0 "not checked" "$program" verify parts --headers-only
last=$(ls parts/*.safetensors | tail -1)
flip "$last" $(($(stat -c %s "$last") - 1000))
says 1 "checksum mismatch: data is corrupted" "$program" verify parts
says 0 "not checked" "$program" verify parts --headers-only
says 1 '"defect": "checksum"' "$program" verify parts --json
flip "$last" $(($(stat -c %s "$last") - 1000))
says 0 "checksums checked" "$program" verify parts
says 0 "same" "$program" diff model parts

# A run that fails or is killed while it writes checksums keeps the existing ones.
cp parts/muster.checksums.json .log/sums
for fault in pwrite:ENOSPC fsync:EIO rename:EIO; do
  says 2 "muster.checksums.json" env MUSTER_FAULT=$fault:1 "$program" verify parts --write-checksums
  cmp -s parts/muster.checksums.json .log/sums || fail "$fault changed the checksums"
done
[ "$(ls parts | grep -c partial)" = 0 ] || fail "left behind: $(ls parts)"
for delay in 0.001 0.003 0.01 0.03; do
  { timeout -s KILL $delay "$program" verify parts --write-checksums; } > /dev/null 2>&1
  cmp -s parts/muster.checksums.json .log/sums || fail "killed after $delay: other checksums"
  says 0 "checksums checked" "$program" verify parts
done

mv "$last" .log/last
says 1 "$(basename "$last")\" does not exist" "$program" verify parts
head -c 100 .log/last > "$last"
says 1 "file: " "$program" verify parts
mv .log/last "$last"
cp shards/rank-00001-of-00003.safetensors .log/rank
cp shards/rank-00000-of-00003.safetensors shards/rank-00001-of-00003.safetensors
says 1 "the metadata records rank 0 of 3, which contradicts the name" "$program" verify shards
cp .log/rank shards/rank-00001-of-00003.safetensors

# Comparison.
says 0 "same" "$program" diff model shards --plan llama
says 0 "same" "$program" diff shards four --plan llama
says 0 "same" "$program" diff four parts --plan auto
says 0 "same" "$program" diff model stages --plan auto
says 0 "same" "$program" diff stages four --plan llama
cp four/rank-00003-of-00004.safetensors stages/
says 1 "the layout" "$program" verify stages
says 2 "the shards have different layouts" "$program" diff model stages --plan auto
says 0 '"same": true' "$program" diff four parts --plan auto --json
says 0 "same" "$program" diff model shards
says 2 "bert, falcon, gpt, " "$program" diff model shards --plan lama
says 2 "no rule matches" "$program" diff model shards --plan bert

# Fingerprints: the same for each layout, and of all tensors.
"$program" fingerprint model > .log/model.fingerprint || fail "fingerprint"
for other in parts shards four "shards --plan llama"; do
  "$program" fingerprint $other | cmp -s - .log/model.fingerprint || fail "another fingerprint: $other"
  says 0 "same: " "$program" fingerprint $other --check .log/model.fingerprint
done
says 0 '"same": true' "$program" fingerprint four --check .log/model.fingerprint --json
flip "$first" $(($(stat -c %s "$first") - 100))
says 1 "content differs" "$program" fingerprint model --check .log/model.fingerprint
says 1 '"kind": "content"' "$program" fingerprint model --check .log/model.fingerprint --json
flip "$first" $(($(stat -c %s "$first") - 100))
"$program" export model --dtype F32 --out cast > /dev/null || fail "export with a cast"
"$program" fingerprint cast > .log/cast.fingerprint || fail "fingerprint of a cast"
says 1 "dtype differs" "$program" fingerprint model --check .log/cast.fingerprint
for other in model parts shards; do
  says 0 "same: " "$program" fingerprint $other --dtype f32 --check .log/cast.fingerprint
done
head -c -1 .log/model.fingerprint > .log/torn
says 2 "malformed fingerprint" "$program" fingerprint model --check .log/torn
says 2 "does not exist" "$program" fingerprint model --check nowhere
flip shards/rank-00002-of-00003.safetensors $(($(stat -c %s shards/rank-00002-of-00003.safetensors) - 100))
says 2 "checksum mismatch: data is corrupted" "$program" diff model shards --plan llama
mv shards/rank-00002-of-00003.safetensors .log/
says 2 "rank-00002-of-00003" "$program" diff model shards --plan llama

# A full output device is a failure. A closed pipe is not a crash.
"$program" verify parts > /dev/full 2> "$err"
[ $? = 2 ] || fail "a full device was no failure"

finish
