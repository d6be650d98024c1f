// SPDX-License-Identifier: Apache-2.0
// A program outside of the project: it sees what is installed, and nothing else.
#include <muster/error.hpp>
#include <muster/launch.hpp>
#include <muster/version.hpp>

#include <cstdio>
#include <string>

int main() {
  // An exception crosses the library's border as its own type.
  try {
    muster::launch_local({});
    return 1;
  } catch (const muster::Error& error) {
    if (error.kind() != muster::ErrorKind::argument) return 1;
  }
  if (muster::launch_local({"true"}, {.ranks = 2}) != 0) return 1;
  std::printf("%s\n", std::string(muster::version()).c_str());
  return 0;
}
