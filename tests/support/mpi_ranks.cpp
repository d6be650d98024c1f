// SPDX-License-Identifier: Apache-2.0
// Forked ranks as ranks of MPI: MUSTER_TEST_GROUP=mpi on one host, mpi-N on N of them. A host is a network namespace:
// ranks of two of them cannot meet in shared memory, as on two machines. MPI itself needs no network here and takes
// shared memory, whose queues a killed sender may block; MUSTER_TEST_MPI_LINK=tcp gives two hosts network cards, and
// MPI nothing else: for tests that kill. MUSTER_TEST_MPI_THREADS: multiple (any thread may call MPI), serialized (one
// at a time), else the main thread.

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "muster/mpi.hpp"
#include "src/os/fd.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/pmi_server.hpp"

namespace muster::test {
namespace {

/// A network namespace that nobody is in.
os::Fd fresh_network() {
  int ready[2] = {-1, -1};
  if (::pipe2(ready, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  const pid_t child = ::fork();
  if (child == 0) {
    const char word = ::unshare(CLONE_NEWNET) == 0 ? 'y' : 'n';
    if (::write(ready[1], &word, 1) != 1) ::_exit(1);
    ::pause();
    ::_exit(0);
  }
  char word = 'n';
  if (::read(ready[0], &word, 1) != 1) word = 'n';
  const std::string path = "/proc/" + std::to_string(child) + "/ns/net";
  os::Fd network(word == 'y' ? ::open(path.c_str(), O_RDONLY | O_CLOEXEC) : -1);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
  if (!network) throw std::runtime_error("no network namespace can be made here: that needs root");
  return network;
}

/// Two hosts joined by a pair of network cards.
void link_networks(const os::Fd& one, const os::Fd& other) {
  const auto path = [](const os::Fd& network) {
    return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(network.get());
  };
  const auto up = [&](const os::Fd& network, const char* address) {
    return "nsenter --net=" + path(network) + " sh -c 'ip link set lo up && ip address add " + address +
           "/24 dev link0 && ip link set link0 up'";
  };
  const auto is_up = [&](const os::Fd& network) {
    return "timeout 5 sh -c 'until nsenter --net=" + path(network) +
           " ip link show link0 | grep -q \"state UP\"; do sleep 0.01; done'";
  };
  const std::string command = "nsenter --net=" + path(one) + " ip link add link0 type veth peer name link0 netns " +
                              path(other) + " && " + up(one, "10.78.0.1") + " && " + up(other, "10.78.0.2") + " && " +
                              is_up(one) + " && " + is_up(other);
  if (std::system(command.c_str()) != 0) throw std::runtime_error("no network cards can be made here");
}

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
    if (goes_by_tcp() && hosts != 2) throw std::runtime_error("MUSTER_TEST_MPI_LINK=tcp is for two hosts");
    if (goes_by_tcp()) link_networks(networks_[0], networks_[1]);
  }

  [[nodiscard]] std::shared_ptr<SyncGroup> join(int rank, std::chrono::milliseconds timeout) const override {
    server_.enter(rank);
    // Ranks in turns over the hosts would be as good; in blocks is what launchers do.
    const int host = rank * hosts_ / size_;
    if (hosts_ > 1 && ::setns(networks_[static_cast<std::size_t>(host)].get(), CLONE_NEWNET) != 0)
      throw std::runtime_error("setns");
    // UCX looks there for network cards.
    if (hosts_ > 1 && goes_by_tcp() &&
        (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
         ::mount("sysfs", "/sys", "sysfs", 0, nullptr) != 0))
      throw std::runtime_error("/sys of the host's own network");
    // Hosts apart cannot look into each other's processes. UCX would here, and ends a process that looks into one that
    // is gone or has left the exchange.
    if (hosts_ > 1) ::setenv("UCX_TLS", goes_by_tcp() ? "tcp,self" : "^cma", 0);
    int level = 0;
    MPI_Init_thread(nullptr, nullptr, wanted_level(), &level);
    std::shared_ptr<SyncGroup> group = mpi_group(MPI_COMM_WORLD, {.timeout = timeout});
    SyncGroup* plain = group.get();
    return {plain, [owner = std::move(group)](SyncGroup*) mutable {
              const bool is_well = !owner->failure();
              owner.reset();
              // After a failure it may wait for the dead.
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

/// Before main(): a program that is left later leaves its folders.
bool skip_without_pmi() {
  const char* kind = std::getenv("MUSTER_TEST_GROUP");
  if (kind == nullptr || !std::string_view(kind).starts_with("mpi") || !is_open_mpi()) return false;
  std::puts("skipped: forked ranks are ranks of MPI by PMI-1, which Open MPI does not speak");
  std::exit(77);
}

const bool is_added = !skip_without_pmi() && add_group_kind("mpi", make<1>) && add_group_kind("mpi-2", make<2>) &&
                      add_group_kind("mpi-3", make<3>) && add_group_kind("mpi-12", make<12>);

}  // namespace
}  // namespace muster::test
