// SPDX-License-Identifier: Apache-2.0
#pragma once
// `muster run` as a process of a test, with its standard streams in files or on a terminal.

#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/temporary_directory.hpp"

namespace launched {

namespace fs = std::filesystem;
using muster::test::read_text;
using muster::test::TemporaryDirectory;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline bool becomes_true(const std::function<bool()>& condition, std::chrono::milliseconds longest = 10s) {
  const auto deadline = Clock::now() + longest;
  while (!condition()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(5ms);
  }
  return true;
}

/// Returns the state of a process; '?' if it does not exist.
inline char state_of(pid_t pid) {
  const std::string stat = read_text("/proc/" + std::to_string(pid) + "/stat");
  const std::size_t state = stat.rfind(") ");
  return state == std::string::npos ? '?' : stat[state + 2];
}

/// Returns whether a process exists and is not a zombie.
inline bool is_alive(pid_t pid) {
  return std::string_view("?ZX").find(state_of(pid)) == std::string_view::npos;
}

/// `muster run` as a child. It is killed with the test, however the test ends.
class Job {
 public:
  Job() = default;
  ~Job() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    wait();
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  /// Returns the exit status, or 1000 + signal if a signal killed it. Kills a launcher that hangs.
  int wait() {
    CHECK_MESSAGE(becomes_true([this] { return !is_alive(pid_); }, 60s), "the launcher hangs");
    int status = 0;
    ::kill(pid_, SIGKILL);
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) continue;
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }
  [[nodiscard]] pid_t pid() const { return pid_; }

 protected:
  /// Runs in the child.
  [[noreturn]] static void become(std::vector<std::string> arguments) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    // The parent of the test may ignore some signals (nohup does), and shells cannot trap ignored signals.
    for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGPIPE}) ::signal(number, SIG_DFL);
    arguments.insert(arguments.begin(), {std::getenv("MUSTER_PROGRAM"), "run"});
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    ::execv(pointers[0], pointers.data());
    ::_exit(99);
  }

  pid_t pid_ = -1;
};

/// `muster run` with its standard streams in files.
class Launcher : public Job {
 public:
  explicit Launcher(const std::vector<std::string>& arguments, const std::string& input = "",
                    const char* output = nullptr) {
    std::ofstream(folder_ / "in") << input;
    const std::string in = folder_ / "in", out = folder_ / "out", err = folder_ / "err";
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      // The process has its own group, like one of a shell with job control.
      ::setpgid(0, 0);
      const int input_file = ::open(in.c_str(), O_RDONLY);
      const int output_file = ::open(output != nullptr ? output : out.c_str(), O_WRONLY | O_CREAT, 0600);
      const int error_file = ::open(err.c_str(), O_WRONLY | O_CREAT, 0600);
      if (::dup2(input_file, 0) < 0 || ::dup2(output_file, 1) < 0 || ::dup2(error_file, 2) < 0) ::_exit(99);
      become(arguments);
    }
  }
  [[nodiscard]] std::string out() const { return read_text(folder_ / "out"); }
  [[nodiscard]] std::string err() const { return read_text(folder_ / "err"); }
  /// Returns the pids that `count` ranks wrote to standard output.
  [[nodiscard]] std::vector<pid_t> pids(std::size_t count) const {
    REQUIRE(becomes_true([&] { return lines_of(out()).size() >= count; }));
    std::vector<pid_t> pids;
    for (const std::string& line : lines_of(out())) pids.push_back(std::stoi(line));
    return pids;
  }

 private:
  TemporaryDirectory folder_;
};

/// `muster run` as the leader of a terminal session.
class Terminal : public Job {
 public:
  explicit Terminal(const std::vector<std::string>& arguments) {
    pid_ = ::forkpty(&terminal_, nullptr, nullptr, nullptr);
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) become(arguments);
  }
  ~Terminal() { close(); }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  void type(const char* keys) const { REQUIRE(::write(terminal_, keys, 1) == 1); }
  [[nodiscard]] std::size_t times(const std::string& word) const {
    std::size_t count = 0;
    for (std::size_t at = seen_.find(word); at != std::string::npos; at = seen_.find(word, at + 1)) ++count;
    return count;
  }
  void read_until(const std::string& word, std::size_t count) {
    while (times(word) < count) REQUIRE(read());
  }
  /// Types a key until the output has the word, because a launcher that is not running merges repeated signals.
  void type_until(const char* keys, const std::string& word) {
    for (pollfd output{terminal_, POLLIN, 0}; times(word) == 0;) {
      if (::poll(&output, 1, 500) == 0)
        type(keys);
      else
        REQUIRE(read());
    }
  }
  void close() {
    if (terminal_ >= 0) ::close(terminal_);
    terminal_ = -1;
  }
  /// Reads the rest of the output. Returns the exit status.
  int wait() {
    while (terminal_ >= 0 && read()) continue;
    return Job::wait();
  }

 private:
  bool read() {
    char bytes[4096];
    pollfd output{terminal_, POLLIN, 0};
    REQUIRE_MESSAGE(::poll(&output, 1, 60'000) == 1, "the launcher writes nothing more, and does not end");
    const ssize_t got = ::read(terminal_, bytes, sizeof bytes);
    if (got > 0) seen_.append(bytes, static_cast<std::size_t>(got));
    return got > 0;
  }

  int terminal_ = -1;
  std::string seen_;
};

inline std::vector<std::string> shell(int ranks, const std::string& script, std::vector<std::string> options = {}) {
  std::vector<std::string> arguments{"-n", std::to_string(ranks)};
  arguments.insert(arguments.end(), options.begin(), options.end());
  arguments.insert(arguments.end(), {"--", "sh", "-c", script});
  return arguments;
}

}  // namespace launched
