// SPDX-License-Identifier: Apache-2.0
#pragma once
// Serialises records that ranks send each other. All ranks run the same build: the versions were compared at the
// rendezvous. A function `describe(archive, record)` defines the format once, for both directions.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/error.hpp"

namespace muster {

class ByteWriter {
 public:
  template <class... T>
  void values(const T&... values) {
    (put(std::as_bytes(std::span(&values, 1))), ...);
  }
  /// Writes the length of a list whose items follow.
  template <class List>
  void count(const List& list, std::size_t /*least*/ = 1) {
    values(static_cast<std::uint64_t>(list.size()));
  }
  /// Writes a list of plain items, or a text.
  template <class List>
  void all(const List& list) {
    static_assert(std::is_trivially_copyable_v<typename List::value_type>);
    count(list);
    put(std::as_bytes(std::span(list)));
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void put(std::span<const std::byte> part) { bytes_.insert(bytes_.end(), part.begin(), part.end()); }
  std::vector<std::byte> bytes_;
};

class ByteReader {
 public:
  /// `what` names the record in errors, such as "the work list of a rank".
  ByteReader(std::span<const std::byte> bytes, std::string what) : bytes_(bytes), what_(std::move(what)) {}
  template <class... T>
  void values(T&... values) {
    (get(std::as_writable_bytes(std::span(&values, 1))), ...);
  }
  /// Each item takes at least `least` bytes of the message, so a forged count cannot make this allocate more than a
  /// multiple of its size.
  template <class List>
  void count(List& list, std::size_t least = 1) {
    std::uint64_t count = 0;
    values(count);
    if (count > bytes_.size() / least) refuse();
    list.resize(count);
  }
  template <class List>
  void all(List& list) {
    count(list, sizeof(typename List::value_type));
    get(std::as_writable_bytes(std::span(list)));
  }
  /// Throws Error(corrupt) if bytes are left.
  void end() const {
    if (!bytes_.empty()) refuse();
  }
  [[noreturn]] void refuse() const { throw Error(ErrorKind::corrupt, "malformed message: " + what_); }

 private:
  void get(std::span<std::byte> target) {
    if (bytes_.size() < target.size()) refuse();
    std::ranges::copy(bytes_.first(target.size()), target.begin());
    bytes_ = bytes_.subspan(target.size());
  }
  std::span<const std::byte> bytes_;
  std::string what_;
};

}  // namespace muster
