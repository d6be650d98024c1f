// SPDX-License-Identifier: Apache-2.0
#pragma once
// Real processes as ranks: forks N children, gives each of them its group, and reports how each ended. If a launcher
// has started the test program itself several times (StartedRanks), no process is forked: each process plays its rank
// in every case.
//
// MUSTER_TEST_TIMER=restart|interrupt|mixed: every forked rank has a timer from its start, like a profiler of
// wall-clock time. It receives SIGPROF every 5 ms, with a handler that does nothing. System calls are restarted after
// the signal (SA_RESTART) or interrupted. With "mixed" they are interrupted in odd ranks.

#include <sys/types.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "muster/error.hpp"
#include "muster/group.hpp"

namespace muster::test {

/// Makes this rank fail, with the location and the message.
class RankFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Sanitizers need address space and memory, and make every step several times slower.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool under_sanitizer = true;
#else
inline constexpr bool under_sanitizer = false;
#endif

/// Checks a condition in a rank. (The macros of doctest count only in the parent.)
#define RANK_CHECK(condition)                                                                                    \
  do {                                                                                                           \
    if (!(condition))                                                                                            \
      throw muster::test::RankFailure(std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " #condition); \
  } while (false)

struct Ended {
  int exit_status = -1;  ///< status of a rank that exited by itself
  int signal = 0;        ///< otherwise the signal that ended it
  std::string words;     ///< the output of the rank: its error message, or the text that it passed to say()
  [[nodiscard]] bool ok() const { return exit_status == 0; }
};

/// Called in a rank: adds text to its Ended.
void say(const std::string& words);

/// A running set of ranks. A test may kill or stop the ranks that it has forked. The destructor kills the ranks that
/// are still alive.
class Ranks {
 public:
  using Body = std::function<void(int rank)>;
  /// Forks `count` processes that run `body`. If it throws, the exception's message becomes the rank's text, and its
  /// exit status is 1. Started ranks do not fork: the first `count` of them run `body` directly. An exception then ends
  /// the program on all ranks. If fewer ranks were started, the case is reported as skipped.
  Ranks(int count, const Body& body);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  /// Returns the pid of a forked rank.
  [[nodiscard]] pid_t pid(int rank) const { return pids_.at(static_cast<std::size_t>(rank)); }
  void signal(int rank, int number) const;
  /// Waits for all ranks. Kills ranks that still run at the deadline; their text is then "hangs". With started ranks
  /// only the result of this rank is known, and the other ranks are reported as successful.
  std::vector<Ended> wait(std::chrono::milliseconds deadline = std::chrono::seconds(60));
  /// Kills a stopped forked rank when all other ranks have ended, or after `longest`. Then behaves as wait().
  std::vector<Ended> wait_and_kill(int stopped, std::chrono::milliseconds longest);

 private:
  std::vector<pid_t> pids_;
  std::vector<int> pipes_;
  std::vector<Ended> played_;  // results of started ranks
};

/// CHECKs that the ranks in `killed` were killed, and that all other ranks succeeded.
void check_ended(const std::vector<Ended>& ended, const std::vector<int>& killed = {});

/// Runs `body` in `count` processes, which make their groups themselves, and CHECKs how they ended.
void run_processes(int count, const std::vector<int>& killed, const Ranks::Body& body);
inline void run_processes(int count, const Ranks::Body& body) {
  run_processes(count, {}, body);
}

/// Called in a rank: returns the Error that the call must throw.
template <class Call>
Error error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  throw RankFailure("nothing was thrown");
}
inline bool says(const Error& error, std::string_view words) {
  return std::string_view(error.what()).find(words) != std::string_view::npos;
}
/// Returns the Error that the call must throw. It must have this kind and contain all of `parts`.
template <class Call>
Error error_of(ErrorKind kind, const std::vector<std::string>& parts, const Call& call) {
  const Error error = error_of(call);
  if (error.kind() != kind) throw RankFailure("an error of another kind: " + std::string(error.what()));
  for (const std::string& part : parts)
    if (!says(error, part)) throw RankFailure("no \"" + part + "\" in: " + error.what());
  return error;
}

/// Sets an environment variable, for a test and the ranks that it forks, or for one rank.
class Setting {
 public:
  Setting(const char* name, const std::string& value) : name_(name) { ::setenv(name, value.c_str(), 1); }
  ~Setting() { ::unsetenv(name_); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* name_;
};

/// Returns a key that no other test uses.
std::string unique_key();

/// Makes one kind of group for the ranks that a test forks. It is created before the fork; each rank calls join().
class GroupMaker {
 public:
  virtual ~GroupMaker() = default;
  [[nodiscard]] virtual std::shared_ptr<Group> join(int rank, std::chrono::milliseconds timeout) const = 0;
};
/// Ranks that a launcher has started. Each of them is the whole test program, so all of them reach every case.
struct StartedRanks {
  int rank;
  int size;
  void (*give_up)();  ///< ends the program on all ranks
};
/// Makes a kind of group available as MUSTER_TEST_GROUP=NAME. Called before main(). `started` is set for kinds whose
/// ranks a launcher has started.
using MakeMaker = std::unique_ptr<GroupMaker> (*)(int size);
using FindStarted = StartedRanks (*)();
bool add_group_kind(const std::string& name, MakeMaker make, FindStarted started = nullptr);

/// The group of the ranks of one test. Created before the fork and used in each rank. It is a local group, or the kind
/// that MUSTER_TEST_GROUP names.
class GroupOf {
 public:
  explicit GroupOf(int size);
  [[nodiscard]] std::shared_ptr<Group> join(int rank,
                                            std::chrono::milliseconds timeout = std::chrono::seconds(20)) const;

 private:
  int size_;
  std::string key_;
  std::unique_ptr<GroupMaker> maker_;  // null for a local group
};

/// All ranks of a group of four.
inline const std::vector<int> four = {0, 1, 2, 3};

/// Returns all ranks of a group, beginning with `first`.
inline std::vector<int> ranks_from(int first, int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  for (int i = 0; i < size; ++i) ranks[static_cast<std::size_t>(i)] = (first + i) % size;
  return ranks;
}

/// Runs `body` in each of the `count` ranks of one group. CHECKs that all ranks except those in `killed` succeeded.
void run_ranks(int count, const std::function<void(Group&)>& body, const std::vector<int>& killed = {});

/// Runs `body` in the ranks of one group, and returns how each rank ended.
std::vector<Ended> try_ranks(int count, const std::function<void(Group&)>& body,
                             std::chrono::milliseconds deadline = std::chrono::seconds(60));

/// Returns the names in /dev/shm that Muster may have created.
std::vector<std::string> shared_memory_names();

}  // namespace muster::test
