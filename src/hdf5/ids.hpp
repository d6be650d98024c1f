// SPDX-License-Identifier: Apache-2.0
#pragma once
// Owners of libhdf5's ids, and calls of libhdf5 whose failure is an exception with libhdf5's own words.

#include <hdf5.h>

#include <stdexcept>
#include <utility>

namespace muster::hdf5 {

/// A call of libhdf5 failed. Inside this library only: its one exported function throws nothing.
class CallFailed : public std::runtime_error {
 public:
  /// `call` and what libhdf5's error stack has of it.
  explicit CallFailed(const char* call);
};

/// Negative results are failures.
template <class Result>
Result checked(Result result, const char* call) {
  if (result < 0) throw CallFailed(call);
  return result;
}

/// Any id but a file: H5Idec_ref closes them all.
class Id {
 public:
  Id() noexcept = default;
  Id(hid_t id, const char* call) : id_(checked(id, call)) {}
  Id(Id&& other) noexcept : id_(std::exchange(other.id_, -1)) {}
  Id& operator=(Id&& other) noexcept {
    std::swap(id_, other.id_);
    return *this;
  }
  ~Id() {
    if (id_ >= 0) H5Idec_ref(id_);
  }
  [[nodiscard]] hid_t get() const noexcept { return id_; }
  /// Reports what closing reports: a file's structures are written then.
  void close(const char* call) {
    if (id_ >= 0) checked(H5Idec_ref(std::exchange(id_, -1)), call);
  }

 private:
  hid_t id_ = -1;
};

/// libhdf5 prints no errors while this lives; the caller's own choice comes back.
class QuietErrors {
 public:
  QuietErrors() noexcept {
    H5Eget_auto2(H5E_DEFAULT, &print_, &data_);
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }
  QuietErrors(const QuietErrors&) = delete;
  QuietErrors& operator=(const QuietErrors&) = delete;
  ~QuietErrors() { H5Eset_auto2(H5E_DEFAULT, print_, data_); }

 private:
  H5E_auto2_t print_ = nullptr;
  void* data_ = nullptr;
};

}  // namespace muster::hdf5
