// SPDX-License-Identifier: Apache-2.0
#pragma once
// Work: an operation that runs while its caller continues. Semantics: Work of torch.distributed, and requests of MPI.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <variant>

namespace muster {

namespace detail {
/// The operation that a Work waits for.
template <class Result>
class Operation {
 public:
  Operation() = default;
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  /// Waits at most `time`; returns whether the operation has ended.
  virtual bool wait_for(std::chrono::milliseconds time) = 0;
  /// Waits until the operation has ended, and moves the result out. Called by one thread at a time.
  virtual Result get() = 0;
  /// Called after get() has thrown. Returns false if the call was only rejected and can be repeated.
  [[nodiscard]] virtual bool has_ended() const noexcept = 0;
};
/// Throws Error(invalid_argument), because the result has been taken, or the Work is empty.
[[noreturn]] void refuse_empty_work();
/// Throws Error(invalid_argument), because another thread is in get().
[[noreturn]] void refuse_second_get();
/// Returns the ID of the calling process.
std::int64_t own_process() noexcept;
/// Throws Error(unsupported) in a child that was forked from `process`, because the operation does not run in the
/// child.
void check_process(std::int64_t process);
/// Calls wait(part of `time`) until it returns true or `time` has passed, and returns which. Time during which this
/// process was not running does not count.
bool wait_in_parts(std::chrono::milliseconds time, const std::function<bool(std::chrono::milliseconds)>& wait);
}  // namespace detail

/// A running operation and its result. Movable, not copyable. Several threads may wait for it while another thread
/// takes its result. If a Work is destroyed, its operation still runs to the end, because the other ranks need it; the
/// result is then destroyed.
template <class Result>
class [[nodiscard]] Work {
 public:
  Work() = default;
  /// Creates a handle of a running operation; only the library calls this.
  explicit Work(std::shared_ptr<detail::Operation<Result>> operation) : state_(std::make_unique<State>()) {
    state_->operation = std::move(operation);
  }

  /// Returns whether there is a result to take. Returns false after it has been taken.
  [[nodiscard]] bool is_pending() const noexcept { return state_ && state_->now() != nullptr; }
  /// Returns whether the operation has ended, successfully or not. The caller may then reuse the memory that it reads.
  /// It still returns true after the result has been taken. Does not wait.
  [[nodiscard]] bool is_done() const { return wait_for(std::chrono::milliseconds(0)); }
  /// Waits until the operation has ended, but at most `time`; returns whether it has ended. The operation has a
  /// separate deadline, which also ends get().
  [[nodiscard]] bool wait_for(std::chrono::milliseconds time) const {
    if (!state_) detail::refuse_empty_work();
    detail::check_process(state_->process);
    const auto operation = state_->now();
    return !operation || operation->wait_for(time);
  }
  /// Waits until the operation has ended, and returns its result or throws its error. Call it once. Exception: it can
  /// be repeated if it was rejected, such as by Error(invalid_argument) because another thread uses the group.
  Result get() {
    if (!state_) detail::refuse_empty_work();
    detail::check_process(state_->process);
    Taking taking(*state_);
    try {
      return taking.operation->get();
    } catch (...) {
      taking.is_over = taking.operation->has_ended();
      throw;
    }
  }

 private:
  struct State {
    std::shared_ptr<detail::Operation<Result>> now() const noexcept {
      const std::lock_guard lock(mutex);
      return operation;
    }
    mutable std::mutex mutex;
    std::shared_ptr<detail::Operation<Result>> operation;  // null: the result has been taken
    bool is_taken = false;                                 // true while a thread takes the result
    const std::int64_t process = detail::own_process();
  };
  /// Marks the result as being taken, as long as it exists.
  struct Taking {
    explicit Taking(State& its) : state(its) {
      const std::lock_guard lock(state.mutex);
      if (!state.operation) detail::refuse_empty_work();
      if (state.is_taken) detail::refuse_second_get();
      state.is_taken = true;
      operation = state.operation;
    }
    ~Taking() {
      const std::lock_guard lock(state.mutex);
      state.is_taken = false;
      if (is_over) state.operation.reset();
    }
    Taking(const Taking&) = delete;
    Taking& operator=(const Taking&) = delete;
    State& state;
    std::shared_ptr<detail::Operation<Result>> operation;
    bool is_over = true;
  };
  std::unique_ptr<State> state_;
};

namespace detail {

/// The result of a task on another thread.
template <class Result>
class Promised final : public Operation<Result> {
 public:
  template <class Call>
  void fulfil(const Call& call) noexcept {
    Outcome outcome;
    try {
      if constexpr (std::is_void_v<Result>) {
        call();
        outcome.template emplace<1>();
      } else {
        outcome.template emplace<1>(call());
      }
    } catch (...) {
      outcome.template emplace<2>(std::current_exception());
    }
    {
      const std::lock_guard lock(mutex_);
      outcome_ = std::move(outcome);
      is_there_ = true;
    }
    changed_.notify_all();
  }
  bool wait_for(std::chrono::milliseconds time) override {
    return wait_in_parts(time, [this](std::chrono::milliseconds part) {
      std::unique_lock lock(mutex_);
      return changed_.wait_for(lock, part, [this] { return is_there_; });
    });
  }
  Result get() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_there_; });
    Outcome outcome = std::move(outcome_);
    lock.unlock();
    if (outcome.index() == 2) std::rethrow_exception(std::get<2>(outcome));
    if constexpr (!std::is_void_v<Result>) return std::get<1>(std::move(outcome));
  }
  [[nodiscard]] bool has_ended() const noexcept override { return true; }

 private:
  using Value = std::conditional_t<std::is_void_v<Result>, std::monostate, Result>;
  using Outcome = std::variant<std::monostate, Value, std::exception_ptr>;
  std::mutex mutex_;
  std::condition_variable changed_;
  Outcome outcome_;
  bool is_there_ = false;
};

/// Returns a function that runs call(group) once on another thread, and the Work that waits for it. If the call throws,
/// failed(group) runs before the Work receives the exception.
template <class Group, class Call, class Failed>
auto task_of(Call call, Failed failed) {
  using Result = std::invoke_result_t<Call&, Group&>;
  struct Task {
    std::function<void(Group&)> run;
    Work<Result> work;
  };
  struct Both {
    Call call;
    Failed failed;
    std::shared_ptr<Promised<Result>> result = std::make_shared<Promised<Result>>();
  };
  const auto both = std::make_shared<Both>(Both{std::move(call), std::move(failed)});
  return Task{[both](Group& group) {
                both->result->fulfil([&]() -> Result {
                  // Destroys the captures of the call when it returns, not when the result is destroyed.
                  Call once = std::move(both->call);
                  try {
                    return once(group);
                  } catch (...) {
                    both->failed(group);
                    throw;
                  }
                });
              },
              Work<Result>(both->result)};
}

}  // namespace detail

}  // namespace muster
