// SPDX-License-Identifier: Apache-2.0
// The log hook of Python. It only appends to a queue, from which a thread of Python takes the messages. The hook must
// not acquire the GIL: another thread that holds the GIL may be waiting for the log.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "muster/error.hpp"
#include "muster/log.hpp"
#include "python/core/bindings.hpp"
#include "python/core/waiting.hpp"
#include "src/base/message.hpp"

namespace muster::python {
namespace {

/// More messages than this are counted and dropped: a program may stop its thread.
constexpr std::size_t most_messages = 10'000;

struct Messages {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<LogLevel, std::string>> waiting;
  std::uint64_t dropped = 0;  // after the last message that waits
  bool is_closed = false;
};

/// Receives the messages of the library until another hook is set.
class LogQueue {
 public:
  void install(LogLevel lowest) {
    set_log_hook(
        [messages = messages_](LogLevel level, std::string_view message) {
          {
            const std::lock_guard lock(messages->mutex);
            if (messages->waiting.size() < most_messages)
              messages->waiting.emplace_back(level, message);
            else
              ++messages->dropped;
          }
          messages->changed.notify_one();
        },
        lowest);
  }

  /// Waits for messages, and returns (level, message) of each. If others were dropped after them, the last one reports
  /// their number. Returns none after close().
  nb::typed<nb::list, nb::typed<nb::tuple, nb::str, nb::str>> take() {
    const auto [taken, dropped] = without_gil([messages = messages_] {
      std::unique_lock lock(messages->mutex);
      messages->changed.wait(lock, [&] { return messages->is_closed || !messages->waiting.empty(); });
      return std::pair(std::exchange(messages->waiting, {}), std::exchange(messages->dropped, 0));
    });
    nb::list list;
    for (const auto& [level, message] : taken)
      list.append(nb::make_tuple(std::string(to_string(level)), text_object(message)));
    if (dropped != 0)
      list.append(
          nb::make_tuple(std::string(to_string(LogLevel::warning)),
                         text_object(counted(dropped, "message") + " dropped: the handlers of logging are too slow")));
    return list;
  }
  /// take() returns only the messages that wait already.
  void close() {
    {
      const std::lock_guard lock(messages_->mutex);
      messages_->is_closed = true;
    }
    messages_->changed.notify_all();
  }

 private:
  std::shared_ptr<Messages> messages_ = std::make_shared<Messages>();
};

LogLevel level_named(const std::string& name) {
  for (const LogLevel level : {LogLevel::debug, LogLevel::info, LogLevel::warning, LogLevel::error})
    if (to_string(level) == name) return level;
  throw Error(ErrorKind::invalid_argument,
              "level: unknown value '" + name + "' (expected 'debug', 'info', 'warning' or 'error')");
}

}  // namespace

void bind_logs(nb::module_& module) {
  nb::class_<LogQueue>(module, "LogQueue")
      .def(nb::init<>())
      .def("install", [](LogQueue& self, const std::string& level) { self.install(level_named(level)); })
      .def("take", &LogQueue::take)
      .def("close", &LogQueue::close);
  module.def("reset_log_hook", [] { set_log_hook({}); });
  module.def("log", [](const std::string& level, const std::string& message) { log(level_named(level), message); });
}

}  // namespace muster::python
