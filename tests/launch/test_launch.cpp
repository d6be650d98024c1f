// SPDX-License-Identifier: Apache-2.0
// `muster run` with real processes: ranks are small shell scripts.
#include <poll.h>
#include <sys/stat.h>

#include <set>

#include "muster/error.hpp"
#include "muster/launch.hpp"
#include "src/launch/ranks.hpp"
#include "tests/launch/launcher.hpp"

using namespace launched;

TEST_CASE("ranks get torchrun's variables and the job's key") {
  Launcher launcher(
      shell(3, "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $MUSTER_JOB"));
  CHECK(launcher.wait() == 0);
  CHECK(launcher.err().empty());
  std::set<std::string> ranks, ports, jobs;
  for (const std::string& line : lines_of(launcher.out())) {
    std::istringstream words(line);
    std::string rank, local_rank, size, local_size, address, port, job;
    words >> rank >> local_rank >> size >> local_size >> address >> port >> job;
    CHECK(rank == local_rank);
    CHECK(size == "3");
    CHECK(local_size == "3");
    CHECK(address == "127.0.0.1");
    ranks.insert(rank);
    ports.insert(port);
    jobs.insert(job);
  }
  CHECK(ranks == std::set<std::string>{"0", "1", "2"});
  REQUIRE(ports.size() == 1);
  CHECK(std::stoi(*ports.begin()) > 0);
  REQUIRE(jobs.size() == 1);
  CHECK(jobs.begin()->size() == 32);
  CHECK(jobs.begin()->find_first_not_of("0123456789abcdef") == std::string::npos);
}

TEST_CASE("every job has another key, also one inside another") {
  Launcher launcher(
      shell(1, "echo $MUSTER_JOB; \"$MUSTER_PROGRAM\" run -n 1 -- sh -c 'echo $MUSTER_JOB'; echo $MUSTER_JOB"));
  CHECK(launcher.wait() == 0);
  const auto keys = lines_of(launcher.out());
  REQUIRE(keys.size() == 3);
  CHECK(keys[0] == keys[2]);
  CHECK(keys[0] != keys[1]);
}

TEST_CASE("arguments reach the command unchanged") {
  Launcher launcher({"-n", "1", "--", "printf", "<%s>", "--", "run", "-n", "3", "", "a b", "--help"});
  CHECK(launcher.wait() == 0);
  CHECK(launcher.out() == "<--><run><-n><3><><a b><--help>");
}

TEST_CASE("only rank 0 gets the standard input") {
  Launcher launcher(shell(3, "cat"), "words\n");
  CHECK(launcher.wait() == 0);
  CHECK(launcher.out() == "words\n");
}

TEST_CASE("the status is that of the rank that failed first, and one line names it") {
  Launcher launcher(
      shell(4, "echo $$; if [ $RANK = 2 ]; then exit 41; fi; trap 'exit 9' TERM; while :; do sleep 0.01; done",
            {"--grace", "2"}));
  CHECK(launcher.wait() == 41);
  const auto words = lines_of(launcher.err());
  REQUIRE(words.size() == 1);
  CHECK(contains(words[0], "rank 2 (pid "));
  CHECK(contains(words[0], "ended with status 41"));
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  CHECK(contains(words[0], std::string("on host ") + host));
  for (const pid_t pid : launcher.pids(4)) CHECK(!is_alive(pid));
}

TEST_CASE("a rank that is killed ends the others, with 128 + signal") {
  Launcher launcher(shell(4, "echo $$; sleep 100", {"--grace", "0.2"}));
  const auto pids = launcher.pids(4);
  ::kill(pids[1], SIGKILL);
  CHECK(launcher.wait() == 128 + SIGKILL);
  CHECK(contains(launcher.err(), "(pid " + std::to_string(pids[1]) + ")"));
  CHECK(contains(launcher.err(), "was killed by SIGKILL"));
  for (const pid_t pid : pids) CHECK(!is_alive(pid));
}

TEST_CASE("after a failure the other ranks have the grace period to report") {
  Launcher launcher(shell(2, "[ $RANK = 1 ] && exit 3; sleep 0.3; echo bye; exit 4", {"--grace", "60"}));
  const auto start = Clock::now();
  CHECK(launcher.wait() == 3);
  CHECK(launcher.out() == "bye\n");
  CHECK(Clock::now() - start < 20s);
}

TEST_CASE("a rank that ignores SIGTERM is killed after the grace period, a stopped one too") {
  Launcher launcher(shell(
      3, "[ $RANK = 0 ] && exit 5; echo $$; trap '' TERM; [ $RANK = 1 ] && kill -STOP $$; while :; do sleep 0.01; done",
      {"--grace", "0.2"}));
  const auto start = Clock::now();
  CHECK(launcher.wait() == 5);
  CHECK(Clock::now() - start < 20s);
  for (const pid_t pid : launcher.pids(2)) CHECK(!is_alive(pid));
}

TEST_CASE("a killed launcher leaves neither ranks nor their child processes") {
  Launcher launcher(shell(3, "echo $$; sh -c 'echo $$; while :; do sleep 0.05; done'; true"));
  const auto pids = launcher.pids(6);
  ::kill(launcher.pid(), SIGKILL);
  CHECK(launcher.wait() == 1000 + SIGKILL);
  for (const pid_t pid : pids) CHECK(becomes_true([&] { return !is_alive(pid); }, 5s));
}

TEST_CASE("a launcher whose guard was killed exits with the status of its ranks") {
  const TemporaryDirectory folder;
  const std::string go = folder / "go";
  Launcher launcher(shell(1, "echo $$; while [ ! -e " + go + " ]; do sleep 0.01; done"));
  const pid_t rank = launcher.pids(1)[0];
  const std::string task = "/proc/" + std::to_string(launcher.pid());
  std::istringstream children(read_text(task + "/task/" + std::to_string(launcher.pid()) + "/children"));
  bool has_guard = false;
  for (pid_t child = 0; children >> child;) {
    if (child == rank) continue;
    has_guard = true;
    ::kill(child, SIGKILL);
  }
  CHECK(has_guard);
  std::ofstream{go};
  CHECK(launcher.wait() == 0);
  CHECK(launcher.err().empty());
}

TEST_CASE("child processes of ranks end with the job") {
  Launcher launcher(shell(2, "sh -c 'while :; do sleep 0.05; done' & echo $!"));
  CHECK(launcher.wait() == 0);
  for (const pid_t pid : launcher.pids(2)) CHECK(!is_alive(pid));
  CHECK(contains(launcher.err(), "left behind"));
}

TEST_CASE("a marker inside a longer environment entry belongs to another process") {
  const std::string mark = "0123456789abcdef0123456789abcdef";
  const std::string entry = std::string(muster::launch::mark_variable) + "=" + mark;
  std::vector<pid_t> children;
  // The last one has a marker.
  for (const std::string& text : {"X" + entry, entry + "0", "X=" + entry, entry}) {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      ::execle("/bin/sleep", "sleep", "100", nullptr,
               std::array<const char*, 4>{"A=1", text.c_str(), "Z=1", nullptr}.data());
      ::_exit(99);
    }
    children.push_back(child);
    CHECK(becomes_true([&] { return contains(read_text("/proc/" + std::to_string(child) + "/environ"), "Z=1"); }));
  }
  CHECK(muster::launch::marked_processes(mark).size() == 1);
  CHECK(muster::launch::end_marked_processes(mark, 10s) == 1);
  for (const pid_t child : children) {
    CHECK(is_alive(child) == (child != children.back()));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
}

TEST_CASE("the end of one job does not affect another one") {
  Launcher lasting(shell(2, "echo $$; while :; do sleep 0.01; done"));
  const auto pids = lasting.pids(2);
  Launcher failing(shell(2, "exit 1", {"--grace", "0.1"}));
  CHECK(failing.wait() == 1);
  for (const pid_t pid : pids) CHECK(is_alive(pid));
}

TEST_CASE("a job that takes too long ends with 124") {
  Launcher launcher(shell(2, "echo $$; while :; do sleep 0.01; done", {"--timeout", "0.3", "--grace", "0.2"}));
  CHECK(launcher.wait() == 124);
  CHECK(contains(launcher.err(), "0.3 s"));
  for (const pid_t pid : launcher.pids(2)) CHECK(!is_alive(pid));
}

TEST_CASE("prefixed output: whole lines, the streams kept apart, a last line without an end") {
  Launcher launcher(shell(
      3, "for i in 1 2 3; do printf 'half '; sleep 0.02; echo $i; done; echo trouble >&2; printf tail", {"--prefix"}));
  CHECK(launcher.wait() == 0);
  const auto out = lines_of(launcher.out());
  CHECK(out.size() == 12);
  for (const char* rank : {"[0] ", "[1] ", "[2] "})
    for (const char* line : {"half 1", "half 2", "half 3", "tail"})
      CHECK(std::count(out.begin(), out.end(), std::string(rank) + line) == 1);
  const auto err = lines_of(launcher.err());
  CHECK(std::set<std::string>(err.begin(), err.end()) ==
        std::set<std::string>{"[0] trouble", "[1] trouble", "[2] trouble"});
}

TEST_CASE("prefixed output: a line without an end does not fill the launcher's memory") {
  Launcher launcher(shell(1, "head -c 3000000 /dev/zero | tr '\\0' x", {"--prefix"}));
  CHECK(launcher.wait() == 0);
  std::size_t letters = 0;
  for (const std::string& line : lines_of(launcher.out())) {
    CHECK(line.rfind("[0] ", 0) == 0);
    CHECK(line.size() <= 1U << 20U);
    letters += line.size() - 4;
  }
  CHECK(letters == 3000000);
}

TEST_CASE("prefixed output to a full disk is a failure") {
  for (const auto& [script, status] : {std::pair{"echo words", 3}, {"echo words; exit 7", 7}}) {
    Launcher launcher(shell(1, script, {"--prefix"}), "", "/dev/full");
    CHECK(launcher.wait() == status);
    CHECK(contains(launcher.err(), "muster run: output of the ranks: writing: No space left on device (ENOSPC)"));
  }
}

TEST_CASE("a job that is suspended for longer than its timeout continues when it is resumed") {
  Launcher launcher(shell(2, "echo $$; sleep 1", {"--timeout", "2"}));
  std::vector<pid_t> all = launcher.pids(2);
  all.push_back(launcher.pid());
  for (const pid_t pid : all) ::kill(pid, SIGSTOP);
  std::this_thread::sleep_for(3s);
  for (const pid_t pid : all) ::kill(pid, SIGCONT);
  CHECK(launcher.wait() == 0);
}

TEST_CASE("ranks whose prefixed output has no reader get an error") {
  const TemporaryDirectory folder;
  const std::string pipe = folder / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  const int reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  Launcher launcher(shell(2, "while :; do echo words; done", {"--prefix"}), "", pipe.c_str());
  pollfd words{reader, POLLIN, 0};
  CHECK(::poll(&words, 1, 10'000) == 1);
  ::close(reader);
  CHECK(launcher.wait() == 128 + SIGPIPE);
}

TEST_CASE("a launcher whose output has no reader can be terminated when its ranks have ended") {
  const TemporaryDirectory folder;
  const std::string pipe = folder / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  const int reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  const std::string pid = folder / "pid";
  Launcher launcher(shell(1, "echo $$ > " + pid + "; head -c 100000 /dev/zero | tr '\\0' x", {"--prefix"}), "",
                    pipe.c_str());
  CHECK(becomes_true([&] {
    const auto lines = lines_of(read_text(pid));
    return !lines.empty() && ::kill(std::stoi(lines[0]), 0) != 0;  // reaped
  }));
  CHECK(becomes_true([&] {
    ::kill(launcher.pid(),
           SIGTERM);  // repeated, because the launcher may still forward the first one to ranks that have ended
    return !is_alive(launcher.pid());
  }));
  ::close(reader);
  CHECK(launcher.wait() == 1000 + SIGTERM);
}

TEST_CASE("logs: a file for each rank and stream; with --tee the launcher's output, too") {
  const TemporaryDirectory folder;
  const std::string logs = folder / "logs";
  for (const bool tees : {false, true}) {
    std::vector<std::string> options{"--logs", logs};
    if (tees) options.insert(options.end(), {"--tee", "--prefix"});
    Launcher launcher(shell(2, "echo out; echo err >&2; exit $RANK", options));
    CHECK(launcher.wait() == 1);
    for (const char* rank : {"0", "1"})
      for (const char* stream : {"out", "err"})
        CHECK(read_text(logs + "/rank-" + rank + "." + stream) == std::string(stream) + "\n");
    auto out = lines_of(launcher.out());
    std::sort(out.begin(), out.end());
    CHECK(out == (tees ? std::vector<std::string>{"[0] out", "[1] out"} : std::vector<std::string>{}));
    CHECK(contains(launcher.err(), "ended with status 1"));
    CHECK(contains(launcher.err(), "its standard error is in \"" + logs + "/rank-1.err\"") == !tees);
  }
  // The name of a log file is a symbolic link.
  REQUIRE(::unlink((logs + "/rank-0.out").c_str()) == 0);
  REQUIRE(::symlink("/dev/null", (logs + "/rank-0.out").c_str()) == 0);
  Launcher refused(shell(2, "echo started > " + (folder / "started"), {"--logs", logs}));
  CHECK(refused.wait() == 2);
  CHECK(contains(refused.err(), logs + "/rank-0.out\": creating the log file"));
  CHECK(!fs::exists(folder / "started"));
}

TEST_CASE("live: a line for each rank on a terminal, whole lines elsewhere") {
  std::vector<std::string> arguments = shell(2, "echo first; printf 'lo\\033[1mud %s' $RANK >&2", {"--live"});
  Terminal terminal(arguments);
  CHECK(terminal.wait() == 0);
  CHECK(terminal.times("[0] lo\\x1b[1mud 0") > 0);
  CHECK(terminal.times("[1] lo\\x1b[1mud 1") > 0);
  Launcher launcher(arguments);
  CHECK(launcher.wait() == 0);
  CHECK(contains(launcher.out(), "[1] first\n"));
}

TEST_CASE("a missing command is 127, one that cannot be executed 126") {
  Launcher missing({"-n", "2", "--", "no-such-command-at-all"});
  CHECK(missing.wait() == 127);
  CHECK(lines_of(missing.err()).size() == 1);
  CHECK(contains(missing.err(), "no-such-command-at-all"));
  Launcher hostile({"-n", "1", "--", "\x1b[31m\u009b"});
  CHECK(hostile.wait() == 127);
  CHECK(contains(hostile.err(), "\"\\x1b[31m\\u009b\": starting the program"));
  Launcher forbidden({"-n", "2", "--", "/etc/passwd"});
  CHECK(forbidden.wait() == 126);
  CHECK(lines_of(forbidden.err()).size() == 1);
}

TEST_CASE("bad usage is one line and status 2") {
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{"-n", "0", "--", "true"},
                                                    {"-n", "two", "--", "true"},
                                                    {"-n", "2"},
                                                    {"--", "true"},
                                                    {"-n", "2", "--wrong", "--", "true"}}) {
    Launcher launcher(arguments);
    CHECK(launcher.wait() == 2);
    CHECK(lines_of(launcher.err()).size() == 1);
    CHECK(contains(launcher.err(), "muster run: error: "));
    CHECK(launcher.out().empty());
  }
}

TEST_CASE("the library call checks its options, and adds to the environment") {
  CHECK_THROWS_AS(muster::launch_local({}), muster::Error);
  CHECK_THROWS_AS(muster::launch_local({"true"}, {.ranks = 0}), muster::Error);
  CHECK_THROWS_AS(muster::launch_local({"true"}, {.environment = {{"A=B", "c"}}}), muster::Error);
  CHECK(muster::launch_local({"true"}) == 0);
  CHECK(muster::launch_local({"sh", "-c", "[ \"$WORD\" = later ] && [ \"$MUSTER_JOB\" = key ]"},
                             {.ranks = 2, .environment = {{"WORD", "first"}, {"WORD", "later"}}, .job = "key"}) == 0);
}
