// SPDX-License-Identifier: Apache-2.0
#include "muster/config.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/base/message.hpp"

namespace muster {
namespace {

constexpr std::size_t linear_up_to = 8;
constexpr std::uint32_t empty_bucket = 0xffffffff;
constexpr std::size_t not_there = SIZE_MAX;

std::size_t hash_of(std::string_view key) noexcept {
  return std::hash<std::string_view>{}(key);
}

[[noreturn]] void wrong_type(Config::Type is, const char* wanted) {
  throw Error(ErrorKind::invalid_argument,
              "config value: expected " + std::string(wanted) + ", found " + std::string(to_string(is)));
}

template <class T, class Value>
auto& of_type(Value& value, const char* wanted) {
  if (auto* found = std::get_if<T>(&value)) return *found;
  wrong_type(static_cast<Config::Type>(value.index()), wanted);
}

template <class T>
bool same_bits(const T& a, const T& b) noexcept {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

}  // namespace

// ConfigObject: members_ holds the members in order; index_ is a hash table of positions in members_, at most half
// full.

ConfigObject::ConfigObject() = default;
ConfigObject::ConfigObject(const ConfigObject&) = default;
ConfigObject::ConfigObject(ConfigObject&&) noexcept = default;
ConfigObject& ConfigObject::operator=(const ConfigObject&) = default;
ConfigObject& ConfigObject::operator=(ConfigObject&&) noexcept = default;
ConfigObject::~ConfigObject() = default;

std::size_t ConfigObject::size() const noexcept {
  return members_.size();
}
bool ConfigObject::empty() const noexcept {
  return members_.empty();
}
std::vector<ConfigObject::Member>::const_iterator ConfigObject::begin() const noexcept {
  return members_.begin();
}
std::vector<ConfigObject::Member>::const_iterator ConfigObject::end() const noexcept {
  return members_.end();
}

void ConfigObject::reindex(std::size_t buckets) {
  index_.assign(buckets, empty_bucket);
  for (std::size_t i = 0; i < members_.size(); ++i) {
    std::size_t bucket = hash_of(members_[i].first) & (buckets - 1);
    while (index_[bucket] != empty_bucket) bucket = (bucket + 1) & (buckets - 1);
    index_[bucket] = static_cast<std::uint32_t>(i);
  }
}

std::size_t ConfigObject::position(std::string_view key) const noexcept {
  if (index_.empty()) {
    for (std::size_t i = 0; i < members_.size(); ++i)
      if (members_[i].first == key) return i;
    return not_there;
  }
  const std::size_t mask = index_.size() - 1;
  for (std::size_t bucket = hash_of(key) & mask; index_[bucket] != empty_bucket; bucket = (bucket + 1) & mask)
    if (members_[index_[bucket]].first == key) return index_[bucket];
  return not_there;
}

const Config* ConfigObject::find(std::string_view key) const noexcept {
  const std::size_t at = position(key);
  return at == not_there ? nullptr : &members_[at].second;
}

Config* ConfigObject::find(std::string_view key) noexcept {
  const std::size_t at = position(key);
  return at == not_there ? nullptr : &members_[at].second;
}

Config& ConfigObject::operator[](std::string_view key) {
  if (Config* found = find(key)) return *found;
  insert(std::string(key), Config());
  return members_.back().second;
}

bool ConfigObject::insert(std::string key, Config value) {
  if (position(key) != not_there) return false;
  members_.emplace_back(std::move(key), std::move(value));
  if (index_.empty() && members_.size() <= linear_up_to) return true;
  if (members_.size() * 2 > index_.size()) {
    std::size_t buckets = 32;
    while (buckets < members_.size() * 4) buckets *= 2;
    reindex(buckets);
    return true;
  }
  const std::size_t mask = index_.size() - 1;
  std::size_t bucket = hash_of(members_.back().first) & mask;
  while (index_[bucket] != empty_bucket) bucket = (bucket + 1) & mask;
  index_[bucket] = static_cast<std::uint32_t>(members_.size() - 1);
  return true;
}

bool ConfigObject::erase(std::string_view key) {
  const std::size_t at = position(key);
  if (at == not_there) return false;
  members_.erase(members_.begin() + static_cast<std::ptrdiff_t>(at));
  if (!index_.empty()) reindex(index_.size());
  return true;
}

void ConfigObject::reserve(std::size_t members) {
  members_.reserve(members);
  if (members <= linear_up_to || members * 2 <= index_.size()) return;
  std::size_t buckets = 32;
  while (buckets < members * 2) buckets *= 2;
  reindex(buckets);
}

Config::Config(const char* value) {
  if (value == nullptr) throw Error(ErrorKind::invalid_argument, "config value: the text must not be a null pointer");
  value_ = std::string(value);
}

Config Config::array(std::initializer_list<Config> items) {
  return ConfigArray(items);
}

Config Config::object(std::initializer_list<std::pair<std::string_view, Config>> members) {
  ConfigObject object;
  object.reserve(members.size());
  for (const auto& [key, value] : members)
    if (!object.insert(std::string(key), value))
      throw Error(ErrorKind::invalid_argument, "config object: the key " + in_quotes(key) + " occurs twice");
  return object;
}

bool Config::as_bool() const {
  return of_type<bool>(value_, "a boolean");
}

std::int64_t Config::as_int() const {
  if (const std::int64_t* value = std::get_if<std::int64_t>(&value_)) return *value;
  wrong_type(type(), "a signed 64-bit integer");
}

std::uint64_t Config::as_uint() const {
  if (const std::uint64_t* value = std::get_if<std::uint64_t>(&value_)) return *value;
  if (const std::int64_t* value = std::get_if<std::int64_t>(&value_); value != nullptr && *value >= 0)
    return static_cast<std::uint64_t>(*value);
  wrong_type(type(), "an integer of at least 0");
}

double Config::as_double() const {
  if (const double* value = std::get_if<double>(&value_)) return *value;
  if (const std::int64_t* value = std::get_if<std::int64_t>(&value_)) return static_cast<double>(*value);
  if (const std::uint64_t* value = std::get_if<std::uint64_t>(&value_)) return static_cast<double>(*value);
  wrong_type(type(), "a number");
}

const std::string& Config::as_string() const {
  return of_type<std::string>(value_, "a string");
}

const ConfigArray& Config::as_array() const {
  return of_type<ConfigArray>(value_, "an array");
}

ConfigArray& Config::as_array() {
  return of_type<ConfigArray>(value_, "an array");
}

const ConfigObject& Config::as_object() const {
  return of_type<ConfigObject>(value_, "an object");
}

ConfigObject& Config::as_object() {
  return of_type<ConfigObject>(value_, "an object");
}

const Tensor& Config::as_tensor() const {
  return of_type<Tensor>(value_, "a tensor");
}

void Config::does_not_fit() const {
  const std::string value = type() == Type::integer ? std::to_string(as_int()) : std::to_string(as_uint());
  throw Error(ErrorKind::invalid_argument,
              "config value: " + value + " is out of range for the requested integer type");
}

const Config* Config::find(std::string_view key) const noexcept {
  const auto* members = std::get_if<ConfigObject>(&value_);
  return members == nullptr ? nullptr : members->find(key);
}

const Config& Config::at(std::string_view key) const {
  const Config* found = as_object().find(key);
  if (found == nullptr)
    throw Error(ErrorKind::not_found, "config object: the member " + in_quotes(key) + " does not exist");
  return *found;
}

const Config& Config::at(std::size_t index) const {
  const ConfigArray& items = as_array();
  if (index >= items.size())
    throw Error(ErrorKind::not_found, out_of_range_text("config array: index", static_cast<std::int64_t>(index),
                                                        static_cast<std::int64_t>(items.size())));
  return items[index];
}

Config& Config::operator[](std::string_view key) {
  if (is_null()) value_ = ConfigObject();
  return as_object()[key];
}

void Config::push_back(Config item) {
  if (is_null()) value_ = ConfigArray();
  as_array().push_back(std::move(item));
}

std::size_t Config::size() const noexcept {
  if (const auto* items = std::get_if<ConfigArray>(&value_)) return items->size();
  if (const auto* members = std::get_if<ConfigObject>(&value_)) return members->size();
  return 0;
}

bool operator==(const Config& a, const Config& b) {
  if (a.type() != b.type()) return false;
  if (a.type() == Config::Type::real) return same_bits(a.as_double(), b.as_double());
  if (a.is_tensor()) return bitwise_equal(a.as_tensor(), b.as_tensor());
  if (!a.is_object())
    return std::visit(
        [&]<class T>(const T& value) {
          if constexpr (std::equality_comparable<T>)
            return value == std::get<T>(b.value_);
          else
            return false;
        },
        a.value_);
  if (a.size() != b.size()) return false;
  return std::ranges::all_of(a.as_object(), [&](const ConfigObject::Member& member) {
    const Config* other = b.find(member.first);
    return other != nullptr && member.second == *other;
  });
}

void detail::check_config_depth(int depth) {
  if (depth > max_config_depth)
    throw Error(ErrorKind::invalid_argument,
                "config: nested deeper than " + std::to_string(max_config_depth) + " levels");
}

std::string_view to_string(Config::Type type) noexcept {
  // In the order of the types.
  constexpr std::array<std::string_view, 9> names = {
      "null", "boolean", "integer", "unsigned integer", "real", "string", "array", "object", "tensor"};
  static_assert(names.size() == std::size_t{static_cast<std::uint8_t>(Config::Type::tensor)} + 1);
  const auto number = static_cast<std::uint8_t>(type);
  return number < names.size() ? names[number] : "unknown";
}

}  // namespace muster
