// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

int main(int count, char** arguments) {
  return doctest::Context(count, arguments).run();
}
