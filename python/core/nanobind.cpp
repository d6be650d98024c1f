// SPDX-License-Identifier: Apache-2.0
// nanobind's own sources, from its package: they belong to the extension that uses them.
#include <nb_combined.cpp>
