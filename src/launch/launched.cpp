// SPDX-License-Identifier: Apache-2.0
// The processes that launch_subprocesses() starts: the launcher and the ranks. The step numbers are those of
// subprocesses.hpp.

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/group/error_propagation.hpp"
#include "src/launch/job.hpp"
#include "src/launch/subprocesses.hpp"
#include "src/os/process.hpp"

namespace muster {
namespace launch {
namespace {

using Functions = std::map<std::string, RankFunction, std::less<>>;
Functions& functions() {
  static Functions all;
  return all;
}

std::atomic<bool> is_hooked{false};

/// Returns the last output of a rank as one line: "line | next line".
std::string in_one_line(std::string_view tail) {
  std::string text;
  while (!tail.empty()) {
    const std::size_t end = std::min(tail.find('\n'), tail.size());
    if (end != 0) text.append(text.empty() ? "" : " | ").append(tail.substr(0, end));
    tail.remove_prefix(std::min(end + 1, tail.size()));
  }
  return text;
}

class Launcher {
 public:
  Launcher(const CallText& call, const os::Fd& memory) : call_(call), memory_(memory) {}

  std::optional<Error> run() {
    LaunchOptions options = call_.options.launch;
    options.ranks = *call_.config.local_world_size;
    if (options.output == RankOutput::inherit) options.output = RankOutput::lines;
    NodePlace place;
    place.rank_offset = call_.options.rank_offset;
    place.world_size = *call_.config.world_size;
    place.master_address = call_.config.master_addr;
    place.master_port = call_.config.master_port.value_or(usual_port);
    const bool is_whole = options.ranks == place.world_size;
    // The launchers of one job share only the address of its rendezvous.
    place.job = is_whole ? os::random_hex(16) : fmt::format("{}:{}", place.master_address, place.master_port);
    if (!options.job.empty()) place.job = options.job;
    if (!is_whole) place.meeting_port = place.master_port + 1;
    if (!is_whole && place.rank_offset == 0 && call_.config.init_method == "env://")
      place.listener = listen_for_ranks(place.meeting_port);
    // The reports are read when the ranks have ended.
    for (int rank = 0; rank < options.ranks; ++rank) reports_.push_back(make_report());
    Job job(options, std::move(place), nullptr, os::environment(mark_variable).value_or(os::random_hex(16)), false,
            [this](int rank, const ExecArguments::Variables& variables, const Inheritance& inheritance) {
              return start(rank, variables, inheritance);
            });
    const int status = job.run();
    if (job.failed_exec() != 0)
      return Error(job.failed_exec() == ENOENT ? ErrorKind::not_found : ErrorKind::io,
                   exec_failure(call_.command.empty() ? "this program" : call_.command[0], job.failed_exec()));
    if (status == launch_timed_out)
      return Error(ErrorKind::timeout, job.words() + ", and its ranks were ended. Raise the timeout of the launch");
    if (auto failure = failure_of(job)) return failure;
    if (status == 0) return std::nullopt;
    return Error(ErrorKind::io, "output of the ranks: writing failed, and some of it is lost");
  }

 private:
  /// Step 2.
  Child start(int rank, ExecArguments::Variables variables, Inheritance inheritance) {
    const os::Fd& report = reports_[static_cast<std::size_t>(rank)];
    if (!call_.command.empty()) return spawn(ExecArguments(call_.command, variables), inheritance);
    inheritance.descriptors.push_back(report.get());
    if (call_.config.launch_method == LaunchMethod::spawn) {
      inheritance.descriptors.push_back(memory_.get());
      variables.emplace_back(call_variable, fmt::format("rank {} {}", memory_.get(), report.get()));
      return spawn(program_of(call_, variables), inheritance);
    }
    return fork_into(ExecArguments({}, variables), inheritance,
                     [&] { return run_rank(call_, std::move(reports_[static_cast<std::size_t>(rank)])); });
  }

  /// Returns the error of the root cause: an error of a rank that names no other rank. If there are several, returns
  /// the earliest one.
  std::optional<Error> failure_of(const Job& job) {
    std::optional<Error> first;
    int first_badness = 0;
    int first_order = 0;
    for (std::size_t i = 0; i < reports_.size(); ++i) {
      const JobRank& rank = job.ranks()[i];
      if (status_of(rank.end) == 0) continue;
      const RankInfo info{call_.options.rank_offset + static_cast<int>(i), os::host_name(), rank.child.pid};
      const std::optional<Error> own = read_failure(reports_[i]);
      const bool blames =
          own && (own->pid() ? *own->pid() != info.pid : own->rank() && *own->rank() != info.global_rank);
      const int badness = rank.was_told_to ? 2 : blames ? 1 : 0;
      if (first && std::pair(badness, rank.order) > std::pair(first_badness, first_order)) continue;
      first_badness = badness;
      first_order = rank.order;
      first = error_of(info, own, rank.end, job.error_tail(rank));
    }
    return first;
  }

  static Error error_of(const RankInfo& info, const std::optional<Error>& own, const siginfo_t& end,
                        const std::string& tail) {
    std::string words;
    if (own) {
      words = own->what();
      // A failure of the group already names its rank.
      const std::string name = group::name_of(info);
      if (words.find(name) == std::string::npos) words = fmt::format("{}: {}", name, words);
      words += fmt::format(" (it {})", end_text(end));
    } else {
      words = fmt::format("{} {}", group::name_of(info), end_text(end));
    }
    if (!tail.empty()) words += "; the end of its standard error: " + in_one_line(tail);
    return {own ? own->kind() : ErrorKind::peer_lost,
            words,
            {.rank = info.global_rank, .pid = info.pid, .host = info.host}};
  }

  const CallText& call_;
  const os::Fd& memory_;
  std::vector<os::Fd> reports_;
};

/// Returns the number of this rank, which the launcher has set.
int own_number(const char* name) {
  return std::atoi(os::environment(name).value_or("-1").c_str());
}

}  // namespace

RankFunction find_function(std::string_view name) {
  const auto found = functions().find(name);
  return found == functions().end() ? nullptr : found->second;
}

bool has_main_hook() noexcept {
  return is_hooked;
}

int run_launcher(const CallText& call, const os::Fd& memory, os::Fd report) {
  try {
    // The ranks do not inherit the objects of the launcher.
    if (const auto failure = Launcher(call, memory).run()) tell_failure(report, *failure);
  } catch (const Error& error) {
    tell_failure(report, error);
  } catch (const std::exception& error) {
    tell_failure(report, Error(ErrorKind::out_of_space, error.what()));
  }
  return 0;
}

int run_rank(const CallText& call, os::Fd report) {
  ::fcntl(report.get(), F_SETFD, FD_CLOEXEC);
  try {
    const RankFunction function = find_function(call.function);
    const RankFunction setup = call.options.setup.empty() ? nullptr : find_function(call.options.setup);
    if (function == nullptr || (setup == nullptr && !call.options.setup.empty()))
      throw Error(ErrorKind::invalid_argument,
                  fmt::format("registered function {} does not exist in this program",
                              in_quotes(function == nullptr ? call.function : call.options.setup)));
    if (setup != nullptr) setup(call.options.arguments);
    MultiprocessConfig config = call.config;
    config.rank = own_number("RANK");
    config.local_rank = own_number("LOCAL_RANK");
    init_and_run(function, config, call.options.arguments);
    return 0;
  } catch (const Error& error) {
    tell_failure(report, error);
  } catch (const std::bad_alloc&) {
    tell_failure(report, Error(ErrorKind::out_of_space, "out of memory"));
  } catch (const std::exception& error) {
    tell_failure(report, Error(ErrorKind::peer_lost, error.what()));
  } catch (...) {
    tell_failure(report, Error(ErrorKind::peer_lost, "it has thrown an object that is not a std::exception"));
  }
  return 1;
}

}  // namespace launch

RegisteredFunction::RegisteredFunction(std::string_view name, RankFunction function) {
  if (!launch::functions().emplace(name, function).second)
    throw Error(ErrorKind::invalid_argument, fmt::format("registered function {} already exists", in_quotes(name)));
}

std::optional<int> launch::run_if_launched() {
  is_hooked = true;
  const auto text = os::environment(call_variable);
  if (!text) return std::nullopt;
  // Programs that this one starts must not inherit the variable.
  ::unsetenv(call_variable);
  std::array<char, 16> role{};
  int memory = -1, report = -1;
  struct stat status {};
  if (std::sscanf(text->c_str(), "%15s %d %d", role.data(), &memory, &report) != 3 || ::fstat(report, &status) != 0 ||
      ::fstat(memory, &status) != 0) {
    std::fprintf(stderr, "the environment has %s='%s' of another process. Unset it\n", call_variable, text->c_str());
    return 1;
  }
  ::prctl(PR_SET_NAME, program_invocation_short_name);
  os::Fd memory_file(memory), report_file(report);
  for (const int descriptor : {memory, report}) ::fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  int result = 1;
  try {
    std::string call(static_cast<std::size_t>(status.st_size), 0);
    if (::pread(memory, call.data(), call.size(), 0) != status.st_size)
      throw os::errno_error("reading the call of a launched function");
    const CallText parsed = parse_call(call);
    const bool is_launcher = std::string_view(role.data()) == "launcher";
    result = is_launcher ? run_launcher(parsed, memory_file, std::move(report_file))
                         : run_rank(parsed, std::move(report_file));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return result;
}

void run_launched_function() {
  if (const auto status = launch::run_if_launched()) std::exit(*status);
}

}  // namespace muster
