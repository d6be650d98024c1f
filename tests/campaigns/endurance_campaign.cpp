// SPDX-License-Identifier: Apache-2.0
// Many operations without growth: `endurance_campaign [COUNT] [gathers | collectives]`. After a warm-up, the memory,
// descriptors and mappings of every rank must not grow.

#include <dirent.h>
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/message_queue.hpp"
#include "muster/process_group.hpp"
#include "muster/shared_arena.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
using namespace muster::test;

namespace {

struct Usage {
  long resident_kib = 0;
  long shared_kib = 0;
  int descriptors = 0;
  int mappings = 0;
};

Usage usage_now() {
  Usage usage;
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.starts_with("RssAnon:")) usage.resident_kib = std::atol(line.c_str() + 8);
    if (line.starts_with("RssShmem:")) usage.shared_kib = std::atol(line.c_str() + 9);
  }
  if (DIR* directory = ::opendir("/proc/self/fd")) {
    while (::readdir(directory) != nullptr) ++usage.descriptors;
    ::closedir(directory);
  }
  std::ifstream maps("/proc/self/maps");
  while (std::getline(maps, line)) ++usage.mappings;
  return usage;
}

void exchange(Group& group, SharedArena& arena, int round) {
  std::vector<int> ranks = {0, 1, 2, 3};
  std::rotate(ranks.begin(), ranks.begin() + round % 4, ranks.end());
  if (round % 5 == 4) {
    Config config = Config::object({{"round", round}, {"name", "layer"}});
    config["own"] = pattern(DType::f32, {10 + round % 100}, static_cast<std::uint64_t>(round));
    Tensor shared = arena.allocate(DType::i32, {1000 + round % 77});
    fill(shared.mutable_data(), shared.nbytes(), static_cast<std::uint64_t>(round));
    config["shared"] = std::move(shared);
    const GatheredConfigs all = get_configs_parallel(&config, ranks, group);
    for (const auto& [rank, other] : all.present()) RANK_CHECK(other == config);
    return;
  }
  const Tensor mine = pattern(DType::u8, {1 + round % 3000}, static_cast<std::uint64_t>(group.rank() + round));
  const GatheredTensors all = get_tensors_parallel(mine, ranks, group);
  for (const auto& [rank, tensor] : all.present())
    RANK_CHECK(is_pattern(tensor, DType::u8, mine.shape(), static_cast<std::uint64_t>(rank + round)));
}

class Collectives {
 public:
  explicit Collectives(Group& group) : ranks_(group), queue_(group) {
    // Touches every page of the rings.
    const Tensor all = Tensor::take(std::vector<std::int32_t>(2 << 20));
    ranks_.all_reduce(all);
    (void)(ranks_.rank() == 0 ? (queue_.put(all.bytes()), 0U) : queue_.get().size());
  }

  void run(int round) {
    const int root = round % 4;
    const bool is_large = round % 1000 == 999;
    const Tensor tensor = Tensor::take(std::vector<std::int32_t>(is_large ? 100'000 : 1 + round % 50, ranks_.rank()));
    switch (round % 8) {
      case 0:
        ranks_.all_reduce(tensor);
        RANK_CHECK(tensor.values<std::int32_t>()[0] == 6);
        break;
      case 1:
        ranks_.broadcast(tensor, root);
        RANK_CHECK(tensor.values<std::int32_t>()[0] == root);
        break;
      case 2:
        RANK_CHECK(ranks_.all_gather(tensor).values<std::int32_t>().back() == 3);
        break;
      case 3:
        kept_ = ranks_.all_reduce_shared(tensor);
        RANK_CHECK(kept_.values<std::int32_t>()[0] == 6);
        break;
      case 4:
        ranks_.barrier();
        break;
      case 5:
        if (ranks_.rank() == 0)
          queue_.put(tensor.bytes());
        else
          RANK_CHECK(queue_.get().size() == tensor.nbytes());
        break;
      case 6: {
        auto work = ranks_.isend(tensor, (ranks_.rank() + 1) % 4, round % 3);
        const Tensor got = Tensor::allocate(DType::i32, tensor.shape());
        RANK_CHECK(ranks_.recv(got, (ranks_.rank() + 3) % 4, round % 3) == got.values<std::int32_t>()[0]);
        work.get();
        break;
      }
      default:
        if (round % 80 == 7)
          RANK_CHECK(ranks_.broadcast_config(Config::object({{"round", round}}), root)["round"].as_int() == round);
        else
          ranks_.reduce(tensor, root);
    }
  }

 private:
  ProcessGroup ranks_;
  MessageQueue queue_;
  Tensor kept_;
};

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 3000;
  const bool has_collectives = argc > 2 && std::string_view(argv[2]) == "collectives";
  const auto ended = try_ranks(
      4,
      [&](Group& group) {
        SharedArena arena(8 << 20);
        std::optional<Collectives> collectives;
        if (has_collectives) collectives.emplace(group);
        const std::function<void(int)> operation = [&](int round) {
          collectives ? collectives->run(round) : exchange(group, arena, round);
        };
        // Touches every page of the message rings, which only messages fill.
        const std::vector<std::byte> message(200 << 10);
        for (int turn = 0; turn < 2; ++turn) {
          group.send((group.rank() + 1) % 4, message);
          (void)group.receive((group.rank() + 3) % 4, message.size());
        }
        const int warm_up = std::max(600, count / 10);
        for (int round = 0; round < warm_up; ++round) operation(round);
        const Usage before = usage_now();
        for (int round = warm_up; round < count; ++round) operation(round);
        const Usage after = usage_now();
        const std::string words =
            fmt::format("anonymous {} -> {} KiB, shared {} -> {} KiB, descriptors {} -> {}, mappings {} -> {}",
                        before.resident_kib, after.resident_kib, before.shared_kib, after.shared_kib,
                        before.descriptors, after.descriptors, before.mappings, after.mappings);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
        // Sanitizers keep freed memory and a history, so only descriptors can be compared.
        const bool grew = after.descriptors != before.descriptors;
#else
        // The heap may grow by a few pages. A leak of one small block per exchange would show as megabytes.
        const bool grew = after.resident_kib > before.resident_kib + 512 ||
                          after.shared_kib > before.shared_kib + 512 || after.descriptors != before.descriptors ||
                          after.mappings > before.mappings + 2;
#endif
        if (grew) throw RankFailure("grew: " + words);
        say(words);
      },
      std::chrono::minutes(20));
  bool well = true;
  for (int rank = 0; rank < 4; ++rank) {
    const Ended& one = ended[static_cast<std::size_t>(rank)];
    fmt::print("rank {}: {}\n", rank, one.words);
    well = well && one.ok();
  }
  fmt::print("{} {} of 4 ranks: {}\n", count, has_collectives ? "collectives" : "exchanges",
             well ? "no growth" : "FAILED");
  return well ? 0 : 1;
}
