# SPDX-License-Identifier: Apache-2.0
"""Checks of the interop tests: the first one that fails ends the test."""

import sys

count = 0


def check(condition, words):
    global count
    count += 1
    if not condition:
        print("FAILED:", words, file=sys.stderr)
        sys.exit(1)
