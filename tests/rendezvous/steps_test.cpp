// SPDX-License-Identifier: Apache-2.0
// One rank dies, stops, fails or sends malformed bytes at each step of each rendezvous. All other ranks must throw one
// cause that names it: within two seconds if it had joined, otherwise at their deadline. A step is a system call that
// passes through the fault-injection hook of src/os/fault.hpp.

#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "doctest/doctest.h"
#include "muster/group.hpp"
#include "muster/tcp.hpp"
#include "muster/workspace.hpp"
#include "src/multihost/context.hpp"
#include "tests/support/failing_call.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/shared_words.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int ranks = 4;
constexpr milliseconds deadline = 3s;
// The additional time that a rank may take on a busy machine.
constexpr milliseconds tolerance = 1500ms;

enum class Deed { dies, stops, fails, spoils };

std::int64_t now_ms() {
  return std::chrono::duration_cast<milliseconds>(Clock::now().time_since_epoch()).count();
}

/// Sends malformed bytes over all connections of this process.
void spoil_connections() {
  const std::string garbage(400, 'U');
  for (int descriptor = 3; descriptor < 100; ++descriptor)
    (void)::send(descriptor, garbage.data(), garbage.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

std::shared_ptr<Group> join(const std::string& kind, const std::string& directory, int rank) {
  const std::string key = "steps " + directory;
  if (kind == "local") return local_group({.key = key, .rank = rank, .size = ranks, .timeout = deadline});
  if (kind == "tcp")
    return tcp_group(
        {.address = "file://" + directory + "/place", .rank = rank, .size = ranks, .timeout = deadline, .key = key});
  return file_group({.directory = directory + "/workspace",
                     .key = key,
                     .rank = rank,
                     .size = ranks,
                     .timeout = deadline,
                     .heartbeat = 100ms});
}

/// One run: rank `culprit` fails at its system call number `step`.
class Scene {
 public:
  Scene(std::string kind, Deed deed, int culprit, int step)
      : kind_(std::move(kind)), deed_(deed), culprit_(culprit), step_(step), processes_(ranks, [this](int rank) {
          run(rank);
        }) {}

  void check() {
    const std::vector<Ended> ended =
        deed_ == Deed::stops ? processes_.wait_and_kill(culprit_, deadline + 20s) : processes_.wait(deadline + 20s);
    CAPTURE(kind_);
    CAPTURE(static_cast<int>(deed_));
    CAPTURE(culprit_);
    CAPTURE(step_);
    const bool has_happened = words_[0] != 0;
    CAPTURE(has_happened);
    CAPTURE(FailingCall::calls().size());
    std::set<std::string> causes;
    for (int rank = 0; rank < ranks; ++rank) {
      const Ended& one = ended[static_cast<std::size_t>(rank)];
      CAPTURE(rank);
      if (rank == culprit_) continue;
      CHECK_MESSAGE(one.ok(), one.words);
      causes.insert(one.words);
    }
    // Either no rank failed, or all ranks failed with one cause.
    CHECK(causes.size() == 1);
    if (causes.size() > 1)
      for (const std::string& cause : causes) MESSAGE(cause);
    CHECK((has_happened || causes.contains("")));
    if (deed_ != Deed::spoils && deed_ != Deed::fails && has_happened) CHECK(!causes.contains(""));
  }

 private:
  void run(int rank) {
    std::unique_ptr<FailingCall> deed;
    if (rank == culprit_)
      deed = std::make_unique<FailingCall>(CallToFail{
          .error = deed_ == Deed::fails ? EMFILE : 0, .after = step_, .times = 1, .then = [this] { act(); }});
    const std::int64_t begin = now_ms();
    try {
      auto group = join(kind_, directory_.path().string(), rank);
      if (rank == culprit_ && words_[0] == 0) {
        // The culprit has joined with fewer system calls than `step`.
        deed.reset();
        words_[2] = 1;
      }
      const bool is_lost = deed_ == Deed::dies || deed_ == Deed::stops;
      for (int turn = 0; turn < 2 || (words_[0] != 0 && is_lost); ++turn) group->barrier({.timeout = deadline});
      // A rank that ends without leaving its groups over TCP counts as dead.
      group.reset();
      if (kind_ == "tcp") multihost::end_all("tcp");
    } catch (const Error& error) {
      if (rank == culprit_) return;
      const std::int64_t waited = now_ms() - begin;
      const std::int64_t since = now_ms() - static_cast<std::int64_t>(words_[0].load());
      if (words_[0] == 0) throw;
      // A rank 0 that spoils its connections continues. It may report a rank that has left because of the garbage.
      const bool is_told_by_culprit = deed_ == Deed::spoils && culprit_ == 0 && error.kind() == ErrorKind::peer_lost;
      if (error.rank() != culprit_ && !is_told_by_culprit)
        throw RankFailure("another rank is named: " + std::string(error.what()));
      const bool may_wait = deed_ == Deed::stops || words_[1] == 0;
      // Over TCP, the ranks of a host form a local group during the rendezvous, and detect a stopped rank there first.
      const milliseconds longest = kind_ == "tcp" ? deadline + 6s : deadline + 2s;
      const milliseconds most = (may_wait ? longest : 2s) + tolerance;
      if ((may_wait ? waited : since) > most.count())
        throw RankFailure("after " + std::to_string(since) + " ms: " + error.what());
      // If rank 0 is the culprit, no rank chooses one cause for all.
      say(culprit_ == 0 ? "rank 0 is named" : error.what());
    }
  }

  void act() {
    // Rank 0 knows this rank if it has sent its Hello.
    const std::vector<std::string> calls = FailingCall::calls();
    words_[1] = std::count(calls.begin(), calls.end() - 1, "sendmsg") != 0 ? 1 : 0;
    words_[0] = static_cast<std::uint64_t>(now_ms());
    if (deed_ == Deed::dies) ::raise(SIGKILL);
    if (deed_ == Deed::stops) ::raise(SIGSTOP);
    if (deed_ == Deed::spoils) spoil_connections();
  }

  std::string kind_;
  Deed deed_;
  int culprit_;
  int step_;
  TemporaryDirectory directory_{Medium::memory};
  SharedWords
      words_;  // 0: the time of the failure; 1: rank 0 knows the culprit; 2: the culprit joined before its failure
  Ranks processes_;
};

void check_all(const std::string& kind, Deed deed, const std::vector<int>& culprits, int first, int last, int by) {
  // Several scenes run at once, because ranks mostly wait.
  std::vector<std::unique_ptr<Scene>> scenes;
  const auto finish = [&] {
    for (const auto& scene : scenes) scene->check();
    scenes.clear();
  };
  for (const int culprit : culprits)
    for (int step = first; step <= last; step += by) {
      scenes.push_back(std::make_unique<Scene>(kind, deed, culprit, step));
      if (scenes.size() == 6) finish();
    }
  finish();
}

}  // namespace

TEST_CASE("a rank that dies at any step") {
  check_all("local", Deed::dies, {0, 2}, 0, 24, 1);
  check_all("tcp", Deed::dies, {0, 2}, 0, 40, 2);
  check_all("file", Deed::dies, {0, 2}, 0, 40, 4);
}

TEST_CASE("a rank that stops at any step") {
  check_all("local", Deed::stops, {0, 2}, 0, 24, 4);
  check_all("tcp", Deed::stops, {0, 2}, 1, 40, 8);
  check_all("file", Deed::stops, {0, 2}, 1, 40, 8);
}

TEST_CASE("a rank that lacks a descriptor at any step") {
  check_all("local", Deed::fails, {0, 2}, 0, 24, 1);
  check_all("tcp", Deed::fails, {0, 2}, 0, 40, 2);
  check_all("file", Deed::fails, {0, 2}, 0, 40, 4);
}

TEST_CASE("a rank that sends malformed bytes at any step") {
  check_all("local", Deed::spoils, {0, 2}, 2, 24, 2);
  check_all("tcp", Deed::spoils, {2}, 2, 24, 4);
}
