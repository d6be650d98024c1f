// SPDX-License-Identifier: Apache-2.0
#include "tests/support/forked_ranks.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>
#include <thread>

#include "doctest/doctest.h"
#include "muster/workspace.hpp"
#include "tests/support/tcp_ranks.hpp"
#include "tests/support/temporary_directory.hpp"

namespace muster::test {
namespace {

int words_pipe = -1;
std::string played_words;  // used without a pipe
bool is_rank = false;      // this process is a rank of a Ranks object; ranks that it creates itself are forked

struct GroupKind {
  MakeMaker make = nullptr;
  FindStarted started = nullptr;
};

/// Returns the kind that MUSTER_TEST_GROUP names. Returns an empty value for local groups and for kinds that this
/// program does not contain.
GroupKind chosen_kind();

/// Runs this process's rank. Returns how each rank ended, as far as this process knows.
std::vector<Ended> play(const StartedRanks& started, int count, const Ranks::Body& body) {
  std::vector<Ended> all(static_cast<std::size_t>(count), Ended{.exit_status = 0, .signal = 0, .words = {}});
  if (count > started.size && started.rank == 0)
    std::printf("skipped: %d ranks, where %d were started\n", count, started.size);
  if (count > started.size || started.rank >= count) return all;
  Ended& mine = all[static_cast<std::size_t>(started.rank)];
  played_words.clear();
  is_rank = true;
  try {
    body(started.rank);
  } catch (const std::exception& error) {
    say(error.what());
    mine.exit_status = 1;
  }
  is_rank = false;
  mine.words = played_words;
  if (mine.ok()) return all;
  std::fprintf(stderr, "rank %d of %d: %s\n", started.rank, count, mine.words.c_str());
  // The other ranks would wait for this one.
  started.give_up();
  return all;
}

std::string drain(int pipe) {
  std::string words;
  char buffer[4096];
  for (;;) {
    const ssize_t got = ::read(pipe, buffer, sizeof buffer);
    if (got <= 0) return words;
    words.append(buffer, static_cast<std::size_t>(got));
  }
}

}  // namespace

void say(const std::string& words) {
  if (words_pipe < 0) {
    played_words += words;
    return;
  }
  if (::write(words_pipe, words.data(), words.size()) < 0) std::perror("say");
}

namespace {

void start_timer(bool interrupts) {
  struct sigaction action {};
  action.sa_handler = [](int) {};
  action.sa_flags = interrupts ? 0 : SA_RESTART;
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGPROF;
  timer_t id{};
  const itimerspec every{{0, 5'000'000}, {0, 5'000'000}};
  if (::sigaction(SIGPROF, &action, nullptr) != 0 || ::timer_create(CLOCK_MONOTONIC, &event, &id) != 0 ||
      ::timer_settime(id, 0, &every, nullptr) != 0)
    throw std::runtime_error("no timer");
}

}  // namespace

Ranks::Ranks(int count, const Body& body) {
  if (const GroupKind kind = chosen_kind(); kind.started != nullptr && !is_rank) {
    played_ = play(kind.started(), count, body);
    return;
  }
  std::fflush(stdout);
  std::fflush(stderr);
  const pid_t parent = ::getpid();
  for (int rank = 0; rank < count; ++rank) {
    int ends[2] = {-1, -1};
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) throw std::runtime_error("pipe2");
    const pid_t pid = ::fork();
    if (pid < 0) throw std::runtime_error("fork");
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(3);
      words_pipe = ends[1];
      is_rank = true;
      int status = 0;
      try {
        if (const char* timer = std::getenv("MUSTER_TEST_TIMER"))
          start_timer(std::string_view(timer) == "interrupt" || (std::string_view(timer) == "mixed" && rank % 2 == 1));
        body(rank);
      } catch (const std::exception& error) {
        say(error.what());
        status = 1;
      }
      // Not exit(): the child must not destroy the static objects of the parent.
      ::_exit(status);
    }
    ::close(ends[1]);
    pids_.push_back(pid);
    pipes_.push_back(ends[0]);
  }
}

Ranks::~Ranks() {
  for (const pid_t pid : pids_) {
    if (pid <= 0) continue;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  for (const int pipe : pipes_) ::close(pipe);
}

void Ranks::signal(int rank, int number) const {
  ::kill(pid(rank), number);
}

std::vector<Ended> Ranks::wait(std::chrono::milliseconds deadline) {
  if (!played_.empty()) return played_;
  std::vector<Ended> all(pids_.size());
  const auto end = std::chrono::steady_clock::now() + deadline;
  for (std::size_t rank = 0; rank < pids_.size(); ++rank) {
    int status = 0;
    for (;;) {
      const pid_t ended = ::waitpid(pids_[rank], &status, WNOHANG);
      if (ended == pids_[rank]) break;
      if (std::chrono::steady_clock::now() > end) {
        ::kill(pids_[rank], SIGKILL);
        ::waitpid(pids_[rank], &status, 0);
        all[rank].words = "hangs; ";
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    pids_[rank] = 0;
    if (WIFEXITED(status)) all[rank].exit_status = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) all[rank].signal = WTERMSIG(status);
    all[rank].words += drain(pipes_[rank]);
  }
  return all;
}

std::vector<Ended> Ranks::wait_and_kill(int stopped, std::chrono::milliseconds longest) {
  const auto others_have_ended = [&] {
    return std::ranges::all_of(pids_, [&](pid_t other) {
      siginfo_t info{};
      if (other == pid(stopped)) return true;
      return ::waitid(P_PID, static_cast<id_t>(other), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == other;
    });
  };
  const auto end = std::chrono::steady_clock::now() + longest;
  while (!others_have_ended() && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  signal(stopped, SIGKILL);
  return wait();
}

void check_ended(const std::vector<Ended>& ended, const std::vector<int>& killed) {
  for (int rank = 0; rank < static_cast<int>(ended.size()); ++rank) {
    const Ended& one = ended[static_cast<std::size_t>(rank)];
    const bool is_killed = std::ranges::find(killed, rank) != killed.end();
    CHECK_MESSAGE((is_killed ? one.signal == SIGKILL : one.ok()), "rank ", rank, " of ", ended.size(), ": status ",
                  one.exit_status, ", signal ", one.signal, ": ", one.words);
  }
}

void run_processes(int count, const std::vector<int>& killed, const Ranks::Body& body) {
  check_ended(Ranks(count, body).wait(), killed);
}

std::string unique_key() {
  static std::atomic<int> next{0};
  return "muster-test-" + std::to_string(::getpid()) + "-" +
         std::to_string(std::chrono::steady_clock::now().time_since_epoch().count()) + "-" + std::to_string(++next);
}

namespace {

/// Makes groups over files in a temporary workspace.
class FileMaker final : public GroupMaker {
 public:
  explicit FileMaker(int size) : size_(size), key_(unique_key()) {}
  [[nodiscard]] std::shared_ptr<Group> join(int rank, std::chrono::milliseconds timeout) const override {
    return file_group({.directory = workspace_.path().string(),
                       .key = key_,
                       .rank = rank,
                       .size = size_,
                       .timeout = timeout,
                       .heartbeat = std::chrono::milliseconds(100)});
  }

 private:
  int size_;
  std::string key_;
  TemporaryDirectory workspace_{Medium::memory};
};

std::map<std::string, GroupKind>& group_kinds() {
  static std::map<std::string, GroupKind> kinds = {
      {"file", {[](int size) -> std::unique_ptr<GroupMaker> { return std::make_unique<FileMaker>(size); }}},
      {"tcp", {[](int size) { return make_tcp_maker(size, 1); }}},
      {"tcp-2", {[](int size) { return make_tcp_maker(size, 2); }}},
      {"tcp-3", {[](int size) { return make_tcp_maker(size, 3); }}},
      {"tcp-6", {[](int size) { return make_tcp_maker(size, 6); }}},
      {"tcp-12", {[](int size) { return make_tcp_maker(size, 12); }}},
  };
  return kinds;
}

const char* chosen_name() {
  const char* name = std::getenv("MUSTER_TEST_GROUP");
  return name == nullptr || std::string_view(name) == "local" ? nullptr : name;
}

GroupKind chosen_kind() {
  const char* name = chosen_name();
  const auto found = name == nullptr ? group_kinds().end() : group_kinds().find(name);
  return found == group_kinds().end() ? GroupKind{} : found->second;
}

}  // namespace

bool add_group_kind(const std::string& name, MakeMaker make, FindStarted started) {
  return group_kinds().emplace(name, GroupKind{make, started}).second;
}

GroupOf::GroupOf(int size) : size_(size), key_(unique_key()) {
  const char* name = chosen_name();
  if (name == nullptr) return;
  const GroupKind kind = chosen_kind();
  if (kind.make == nullptr) throw std::runtime_error(std::string("this program has no groups of kind ") + name);
  maker_ = kind.make(size);
}

std::shared_ptr<Group> GroupOf::join(int rank, std::chrono::milliseconds timeout) const {
  if (maker_) return maker_->join(rank, timeout);
  return local_group({.key = key_, .rank = rank, .size = size_, .timeout = timeout, .global_ranks = {}});
}

std::vector<Ended> try_ranks(int count, const std::function<void(Group&)>& body, std::chrono::milliseconds deadline) {
  const GroupOf group(count);
  Ranks ranks(count, [&](int rank) { body(*group.join(rank)); });
  return ranks.wait(deadline);
}

void run_ranks(int count, const std::function<void(Group&)>& body, const std::vector<int>& killed) {
  check_ended(try_ranks(count, body), killed);
}

std::vector<std::string> shared_memory_names() {
  std::vector<std::string> names;
  DIR* directory = ::opendir("/dev/shm");
  if (directory == nullptr) return names;
  while (const dirent* entry = ::readdir(directory))
    if (std::strstr(entry->d_name, "muster") != nullptr) names.emplace_back(entry->d_name);
  ::closedir(directory);
  return names;
}

}  // namespace muster::test
