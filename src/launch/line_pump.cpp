// SPDX-License-Identifier: Apache-2.0
#include "src/launch/line_pump.hpp"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace muster::launch {
namespace {

constexpr std::size_t longest_line = 1U << 20U;

/// errno where it cannot be done, else 0.
int write_all(int target, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(target, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EAGAIN) {
      pollfd room{target, POLLOUT, 0};
      ::poll(&room, 1, 1000);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

}  // namespace

LinePump::~LinePump() {
  finish(std::chrono::milliseconds(0));
}

void LinePump::add(os::Fd source, int target, std::string prefix) {
  Stream stream{std::move(source), target, std::move(prefix), 0};
  stream.prefix_size = stream.line.size();
  streams_.push_back(std::move(stream));
}

void LinePump::start() {
  if (streams_.empty()) return;
  stop_ = os::Fd(::eventfd(0, EFD_CLOEXEC));
  if (!stop_) throw os::errno_error("starting a job: eventfd");
  thread_ = std::thread([this] { run(); });
}

int LinePump::finish(std::chrono::milliseconds longest) {
  if (!thread_.joinable()) return failure_;
  const std::uint64_t patience = static_cast<std::uint64_t>(longest.count()) + 1;
  // Adding to a fresh eventfd cannot block, and nothing could be done if it failed.
  [[maybe_unused]] const ssize_t told = ::write(stop_.get(), &patience, sizeof patience);
  thread_.join();
  return failure_;
}

/// What is lost on a full disk does not keep the ranks from going on; that nobody reads is for them to hear.
void LinePump::write(Stream& stream) {
  const int failure = write_all(stream.target, stream.line);
  if (failure == EPIPE)
    stream.source.reset();
  else if (failure_ == 0)
    failure_ = failure;
}

void LinePump::pass_on(Stream& stream) {
  std::array<char, 64U << 10U> bytes;
  ssize_t got = 0;
  do got = ::read(stream.source.get(), bytes.data(), bytes.size());
  while (got < 0 && errno == EINTR);
  if (got <= 0) {
    stream.line += '\n';
    if (stream.line.size() > stream.prefix_size + 1) write(stream);
    stream.source.reset();
    return;
  }
  std::string_view rest(bytes.data(), static_cast<std::size_t>(got));
  while (!rest.empty() && stream.source) {
    const std::size_t room = longest_line - std::min(longest_line, stream.line.size());
    const std::size_t end = rest.substr(0, room).find('\n');
    const std::size_t taken = end == std::string_view::npos ? std::min(room, rest.size()) : end + 1;
    stream.line.append(rest.substr(0, taken));
    rest.remove_prefix(taken);
    if (end == std::string_view::npos && stream.line.size() < longest_line) continue;
    if (end == std::string_view::npos) stream.line += '\n';
    write(stream);
    stream.line.resize(stream.prefix_size);
  }
}

void LinePump::run() {
  // Of a pipe that nobody reads this thread hears by EPIPE, whatever the process does on SIGPIPE.
  sigset_t closed_pipe;
  sigemptyset(&closed_pipe);
  sigaddset(&closed_pipe, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &closed_pipe, nullptr);
  int patience = -1;  // for ever, until finish() says how long
  std::vector<pollfd> wanted;
  for (;;) {
    wanted.clear();
    for (const Stream& stream : streams_) wanted.push_back({stream.source.get(), POLLIN, 0});  // -1 is passed over
    if (std::all_of(streams_.begin(), streams_.end(), [](const Stream& stream) { return !stream.source; })) return;
    if (patience < 0) wanted.push_back({stop_.get(), POLLIN, 0});
    const int ready = ::poll(wanted.data(), wanted.size(), patience);
    if (ready == 0 || (ready < 0 && errno != EINTR)) return;
    if (ready < 0) continue;
    for (std::size_t i = 0; i < streams_.size(); ++i)
      if (wanted[i].revents != 0) pass_on(streams_[i]);
    if (patience < 0 && wanted.back().revents != 0) {
      std::uint64_t told = 0;
      if (::read(stop_.get(), &told, sizeof told) == sizeof told) patience = static_cast<int>(told - 1);
    }
  }
}

}  // namespace muster::launch
