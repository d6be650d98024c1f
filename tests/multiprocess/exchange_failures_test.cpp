// SPDX-License-Identifier: Apache-2.0
// One rank runs out of file descriptors or memory at some step of an operation: every rank hears which one and why, at
// once, in the same words, and the group goes on.

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "muster/shared_arena.hpp"
#include "src/os/fault.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/merge_model.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
using namespace muster::test;

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t elements = 20000;

/// What a rank runs out of at its n-th use of it, from 0 on.
class Shortage {
 public:
  virtual ~Shortage() = default;
  virtual void begin(int step) const = 0;
  /// Whether it came to that step.
  virtual bool end() const = 0;
  /// What the words must have.
  [[nodiscard]] virtual std::string words() const = 0;
};

/// Of descriptors, really.
class DescriptorLimit final : public Shortage {
 public:
  void begin(int step) const override {
    const int next = ::dup(STDIN_FILENO);
    ::close(next);
    rlimit lower = limit_;
    lower.rlim_cur = static_cast<rlim_t>(next + step);
    RANK_CHECK(::setrlimit(RLIMIT_NOFILE, &lower) == 0);
  }
  bool end() const override {
    RANK_CHECK(::setrlimit(RLIMIT_NOFILE, &limit_) == 0);
    return false;
  }
  [[nodiscard]] std::string words() const override { return "raise the limit of open files (ulimit -n)"; }

 private:
  static rlimit limit() {
    rlimit now{};
    RANK_CHECK(::getrlimit(RLIMIT_NOFILE, &now) == 0);
    return now;
  }
  rlimit limit_ = limit();
};

/// In the kernel, by the seam.
class FailingCall final : public Shortage {
 public:
  explicit FailingCall(int number) : error_(number) {}
  void begin(int step) const override {
    left = step;
    error = error_;
    os::set_fault_hook([](std::string_view, std::string_view) { return left-- == 0 ? error : 0; });
  }
  bool end() const override {
    os::set_fault_hook(nullptr);
    return left < 0;
  }
  [[nodiscard]] std::string words() const override { return ::strerrorname_np(error_); }

 private:
  int error_;
  static inline int left = 0;
  static inline int error = 0;
};

struct Operation {
  std::string name;
  std::function<void(SyncGroup&)> prepare;  // before the shortage begins; may be empty
  std::function<void(SyncGroup&)> run;      // collective; looks at every byte
};

std::vector<int> list_of(const SyncGroup& group) {
  return ranks_from(group.size() - 1, group.size());
}

Tensor tensor_of(int rank) {
  return pattern(DType::u32, {elements}, static_cast<std::uint64_t>(rank) + 1);
}

void gather(const TensorView& mine, SyncGroup& group) {
  const GatheredTensors all = get_tensors_parallel(mine, list_of(group), group);
  RANK_CHECK(all.size() == (group.rank() == list_of(group).front() ? list_of(group).size() : 0));
  for (const auto& [rank, tensor] : all.present()) RANK_CHECK(bitwise_equal(tensor, tensor_of(rank)));
}

void merge(const Merge& kind, SyncGroup& group) {
  const Merged merged = merge_tensor_parallel(tensor_of(group.rank()), kind, list_of(group), group);
  RANK_CHECK(merged.tensor().has_value() == (group.rank() == list_of(group).front()));
  if (!merged.tensor()) return;
  std::vector<Tensor> sources;
  for (const int rank : list_of(group)) sources.push_back(tensor_of(rank));
  RANK_CHECK(bitwise_equal(*merged.tensor(), merge_model(kind, sources)));
}

void stream(std::uint64_t layers, SyncGroup& group) {
  std::uint64_t taken = 0;
  const auto source = [&, next = std::uint64_t{0}]() mutable -> std::optional<Config> {
    if (next++ == layers) return std::nullopt;
    return tensor_of(group.rank());
  };
  const auto consume = [&](LayerPart& part) {
    ++taken;
    for (const auto& [rank, config] : part.present()) RANK_CHECK(bitwise_equal(config.as_tensor(), tensor_of(rank)));
  };
  gather_each(source, list_of(group), group, consume);
  RANK_CHECK(taken == (group.rank() == list_of(group).front() ? layers : 0));
}

std::vector<Operation> operations_of(const Tensor& lent) {
  return {
      {"gather", {}, [](SyncGroup& group) { gather(tensor_of(group.rank()), group); }},
      {"arena", {}, [&lent](SyncGroup& group) { gather(lent, group); }},
      {"arena later", [](SyncGroup& group) { gather(tensor_of(group.rank()), group); },
       [&lent](SyncGroup& group) { gather(lent, group); }},
      {"concat", {}, [](SyncGroup& group) { merge(concat(0), group); }},
      {"sum", {}, [](SyncGroup& group) { merge(sum(), group); }},
      {"stream", [](SyncGroup& group) { stream(0, group); }, [](SyncGroup& group) { stream(3, group); }},
  };
}

/// How it went on one rank, for all of them.
struct End {
  std::int32_t kind = -1;  // none: well
  std::int32_t rank = -1;
  std::int32_t milliseconds = 0;
  bool is_over = false;  // the step was not reached
  std::array<char, 500> words{};
};

End end_of(SyncGroup& group, const std::function<void(SyncGroup&)>& run) {
  End mine;
  const Clock::time_point begin = Clock::now();
  try {
    run(group);
  } catch (const Error& error) {
    mine.kind = static_cast<std::int32_t>(error.kind());
    mine.rank = error.rank().value_or(-1);
    std::strncpy(mine.words.data(), error.what(), mine.words.size() - 1);
  }
  mine.milliseconds =
      static_cast<std::int32_t>(std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count());
  return mine;
}

/// One operation in a fresh group, with the shortage at one step of one rank. Whether that step was reached.
bool fails_alike(SyncGroup& group, const Operation& operation, const Shortage& shortage, int origin, int step) {
  const auto fresh = group.duplicate();
  if (operation.prepare) operation.prepare(*fresh);
  const bool is_origin = group.rank() == origin;
  if (is_origin) shortage.begin(step);
  End mine = end_of(*fresh, operation.run);
  if (is_origin) mine.is_over = !shortage.end() && mine.kind == -1;
  std::vector<End> all(static_cast<std::size_t>(group.size()));
  group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  const std::string words = mine.words.data();
  const std::string place = operation.name + ", rank " + std::to_string(origin) + ", step " + std::to_string(step) +
                            ", " + shortage.words() + ": " + words;
  const auto expect = [&](bool is_true, const char* what) {
    if (!is_true) throw RankFailure(place + ": " + what);
  };
  for (const End& end : all) {
    expect(end.kind == mine.kind && end.rank == mine.rank && end.words == mine.words, "not all ranks have one cause");
    expect(end.milliseconds < 2000, "it took longer than two seconds");
  }
  if (mine.kind != -1) {
    expect(mine.rank == origin && words.find("rank " + std::to_string(origin) + " (host ") != std::string::npos,
           "the words do not name the rank");
    expect(words.find(shortage.words()) != std::string::npos, "the words do not say why");
  }
  operation.run(*fresh);
  return !all[static_cast<std::size_t>(origin)].is_over;
}

}  // namespace

TEST_CASE("a rank is short of descriptors or memory at each step: all have the cause within two seconds, and go on") {
  for (const int size : {2, 3}) {
    CAPTURE(size);
    const auto ended = try_ranks(size, [&](SyncGroup& group) {
      if (size == 3) ::setenv("MUSTER_SHM", "posix", 1);
      SharedArena arena(1 << 20);
      Tensor lent = arena.allocate(DType::u32, {elements});
      std::memcpy(lent.mutable_data(), tensor_of(group.rank()).data(), lent.nbytes());
      const DescriptorLimit descriptors;
      const FailingCall no_memory(ENOMEM);
      const FailingCall full_table(ENFILE);
      for (const Operation& operation : operations_of(lent))
        for (const Shortage* shortage :
             {static_cast<const Shortage*>(&descriptors), static_cast<const Shortage*>(&no_memory),
              static_cast<const Shortage*>(&full_table)})
          for (int origin = 0; origin < size; ++origin)
            for (int step = 0; fails_alike(group, operation, *shortage, origin, step); ++step) RANK_CHECK(step < 200);
    });
    for (const Ended& one : ended) CHECK_MESSAGE(one.ok(), one.signal, one.words);
  }
}
