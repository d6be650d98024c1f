// SPDX-License-Identifier: Apache-2.0
// One rank runs out of file descriptors or memory at some step of an operation. Every rank receives the same error at
// once, with the rank and the cause, and the group remains usable.

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "muster/shared_arena.hpp"
#include "src/group/group.hpp"
#include "src/os/fault.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/merge_model.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
using namespace muster::test;

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t elements = 20000;

/// A resource that one rank runs out of.
struct Shortage {
  std::string words;                    // text that the error must contain
  std::function<void(int step)> begin;  // fails the n-th use, counted from 0
  std::function<bool()> end;  // returns whether a use has failed; false if only the end of the call can show it
  bool may_fail_group = false;
};

int uses_left = 0;
bool counts_allocations = false;
int call_error = 0;

Shortage of_calls(const char* name, int error) {
  return {name,
          [error](int step) {
            uses_left = step;
            call_error = error;
            os::set_fault_hook([](std::string_view, std::string_view) { return uses_left-- == 0 ? call_error : 0; });
          },
          [] {
            os::set_fault_hook(nullptr);
            return uses_left < 0;
          }};
}

/// Uses the real limit.
Shortage of_descriptors() {
  rlimit limit{};
  RANK_CHECK(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  return {"Raise the limit of open files (ulimit -n)",
          [limit](int step) {
            const int next = ::dup(STDIN_FILENO);
            ::close(next);
            const rlimit lower{static_cast<rlim_t>(next + step), limit.rlim_max};
            RANK_CHECK(::setrlimit(RLIMIT_NOFILE, &lower) == 0);
          },
          [limit] {
            RANK_CHECK(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
            return false;
          }};
}

/// Allocations also fail between the steps that are reported to the other ranks, and after the last step. Then all
/// ranks get the cause, but the group has failed.
Shortage of_allocations() {
  return {"out of memory",
          [](int step) {
            uses_left = step;
            counts_allocations = true;
          },
          [] {
            counts_allocations = false;
            return uses_left < 0;
          },
          true};
}

/// Runs a call of the library, with the shortage during it if there is one.
using Around = std::function<void(const std::function<void()>& call)>;

struct Operation {
  std::string name;
  std::function<void(Group&)> prepare;             // runs before the shortage begins; may be empty
  std::function<void(Group&, const Around&)> run;  // collective; checks every byte
  bool keeps_group = false;                        // even if it runs out of memory
};

std::vector<int> list_of(const Group& group) {
  return ranks_from(group.size() - 1, group.size());
}

Tensor tensor_of(int rank) {
  return pattern(DType::u32, {elements}, static_cast<std::uint64_t>(rank) + 1);
}

void plainly(const std::function<void()>& call) {
  call();
}

void gather(const Tensor& mine, Group& group, const Around& around) {
  const std::vector<int> list = list_of(group);
  GatheredTensors all;
  around([&] { all = get_tensors_parallel(mine, list, group); });
  RANK_CHECK(all.size() == (group.rank() == list.front() ? list.size() : 0));
  for (const auto& [rank, tensor] : all.present()) RANK_CHECK(bitwise_equal(tensor, tensor_of(rank)));
}

void merge(const Merge& kind, Group& group, const Around& around) {
  const std::vector<int> list = list_of(group);
  const Tensor mine = tensor_of(group.rank());
  MergeResult merged;
  around([&] { merged = merge_tensor_parallel(mine, kind, list, group); });
  RANK_CHECK(merged.tensor().has_value() == (group.rank() == list.front()));
  if (!merged.tensor()) return;
  std::vector<Tensor> sources;
  for (const int rank : list) sources.push_back(tensor_of(rank));
  RANK_CHECK(bitwise_equal(*merged.tensor(), merge_model(kind, sources)));
}

void stream(std::uint64_t layers, Group& group, const Around& around) {
  const std::vector<int> list = list_of(group);
  std::uint64_t taken = 0;
  const LayerSource source = [&, next = std::uint64_t{0}]() mutable -> std::optional<Config> {
    if (next++ == layers) return std::nullopt;
    return tensor_of(group.rank());
  };
  const LayerConsumer consume = [&](LayerPart& part) {
    ++taken;
    for (const auto& [rank, config] : part.present()) RANK_CHECK(bitwise_equal(config.as_tensor(), tensor_of(rank)));
  };
  around([&] { gather_each(source, list, group, consume); });
  RANK_CHECK(taken == (group.rank() == list.front() ? layers : 0));
}

/// Another group of the same ranks, which must work.
void duplicate(bool tied, Group& group, const Around& around) {
  std::shared_ptr<Group> copy;
  around([&] { copy = tied ? std::shared_ptr<Group>(group::inside(group).companion()) : group.duplicate(); });
  copy->barrier();
}

std::vector<Operation> operations_of(const Tensor& lent) {
  const auto own = [](Group& group, const Around& around) { gather(tensor_of(group.rank()), group, around); };
  const auto lend = [&lent](Group& group, const Around& around) { gather(lent, group, around); };
  return {
      {"gather", {}, own},
      {"gather, after a gather", [own](Group& group) { own(group, plainly); }, own},
      {"arena", {}, lend},
      {"arena, after a gather", [own](Group& group) { own(group, plainly); }, lend},
      {"concat", {}, [](Group& group, const Around& around) { merge(merge::concat(0), group, around); }},
      {"sum", {}, [](Group& group, const Around& around) { merge(merge::sum(), group, around); }},
      {"stream", {}, [](Group& group, const Around& around) { stream(2, group, around); }},
      {"duplicate", {}, [](Group& group, const Around& around) { duplicate(false, group, around); }, true},
      {"companion", {}, [](Group& group, const Around& around) { duplicate(true, group, around); }, true},
  };
}

/// The outcome on one rank, sent to all ranks.
struct End {
  std::int32_t kind = -1;  // -1: success
  std::int32_t rank = -1;
  std::int32_t milliseconds = 0;
  bool is_over = false;  // the step was not reached
  std::array<char, 500> words{};
};

/// Runs one operation in a new group, with the shortage at one step of one rank. Returns false if the operation ended
/// before that step.
bool fails_alike(Group& group, const Operation& operation, const Shortage& shortage, int origin, int step) {
  const std::string place =
      operation.name + ", rank " + std::to_string(origin) + ", step " + std::to_string(step) + ", " + shortage.words;
  const auto fresh = group.duplicate();
  if (operation.prepare) operation.prepare(*fresh);
  End mine;
  const auto run_short = [&](const std::function<void()>& call) {
    const Clock::time_point begin = Clock::now();
    const bool is_origin = group.rank() == origin;
    if (is_origin) shortage.begin(step);
    std::optional<Error> failure;
    try {
      call();
    } catch (const Error& error) {
      failure = error;
    }
    if (is_origin) mine.is_over = !shortage.end() && !failure;
    mine.milliseconds =
        static_cast<std::int32_t>(std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count());
    if (failure) throw Error(*failure);
  };
  try {
    operation.run(*fresh, run_short);
  } catch (const RankFailure& failure) {
    throw RankFailure(place + ": " + failure.what());
  } catch (const Error& error) {
    mine.kind = static_cast<std::int32_t>(error.kind());
    mine.rank = error.rank().value_or(-1);
    std::strncpy(mine.words.data(), error.what(), mine.words.size() - 1);
  }
  std::vector<End> all(static_cast<std::size_t>(group.size()));
  group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  const std::string words = mine.words.data();
  const auto expect = [&](bool is_true, const char* what) {
    if (!is_true) throw RankFailure(place + ": " + words + ": " + what);
  };
  for (const End& end : all) expect(end.milliseconds < 2000, "it took longer than two seconds");
  if (const auto failure = fresh->error()) {
    expect(shortage.may_fail_group && !operation.keeps_group, "the group has failed");
    expect(failure->rank() == origin && std::string(failure->what()).find(shortage.words) != std::string::npos,
           "the group has failed with another cause");
    return true;
  }
  for (const End& end : all)
    expect(end.kind == mine.kind && end.rank == mine.rank && end.words == mine.words, "not all ranks have one cause");
  if (mine.kind != -1) {
    expect(mine.rank == origin && words.find("rank " + std::to_string(origin) + " (host ") != std::string::npos,
           "the words do not name the rank");
    expect(words.find(shortage.words) != std::string::npos, "the words do not say why");
  }
  try {
    operation.run(*fresh, plainly);
  } catch (const Error& error) {
    throw RankFailure(place + ": the call after \"" + words + "\" has failed: " + error.what());
  }
  return !all[static_cast<std::size_t>(origin)].is_over;
}

}  // namespace

// The library's own allocations also use this operator.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return counts_allocations && uses_left-- == 0 ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
}
void* operator new(std::size_t bytes) {
  void* memory = operator new(bytes, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

TEST_CASE(
    "a rank is short of descriptors or memory at each step: all have the cause within two seconds, and continue") {
  for (std::size_t which = 0; which < 2 * operations_of(Tensor()).size(); ++which) {
    const int size = which % 2 == 0 ? 2 : 3;
    CAPTURE(size);
    CAPTURE(operations_of(Tensor())[which / 2].name);
    const auto fail_at_each_step = [&](Group& group) {
      SharedArena arena(1 << 20);
      Tensor lent = arena.allocate(DType::u32, {elements});
      std::memcpy(lent.mutable_data(), tensor_of(group.rank()).data(), lent.nbytes());
      std::vector<Shortage> shortages = {of_descriptors()};
      // Over files, rounds and messages use such calls: if they fail, the group fails. Over TCP, a connection ends if
      // it lacks memory for a message.
      if (group.kind() != "file") {
        shortages.push_back(of_calls("ENOMEM", ENOMEM));
        const bool has_connections = group.kind() == "tcp";
        shortages.push_back(size == 2 || has_connections ? of_calls("ENFILE", ENFILE) : of_allocations());
      }
      const Operation operation = operations_of(lent)[which / 2];
      for (const Shortage& shortage : shortages)
        for (int origin = 0; origin < size; ++origin)
          for (int step = 0; fails_alike(group, operation, shortage, origin, step); ++step) RANK_CHECK(step < 2000);
    };
    // Several hundred failures in succession.
    check_ended(try_ranks(size, fail_at_each_step, std::chrono::seconds(200)));
  }
}
