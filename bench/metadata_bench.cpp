// SPDX-License-Identifier: Apache-2.0
// Parses the .metadata file of a torch.distributed.checkpoint save and finds its parts, and nothing else. Prints the
// median CPU time in seconds over several rounds as a JSON line.
//   metadata_bench FILE [ROUNDS]

#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <vector>

#include "muster/error.hpp"
#include "src/checkpoint/thirdparty/dcp.hpp"
#include "src/os/file.hpp"

int main(int argc, char** argv) try {
  if (argc < 2) {
    fmt::print(stderr, "usage: {} FILE [ROUNDS]\n", argv[0]);
    return 2;
  }
  const std::vector<std::byte> bytes = muster::os::read_small_file(argv[1], std::uint64_t{1} << 32);
  std::vector<double> seconds(argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 5);
  std::size_t chunks = 0;
  for (double& took : seconds) {
    const std::clock_t begin = std::clock();
    muster::thirdparty::DcpMetadata metadata;
    metadata.add(bytes);
    metadata.finish();
    took = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    chunks = 0;
    for (const muster::thirdparty::DcpTensor& tensor : metadata.tensors()) {
      chunks += tensor.chunks.size();
    }
  }
  std::ranges::sort(seconds);
  fmt::print("{{\"bytes\": {}, \"chunks\": {}, \"seconds\": {:.4f}, \"least\": {:.4f}, \"most\": {:.4f}}}\n",
             bytes.size(), chunks, seconds[seconds.size() / 2], seconds.front(), seconds.back());
} catch (const muster::Error& error) {
  fmt::print(stderr, "{}\n", error.what());
  return 1;
}
