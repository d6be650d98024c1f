// SPDX-License-Identifier: Apache-2.0
#pragma once
// Work: an operation that runs while its caller goes on. Semantics: the Work of torch.distributed and MPI's requests.

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
  /// Waits until it has, and takes the result. Called by one thread at a time.
  virtual Result get() = 0;
  /// Asked after get() has thrown: false if the call was only refused, and can be made again.
  [[nodiscard]] virtual bool has_ended() const noexcept = 0;
};
/// Throws Error(argument): the result has been taken, or there was never one.
[[noreturn]] void refuse_empty_work();
/// Throws Error(argument): another thread is in get().
[[noreturn]] void refuse_second_get();
/// The process that calls it.
std::int64_t own_process() noexcept;
/// Throws Error(unsupported) in a child that was forked from that process: what runs there does not run in the child.
void check_process(std::int64_t process);
/// Calls wait(a part of `time`) until it returns true or `time` has passed; returns which. Time in which this process
/// did not run does not count.
bool wait_in_parts(std::chrono::milliseconds time, const std::function<bool(std::chrono::milliseconds)>& wait);
}  // namespace detail

/// An operation under way, and its result. Movable, not copyable. Threads may wait for it while another one takes its
/// result. One that is dropped runs on to its end, because the other ranks need it; its result ends then.
template <class Result>
class [[nodiscard]] Work {
 public:
  Work() = default;
  explicit Work(std::shared_ptr<detail::Operation<Result>> operation) : state_(std::make_unique<State>()) {
    state_->operation = std::move(operation);
  }

  /// Whether there is a result to take. False once it has been taken.
  [[nodiscard]] bool is_pending() const noexcept { return state_ && state_->now() != nullptr; }
  /// Whether the operation has ended, well or not: the caller's memory that it reads is the caller's again. It stays so
  /// when the result has been taken. Never waits.
  [[nodiscard]] bool is_done() const { return wait_for(std::chrono::milliseconds(0)); }
  /// Waits until it has ended, at most so long; false if it has not. The operation itself has a deadline of its own,
  /// and get() ends with that.
  [[nodiscard]] bool wait_for(std::chrono::milliseconds time) const {
    if (!state_) detail::refuse_empty_work();
    detail::check_process(state_->process);
    const auto operation = state_->now();
    return !operation || operation->wait_for(time);
  }
  /// Waits until it has ended, and gives the result or throws what the call that waits would have thrown. Once; but if
  /// the call is refused, such as by Error(argument) because another thread uses the group, it can be made again.
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
    std::shared_ptr<detail::Operation<Result>> operation;  // null: its result has been taken
    bool is_taken = false;                                 // now, by some thread
    const std::int64_t process = detail::own_process();
  };
  /// While a thread takes the result.
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

/// What a task of another thread comes to.
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

/// call(group), to be run once on another thread, and the Work that waits for it. failed(group) is called before the
/// Work hears of an exception.
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
                  // What the caller lends ends with the call, not with its result.
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
