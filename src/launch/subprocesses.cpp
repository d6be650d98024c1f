// SPDX-License-Identifier: Apache-2.0
// launch_subprocesses(): the serialised call, and the caller's side. The step numbers are those of subprocesses.hpp.

#include "src/launch/subprocesses.hpp"

#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>

#include "muster/config.hpp"
#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/base/escaped.hpp"
#include "src/base/fixed_string.hpp"
#include "src/group/watchdog.hpp"
#include "src/launch/job.hpp"
#include "src/os/clock.hpp"
#include "src/os/process.hpp"
#include "src/os/shared_memory.hpp"

namespace muster {
namespace launch {
namespace {

using Milliseconds = std::chrono::milliseconds;
using Texts = std::vector<std::string>;

/// Calls `field` with the name and value of every serialised field.
template <class Call, class Field>
void each_field(Call& call, const Field& field) {
  field("function", call.function);
  field("command", call.command);
  field("arguments", call.options.arguments);
  field("setup", call.options.setup);
  field("rank_offset", call.options.rank_offset);
  field("program", call.options.program);
  auto& config = call.config;
  field("world_size", config.world_size);
  field("local_world_size", config.local_world_size);
  field("master_addr", config.master_addr);
  field("master_port", config.master_port);
  field("init_method", config.init_method);
  field("model_parallelism", config.model_parallelism);
  field("pipeline_parallelism", config.pipeline_parallelism);
  field("backend", config.backend);
  field("model_parallel_backend", config.model_parallel_backend);
  field("pipeline_parallel_backend", config.pipeline_parallel_backend);
  field("data_parallel_backend", config.data_parallel_backend);
  field("launch_method", config.launch_method);
  auto& launch = call.options.launch;
  field("output", launch.output);
  field("log_directory", launch.log_directory);
  field("tee", launch.tee);
  field("grace", launch.grace);
  field("kill_after", launch.kill_after);
  field("timeout", launch.timeout);
  field("job", launch.job);
}

template <class Value>
Config written(const Value& value) {
  if constexpr (std::is_enum_v<Value>)
    return static_cast<int>(value);
  else
    return value;
}
Config written(const Milliseconds& value) {
  return value.count();
}
Config written(const Texts& value) {
  return ConfigArray(value.begin(), value.end());
}
template <class Value>
Config written(const std::optional<Value>& value) {
  return value ? written(*value) : Config();
}

template <class Value>
void read(const Config& from, Value& value) {
  if constexpr (std::is_enum_v<Value>)
    value = static_cast<Value>(from.as<int>());
  else
    value = from.as<Value>();
}
void read(const Config& from, Milliseconds& value) {
  value = Milliseconds(from.as_int());
}
void read(const Config& from, Texts& value) {
  for (const Config& text : from.as_array()) value.push_back(text.as_string());
}
template <class Value>
void read(const Config& from, std::optional<Value>& value) {
  if (!from.is_null()) read(from, value.emplace());
}

struct ChildFailure {
  std::uint32_t is_there = 0;
  WrittenError<24000> error;
};

[[noreturn]] void refuse(const std::string& words) {
  throw Error(ErrorKind::invalid_argument, "launch_subprocesses: " + words);
}

void check_call(const CallText& call) {
  const int offset = call.options.rank_offset;
  if (offset < 0 || offset + *call.config.local_world_size > *call.config.world_size)
    refuse(fmt::format("{} ranks from {} are out of range for a world of {}", *call.config.local_world_size, offset,
                       *call.config.world_size));
  LaunchOptions options = call.options.launch;
  options.ranks = *call.config.local_world_size;
  check(options);
  if (options.nodes) refuse("nodes is not supported: other launchers start the other ranks. Use launch_local()");
  if (!call.command.empty()) return;
  if (!call.options.program.empty()) {
    if (call.config.launch_method != LaunchMethod::spawn) refuse("a separate program needs LaunchMethod::spawn");
  } else if (!has_main_hook()) {
    refuse(
        "the ranks run this program again, but main() does not call run_launched_function(). Call it first in main()");
  }
  const std::string& setup = call.options.setup;
  for (const std::string& name : {call.function, setup.empty() ? call.function : setup})
    if (find_function(name) == nullptr)
      refuse(
          fmt::format("registered function {} does not exist in this program (RegisteredFunction)", in_quotes(name)));
}

/// Waits until the launcher has closed its pipe. If the interrupt hook of this process ends the wait, kills the ranks.
/// Ctrl-C on the terminal has reached the ranks too, so they have `grace` to exit with their own error messages.
void wait_for_end(const Child& launcher, const os::Fd& report, std::chrono::milliseconds grace) {
  using Clock = os::Clock;
  constexpr int between_asks = 60;
  std::optional<Clock::time_point> patience;
  bool is_told = false;
  pollfd wanted{report.get(), POLLIN, 0};
  while (::poll(&wanted, 1, between_asks) <= 0) {
    if (is_told || !group::is_interrupted()) continue;
    if (!patience) patience = Clock::now() + grace;
    if (Clock::now() >= *patience) is_told = os::send_signal(launcher.process, SIGTERM);
  }
}

/// Returns the error of the launcher after it has closed its pipe.
std::optional<Error> words_of_launcher(Child& launcher, const os::Fd& report) {
  auto failure = read_failure(report);
  siginfo_t end{};
  int waited = 0;
  do waited = ::waitid(P_PIDFD, static_cast<id_t>(launcher.process.get()), &end, WEXITED);
  while (waited != 0 && errno == EINTR);
  // If a program ignores SIGCHLD, the exit status of the launcher is lost.
  if (failure || waited != 0 || status_of(end) == 0) return failure;
  return Error(ErrorKind::peer_lost, fmt::format("the launcher (pid {}) on host {} {}, and its ranks ended with it",
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
    throw os::errno_error("launch_subprocesses: starting this program again", failure);
  wait_for_end(launcher, report.reader, call.options.launch.grace);
  const auto failure = words_of_launcher(launcher, report.reader);
  group::check_interrupted("launch_subprocesses");
  if (failure) throw Error(*failure);
}

}  // namespace

os::Fd make_report() {
  return os::create_shared_memory(sizeof(ChildFailure), os::default_backing());
}

void tell_failure(const os::Fd& report, const Error& error) noexcept {
  ChildFailure failure;
  failure.is_there = 1;
  failure.error.put(error);
  // The reader may have ended; then the failure is not needed.
  (void)os::write_all(report.get(), {reinterpret_cast<const char*>(&failure), sizeof failure});
}

std::optional<Error> read_failure(const os::Fd& report) {
  ChildFailure failure;
  const auto bytes = std::as_writable_bytes(std::span(&failure, 1));
  std::size_t got = 0;
  ::lseek(report.get(), 0, SEEK_SET);  // rewinds a file; pipes ignore it
  while (got < bytes.size()) {
    const ssize_t more = read_some(report.get(), bytes.data() + got, bytes.size() - got);
    if (more <= 0) break;
    got += static_cast<std::size_t>(more);
  }
  if (got != bytes.size() || failure.is_there == 0) return std::nullopt;
  return failure.error.get();
}

std::string to_text(const CallText& call) {
  Config tree = Config::object();
  each_field(call, [&tree](const char* name, const auto& value) { tree[name] = written(value); });
  return to_json(tree);
}

CallText parse_call(std::string_view text) {
  const Config tree = parse_json(text);
  CallText call;
  each_field(call, [&tree](const char* name, auto& value) { read(tree.at(name), value); });
  return call;
}

ExecArguments program_of(const CallText& call, const ExecArguments::Variables& variables) {
  const std::vector<std::string>& program = call.options.program;
  return program.empty() ? ExecArguments::own_program(variables) : ExecArguments(program, variables);
}

}  // namespace launch

void launch_subprocesses(std::string_view function, const MultiprocessConfig& config,
                         const SubprocessOptions& options) {
  launch::run({.function = std::string(function), .command = {}, .config = config, .options = options});
}

void launch_subprocesses(const std::vector<std::string>& command, const MultiprocessConfig& config,
                         const SubprocessOptions& options) {
  if (command.empty()) throw Error(ErrorKind::invalid_argument, "launch_subprocesses: the command must not be empty");
  launch::run({.function = {}, .command = command, .config = config, .options = options});
}

}  // namespace muster
