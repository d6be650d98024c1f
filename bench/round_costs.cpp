// SPDX-License-Identifier: Apache-2.0
// Counts the messages and bytes that ranks send over TCP in one gather: of eight ranks on eight hosts, of the ranks of
// one host, and of all ranks. It runs many small processes on one machine, which imitate hosts by users, and therefore
// needs root. This program replaces the functions that write to sockets, so that it counts without a change of the
// library. Prints one JSON line per case. Without root it exits with status 77, which skips the test.
//   round_costs [--check] [HOSTS...]
// With --check it fails if the bytes per rank grow faster with the number of hosts than documented
// (docs/explanation/cost-model.md).

#include <dlfcn.h>
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <map>
#include <numeric>
#include <vector>

#include "bench/harness/options.hpp"
#include "muster/gather.hpp"
#include "tests/support/imitated_hosts.hpp"

namespace {

std::atomic<std::uint64_t> sent_messages{0};
std::atomic<std::uint64_t> sent_bytes{0};

ssize_t counted(ssize_t bytes) {
  if (bytes > 0) {
    sent_messages.fetch_add(1, std::memory_order_relaxed);
    sent_bytes.fetch_add(static_cast<std::uint64_t>(bytes), std::memory_order_relaxed);
  }
  return bytes;
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" ssize_t sendmsg(int socket, const msghdr* message, int flags) {
  static auto* const original = next<ssize_t(int, const msghdr*, int)>("sendmsg");
  return counted(original(socket, message, flags));
}
extern "C" ssize_t send(int socket, const void* bytes, size_t length, int flags) {
  static auto* const original = next<ssize_t(int, const void*, size_t, int)>("send");
  return counted(original(socket, bytes, length, flags));
}

namespace {

constexpr int ranks_per_host = 8;
constexpr int repetitions = 5;
constexpr int skipped = 77;

struct Counts {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
};

/// The lists that are gathered. The root is on the first host, and the second list is on the last host.
enum Case : std::size_t { across_hosts, on_one_host, all_of_them, cases };
constexpr std::array<const char*, cases> names = {"8 of 8 hosts", "8 of one host", "all"};

std::vector<int> list_of(Case which, int size) {
  std::vector<int> list(which == all_of_them ? static_cast<std::size_t>(size) : 8);
  std::iota(list.begin(), list.end(), which == on_one_host ? size - 8 : 0);
  const int hosts = size / ranks_per_host;
  if (which == across_hosts)
    for (int i = 0; i < 8; ++i) list[static_cast<std::size_t>(i)] = i * hosts / 8 * ranks_per_host + i;
  return list;
}

/// Runs one rank. Writes the smallest counts of several gathers, because a late rank may be asked for its progress.
void run_rank(const std::string& address, int rank, int hosts, Counts* results) {
  const int size = hosts * ranks_per_host;
  const auto group = muster::test::join_on_host(address, rank, size, hosts, std::chrono::seconds(120));
  const muster::Config config = muster::Config::object({{"rank", rank}});
  for (std::size_t which = 0; which < cases; ++which) {
    const std::vector<int> list = list_of(static_cast<Case>(which), size);
    for (int turn = 0; turn < repetitions; ++turn) {
      group->barrier();
      // The messages of the barrier leave before it ends on the last rank.
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const Counts before{sent_messages, sent_bytes};
      (void)muster::get_configs_parallel(&config, list, *group);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const Counts now{sent_messages - before.messages, sent_bytes - before.bytes};
      Counts& result = results[which];
      if (turn == 0 || now.bytes < result.bytes) result = now;
    }
  }
  group->barrier();
}

struct Figures {
  double mean_bytes = 0;  // per rank
  double mean_messages = 0;
  std::uint64_t most_bytes = 0;  // of one rank
};

std::vector<Figures> measure(int hosts) {
  const auto size = static_cast<std::size_t>(hosts * ranks_per_host);
  const std::size_t bytes = size * cases * sizeof(Counts);
  auto* const memory =
      static_cast<Counts*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const std::string address = muster::test::free_local_address();
  std::fflush(nullptr);
  std::vector<pid_t> pids;
  for (std::size_t rank = 0; rank < size; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      try {
        run_rank(address, static_cast<int>(rank), hosts, memory + rank * cases);
      } catch (const std::exception& error) {
        fmt::print(stderr, "round_costs: rank {} of {}: {}\n", rank, size, error.what());
        ::_exit(1);
      }
      ::_exit(0);
    }
    pids.push_back(pid);
  }
  bool is_well = true;
  for (const pid_t pid : pids) {
    int status = 0;
    is_well = ::waitpid(pid, &status, 0) == pid && status == 0 && is_well;
  }
  if (!is_well) throw std::runtime_error("ranks have failed");
  std::vector<Figures> all;
  for (std::size_t which = 0; which < cases; ++which) {
    Figures figures;
    for (std::size_t rank = 0; rank < size; ++rank) {
      const Counts& counts = memory[rank * cases + which];
      figures.mean_bytes += static_cast<double>(counts.bytes) / static_cast<double>(size);
      figures.mean_messages += static_cast<double>(counts.messages) / static_cast<double>(size);
      figures.most_bytes = std::max(figures.most_bytes, counts.bytes);
    }
    fmt::print(
        "{{\"ranks\": {}, \"hosts\": {}, \"gather\": \"{}\", \"bytes_per_rank\": {:.0f}, \"messages_per_rank\": "
        "{:.2f}, \"most_bytes\": {}}}\n",
        size, hosts, names[which], figures.mean_bytes, figures.mean_messages, figures.most_bytes);
    all.push_back(figures);
  }
  ::munmap(memory, bytes);
  return all;
}

/// Returns the exponent with which a figure grows.
double exponent(double first, double last, double growth) {
  return std::log(last / first) / std::log(growth);
}

}  // namespace

int main(int argc, char** argv) try {
  if (::geteuid() != 0) {
    fmt::print("skipped: imitated hosts need root\n");
    return skipped;
  }
  bool checks = false;
  std::vector<int> hosts{8, 16, 32};
  bench::Options options("messages and bytes that ranks send over TCP in one gather");
  options.add("--check", checks, "fail if the bytes per rank grow faster than documented");
  options.add("hosts", hosts, "numbers of hosts (8 16 32)");
  options.parse(argc, argv);
  std::vector<std::vector<Figures>> all;
  for (const int count : hosts) all.push_back(measure(count));
  if (!checks) return 0;
  const double growth = static_cast<double>(hosts.back()) / hosts.front();
  for (std::size_t which = 0; which < cases; ++which) {
    const double grows = exponent(all.front()[which].mean_bytes, all.back()[which].mean_bytes, growth);
    // The levels of the tree grow with the logarithm of the hosts.
    const double most = which == all_of_them ? 0.5 : 0.2;
    fmt::print("{}: bytes per rank grow with exponent {:.2f}, at most {} is expected\n", names[which], grows, most);
    // The exponent is not a number if nothing was counted.
    if (!(grows <= most)) return 1;
  }
} catch (const std::exception& error) {
  fmt::print(stderr, "round_costs: {}\n", error.what());
  return 1;
}
