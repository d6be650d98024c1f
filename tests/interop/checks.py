# SPDX-License-Identifier: Apache-2.0
"""What the interop tests hold to be so: the first thing that is not ends the test."""

import sys

count = 0


def check(condition, words):
    global count
    count += 1
    if not condition:
        print("FAILED:", words, file=sys.stderr)
        sys.exit(1)
