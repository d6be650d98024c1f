# SPDX-License-Identifier: Apache-2.0
"""A reader that follows the versions of publish_weights.py in a directory of its own, LOCAL. It may be started first.

    python examples/pull_weights.py weights local1 model 5
"""

import sys

import muster


def main(weights, local, base, last):
    for version in range(1, last + 1):
        report = muster.pull(weights, local, base=base, version=version, wait=30)
        # An engine would load the weights in `local` here.
        print(f"pulled version {report.version}: model {muster.fingerprint(local)['hash']}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
