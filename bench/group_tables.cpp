// SPDX-License-Identifier: Apache-2.0
// Measures the tables of ranks of a group of several hosts, on one rank and without other processes: the heap of the
// group and of each duplicate, and the heap and CPU time of duplicate() and split(). The rank is alone on the last
// host. The transport answers each round as if all ranks had the record of this rank. Prints one JSON line per size.
//   group_tables [--check] [RANKS...]
// With --check it fails if a duplicate takes more memory than a status per rank.

#include <fmt/core.h>

#include <array>
#include <chrono>
#include <cstring>
#include <ctime>
#include <functional>
#include <numeric>
#include <vector>

#include "bench/counted_heap.hpp"
#include "bench/harness/measure.hpp"
#include "bench/harness/options.hpp"
#include "src/multihost/group.hpp"

namespace {

using muster::Error;
using muster::ErrorKind;
namespace multihost = muster::multihost;

constexpr int ranks_per_host = 8;
constexpr int repetitions = 5;

/// A receive that no message matches.
class Never final : public multihost::TransferOperation {
 public:
  bool test() override { return false; }
  bool cancel() noexcept override { return true; }
  void abandon() noexcept override {}
  [[nodiscard]] bool borrows() const noexcept override { return false; }
};

/// The answer of the host above to the round that this rank has begun.
class Answer final : public multihost::ArrivedMessage {
 public:
  Answer(int from, int tag, std::vector<std::byte> bytes) : from_(from), tag_(tag), bytes_(std::move(bytes)) {}
  [[nodiscard]] int from() const noexcept override { return from_; }
  [[nodiscard]] int tag() const noexcept override { return tag_; }
  [[nodiscard]] std::size_t bytes() const override { return bytes_.size(); }
  multihost::PendingTransfer receive(std::span<std::byte> place, std::shared_ptr<const void>) override {
    std::ranges::copy(bytes_, place.begin());
    return {};
  }

 private:
  int from_;
  int tag_;
  std::vector<std::byte> bytes_;
};

class AnsweringTransport final : public multihost::Transport {
 public:
  explicit AnsweringTransport(int size) : Transport(size - 1, size) {}

  [[nodiscard]] std::string_view kind() const noexcept override { return "answering"; }
  [[nodiscard]] std::string_view name() const noexcept override { return "no network"; }
  [[nodiscard]] int most_tag() const override { return INT32_MAX; }
  multihost::PendingTransfer send(int, int tag, std::span<const std::byte> bytes, std::shared_ptr<const void>,
                                  multihost::SendEnd) override {
    if (tag != multihost::first_tag) sent_.assign(bytes.begin(), bytes.end());
    return {};
  }
  multihost::PendingTransfer receive(int, int, std::span<std::byte>, std::shared_ptr<const void>) override {
    return multihost::PendingTransfer(std::make_shared<Never>());
  }
  std::unique_ptr<multihost::ArrivedMessage> find(int from, int tag) override {
    if (sent_.empty() || from == multihost::any_rank) return nullptr;
    // The head has the number of the round, the length of a record and the kind of the round (HostsGroup::RoundHead).
    std::array<std::uint32_t, 3> head{};
    std::memcpy(head.data(), sent_.data(), sizeof head);
    constexpr std::uint32_t all_gather = 1;
    std::vector<std::byte> all(sent_.begin(), sent_.begin() + sizeof head);
    // The other rounds answer with a value like that of this rank. Only a split asks whether lists are wrong.
    constexpr std::uint32_t list_bytes = 16;
    const bool is_about_lists = head[2] != all_gather && head[1] == list_bytes;
    const int copies = head[2] == all_gather ? size() : is_about_lists ? 0 : 1;
    if (is_about_lists) all.push_back(std::byte{0});
    for (int copy = 0; copy < copies; ++copy) all.insert(all.end(), sent_.begin() + sizeof head, sent_.end());
    sent_.clear();
    return std::make_unique<Answer>(from, tag, std::move(all));
  }
  std::unique_ptr<multihost::ArrivedMessage> find_any() override { return nullptr; }
  multihost::PendingTransfer barrier() override { return {}; }
  std::vector<std::byte> tell_all(std::span<const std::byte>, std::chrono::milliseconds) override { return {}; }
  [[nodiscard]] Error ended() const override { return {ErrorKind::unsupported, "the transport has ended"}; }
  bool close() noexcept override { return true; }
  [[nodiscard]] bool can_be_dropped() const noexcept override { return true; }

 private:
  std::vector<std::byte> sent_;
};

struct Cost {
  double micros = 0;  // CPU time, the median
  std::uint64_t heap = 0;
};

Cost cost_of(const std::function<std::shared_ptr<muster::Group>()>& make) {
  Cost cost;
  std::vector<double> micros;
  for (int turn = 0; turn <= repetitions; ++turn) {
    const std::uint64_t before = bench::heap_now();
    const std::clock_t begin = std::clock();
    const auto made = make();
    micros.push_back(static_cast<double>(std::clock() - begin) * 1e6 / CLOCKS_PER_SEC);
    cost.heap = bench::heap_now() - before;
    if (turn == 0) micros.clear();
  }
  cost.micros = bench::median(micros);
  return cost;
}

/// Returns the heap of a duplicate.
std::uint64_t measure(int size) {
  const auto context =
      std::make_shared<multihost::Context>(std::make_shared<AnsweringTransport>(size), std::chrono::seconds(60));
  std::vector<int> keys;
  multihost::Met met;
  for (int rank = 0; rank < size; ++rank) {
    keys.push_back(rank == size - 1 ? size : rank / ranks_per_host);
    met.ranks.push_back({rank, fmt::format("machine-{:05}.cluster", keys.back()), 1000 + rank});
  }
  met.hosts = multihost::Hosts(keys, size - 1);
  met.hosts.local = muster::single_group();
  const std::uint64_t before = bench::heap_now();
  std::vector<int> list(static_cast<std::size_t>(size));
  std::iota(list.begin(), list.end(), 0);
  const auto group = std::make_shared<multihost::HostsGroup>(context, 0, multihost::HostsMembership(std::move(met)),
                                                             size - 1, std::chrono::seconds(60));
  const std::uint64_t heap = bench::heap_now() - before;
  const Cost duplicate = cost_of([&] { return group->duplicate(); });
  const Cost split = cost_of([&] { return group->split(list); });
  std::swap(list.front(), list.back());
  const Cost reordered = cost_of([&] { return group->split(list); });
  fmt::print(
      "{{\"ranks\": {}, \"group_heap\": {}, \"duplicate_heap\": {}, \"duplicate_us\": {:.0f}, \"split_heap\": {}, "
      "\"split_us\": {:.0f}, \"reordered_heap\": {}, \"reordered_us\": {:.0f}}}\n",
      size, heap, duplicate.heap, duplicate.micros, split.heap, split.micros, reordered.heap, reordered.micros);
  return duplicate.heap;
}

}  // namespace

int main(int argc, char** argv) try {
  bool checks = false;
  std::vector<int> sizes{64, 512, 4096};
  bench::Options options("the tables of ranks of a group of several hosts");
  options.add("--check", checks, "fail if a duplicate takes more memory than a status per rank");
  options.add("ranks", sizes, "numbers of ranks (64 512 4096)");
  options.parse(argc, argv);
  for (const int size : sizes) {
    constexpr std::uint64_t most_constant = 8192;
    constexpr std::uint64_t status_bytes = 4;
    const std::uint64_t heap = measure(size);
    if (checks && heap > most_constant + status_bytes * static_cast<std::uint64_t>(size))
      throw std::runtime_error(fmt::format("a duplicate of {} ranks takes {} bytes", size, heap));
  }
} catch (const std::exception& error) {
  fmt::print(stderr, "group_tables: {}\n", error.what());
  return 1;
}
