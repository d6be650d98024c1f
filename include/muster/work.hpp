// SPDX-License-Identifier: Apache-2.0
#pragma once
// Work: an operation that runs while its caller goes on. Semantics: the Work of torch.distributed and MPI's requests.

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <type_traits>
#include <utility>

namespace muster {

namespace detail {
/// What a Work waits for.
template <class Result>
class Operation {
 public:
  Operation() = default;
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  /// Whether it has ended, after `time` at most.
  virtual bool wait_for(std::chrono::milliseconds time) = 0;
  /// Waits until it has.
  virtual Result get() = 0;
};
/// Throws Error(argument): the result has been taken, or there was never one.
[[noreturn]] void refuse_empty_work();
}  // namespace detail

/// An operation under way, and its result. Movable, not copyable; used by one thread at a time. One that is dropped
/// runs on to its end, because the other ranks need it; its result ends then.
template <class Result>
class [[nodiscard]] Work {
 public:
  Work() = default;
  explicit Work(std::unique_ptr<detail::Operation<Result>> operation) : operation_(std::move(operation)) {}

  /// Whether there is a result to take. False once it has been taken.
  [[nodiscard]] bool is_pending() const noexcept { return operation_ != nullptr; }
  /// Whether the operation has ended, well or not: the caller's memory that it reads is the caller's again. Never
  /// waits.
  [[nodiscard]] bool is_done() const { return wait_for(std::chrono::milliseconds(0)); }
  /// Waits until it has ended, at most so long; false if it has not. The operation itself has a deadline of its own,
  /// and get() ends with that.
  [[nodiscard]] bool wait_for(std::chrono::milliseconds time) const {
    if (!is_pending()) detail::refuse_empty_work();
    return operation_->wait_for(time);
  }
  /// Waits until it has ended, and gives the result or throws what the call that waits would have thrown. Once.
  Result get() {
    if (!is_pending()) detail::refuse_empty_work();
    const auto operation = std::move(operation_);
    return operation->get();
  }

 private:
  std::unique_ptr<detail::Operation<Result>> operation_;
};

namespace detail {

template <class Result>
class Promised final : public Operation<Result> {
 public:
  explicit Promised(std::future<Result> result) : result_(std::move(result)) {}
  bool wait_for(std::chrono::milliseconds time) override { return result_.wait_for(time) == std::future_status::ready; }
  Result get() override { return result_.get(); }

 private:
  std::future<Result> result_;
};

/// call(group), to be run once on another thread, and the Work that waits for it. failed(group) is called before the
/// Work hears of an exception.
template <class Group, class Call, class Failed>
auto task_of(Call call, Failed failed) {
  using Result = std::invoke_result_t<Call&, Group&>;
  struct Task {
    std::function<void(Group&)> run;
    Work<Result> work;
  };
  const auto task = std::make_shared<std::packaged_task<Result(Group&)>>(
      [call = std::move(call), failed = std::move(failed)](Group& group) mutable -> Result {
        // What the caller lends ends with the call, not with its result.
        Call once = std::move(call);
        try {
          return once(group);
        } catch (...) {
          failed(group);
          throw;
        }
      });
  Work<Result> work(std::make_unique<Promised<Result>>(task->get_future()));
  return Task{[task](Group& group) { (*task)(group); }, std::move(work)};
}

}  // namespace detail

}  // namespace muster
