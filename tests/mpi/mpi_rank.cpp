// SPDX-License-Identifier: Apache-2.0
// One rank of world(): `mpi_rank OUT work [SECONDS]`. It gathers repeatedly, checks the results, and writes its outcome
// into OUT/R: "well", or the time of the failure (seconds of the machine's clock) and its message.
//   work S      works for S seconds, then exits in order; 0: once
//   die R       like work, but rank R kills itself when OUT/die exists
//   late R      rank R exits with status 3 before it calls world()
//   absent R    rank R does not call world() for 20 s
#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "muster/gather.hpp"

using namespace muster;

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void gather_once(Group& group, const std::vector<int>& ranks) {
  constexpr std::int64_t count = 1 << 19;
  std::vector<std::int32_t> mine(count);
  std::iota(mine.begin(), mine.end(), group.rank() * 1000);
  const TensorView view(DType::i32, {count}, reinterpret_cast<const std::byte*>(mine.data()));
  const GatheredTensors all = get_tensors_parallel(view, ranks, group);
  for (const auto& [rank, tensor] : all.present()) {
    const auto* values = reinterpret_cast<const std::int32_t*>(tensor.data());
    if (values[0] != rank * 1000 || values[count - 1] != rank * 1000 + count - 1)
      throw std::runtime_error(fmt::format("what rank {} has sent is not what has come", rank));
  }
}

int run(const std::string& out, const std::string& mode, double amount) {
  const char* number = std::getenv("PMI_RANK");
  const bool is_meant = number != nullptr && std::atoi(number) == static_cast<int>(amount);
  if (mode == "late" && is_meant) return 3;
  if (mode == "absent" && is_meant) std::this_thread::sleep_for(std::chrono::seconds(20));
  const std::shared_ptr<Group> group = world();
  std::vector<int> ranks(static_cast<std::size_t>(group->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const std::string mine = fmt::format("{}/{}", out, group->rank());
  const double end = now() + (mode == "work" ? amount : 60);
  // All ranks must gather equally often: rank 0 decides when to stop.
  try {
    for (bool goes_on = true; goes_on;) {
      gather_once(*group, ranks);
      if (mode == "die" && group->rank() == static_cast<int>(amount) && std::filesystem::exists(out + "/die"))
        ::raise(SIGKILL);
      const std::byte last{static_cast<unsigned char>(now() < end)};
      std::vector<std::byte> all(ranks.size());
      group->all_gather(std::span(&last, 1), all);
      goes_on = all.front() == std::byte{1};
    }
  } catch (const Error& error) {
    std::ofstream(mine + ".part") << fmt::format("{:.2f} {}\n", now(), error.what());
    std::filesystem::rename(mine + ".part", mine);
    return 2;
  }
  std::ofstream(mine) << "well\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3) return 64;
  return run(argv[1], argv[2], argc > 3 ? std::atof(argv[3]) : 0);
} catch (const std::exception& error) {
  std::fprintf(stderr, "mpi_rank: %s\n", error.what());
  return 2;
}
