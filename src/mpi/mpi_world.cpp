// SPDX-License-Identifier: Apache-2.0
// mpi_group(), and MPI_COMM_WORLD as world().
//
// A process manager of MPI takes a process that has initialised MPI and ends without MPI_Finalize for one that has
// crashed: it kills the others, whatever the process's own status was, and returns the statuses that there were. So
// where Muster has initialised MPI it also finalises it, at exit, when the groups of all ranks have ended in order;
// where they have not (somebody died, or does not come), MPI_Finalize would wait for ever and is left out: then the job
// has failed. Where it does not return although all have ended, the process ends without: the work of all ranks is
// done.

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <utility>

#include "muster/log.hpp"
#include "muster/mpi.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/hosts/hosts_group.hpp"
#include "src/hosts/link.hpp"
#include "src/mpi/mpi_transport.hpp"
#include "src/os/clock.hpp"
#include "src/os/process.hpp"
#include "src/os/thread.hpp"
#include "src/sync/waits.hpp"
#include "src/sync/world.hpp"

namespace muster::mpi {
namespace {

using Clock = os::Clock;

MpiThreads threads_of_mpi() {
  int level = MPI_THREAD_SINGLE;
  check(MPI_Query_thread(&level), "asking for the level of thread support");
  if (level == MPI_THREAD_MULTIPLE) return MpiThreads::all;
  if (level == MPI_THREAD_SERIALIZED) return MpiThreads::each;
  int is_main = 0;
  check(MPI_Is_thread_main(&is_main), "asking for the main thread");
  if (is_main == 0)
    throw Error(ErrorKind::unsupported,
                "mpi_group: MPI was initialised for calls of its main thread only, and this is another one: initialise "
                "it with MPI_THREAD_MULTIPLE, or make the group there");
  return MpiThreads::one;
}

int on_finalize(MPI_Comm, int, void*, void*) {
  hosts::end_all(MpiTransport::kind_name);
  return MPI_SUCCESS;
}

/// From now on MPI_Finalize ends what there is, before it does anything else. Throws Error(io).
void end_with_finalize() {
  static ForkMutex mutex;
  static bool has_callback = false;
  const std::lock_guard lock(mutex);
  if (has_callback) return;
  int key = MPI_KEYVAL_INVALID;
  check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, on_finalize, &key, nullptr), "making an attribute");
  check(MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr), "setting an attribute");
  has_callback = true;
}

std::int64_t initialiser = 0;  // the process that has initialised MPI

// All ranks have said that they are through when it is called.
constexpr std::chrono::seconds longest_finalize{10};

/// Beside one call of MPI that waits for all ranks, has no deadline and cannot be cancelled: made before it, destroyed
/// when it has returned. `look` is called in a thread of its own several times a second with the time that the call has
/// taken; it ends the process if that is too long.
os::Thread watch_call(std::function<void(std::chrono::milliseconds)> look) {
  return os::Thread("watching MPI", [look = std::move(look)](const std::stop_token& has_returned) {
    constexpr std::chrono::milliseconds between_looks{100};
    const Clock::time_point begin = Clock::now();
    std::mutex mutex;
    std::condition_variable_any changed;
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, has_returned, between_looks, [&] { return has_returned.stop_requested(); }))
      look(std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin));
  });
}

/// MPI_Finalize may wait for ever (context.hpp): past a deadline the process ends without. It is in exit() already.
/// What would come after this, handlers and destructors registered before MPI was initialised, would run in the thread
/// that waits, and is left out; what is in the buffers of open files is written.
void finalise_or_leave(int status) {
  const os::Thread watch = watch_call([status](std::chrono::milliseconds waited) {
    // In time: the process manager ends the others when the first of several ranks leaves.
    if (waited > longest_finalize / 2) std::fflush(nullptr);
    if (waited < longest_finalize) return;
    log(LogLevel::warning,
        "MPI: MPI_Finalize did not return, although the work of all ranks is done: the process ends without it");
    ::_exit(status);
  });
  MPI_Finalize();
}

void finalise_at_exit(int status, void*) {
  // Not in a forked child.
  if (os::process_id() != initialiser || !is_running()) return;
  set_world(nullptr);
  if (hosts::end_all(MpiTransport::kind_name))
    finalise_or_leave(status);
  else
    log(LogLevel::warning, "MPI: MPI_Finalize is left out at the end of this process: it would wait for ever");
}

volatile std::sig_atomic_t is_told_of_a_death = 0;
void hear_of_a_death(int) {
  is_told_of_a_death = 1;
}

/// Ends the process where ranks do not come to MPI_Init: it cannot be taken back, and which of them is missing only the
/// process manager knows.
class InitWatch {
 public:
  explicit InitWatch(const sync::Start& start)
      : name_(start.size > 1 ? fmt::format("rank {} of {}", start.rank, start.size) : "a rank"),
        timeout_(sync::timeout_of(start.timeout, sync::default_timeout())) {}

  void operator()(std::chrono::milliseconds waited) {
    constexpr std::chrono::seconds between_words{30};
    const std::string words =
        fmt::format("MPI: {} (host {}, pid {}) has waited {:.1f} s in MPI_Init for the other ranks", name_,
                    os::host_name(), os::process_id(), std::chrono::duration<double>(waited).count());
    if (is_told_of_a_death != 0) leave(words + ", and mpiexec tells that one of them has ended: look what it said");
    if (waited > timeout_)
      leave(words +
            ": look whether each of them runs and comes to world(), and whether its host can be reached from this one "
            "(UCX_NET_DEVICES), or raise the timeout (MUSTER_TIMEOUT, seconds)");
    if (waited < said_ + between_words) return;
    said_ = waited;
    log(LogLevel::warning, words);
  }

 private:
  [[noreturn]] static void leave(const std::string& words) {
    log(LogLevel::error, words + "; the process ends, because MPI_Init cannot be cancelled");
    ::_exit(EXIT_FAILURE);
  }

  std::string name_;
  std::chrono::milliseconds timeout_;
  std::chrono::milliseconds said_{0};
};

void initialise(const sync::Start& start) {
  int level = MPI_THREAD_SINGLE;
  const os::SignalAction before(SIGUSR1);
  // By that signal MPICH's mpiexec tells that a rank has died where it does not end the others itself.
  before.handle_where_default(hear_of_a_death);
  {
    const os::Thread watch = watch_call(InitWatch{start});
    // Several, because a program that does not know of MPI does not know of its rules for threads either.
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
  }
  // MPICH has a handler of its own by now: its next call asks mpiexec which rank it is, and waits for ever where the
  // network to mpiexec has gone. The dead are found here without it.
  before.restore_or_ignore();
  initialiser = os::process_id();
  ::on_exit(finalise_at_exit, nullptr);
}

std::string library_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  if (MPI_Get_library_version(text.data(), &length) != MPI_SUCCESS) return "MPI of an unknown kind";
  std::string words(text.data());
  words.resize(std::min(words.find('\n'), words.size()));
  for (char& c : words)
    if (c == '\t') c = ' ';
  while (!words.empty() && words.back() == ' ') words.pop_back();
  return words;
}

std::shared_ptr<SyncGroup> make_world(const sync::Start& start) {
  int flag = 0;
  check(MPI_Finalized(&flag), "asking whether MPI has ended");
  if (flag != 0)
    throw Error(
        ErrorKind::argument,
        "world(): MPI has started this process, but it has ended MPI already (MPI_Finalize): call world() before");
  if (must_rest()) throw Error(ErrorKind::unsupported, std::string("world(): ") + resting_words);
  if (!is_running()) initialise(start);
  int size = 0;
  int rank = 0;
  check(MPI_Comm_size(MPI_COMM_WORLD, &size), "asking for the number of ranks");
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "asking for the rank");
  if (start.size > 1 && (size != start.size || rank != start.rank))
    throw Error(ErrorKind::unsupported,
                fmt::format("world(): the environment says {}, but MPI says rank {} of {}: the ranks were started by "
                            "another MPI than libmuster-mpi is built with ({}); start them with that one's mpiexec",
                            start.said, rank, size, library_version()));
  return mpi_group(MPI_COMM_WORLD);
}

int ranks() {
  int size = 0;
  return is_running() && MPI_Comm_size(MPI_COMM_WORLD, &size) == MPI_SUCCESS ? size : 0;
}

[[maybe_unused]] const bool is_world_registered = [] {
  sync::set_mpi_support({.ranks = ranks, .make_world = make_world, .describe = library_version});
  return true;
}();

[[maybe_unused]] const bool has_route = [] {
  hosts::add_route(Route::mpi, "MPI", "make it with mpi_group(), or start the ranks with mpiexec and use world()");
  return true;
}();

}  // namespace
}  // namespace muster::mpi

namespace muster {

std::shared_ptr<SyncGroup> mpi_group(MPI_Comm comm, const MpiGroupOptions& options) {
  if (mpi::must_rest()) throw Error(ErrorKind::unsupported, std::string("mpi_group: ") + mpi::resting_words);
  if (!mpi::is_running())
    throw Error(ErrorKind::argument,
                "mpi_group: MPI is not initialised here, or has ended: call MPI_Init_thread before");
  const mpi::MpiThreads threads = mpi::threads_of_mpi();
  const std::chrono::milliseconds timeout = sync::timeout_of(options.timeout, sync::default_timeout());
  hosts::advance_endings(mpi::MpiTransport::kind_name);
  const auto context = std::make_shared<hosts::Context>(mpi::MpiTransport::over(comm, threads, timeout), timeout);
  mpi::end_with_finalize();
  return hosts::make_group(context, timeout, "mpi_group");
}

}  // namespace muster
