// SPDX-License-Identifier: Apache-2.0
#include "src/launch/rank_output.hpp"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <string_view>
#include <utility>

#include "src/base/escaped.hpp"
#include "src/launch/ranks.hpp"

namespace muster::launch {
namespace {

constexpr std::size_t longest_line = 1U << 20U;
constexpr std::chrono::milliseconds between_drawings{100};

/// Returns the beginning of a text that fits into `columns` columns, one character per column.
std::string cut_to(std::string_view text, std::size_t columns) {
  std::string cut;
  for (; !text.empty() && columns != 0; --columns) {
    const std::size_t bytes = first_character(text).bytes;
    cut += text.substr(0, bytes);
    text.remove_prefix(bytes);
  }
  return cut;
}

}  // namespace

LiveLines::LiveLines(int terminal, std::vector<std::string> names)
    : terminal_(terminal), names_(std::move(names)), words_(names_.size()) {}

void LiveLines::set(std::size_t row, std::string_view words) {
  if (words_[row] == words) return;
  words_[row] = words;
  has_changed_ = true;
}

int LiveLines::draw(bool now) {
  const auto time = std::chrono::steady_clock::now();
  if (!has_changed_ || (!now && time - last_ < between_drawings)) return 0;
  last_ = time;
  has_changed_ = false;
  winsize size{};
  if (::ioctl(terminal_, TIOCGWINSZ, &size) != 0 || size.ws_col < 20 || size.ws_row < 3) size = {24, 80, 0, 0};
  std::string text = drawn_ == 0 ? "" : "\x1b[" + std::to_string(drawn_) + "A";
  drawn_ = std::min<std::size_t>(names_.size(), size.ws_row - 1U);
  for (std::size_t row = 0; row < drawn_; ++row)
    text += "\r\x1b[K" + cut_to(names_[row] + escaped(words_[row]), size.ws_col - 1U) + "\n";
  return os::write_all(terminal_, text);
}

OutputPump::~OutputPump() {
  finish(std::chrono::milliseconds(0));
}

std::size_t OutputPump::add(os::Fd source, OutputTarget target) {
  std::string line = target.prefix;
  streams_.push_back({std::move(source), std::move(target), std::move(line), {}});
  return streams_.size() - 1;
}

void OutputPump::start() {
  if (streams_.empty()) return;
  stop_ = os::Fd(::eventfd(0, EFD_CLOEXEC));
  if (!stop_) throw os::errno_error("job: eventfd");
  thread_ = os::Thread("the output of ranks", [this] { run(); });
}

int OutputPump::finish(std::chrono::milliseconds longest) {
  if (!thread_.is_started()) return failure_;
  const std::uint64_t patience = static_cast<std::uint64_t>(longest.count()) + 1;
  // Adding to a new eventfd cannot block, and a failure could not be handled.
  [[maybe_unused]] const ssize_t told = ::write(stop_.get(), &patience, sizeof patience);
  thread_.join();
  if (live_) note(live_->draw(true));
  return failure_;
}

void OutputPump::note(int failure) {
  if (failure_ == 0) failure_ = failure;
}

/// A full disk must not stop the ranks, although their output is lost. If the output has no reader any more, the ranks
/// learn it from their closed pipes.
void OutputPump::write(OutputStream& stream) {
  const OutputTarget& target = stream.target;
  if (live_ && target.row)
    live_->set(*target.row, std::string_view(stream.line).substr(0, stream.line.find_last_not_of("\r\n") + 1));
  if (target.descriptor < 0) return;
  const int failure = os::write_all(target.descriptor, stream.line);
  if (failure == EPIPE)
    stream.source.reset();
  else
    note(failure);
}

void OutputPump::pass_on(OutputStream& stream) {
  std::array<char, 64U << 10U> bytes;
  const std::size_t prefix = stream.target.prefix.size();
  const ssize_t got = read_some(stream.source.get(), bytes.data(), bytes.size());
  if (got <= 0) {
    stream.line += '\n';
    if (stream.line.size() > prefix + 1) write(stream);
    stream.source.reset();
    return;
  }
  std::string_view rest(bytes.data(), static_cast<std::size_t>(got));
  stream.tail += rest.substr(rest.size() - std::min(rest.size(), longest_tail));
  if (stream.tail.size() > longest_tail) stream.tail.erase(0, stream.tail.size() - longest_tail);
  if (stream.target.log) note(os::write_all(stream.target.log.get(), rest));
  while (!rest.empty() && stream.source) {
    const std::size_t room = longest_line - std::min(longest_line, stream.line.size());
    const std::size_t end = rest.substr(0, room).find('\n');
    const std::size_t taken = end == std::string_view::npos ? std::min(room, rest.size()) : end + 1;
    stream.line.append(rest.substr(0, taken));
    rest.remove_prefix(taken);
    if (end == std::string_view::npos && stream.line.size() < longest_line) continue;
    if (end == std::string_view::npos) stream.line += '\n';
    write(stream);
    stream.line.resize(prefix);
  }
}

void OutputPump::run() {
  // If a pipe has no reader, this thread gets EPIPE, whatever the process does on SIGPIPE.
  sigset_t closed_pipe;
  sigemptyset(&closed_pipe);
  sigaddset(&closed_pipe, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &closed_pipe, nullptr);
  int patience = -1;  // no limit, until finish() sets one
  std::vector<pollfd> wanted;
  for (;;) {
    wanted.clear();
    for (const OutputStream& stream : streams_)
      wanted.push_back({stream.source.get(), POLLIN, 0});  // poll() ignores -1
    if (std::all_of(streams_.begin(), streams_.end(), [](const OutputStream& stream) { return !stream.source; }))
      return;
    if (patience < 0) wanted.push_back({stop_.get(), POLLIN, 0});
    const bool draws = patience < 0 && live_;
    const int ready =
        ::poll(wanted.data(), wanted.size(), draws ? static_cast<int>(between_drawings.count()) : patience);
    if (live_) note(live_->draw(false));
    if (ready == 0 && draws) continue;
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
