// SPDX-License-Identifier: Apache-2.0
// Runs one job in many environments: `environment_campaign MUSTER short|all|NAME...`. `muster run` starts the ranks.
// The job gathers, streams, reduces and exports, once over shared memory and once over TCP. In each environment the job
// must succeed on all ranks, or fail on all ranks within a limit of seconds with the cause in the table. The campaign
// skips an environment that this machine cannot create, and reports that.

#include <dlfcn.h>
#include <fmt/core.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "muster/export.hpp"
#include "muster/gather_each.hpp"
#include "muster/group.hpp"
#include "muster/process_group.hpp"
#include "muster/tcp.hpp"
#include "src/inspect/demo_model.hpp"
#include "tests/support/exchanges.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace std::chrono_literals;
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using test::read_text;
using test::write_text;

namespace {

constexpr int ranks = 4;

// --- A rank ---------------------------------------------------------------------------------------------------------

/// Returns an environment variable, which configures the ranks; "" if it is not set.
std::string setting(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

/// Makes a system call fail with `error` in this process and its children.
void forbid(long call, int error) {
  std::array<sock_filter, 4> code{{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                                   BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<__u32>(call), 0, 1),
                                   BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<__u32>(error)),
                                   BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)}};
  const sock_fprog program{code.size(), code.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
    throw std::runtime_error("this kernel or sandbox has no seccomp filters");
}

void limit_files(rlim_t count) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = count;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) throw std::runtime_error("the soft limit of open files cannot be set");
}

/// Applies the settings of an environment that affect rank 1 only.
void enter_own_environment(int rank) {
  if (rank != 1) return;
  if (const std::string files = setting("CAMPAIGN_FILES"); !files.empty()) limit_files(std::stoul(files));
  if (const std::string call = setting("CAMPAIGN_FORBID"); !call.empty()) forbid(std::stol(call), EPERM);
  if (!setting("CAMPAIGN_UID").empty() && ::setresuid(65534, 65534, 65534) != 0)
    throw std::runtime_error("the user cannot be changed");
}

/// Forks repeatedly on a separate thread. The children end at once.
class Forking {
 public:
  Forking() {
    if (setting("CAMPAIGN_FORKS").empty()) return;
    thread_ = std::thread([this] {
      while (!stop_) {
        const pid_t child = ::fork();
        if (child == 0) ::_exit(0);
        int status = 0;
        if (child > 0) ::waitpid(child, &status, 0);
        if (child > 0 && status != 0) bad_ = true;
      }
    });
  }
  ~Forking() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  Forking(const Forking&) = delete;
  Forking& operator=(const Forking&) = delete;
  [[nodiscard]] bool is_good() const { return !bad_; }

 private:
  std::thread thread_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> bad_{false};
};

void work(Group& group, const std::string& directory, const std::string& meeting) {
  test::gather_and_check(group, test::ranks_from(1, group.size()), 1000, 0);
  test::gather_and_check(group, test::ranks_from(0, group.size()), 3 << 20, 1);
  int layer = 0;
  std::uint64_t received = 0;
  gather_each(
      [&]() -> std::optional<Config> {
        if (layer++ == 3) return std::nullopt;
        return Config(test::pattern(DType::u8, {1 << 20}, static_cast<std::uint64_t>(group.rank())));
      },
      all_ranks, group,
      [&](LayerPart& part) {
        for (const auto& [rank, config] : part.present()) received += config.as_tensor().nbytes();
      },
      {.memory_budget = 1_MiB});
  RANK_CHECK(received == (group.rank() == 0 ? std::uint64_t{3} * ranks << 20 : 0));
  ProcessGroup all(group);
  const Tensor sum = Tensor::take(std::vector<float>(100'000, 1.0F));
  all.all_reduce(sum);
  RANK_CHECK(bitwise_equal(sum, Tensor::take(std::vector<float>(100'000, static_cast<float>(ranks)))));
  export_model(directory + "/shards", directory + "/out-" + meeting, "llama", group);
}

int run_rank(const std::string& directory) {
  const int rank = std::atoi(setting("RANK").c_str());
  const std::string meeting = setting("CAMPAIGN_MEETING");
  const std::string report = fmt::format("{}/{}-{}", directory, meeting, rank);
  const Clock::time_point begin = Clock::now();
  std::string result = "ok";
  try {
    write_text(fmt::format("{}/pid-{}-{}", directory, meeting, rank), std::to_string(::getpid()));
    enter_own_environment(rank);
    const Forking forking;
    const std::shared_ptr<Group> group =
        meeting == "tcp" ? tcp_group({.address = "file://" + directory + "/meeting", .rank = rank, .size = ranks})
                         : world();
    if (const std::string timeout = setting("CAMPAIGN_TIMEOUT"); !timeout.empty()) {
      // The driver stops the whole job for longer than this timeout.
      group->set_timeout(std::chrono::milliseconds(std::stol(timeout)));
      for (char is_over = 0; is_over == 0;) {
        std::array<char, ranks> all{};
        const char mine = fs::exists(directory + "/resumed") || Clock::now() - begin > 20s ? 1 : 0;
        group->all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
        is_over = *std::ranges::max_element(all);
      }
    }
    work(*group, directory, meeting);
    if (!forking.is_good()) result = "a forked child did not end by itself";
  } catch (const Error& error) {
    result = error.what();
  } catch (const std::exception& error) {
    result = std::string("not an error of Muster: ") + error.what();
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  write_text(report, fmt::format("{:.2f} {}", seconds, result));
  return result == "ok" ? 0 : 1;
}

// --- The driver -----------------------------------------------------------------------------------------------------

struct Environment {
  std::string name;
  /// Runs in the process that becomes `muster run`. Throws if this machine cannot create the environment.
  std::function<void()> enter = [] {};
  /// Part of the error message of all ranks, over shared memory and over TCP; empty: the job succeeds.
  std::string local_failure = {};
  std::string tcp_failure = {};
  bool is_short = false;
  bool suspends = false;
};

void unshared(int kinds) {
  if (::unshare(kinds) != 0) throw std::runtime_error("namespaces cannot be made");
  if ((kinds & CLONE_NEWNS) != 0 && ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)
    throw std::runtime_error("mounts cannot be made private");
}
void mounted(const char* type, const char* target, unsigned long flags, const char* options) {
  unshared(CLONE_NEWNS);
  if (::mount(type, target, type, flags, options) != 0)
    throw std::runtime_error(fmt::format("{} cannot be mounted on {}", type, target));
}
auto set(const char* name, const std::string& value) {
  return [=] { ::setenv(name, value.c_str(), 1); };
}

std::vector<Environment> environments() {
  std::vector<Environment> all;
  const auto add = [&](Environment environment) { all.push_back(std::move(environment)); };
  add({.name = "ordinary", .is_short = true});
  struct Forbidden {
    const char* name;
    long call;
  };
  for (const Forbidden& each : {Forbidden{"memfd_create", SYS_memfd_create},
                                {"pidfd_open", SYS_pidfd_open},
                                {"process_vm_readv", SYS_process_vm_readv},
                                {"io_uring_setup", SYS_io_uring_setup},
                                {"renameat2", SYS_renameat2},
                                {"close_range", SYS_close_range}}) {
    // Shared memory needs pidfd_open to detect dead ranks, and the launcher needs it to watch its ranks. TCP groups do
    // not use shared memory in this case.
    const std::string failure = each.call == SYS_pidfd_open ? "pidfd_open" : "";
    for (const int error : {ENOSYS, EPERM})
      add({.name = fmt::format("no {} ({})", each.name, error == EPERM ? "EPERM" : "ENOSYS"),
           .enter = [=] { forbid(each.call, error); },
           .local_failure = failure,
           .tcp_failure = failure,
           .is_short = error == EPERM});
    add({.name = fmt::format("no {} on one rank", each.name),
         .enter = set("CAMPAIGN_FORBID", std::to_string(each.call)),
         .local_failure = failure,
         .is_short = each.call == SYS_pidfd_open});
  }
  for (const int files : {32, 64, 256}) {
    add({.name = fmt::format("{} open files", files),
         .enter = [=] { limit_files(static_cast<rlim_t>(files)); },
         .is_short = files == 32});
    add({.name = fmt::format("{} open files on one rank", files),
         .enter = set("CAMPAIGN_FILES", std::to_string(files)),
         .is_short = files == 32});
  }
  for (const bool is_posix : {false, true}) {
    const auto with = [=](const std::function<void()>& enter) {
      return [=] {
        if (is_posix) ::setenv("MUSTER_SHM", "posix", 1);
        enter();
      };
    };
    const std::string suffix = is_posix ? ", POSIX shared memory" : "";
    const std::string no_room = is_posix ? "/dev/shm" : "";
    add({.name = "/dev/shm of 1 MiB" + suffix,
         .enter = with([] { mounted("tmpfs", "/dev/shm", 0, "size=1m"); }),
         .local_failure = no_room,
         .tcp_failure = no_room,
         .is_short = true});
    add({.name = "/dev/shm read-only" + suffix,
         .enter = with([] { mounted("tmpfs", "/dev/shm", MS_RDONLY, "size=1m"); }),
         .local_failure = no_room,
         .tcp_failure = no_room});
    add({.name = "/dev/shm on a disk" + suffix,
         .enter = with([] {
           unshared(CLONE_NEWNS);
           if (::mount("/var/tmp", "/dev/shm", nullptr, MS_BIND, nullptr) != 0)
             throw std::runtime_error("/var/tmp cannot be mounted on /dev/shm");
         }),
         .local_failure = is_posix ? "tmpfs" : "",
         .tcp_failure = is_posix ? "tmpfs" : ""});
  }
  add({.name = "suspended for longer than the timeout",
       .enter = set("CAMPAIGN_TIMEOUT", "1000"),
       .is_short = true,
       .suspends = true});
  add({.name = "forks at any moment", .enter = set("CAMPAIGN_FORKS", "1"), .is_short = true});
  add({.name = "a user namespace", .enter = [] { unshared(CLONE_NEWUSER); }});
  add({.name = "a mount namespace", .enter = [] { unshared(CLONE_NEWNS); }});
  add({.name = "IPC and UTS namespaces", .enter = [] { unshared(CLONE_NEWIPC | CLONE_NEWUTS); }});
  add({.name = "a host that is named as all others", .enter = [] {
         unshared(CLONE_NEWUTS);
         if (::sethostname("localhost", 9) != 0) throw std::runtime_error("the host cannot be renamed");
       }});
  add({.name = "a PID namespace", .enter = [] {
         unshared(CLONE_NEWPID);
         // Only children of this process are in the new namespace, and /proc shows the process IDs of the outer one.
         const pid_t child = ::fork();
         if (child == 0) return;
         int status = 0;
         ::waitpid(child, &status, 0);
         ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 125);
       }});
  add({.name = "a network namespace without a network",
       .enter = [] { unshared(CLONE_NEWNET); },
       .tcp_failure = "network"});
  add({.name = "another user",
       .enter =
           [] {
             if (::setgroups(0, nullptr) != 0 || ::setresgid(65534, 65534, 65534) != 0 ||
                 ::setresuid(65534, 65534, 65534) != 0)
               throw std::runtime_error("the user cannot be changed");
           },
       .is_short = true});
  add({.name = "another user on one rank",
       .enter =
           [] {
             // Processes of two users cannot form a group in shared memory, so the ranks wait until their deadline.
             ::setenv("CAMPAIGN_UID", "1", 1);
             ::setenv("MUSTER_TIMEOUT", "1", 1);
           },
       .local_failure = "user"});
  add({.name = "no /proc", .enter = [] { mounted("tmpfs", "/proc", 0, "size=1m"); }, .is_short = true});
  add({.name = "a read-only root", .enter = [] {
         unshared(CLONE_NEWNS);
         const std::string directory = setting("CAMPAIGN_DIRECTORY");
         if (::mount(directory.c_str(), directory.c_str(), nullptr, MS_BIND, nullptr) != 0 ||
             ::mount("none", "/", nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr) != 0)
           throw std::runtime_error("the root cannot be mounted read-only");
       }});
  return all;
}

/// Runs `muster run` in the environment. Returns false if this machine cannot create the environment.
bool run_job(const Environment& environment, const std::string& program, const std::string& self,
             const std::string& directory, const std::string& meeting) {
  // Finds the directory of the library that this program has loaded.
  Dl_info library{};
  ::dladdr(reinterpret_cast<const void*>(&muster::world), &library);
  const std::string libraries = fs::absolute(library.dli_fname).parent_path();
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::setenv("CAMPAIGN_MEETING", meeting.c_str(), 1);
    ::setenv("CAMPAIGN_DIRECTORY", directory.c_str(), 1);
    try {
      environment.enter();
    } catch (const std::exception& error) {
      write_text(directory + "/skipped", error.what());
      ::_exit(77);
    }
    const std::string count = std::to_string(ranks);
    // Without /proc the program cannot find its libraries relative to its own path.
    ::setenv("LD_LIBRARY_PATH", libraries.c_str(), 1);
    const int log = ::creat((directory + "/log").c_str(), 0666);
    ::dup2(log, STDOUT_FILENO);
    ::dup2(log, STDERR_FILENO);
    ::execl(program.c_str(), "muster", "run", "-n", count.c_str(), "--timeout", "30", "--", self.c_str(), "--rank",
            directory.c_str(), nullptr);
    ::_exit(127);
  }
  if (environment.suspends) {
    std::vector<pid_t> pids{child};
    const auto deadline = Clock::now() + 10s;
    for (int rank = 0; rank < ranks && Clock::now() < deadline;) {
      const std::string pid = read_text(fmt::format("{}/pid-{}-{}", directory, meeting, rank));
      if (pid.empty()) {
        std::this_thread::sleep_for(5ms);
        continue;
      }
      pids.push_back(std::stoi(pid));
      ++rank;
    }
    std::this_thread::sleep_for(300ms);
    for (const pid_t pid : pids) ::kill(pid, SIGSTOP);
    std::this_thread::sleep_for(2500ms);
    for (const pid_t pid : pids) ::kill(pid, SIGCONT);
    write_text(directory + "/resumed", "");
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return !(WIFEXITED(status) && WEXITSTATUS(status) == 77);
}

/// Returns the limit for a failure: CAMPAIGN_SECONDS, or 6 s because the short form runs at the same time as other
/// tests on two cores.
double most_seconds() {
  const std::string given = setting("CAMPAIGN_SECONDS");
  return given.empty() ? 6 : std::stod(given);
}

/// Describes the faults of a job; empty if it has none.
std::string faults_of(const std::string& directory, const std::string& meeting, const std::string& failure) {
  std::string faults;
  int failed = 0;
  // The launcher itself may refuse to start ranks.
  const std::string log = read_text(directory + "/log");
  if (!failure.empty() && log.starts_with("muster run: ") && log.find(failure) < log.find('\n')) return faults;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string told = read_text(fmt::format("{}/{}-{}", directory, meeting, rank));
    double seconds = 0;
    std::string words;
    if (const std::size_t space = told.find(' '); space != std::string::npos) {
      seconds = std::stod(told);
      words = told.substr(space + 1);
    }
    const auto complain = [&](const std::string& what) { faults += fmt::format("    rank {}: {}\n", rank, what); };
    if (words.empty()) {
      complain("did not report: it was killed");
      continue;
    }
    if (words == "ok") continue;
    ++failed;
    if (failure.empty())
      complain("fails: " + words);
    else if (words.find(failure) == std::string::npos)
      complain(fmt::format("does not name \"{}\": {}", failure, words));
    else if (seconds > most_seconds())
      complain(fmt::format("fails only after {:.1f} s: {}", seconds, words));
  }
  if (failed != 0 && failed != ranks) faults += fmt::format("    only {} of {} ranks fail\n", failed, ranks);
  if (failed == 0 && !failure.empty() && faults.empty()) faults += "    works, where a failure was expected\n";
  if (!faults.empty()) faults += "    log: " + log + "\n";
  return faults;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() == 2 && arguments[0] == "--rank") return run_rank(arguments[1]);
  if (arguments.size() < 2) {
    std::fprintf(stderr, "usage: environment_campaign MUSTER short|all|NAME...\n");
    return 2;
  }
  const std::string self = fs::read_symlink("/proc/self/exe");
  int bad = 0;
  for (const Environment& environment : environments()) {
    const bool is_named =
        std::ranges::find(arguments.begin() + 1, arguments.end(), environment.name) != arguments.end();
    if (!is_named && arguments[1] != "all" && !(arguments[1] == "short" && environment.is_short)) continue;
    for (const std::string meeting : {"local", "tcp"}) {
      const test::TemporaryDirectory folder;
      const std::string directory = folder.path();
      ::chmod(directory.c_str(), 0777);
      inspect::write_demo_model(
          inspect::llama_model(
              {.hidden = 48, .intermediate = 96, .layers = 2, .heads = 12, .key_value_heads = 4, .vocabulary = 64}),
          directory + "/model", 1 << 30);
      shard_model(directory + "/model", directory + "/shards", {.tensor = ranks}, "llama");
      const bool could = run_job(environment, arguments[0], self, directory, meeting);
      if (!could) {
        fmt::print("skipped  {}, {}: {}\n", environment.name, meeting, read_text(directory + "/skipped"));
        continue;
      }
      const std::string& failure = meeting == "tcp" ? environment.tcp_failure : environment.local_failure;
      const std::string faults = faults_of(directory, meeting, failure);
      fmt::print("{}  {}, {}\n{}", faults.empty() ? (failure.empty() ? "works  " : "refused") : "FAULT  ",
                 environment.name, meeting, faults);
      bad += faults.empty() ? 0 : 1;
    }
  }
  return bad == 0 ? 0 : 1;
}
