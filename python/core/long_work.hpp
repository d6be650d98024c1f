// SPDX-License-Identifier: Apache-2.0
#pragma once
// Work that takes long: it runs on another thread, reports its progress to Python, and Ctrl-C ends it.

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>

#include "muster/error.hpp"
#include "muster/progress.hpp"
#include "python/core/bindings.hpp"
#include "python/core/waiting.hpp"
#include "src/group/watchdog.hpp"

namespace muster::python {

/// The progress function of a caller, None or progress(bytes, total_bytes, seconds), and the stop request of its work.
/// An exception of the function requests the stop.
class Telling {
 public:
  explicit Telling(nb::handle progress) {
    if (!progress.is_none()) progress_ = owner_of(nb::borrow(progress));
  }

  [[nodiscard]] std::stop_token stop_token() const { return stop_.get_token(); }
  void request_stop() { stop_.request_stop(); }

  /// Returns the callback for the work, which any thread may call; empty if there is no function. It does not own
  /// `telling`: a thread of the library that destroyed the function would need the GIL.
  static ProgressCallback callback(const std::shared_ptr<Telling>& telling) {
    if (!telling->progress_) return {};
    return [seen = std::weak_ptr(telling)](const Progress& now) {
      if (const auto alive = seen.lock()) alive->tell(now);
    };
  }

  /// Returns the result of get(), waiting until is_over(time) is true. Ctrl-C requests the stop. Throws the exception
  /// of the function, if it raised one, instead of the error of the work.
  template <class IsOver, class Get>
  auto finish(const IsOver& is_over, const Get& get) {
    try {
      auto result = without_gil([&] {
        while (!is_over(group::Watchdog::slice))
          if (group::is_interrupted()) request_stop();
        return get();
      });
      rethrow();
      return result;
    } catch (const Error&) {
      rethrow();
      throw;
    }
  }

 private:
  void tell(const Progress& now) {
    const InPython in_python;
    if (raised_) return;
    try {
      nb::handle(static_cast<PyObject*>(const_cast<void*>(progress_.get())))(now.bytes, now.total_bytes, now.seconds);
    } catch (nb::python_error& error) {
      // This may be a thread on which nothing may be thrown.
      raised_.emplace(std::move(error));
      stop_.request_stop();
    }
  }
  void rethrow() {
    if (raised_) throw nb::python_error(std::move(*std::exchange(raised_, std::nullopt)));
  }

  std::shared_ptr<const void> progress_;
  std::stop_source stop_;
  std::optional<nb::python_error> raised_;
};

/// Returns call(progress callback, stop token), run on a separate thread while the calling thread checks for Ctrl-C.
/// `deferred` runs it on the calling thread.
template <class Call>
auto long_work(nb::handle progress, const Call& call, std::launch where = std::launch::async) {
  const auto telling = std::make_shared<Telling>(progress);
  auto work = std::async(where, [&] { return call(Telling::callback(telling), telling->stop_token()); });
  return telling->finish([&](auto time) { return work.wait_for(time) != std::future_status::timeout; },
                         [&] { return work.get(); });
}

/// The progress callback for work without a stop token: if `tell` requests the end, the work ends with an exception
/// about `what`.
inline ProgressCallback ended_by(const ProgressCallback& tell, const std::stop_token& stop, std::string what) {
  return [&tell, stop, what = std::move(what)](const Progress& now) {
    if (tell) tell(now);
    if (stop.stop_requested()) throw Error(ErrorKind::cancelled, what + ": interrupted");
  };
}

}  // namespace muster::python
