// SPDX-License-Identifier: Apache-2.0
// The processes that launch_subprocesses() starts: the launcher and the ranks. The numbers are those of call.hpp.

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
#include <span>
#include <utility>

#include "muster/error.hpp"
#include "muster/state.hpp"
#include "src/launch/call.hpp"
#include "src/launch/job.hpp"
#include "src/os/process.hpp"
#include "src/sync/failing.hpp"

namespace muster {
namespace launch {
namespace {

using Functions = std::map<std::string, RankFunction, std::less<>>;
Functions& functions() {
  static Functions all;
  return all;
}

std::atomic<bool> is_hooked{false};

Config list_of_texts(const std::vector<std::string>& texts) {
  Config list = Config::array();
  for (const std::string& text : texts) list.push_back(text);
  return list;
}

std::vector<std::string> texts_of(const Config& list) {
  std::vector<std::string> texts;
  for (const Config& text : list.as_array()) texts.push_back(text.as_string());
  return texts;
}

void tell(const os::Fd& report, const Error& error) noexcept {
  CallFailure failure;
  failure.is_there = 1;
  failure.error.put(error);
  const auto bytes = std::as_bytes(std::span(&failure, 1));
  // A pipe holds it, and nobody else writes here.
  [[maybe_unused]] const ssize_t written = ::write(report.get(), bytes.data(), bytes.size());
}

std::optional<Error> failure_in(const os::Fd& report) {
  CallFailure failure;
  const auto bytes = std::as_writable_bytes(std::span(&failure, 1));
  std::size_t got = 0;
  while (got < bytes.size()) {
    const ssize_t more = read_some(report.get(), bytes.data() + got, bytes.size() - got);
    if (more <= 0) break;
    got += static_cast<std::size_t>(more);
  }
  if (got != bytes.size() || failure.is_there == 0) return std::nullopt;
  return failure.error.get();
}

/// The end of what a rank wrote in one line: "words | more words".
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
    Place place;
    place.rank_offset = call_.options.rank_offset;
    place.world_size = *call_.config.world_size;
    place.master_address = call_.config.master_addr;
    place.master_port = call_.config.master_port.value_or(usual_port);
    const bool is_whole = options.ranks == place.world_size;
    // Launchers of one job know nothing of each other but where it meets.
    place.job = is_whole ? os::random_hex(16) : fmt::format("{}:{}", place.master_address, place.master_port);
    if (!options.job.empty()) place.job = options.job;
    if (!is_whole) place.meeting_port = place.master_port + 1;
    if (!is_whole && place.rank_offset == 0 && call_.config.init_method == "env://")
      place.listener = listen_for_ranks(place.meeting_port);
    for (int rank = 0; rank < options.ranks; ++rank) {
      std::array<int, 2> ends{};
      // Read when the ranks have ended: what is there then is all.
      if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) throw os::errno_error("starting a job: making a pipe");
      reports_.emplace_back(ends[0]);
      far_ends_.emplace_back(ends[1]);
    }
    Job job(options, std::move(place), nullptr, os::environment(mark_variable).value_or(os::random_hex(16)), false,
            [this](int rank, const ExecArguments::Variables& variables, const Inheritance& inheritance) {
              return start(rank, variables, inheritance);
            });
    const int status = job.run();
    if (job.failed_exec() != 0)
      return Error(job.failed_exec() == ENOENT ? ErrorKind::not_found : ErrorKind::io,
                   exec_failure(call_.command.empty() ? "this program" : call_.command[0], job.failed_exec()));
    if (status == launch_timed_out)
      return Error(ErrorKind::timeout, fmt::format("the job has not ended within its {:g} s, and was ended",
                                                   std::chrono::duration<double>(*options.timeout).count()));
    if (auto failure = failure_of(job)) return failure;
    if (status == 0) return std::nullopt;
    return Error(ErrorKind::io, "writing the ranks' output has failed, and some of it is lost");
  }

 private:
  /// Step 2.
  Child start(int rank, ExecArguments::Variables variables, Inheritance inheritance) {
    os::Fd report = std::move(far_ends_[static_cast<std::size_t>(rank)]);
    if (!call_.command.empty()) return spawn(ExecArguments(call_.command, variables), inheritance);
    inheritance.descriptors.push_back(report.get());
    if (call_.config.launch_method == LaunchMethod::spawn) {
      inheritance.descriptors.push_back(memory_.get());
      variables.emplace_back(call_variable, fmt::format("rank {} {}", memory_.get(), report.get()));
      return spawn(ExecArguments::own_program(variables), inheritance);
    }
    return fork_into(ExecArguments({}, variables), inheritance,
                     [&] { return run_rank(call_, os::Fd(report.release())); });
  }

  /// Of the ranks that failed by themselves, the one that blames no other; the first of several.
  std::optional<Error> failure_of(const Job& job) {
    std::optional<Error> first;
    int first_badness = 0;
    int first_order = 0;
    for (std::size_t i = 0; i < reports_.size(); ++i) {
      const JobRank& rank = job.ranks()[i];
      if (status_of(rank.end) == 0) continue;
      const RankInfo info{call_.options.rank_offset + static_cast<int>(i), os::host_name(), rank.child.pid};
      const std::optional<Error> own = failure_in(reports_[i]);
      const bool blames = own && (own->pid() ? *own->pid() != info.pid : own->rank() && *own->rank() != info.rank);
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
      // A failure of the group names its rank already.
      const std::string name = sync::name_of(info);
      if (words.find(name) == std::string::npos) words = fmt::format("{}: {}", name, words);
      words += fmt::format(" (it {})", end_text(end));
    } else {
      words = fmt::format("{} {}", sync::name_of(info), end_text(end));
    }
    if (!tail.empty()) words += "; the end of what it wrote to standard error: " + in_one_line(tail);
    return {own ? own->kind() : ErrorKind::peer_lost, words, {.rank = info.rank, .pid = info.pid, .host = info.host}};
  }

  const CallText& call_;
  const os::Fd& memory_;
  std::vector<os::Fd> reports_;
  std::vector<os::Fd> far_ends_;
};

/// The number of this rank: the launcher has set it.
int own_number(const char* name) {
  return std::atoi(os::environment(name).value_or("-1").c_str());
}

}  // namespace

std::string to_text(const CallText& call) {
  const MultiprocessConfig& config = call.config;
  const LaunchOptions& launch = call.options.launch;
  Config tree = Config::object({
      {"function", call.function},
      {"command", list_of_texts(call.command)},
      {"arguments", list_of_texts(call.options.arguments)},
      {"setup", call.options.setup},
      {"rank_offset", call.options.rank_offset},
      {"world_size", *config.world_size},
      {"local_world_size", *config.local_world_size},
      {"master_addr", config.master_addr},
      {"master_port", *config.master_port},
      {"init_method", config.init_method},
      {"model_parallelism", config.model_parallelism},
      {"pipeline_parallelism", config.pipeline_parallelism},
      {"backend", config.backend},
      {"model_parallel_backend", config.model_parallel_backend},
      {"pipeline_parallel_backend", config.pipeline_parallel_backend},
      {"data_parallel_backend", config.data_parallel_backend},
      {"spawns", config.launch_method == LaunchMethod::spawn},
      {"output", static_cast<int>(launch.output)},
      {"log_directory", launch.log_directory},
      {"tee", launch.tee},
      {"grace", launch.grace.count()},
      {"kill_after", launch.kill_after.count()},
      {"timeout", launch.timeout ? Config(launch.timeout->count()) : Config()},
      {"job", launch.job},
  });
  return to_json(tree);
}

CallText parse_call(std::string_view text) {
  const Config tree = parse_json(text);
  using Milliseconds = std::chrono::milliseconds;
  CallText call;
  call.function = tree.at("function").as_string();
  call.command = texts_of(tree.at("command"));
  call.options.arguments = texts_of(tree.at("arguments"));
  call.options.setup = tree.at("setup").as_string();
  call.options.rank_offset = tree.at("rank_offset").as<int>();
  MultiprocessConfig& config = call.config;
  config.world_size = tree.at("world_size").as<int>();
  config.local_world_size = tree.at("local_world_size").as<int>();
  config.master_addr = tree.at("master_addr").as_string();
  config.master_port = tree.at("master_port").as<int>();
  config.init_method = tree.at("init_method").as_string();
  config.model_parallelism = tree.at("model_parallelism").as<int>();
  config.pipeline_parallelism = tree.at("pipeline_parallelism").as<int>();
  config.backend = tree.at("backend").as_string();
  config.model_parallel_backend = tree.at("model_parallel_backend").as_string();
  config.pipeline_parallel_backend = tree.at("pipeline_parallel_backend").as_string();
  config.data_parallel_backend = tree.at("data_parallel_backend").as_string();
  if (tree.at("spawns").as_bool()) config.launch_method = LaunchMethod::spawn;
  LaunchOptions& launch = call.options.launch;
  launch.output = static_cast<RankOutput>(tree.at("output").as<int>());
  launch.log_directory = tree.at("log_directory").as_string();
  launch.tee = tree.at("tee").as_bool();
  launch.grace = Milliseconds(tree.at("grace").as_int());
  launch.kill_after = Milliseconds(tree.at("kill_after").as_int());
  if (!tree.at("timeout").is_null()) launch.timeout = Milliseconds(tree.at("timeout").as_int());
  launch.job = tree.at("job").as_string();
  return call;
}

RankFunction find_function(std::string_view name) {
  const auto found = functions().find(name);
  return found == functions().end() ? nullptr : found->second;
}

bool has_main_hook() noexcept {
  return is_hooked;
}

int run_launcher(const CallText& call, const os::Fd& memory, os::Fd report) {
  try {
    // What the launcher holds does not go on to its ranks.
    if (const auto failure = Launcher(call, memory).run()) tell(report, *failure);
  } catch (const Error& error) {
    tell(report, error);
  } catch (const std::exception& error) {
    tell(report, Error(ErrorKind::no_space, error.what()));
  }
  return 0;
}

int run_rank(const CallText& call, os::Fd report) {
  ::fcntl(report.get(), F_SETFD, FD_CLOEXEC);
  try {
    const RankFunction function = find_function(call.function);
    const RankFunction setup = call.options.setup.empty() ? nullptr : find_function(call.options.setup);
    if (function == nullptr || (setup == nullptr && !call.options.setup.empty()))
      throw Error(ErrorKind::argument, fmt::format("this program has no registered function '{}'",
                                                   function == nullptr ? call.function : call.options.setup));
    if (setup != nullptr) setup(call.options.arguments);
    MultiprocessConfig config = call.config;
    config.rank = own_number("RANK");
    config.local_rank = own_number("LOCAL_RANK");
    init_and_run(function, config, call.options.arguments);
    return 0;
  } catch (const Error& error) {
    tell(report, error);
  } catch (const std::bad_alloc&) {
    tell(report, Error(ErrorKind::no_space, "out of memory"));
  } catch (const std::exception& error) {
    tell(report, Error(ErrorKind::peer_lost, error.what()));
  } catch (...) {
    tell(report, Error(ErrorKind::peer_lost, "it has thrown something that is no std::exception"));
  }
  return 1;
}

}  // namespace launch

RegisteredFunction::RegisteredFunction(std::string_view name, RankFunction function) {
  if (!launch::functions().emplace(name, function).second)
    throw Error(ErrorKind::argument, fmt::format("there are two registered functions '{}'", name));
}

void run_launched_function() {
  launch::is_hooked = true;
  const auto text = os::environment(launch::call_variable);
  if (!text) return;
  // Not for programs that this one starts.
  ::unsetenv(launch::call_variable);
  std::array<char, 16> role{};
  int memory = -1, report = -1;
  struct stat status {};
  if (std::sscanf(text->c_str(), "%15s %d %d", role.data(), &memory, &report) != 3 || ::fstat(memory, &status) != 0 ||
      ::fstat(report, &status) != 0) {
    std::fprintf(stderr, "the environment's %s='%s' is of another process: unset it\n", launch::call_variable,
                 text->c_str());
    std::exit(1);
  }
  ::prctl(PR_SET_NAME, program_invocation_short_name);
  os::Fd memory_file(memory), report_file(report);
  for (const int descriptor : {memory, report}) ::fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  int result = 1;
  try {
    ::fstat(memory, &status);
    std::string call(static_cast<std::size_t>(status.st_size), 0);
    if (::pread(memory, call.data(), call.size(), 0) != status.st_size) throw os::errno_error("reading the call");
    const launch::CallText parsed = launch::parse_call(call);
    const bool is_launcher = std::string_view(role.data()) == "launcher";
    result = is_launcher ? launch::run_launcher(parsed, memory_file, std::move(report_file))
                         : launch::run_rank(parsed, std::move(report_file));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  std::exit(result);
}

}  // namespace muster
