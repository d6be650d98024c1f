# SPDX-License-Identifier: Apache-2.0
# Shared functions of the tests of requests and refusals. bash sources it after cli.sh.
cat > .log/tensors.py << 'END'
"""Reads and writes safetensors files: {name: (dtype, shape, bytes)}."""
import json
import struct
import sys


def read(path):
    with open(path, 'rb') as file:
        length, = struct.unpack('<Q', file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    header.pop('__metadata__', None)
    return {name: (entry['dtype'], entry['shape'], data[slice(*entry['data_offsets'])])
            for name, entry in header.items()}


def write(path, tensors):
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {'dtype': dtype, 'shape': shape, 'data_offsets': [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    with open(path, 'wb') as file:
        file.write(struct.pack('<Q', len(text)) + text)
        for dtype, shape, data in tensors.values():
            file.write(data)


def wide(tensor):
    """A BF16 tensor as F32."""
    dtype, shape, data = tensor
    assert dtype == 'BF16'
    return 'F32', shape, b''.join(b'\0\0' + data[i:i + 2] for i in range(0, len(data), 2))
END
# python CODE ARGUMENTS...: runs CODE with the functions above.
run_python() {
  local code=$1
  shift
  PYTHONPATH=.log PYTHONDONTWRITEBYTECODE=1 "${MUSTER_TEST_PYTHON:-python3}" -c "import json, os, sys
from tensors import read, wide, write
$code" "$@" || fail "python: $code"
}
# made NAME CODE: creates a directory with the model's tensors `t` as modified by CODE, and its config.json.
made() {
  mkdir "$1" && cp model/config.json "$1/"
  run_python "t = read('model/model.safetensors')
$2
write(sys.argv[1] + '/model.safetensors', t)" "$1"
}
# refused WORDS COMMAND...: status 2, one line with WORDS, nothing created and nothing changed.
everything() { find . -mindepth 1 -path ./.log -prune -o -printf '%p %s %m %u %g %T@\n' | sort; }
refused() {
  local before
  before=$(everything)
  says 2 "$@"
  [ "$(everything)" = "$before" ] || fail "changed by a refused command: ${*:2}"
}
same() { says 0 "same: " "$program" diff "$@"; }
