// SPDX-License-Identifier: Apache-2.0
#include "muster/state.hpp"

#include <unordered_map>
#include <unordered_set>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/formats/json_text.hpp"

namespace muster {
namespace {

/// The name of a tensor with an empty path: the tree is a tensor, or all keys on the path are empty.
constexpr std::string_view nameless = "tensor";

class Splitter {
 public:
  Config value(const Config& config, int depth) {
    detail::check_config_depth(depth);
    switch (config.type()) {
      case Config::Type::tensor:
        return reference(config.as_tensor());
      case Config::Type::array:
        return array(config.as_array(), depth);
      case Config::Type::object:
        return object(config.as_object(), depth);
      case Config::Type::string:
        check(config.as_string());
        return config;
      default:
        return config;
    }
  }

  std::vector<NamedTensor> take_weights() { return std::move(weights_); }

 private:
  static void check(std::string_view text) {
    if (!is_utf8(text)) throw Error(ErrorKind::invalid_argument, "config: a key or string is not valid UTF-8");
  }

  Config reference(const Tensor& tensor) {
    std::string name = path_.empty() ? std::string(nameless) : path_;
    if (!used_.insert(name).second) {
      // The next number to try is stored, so that many paths with the same spelling take no longer than a few.
      std::uint64_t& number = numbers_.try_emplace(name, 2).first->second;
      const std::string base = std::move(name);
      do name = base + '#' + std::to_string(number++);
      while (!used_.insert(name).second);
    }
    weights_.emplace_back(name, tensor);
    ConfigObject object;
    object.insert("$" + std::string(core::tensor_word), std::move(name));
    return object;
  }

  /// Returns the value after one more step of the path.
  Config inside(std::string_view step, const Config& config, int depth) {
    const std::size_t length = path_.size();
    if (depth > 0) path_ += '.';
    path_ += step;
    Config result = value(config, depth + 1);
    path_.resize(length);
    return result;
  }

  Config array(const ConfigArray& items, int depth) {
    ConfigArray result;
    result.reserve(items.size());
    for (std::size_t i = 0; i < items.size(); ++i) result.push_back(inside(std::to_string(i), items[i], depth));
    return result;
  }

  Config object(const ConfigObject& members, int depth) {
    const bool is_escaped = core::reserved_dollars(members, core::tensor_word) != 0;
    ConfigObject result;
    result.reserve(members.size());
    for (const auto& [key, member] : members) {
      check(key);
      result.insert(is_escaped ? '$' + key : key, inside(key, member, depth));
    }
    return result;
  }

  std::string path_;
  std::vector<NamedTensor> weights_;
  std::unordered_set<std::string> used_;
  std::unordered_map<std::string, std::uint64_t> numbers_;
};

class Joiner {
 public:
  explicit Joiner(const std::vector<NamedTensor>& weights) {
    weights_.reserve(weights.size());
    for (const auto& [name, tensor] : weights)
      if (!weights_.try_emplace(name, &tensor).second) defect("has the duplicate weight " + in_quotes(name));
  }

  Config value(const Config& config, int depth) {
    if (depth > max_config_depth + (config.is_string() ? 1 : 0))
      defect("has a config with more than " + std::to_string(max_config_depth) + " levels");
    if (config.is_tensor()) defect("has a tensor in its config, where a reference to a weight belongs");
    if (config.is_array()) {
      ConfigArray result;
      result.reserve(config.size());
      for (const Config& item : config.as_array()) result.push_back(value(item, depth + 1));
      return result;
    }
    if (!config.is_object()) return config;
    const ConfigObject& members = config.as_object();
    const std::size_t dollars = core::reserved_dollars(members, core::tensor_word);
    if (dollars == 1) return weight(members.begin()->second);
    ConfigObject result;
    result.reserve(members.size());
    for (const auto& [key, member] : members)
      result.insert(dollars == 0 ? key : key.substr(1), value(member, depth + 1));
    return result;
  }

  void check_all_used() const {
    for (const auto& [name, tensor] : weights_)
      if (tensor != nullptr) defect("has the weight " + in_quotes(name) + ", to which its config does not refer");
  }

 private:
  [[noreturn]] static void defect(const std::string& what) {
    throw Error(ErrorKind::corrupt, "joining a config and its weights: the state " + what);
  }

  Config weight(const Config& name) {
    if (!name.is_string()) defect("refers to a weight by a " + std::string(to_string(name.type())));
    const auto found = weights_.find(name.as_string());
    if (found == weights_.end())
      defect("refers to the weight " + in_quotes(name.as_string()) + ", which does not exist");
    if (found->second == nullptr) defect("refers more than once to the weight " + in_quotes(name.as_string()));
    return *std::exchange(found->second, nullptr);
  }

  std::unordered_map<std::string_view, const Tensor*> weights_;  // null after its use
};

}  // namespace

State split(const Config& config) {
  Splitter splitter;
  State state;
  state.config = splitter.value(config, 0);
  state.weights = splitter.take_weights();
  return state;
}

Config join(const State& state) {
  Joiner joiner(state.weights);
  Config config = joiner.value(state.config, 0);
  joiner.check_all_used();
  return config;
}

}  // namespace muster
