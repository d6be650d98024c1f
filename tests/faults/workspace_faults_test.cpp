// SPDX-License-Identifier: Apache-2.0
// Workspaces and file groups on a file system with faults. Each operation must succeed after retries, or fail on all
// ranks with an error that names file and cause. No current data may be destroyed.

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

#include "muster/export.hpp"
#include "muster/state_file.hpp"
#include "muster/workspace.hpp"
#include "tests/support/checkpoints.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/models.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::test;
using namespace std::chrono_literals;

namespace {

constexpr long fuse_magic = 0x65735546;

bool is_mounted(const std::string& path) {
  struct statfs status {};
  return ::statfs(path.c_str(), &status) == 0 && status.f_type == fuse_magic;
}

void run(const std::vector<std::string>& command) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    std::vector<char*> arguments;
    for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
}

/// Mounts faulty_fs during its lifetime.
class FaultyMount {
 public:
  /// `rules` are those of faulty_fs.cpp. Throws std::runtime_error if the mount fails.
  FaultyMount(const std::string& backing, const std::vector<std::string>& rules) {
    const pid_t parent = ::getpid();
    server_ = ::fork();
    if (server_ < 0) throw std::runtime_error("fork");
    if (server_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGTERM);
      if (::getppid() != parent) ::_exit(3);
      std::vector<std::string> words = {MUSTER_FAULTY_FS, backing, point_.path().string()};
      words.insert(words.end(), rules.begin(), rules.end());
      std::vector<char*> arguments;
      for (std::string& word : words) arguments.push_back(word.data());
      arguments.push_back(nullptr);
      ::execv(arguments[0], arguments.data());
      ::_exit(127);
    }
    for (int turn = 0; turn < 2000 && !is_mounted(point_.path()); ++turn) {
      if (::waitpid(server_, nullptr, WNOHANG) == server_) {
        server_ = -1;
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    if (!is_mounted(point_.path())) throw std::runtime_error("faulty_fs could not be mounted");
  }
  FaultyMount(const FaultyMount&) = delete;
  FaultyMount& operator=(const FaultyMount&) = delete;
  ~FaultyMount() {
    if (server_ < 0) return;
    ::kill(server_, SIGTERM);
    ::waitpid(server_, nullptr, 0);
    // SIGTERM unmounts, unless the file system is in use.
    struct stat status {};
    if (is_mounted(point_.path()) || ::stat(point_.path().c_str(), &status) != 0)
      run({"fusermount3", "-u", "-z", point_.path().string()});
  }

  [[nodiscard]] std::string operator/(const std::string& name) const { return point_ / name; }
  /// Loses all data that was not fsynced.
  void cut_power() const {
    ::kill(server_, SIGUSR1);
    // The next file system call carries it out, after the signal has arrived.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    struct stat status {};
    ::stat((point_ / "nothing").c_str(), &status);
  }

  /// Returns the reason why a mount is impossible here; empty: it is possible.
  static std::string obstacle() {
    if (std::string(MUSTER_FAULTY_FS).empty()) return "libfuse3 was not there when this was built";
    if (::access("/dev/fuse", R_OK | W_OK) != 0) return "/dev/fuse cannot be opened";
    const TemporaryDirectory backing;
    try {
      const FaultyMount mount(backing.path().string(), {});
    } catch (const std::exception& error) {
      return error.what();
    }
    return {};
  }

 private:
  TemporaryDirectory point_;
  pid_t server_ = -1;
};

Config state_of(int seed, std::int64_t bytes = 300'000) {
  return Config::object({{"seed", seed}, {"weight", pattern(DType::u8, {bytes}, static_cast<std::uint64_t>(seed))}});
}

bool is_state(const std::optional<WorkspaceState>& read, int seed) {
  return read && join(read->state) == state_of(seed);
}

/// The delay in ms after which a host sees other hosts' changes. MUSTER_TEST_DELAY sets a longer one.
std::string delay() {
  const char* text = std::getenv("MUSTER_TEST_DELAY");
  return text == nullptr ? "150" : text;
}

/// Runs ranks of which rank 0 sees the workspace through one mount and all others through another, like two hosts.
void over_two_mounts(const std::vector<std::string>& first_rules, const std::vector<std::string>& other_rules, int size,
                     const std::function<void(Group&, const std::string& path)>& body) {
  const TemporaryDirectory backing;
  { const Workspace made(backing / "w", single_group()); }
  const FaultyMount first(backing.path(), first_rules);
  const FaultyMount other(backing.path(), other_rules);
  const GroupOf group_of(size);
  Ranks ranks(size, [&](int rank) { body(*group_of.join(rank), (rank == 0 ? first : other) / "w"); });
  check_ended(ranks.wait());
  // Only the marker file remains.
  CHECK(names_in(backing / "w").size() == 1);
}

GatherOptions through(const std::string& path, std::chrono::milliseconds timeout = 20s) {
  return {.timeout = timeout, .workspace = {.path = path}};
}

void gather_and_check(Group& group, const GatherOptions& options, int round) {
  const Config mine = state_of(10 * round + group.rank());
  const auto all = get_configs_parallel(&mine, ranks_from(0, group.size()), group, options);
  for (const auto& [rank, config] : all.present()) RANK_CHECK(config == state_of(10 * round + rank));
}

}  // namespace

TEST_CASE("a full or failing disk: the error has file and cause, and only the earlier state remains") {
  struct Case {
    const char* rule;
    ErrorKind kind;
    const char* word;
  };
  for (const Case& fault : {Case{"space=500000", ErrorKind::out_of_space, "ENOSPC"},
                            Case{"fail=write:EIO:8:1:.growing", ErrorKind::io, "EIO"},
                            Case{"fail=fsync:EIO:3:1:.growing", ErrorKind::io, "EIO"},
                            Case{"fail=flush:EIO:2:9:.growing", ErrorKind::io, "EIO"},
                            Case{"fail=flush:ENOSPC:2:9:.growing", ErrorKind::out_of_space, "ENOSPC"},
                            Case{"fail=rename:EIO:1:9:state-", ErrorKind::io, "EIO"},
                            Case{"fail=create:EDQUOT:2:9:.growing", ErrorKind::out_of_space, "EDQUOT"}}) {
    CAPTURE(std::string(fault.rule));
    const TemporaryDirectory backing;
    const FaultyMount mount(backing.path(), {fault.rule});
    Workspace workspace(mount / "w", single_group(), {.timeout = 2s});
    REQUIRE(workspace.write_configs_and_weights(state_of(1)) == 1);
    const std::size_t before = names_in(backing / "w").size();
    // Some rules fail only a later call. The disk of "space" has space for one state only.
    const Error error = thrown_by(fault.kind, [&] { workspace.write_configs_and_weights(state_of(2)); });
    CHECK(has(error.what(), fault.word));
    CHECK(has(error.path(), "state-"));
    CHECK(names_in(backing / "w").size() == before);
    CHECK(is_state(workspace.read_configs_and_weights_from_rank(0), 1));
  }
}

TEST_CASE("stale handles, late entries, old bytes and short files are retried") {
  for (const std::string& rule :
       {std::string("fail=open:ESTALE:0:3:exchange-"), std::string("fail=read:ESTALE:0:2:exchange-"), "late=" + delay(),
        "old=" + delay(), "short=" + delay(), "absent=" + delay(), std::string("fail=getattr:ESTALE:4:2:exchange-")}) {
    CAPTURE(rule);
    over_two_mounts({rule}, {}, 3,
                    [&](Group& group, const std::string& path) { gather_and_check(group, through(path), 0); });
  }
}

TEST_CASE("senders with late entries and cached absence: the preflight, the files and a stream succeed") {
  over_two_mounts({"absent=400"}, {"late=60", "absent=400"}, 3, [&](Group& group, const std::string& path) {
    gather_and_check(group, through(path), 0);
    const Model model = [](int, std::uint64_t layer) { return state_of(static_cast<int>(layer)); };
    stream_and_check(group, ranks_from(0, 3), 4, model, {.timeout = 20s, .workspace = {.path = path}});
  });
}

TEST_CASE("a workspace reader through another mount gets the earlier state or the new one, whatever its mount caches") {
  for (const char* rule : {"late=100", "old=100", "short=100", "listing=600000", "fail=open:ESTALE:0:5",
                           "fail=read:ESTALE:0:5", "fail=create:EDQUOT:1:100000:.probe"}) {
    CAPTURE(std::string(rule));
    const TemporaryDirectory backing;
    const FaultyMount writer(backing.path(), {});
    const FaultyMount reader(backing.path(), {rule});
    const auto group = single_group();
    Workspace writing(writer / "w", group);
    // The same job on another host.
    Workspace reading(reader / "w", group, {.timeout = 5s});
    for (int turn = 1; turn <= 2; ++turn) {
      writing.write_configs_and_weights(state_of(turn));
      const auto read = reading.read_configs_and_weights_from_rank(0);
      if (read) CHECK(is_state(read, static_cast<int>(read->step)));
      if (!std::string_view(rule).starts_with("late")) CHECK(is_state(read, turn));
    }
    for (int turn = 0; turn < 200 && !reading.read_configs_and_weights_from_rank(0, 2); ++turn)
      std::this_thread::sleep_for(10ms);
    CHECK(is_state(reading.read_configs_and_weights_from_rank(0, 2), 2));
  }
}

TEST_CASE("a persistent fault is an error on all ranks, with file and cause, in time; the group remains usable") {
  struct Case {
    const char* rule;
    ErrorKind kind;
    const char* word;
  };
  for (const Case& fault : {Case{"fail=read:EIO:0:1000:exchange-", ErrorKind::io, "EIO"},
                            Case{"fail=open:ESTALE:0:100000:exchange-", ErrorKind::io, "ESTALE"},
                            Case{"late=60000", ErrorKind::invalid_argument, "the hosts use different directories"}}) {
    CAPTURE(std::string(fault.rule));
    // The root reads the files, and the senders look for its token.
    const bool is_preflight = fault.kind == ErrorKind::invalid_argument;
    const std::vector<std::string> none;
    over_two_mounts(is_preflight ? none : std::vector<std::string>{fault.rule},
                    is_preflight ? std::vector<std::string>{fault.rule} : none, 3,
                    [&](Group& group, const std::string& path) {
                      const auto since = std::chrono::steady_clock::now();
                      const Error error =
                          error_of(fault.kind, {fault.word}, [&] { gather_and_check(group, through(path, 500ms), 0); });
                      RANK_CHECK(is_preflight || error.path().find("exchange-") != std::string::npos);
                      RANK_CHECK(error.rank().has_value());
                      RANK_CHECK(std::chrono::steady_clock::now() - since < 4s);
                      group.barrier();
                    });
  }
}

TEST_CASE("a sender's disk that fails half-way is an error on all ranks") {
  for (const char* rule : {"space=200000", "fail=write:EIO:3:1000:.growing", "fail=flush:EIO:0:1000:.growing"}) {
    CAPTURE(std::string(rule));
    over_two_mounts({}, {rule}, 2, [&](Group& group, const std::string& path) {
      const ErrorKind kind = std::strstr(rule, "space") != nullptr ? ErrorKind::out_of_space : ErrorKind::io;
      const Error error = error_of(kind, {}, [&] { gather_and_check(group, through(path), 0); });
      RANK_CHECK(error.rank() == 1);
      RANK_CHECK(error.path().find("exchange-") != std::string::npos);
      group.barrier();
    });
  }
}

TEST_CASE("a power failure loses nothing that a durable write has completed, and torn files are reported") {
  const TemporaryDirectory backing;
  const auto group = single_group();
  std::string torn;
  {
    const FaultyMount mount(backing.path(), {});
    Workspace durable(mount / "w", group, {.steps_kept = 5});
    durable.write_configs_and_weights(state_of(1));
    durable.write_configs_and_weights(state_of(2));
    Workspace quick = durable;
    mount.cut_power();
    CHECK(read_text(backing / "w/muster-workspace.json").find("muster_workspace") != std::string::npos);
    CHECK(is_state(durable.read_configs_and_weights_from_rank(0), 2));
    CHECK(StateFile::open(durable.read_configs_and_weights_from_rank(0)->path).check().empty());
  }
  {
    const FaultyMount mount(backing.path(), {});
    Workspace quick(mount / "w2", group, {.durable = false, .timeout = 300ms});
    quick.write_configs_and_weights(state_of(3));
    torn = quick.read_configs_and_weights_from_rank(0)->path;
    mount.cut_power();
    // Cached pages would hide the loss.
    std::this_thread::sleep_for(10ms);
  }
  const std::string path = backing / ("w2/" + torn.substr(torn.find_last_of('/') + 1));
  CHECK_THROWS_AS((void)StateFile::open(path), Error);
}

TEST_CASE("a power failure loses nothing of completed shards and exports") {
  const TemporaryDirectory model;
  const TemporaryDirectory backing;
  inspect::write_demo_model(llama(), model / "model", 1 << 30);
  {
    const FaultyMount mount(backing.path(), {});
    shard_model(model / "model", mount / "shards", {.tensor = 2}, "llama");
    export_model(mount / "shards", mount / "out", "llama", *single_group(), {.max_shard_size = 90'000});
    mount.cut_power();
  }
  check_equal(model / "model", backing / "out");
}

TEST_CASE("a file group whose ranks see late entries and cached absences") {
  const TemporaryDirectory backing;
  const FaultyMount first(backing.path(), {"late=20", "absent=400"});
  const FaultyMount other(backing.path(),
                          {"late=30", "absent=400", "fail=readdir:ESTALE:50:5", "fail=open:ESTALE:0:3:all-"});
  Ranks ranks(3, [&](int rank) {
    const auto group = file_group(
        {.directory = (rank == 0 ? first : other) / "w", .rank = rank, .size = 3, .timeout = 20s, .heartbeat = 100ms});
    for (int round = 0; round < 2; ++round) {
      group->barrier();
      std::array<int, 3> all{};
      group->all_gather(std::as_bytes(std::span(&rank, 1)), std::as_writable_bytes(std::span(all)));
      RANK_CHECK((all == std::array<int, 3>{0, 1, 2}));
    }
    gather_and_check(*group, {}, 1);
  });
  check_ended(ranks.wait());
}

TEST_CASE("a rank of a file group whose disk fails is named by the others") {
  const TemporaryDirectory backing;
  const FaultyMount first(backing.path(), {});
  const FaultyMount other(backing.path(), {"fail=create:EIO:30:100000", "fail=rename:EIO:0:100000:beat"});
  run_processes(2, [&](int rank) {
    const Error error = error_of([&] {
      const auto group = file_group({.directory = (rank == 0 ? first : other) / "w",
                                     .rank = rank,
                                     .size = 2,
                                     .timeout = 3s,
                                     .heartbeat = 50ms,
                                     .lost_after = 1s});
      for (int round = 0; round < 100; ++round) group->barrier();
    });
    // If rank 1 cannot report its error, rank 0 detects that it leaves or falls silent.
    RANK_CHECK(error.rank() == 1 || rank == 1);
  });
}

int main(int argc, char** argv) {
  const std::string obstacle = FaultyMount::obstacle();
  if (!obstacle.empty()) {
    std::printf("skipped: no FUSE file system here: %s\n", obstacle.c_str());
    return 77;
  }
  return doctest::Context(argc, argv).run();
}
