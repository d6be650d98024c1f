// SPDX-License-Identifier: Apache-2.0
#pragma once
// Code that both users of libhdf5 share: owners of its ids, its error messages, calls that throw on failure, and the
// zstd filter.

#include <hdf5.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace muster::hdf5 {

/// Returns libhdf5's innermost message for its last failure, and clears it.
inline std::string last_failure() {
  std::string words;
  const auto keep = [](unsigned, const H5E_error2_t* error, void* kept) -> herr_t {
    if (error->desc != nullptr && *error->desc != 0) *static_cast<std::string*>(kept) = error->desc;
    return 0;
  };
  // Downward: the last message is that of the original failure.
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, keep, &words);
  H5Eclear2(H5E_DEFAULT);
  return words.empty() ? "no reason given" : words;
}

/// Describes an object that libhdf5 refuses: `damaged` and its reason, or that a newer libhdf5 wrote it.
inline std::string refusal_words(const std::string& damaged, const std::string& reason) {
  constexpr std::string_view versions[] = {"bad version number", "unknown version", "bad superblock version"};
  if (std::none_of(std::begin(versions), std::end(versions),
                   [&](std::string_view part) { return reason.find(part) != std::string::npos; }))
    return damaged + reason;
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  H5get_libversion(&major, &minor, &release);
  return "in a newer format than libhdf5 " + std::to_string(major) + "." + std::to_string(minor) + "." +
         std::to_string(release) + " reads (" + reason +
         "): write the file again with h5py and libver=(\"earliest\", \"v110\"), or with the h5repack of HDF5 2 and "
         "--high=2";
}

/// A call of libhdf5 failed. This exception never leaves libmuster-hdf5.
class CallFailed : public std::runtime_error {
 public:
  explicit CallFailed(const char* call) : std::runtime_error(call + (" failed: " + last_failure())) {}
};

/// Negative results are failures.
template <class Result>
Result checked(Result result, const char* call) {
  if (result < 0) throw CallFailed(call);
  return result;
}

/// Owns any id, because H5Idec_ref closes every kind. Not valid if libhdf5 returned no id.
class Id {
 public:
  Id() noexcept = default;
  explicit Id(hid_t id) noexcept : id_(id) {}
  /// Throws CallFailed if `call` returned no id.
  Id(hid_t id, const char* call) : id_(checked(id, call)) {}
  Id(Id&& other) noexcept : id_(std::exchange(other.id_, -1)) {}
  Id& operator=(Id&& other) noexcept {
    std::swap(id_, other.id_);
    return *this;
  }
  ~Id() {
    if (id_ >= 0) H5Idec_ref(id_);
  }
  explicit operator bool() const noexcept { return id_ >= 0; }
  [[nodiscard]] hid_t get() const noexcept { return id_; }
  /// Closes the id and throws CallFailed on errors: closing a file writes its structures.
  void close(const char* call) {
    if (id_ >= 0) checked(H5Idec_ref(std::exchange(id_, -1)), call);
  }

 private:
  hid_t id_ = -1;
};

/// Disables libhdf5's error output during its lifetime, and then restores the caller's setting.
class QuietErrors {
 public:
  QuietErrors() noexcept {
    H5Eget_auto2(H5E_DEFAULT, &print_, &data_);
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }
  QuietErrors& operator=(QuietErrors&&) = delete;
  ~QuietErrors() { H5Eset_auto2(H5E_DEFAULT, print_, data_); }

 private:
  H5E_auto2_t print_ = nullptr;
  void* data_ = nullptr;
};

inline constexpr H5Z_filter_t zstd_filter = 32015;

/// Makes the entry of libhdf5's filter table for this number.
inline H5Z_class2_t filter_class(H5Z_filter_t number, const char* name, H5Z_func_t function) {
  H5Z_class2_t filter{};
  filter.version = H5Z_CLASS_T_VERS;
  filter.id = number;
  filter.encoder_present = 1;
  filter.decoder_present = 1;
  filter.name = name;
  filter.filter = function;
  return filter;
}

}  // namespace muster::hdf5
