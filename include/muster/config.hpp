// SPDX-License-Identifier: Apache-2.0
#pragma once
// Config: a tree of JSON values whose leaves may also be tensors. It is what a layer says about itself.

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "muster/tensor.hpp"

namespace muster {

class Config;

/// Members in the order of insertion, keys unique; look-up is by hash once there are more than a few.
class ConfigObject {
 public:
  using Member = std::pair<std::string, Config>;

  ConfigObject();
  ConfigObject(const ConfigObject&);
  ConfigObject(ConfigObject&&) noexcept;
  ConfigObject& operator=(const ConfigObject&);
  ConfigObject& operator=(ConfigObject&&) noexcept;
  ~ConfigObject();

  [[nodiscard]] std::size_t size() const noexcept;
  [[nodiscard]] bool empty() const noexcept;
  [[nodiscard]] std::vector<Member>::const_iterator begin() const noexcept;
  [[nodiscard]] std::vector<Member>::const_iterator end() const noexcept;
  /// Null where the key is not there.
  [[nodiscard]] const Config* find(std::string_view key) const noexcept;
  [[nodiscard]] Config* find(std::string_view key) noexcept;
  /// The value of the key, made (null) where it was not there.
  Config& operator[](std::string_view key);
  /// Appends; false, and nothing changes, where the key is there already.
  bool insert(std::string key, Config value);
  void reserve(std::size_t members);

 private:
  std::vector<Member> members_;
  std::vector<std::uint32_t> index_;  // open addressing over members_, empty while a linear search is as fast
  void reindex(std::size_t buckets);
  [[nodiscard]] std::size_t position(std::string_view key) const noexcept;
};

using ConfigArray = std::vector<Config>;

/// A value. Integers are kept exactly: as std::int64_t where they fit, else as std::uint64_t.
class Config {
 public:
  enum class Type : std::uint8_t { null, boolean, integer, unsigned_integer, real, string, array, object, tensor };

  Config() noexcept = default;
  Config(std::nullptr_t) noexcept {}
  Config(bool value) noexcept : value_(value) {}
  Config(int value) noexcept : value_(std::int64_t{value}) {}
  Config(std::int64_t value) noexcept : value_(value) {}
  Config(std::uint64_t value) noexcept;
  Config(double value) noexcept : value_(value) {}
  Config(const char* value) : value_(std::string(value)) {}
  Config(std::string_view value) : value_(std::string(value)) {}
  Config(std::string value) noexcept : value_(std::move(value)) {}
  Config(ConfigArray value) noexcept : value_(std::move(value)) {}
  Config(ConfigObject value) noexcept : value_(std::move(value)) {}
  Config(Tensor value) noexcept : value_(std::move(value)) {}

  static Config array(std::initializer_list<Config> items = {});
  static Config object(std::initializer_list<std::pair<std::string_view, Config>> members = {});

  [[nodiscard]] Type type() const noexcept { return static_cast<Type>(value_.index()); }
  [[nodiscard]] bool is_null() const noexcept { return type() == Type::null; }
  [[nodiscard]] bool is_object() const noexcept { return type() == Type::object; }
  [[nodiscard]] bool is_array() const noexcept { return type() == Type::array; }
  [[nodiscard]] bool is_string() const noexcept { return type() == Type::string; }
  [[nodiscard]] bool is_tensor() const noexcept { return type() == Type::tensor; }

  // Each throws Error(argument) that names both types where the value is of another one.
  [[nodiscard]] bool as_bool() const;
  [[nodiscard]] std::int64_t as_int() const;
  [[nodiscard]] std::uint64_t as_uint() const;
  [[nodiscard]] double as_double() const;  ///< integers convert
  [[nodiscard]] const std::string& as_string() const;
  [[nodiscard]] const ConfigArray& as_array() const;
  [[nodiscard]] ConfigArray& as_array();
  [[nodiscard]] const ConfigObject& as_object() const;
  [[nodiscard]] ConfigObject& as_object();
  [[nodiscard]] const Tensor& as_tensor() const;

  /// A member; throws Error(not_found) where it is not there.
  [[nodiscard]] const Config& at(std::string_view key) const;
  /// An item; throws Error(not_found) past the end.
  [[nodiscard]] const Config& at(std::size_t index) const;
  /// A member, made where it is not there; a null becomes an object first.
  Config& operator[](std::string_view key);
  /// Appends to an array; a null becomes one first.
  void push_back(Config item);
  /// Members, items, or 0 for a leaf.
  [[nodiscard]] std::size_t size() const noexcept;

  /// The same tree, bit for bit: NaN equals the same NaN, -0.0 differs from 0.0, tensors by bitwise_equal. The order of
  /// members does not matter.
  friend bool operator==(const Config& a, const Config& b);

 private:
  std::variant<std::monostate, bool, std::int64_t, std::uint64_t, double, std::string, ConfigArray, ConfigObject,
               Tensor>
      value_;
};

std::string_view to_string(Config::Type type) noexcept;

/// Nesting deeper than this is refused wherever a tree is read, written or sent (Error(argument) or Error(corrupt)).
inline constexpr int max_config_depth = 256;

}  // namespace muster
