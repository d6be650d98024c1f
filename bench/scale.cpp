// SPDX-License-Identifier: Apache-2.0
// Shows how the costs of calls grow with the number of hosts: messages, bytes, sockets and heap, of each rank and of
// rank 0. All ranks are simulated in this process (tests/support/simulated_hosts.hpp), one per host, and run the real
// code. Prints Markdown tables. A cell has the measured figure, the value of the formula, and the exponent with which
// the figure has grown since the number of hosts before.
//   scale [--check] [HOSTS...]
// With --check it fails if a figure grows faster than documented (docs/explanation/cost-model.md).

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "bench/counted_heap.hpp"
#include "bench/harness/options.hpp"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/live_export.hpp"
#include "muster/merge_gather.hpp"
#include "src/multihost/stream_protocol.hpp"
#include "tests/support/simulated_hosts.hpp"
#include "tests/support/temporary_directory.hpp"

namespace {

using muster::Group;
using muster::multihost::HostsGroup;
using muster::multihost::HostTree;
using muster::test::SimulatedHosts;
using muster::test::Traffic;

/// Messages and bytes of a rank are those that it sends, as a mean of all ranks. Those of rank 0 are sent or received.
/// Sockets are the ranks with which a rank exchanges a message: over TCP it has one or two connections to each.
enum Figure : std::size_t { messages, bytes, sockets, heap, messages0, bytes0, sockets0, heap0, figure_count };
constexpr std::array<const char*, figure_count> titles = {
    "Messages that a rank sends", "Bytes that a rank sends", "Sockets of a rank", "Heap of a rank",
    "Messages of rank 0",         "Bytes of rank 0",         "Sockets of rank 0", "Heap of rank 0"};
using Figures = std::array<double, figure_count>;

// The formulas. The constants are sizes of messages in bytes.
constexpr double head = 12;          // of each message of a round
constexpr double facts = 12;         // of a gather: flags and a count
constexpr double record = 132;       // of one rank in round 1
constexpr double list_answer = 152;  // for a host with members of a list
constexpr double part_head = sizeof(muster::multihost::PartHead);
constexpr double control = 2048;  // a control message

/// The figures of a call as sums over all ranks, and of rank 0.
class Formula {
 public:
  explicit Formula(int hosts) : hosts_(hosts), below_(static_cast<std::size_t>(hosts), 1) {
    for (int host = hosts - 1; host > 0; --host) below(tree_.parent(host)) += below(host);
    links_.resize(below_.size());
    for (int host = 1; host < hosts; ++host) link(host, tree_.parent(host));
  }

  /// A round: `up(host)` and `down(host)` are the bytes of the message from a host and to it.
  template <class Up, class Down>
  Formula& round(const Up& up, const Down& down, double before = head) {
    for (int host = 1; host < hosts_; ++host) {
      send(host, tree_.parent(host), 1, before + up(host));
      send(tree_.parent(host), host, 1, before + down(host));
    }
    return *this;
  }
  Formula& constant_round(double up, double down) {
    return round([=](int) { return up; }, [=](int) { return down; });
  }
  Formula& all_gather(double each, double before = head) {
    return round([this, each](int host) { return each * below(host); }, [=, this](int) { return each * hosts_; },
                 before);
  }
  /// Round 1 of a gather. `records_down` is 1 if all members need all records.
  Formula& agreement(const std::vector<int>& list, double records_down) {
    const std::vector<double> members = members_below(list);
    const auto of = [&](int host) { return members[static_cast<std::size_t>(host)]; };
    const double answer = list_answer + records_down * record * static_cast<double>(list.size());
    return round([&](int host) { return facts + record * of(host); },
                 [&](int host) { return facts + 4 + (of(host) != 0 ? answer : 0); });
  }
  /// The round of a split in which members report their lists.
  Formula& reports(const std::vector<std::vector<int>>& lists) {
    std::vector<double> open(below_.size());
    for (const std::vector<int>& list : lists) {
      const std::vector<double> members = members_below(list);
      for (std::size_t host = 0; host < open.size(); ++host) open[host] += members[host] != 0 ? 1 : 0;
    }
    return round([&](int host) { return 16 * open[static_cast<std::size_t>(host)]; }, [](int) { return 1; });
  }
  Formula& status() { return constant_round(1, 1); }
  /// Messages between rank 0 and each rank that pass along the tree: `each` bytes of each rank.
  Formula& bundles(double count, double each) {
    for (int host = 1; host < hosts_; ++host) send(host, tree_.parent(host), count, count * 8 + each * below(host));
    return *this;
  }
  /// Messages between rank 0 and the other members of a list.
  Formula& to_root(const std::vector<int>& list, double count, double all_bytes) {
    for (const int member : list)
      if (member != 0) send(member, 0, count, all_bytes);
    return *this;
  }
  /// A new group: statuses, and a round about its number and nonce.
  Formula& part() { return status().constant_round(20, 20).status().status(); }
  Formula& send(int from, int to, double count, double all_bytes) {
    figures_[messages] += count;
    figures_[bytes] += all_bytes;
    if (from == 0 || to == 0) {
      figures_[messages0] += count;
      figures_[bytes0] += all_bytes;
    }
    link(from, to);
    return *this;
  }
  /// Sends over each edge of the tree.
  Formula& each_edge(double count, double each) {
    for (int host = 1; host < hosts_; ++host) send(host, tree_.parent(host), count, count * each);
    return *this;
  }
  /// `of_rank` and `of_root` are the heap of a rank and of rank 0.
  [[nodiscard]] Figures figures(double of_rank, double of_root) const {
    Figures all = figures_;
    for (const auto& peers : links_) all[sockets] += static_cast<double>(peers.size());
    for (const Figure mean : {messages, bytes, sockets}) all[mean] /= hosts_;
    all[sockets0] = static_cast<double>(links_.front().size());
    all[heap] = of_rank;
    all[heap0] = of_root;
    return all;
  }

 private:
  /// Returns the members of a list in the subtree of each host.
  [[nodiscard]] std::vector<double> members_below(const std::vector<int>& list) const {
    std::vector<double> members(below_.size());
    for (const int member : list) ++members[static_cast<std::size_t>(member)];
    for (int host = hosts_ - 1; host > 0; --host)
      members[static_cast<std::size_t>(tree_.parent(host))] += members[static_cast<std::size_t>(host)];
    return members;
  }
  double& below(int host) { return below_[static_cast<std::size_t>(host)]; }
  void link(int a, int b) {
    links_[static_cast<std::size_t>(a)].insert(b);
    links_[static_cast<std::size_t>(b)].insert(a);
  }

  int hosts_;
  HostTree tree_{hosts_};
  std::vector<double> below_;  // hosts in the subtree of each host
  std::vector<std::set<int>> links_;
  Figures figures_{};
};

/// The heap that each rank takes in addition, at most, since the last reset.
class HeapByRank {
 public:
  explicit HeapByRank(muster::test::Fibers& fibers, int size)
      : ranks_(static_cast<std::size_t>(size)), fibers_(fibers), enters_(fibers.enters), leaves_(fibers.leaves) {
    fibers_.enters = [this](int rank) {
      enters_(rank);
      before_ = bench::heap_now();
      (void)bench::heap_peak();
    };
    fibers_.leaves = [this](int rank) {
      Heap& own = ranks_[static_cast<std::size_t>(rank)];
      const auto begin = static_cast<std::int64_t>(before_);
      own.most = std::max(own.most, own.held + static_cast<std::int64_t>(bench::heap_peak()) - begin);
      own.held += static_cast<std::int64_t>(bench::heap_now()) - begin;
      leaves_(rank);
    };
  }
  ~HeapByRank() {
    fibers_.enters = enters_;
    fibers_.leaves = leaves_;
  }
  HeapByRank& operator=(HeapByRank&&) = delete;
  void reset() { std::ranges::fill(ranks_, Heap{}); }
  [[nodiscard]] double most(int rank) const { return static_cast<double>(ranks_[static_cast<std::size_t>(rank)].most); }

 private:
  struct Heap {
    std::int64_t held = 0;
    std::int64_t most = 0;
  };
  std::vector<Heap> ranks_;
  muster::test::Fibers& fibers_;
  const std::function<void(int)> enters_;
  const std::function<void(int)> leaves_;
  std::uint64_t before_ = 0;
};

Figures figures_of(const muster::test::SimulatedNetwork& network, const HeapByRank& heaps) {
  Figures figures{};
  const double size = network.size();
  for (int rank = 0; rank < network.size(); ++rank) {
    const Traffic& traffic = network.of(rank);
    figures[messages] += static_cast<double>(traffic.sent_messages) / size;
    figures[bytes] += static_cast<double>(traffic.sent_bytes) / size;
    figures[sockets] += static_cast<double>(traffic.peers.size()) / size;
    figures[heap] += heaps.most(rank) / size;
  }
  const Traffic& root = network.of(0);
  figures[messages0] = static_cast<double>(root.messages());
  figures[bytes0] = static_cast<double>(root.bytes());
  figures[sockets0] = static_cast<double>(root.peers.size());
  figures[heap0] = heaps.most(0);
  return figures;
}

// How a figure grows at most with the number of hosts. A constant has an exponent too: of 8 hosts only one has hosts
// below it, and of 64 hosts eight have.
constexpr double constant = 0.4;
constexpr double linear = 1.1;

/// One call, measured for several numbers of hosts.
struct Call {
  const char* name = "";
  Figures bounds{};
  struct Result {
    int hosts = 0;
    Figures measured{};  // not a number where only the formula is known
    Figures formula{};
  };
  std::vector<Result> results = {};
};

Figures bounds_of(std::initializer_list<Figure> growing) {
  Figures bounds;
  bounds.fill(constant);
  for (const Figure figure : growing) bounds[figure] = linear;
  return bounds;
}

class Table {
 public:
  void add(const char* name, const Figures& bounds, Call::Result result) {
    auto found =
        std::ranges::find(calls_, std::string_view(name), [](const Call& call) { return std::string_view(call.name); });
    if (found == calls_.end()) found = calls_.insert(calls_.end(), {.name = name, .bounds = bounds});
    found->results.push_back(std::move(result));
  }
  void print() const;
  /// Returns whether no figure grows faster than its bound.
  [[nodiscard]] bool is_within_bounds() const;

 private:
  std::vector<Call> calls_;
};

/// Returns the exponent with which a figure has grown since the result before.
std::optional<double> exponent(const Call& call, std::size_t result, std::size_t figure) {
  if (result == 0) return std::nullopt;
  const Call::Result& last = call.results[result];
  const Call::Result& before = call.results[result - 1];
  const auto value = [&](const Call::Result& of) {
    return std::isnan(of.measured[figure]) ? of.formula[figure] : of.measured[figure];
  };
  return std::log(value(last) / value(before)) / std::log(static_cast<double>(last.hosts) / before.hosts);
}

/// Returns three digits: 2.94, 820K.
std::string text_of(double value) {
  if (std::isnan(value)) return "-";
  if (value < 100) return fmt::format("{:.3g}", value);
  if (value < 10'000) return fmt::format("{:.0f}", value);
  constexpr std::array units = {"K", "M", "G"};
  std::size_t unit = 0;
  for (value /= 1000; value >= 1000 && unit + 1 < units.size(); value /= 1000) ++unit;
  return fmt::format("{:.3g}{}", value, units[unit]);
}

void Table::print() const {
  std::set<int> sizes;
  for (const Call& call : calls_)
    for (const Call::Result& result : call.results) sizes.insert(result.hosts);
  for (std::size_t figure = 0; figure < figure_count; ++figure) {
    fmt::print("\n| {} |", titles[figure]);
    for (const int size : sizes)
      fmt::print(" {} hosts |",
                 size < 1000 ? fmt::format("{}", size) : fmt::format("{},{:03}", size / 1000, size % 1000));
    fmt::print("\n|---|");
    for (std::size_t i = 0; i < sizes.size(); ++i) fmt::print("---|");
    for (const Call& call : calls_) {
      fmt::print("\n| {} |", call.name);
      for (const int size : sizes) {
        const auto found = std::ranges::find(call.results, size, &Call::Result::hosts);
        if (found == call.results.end()) {
          fmt::print(" |");
          continue;
        }
        const auto grows = exponent(call, static_cast<std::size_t>(found - call.results.begin()), figure);
        fmt::print(" {} / {}{} |", text_of(found->measured[figure]), text_of(found->formula[figure]),
                   grows ? fmt::format(" / {:.2f}", *grows) : "");
      }
    }
    fmt::print("\n");
  }
}

bool Table::is_within_bounds() const {
  bool is_well = true;
  for (const Call& call : calls_)
    for (std::size_t figure = 0; figure < figure_count; ++figure)
      for (std::size_t i = 1; i < call.results.size(); ++i) {
        const double grows = *exponent(call, i, figure);
        // The exponent is not a number if nothing was counted.
        if (grows <= call.bounds[figure]) continue;
        is_well = false;
        fmt::print(stderr, "{}: {}: grows with exponent {:.2f} from {} to {} hosts, at most {} is expected\n",
                   call.name, titles[figure], grows, call.results[i - 1].hosts, call.results[i].hosts,
                   call.bounds[figure]);
      }
  return is_well;
}

/// Returns `members` ranks that are spread over all ranks, rank 0 first.
std::vector<int> spread_list(int members, int size) {
  std::vector<int> list;
  for (std::int64_t i = 0; i < members; ++i) list.push_back(static_cast<int>(i * size / members));
  return list;
}

/// The messages of a rendezvous depend on the transport, so only the heap is measured. Over TCP, every rank sends rank
/// 0 its hello and its port. Rank 0 answers with its own hello, and with the addresses of rank 0, of the rank itself
/// and of its neighbours in the tree. Then all ranks exchange cards, which have all addresses, and a status through the
/// tree.
void measure_rendezvous(int size, Table& table) {
  constexpr double message = 24;
  constexpr double hello = 256;
  constexpr double port = 18;
  constexpr double address = 64;
  const HostTree tree{size};
  constexpr double card = sizeof(muster::multihost::RankMetadata);
  Formula formula(size);
  for (int rank = 1; rank < size; ++rank) {
    const double neighbours = static_cast<double>(tree.children(rank).size()) + (tree.parent(rank) == 0 ? 0 : 1);
    formula.send(rank, 0, 4, 4 * message + 2 * hello + port + address * (2 + neighbours));
    // The last round.
    formula.send(rank, 0, 2, 2 * message + 8);
  }
  formula.all_gather(card, 0).all_gather(1, 0);
  Figures measured;
  measured.fill(std::nan(""));
  // Each rank has the cards of all ranks.
  if (size <= 512) {
    muster::test::Fibers fibers(size);
    const auto network = std::make_shared<muster::test::SimulatedNetwork>(size, [&](int rank) { fibers.wake(rank); });
    const HeapByRank heaps(fibers, size);
    fibers.run([&](int rank) {
      (void)muster::multihost::meet(*network->transport(rank), std::chrono::seconds(60), UINT64_MAX);
    });
    const Figures all = figures_of(*network, heaps);
    for (const Figure figure : {heap, heap0}) measured[figure] = all[figure];
  }
  table.add("rendezvous", bounds_of({bytes, heap, messages0, bytes0, sockets0, heap0}),
            {size, measured, formula.figures(1250.0 * size, 1750.0 * size)});
}

/// The calls of one job of simulated hosts.
class Job {
 public:
  Job(int size, Table& table) : size_(size), table_(table), hosts_(size), heaps_(hosts_.fibers(), size) {}

  void measure() {
    // The first calls of a group make memory that it keeps.
    run([](HostsGroup& group) { group.barrier(); });
    run([](HostsGroup& group) { group.barrier(); });
    add("barrier", bounds_of({heap0}), Formula(size_).constant_round(0, 0).figures(310, 1000 + 7.4 * n_));
    gather(eight_);
    add("gather of 8", bounds_of({heap}),
        Formula(size_).agreement(eight_, 0).to_root(eight_, 1, part_head + 11).figures(990 + n_ / 8, 19e3));
    run([&](HostsGroup& group) { own(group) = group.duplicate(); });
    add("duplicate", bounds_of({heap, heap0}), Formula(size_).part().figures(2900 + 4 * n_, 3200 + 4 * n_));
    // In the other calls, the tables of all ranks together exceed the memory of one process.
    if (size_ <= 4096) {
      measure_gathers();
      measure_streams();
      measure_split();
      measure_failure();
    }
    if (size_ <= 4096) measure_export();
    run([&](HostsGroup& group) { own(group).reset(); });
    begin();
    hosts_.end();
    // The groups end, among them the companion of the streams, and then the context.
    add("end of the job", bounds_of({heap, heap0}),
        Formula(size_).each_edge(size_ <= 4096 ? 5 : 3, control).figures(2000, 1000));
  }

 private:
  std::shared_ptr<Group>& own(const Group& group) { return kept_[static_cast<std::size_t>(group.rank())]; }
  void begin() {
    hosts_.network().reset_counts();
    heaps_.reset();
  }
  void run(const SimulatedHosts::Body& body) {
    begin();
    hosts_.run(body);
  }
  void add(const char* name, const Figures& bounds, const Figures& formula) {
    table_.add(name, bounds, {size_, figures_of(hosts_.network(), heaps_), formula});
  }
  void gather(const std::vector<int>& list) {
    run([&](HostsGroup& group) {
      const muster::Config config = muster::Config::object({{"rank", group.rank()}});
      (void)muster::get_configs_parallel(&config, list, group);
    });
  }
  void measure_gathers() {
    run([](HostsGroup& group) {
      std::array<std::byte, 64> mine{};
      std::vector<std::byte> records(mine.size() * static_cast<std::size_t>(group.size()));
      group.all_gather(mine, records);
    });
    add("all_gather of 64 bytes", bounds_of({bytes, heap, bytes0, heap0}),
        Formula(size_).all_gather(64).figures(3 * 64 * n_, 4.2 * 64 * n_));
    gather(all_);
    add("gather of all", bounds_of({heap, messages0, bytes0, sockets0, heap0}),
        Formula(size_).agreement(all_, 0).to_root(all_, 1, part_head + 11).figures(5500 + 8 * n_, 2300 * n_));
    run([&](HostsGroup& group) {
      const muster::Tensor tensor = muster::Tensor::take(std::vector<float>(16, 1));
      (void)muster::merge_tensor_parallel(tensor.view(), muster::merge::sum(), eight_, group);
    });
    add("merge of 8", bounds_of({}),
        Formula(size_).agreement(eight_, 1).status().to_root(eight_, 3, part_head + 87).figures(1260, 16.5e3));
  }
  void measure_streams() {
    const auto stream = [&] {
      run([&](HostsGroup& group) {
        int left = 2;
        const auto source = [&]() -> std::optional<muster::Config> {
          if (left-- == 0) return std::nullopt;
          return muster::Config::object({{"rank", group.rank()}});
        };
        muster::gather_each(source, eight_, group, [](muster::LayerPart&) {});
      });
    };
    const auto formula = [&] {
      return Formula(size_).agreement(eight_, 1).status().to_root(eight_, 7, 4 * part_head + 502);
    };
    stream();
    add("first stream of 8", bounds_of({heap, heap0}), formula().part().figures(4000 + 56 * n_, 28e3 + 56 * n_));
    stream();
    add("next stream of 8", bounds_of({heap, heap0}), formula().figures(1000 + 56 * n_, 27e3 + 56 * n_));
  }
  void measure_split() {
    std::vector<std::shared_ptr<Group>> parts(kept_.size());
    const auto half = static_cast<std::ptrdiff_t>(all_.size()) / 2;
    const std::vector<std::vector<int>> halves{{all_.begin(), all_.begin() + half}, {all_.begin() + half, all_.end()}};
    run([&](HostsGroup& group) {
      parts[static_cast<std::size_t>(group.rank())] = group.split(halves[group.rank() < half ? 0 : 1]);
    });
    add("split into halves", bounds_of({heap, heap0}),
        Formula(size_).status().reports(halves).part().figures(2900 + 90 * n_, 3200 + 98 * n_));
    run([&](HostsGroup& group) { parts[static_cast<std::size_t>(group.rank())].reset(); });
  }
  void measure_export() {
    constexpr std::uint64_t budget = std::uint64_t{2} << 30;
    const muster::test::TemporaryDirectory work(muster::test::Medium::memory);
    // Each rank has a tensor and writes it, so that no bytes of tensors are sent.
    run([&](HostsGroup& group) {
      const muster::TensorPart part{.name = fmt::format("layers.{}.weight", group.rank()),
                                    .tensor = muster::Tensor::take(std::vector<float>(16, 1))};
      (void)muster::export_model(std::span(&part, 1), work / "out", "", group,
                                 {.memory_budget = budget, .writers = muster::Writers::all});
    });
    // The export uses a duplicate of the group. A rank collects the parts of each window. The hosts report the file as
    // complete along the tree.
    // A window has 2/15 of a rank's part of the budget. It holds tensors of 64 bytes.
    const int tensors_of_window = static_cast<int>(static_cast<double>(budget) / (n_ * 7.5 * 64));
    Formula formula(size_);
    for (int round = 0; round < 7; ++round) formula.status();
    formula.part().all_gather(8).bundles(3, 874).each_edge(1, 56).each_edge(2, control);
    for (int rank = 0; rank < size_; ++rank)
      if (const int writer = rank / tensors_of_window; writer != rank) formula.send(rank, writer, 2, 145);
    add("export of all", bounds_of({bytes, heap, messages0, bytes0, sockets0, heap0}),
        formula.figures(14e3 + 108 * n_ + 8.4e6 / n_, 8.42e6 + 2520 * n_));
  }
  /// One rank fails a duplicate of the group, in whose barrier the others are.
  void measure_failure() {
    const int failing = size_ / 2;
    int waiting = size_;
    run([&](HostsGroup& group) {
      try {
        if (group.rank() == failing)
          own(group)->abort(muster::Error(muster::ErrorKind::io, "the disk is full", {.rank = failing}));
        own(group)->barrier();
        throw std::runtime_error("a barrier succeeded after a failure");
      } catch (const muster::Error& error) {
        if (error.kind() != muster::ErrorKind::io || error.rank() != failing) throw;
      }
      // As in a program that makes the next call.
      for (--waiting; waiting > 0; std::this_thread::sleep_for(std::chrono::milliseconds(1)))
        group.context().try_pump();
    });
    Formula formula(size_);
    const HostTree tree{size_};
    std::set<int> above;
    for (int host = failing; host != 0; host = tree.parent(host)) above.insert(host);
    for (int host = 1; host < size_; ++host) {
      // The notice goes up from the failing rank and is confirmed. The other hosts have begun the round.
      if (above.contains(host))
        formula.send(host, tree.parent(host), 2, 2 * control);
      else
        formula.send(host, tree.parent(host), 1, head);
    }
    // The decision and its confirmation.
    formula.each_edge(2, control);
    add("one failure", bounds_of({heap, heap0}), formula.figures(6000 + 50 * n_, 26e3 + 50 * n_));
  }

  int size_;
  double n_ = size_;
  Table& table_;
  std::vector<int> eight_ = spread_list(8, size_);
  std::vector<int> all_ = spread_list(size_, size_);
  std::vector<std::shared_ptr<Group>> kept_{all_.size()};
  SimulatedHosts hosts_;
  HeapByRank heaps_;
};

}  // namespace

int main(int argc, char** argv) try {
  bool checks = false;
  std::vector<int> sizes{8, 64, 512};
  bench::Options options("how the costs of calls grow with the number of hosts");
  options.add("--check", checks, "fail if a figure grows faster than documented");
  options.add("hosts", sizes, "numbers of hosts (8 64 512)", bench::Range{8, 32768});
  options.parse(argc, argv);
  Table table;
  for (const int size : sizes) {
    measure_rendezvous(size, table);
    Job(size, table).measure();
  }
  table.print();
  return checks && !table.is_within_bounds() ? 1 : 0;
} catch (const std::exception& error) {
  fmt::print(stderr, "scale: {}\n", error.what());
  return 1;
}
