#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Traces on the command line: a four-rank job as text, JSON and events, the operation each rank is in, and the refusals.
#   MUSTER_PROGRAM, MUSTER_DEMO_MODEL: the programs under test
set -u
source "$(dirname "$0")/cli.sh"
export TMPDIR=$work/tmp
mkdir tmp

"$demo" model --megabytes 3 > /dev/null || fail "no demo model"
says 0 "" "$program" shard model --to tp=4 --plan llama --out shards
MUSTER_TRACE=trace says 0 "written by rank" "$program" run -n 4 -- "$program" export shards --plan auto --out out
[ "$(ls trace/*.mtrace | wc -l)" = 4 ] || fail "not one file a rank: $(ls trace)"
[ -z "$(ls tmp)" ] || fail "left behind: $(ls tmp)"

says 0 "of 4 processes" "$program" trace trace --out trace.json
says 0 "export  " "$program" trace trace
says 0 "export_model (1 times)" "$program" trace trace --imbalance
says 0 '"routes"' "$program" trace trace --json --imbalance
says 0 "no operation" "$program" status trace
says 0 '"jobs"' "$program" status trace --json
says 0 '"jobs"' "$program" status trace --sort time --json
# The rank that has done nothing for the longest time is first.
sed -n 's/.*"ended": \([0-9.e-]*\).*/\1/p' "$out" | sort -gr -c || fail "status --sort time: $(cat "$out")"
times() { "$program" trace trace --sort "$1" --json | sed -n "s/.*\"$1\": \([0-9.e-]*\).*/\1/p"; }
for order in waiting caused; do
  times $order | sort -gr -c || fail "trace --sort $order: $(times $order)"
done
if command -v python3 > /dev/null; then
  python3 - << 'END' || fail "the events are not as viewers want them"
import json
events = json.load(open("trace.json"))["traceEvents"]
spans = [event for event in events if event["ph"] == "X"]
assert {event["pid"] for event in spans} == {0, 1, 2, 3}
assert sum(event["name"] == "export_model" for event in spans) == 4
assert all(event["dur"] >= 0 and event["ts"] >= 0 and "args" in event for event in spans)
names = {event["args"]["name"].split(" (")[0] for event in events if event["name"] == "process_name"}
assert names == {"rank 0", "rank 1", "rank 2", "rank 3"}
END
fi

# A truncated file, or one that is not a trace, does not affect the other files.
cp -r trace torn
truncate -s 100 "torn/$(ls torn | head -1)"
says 0 "reading: truncated trace" "$program" trace torn
says 2 '"shards": contains no trace. Run the job with MUSTER_TRACE=shards' "$program" trace shards
says 2 "nowhere" "$program" trace nowhere
says 2 "DIR" "$program" trace
says 2 "not a directory, a process or a job" "$program" status ffffffffffffffffffffffffffffffff
says 2 "" "$program" status trace --out other.json
finish
