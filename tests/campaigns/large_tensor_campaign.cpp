// SPDX-License-Identifier: Apache-2.0
// One tensor beyond 32 bits of bytes: `large_tensor_campaign [MIB]` (4352: 4.25 GiB, which needs twice that in memory).
// It arrives whole, and is on the first rank once: the reference needs three times its size there.

#include <fmt/format.h>

#include <cstdlib>
#include <fstream>
#include <string>

#define DOCTEST_CONFIG_IMPLEMENT
#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
using namespace muster::test;

namespace {

long status_kib(const std::string& field) {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line))
    if (line.starts_with(field)) return std::atol(line.c_str() + field.size());
  return -1;
}

/// A word at any place tells where it is.
std::uint64_t word_at(std::uint64_t index) {
  return index * 0x9e3779b97f4a7c15ULL;
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t mib = argc > 1 ? std::atol(argv[1]) : 64;
  const std::int64_t words = mib << 17;
  const auto ended = try_ranks(
      2,
      [&](SyncGroup& group) {
        // Only the sender has one: what the first rank holds is what it was sent.
        Config mine;
        if (group.rank() == 1) {
          Tensor tensor = Tensor::allocate(DType::u64, {words});
          auto* data = reinterpret_cast<std::uint64_t*>(tensor.mutable_data());
          for (std::int64_t i = 0; i < words; ++i) data[i] = word_at(static_cast<std::uint64_t>(i));
          mine = tensor;
        }
        const GatheredConfigs all =
            get_configs_parallel(group.rank() == 1 ? &mine : nullptr, std::vector<int>{0, 1}, group);
        if (group.rank() != 0) return;
        const Tensor& tensor = all[1]->as_tensor();
        RANK_CHECK(tensor.shape() == Shape{words});
        const auto* data = reinterpret_cast<const std::uint64_t*>(tensor.data());
        for (std::int64_t i = 0; i < words; ++i)
          if (data[i] != word_at(static_cast<std::uint64_t>(i))) throw RankFailure(fmt::format("word {} is wrong", i));
        const long own = status_kib("RssAnon:");
        const long shared = status_kib("RssShmem:");
        say(fmt::format("first rank: {} MiB of its own, {} MiB shared", own >> 10, shared >> 10));
        RANK_CHECK(shared <= (mib + 16) << 10);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
        RANK_CHECK(own < 64 << 10);
#endif
      },
      std::chrono::minutes(10));
  for (const Ended& one : ended)
    if (!one.words.empty()) fmt::print("{}\n", one.words);
  const bool well = ended[0].ok() && ended[1].ok();
  fmt::print("a tensor of {} MiB: {}\n", mib, well ? "arrived whole" : "FAILED");
  return well ? 0 : 1;
}
