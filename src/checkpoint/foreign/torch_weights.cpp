// SPDX-License-Identifier: Apache-2.0
// Where in what torch.save wrote the weights are.

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/foreign/torch_archive.hpp"

namespace muster::foreign {
namespace {

constexpr int deepest_dict = 64;

bool is_container(const Pickle& pickle, Pickle::Ref ref) {
  return pickle.is(ref, PickleKind::dict) || pickle.is(ref, PickleKind::list) || pickle.is(ref, PickleKind::tuple);
}

/// "KEY" of a text or a number; none of others.
std::optional<std::string> key_text(const Pickle& pickle, Pickle::Ref key) {
  if (pickle.is(key, PickleKind::text)) return std::string(pickle.text(key));
  if (const auto number = pickle.integer(key)) return std::to_string(*number);
  return std::nullopt;
}

class Walk {
 public:
  Walk(const TorchArchive& archive, const std::function<bool(const std::string&, Pickle::Ref)>& work)
      : archive_(archive), pickle_(archive.pickle()), work_(work) {}

  /// False if `work` has ended it.
  bool go(const std::string& name, Pickle::Ref ref, int depth) {
    if (depth > deepest_dict || ++steps_ > most_steps_)
      throw Error(ErrorKind::corrupt, "its dicts are nested too deeply, or contain themselves");
    if (archive_.is_tensor(ref)) return work_(name.empty() ? "tensor" : name, ref);
    if (!is_container(pickle_, ref)) return true;
    const std::span<const Pickle::Ref> items = pickle_.items(ref);
    const std::string prefix = name.empty() ? "" : name + ".";
    if (!pickle_.is(ref, PickleKind::dict)) {
      for (std::size_t i = 0; i < items.size(); ++i)
        if (is_worth(items[i]) && !go(prefix + std::to_string(i), items[i], depth + 1)) return false;
      return true;
    }
    for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
      if (!is_worth(items[i + 1])) continue;
      const std::optional<std::string> key = key_text(pickle_, items[i]);
      if (key && !go(prefix + *key, items[i + 1], depth + 1)) return false;
    }
    return true;
  }

 private:
  [[nodiscard]] bool is_worth(Pickle::Ref ref) const { return archive_.is_tensor(ref) || is_container(pickle_, ref); }

  const TorchArchive& archive_;
  const Pickle& pickle_;
  const std::function<bool(const std::string&, Pickle::Ref)>& work_;
  // Each node once, and as often again for those that are shared.
  std::uint64_t most_steps_ = 2 * archive_.pickle().size() + 64;
  std::uint64_t steps_ = 0;
};

bool has_tensors(const TorchArchive& archive, Pickle::Ref ref) {
  const std::function<bool(const std::string&, Pickle::Ref)> stop = [](const std::string&, Pickle::Ref) {
    return false;
  };
  return !Walk(archive, stop).go("", ref, 0);
}

bool has_own_tensors(const TorchArchive& archive, Pickle::Ref dict) {
  const std::span<const Pickle::Ref> items = archive.pickle().items(dict);
  return std::ranges::any_of(items, [&](Pickle::Ref item) { return archive.is_tensor(item); });
}

std::string keys_of(const Pickle& pickle, Pickle::Ref dict) {
  constexpr std::size_t most_keys_named = 12;
  std::string keys;
  const std::span<const Pickle::Ref> items = pickle.items(dict);
  for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
    if (i / 2 == most_keys_named) return keys + ", ...";
    keys += (keys.empty() ? "" : ", ") + in_quotes(key_text(pickle, items[i]).value_or("?"));
  }
  return keys.empty() ? "none" : keys;
}

[[noreturn]] void refuse_weights(const std::string& words) {
  throw Error(ErrorKind::not_found, words);
}

Pickle::Ref find_at(const TorchArchive& archive, const std::string& at) {
  const Pickle& pickle = archive.pickle();
  Pickle::Ref ref = pickle.root();
  for (std::string_view rest = at; !rest.empty();) {
    // A whole key first: keys may have slashes.
    std::string_view key = rest;
    std::optional<Pickle::Ref> found = pickle.find(ref, key);
    if (!found) {
      key = rest.substr(0, rest.find('/'));
      found = pickle.find(ref, key);
    }
    if (!found)
      refuse_weights(
          fmt::format("there is no {} at {}; keys: {}", in_quotes(key), in_quotes(at), keys_of(pickle, ref)));
    ref = *found;
    rest = rest.substr(std::min(rest.size(), key.size() + 1));
  }
  if (!has_tensors(archive, ref)) refuse_weights(fmt::format("nothing at {} is a tensor", in_quotes(at)));
  return ref;
}

}  // namespace

Pickle::Ref find_weights(const TorchArchive& archive, const std::string& at) {
  const Pickle& pickle = archive.pickle();
  const Pickle::Ref root = pickle.root();
  if (!at.empty()) return find_at(archive, at);
  if (!pickle.is(root, PickleKind::dict)) {
    if (archive.is_tensor(root) || has_tensors(archive, root)) return root;
    if (pickle.is(root, PickleKind::object))
      refuse_weights(fmt::format("it is a pickled object ({}), not a dict of tensors: save its state_dict()",
                                 in_quotes(pickle.name(root))));
    refuse_weights("there is no tensor in it");
  }
  if (has_own_tensors(archive, root)) return root;
  std::vector<std::pair<std::string_view, Pickle::Ref>> found;
  for (const std::string_view key : {"state_dict", "model", "module", "model_state_dict"})
    if (const auto value = pickle.find(root, key); value && has_tensors(archive, *value))
      found.emplace_back(key, *value);
  if (found.size() == 1) return found.front().second;
  if (!found.empty())
    refuse_weights(fmt::format("{} and {} both have tensors; choose with --at {}", in_quotes(found[0].first),
                               in_quotes(found[1].first), found[0].first));
  if (pickle.find(root, "model0"))
    refuse_weights(fmt::format("its model is in virtual pipeline stages; choose one with --at model0; keys: {}",
                               keys_of(pickle, root)));
  if (has_tensors(archive, root))
    refuse_weights(
        fmt::format("it cannot be told which are the weights; choose with --at KEY; keys: {}", keys_of(pickle, root)));
  refuse_weights(fmt::format("nothing here is a tensor; keys: {}", keys_of(pickle, root)));
}

void for_each_tensor(const TorchArchive& archive, Pickle::Ref ref,
                     const std::function<void(const std::string&, Pickle::Ref)>& work) {
  const std::function<bool(const std::string&, Pickle::Ref)> go_on = [&](const std::string& name, Pickle::Ref tensor) {
    work(name, tensor);
    return true;
  };
  Walk(archive, go_on).go("", ref, 0);
}

}  // namespace muster::foreign
