# SPDX-License-Identifier: Apache-2.0
"""The Python package, judged by the independent reader: ranks publish from memory, and the function with SGLang's signature
pulls. PYTHONPATH names the package, and the interpreter must have NumPy.
"""

import os
import random
import subprocess
import sys

import peer
from support import Test, at_version, check, versions_in

try:
    import numpy  # noqa: F401
    import muster  # noqa: F401
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

test = Test(__doc__)
t = test.folder
# Four ranks have rows of each tensor; a tensor with fewer rows belongs to rank 3 alone.
RANK = """
import sys
import numpy
import muster
sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
import peer
group = muster.world()
TYPES = {"F32": "<f4", "I64": "<i8", "F16": "<f2", "U8": "u1", "I8": "i1", "F64": "<f8", "BOOL": "?"}
def state(folder):
    found = {}
    for name, tensor in peer.read_model(folder).items():
        whole = numpy.frombuffer(bytearray(tensor.data), TYPES[tensor.dtype]).reshape(tensor.shape)
        rows = tensor.shape[0] if tensor.shape else 0
        if rows >= group.size:
            step = -(-rows // group.size)
            first = min(group.rank * step, rows)
            part = whole[first:first + step].copy()
            if len(part):
                found[name] = muster.Part(part, whole.shape, (first, *(0 for _ in whole.shape[1:])))
        elif group.rank == group.size - 1:
            found[name] = whole.copy()
    return found
with muster.Publisher(sys.argv[3], base=sys.argv[2], group=group, **eval(sys.argv[4])) as publisher:
    for folder in sys.argv[5:]:
        publisher.publish(state(folder))
"""
PULL = """
import sys
from muster.compat.sglang import pull
pull(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
"""
(t / "rank.py").write_text(RANK)
shapes = {name: shape for name, shape in peer.SHAPES.items() if not shape[0].startswith(("BF", "F8"))}
shapes.update({f"layers.{i}.weight": ("F16", (1024, 700 + i)) for i in range(4)})
states = {0: peer.make_model(1, shapes)}
numbers = random.Random(2)
for i in range(1, 7):
    states[i] = states[i - 1] if i == 3 else peer.changed_model(states[i - 1], numbers)
base = peer.write_model(t / "base", states[0], files=2)
folders = {i: peer.write_model(t / f"model{i}", states[i]) for i in states}


def publish(source, options, *chosen):
    test.ok("run", "-n", 4, "--", sys.executable, t / "rank.py", os.path.dirname(os.path.abspath(__file__)), base, source, repr(options), *(folders[i] for i in chosen))


def pull(source, local, number):
    """As SGLang's scheduler ranks on a host do: all of them call the function."""
    calls = [subprocess.Popen([sys.executable, "-c", PULL, str(local), str(base), str(source), str(number)], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for call in calls:
        _, err = call.communicate(timeout=60)
        check(call.returncode == 0, err)
    check(at_version(local, states) == number, f"not at version {number}")


for name, options in {"xor": {}, "overwrite": {"encoding": "overwrite"}, "a copy of the newest version": {"base_copy": str(t / "copy")}}.items():
    with test.part(f"four ranks publish from memory, {name}"):
        source, theirs, ours = t / f"source {name}", t / f"theirs {name}", t / f"ours {name}"
        publish(source, options, 1, 2, 3)
        # A restarted trainer continues after the newest version.
        publish(source, {**options, "full_every": 5}, 4, 5, 6)
        check(versions_in(source) == [1, 2, 3, 4, 5, 6], f"versions {versions_in(source)}")
        for number in range(1, 7):
            version = source / peer.version_name(number)
            if number != 5:
                count = peer.check_delta(version, number)
                changed = sum(states[number][key] != states[number - 1][key] for key in shapes)
                check(count == changed, f"version {number}: {count} tensors, and {changed} changed")
            if number not in (3, 5):
                check(len(list(version.glob("*.safetensors"))) > 1, f"version {number}: one rank wrote all")
            peer.pull(theirs, base, source, number)
            at_version(theirs, states)
            pull(source, ours, number)

test.finish()
