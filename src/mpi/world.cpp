// SPDX-License-Identifier: Apache-2.0
// mpi_group(), and MPI_COMM_WORLD as world().
//
// If a process that has initialised MPI ends without MPI_Finalize, a process manager of MPI assumes that it has
// crashed. It kills the other processes, whatever the exit status was, and returns the statuses so far. So if Muster
// has initialised MPI, it also finalises it at exit, when the groups of all ranks have ended in order. If they have
// not, because a rank died or does not arrive, MPI_Finalize would wait for ever. Muster then does not call it, and the
// job has failed. If MPI_Finalize does not return although all groups have ended, the process ends without it, because
// all ranks have finished their work.

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
#include "src/group/watchdog.hpp"
#include "src/mpi/transport.hpp"
#include "src/multihost/group.hpp"
#include "src/multihost/stream_protocol.hpp"
#include "src/os/clock.hpp"
#include "src/os/process.hpp"
#include "src/os/thread.hpp"
#include "src/rendezvous/world.hpp"

namespace muster::mpi {
namespace {

using Clock = os::Clock;

MpiThreads threads_of_mpi() {
  int level = MPI_THREAD_SINGLE;
  check(MPI_Query_thread(&level), "reading the level of thread support");
  if (level == MPI_THREAD_MULTIPLE) return MpiThreads::all;
  if (level == MPI_THREAD_SERIALIZED) return MpiThreads::each;
  int is_main = 0;
  check(MPI_Is_thread_main(&is_main), "reading the main thread");
  if (is_main == 0)
    throw Error(ErrorKind::unsupported,
                "mpi_group: calling it from another thread: MPI was initialized for its main thread only. Initialize "
                "MPI with MPI_THREAD_MULTIPLE, or call mpi_group() in the main thread");
  return MpiThreads::one;
}

int on_finalize(MPI_Comm, int, void*, void*) {
  multihost::end_all(MpiTransport::kind_name);
  return MPI_SUCCESS;
}

/// From now on MPI_Finalize first ends the groups that still exist. Throws Error(io).
void end_with_finalize() {
  static ForkMutex mutex;
  static bool has_callback = false;
  const std::lock_guard lock(mutex);
  if (has_callback) return;
  int key = MPI_KEYVAL_INVALID;
  check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, on_finalize, &key, nullptr), "creating an attribute");
  check(MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr), "setting an attribute");
  has_callback = true;
}

std::int64_t initialiser = 0;  // the process that has initialised MPI

// MPI_Finalize is called only after all ranks have announced that they are finished.
constexpr std::chrono::seconds longest_finalize{10};

/// Watches one call of MPI that waits for all ranks, has no deadline and cannot be cancelled. The returned thread must
/// be created before the call and destroyed after it. The thread calls `look` several times per second with the
/// duration of the call so far. `look` ends the process if the call takes too long.
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

/// MPI_Finalize may wait for ever (context.hpp), so after a deadline the process ends without it. The process is
/// already in exit(). Handlers and destructors that were registered before MPI was initialised would run in the waiting
/// thread, and are skipped. The buffers of open files are written.
void finalise_or_leave(int status) {
  const os::Thread watch = watch_call([status](std::chrono::milliseconds waited) {
    // Flush early: the process manager ends the other ranks when the first rank exits.
    if (waited > longest_finalize / 2) std::fflush(nullptr);
    if (waited < longest_finalize) return;
    log(LogLevel::warning,
        "MPI: MPI_Finalize did not return, although all ranks have finished; the process ends without it");
    ::_exit(status);
  });
  MPI_Finalize();
}

void finalise_at_exit(int status, void*) {
  // A forked child must not finalise MPI.
  if (os::process_id() != initialiser || !is_running()) return;
  set_world(nullptr);
  if (multihost::end_all(MpiTransport::kind_name))
    finalise_or_leave(status);
  else
    log(LogLevel::warning, "MPI: MPI_Finalize is skipped at the end of this process, because it would not return");
}

volatile std::sig_atomic_t is_told_of_a_death = 0;
void hear_of_a_death(int) {
  is_told_of_a_death = 1;
}

/// Ends the process if not all ranks reach MPI_Init in time. The call cannot be cancelled, and only the process manager
/// knows which ranks are missing.
class InitWatch {
 public:
  explicit InitWatch(const group::Start& start)
      : name_(start.size > 1 ? fmt::format("rank {} of {}", start.rank, start.size) : "a rank"),
        timeout_(group::timeout_of(start.timeout, group::default_timeout())) {}

  void operator()(std::chrono::milliseconds waited) {
    constexpr std::chrono::seconds between_words{30};
    const std::string words =
        fmt::format("MPI: {} (host {}, pid {}) has waited {:.1f} s in MPI_Init for the other ranks", name_,
                    os::host_name(), os::process_id(), std::chrono::duration<double>(waited).count());
    if (is_told_of_a_death != 0)
      leave(words + ". mpiexec reports that one of them has ended. Read the output of that rank");
    if (waited > timeout_)
      leave(words +
            ". Check that each of them runs and calls world(), and that its host can be reached from this one "
            "(UCX_NET_DEVICES), or raise MUSTER_TIMEOUT (seconds)");
    if (waited < said_ + between_words) return;
    said_ = waited;
    log(LogLevel::warning, words);
  }

 private:
  [[noreturn]] static void leave(const std::string& words) {
    log(LogLevel::error, words + ". The process ends, because MPI_Init cannot be cancelled");
    ::_exit(EXIT_FAILURE);
  }

  std::string name_;
  std::chrono::milliseconds timeout_;
  std::chrono::milliseconds said_{0};
};

void initialise(const group::Start& start) {
  int level = MPI_THREAD_SINGLE;
  const os::SignalAction before(SIGUSR1);
  // The mpiexec of MPICH sends this signal when a rank has died and mpiexec does not end the others itself.
  before.handle_where_default(hear_of_a_death);
  {
    const os::Thread watch = watch_call(InitWatch{start});
    // All threads may call MPI, because a program that does not know that MPI is used does not know its rules for
    // threads either.
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
  }
  // MPICH has installed its own handler by now. Its next call asks mpiexec which rank has died, and waits for ever if
  // the network to mpiexec is down. Muster detects dead ranks without it.
  before.restore_or_ignore();
  initialiser = os::process_id();
  ::on_exit(finalise_at_exit, nullptr);
}

std::string library_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  if (MPI_Get_library_version(text.data(), &length) != MPI_SUCCESS) return "an unknown MPI";
  std::string words(text.data());
  words.resize(std::min(words.find('\n'), words.size()));
  for (char& c : words)
    if (c == '\t') c = ' ';
  while (!words.empty() && words.back() == ' ') words.pop_back();
  return words;
}

std::shared_ptr<Group> make_world(const group::Start& start) {
  int flag = 0;
  check(MPI_Finalized(&flag), "reading whether MPI has been finalized");
  if (flag != 0)
    throw Error(ErrorKind::invalid_argument,
                "world(): MPI has been finalized in this process (MPI_Finalize). Call world() before MPI_Finalize");
  if (must_rest()) throw Error(ErrorKind::unsupported, std::string("world(): ") + resting_words);
  if (!is_running()) initialise(start);
  int size = 0;
  int rank = 0;
  check(MPI_Comm_size(MPI_COMM_WORLD, &size), "reading the number of ranks");
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "reading the rank");
  // A PMIx server need not give the size.
  const bool is_other_rank = (start.size > 1 || start.manager != group::ProcessManager::none) && rank != start.rank;
  if (is_other_rank || (start.size > 1 && size != start.size))
    throw Error(ErrorKind::unsupported,
                fmt::format("world(): the environment has {}, but MPI reports rank {} of {}: another MPI than the one "
                            "in this process ({}) started the ranks. Use the mpiexec of that MPI",
                            start.said, rank, size, library_version()));
  return mpi_group(MPI_COMM_WORLD);
}

int ranks() {
  int size = 0;
  return is_running() && MPI_Comm_size(MPI_COMM_WORLD, &size) == MPI_SUCCESS ? size : 0;
}

[[maybe_unused]] const bool is_world_registered = [] {
  group::set_mpi_support({.ranks = ranks, .make_world = make_world, .describe = library_version});
  return true;
}();

[[maybe_unused]] const bool has_route = [] {
  multihost::add_route(Route::mpi, "MPI",
                       "create it with mpi_group(), or start the ranks with mpiexec and call world()");
  return true;
}();

}  // namespace
}  // namespace muster::mpi

namespace muster {

std::shared_ptr<Group> mpi_group(MPI_Comm comm, const MpiGroupOptions& options) {
  if (mpi::must_rest()) throw Error(ErrorKind::unsupported, std::string("mpi_group: ") + mpi::resting_words);
  if (!mpi::is_running())
    throw Error(ErrorKind::invalid_argument,
                "mpi_group: MPI is not initialized in this process, or has been finalized. Call MPI_Init_thread first");
  const mpi::MpiThreads threads = mpi::threads_of_mpi();
  const std::chrono::milliseconds timeout = group::timeout_of(options.timeout, group::default_timeout());
  multihost::advance_endings(mpi::MpiTransport::kind_name);
  const auto context = std::make_shared<multihost::Context>(mpi::MpiTransport::over(comm, threads, timeout), timeout);
  mpi::end_with_finalize();
  return multihost::make_group(context, timeout, "mpi_group", os::open_files_left());
}

}  // namespace muster
