// SPDX-License-Identifier: Apache-2.0
// Runs many ranks on many imitated hosts of one machine: `scale RANKS HOSTS ROUNDS OPEN_FILES [VICTIM]`. Each rank may
// have OPEN_FILES open files (soft and hard limit).
//
// In the first part the ranks form a TCP group, run ROUNDS rounds, gather 100 KiB of each rank, export a small model to
// which each rank contributes to every tensor, and end in order. In the second part they do the same, but the program
// kills the rank VICTIM after the export. All other ranks must throw
// one cause that names it within two seconds. With VICTIM "ends" only the first part runs; with a number only the
// second.

#include <fmt/core.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "muster/live_export.hpp"
#include "src/base/fixed_string.hpp"
#include "src/multihost/context.hpp"
#include "src/multihost/forwarding.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/imitated_hosts.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

struct Job {
  int ranks = 0;
  int hosts = 0;
  int rounds = 0;
  rlim_t open_files = 0;
  int victim = 0;  ///< -1: the ranks end in order
};

/// The results of one rank, in memory that the parent shares.
struct Report {
  std::atomic<std::uint64_t> joined{0};
  std::atomic<std::uint64_t> rounds_over{0};
  std::atomic<std::uint64_t> gathered{0};
  std::atomic<std::uint64_t> worked{0};    ///< the gather and the export are over
  std::atomic<std::uint64_t> over{0};      ///< the rank has thrown, or has ended in order
  std::atomic<std::uint64_t> resident{0};  // private memory of the rank in bytes
  std::atomic<std::uint64_t> descriptors{0};
  std::atomic<int> named{-1};
  std::array<char, 2048> words{};
};

std::uint64_t now() {
  return static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
}

double seconds(std::uint64_t from, std::uint64_t to) {
  return std::chrono::duration<double>(Clock::duration(static_cast<Clock::rep>(to - from))).count();
}

std::uint64_t own_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("RssAnon:")) return std::strtoull(line.c_str() + 8, nullptr, 10) << 10;
  return 0;
}

constexpr int tensors = 6;

/// A tensor of bytes with eight rows (or columns) of each rank.
Tensor whole_tensor(int number, int ranks) {
  const std::int64_t long_side = 8 * std::int64_t{ranks};
  const Shape shape = number % 2 == 0 ? Shape{long_side, 32} : Shape{32, long_side};
  return pattern(DType::u8, shape, static_cast<std::uint64_t>(number));
}

void export_and_check(Group& group, const std::string& out) {
  std::vector<TensorPart> parts;
  for (int number = 0; number < tensors; ++number) {
    const Tensor whole = whole_tensor(number, group.size());
    const std::int64_t begin = 8 * std::int64_t{group.rank()};
    const int axis = number % 2;
    const Tensor part = Tensor::copy_of(whole.view().slice(axis, begin, begin + 8));
    parts.push_back({fmt::format("tensor{}", number), part, whole.shape(),
                     axis == 0 ? std::vector<std::int64_t>{begin, 0} : std::vector<std::int64_t>{0, begin}});
  }
  // Two tensors per file.
  export_model(parts, out, "", group,
               {.max_shard_size = std::uint64_t{600} * static_cast<std::uint64_t>(group.size())});
  if (group.rank() != 0) return;
  const auto found = tensors_of(out);
  RANK_CHECK(found.size() == tensors);
  for (int number = 0; number < tensors; ++number)
    RANK_CHECK(bitwise_equal(found.at(fmt::format("tensor{}", number)), whole_tensor(number, group.size())));
}

void be_rank(const Job& job, const std::string& address, const std::string& out, int rank, Report& report) {
  const rlimit limit{job.open_files, job.open_files};
  ::setrlimit(RLIMIT_NOFILE, &limit);
  try {
    auto group = join_on_host(address, rank, job.ranks, job.hosts, 240s);
    report.joined = now();
    for (int round = 0; round < job.rounds; ++round) {
      std::vector<int> all(static_cast<std::size_t>(job.ranks));
      const int mine = rank * 1000 + round;
      group->all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
      for (int other = 0; other < job.ranks; ++other)
        if (all[static_cast<std::size_t>(other)] != other * 1000 + round) throw std::runtime_error("a record is wrong");
    }
    report.rounds_over = now();
    gather_and_check(*group, ranks_from(0, job.ranks), 100 << 10, 0);
    report.gathered = now();
    export_and_check(*group, out);
    report.worked = now();
    report.resident = own_memory();
    const std::filesystem::directory_iterator open("/proc/self/fd");
    report.descriptors = static_cast<std::uint64_t>(std::distance(begin(open), end(open)));
    if (job.victim < 0) {
      group.reset();
      if (!multihost::end_all("tcp")) throw std::runtime_error("the end was not in order");
    }
    while (group) group->barrier();
  } catch (const Error& error) {
    report.named = error.rank().value_or(-1);
    put_text(report.words, error.what());
  } catch (const std::exception& error) {
    put_text(report.words, error.what());
  }
  report.over = now();
}

/// Waits until all ranks except the victim have set this member of their reports.
bool wait_for(const std::vector<Report*>& reports, int except, std::atomic<std::uint64_t> Report::*what,
              std::chrono::seconds longest) {
  const auto until = Clock::now() + longest;
  const Report* const excepted = except < 0 ? nullptr : reports[static_cast<std::size_t>(except)];
  const auto has_come = [&](const Report* report) {
    return report == excepted || (report->*what).load() != 0 || report->over != 0;
  };
  while (!std::ranges::all_of(reports, has_come)) {
    if (Clock::now() > until) return false;
    std::this_thread::sleep_for(2ms);
  }
  return true;
}

std::uint64_t latest(const std::vector<Report*>& reports, std::atomic<std::uint64_t> Report::*what) {
  std::uint64_t last = 0;
  for (const Report* report : reports) last = std::max(last, (report->*what).load());
  return last;
}

int run(const Job& job) {
  const std::size_t bytes = sizeof(Report) * static_cast<std::size_t>(job.ranks);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no shared memory");
  std::vector<Report*> reports;
  for (int rank = 0; rank < job.ranks; ++rank) reports.push_back(new (static_cast<Report*>(memory) + rank) Report);
  const std::string address = free_local_address();
  const TemporaryDirectory output(Medium::memory);
  // The ranks of the imitated hosts belong to different users, who write to the same files.
  ::umask(0);
  std::filesystem::permissions(output.path(), std::filesystem::perms::all);
  const std::uint64_t begin = now();
  const pid_t parent = ::getpid();
  std::vector<pid_t> pids;
  for (int rank = 0; rank < job.ranks; ++rank) {
    const pid_t pid = ::fork();
    if (pid < 0) throw std::runtime_error("fork");
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(3);
      be_rank(job, address, output / "out", rank, *reports[static_cast<std::size_t>(rank)]);
      ::_exit(0);
    }
    pids.push_back(pid);
  }
  const bool have_met = wait_for(reports, job.victim, &Report::joined, 300s);
  const std::uint64_t met = latest(reports, &Report::joined);
  const bool have_worked = have_met && wait_for(reports, job.victim, &Report::worked, 300s);
  const std::uint64_t rounds_over = latest(reports, &Report::rounds_over);
  const std::uint64_t gathered = latest(reports, &Report::gathered);
  const std::uint64_t worked = latest(reports, &Report::worked);
  std::uint64_t last = worked;
  if (job.victim >= 0) {
    std::this_thread::sleep_for(100ms);
    last = now();
    ::kill(pids[static_cast<std::size_t>(job.victim)], SIGKILL);
  }
  const bool are_over = wait_for(reports, job.victim, &Report::over, 120s);
  for (const pid_t pid : pids) ::kill(pid, SIGKILL);
  for (const pid_t pid : pids) ::waitpid(pid, nullptr, 0);

  std::map<std::string, int> causes;
  bool is_right = are_over;
  std::uint64_t resident = 0;
  std::uint64_t descriptors = 0;
  for (int rank = 0; rank < job.ranks; ++rank) {
    const Report& report = *reports[static_cast<std::size_t>(rank)];
    if (rank == job.victim) continue;
    ++causes[get_text(report.words)];
    is_right =
        is_right && report.named == job.victim && report.worked != 0 && (job.victim >= 0 || report.words.front() == 0);
    resident += report.resident;
    descriptors = std::max(descriptors, report.descriptors.load());
  }
  const double took = are_over ? seconds(last, latest(reports, &Report::over)) : -1.0;
  fmt::print(
      "{} ranks on {} hosts, at most {} open files: met after {:.2f} s; {} rounds in {:.2f} s; a gather in {:.2f} s; "
      "an export in {:.2f} s; {:.1f} MiB and at most {} descriptors per rank; {} after {:.2f} s; {} cause(s)\n",
      job.ranks, job.hosts, job.open_files, seconds(begin, met), job.rounds, seconds(met, std::max(met, rounds_over)),
      have_worked ? seconds(rounds_over, gathered) : -1.0, have_worked ? seconds(gathered, worked) : -1.0,
      static_cast<double>(resident) / (1 << 20) / (job.ranks - 1), descriptors,
      job.victim < 0 ? "all ended" : fmt::format("all threw because rank {} was killed", job.victim), took,
      causes.size());
  for (const auto& [words, count] : causes) fmt::print("{} ranks: {}\n", count, words);
  // A busy machine adds up to two seconds.
  return is_right && causes.size() == 1 && (job.victim < 0 || took < 2.0 + 2.0) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5 && argc != 6) {
    fmt::print(stderr, "usage: scale RANKS HOSTS ROUNDS OPEN_FILES [VICTIM | ends]\n");
    return 2;
  }
  if (::geteuid() != 0) {
    fmt::print("skipped: imitated hosts need root\n");
    return 77;
  }
  try {
    // A lower threshold makes few ranks forward packets, as many ranks do.
    multihost::Forwarding::most_direct = 32;
    Job job{std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3]), static_cast<rlim_t>(std::atoi(argv[4])), -1};
    const std::string_view last = argc == 6 ? argv[5] : "";
    if (last == "ends") return run(job);
    if (last.empty() && run(job) != 0) return 1;
    job.victim = last.empty() ? job.ranks / 2 : std::atoi(argv[5]);
    return run(job);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
