// SPDX-License-Identifier: Apache-2.0
// Jobs, and launch_local(), which runs a command as the ranks of this host. The step numbers are those of job.hpp.

#include "src/launch/job.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/base/message.hpp"
#include "src/group/watchdog.hpp"
#include "src/os/process.hpp"

namespace muster {
namespace launch {
namespace {

using namespace std::chrono_literals;

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? "SIG" + std::string(name) : "signal " + std::to_string(signal);
}

std::string log_name(const LaunchOptions& options, int rank, const char* stream) {
  return fmt::format("{}/rank-{}.{}", options.log_directory, rank, stream);
}

os::Fd open_log(const std::string& path) {
  os::Fd file(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!file) throw os::errno_error("creating the log file", errno, path);
  return file;
}

os::Fd duplicate(const os::Fd& file) {
  os::Fd copy(::fcntl(file.get(), F_DUPFD_CLOEXEC, 3));
  if (!copy) throw os::errno_error("job: duplicating the descriptor of a log file");
  return copy;
}

bool is_alive(const JobRank& rank) {
  return rank.is_alive;
}

}  // namespace

void check(const LaunchOptions& options) {
  if (options.ranks < 1 || options.ranks > most_ranks)
    throw Error(ErrorKind::invalid_argument,
                fmt::format("job: {} ranks are out of range (valid: 1 to {})", options.ranks, most_ranks));
  if (options.grace < 0ms || options.kill_after < 0ms || (options.timeout && *options.timeout <= 0ms))
    throw Error(ErrorKind::invalid_argument, "job: the times to wait must not be negative");
  if (options.tee && options.log_directory.empty())
    throw Error(ErrorKind::invalid_argument, "job: tee needs a log directory. Set log_directory");
  for (const auto& [name, value] : options.environment)
    if (name.empty() || name.find('=') != std::string::npos || (name + value).find('\0') != std::string::npos)
      throw Error(ErrorKind::invalid_argument,
                  "job: environment variable " + in_quotes(name) + ": malformed name or value");
}

std::string exec_failure(const std::string& command, int failure) {
  const Error error = os::errno_error("starting the program", failure, command);
  if (failure != ENOENT) return error.what();
  return with_remedy(error, "Check that it is installed, and check its name or path").what();
}

int status_of(const siginfo_t& end) noexcept {
  return end.si_code == CLD_EXITED ? end.si_status : 128 + end.si_status;
}

std::string end_text(const siginfo_t& end) {
  if (end.si_code == CLD_EXITED) return "ended with status " + std::to_string(end.si_status);
  return "was killed by " + signal_name(end.si_status) + (end.si_code == CLD_DUMPED ? " (core dumped)" : "");
}

Job::Job(const LaunchOptions& options, NodePlace place, Nodes* nodes, std::string mark, bool speaks, Starter starter)
    : options_(options),
      place_(std::move(place)),
      nodes_(nodes),
      mark_(std::move(mark)),
      speaks_(speaks),
      starter_(std::move(starter)),
      guard_(mark_),
      others_ended_(nodes == nullptr) {}

Job::~Job() {
  for (JobRank& rank : ranks_)
    if (rank.is_alive) {
      os::send_signal(rank.child.process, SIGKILL);
      reap(rank);
    }
  end_marked_processes(mark_, 0ms);
}

int Job::run() {
  if (nodes_ != nullptr) nodes_->start();
  start();
  if (!wait_for_exec()) {
    failed_ = true;
    status_ = failed_exec_ == ENOENT ? launch_not_found : launch_cannot_execute;
    words_ =
        fmt::format("host {}: starting the ranks: {}", os::host_name(), os::errno_error("exec", failed_exec_).what());
    end_ranks(SIGKILL);
  }
  pump_.start();
  supervise();
  const std::size_t left = end_marked_processes(mark_, std::min<std::chrono::milliseconds>(options_.grace, 1s));
  // The reader of the remaining output may be stopped for ever, so signals end this process again.
  signals_.reset();
  if (const int failure = pump_.finish(2s); failure != 0) {
    say(os::errno_error("output of the ranks: writing", failure).what());
    if (status_ == 0) status_ = launch_output_lost;
  }
  if (left > 0) say(fmt::format("ended {} {} that ranks left behind", left, left == 1 ? "process" : "processes"));
  return status_;
}

JobReport Job::report() const {
  const auto seconds_until = [&](std::chrono::steady_clock::time_point end) {
    return std::chrono::duration<double>(end - begin_).count();
  };
  JobReport report{status_, words_, seconds_until(std::chrono::steady_clock::now()), {}};
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const JobRank& rank = ranks_[i];
    report.ranks.push_back({place_.rank_offset + static_cast<int>(i), rank.child.pid, status_of(rank.end),
                            rank.end.si_code == CLD_EXITED ? 0 : rank.end.si_status, seconds_until(rank.ended)});
  }
  return report;
}

std::string Job::error_tail(const JobRank& rank) const {
  if (rank.error_stream) return pump_.tail(*rank.error_stream);
  struct stat status {};
  if (!rank.error_log || ::fstat(rank.error_log.get(), &status) != 0) return {};
  std::array<char, longest_tail> bytes;
  const off_t from = std::max<off_t>(0, status.st_size - static_cast<off_t>(bytes.size()));
  const ssize_t got = ::pread(rank.error_log.get(), bytes.data(), bytes.size(), from);
  return {bytes.data(), static_cast<std::size_t>(std::max<ssize_t>(0, got))};
}

void Job::say(const std::string& words) const {
  if (!speaks_) return;
  const std::string line = options_.name + ": " + escaped(words) + "\n";
  (void)os::write_all(STDERR_FILENO, line);
}

void Job::start() {
  const os::Fd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!nothing) throw os::errno_error("opening", errno, "/dev/null");
  if (!options_.log_directory.empty()) {
    std::error_code failure;
    std::filesystem::create_directories(options_.log_directory, failure);
    if (failure) throw os::errno_error("creating the log directory", failure.value(), options_.log_directory);
  }
  struct Ready {
    Inheritance inheritance;
    os::Fd output, error;
  };
  // Open all files and pipes before the first rank is started.
  const auto count = static_cast<std::size_t>(options_.ranks);
  std::vector<Ready> ready(count);
  ranks_.reserve(count);
  std::vector<JobRank> made(count);
  is_live_ = options_.output == RankOutput::live && ::isatty(STDOUT_FILENO) != 0 &&
             (options_.log_directory.empty() || options_.tee);
  if (is_live_) {
    std::vector<std::string> names;
    names.reserve(count);
    for (int rank = 0; rank < options_.ranks; ++rank) names.push_back(fmt::format("[{}] ", place_.rank_offset + rank));
    pump_.draw_lines(STDOUT_FILENO, std::move(names));
  }
  for (std::size_t rank = 0; rank < count; ++rank) {
    Inheritance& inheritance = ready[rank].inheritance;
    inheritance.mask = signals_->original_mask();
    if (rank > 0) inheritance.input = nothing.get();
    if (rank == 0 && place_.listener) inheritance.descriptors.push_back(place_.listener.get());
    direct_output(static_cast<int>(rank), made[rank], inheritance, ready[rank].output, ready[rank].error);
  }
  for (int rank = 0; rank < options_.ranks; ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    made[at].child = starter_(rank, variables(rank), ready[at].inheritance);
    ranks_.push_back(std::move(made[at]));
    ready[at].output.reset();
    ready[at].error.reset();
    // Check the exec of the first rank before the other ranks are started: the command may not be executable.
    if (rank == 0) failed_exec_ = exec_error(ranks_[0].child);
    if (failed_exec_ != 0) return;
  }
  // Only rank 0 listens now.
  place_.listener.reset();
}

/// Sets where the rank writes its output: pipes that the pump reads, or files.
void Job::direct_output(int rank, JobRank& started, Inheritance& inheritance, os::Fd& output, os::Fd& error) {
  const bool has_logs = !options_.log_directory.empty();
  if (!has_logs && options_.output == RankOutput::inherit) return;
  const int number = place_.rank_offset + rank;
  const bool has_prefix = options_.output == RankOutput::prefixed || options_.output == RankOutput::live;
  for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO}) {
    os::Fd& end = descriptor == STDOUT_FILENO ? output : error;
    os::Fd log;
    if (has_logs) log = open_log(log_name(options_, number, descriptor == STDOUT_FILENO ? "out" : "err"));
    if (descriptor == STDERR_FILENO && log) started.error_log = duplicate(log);
    if (has_logs && !options_.tee) {
      end = std::move(log);
      continue;
    }
    Pipe pipe = make_pipe();
    end = std::move(pipe.writer);
    OutputTarget target{.descriptor = is_live_ ? -1 : descriptor, .log = std::move(log)};
    if (has_prefix) target.prefix = is_live_ ? "" : fmt::format("[{}] ", number);
    if (is_live_) target.row = static_cast<std::size_t>(rank);
    const std::size_t stream = pump_.add(std::move(pipe.reader), std::move(target));
    if (descriptor == STDERR_FILENO) started.error_stream = stream;
  }
  inheritance.output = output.get();
  inheritance.error = error.get();
}

ExecArguments::Variables Job::variables(int rank) const {
  ExecArguments::Variables all = options_.environment;
  const auto set = [&all](const char* name, auto value) { all.emplace_back(name, fmt::format("{}", value)); };
  set("RANK", place_.rank_offset + rank);
  set("LOCAL_RANK", rank);
  set("WORLD_SIZE", place_.world_size);
  set("LOCAL_WORLD_SIZE", options_.ranks);
  set("GROUP_RANK", place_.node);
  set("MASTER_ADDR", place_.master_address);
  set("MASTER_PORT", place_.master_port);
  set("MUSTER_JOB", place_.job);
  set(mark_variable, mark_);
  if (place_.meeting_port != 0) set("MUSTER_MASTER_PORT", place_.meeting_port);
  if (place_.listener && rank == 0) set("MUSTER_LISTENER", place_.listener.get());
  return all;
}

bool Job::wait_for_exec() {
  for (std::size_t rank = 1; rank < ranks_.size() && failed_exec_ == 0; ++rank)
    failed_exec_ = exec_error(ranks_[rank].child);
  return failed_exec_ == 0;
}

void Job::reap(JobRank& rank) {
  while (::waitid(P_PIDFD, static_cast<id_t>(rank.child.process.get()), &rank.end, WEXITED) != 0 && errno == EINTR)
    continue;
  rank.is_alive = false;
  rank.ended = std::chrono::steady_clock::now();
  rank.order = ended_++;
  rank.was_told_to = rank.end.si_code != CLD_EXITED && (phase_ == Phase::terminated || phase_ == Phase::killed) &&
                     (rank.end.si_status == SIGTERM || rank.end.si_status == SIGKILL);
}

void Job::supervise() {
  if (options_.timeout) timeout_ = Clock::now() + group::bounded(*options_.timeout);
  std::vector<pollfd> wanted;
  std::vector<std::size_t> whose;
  bool has_told = nodes_ == nullptr;
  for (;;) {
    wanted.assign(1, {signals_->descriptor(), POLLIN, 0});
    wanted.push_back({nodes_ == nullptr ? -1 : nodes_->descriptor(), POLLIN, 0});
    whose.clear();
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (!ranks_[rank].is_alive) continue;
      wanted.push_back({ranks_[rank].child.process.get(), POLLIN, 0});
      whose.push_back(rank);
    }
    if (whose.empty() && !has_told) {
      nodes_->tell(true, status_, words_);
      has_told = true;
    }
    if (whose.empty() && others_ended_) return;
    const int ready = ::poll(wanted.data(), wanted.size(), milliseconds_left());
    if (ready < 0 && errno != EINTR) throw os::errno_error("job: waiting for the ranks: poll");
    std::vector<std::size_t> ended;
    for (std::size_t i = 0; ready > 0 && i < whose.size(); ++i)
      if (wanted[i + 2].revents != 0) ended.push_back(whose[i]);
    for (const std::size_t rank : ended) reap(ranks_[rank]);
    const bool stops = ready > 0 && wanted[0].revents != 0 && pass_signals_on();
    judge(ended);
    if (ready > 0 && wanted[1].revents != 0) hear_of_other_nodes();
    if (stops) signals_->stop_here();
    keep_deadlines();
  }
}

/// Finds the first failure. If several ranks ended between two checks, a rank that was killed is the more likely cause:
/// the others end because they lost it.
void Job::judge(const std::vector<std::size_t>& ended) {
  if (failed_ || timed_out_) return;
  const JobRank* first = nullptr;
  for (const std::size_t index : ended) {
    const JobRank& rank = ranks_[index];
    if (status_of(rank.end) == 0) continue;
    if (first == nullptr || (first->end.si_code == CLD_EXITED && rank.end.si_code != CLD_EXITED)) first = &rank;
  }
  if (first == nullptr) return;
  failed_ = true;
  const bool is_explained =
      first->end.si_code == CLD_EXITED && std::ranges::count(options_.explained, first->end.si_status) != 0;
  // Another rank may have reported a signal before this process received it.
  const bool is_asked = asked_by_ == SIGINT ? is_interrupted() : asked_by_ != 0;
  status_ = is_explained && is_asked ? 128 + asked_by_ : status_of(first->end);
  const int number = place_.rank_offset + static_cast<int>(first - ranks_.data());
  words_ =
      fmt::format("rank {} (pid {}) on host {} {}", number, first->child.pid, os::host_name(), end_text(first->end));
  if (nodes_ != nullptr) nodes_->tell(false, status_, words_);
  if (phase_ == Phase::killed) return;  // the failure was reported earlier
  if (phase_ == Phase::running) enter(Phase::grace, options_.grace);
  if (is_explained) return;
  const std::string where = options_.log_directory.empty() || options_.tee
                                ? ""
                                : "; its standard error is in " + in_quotes(log_name(options_, number, "err"));
  say(words_ + where + (std::ranges::any_of(ranks_, is_alive) ? "; ending the other ranks" : ""));
}

void Job::hear_of_other_nodes() {
  const Nodes::News news = nodes_->news();
  others_ended_ = news.all_ended;
  if (news.status == 0 || failed_ || timed_out_) return;
  failed_ = true;
  status_ = news.status;
  words_ = news.words;
  if (phase_ == Phase::running) enter(Phase::grace, options_.grace);
  say(words_ + (std::ranges::any_of(ranks_, is_alive) ? "; ending the ranks of this node" : ""));
}

/// Returns whether SIGINT was received a moment ago.
bool Job::is_interrupted() const {
  return interrupted_ && Clock::now() - *interrupted_ < options_.kill_after;
}

/// Returns whether the launcher itself must stop.
bool Job::pass_signals_on() {
  bool stops = false;
  while (const auto received = signals_->next()) {
    for (const JobRank& rank : ranks_) {
      if (!rank.is_alive) continue;
      // Ranks in this process group receive signals of the terminal themselves. Ranks that left the group do not.
      if (received->from_terminal && ::getpgid(rank.child.pid) == ::getpgrp()) continue;
      os::send_signal(rank.child.process, received->signal);
    }
    stops = stops || received->signal == SIGTSTP;
    const bool is_end = received->signal == SIGINT || received->signal == SIGTERM || received->signal == SIGHUP;
    if (is_end) asked_by_ = received->signal;
    if (is_end && !std::ranges::any_of(ranks_, is_alive)) {
      // Only the other nodes remain to wait for.
      others_ended_ = true;
      if (status_ == 0) status_ = 128 + received->signal;
    } else if (received->signal == SIGINT) {
      if (is_interrupted()) {
        say("interrupted again: killing the ranks");
        end_ranks(SIGKILL);
      }
      interrupted_ = Clock::now();
    } else if (is_end && phase_ == Phase::running) {
      passed_on_ = received->signal;
      enter(Phase::terminated, options_.kill_after);
    }
  }
  return stops;
}

void Job::enter(Phase phase, std::chrono::milliseconds longest) {
  phase_ = phase;
  phase_end_ = Clock::now() + group::timeout_of(longest, {});
}

void Job::end_ranks(int signal) {
  for (const JobRank& rank : ranks_) {
    if (!rank.is_alive) continue;
    os::send_signal(rank.child.process, signal);
    os::send_signal(rank.child.process, SIGCONT);  // a stopped process cannot exit
  }
  enter(signal == SIGKILL ? Phase::killed : Phase::terminated, options_.grace);
}

void Job::keep_deadlines() {
  const auto now = Clock::now();
  if (phase_ == Phase::running) {
    if (!timeout_ || now < *timeout_) return;
    timed_out_ = true;
    status_ = launch_timed_out;
    words_ = fmt::format("job: timed out after {:g} s", std::chrono::duration<double>(*options_.timeout).count());
    if (nodes_ != nullptr) nodes_->tell(false, status_, words_);
    say(words_ + "; ending all ranks");
  } else if (phase_ == Phase::killed || now < phase_end_) {
    return;
  }
  if (phase_ == Phase::terminated && passed_on_ != 0)
    say(fmt::format("{} of {} ranks have not ended {:g} s after {}: killing them",
                    std::ranges::count_if(ranks_, is_alive), ranks_.size(),
                    std::chrono::duration<double>(options_.kill_after).count(), signal_name(passed_on_)));
  end_ranks(phase_ == Phase::terminated ? SIGKILL : SIGTERM);
}

int Job::milliseconds_left() const {
  std::optional<Clock::time_point> end = phase_end_;
  if (phase_ == Phase::running) end = timeout_;
  if (phase_ == Phase::killed || !end) return -1;
  return static_cast<int>(Clock::next_sleep(*end).count());
}

namespace {

JobReport run_at(const std::vector<std::string>& command, const LaunchOptions& options, NodePlace place, Nodes* nodes) {
  Job job(options, std::move(place), nodes, os::random_hex(16), true,
          [&](int, const ExecArguments::Variables& variables, const Inheritance& inheritance) {
            return spawn(ExecArguments(command, variables), inheritance);
          });
  job.run();
  if (job.failed_exec() != 0) job.say(exec_failure(command[0], job.failed_exec()));
  return job.report();
}

}  // namespace

JobReport run_command(const std::vector<std::string>& command, const LaunchOptions& options) {
  if (command.empty()) throw Error(ErrorKind::invalid_argument, "job: the command must not be empty");
  check(options);
  LaunchOptions own = options;
  if (own.tee && own.output == RankOutput::inherit) own.output = RankOutput::lines;
  std::unique_ptr<Nodes> nodes;
  NodePlace place;
  if (own.nodes) {
    nodes = std::make_unique<Nodes>(*own.nodes, own.ranks);
    place = nodes->take_place();
  } else {
    place.world_size = own.ranks;
    place.job = os::random_hex(16);
    place.reserved = reserve_port(0);
    // If this sandbox has no ports, use the default number, at which no process can listen anyway.
    place.master_port = place.reserved ? place.reserved->number : usual_port;
  }
  if (!own.job.empty()) place.job = own.job;
  try {
    return run_at(command, own, std::move(place), nodes.get());
  } catch (const Error& error) {
    if (nodes) nodes->give_up(error);
    throw;
  }
}

}  // namespace launch

int launch_local(const std::vector<std::string>& command, const LaunchOptions& options) {
  return launch::run_command(command, options).status;
}

}  // namespace muster
