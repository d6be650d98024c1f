// SPDX-License-Identifier: Apache-2.0
// Shows how the costs of calls grow with the number of hosts. All ranks are simulated in this process
// (tests/support/simulated_hosts.hpp), one per host, and run the real code.
//   scale [--check] [HOSTS...]

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "bench/counted_heap.hpp"
#include "bench/harness/options.hpp"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "tests/support/simulated_hosts.hpp"

namespace {

using muster::Group;
using muster::multihost::HostsGroup;
using muster::test::SimulatedHosts;
using muster::test::Traffic;

struct Figures {
  double messages = 0, bytes = 0, peers = 0, heap = 0;          // the mean of all ranks; messages and bytes sent
  double messages0 = 0, bytes0 = 0, peers0 = 0, heap0 = 0;      // rank 0; messages and bytes sent and received
  double most_messages = 0;
};

class HeapByRank {
 public:
  explicit HeapByRank(SimulatedHosts& hosts) : ranks_(static_cast<std::size_t>(hosts.size())) {
    muster::test::Fibers& fibers = hosts.fibers();
    fibers.enters = [this, inner = fibers.enters](int rank) {
      inner(rank);
      before_ = bench::heap_now();
      (void)bench::heap_peak();
    };
    fibers.leaves = [this, inner = fibers.leaves](int rank) {
      Heap& heap = ranks_[static_cast<std::size_t>(rank)];
      const auto begin = static_cast<std::int64_t>(before_);
      heap.most = std::max(heap.most, heap.held + static_cast<std::int64_t>(bench::heap_peak()) - begin);
      heap.held += static_cast<std::int64_t>(bench::heap_now()) - begin;
      inner(rank);
    };
  }
  void reset() { std::ranges::fill(ranks_, Heap{}); }
  [[nodiscard]] double most(int rank) const { return static_cast<double>(ranks_[static_cast<std::size_t>(rank)].most); }

 private:
  struct Heap {
    std::int64_t held = 0;
    std::int64_t most = 0;
  };
  std::vector<Heap> ranks_;
  std::uint64_t before_ = 0;
};

std::vector<int> list_of(int members, int size) {
  std::vector<int> list(static_cast<std::size_t>(members));
  for (int i = 0; i < members; ++i) list[static_cast<std::size_t>(i)] = static_cast<int>(std::int64_t{i} * size / members);
  return list;
}

Figures figures_of(SimulatedHosts& hosts, const HeapByRank& heap) {
  Figures figures;
  const double size = hosts.size();
  for (int rank = 0; rank < hosts.size(); ++rank) {
    const Traffic& traffic = hosts.network().of(rank);
    figures.messages += static_cast<double>(traffic.sent_messages) / size;
    figures.bytes += static_cast<double>(traffic.sent_bytes) / size;
    figures.peers += static_cast<double>(traffic.peers.size()) / size;
    figures.heap += heap.most(rank) / size;
    figures.most_messages = std::max(figures.most_messages, static_cast<double>(traffic.messages()));
  }
  const Traffic& root = hosts.network().of(0);
  figures.messages0 = static_cast<double>(root.messages());
  figures.bytes0 = static_cast<double>(root.bytes());
  figures.peers0 = static_cast<double>(root.peers.size());
  figures.heap0 = heap.most(0);
  return figures;
}

void measure(int size) {
  SimulatedHosts hosts(size);
  HeapByRank heap(hosts);
  std::vector<std::shared_ptr<Group>> kept(static_cast<std::size_t>(size));
  const auto row = [&](const char* name, int most, const SimulatedHosts::Body& body) {
    if (size > most) return;
    hosts.network().reset_counts();
    heap.reset();
    const std::clock_t begin = std::clock();
    hosts.run(body);
    const Figures f = figures_of(hosts, heap);
    fmt::print("{:12} {:6}  {:8.2f} {:10.0f} {:8.2f} {:10.0f}   {:8.0f} {:10.0f} {:6.0f} {:10.0f}  {:6.0f}  {:.2f} s\n", name, size, f.messages, f.bytes, f.peers, f.heap, f.messages0,
               f.bytes0, f.peers0, f.heap0, f.most_messages, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
    std::fflush(stdout);
  };
  const auto gather = [&](const std::vector<int>& list) {
    return [list](HostsGroup& group) {
      const muster::Config config = muster::Config::object({{"rank", group.rank()}});
      (void)muster::get_configs_parallel(&config, list, group);
    };
  };
  const std::vector<int> eight = list_of(8, size);
  row("warm-up", 40000, [](HostsGroup& group) { group.barrier(); });
  row("barrier", 40000, [](HostsGroup& group) { group.barrier(); });
  row("all_gather", 4096, [](HostsGroup& group) {
    std::array<std::byte, 64> mine{};
    std::vector<std::byte> all(mine.size() * static_cast<std::size_t>(group.size()));
    group.all_gather(mine, all);
  });
  row("gather of 8", 40000, gather(eight));
  row("gather of all", 4096, gather(list_of(size, size)));
  row("merge of 8", 4096, [&](HostsGroup& group) {
    const std::vector<float> values(16, 1);
    const muster::Tensor tensor = muster::Tensor::copy_of(muster::TensorView(values.data(), muster::DType::f32, {16}));
    (void)muster::merge_tensor_parallel(tensor.view(), muster::merge::sum(), eight, group);
  });
  for (const char* name : {"stream of 8", "next stream"})
  row(name, 4096, [&](HostsGroup& group) {
    int left = 2;
    const auto source = [&]() -> std::optional<muster::Config> {
      if (left-- == 0) return std::nullopt;
      return muster::Config::object({{"rank", group.rank()}});
    };
    muster::gather_each(source, eight, group, [](muster::LayerPart&) {});
  });
  row("split", 4096, [&](HostsGroup& group) {
    std::vector<int> half(static_cast<std::size_t>(size) / 2);
    std::iota(half.begin(), half.end(), group.rank() < size / 2 ? 0 : size / 2);
    kept[static_cast<std::size_t>(group.rank())] = group.split(half);
  });
  row("leave", 4096, [&](HostsGroup& group) { kept[static_cast<std::size_t>(group.rank())].reset(); });
  row("duplicate", 4096, [&](HostsGroup& group) { kept[static_cast<std::size_t>(group.rank())] = group.duplicate(); });
  row("failure", 4096, [&](HostsGroup& group) {
    Group& copy = *kept[static_cast<std::size_t>(group.rank())];
    try {
      if (group.rank() == size / 2) copy.abort(muster::Error(muster::ErrorKind::io, "the disk is full"));
      copy.barrier();
    } catch (const muster::Error& error) {
      if (error.kind() != muster::ErrorKind::io) fmt::print("{}\n", error.what());
    }
  });
  kept.clear();
}

}  // namespace

int main(int argc, char** argv) try {
  bool checks = false;
  std::vector<int> sizes{8, 64, 512};
  bench::Options options("how the costs of calls grow with the number of hosts");
  options.add("--check", checks, "fail if a cost grows faster than documented");
  options.add("hosts", sizes, "numbers of hosts (8, 64, 512)");
  options.parse(argc, argv);
  for (const int size : sizes) measure(size);
} catch (const std::exception& error) {
  fmt::print(stderr, "scale: {}\n", error.what());
  return 1;
}
