// SPDX-License-Identifier: Apache-2.0
// Measures how the cost of the control plane grows with the number of ranks and tensors. It runs many small processes
// on one machine, whose tensors have a few bytes each. For the root and for one other rank it measures, per exchange,
// the CPU time, the bytes received and the peak of the heap. For the group itself it measures the time of the
// rendezvous and the memory. It fits lines, and a term that is quadratic in the number of ranks, which shows designs
// that have such a cost. Prints JSON lines, then tables.

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdlib.h>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <vector>

#include "bench/counted_heap.hpp"
#include "bench/counting_group.hpp"
#include "bench/harness/linear_fit.hpp"
#include "bench/harness/measure.hpp"
#include "bench/harness/options.hpp"
#include "bench/harness/ranks.hpp"
#include "muster/gather.hpp"
#include "muster/group.hpp"

namespace {

struct Settings {
  std::vector<int> ranks = {8, 64, 128, 256, 512};
  std::vector<int> tensors = {0, 100, 1000};
  int repetitions = 7;
  bool fails_on_squares = false;
};

/// The results that one rank of a case reports to the parent.
struct Figures {
  double meeting_seconds = 0;
  double meeting_cpu = 0;
  std::uint64_t group_heap = 0;  // the memory that a rank keeps for its group
  std::uint64_t group_anonymous = 0;
  double cpu = 0;  // per exchange; the median
  double seconds = 0;
  std::uint64_t heap = 0;  // the peak during an exchange, minus the heap before it
  std::uint64_t anonymous = 0;
  std::uint64_t told_by_rounds = 0;
  std::uint64_t told_by_messages = 0;
  std::uint64_t rounds = 0;
};

struct Case {
  int ranks = 0;
  int tensors = 0;
  Figures first;
  Figures other;
};

double thread_cpu() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double wall() {
  return static_cast<double>(bench::now_ns()) * 1e-9;
}

/// Returns the anonymous memory of this process that is in RAM.
std::uint64_t anonymous_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:")) {
      return std::stoull(line.substr(8)) << 10;
    }
  }
  return 0;
}

/// Returns a layer with `tensors` tensors of eight bytes each.
muster::Config layer_of(int tensors, const std::vector<std::byte>& memory) {
  muster::ConfigObject members;
  members.reserve(static_cast<std::size_t>(tensors) + 1);
  members.insert("type", "linear");
  for (int i = 0; i < tensors; ++i) {
    members.insert(fmt::format("layers.{}.weight", i),
                   muster::Tensor::borrow({muster::DType::u8, {8}, memory.data() + (i % 8) * 8}));
  }
  return members;
}

/// Runs one rank. Returns its figures for each number of tensors.
std::vector<Figures> run_rank(const std::string& key, int rank, int size, const Settings& settings) {
  const std::uint64_t heap_before = bench::heap_now();
  const std::uint64_t anonymous_before = anonymous_bytes();
  const double begin = wall();
  const double cpu_begin = thread_cpu();
  const auto inner = muster::local_group(
      {.key = key, .rank = rank, .size = size, .timeout = std::chrono::seconds(300), .global_ranks = {}});
  Figures base;
  base.meeting_seconds = wall() - begin;
  base.meeting_cpu = thread_cpu() - cpu_begin;
  base.group_heap = bench::heap_now() - heap_before;
  base.group_anonymous = anonymous_bytes() - std::min(anonymous_bytes(), anonymous_before);
  const auto group = std::make_shared<bench::CountingGroup>(inner);
  std::vector<int> list(static_cast<std::size_t>(size));
  std::iota(list.begin(), list.end(), 0);
  std::vector<Figures> all;
  const std::vector<std::byte> memory(64);
  for (const int tensors : settings.tensors) {
    Figures figures = base;
    const muster::Config layer = layer_of(tensors, memory);
    std::vector<double> cpu;
    std::vector<double> seconds;
    for (int turn = 0; turn <= settings.repetitions; ++turn) {
      group->barrier();
      (void)group->take();
      const std::uint64_t anonymous = anonymous_bytes();
      (void)bench::heap_peak();
      const std::uint64_t before = bench::heap_now();
      const double wall_begin = wall();
      const double exchange_begin = thread_cpu();
      const muster::GatheredConfigs result = muster::get_configs_parallel(&layer, list, *group);
      const double spent = thread_cpu() - exchange_begin;
      if (turn == 0) {
        continue;  // this turn makes and maps the segments
      }
      cpu.push_back(spent);
      seconds.push_back(wall() - wall_begin);
      figures.heap = bench::heap_peak() - before;
      const std::uint64_t now = anonymous_bytes();
      figures.anonymous = std::max(figures.anonymous, now - std::min(now, anonymous));
      const bench::Told told = group->take();
      figures.told_by_rounds = told.by_rounds;
      figures.told_by_messages = told.by_messages;
      figures.rounds = told.rounds;
      if (rank == 0 && result.size() != static_cast<std::size_t>(size)) {
        throw std::runtime_error("an entry is missing");
      }
    }
    figures.cpu = bench::median(cpu);
    figures.seconds = bench::median(seconds);
    all.push_back(figures);
  }
  group->barrier();
  return all;
}

std::vector<Case> run_case(int size, const Settings& settings) {
  const std::string key = fmt::format("control-plane-{}-{}-{}", getpid(), size, bench::now_ns());
  const std::size_t each = settings.tensors.size();
  const bench::Mapping mapping(2 * each * sizeof(Figures), bench::Mapping::Kind::shared);
  auto* const results = reinterpret_cast<Figures*>(mapping.bytes().data());
  std::fflush(nullptr);
  const pid_t parent = getpid();
  std::vector<pid_t> pids;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) {
      std::perror("control_plane: fork");
      break;
    }
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) {
        _exit(1);
      }
      try {
        const std::vector<Figures> all = run_rank(key, rank, size, settings);
        if (rank == 0 || rank == size - 1) {
          std::copy(all.begin(), all.end(), results + (rank == 0 ? 0 : each));
        }
      } catch (const std::exception& error) {
        std::fprintf(stderr, "control_plane: rank %d of %d: %s\n", rank, size, error.what());
        _exit(1);
      }
      _exit(0);
    }
    pids.push_back(pid);
  }
  bool good = pids.size() == static_cast<std::size_t>(size);
  for (const pid_t pid : pids) {
    if (!good) {
      kill(pid, SIGKILL);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    good = good && status == 0;
  }
  if (!good) {
    throw std::runtime_error(fmt::format("{} ranks did not end well", size));
  }
  std::vector<Case> cases;
  for (std::size_t i = 0; i < each; ++i) {
    cases.push_back({size, settings.tensors[i], results[i], results[each + i]});
  }
  return cases;
}

void print_figures(const Case& one, const char* who, const Figures& figures) {
  fmt::print(
      R"({{"scenario":"control-plane","ranks":{},"tensors":{},"who":"{}","meeting_s":{:.4f},"meeting_cpu_s":{:.4f},)"
      R"("group_heap":{},"group_anonymous":{},"cpu_s":{:.6f},"wall_s":{:.6f},"heap":{},"anonymous":{},)"
      R"("told_by_rounds":{},"told_by_messages":{},"rounds":{}}})"
      "\n",
      one.ranks, one.tensors, who, figures.meeting_seconds, figures.meeting_cpu, figures.group_heap,
      figures.group_anonymous, figures.cpu, figures.seconds, figures.heap, figures.anonymous, figures.told_by_rounds,
      figures.told_by_messages, figures.rounds);
}

/// Prints the fit of one quantity over all cases, and the quadratic term. Returns the share of the quadratic term in
/// the largest case.
double print_lines(const std::string& name, const std::vector<Case>& cases, bool of_first, bool per_case,
                   const std::function<double(const Figures&)>& quantity, double unit, const char* unit_name) {
  std::vector<bench::Observation> linear;
  std::vector<bench::Observation> with_square;
  double largest = 0;
  double value_at_largest = 0;
  for (const Case& one : cases) {
    const double ranks = one.ranks;
    const double tensors = one.tensors;
    // Quantities that do not depend on the tensors are the same in all cases with the same number of ranks.
    if (!per_case && one.tensors != cases.front().tensors) {
      continue;
    }
    std::vector<double> terms = {1, ranks};
    if (per_case) {
      terms.push_back(of_first ? ranks * tensors : tensors);
    }
    const double value = quantity(of_first ? one.first : one.other) / unit;
    linear.push_back({terms, value});
    terms.push_back(ranks * ranks);
    with_square.push_back({terms, value});
    if (ranks >= largest) {
      largest = ranks;
      value_at_largest = linear.back().value;
    }
  }
  if (linear.size() < linear.front().terms.size() + 2) {
    fmt::print("  {:<44} too few cases for a line\n", name);
    return 0;
  }
  const bench::Fit line = bench::fit_lines(linear);
  const bench::Fit square = bench::fit_lines(with_square);
  const double share = square.slopes.back() * largest * largest / value_at_largest;
  fmt::print("  {:<44} {:>10.4g} {:>10.4g}", name, line.slopes[0], line.slopes[1]);
  if (per_case) {
    fmt::print(" {:>12.4g}", line.slopes[2]);
  } else {
    fmt::print(" {:>12}", "-");
  }
  fmt::print(" {:>5} {:>8.1f} % {:>8.1f} %\n", unit_name, 100 * line.residual, 100 * share);
  return share;
}

/// Returns whether the quantities that can be counted exactly grow linearly with ranks and tensors, and not with the
/// square of the ranks. These are the bytes received, and the memory of an exchange and of the group.
bool print_fits(const std::vector<Case>& cases, bool has_tensors) {
  constexpr double most_of_a_square = 0.1;
  bool is_linear = true;
  for (const bool first : {true, false}) {
    fmt::print("\n{}: a + b * ranks + c * {}; the part of a square, at the most ranks\n",
               first ? "the first rank" : "another rank", first ? "ranks * tensors of each" : "tensors of each");
    fmt::print("  {:<44} {:>10} {:>10} {:>12} {:>5} {:>10} {:>10}\n", "", "a", "b", "c", "", "residual", "square");
    const auto seconds = [&](const char* name, double Figures::*quantity, bool per_case) {
      const auto value = [quantity](const Figures& of) { return of.*quantity; };
      (void)print_lines(name, cases, first, per_case && has_tensors, value, 1e-6, "us");
    };
    const auto bytes = [&](const char* name, std::uint64_t Figures::*quantity, bool per_case) {
      const auto value = [quantity](const Figures& of) { return static_cast<double>(of.*quantity); };
      const double square = print_lines(name, cases, first, per_case && has_tensors, value, 1, "B");
      is_linear = is_linear && square < most_of_a_square;
    };
    seconds("CPU time of an exchange", &Figures::cpu, true);
    bytes("told by rounds", &Figures::told_by_rounds, true);
    if (first) {
      bytes("told by messages", &Figures::told_by_messages, true);
    }
    bytes("heap at the peak of an exchange", &Figures::heap, true);
    bytes("heap of the group", &Figures::group_heap, false);
    seconds("CPU time to meet", &Figures::meeting_cpu, false);
  }
  return is_linear;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  bench::Options options("control plane: what ranks and tensors cost the first rank and the others");
  options.add("--ranks", settings.ranks, "numbers of ranks (8,64,128,256,512)");
  options.add("--tensors", settings.tensors, "tensors of each rank (0,100,1000)");
  options.add("--repetitions", settings.repetitions, "exchanges of each case (7)");
  options.add("--check", settings.fails_on_squares,
              "fail where a tenth of any number of bytes grows with the square of the ranks");
  options.parse(argc, argv);
  // The descriptors of small exchanges would be in their slots. With this setting they are messages, as in large
  // exchanges.
  ::setenv("MUSTER_EAGER", "0", 1);
  try {
    std::vector<Case> cases;
    for (const int ranks : settings.ranks) {
      for (const Case& one : run_case(ranks, settings)) {
        print_figures(one, "first", one.first);
        print_figures(one, "other", one.other);
        std::fflush(stdout);
        cases.push_back(one);
      }
    }
    const bool has_tensors = settings.tensors.size() > 1;
    const bool is_linear = print_fits(cases, has_tensors);
    return settings.fails_on_squares && !is_linear ? 1 : 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "control_plane: %s\n", error.what());
    return 1;
  }
}
