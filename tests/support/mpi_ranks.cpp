// SPDX-License-Identifier: Apache-2.0
// Forked ranks as MPI ranks: MUSTER_TEST_GROUP=mpi on one host, mpi-N on N hosts. MPI itself needs no network between
// these hosts and uses shared memory, whose queues a killed sender may block. With MUSTER_TEST_MPI_LINK=tcp the hosts
// have network cards, and MPI uses only them; tests that kill ranks need this. MUSTER_TEST_MPI_THREADS may be multiple
// (any thread may call MPI) or serialized (one at a time); otherwise only the main thread calls MPI.

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <map>

#include "muster/mpi.hpp"
#include "src/os/fd.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/networks.hpp"

namespace muster::test {
namespace {

/// Returns the value of KEY=VALUE in a line of such fields. `to_end` is for the last field: returns the rest of the
/// line.
std::string field(const std::string& line, const std::string& key, bool to_end = false) {
  const std::string mark = key + "=";
  std::size_t at = line.rfind(mark, 0) == 0 ? 0 : line.find(" " + mark);
  if (at == std::string::npos) return {};
  at = line.find('=', at) + 1;
  return line.substr(at, to_end ? std::string::npos : line.find(' ', at) - at);
}

class Server {
 public:
  explicit Server(std::vector<int> ends) : ends_(std::move(ends)), texts_(ends_.size()) {
    values_["PMI_process_mapping"] = "(vector,(0,1," + std::to_string(ends_.size()) + "))";
  }

  void run() {
    std::size_t open = ends_.size();
    while (open > 0) {
      std::vector<pollfd> polls;
      for (const int end : ends_) polls.push_back({end, POLLIN, 0});
      if (::poll(polls.data(), polls.size(), -1) < 0) continue;
      for (std::size_t rank = 0; rank < polls.size(); ++rank) {
        if (polls[rank].revents == 0) continue;
        char buffer[4096];
        const ssize_t got = ::read(ends_[rank], buffer, sizeof buffer);
        if (got <= 0) {
          ::close(ends_[rank]);
          ends_[rank] = -1;
          --open;
          continue;
        }
        texts_[rank].append(buffer, static_cast<std::size_t>(got));
        for (std::size_t end = 0; (end = texts_[rank].find('\n')) != std::string::npos;) {
          const std::string line = texts_[rank].substr(0, end);
          texts_[rank].erase(0, end + 1);
          answer(rank, line);
        }
      }
    }
  }

 private:
  void say(std::size_t rank, const std::string& words) const {
    const std::string line = words + "\n";
    if (ends_[rank] >= 0 && ::send(ends_[rank], line.data(), line.size(), MSG_NOSIGNAL) < 0) return;
  }

  void answer(std::size_t rank, const std::string& line) {
    const std::string command = field(line, "cmd");
    if (command == "init") {
      say(rank, "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0");
    } else if (command == "get_maxes") {
      say(rank, "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024");
    } else if (command == "get_appnum") {
      say(rank, "cmd=appnum appnum=0");
    } else if (command == "get_universe_size") {
      say(rank, "cmd=universe_size size=" + std::to_string(ends_.size()));
    } else if (command == "get_my_kvsname") {
      say(rank, "cmd=my_kvsname kvsname=kvs_0");
    } else if (command == "put") {
      values_[field(line, "key")] = field(line, "value", true);
      say(rank, "cmd=put_result rc=0 msg=success");
    } else if (command == "get") {
      const auto found = values_.find(field(line, "key"));
      say(rank, found == values_.end() ? "cmd=get_result rc=-1 msg=none value=unknown"
                                       : "cmd=get_result rc=0 msg=success value=" + found->second);
    } else if (command == "barrier_in") {
      if (++arrived_ < ends_.size()) return;
      arrived_ = 0;
      for (std::size_t other = 0; other < ends_.size(); ++other) say(other, "cmd=barrier_out rc=0");
    } else if (command == "finalize") {
      say(rank, "cmd=finalize_ack rc=0");
    }
  }

  std::vector<int> ends_;
  std::vector<std::string> texts_;
  std::map<std::string, std::string> values_;
  std::size_t arrived_ = 0;
};

// A process manager for forked ranks. MPICH ranks get information about each other over a descriptor with PMI-1, a
// line-based protocol. So tests fork, kill and observe MPI ranks like all others, without mpiexec, which would kill the
// survivors.

/// Serves `size` ranks from a separate process, until all of them have closed their connections.
class PmiServer {
 public:
  explicit PmiServer(int size) {
    std::vector<int> ours;
    for (int rank = 0; rank < size; ++rank) {
      int ends[2] = {-1, -1};
      if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) throw std::runtime_error("socketpair");
      ours.push_back(ends[0]);
      ends_.push_back(ends[1]);
    }
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ < 0) throw std::runtime_error("fork");
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(3);
      for (const int end : ends_) ::close(end);
      Server(ours).run();
      ::_exit(0);
    }
    for (const int end : ours) ::close(end);
  }
  ~PmiServer() {
    for (const int end : ends_) ::close(end);
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  PmiServer(const PmiServer&) = delete;
  PmiServer& operator=(const PmiServer&) = delete;

  /// Called in a forked rank before MPI_Init: sets the environment variables that MPICH reads.
  void enter(int rank) const {
    for (std::size_t other = 0; other < ends_.size(); ++other)
      if (other != static_cast<std::size_t>(rank)) ::close(ends_[other]);
    ::setenv("PMI_FD", std::to_string(ends_[static_cast<std::size_t>(rank)]).c_str(), 1);
    ::setenv("PMI_RANK", std::to_string(rank).c_str(), 1);
    ::setenv("PMI_SIZE", std::to_string(ends_.size()).c_str(), 1);
  }

 private:
  std::vector<int> ends_;  // of the ranks
  pid_t pid_ = -1;
};

bool goes_by_tcp() {
  const char* link = std::getenv("MUSTER_TEST_MPI_LINK");
  return link != nullptr && std::string_view(link) == "tcp";
}

int wanted_level() {
  const char* text = std::getenv("MUSTER_TEST_MPI_THREADS");
  const std::string_view threads = text == nullptr ? "" : text;
  if (threads == "multiple") return MPI_THREAD_MULTIPLE;
  return threads == "serialized" ? MPI_THREAD_SERIALIZED : MPI_THREAD_FUNNELED;
}

bool is_open_mpi() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> version{};
  int length = 0;
  MPI_Get_library_version(version.data(), &length);
  return std::string_view(version.data()).find("Open MPI") != std::string_view::npos;
}

class MpiMaker final : public GroupMaker {
 public:
  MpiMaker(int size, int hosts) : size_(size), hosts_(hosts), server_(size) {
    for (int host = 0; host < hosts; ++host) networks_.push_back(fresh_network());
    if (goes_by_tcp()) join_networks(networks_);
  }

  [[nodiscard]] std::shared_ptr<Group> join(int rank, std::chrono::milliseconds timeout) const override {
    server_.enter(rank);
    // Block distribution, as launchers do. A cyclic distribution would also work.
    const int host = rank * hosts_ / size_;
    if (hosts_ > 1) enter_network(networks_[static_cast<std::size_t>(host)]);
    // UCX looks for network cards there.
    if (hosts_ > 1 && goes_by_tcp() &&
        (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
         ::mount("sysfs", "/sys", "sysfs", 0, nullptr) != 0))
      throw std::runtime_error("/sys of the host's own network");
    // Processes on different hosts cannot access each other's memory. Here UCX could do so, and it ends a process that
    // accesses the memory of a process that has ended or has left the exchange.
    if (hosts_ > 1) ::setenv("UCX_TLS", goes_by_tcp() ? "tcp,self" : "^cma", 0);
    int level = 0;
    MPI_Init_thread(nullptr, nullptr, wanted_level(), &level);
    std::shared_ptr<Group> group = mpi_group(MPI_COMM_WORLD, {.timeout = timeout});
    Group* plain = group.get();
    return {plain, [owner = std::move(group)](Group*) mutable {
              const bool is_well = !owner->error() && std::uncaught_exceptions() == 0;
              owner.reset();
              // After a failure MPI_Finalize may wait for ranks that have died.
              if (is_well) MPI_Finalize();
            }};
  }

 private:
  int size_;
  int hosts_;
  PmiServer server_;
  std::vector<os::Fd> networks_;
};

template <int hosts>
std::unique_ptr<GroupMaker> make(int size) {
  return std::make_unique<MpiMaker>(size, std::min(hosts, size));
}

/// Called before main(): a program that exits later leaves its temporary directories behind.
bool skip_without_pmi() {
  const char* kind = std::getenv("MUSTER_TEST_GROUP");
  if (kind == nullptr || !std::string_view(kind).starts_with("mpi") || !is_open_mpi()) return false;
  std::puts("skipped: forked ranks are ranks of MPI by PMI-1, which Open MPI does not speak");
  std::exit(77);
}

const bool is_added = !skip_without_pmi() && add_group_kind("mpi", make<1>) && add_group_kind("mpi-2", make<2>) &&
                      add_group_kind("mpi-3", make<3>) && add_group_kind("mpi-6", make<6>) &&
                      add_group_kind("mpi-12", make<12>);

}  // namespace
}  // namespace muster::test
