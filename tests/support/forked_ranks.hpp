// SPDX-License-Identifier: Apache-2.0
#pragma once
// Real processes as ranks: forks N children, gives each its group, and says how each ended. Where a launcher has
// started the test program itself several times (StartedRanks), nothing is forked: each process plays its rank of every
// case.
// MUSTER_TEST_TIMER=restart|interrupt|mixed: every forked rank has a timer from its beginning, as profilers of
// wall-clock time have it: SIGPROF every 5 ms, with a handler that does nothing. Calls of the kernel are restarted
// after it (SA_RESTART) or interrupted; mixed: interrupted in odd ranks.

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
#include "muster/sync_group.hpp"

namespace muster::test {

/// Fails this rank with the place and the words.
class RankFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Sanitizers need the address space, take memory of their own, and make every step several times as long.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool under_sanitizer = true;
#else
inline constexpr bool under_sanitizer = false;
#endif

/// In a rank: the condition must hold. (doctest's own macros count in the parent only.)
#define RANK_CHECK(condition)                                                                                    \
  do {                                                                                                           \
    if (!(condition))                                                                                            \
      throw muster::test::RankFailure(std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " #condition); \
  } while (false)

struct Ended {
  int exit_status = -1;  ///< of a rank that ended by itself
  int signal = 0;        ///< else the signal that ended it
  std::string words;     ///< what the rank said: its failure, or what it passed to say()
  [[nodiscard]] bool ok() const { return exit_status == 0; }
};

/// Called in a rank: puts words into its Ended.
void say(const std::string& words);

/// A running set of ranks: a test may kill or stop those it has forked. Whoever still lives when it goes is killed.
class Ranks {
 public:
  using Body = std::function<void(int rank)>;
  /// Forks `count` processes that run `body`. An exception's words become the rank's, and its status 1.
  /// Of started ranks the first `count` run it here and now, and an exception ends the program on all ranks; where
  /// fewer were started it is skipped, aloud.
  Ranks(int count, const Body& body);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  /// Of a forked one.
  [[nodiscard]] pid_t pid(int rank) const { return pids_.at(static_cast<std::size_t>(rank)); }
  void signal(int rank, int number) const;
  /// Waits for all; those that still run at the deadline are killed and say "hangs". Of started ranks only this one's
  /// end is known; the others' are taken for good.
  std::vector<Ended> wait(std::chrono::milliseconds deadline = std::chrono::seconds(60));
  /// Kills a forked rank that is stopped when all others have ended, after `longest` at the latest. Then as wait().
  std::vector<Ended> wait_and_kill(int stopped, std::chrono::milliseconds longest);

 private:
  std::vector<pid_t> pids_;
  std::vector<int> pipes_;
  std::vector<Ended> played_;  // by started ranks
};

/// CHECKs that those who were to be killed were, and that all others ended well.
void check_ended(const std::vector<Ended>& ended, const std::vector<int>& killed = {});

/// Runs `body` in `count` processes, which make their groups themselves, and CHECKs how they ended.
void run_processes(int count, const std::vector<int>& killed, const Ranks::Body& body);
inline void run_processes(int count, const Ranks::Body& body) {
  run_processes(count, {}, body);
}

/// In a rank: the Error that the call must throw.
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
/// The same: it is of this kind, and has all of these words.
template <class Call>
Error error_of(ErrorKind kind, const std::vector<std::string>& parts, const Call& call) {
  const Error error = error_of(call);
  if (error.kind() != kind) throw RankFailure("an error of another kind: " + std::string(error.what()));
  for (const std::string& part : parts)
    if (!says(error, part)) throw RankFailure("no \"" + part + "\" in: " + error.what());
  return error;
}

/// A variable of the environment, of a test and the ranks it forks, or of a rank.
class Setting {
 public:
  Setting(const char* name, const std::string& value) : name_(name) { ::setenv(name, value.c_str(), 1); }
  ~Setting() { ::unsetenv(name_); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* name_;
};

/// A key that no other test has.
std::string unique_key();

/// How a kind of group is made by ranks that one test forks: made before the fork, asked for a group in each rank.
class GroupMaker {
 public:
  virtual ~GroupMaker() = default;
  [[nodiscard]] virtual std::shared_ptr<SyncGroup> join(int rank, std::chrono::milliseconds timeout) const = 0;
};
/// Ranks that a launcher has started, each of them this whole program: all of them come to every case.
struct StartedRanks {
  int rank;
  int size;
  void (*give_up)();  ///< ends the program on all ranks
};
/// Lets MUSTER_TEST_GROUP=NAME choose a kind; called before main(). `started` is there where the ranks are.
using MakeMaker = std::unique_ptr<GroupMaker> (*)(int size);
using FindStarted = StartedRanks (*)();
bool add_group_kind(const std::string& name, MakeMaker make, FindStarted started = nullptr);

/// The group that the ranks of one test make: call before the fork, use in each rank. A local one, or what
/// MUSTER_TEST_GROUP names.
class GroupOf {
 public:
  explicit GroupOf(int size);
  [[nodiscard]] std::shared_ptr<SyncGroup> join(int rank,
                                                std::chrono::milliseconds timeout = std::chrono::seconds(20)) const;

 private:
  int size_;
  std::string key_;
  std::unique_ptr<GroupMaker> maker_;  // none for a local group
};

/// All of four ranks.
inline const std::vector<int> four = {0, 1, 2, 3};

/// All ranks of a group, `first` in front.
inline std::vector<int> ranks_from(int first, int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  for (int i = 0; i < size; ++i) ranks[static_cast<std::size_t>(i)] = (first + i) % size;
  return ranks;
}

/// Ranks of one group: runs `body` in each of `count`, and CHECKs that all but the killed ones ended well.
void run_ranks(int count, const std::function<void(SyncGroup&)>& body, const std::vector<int>& killed = {});

/// Runs them likewise, and returns how each ended.
std::vector<Ended> try_ranks(int count, const std::function<void(SyncGroup&)>& body,
                             std::chrono::milliseconds deadline = std::chrono::seconds(60));

/// Names in /dev/shm that Muster could have made.
std::vector<std::string> shared_memory_names();

}  // namespace muster::test
