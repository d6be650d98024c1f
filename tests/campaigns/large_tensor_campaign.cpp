// SPDX-License-Identifier: Apache-2.0
// One tensor of more bytes and elements than 32 bits can count: `large_tensor_campaign [MIB] [gather|merge|stream]`
// (4352: 4.25 GiB, which needs twice that in memory). Every byte must arrive, and the root must hold the tensor once;
// the reference needs three times its size there. Uses two ranks, forked here (MUSTER_TEST_GROUP selects their hosts)
// or started by mpiexec.

#include <fmt/core.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "tests/support/forked_ranks.hpp"

using namespace muster;
using namespace muster::test;

namespace {

using Clock = std::chrono::steady_clock;

long status_kib(const std::string& field) {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line))
    if (line.starts_with(field)) return std::atol(line.c_str() + field.size());
  return -1;
}

/// Returns a byte that depends on its offset.
std::byte byte_at(std::int64_t index) {
  return static_cast<std::byte>((static_cast<std::uint64_t>(index) * 0x9e3779b97f4a7c15ULL) >> 56);
}

/// Returns bytes [first, first + count) of the whole tensor.
Tensor part_of_whole(std::int64_t first, std::int64_t count) {
  Tensor tensor = Tensor::allocate(DType::u8, {count});
  std::byte* data = tensor.mutable_data();
  for (std::int64_t i = 0; i < count; ++i) data[i] = byte_at(first + i);
  return tensor;
}

void check(const Tensor& tensor, std::int64_t first, std::int64_t count) {
  RANK_CHECK(tensor.shape() == Shape{count});
  const std::byte* data = tensor.data();
  for (std::int64_t i = 0; i < count; ++i)
    if (data[i] != byte_at(first + i)) throw RankFailure(fmt::format("byte {} is wrong", first + i));
}

struct Outcome {
  Route route = Route::auto_;
  double seconds = 0;
  std::int64_t held_kib = 0;   // by the root
  std::int64_t due_bytes = 0;  // bytes that the root has to hold
};

/// Only the sender has a tensor: the root holds the received one.
Outcome gather(Group& group, std::int64_t bytes) {
  Config mine;
  if (group.rank() == 1) mine = part_of_whole(0, bytes);
  group.barrier();
  const Clock::time_point begin = Clock::now();
  const GatheredConfigs all = get_configs_parallel(group.rank() == 1 ? &mine : nullptr, std::vector<int>{0, 1}, group);
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  if (group.rank() == 0) check(all[1]->as_tensor(), 0, bytes);
  return {all.report().route, seconds, status_kib("RssAnon:") + status_kib("RssShmem:"), bytes};
}

/// The root has the first half.
Outcome merge(Group& group, std::int64_t bytes) {
  const std::int64_t half = bytes / 2;
  const Tensor mine = group.rank() == 0 ? part_of_whole(0, half) : part_of_whole(half, bytes - half);
  group.barrier();
  const Clock::time_point begin = Clock::now();
  const MergeResult merged = merge_tensor_parallel(mine, merge::concat(0), std::vector<int>{0, 1}, group);
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  if (group.rank() == 0) check(*merged.tensor(), 0, bytes);
  return {merged.report().route, seconds, status_kib("RssAnon:") + status_kib("RssShmem:"), half + bytes};
}

/// Sent as one layer in slices.
Outcome stream(Group& group, std::int64_t bytes) {
  constexpr std::int64_t budget = 256 << 20;
  bool has_given = false;
  const auto source = [&]() -> std::optional<Config> {
    if (std::exchange(has_given, true)) return std::nullopt;
    return group.rank() == 1 ? Config::object({{"w", part_of_whole(0, bytes)}}) : Config();
  };
  std::int64_t checked = 0;
  long held = 0;
  const auto consume = [&](LayerPart& part) {
    const Tensor& piece = part.configs[1]->at("w").as_tensor();
    const std::int64_t count = static_cast<std::int64_t>(piece.nbytes());
    check(piece, part.slices.empty() ? 0 : part.slices.front().offset, count);
    checked += count;
    held = std::max(held, status_kib("RssAnon:") + status_kib("RssShmem:"));
  };
  const StreamReport report = gather_each(source, std::vector<int>{0, 1}, group, consume, {.memory_budget = budget});
  if (group.rank() == 0) RANK_CHECK(checked == bytes);
  return {report.route, report.seconds, held, budget};
}

/// Returns the report of the root.
std::string run(Group& group, const std::string& form, std::int64_t bytes) {
  const Outcome outcome = form == "gather"  ? gather(group, bytes)
                          : form == "merge" ? merge(group, bytes)
                                            : stream(group, bytes);
  if (group.rank() != 0) return {};
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  RANK_CHECK(outcome.held_kib <= (outcome.due_bytes >> 10) + (64 << 10));
#endif
  return fmt::format("{} of {} bytes by {}: {:.1f} s, all of it right; first rank {} MiB, of which it has to hold {}\n",
                     form, bytes, to_string(outcome.route), outcome.seconds, outcome.held_kib >> 10,
                     outcome.due_bytes >> 20);
}

}  // namespace

int main(int argc, char** argv) try {
  // Not a multiple of any piece size.
  const std::int64_t bytes = ((argc > 1 ? std::atol(argv[1]) : 64) << 20) + 5;
  const std::string form = argc > 2 ? argv[2] : "gather";
  if (std::getenv("PMI_RANK") != nullptr) {
    fmt::print("{}", run(*world(), form, bytes));
    return 0;
  }
  const auto ended = try_ranks(
      2, [&](Group& group) { say(run(group, form, bytes)); }, std::chrono::minutes(10));
  for (const Ended& one : ended) fmt::print("{}", one.words);
  const bool well = ended[0].ok() && ended[1].ok();
  if (!well) fmt::print("FAILED\n");
  return well ? 0 : 1;
} catch (const std::exception& error) {
  fmt::print(stderr, "{}\n", error.what());
  return 2;
}
