// SPDX-License-Identifier: Apache-2.0
#pragma once
// Random numbers that every process of a job draws alike, and the digest of what an exchange brings.

#include <xxhash.h>

#include <cstdint>
#include <initializer_list>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/config.hpp"
#include "muster/state.hpp"

namespace muster::test {

/// The same numbers for the same key, with every compiler and standard library.
class Draw {
 public:
  Draw(std::initializer_list<std::uint64_t> key)
      : random_(XXH3_64bits(std::data(key), key.size() * sizeof(std::uint64_t))) {}

  std::uint64_t word() { return random_(); }
  int below(int end) { return static_cast<int>(random_() % static_cast<std::uint64_t>(end)); }
  /// True once in `times`.
  bool one_in(int times) { return below(times) == 0; }
  template <class T>
  T of(std::initializer_list<T> choices) {
    return std::data(choices)[below(static_cast<int>(choices.size()))];
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random_() % i]);
  }

 private:
  std::mt19937_64 random_;
};

/// XXH3 over names, dtypes, shapes and bytes.
class Digest {
 public:
  void text(std::string_view text) {
    number(text.size());
    bytes_ += text;
  }
  void number(std::uint64_t number) { bytes_.append(reinterpret_cast<const char*>(&number), sizeof number); }
  void bytes(std::span<const std::byte> bytes) { text({reinterpret_cast<const char*>(bytes.data()), bytes.size()}); }
  void tensor(const TensorView& tensor) {
    text(to_string(TensorSpec{tensor.dtype(), tensor.shape()}));
    std::vector<std::byte> copy(tensor.nbytes());
    copy_contiguous(tensor, copy.data());
    bytes(copy);
  }
  void config(const Config& config) {
    number(static_cast<std::uint64_t>(config.type()));
    number(config.size());
    if (config.is_tensor()) {
      tensor(config.as_tensor());
    } else if (config.is_object()) {
      for (const auto& [key, member] : config.as_object()) {
        text(key);
        this->config(member);
      }
    } else if (config.type() == Config::Type::array) {
      for (const Config& item : config.as_array()) this->config(item);
    } else {
      text(to_json(config));
    }
  }

  /// Sixteen digits.
  [[nodiscard]] std::string digits() const {
    XXH64_canonical_t canonical;
    XXH64_canonicalFromHash(&canonical, XXH3_64bits(bytes_.data(), bytes_.size()));
    std::string digits;
    for (const unsigned char byte : canonical.digest)
      for (const int half : {byte >> 4, byte & 15}) digits += "0123456789abcdef"[half];
    return digits;
  }

 private:
  std::string bytes_;
};

inline std::string digest_of(const TensorView& tensor) {
  Digest digest;
  digest.tensor(tensor);
  return digest.digits();
}

inline std::string digest_of(const Tensor& tensor) {
  return digest_of(tensor.view());
}

inline std::string digest_of(const Config& config) {
  Digest digest;
  digest.config(config);
  return digest.digits();
}

}  // namespace muster::test
