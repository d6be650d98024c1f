// SPDX-License-Identifier: Apache-2.0
// launch_subprocesses(): the caller's side. The numbers are those of call.hpp.

#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <optional>
#include <span>
#include <utility>

#include "muster/error.hpp"
#include "src/launch/call.hpp"
#include "src/launch/job.hpp"
#include "src/os/process.hpp"
#include "src/os/shared_memory.hpp"
#include "src/sync/interruption.hpp"

namespace muster {
namespace launch {
namespace {

[[noreturn]] void refuse(const std::string& words) {
  throw Error(ErrorKind::argument, "launching subprocesses: " + words);
}

void check_call(const CallText& call) {
  const int offset = call.options.rank_offset;
  if (offset < 0 || offset + *call.config.local_world_size > *call.config.world_size)
    refuse(fmt::format("{} ranks from {} on are not in a world of {}", *call.config.local_world_size, offset,
                       *call.config.world_size));
  LaunchOptions options = call.options.launch;
  options.ranks = *call.config.local_world_size;
  check(options);
  if (options.nodes) refuse("`nodes` is for launch_local(): other launchers start the other ranks");
  if (!call.command.empty()) return;
  if (!call.options.program.empty()) {
    if (call.config.launch_method != LaunchMethod::spawn) refuse("a program of its own is for LaunchMethod::spawn");
  } else if (!has_main_hook()) {
    refuse("main() has to call run_launched_function() first: the ranks are this program, started again");
  }
  const std::string& setup = call.options.setup;
  for (const std::string& name : {call.function, setup.empty() ? call.function : setup})
    if (find_function(name) == nullptr)
      refuse(fmt::format("there is no registered function '{}' in this program (RegisteredFunction)", name));
}

/// Until the launcher has closed its pipe, or, where the hook of this process wants the wait to end, has killed the
/// ranks. A terminal's Ctrl-C has reached them, too: they have `grace` to leave with their own words.
void wait_for_end(const Child& launcher, const os::Fd& report, std::chrono::milliseconds grace) {
  using Clock = std::chrono::steady_clock;
  constexpr int between_asks = 60;
  std::optional<Clock::time_point> patience;
  bool is_told = false;
  pollfd wanted{report.get(), POLLIN, 0};
  while (::poll(&wanted, 1, between_asks) <= 0) {
    if (is_told || !sync::is_interrupted()) continue;
    if (!patience) patience = Clock::now() + grace;
    if (Clock::now() >= *patience) is_told = os::send_signal(launcher.process, SIGTERM);
  }
}

/// The launcher's words, once it has closed its pipe.
std::optional<Error> words_of_launcher(Child& launcher, const os::Fd& report) {
  auto failure = read_failure(report);
  siginfo_t end{};
  int waited = 0;
  do waited = ::waitid(P_PIDFD, static_cast<id_t>(launcher.process.get()), &end, WEXITED);
  while (waited != 0 && errno == EINTR);
  // A program that ignores its children's ends hears of none.
  if (failure || waited != 0 || status_of(end) == 0) return failure;
  return Error(ErrorKind::peer_lost, fmt::format("the launcher (pid {}) on host {} {}, and its ranks with it",
                                                 launcher.pid, os::host_name(), end_text(end)));
}

void run(CallText call) {
  call.config.resolve();
  check_call(call);
  const std::string text = to_text(call);
  // Step 1.
  const os::Fd memory = os::create_shared_memory(text.size(), os::default_backing());
  os::write_at(memory, 0, std::as_bytes(std::span(text)));
  Pipe report = make_pipe();
  ExecArguments::Variables variables = call.options.launch.environment;
  variables.emplace_back(call_variable, fmt::format("launcher {} {}", memory.get(), report.writer.get()));
  variables.emplace_back(mark_variable, os::random_hex(16));
  Inheritance inheritance{.descriptors = {memory.get(), report.writer.get()}};
  ::pthread_sigmask(SIG_SETMASK, nullptr, &inheritance.mask);
  Child launcher = spawn(program_of(call, variables), inheritance);
  report.writer.reset();
  if (const int failure = exec_error(launcher); failure != 0)
    throw os::errno_error("launching subprocesses: starting this program again", failure);
  wait_for_end(launcher, report.reader, call.options.launch.grace);
  const auto failure = words_of_launcher(launcher, report.reader);
  sync::check_interrupted("launching subprocesses");
  if (failure) throw Error(*failure);
}

}  // namespace
}  // namespace launch

void launch_subprocesses(std::string_view function, const MultiprocessConfig& config,
                         const SubprocessOptions& options) {
  launch::run({.function = std::string(function), .command = {}, .config = config, .options = options});
}

void launch_subprocesses(const std::vector<std::string>& command, const MultiprocessConfig& config,
                         const SubprocessOptions& options) {
  if (command.empty()) throw Error(ErrorKind::argument, "launching subprocesses: no command given");
  launch::run({.function = {}, .command = command, .config = config, .options = options});
}

}  // namespace muster
