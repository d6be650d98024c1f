// SPDX-License-Identifier: Apache-2.0
// A rank whose MPI_Finalize never returns: `stuck_end OUT STATUS` leaves data in the buffer of a file, OUT/R.

#include <mpi.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "muster/group.hpp"

extern "C" int MPI_Finalize() {
  for (;;) ::pause();
}

int main(int, char** arguments) {
  const auto group = muster::world();
  std::FILE* file = std::fopen((arguments[1] + ("/" + std::to_string(group->rank()))).c_str(), "w");
  if (file == nullptr) return 9;
  std::fputs("all of it", file);
  return std::atoi(arguments[2]);
}
