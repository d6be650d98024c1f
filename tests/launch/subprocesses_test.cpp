// SPDX-License-Identifier: Apache-2.0
// launch_subprocesses() with real processes: the ranks are this program.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "muster/compat/dist.hpp"
#include "muster/compat/multiprocess.hpp"
#include "muster/error.hpp"
#include "muster/interrupt.hpp"
#include "muster/parallel_groups.hpp"
#include "src/launch/nodes.hpp"
#include "src/launch/ranks.hpp"
#include "src/launch/subprocesses.hpp"
#include "src/os/process.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/temporary_directory.hpp"

namespace {

using namespace muster;
using namespace std::chrono_literals;
using test::TemporaryDirectory;

using Arguments = std::span<const std::string>;

int number(const char* name) {
  return std::atoi(os::environment(name).value_or("-1").c_str());
}

void append(const std::string& path, const std::string& line) {
  const os::Fd file(::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600));
  [[maybe_unused]] const ssize_t written = ::write(file.get(), line.data(), line.size());
}

/// Each rank writes one line about its environment.
void tell(Arguments arguments) {
  const Tensor sum = Tensor::allocate(DType::i32, {1});
  sum.mutable_values<std::int32_t>()[0] = dist::get_rank() + 1;
  dist::all_reduce(sum);
  const ParallelGroups& groups = parallel_groups();
  const auto last = [](const ProcessGroup& group) { return std::to_string(group.global_rank(group.size() - 1)); };
  append(arguments[0], std::to_string(dist::get_rank()) + " " + std::to_string(sum.values<std::int32_t>()[0]) + " " +
                           std::to_string(number("LOCAL_RANK")) + " " + last(groups.model()) + " " +
                           last(groups.pipeline()) + " " + last(groups.data()) + " " +
                           os::environment("WORD").value_or("-") + "\n");
}
const RegisteredFunction registered_tell("tell", tell);

void set_up(Arguments) {
  ::setenv("WORD", "set", 1);
}
const RegisteredFunction registered_set_up("set up", set_up);

/// The named rank ends in the named way; the others wait for it.
void fail(Arguments arguments) {
  const std::string& how = arguments[0];
  if (number("RANK") == std::stoi(arguments[1])) {
    std::fprintf(stderr, "about to %s\n", how.c_str());
    if (how == "throw") throw std::runtime_error("the shard is empty");
    if (how == "error") throw Error(ErrorKind::corrupt, "the shard is torn");
    if (how == "exit") ::_exit(7);
    if (how == "abort") std::abort();
    if (how == "kill") ::raise(SIGKILL);
    if (how == "interrupt") ::raise(SIGINT);
    if (how == "memory") {
      // A sanitizer ends the process earlier.
      if (test::under_sanitizer) throw std::bad_alloc();
      const rlimit none{std::size_t{1} << 30, std::size_t{1} << 30};
      ::setrlimit(RLIMIT_AS, &none);
      ::operator delete(::operator new (std::size_t{1} << 40));
    }
  }
  if (dist::is_initialized()) dist::barrier();
}
const RegisteredFunction registered_fail("fail", fail);
void nothing(Arguments) {}
const RegisteredFunction registered_nothing("nothing", nothing);

void compute(Arguments) {
  for (;;) ::pause();
}
const RegisteredFunction registered_compute("compute", compute);

std::vector<std::string> sorted_lines(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  std::ranges::sort(lines);
  return lines;
}

bool has_children() {
  std::ifstream file("/proc/self/task/" + std::to_string(::getpid()) + "/children");
  std::string child;
  return static_cast<bool>(file >> child);
}

Error thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return Error(ErrorKind::io, "nothing was thrown");
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("a function runs on every rank, with its groups") {
  for (const LaunchMethod method : {LaunchMethod::forkserver, LaunchMethod::spawn}) {
    const TemporaryDirectory folder;
    const std::string path = folder / "lines";
    MultiprocessConfig config{.world_size = 8, .model_parallelism = 2, .pipeline_parallelism = 2};
    config.launch_method = method;
    launch_subprocesses("tell", config, {.arguments = {path}, .setup = "set up"});
    CHECK(sorted_lines(path) == std::vector<std::string>{"0 36 0 1 2 4 set", "1 36 1 1 3 5 set", "2 36 2 3 2 6 set",
                                                         "3 36 3 3 3 7 set", "4 36 4 5 6 4 set", "5 36 5 5 7 5 set",
                                                         "6 36 6 7 6 6 set", "7 36 7 7 7 7 set"});
    CHECK(!has_children());
  }
}

TEST_CASE("a variable of another process's launch is refused by name") {
  const TemporaryDirectory folder;
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  for (const char* value : {"rank 900 901", "rank 0", "rank 0 901"}) {
    const std::string variable = std::string(launch::call_variable) + "='" + value + "'";
    CHECK(std::system((variable + " '" + program + "' 2> " + (folder / "words")).c_str()) == 1 << 8);
    const std::vector<std::string> words = sorted_lines(folder / "words");
    CHECK((words.size() == 1 && contains(words[0], variable)));
  }
}

TEST_CASE("a program other than this one") {
  const TemporaryDirectory folder;
  const std::string path = folder / "lines";
  const std::vector<std::string> shell = {"sh", "-c", R"(exec "$0")", std::filesystem::read_symlink("/proc/self/exe")};
  launch_subprocesses("tell", {.world_size = 2, .launch_method = LaunchMethod::spawn},
                      {.arguments = {path}, .program = shell});
  CHECK(sorted_lines(path) == std::vector<std::string>{"0 3 0 0 0 1 -", "1 3 1 1 1 1 -"});
  const auto forked = [&] { launch_subprocesses("tell", {.world_size = 2}, {.program = shell}); };
  CHECK(thrown_by(forked).kind() == ErrorKind::invalid_argument);
  CHECK(!has_children());
}

TEST_CASE("the program's hook ends the wait, and the ranks") {
  set_interrupt_hook([]() noexcept { return true; });
  const auto waits = [] {
    launch_subprocesses(std::vector<std::string>{"sleep", "600"}, {.world_size = 2}, {.launch = {.grace = 0ms}});
  };
  CHECK(thrown_by(waits).kind() == ErrorKind::cancelled);
  set_interrupt_hook(nullptr);
  CHECK(!has_children());
}

TEST_CASE("one rank is a process, too") {
  const TemporaryDirectory folder;
  const std::string path = folder / "lines";
  launch_subprocesses("tell", {.world_size = 1}, {.arguments = {path}, .launch = {.environment = {{"WORD", "given"}}}});
  CHECK(sorted_lines(path) == std::vector<std::string>{"0 1 0 0 0 0 given"});
}

TEST_CASE("launchers that each start some of the ranks") {
  const TemporaryDirectory folder;
  const std::string path = folder / "lines";
  std::optional<launch::ReservedPort> port = launch::reserve_port(0);
  REQUIRE(port);
  const MultiprocessConfig config{.world_size = 4, .local_world_size = 2, .master_port = port->number};
  // Several threads may call it.
  std::vector<std::thread> launchers;
  for (const int offset : {0, 2})
    launchers.emplace_back(
        [&, offset] { launch_subprocesses("tell", config, {.arguments = {path}, .rank_offset = offset}); });
  for (std::thread& launcher : launchers) launcher.join();
  CHECK(sorted_lines(path) ==
        std::vector<std::string>{"0 10 0 0 0 3 -", "1 10 1 1 1 3 -", "2 10 0 2 2 3 -", "3 10 1 3 3 3 -"});
}

struct Ending {
  const char* how;
  const char* words;
  ErrorKind kind;
};
constexpr Ending endings[] = {{"throw", "the shard is empty (it ended with status 1)", ErrorKind::peer_lost},
                              {"error", "the shard is torn (it ended with status 1)", ErrorKind::corrupt},
                              {"memory", "out of memory", ErrorKind::out_of_space},
                              {"exit", "ended with status 7", ErrorKind::peer_lost},
                              {"abort", "was killed by SIGABRT", ErrorKind::peer_lost},
                              {"kill", "was killed by SIGKILL", ErrorKind::peer_lost},
                              {"interrupt", "was killed by SIGINT", ErrorKind::peer_lost}};

/// Launches ranks of which one fails, before or after the rendezvous. Checks the error and the remaining processes.
void check_failure(const Ending& ending, LaunchMethod method, bool is_before, int ranks, int victim) {
  CAPTURE(ending.how);
  CAPTURE(is_before);
  MultiprocessConfig config{.world_size = ranks};
  config.launch_method = method;
  const Error error = thrown_by([&] {
    launch_subprocesses(is_before ? "nothing" : "fail", config,
                        {.arguments = {ending.how, std::to_string(victim)},
                         .setup = is_before ? "fail" : "",
                         .launch = {.environment = {{"MUSTER_TIMEOUT", "60"}}, .grace = 200ms}});
  });
  CAPTURE(std::string(error.what()));
  CHECK(contains(error.what(), ending.words));
  CHECK(contains(error.what(), "about to " + std::string(ending.how)));
  CHECK(contains(error.what(), "rank " + std::to_string(victim) + " (host " + os::host_name()));
  CHECK(error.kind() == ending.kind);
  CHECK(error.rank() == victim);
  CHECK(error.host() == os::host_name());
  CHECK((error.pid() && ::kill(static_cast<pid_t>(*error.pid()), 0) != 0));
  CHECK(!has_children());
}

TEST_CASE("the error has the failing rank's message") {
  for (const LaunchMethod method : {LaunchMethod::forkserver, LaunchMethod::spawn})
    for (const Ending& ending : endings)
      for (const bool is_before : {true, false}) check_failure(ending, method, is_before, 3, 1);
}

/// Fails with a message that is longer than a small pipe holds.
void fail_at_length(Arguments) {
  if (number("RANK") == 1) throw Error(ErrorKind::corrupt, "begin " + std::string(9000, 'x') + " end");
}
const RegisteredFunction registered_fail_at_length("fail_at_length", fail_at_length);

TEST_CASE("the failing rank's message if the kernel gives the user small pipes") {
  test::run_processes(1, [](int) {
    // The kernel gives smaller pipes to a user who has many, unless the user may raise limits.
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    std::array<__user_cap_data_struct, 2> sets{};
    RANK_CHECK(::syscall(SYS_capget, &header, sets.data()) == 0);
    for (const unsigned right : {unsigned{CAP_SYS_RESOURCE}, unsigned{CAP_SYS_ADMIN}}) {
      ::prctl(PR_CAPBSET_DROP, right);
      sets[0].effective &= ~(1U << right);
      sets[0].permitted &= ~(1U << right);
    }
    RANK_CHECK(::syscall(SYS_capset, &header, sets.data()) == 0);
    std::vector<std::pair<os::Fd, os::Fd>> pipes;
    int size = 1 << 20;
    while (size > 9000 && pipes.size() < 2000) {
      std::array<int, 2> ends{};
      if (::pipe2(ends.data(), O_CLOEXEC) != 0) break;
      size = ::fcntl(ends[0], F_GETPIPE_SZ);
      pipes.emplace_back(os::Fd(ends[0]), os::Fd(ends[1]));
    }
    if (size > 9000) std::printf("the pipes have stayed large\n");
    const Error error = test::error_of(ErrorKind::corrupt, {"begin", "xxx end"}, [] {
      launch_subprocesses("fail_at_length", {.world_size = 2}, {.launch = {.grace = 200ms}});
    });
    RANK_CHECK(error.rank() == 1);
  });
}

/// Counts processes of this program, and files of shared memory.
std::vector<std::string> left_behind() {
  std::vector<std::string> names;
  std::error_code failure;
  const auto self = std::filesystem::read_symlink("/proc/self/exe");
  for (const auto& entry : std::filesystem::directory_iterator("/proc"))
    if (std::filesystem::read_symlink(entry.path() / "exe", failure) == self) names.push_back(entry.path());
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) names.push_back(entry.path());
  return names;
}

// The long form is MUSTER_TEST_LAUNCHES=1000. No other process may use this program or /dev/shm then.
TEST_CASE("launches with a rank that fails at random") {
  const int launches = std::atoi(os::environment("MUSTER_TEST_LAUNCHES").value_or("10").c_str());
  const bool looks = launches > 10;
  const std::vector<std::string> before = looks ? left_behind() : std::vector<std::string>{};
  std::mt19937 random(1);
  const auto below = [&random](int most) { return static_cast<int>(random() % static_cast<unsigned>(most)); };
  for (int launch = 0; launch < launches; ++launch) {
    CAPTURE(launch);
    const int ranks = 2 + below(5);
    check_failure(endings[static_cast<std::size_t>(below(std::size(endings)))],
                  below(2) == 0 ? LaunchMethod::forkserver : LaunchMethod::spawn, below(2) == 0, ranks, below(ranks));
  }
  if (looks) CHECK(left_behind() == before);
}

TEST_CASE("a command's status and the end of its standard error") {
  const Error error = thrown_by([] {
    launch_subprocesses(std::vector<std::string>{"sh", "-c", "echo words >&2; [ $RANK = 0 ] || exit 3"},
                        {.world_size = 2});
  });
  CAPTURE(std::string(error.what()));
  CHECK(contains(error.what(), "ended with status 3; the end of its standard error: words"));
  CHECK(error.rank() == 1);
  CHECK(thrown_by([] {
          launch_subprocesses(std::vector<std::string>{"no-such-command-at-all"}, {.world_size = 2});
        }).kind() == ErrorKind::not_found);
  launch_subprocesses(std::vector<std::string>{"true"}, {.world_size = 2});
}

TEST_CASE("a job that takes too long is ended") {
  const Error error = thrown_by(
      [] { launch_subprocesses("compute", {.world_size = 2}, {.launch = {.grace = 100ms, .timeout = 300ms}}); });
  CHECK(error.kind() == ErrorKind::timeout);
  CHECK(!has_children());
}

TEST_CASE("logs: one file per stream, and the launcher's streams only with tee") {
  const TemporaryDirectory folder;
  const std::vector<std::string> command{"sh", "-c", "echo out $RANK; echo err $RANK >&2; exit $RANK"};
  const std::string logs = folder / "logs/of/a job";
  const Error error =
      thrown_by([&] { launch_subprocesses(command, {.world_size = 2}, {.launch = {.log_directory = logs}}); });
  CHECK(contains(error.what(), "standard error: err 1"));
  for (const char* rank : {"0", "1"})
    for (const char* stream : {"out", "err"})
      CHECK(test::read_text(logs + "/rank-" + rank + "." + stream) == std::string(stream) + " " + rank + "\n");
  const Error refused =
      thrown_by([&] { launch_subprocesses(command, {.world_size = 2}, {.launch = {.log_directory = "/proc/none"}}); });
  CHECK(contains(refused.what(), "\"/proc/none\": creating the log directory"));
}

TEST_CASE("bad input is refused before anything is started") {
  struct Case {
    MultiprocessConfig config;
    SubprocessOptions options;
    const char* words;
  };
  std::optional<launch::ReservedPort> port = launch::reserve_port(0);
  const os::Fd listener = launch::listen_for_ranks(0);
  REQUIRE(port);
  const Case cases[] = {
      {{.world_size = 0}, {}, "world_size 0 is out of range (valid: at least 1)"},
      {{.world_size = 2, .local_world_size = 3}, {}, "local_world_size 3 is out of range for world_size 2"},
      {{.world_size = 6, .model_parallelism = 2, .pipeline_parallelism = 2},
       {},
       "6 ranks cannot be split into models of"},
      {{.world_size = 4, .model_parallelism = 0}, {}, "models of 0 ranks"},
      {{.world_size = 2, .backend = "smoke"}, {}, "unknown backend \"smoke\""},
      {{.world_size = 2, .data_parallel_backend = "nccl"}, {}, "needs libmuster-cuda"},
      {{.world_size = 4, .local_world_size = 2}, {}, "master_addr and master_port must be set"},
      {{.world_size = 4, .local_world_size = 2, .master_port = 29500},
       {.rank_offset = 3},
       "2 ranks from 3 are out of range"},
      {{.world_size = 2, .master_port = 70000}, {}, "master_port 70000 is out of range"},
      {{.world_size = 2, .init_method = "udp://x"}, {}, "init_method \"udp://x\": malformed"},
      {{.world_size = 2}, {.setup = "not there"}, "registered function \"not there\" does not exist"},
      {{.world_size = 2}, {.launch = {.tee = true}}, "tee needs a log directory"},
      {{.world_size = 2}, {.launch = {.environment = {{"A=B", "c"}}}}, "environment variable \"A=B\""},
  };
  for (const Case& each : cases) {
    const Error error = thrown_by([&] { launch_subprocesses("nothing", each.config, each.options); });
    CAPTURE(std::string(error.what()));
    CHECK(contains(error.what(), each.words));
  }
  CHECK(contains(thrown_by([] { launch_subprocesses("gone", {.world_size = 2}); }).what(),
                 "registered function \"gone\" does not exist"));
  CHECK_THROWS_AS(RegisteredFunction("fail", fail), Error);
}

TEST_CASE("a port in use is reported before any rank starts") {
  sockaddr_in address{};
  socklen_t length = sizeof address;
  const os::Fd taken(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  REQUIRE(::bind(taken.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0);
  REQUIRE(::listen(taken.get(), 1) == 0);
  REQUIRE(::getsockname(taken.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
  const int port = ntohs(address.sin_port);
  const TemporaryDirectory folder;
  const Error error = thrown_by([&] {
    launch_subprocesses(std::vector<std::string>{"touch", folder / "started"},
                        {.world_size = 4, .local_world_size = 2, .master_port = port - 1});
  });
  CHECK(contains(error.what(), "Choose a free port"));
  CHECK(!std::filesystem::exists(folder / "started"));
}

TEST_CASE("only a listener like torch's can use a reserved port") {
  const auto port = launch::reserve_port(0);
  REQUIRE(port);
  const os::Fd listener = launch::listen_for_ranks(port->number);
  CHECK(listener);
  CHECK(!launch::reserve_port(port->number));
}

TEST_CASE("CUDA_VISIBLE_DEVICES follows the driver's rules") {
  struct Case {
    const char* list;
    int devices;
  };
  for (const Case& row : {Case{"", 0},
                          {"-1", 0},
                          {"0", 1},
                          {"0,1", 2},
                          {"3,1", 2},
                          {" 2, 3", 2},
                          {"0,-1,1", 1},
                          {"0,8,1", 1},
                          {"1,1", 0},
                          {"NoDevFiles", 0},
                          {"none", 0},
                          {"0,1,", 2},
                          {"GPU-8932f937", 1},
                          {"GPU-1,GPU-2", 2},
                          {"MIG-7a", 1},
                          {"0x1", 0},
                          {"0,1,2,3,4,5,6,7", 8}}) {
    CAPTURE(row.list);
    CHECK(launch::devices_in(row.list, 8) == row.devices);
  }
}

TEST_CASE("backends by name") {
  CHECK(default_backend() == "tcp");
  CHECK(get_distributed_backend() == "tcp");
  set_distributed_backend("shm");
  CHECK(get_distributed_backend() == "shm");
  CHECK_THROWS_AS(set_distributed_backend("smoke"), Error);
  MultiprocessConfig config{.world_size = 2};
  config.resolve();
  CHECK(config.data_parallel_backend == "shm");
  set_distributed_backend("tcp");
  ::setenv("TORCH_DISTRIBUTED_BACKEND", "gloo", 1);
  CHECK(default_backend() == "gloo");
  for (const char* const only_in_torch : {"nccl", "ucc", "cpu:gloo,cuda:nccl", ""}) {
    ::setenv("TORCH_DISTRIBUTED_BACKEND", only_in_torch, 1);
    CHECK(default_backend() == "tcp");
    MultiprocessConfig unnamed{.world_size = 2};
    unnamed.resolve();
    CHECK(unnamed.backend == "tcp");
  }
  ::unsetenv("TORCH_DISTRIBUTED_BACKEND");
}

TEST_CASE("init_and_run in this process") {
  static int called = 0;
  MultiprocessConfig config{.rank = 0, .local_rank = 0, .world_size = 1, .master_port = 29500};
  config.resolve();
  init_and_run([](Arguments) { called = dist::get_world_size() * parallel_groups().data().size(); }, config);
  CHECK(called == 1);
  CHECK(!dist::is_initialized());
  CHECK_THROWS_AS(static_cast<void>(parallel_groups()), Error);
  const Tensor same = Tensor::allocate(DType::u8, {2});
  CHECK(dist::all_to_all(same).view().data() == same.view().data());
}

}  // namespace

int main(int argc, char** argv) {
  // Variables that the launchers of this test set for their ranks must not come from outside.
  muster::run_launched_function();
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
    ::unsetenv(name);
  return doctest::Context(argc, argv).run();
}
