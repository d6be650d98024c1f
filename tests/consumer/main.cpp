// SPDX-License-Identifier: Apache-2.0
// A program outside the project, which uses only installed files.
#include <muster/muster.hpp>

#include <cstdio>
#include <string>
#include <vector>

int main(int, char** arguments) {
  // An exception keeps its type across the library boundary.
  try {
    muster::launch_local({});
    return 1;
  } catch (const muster::Error& error) {
    if (error.kind() != muster::ErrorKind::invalid_argument) return 1;
  }
  if (muster::launch_local({"true"}, {.ranks = 2}) != 0) return 1;
  // Libraries that are loaded on demand are found, wherever Muster is installed.
  const muster::Tensor tensor = muster::Tensor::take(std::vector<float>{1, 2, 3});
  muster::write_state_file(arguments[1], {}, {{{"weight", tensor}}});
  const muster::StateFile file = muster::StateFile::open(arguments[1]);
  if (file.tensors().size() != 1 || file.tensor("weight").values<float>()[2] != 3) return 1;
  // Types in nested namespaces are also exported.
  const auto context = muster::roles::initialize_distributed_compute(*muster::single_group(), {});
  if (!context.is_training_rank() || muster::dist::is_initialized()) return 1;
  std::printf("%s\n", std::string(muster::version()).c_str());
  return 0;
}
