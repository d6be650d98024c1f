// SPDX-License-Identifier: Apache-2.0
#pragma once
// Objects that Python can close: Group, ProcessGroup and MessageQueue. Calls receive them as references to the object
// of the library, and keep it alive until they return.

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

#include "muster/error.hpp"
#include "muster/group.hpp"
#include "muster/message_queue.hpp"
#include "muster/process_group.hpp"
#include "python/core/waiting.hpp"

namespace muster::python {

/// The object of Python that owns a T until it is closed.
template <class T>
class Closable {
 public:
  explicit Closable(std::shared_ptr<T> object) noexcept : object_(std::move(object)) {}
  Closable(Closable&&) noexcept = default;
  /// Called with the GIL.
  ~Closable() {
    if (auto last = take()) {
      // A group that is destroyed waits for its background calls, which may need the GIL to release their arguments.
      const Waiting waiting;
      last.reset();
    }
  }

  /// Returns null after take().
  [[nodiscard]] const std::shared_ptr<T>& object() const noexcept { return object_; }
  /// Closes this object. The caller drops the result without the GIL.
  std::shared_ptr<T> take() noexcept;

 private:
  std::shared_ptr<T> object_;
};

/// Removes the Python object of a group from those that object_of_group() finds.
void forget_object_of(const Group* group) noexcept;
/// If the group is the world, the next call of world() makes a new one.
void leave_world(const Group& group);
/// Returns the Python object of a group, the same one until it is closed; None for null.
nanobind::object object_of_group(const std::shared_ptr<Group>& group);

template <class T>
std::shared_ptr<T> Closable<T>::take() noexcept {
  if constexpr (std::is_same_v<T, Group>) forget_object_of(object_.get());
  return std::exchange(object_, nullptr);
}

[[noreturn]] void refuse_closed(const char* name);

/// Defines close() and the `with` statement of a class. `enter` is the signature of __enter__.
template <class T>
void def_closing(nanobind::class_<Closable<T>>& type, const char* words, const char* enter) {
  const auto close = [](Closable<T>& self) {
    auto last = self.take();
    if (!last) return;
    without_gil([&] {
      if constexpr (std::is_same_v<T, Group>) leave_world(*last);
      last.reset();
    });
  };
  type.def("close", close, words)
      .def_prop_ro(
          "is_closed", [](const Closable<T>& self) { return self.object() == nullptr; }, "Whether close() was called.")
      .def(
          "__enter__", [](nanobind::handle self) { return nanobind::borrow(self); }, nanobind::sig(enter))
      .def(
          "__exit__",
          [close](Closable<T>& self, nanobind::args) { close(self); },  // NOLINT(performance-unnecessary-value-param)
          nanobind::sig("def __exit__(self, *args: object) -> None"));
}

}  // namespace muster::python

namespace nanobind::detail {

template <class T>
struct closable_caster {
  using Closable = muster::python::Closable<T>;
  static constexpr auto Name = make_caster<Closable>::Name;
  template <class Given>
  using Cast = precise_cast_t<Given>;
  template <class Given>
  bool can_cast() const noexcept {
    return true;
  }
  bool from_python(handle source, std::uint32_t flags, cleanup_list* cleanup) noexcept {
    make_caster<Closable> caster;
    if (!caster.from_python(source, flags, cleanup)) return false;
    const Closable* const closable = caster.operator Closable*();
    if (closable != nullptr) object = closable->object();
    is_closed = closable != nullptr && !object;
    return true;
  }
  void check() const {
    if (is_closed)
      muster::python::refuse_closed(std::is_same_v<T, muster::Group>          ? "Group"
                                    : std::is_same_v<T, muster::ProcessGroup> ? "ProcessGroup"
                                                                              : "MessageQueue");
  }
  operator T&() {
    check();
    return *object;
  }

  closable_caster() = default;
  closable_caster(closable_caster&&) = default;
  /// If the object was closed during the call, this is the last owner.
  ~closable_caster() {
    if (object.use_count() != 1) return;
    const muster::python::Waiting waiting;
    object.reset();
  }

  std::shared_ptr<T> object;
  bool is_closed = false;
};
template <>
struct type_caster<muster::Group> : closable_caster<muster::Group> {};
template <>
struct type_caster<muster::ProcessGroup> : closable_caster<muster::ProcessGroup> {};
template <>
struct type_caster<muster::MessageQueue> : closable_caster<muster::MessageQueue> {};

template <>
struct type_caster<std::shared_ptr<muster::Group>> {
  using Value = std::shared_ptr<muster::Group>;
  using Caster = closable_caster<muster::Group>;
  static constexpr auto Name = Caster::Name;
  template <class Given>
  using Cast = Value;
  template <class Given>
  bool can_cast() const noexcept {
    return true;
  }
  bool from_python(handle source, std::uint32_t flags, cleanup_list* cleanup) noexcept {
    return caster.from_python(source, flags, cleanup);
  }
  static handle from_cpp(const Value& value, rv_policy, cleanup_list*) noexcept {
    try {
      return muster::python::object_of_group(value).release();
    } catch (python_error& error) {
      error.restore();
      return {};
    }
  }
  operator Value() {
    caster.check();
    return caster.object;
  }
  Caster caster;
};

}  // namespace nanobind::detail
