// SPDX-License-Identifier: Apache-2.0
// Finds the weights in a file of torch.save.

#include "src/checkpoint/thirdparty/torch_weights.hpp"
#include <fmt/core.h>
#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <unordered_set>
#include "muster/error.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/model/model_survey.hpp"
#include "src/checkpoint/thirdparty/torch_archive.hpp"
#include "src/formats/file_kind.hpp"
#include "src/os/process.hpp"

namespace muster::thirdparty {
namespace {

constexpr int deepest_dict = 64;

bool is_container(const Pickle& pickle, Pickle::Ref ref) {
  return pickle.is(ref, PickleKind::dict) || pickle.is(ref, PickleKind::list) || pickle.is(ref, PickleKind::tuple);
}

/// Returns the text of a key that is a text or a number; nullopt for other keys.
std::optional<std::string> key_text(const Pickle& pickle, Pickle::Ref key) {
  if (pickle.is(key, PickleKind::text)) return std::string(pickle.text(key));
  if (const auto number = pickle.integer(key)) return std::to_string(*number);
  return std::nullopt;
}

/// Traverses the dicts, lists and tuples below a node, whose keys form the names of tensors.
class Walk {
 public:
  using Work = std::function<bool(const std::string&, Pickle::Ref)>;
  Walk(const TorchArchive& archive, const Work& work) : archive_(archive), pickle_(archive.pickle()), work_(work) {}

  /// Skips these values of the outermost dict.
  void leave_out(std::span<const Pickle::Ref> values) { left_out_ = values; }
  /// Calls unnamed(name of the container, text for the place, value) with each value that cannot have a name.
  using Unnamed = std::function<void(const std::string&, std::string_view, Pickle::Ref)>;
  void report_unnamed(const Unnamed& unnamed) { unnamed_ = &unnamed; }

  /// Returns false if `work` has stopped the traversal.
  bool go(const std::string& name, Pickle::Ref ref, int depth) {
    if (depth > deepest_dict || ++steps_ > most_steps_)
      throw Error(ErrorKind::corrupt, "the dicts are nested too deeply, or contain themselves");
    if (archive_.is_tensor(ref)) return work_(name.empty() ? "tensor" : name, ref);
    if (!is_container(pickle_, ref)) {
      if (unnamed_ != nullptr) (*unnamed_)(name, formats::to_string(pickle_.kind(ref)), ref);
      return true;
    }
    const std::span<const Pickle::Ref> items = pickle_.items(ref);
    const std::string prefix = name.empty() ? "" : name + ".";
    if (!pickle_.is(ref, PickleKind::dict)) {
      for (std::size_t i = 0; i < items.size(); ++i)
        if (is_worth(items[i]) && !go(prefix + std::to_string(i), items[i], depth + 1)) return false;
      return true;
    }
    for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
      const Pickle::Ref value = items[i + 1];
      if (!is_worth(value) || (depth == 0 && std::ranges::find(left_out_, value) != left_out_.end())) continue;
      const std::optional<std::string> key = key_text(pickle_, items[i]);
      if (key && !go(prefix + *key, value, depth + 1)) return false;
      if (!key && unnamed_ != nullptr)
        (*unnamed_)(name, fmt::format("a key that is {}", formats::to_string(pickle_.kind(items[i]))), value);
    }
    return true;
  }

 private:
  [[nodiscard]] bool is_worth(Pickle::Ref ref) const {
    const bool may_have_tensors = pickle_.is(ref, PickleKind::object) || pickle_.is(ref, PickleKind::set);
    return archive_.is_tensor(ref) || is_container(pickle_, ref) || (unnamed_ != nullptr && may_have_tensors);
  }

  const TorchArchive& archive_;
  const Pickle& pickle_;
  const Work& work_;
  const Unnamed* unnamed_ = nullptr;
  std::span<const Pickle::Ref> left_out_;
  // Each node once, and the same number again for shared nodes.
  std::uint64_t most_steps_ = 2 * archive_.pickle().size() + 64;
  std::uint64_t steps_ = 0;
};

/// Counts tensors below nodes of any kind. Each counts once.
class TensorCount {
 public:
  explicit TensorCount(const TorchArchive& archive) : archive_(archive), is_seen_(archive.pickle().size()) {}

  void mark(Pickle::Ref tensor) { is_seen_[tensor] = true; }
  std::uint64_t below(Pickle::Ref top) {
    const Pickle& pickle = archive_.pickle();
    std::uint64_t count = 0;
    std::vector<Pickle::Ref> rest = {top};
    while (!rest.empty()) {
      const Pickle::Ref ref = rest.back();
      rest.pop_back();
      if (is_seen_[ref]) continue;
      is_seen_[ref] = true;
      if (archive_.is_tensor(ref)) {
        ++count;
        continue;
      }
      for (const std::span<const Pickle::Ref> inner : {pickle.items(ref), pickle.arguments(ref)})
        rest.insert(rest.end(), inner.begin(), inner.end());
      if (const auto state = pickle.state(ref)) rest.push_back(*state);
    }
    return count;
  }

 private:
  const TorchArchive& archive_;
  std::vector<bool> is_seen_;
};

bool is_numpy_array(const Pickle& pickle, Pickle::Ref ref) {
  const std::string_view name = pickle.name(ref);
  return pickle.is(ref, PickleKind::object) &&
         (name == "numpy.core.multiarray._reconstruct" || name == "numpy._core.multiarray._reconstruct");
}

bool has_tensors(const TorchArchive& archive, Pickle::Ref ref) {
  const Walk::Work stop = [](const std::string&, Pickle::Ref) { return false; };
  return !Walk(archive, stop).go("", ref, 0);
}

/// Whether a tensor at the root can be a weight, and not a result of training, a number of steps or the state of a
/// random generator.
bool is_like_weight(const TorchArchive& archive, Pickle::Ref ref) {
  if (!archive.is_tensor(ref)) return false;
  try {
    const TorchTensor tensor = archive.tensor(ref);
    return element_count(tensor.shape) > 1 && tensor.dtype != DType::u8;
  } catch (const Error&) {
    return true;  // reading it throws the error
  }
}

/// Whether a member of the root is the state of an optimizer, by its key or its "param_groups".
bool is_of_optimizer(const Pickle& pickle, Pickle::Ref key, Pickle::Ref value) {
  if (pickle.text(key).starts_with("optim") || pickle.find(value, "param_groups")) return true;
  const std::span<const Pickle::Ref> items = pickle.items(value);
  return pickle.is(value, PickleKind::list) && !items.empty() && pickle.find(items[0], "param_groups").has_value();
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
    // A whole key is tried first, because keys may have slashes.
    std::string_view key = rest;
    std::optional<Pickle::Ref> found = pickle.find(ref, key);
    if (!found) {
      key = rest.substr(0, rest.find('/'));
      found = pickle.find(ref, key);
    }
    if (!found)
      refuse_weights(fmt::format("--key {1}: {0} does not exist (keys: {2})", in_quotes(key), in_quotes(at),
                                 keys_of(pickle, ref)));
    ref = *found;
    rest = rest.substr(std::min(rest.size(), key.size() + 1));
  }
  if (!has_tensors(archive, ref)) refuse_weights(fmt::format("--key {}: no tensor is below this key", in_quotes(at)));
  return ref;
}

}  // namespace

TorchWeights find_weights(const TorchArchive& archive, const std::string& at) {
  const Pickle& pickle = archive.pickle();
  const Pickle::Ref root = pickle.root();
  if (at == whole_root && has_tensors(archive, root)) return {root};
  if (!at.empty()) return {find_at(archive, at)};
  if (!pickle.is(root, PickleKind::dict)) {
    if (archive.is_tensor(root) || has_tensors(archive, root)) return {root};
    if (pickle.is(root, PickleKind::object))
      refuse_weights(fmt::format("the file is a pickled object ({}), not a dict of tensors. Save its state_dict()",
                                 in_quotes(pickle.name(root))));
    refuse_weights("the file has no tensors");
  }
  bool has_weights = false;
  bool has_others = false;
  TorchWeights own{root};
  TensorCount count(archive);
  const std::span<const Pickle::Ref> items = pickle.items(root);
  for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
    has_weights = has_weights || is_like_weight(archive, items[i + 1]);
    if (!is_container(pickle, items[i + 1]) || count.below(items[i + 1]) == 0) continue;
    has_others = true;
    if (is_of_optimizer(pickle, items[i], items[i + 1])) own.without.push_back(items[i + 1]);
  }
  // If the root has no dicts of tensors next to them, all its tensors are weights. If it has some, but no optimizer,
  // the root is a state_dict of parts.
  if (!has_others || (has_weights && own.without.empty()))
    if (has_tensors(archive, root)) return own;
  std::vector<std::pair<std::string_view, Pickle::Ref>> found;
  for (const std::string_view key : {"state_dict", "model", "module", "model_state_dict"})
    if (const auto value = pickle.find(root, key); value && !archive.is_tensor(*value) && has_tensors(archive, *value))
      found.emplace_back(key, *value);
  if (found.size() == 1) return {found.front().second};
  if (!found.empty())
    refuse_weights(fmt::format("{} and {} both have tensors. Choose one with --key {}", in_quotes(found[0].first),
                               in_quotes(found[1].first), found[0].first));
  if (has_weights) return own;
  if (pickle.find(root, "model0"))
    refuse_weights(
        fmt::format("the model is in virtual pipeline stages. Choose one with --key, such as --key model0 (keys: {})",
                    keys_of(pickle, root)));
  if (has_tensors(archive, root))
    refuse_weights(fmt::format("no key identifies the weights. Pass --key KEY, or --key {} for all tensors (keys: {})",
                               whole_root, keys_of(pickle, root)));
  refuse_weights(fmt::format("the file has no tensors (keys: {})", keys_of(pickle, root)));
}

void for_each_tensor(const TorchArchive& archive, const TorchWeights& weights, const TensorWork& work,
                     Omissions* left_out) {
  const Pickle& pickle = archive.pickle();
  TensorCount count(archive);
  const Walk::Work visit = [&](const std::string& name, Pickle::Ref tensor) {
    count.mark(tensor);
    work(name, tensor);
    return true;
  };
  struct WeightLocation {
    std::string parent;
    std::string words;
    Pickle::Ref value;
  };
  std::vector<WeightLocation> unnamed;
  const Walk::Unnamed note = [&](const std::string& name, std::string_view place, Pickle::Ref value) {
    unnamed.push_back({name.empty() ? "the root" : name, std::string(place), value});
  };
  Walk walk(archive, visit);
  walk.leave_out(weights.without);
  if (left_out != nullptr) walk.report_unnamed(note);
  walk.go("", weights.ref, 0);
  if (left_out == nullptr) return;
  // Equal places, such as the keys of one dict, share one omission.
  std::map<std::pair<std::string, std::string>, std::uint64_t> tensors;
  TensorCount lost(archive);  // also counts those that have a name elsewhere
  for (const WeightLocation& place : unnamed) {
    if (is_numpy_array(pickle, place.value))
      left_out->push_back({place.parent, "an array of NumPy, which Muster cannot read. Save it as a tensor"});
    if (const std::uint64_t below = lost.below(place.value); below != 0) tensors[{place.parent, place.words}] += below;
  }
  for (const auto& [place, number] : tensors)
    left_out->push_back({place.first, fmt::format("{} tensors below {} have no name", number, place.second)});
  const std::span<const Pickle::Ref> items = pickle.items(pickle.root());
  for (std::size_t i = 0; pickle.is(pickle.root(), PickleKind::dict) && i + 1 < items.size(); i += 2)
    if (const std::uint64_t below = items[i + 1] == weights.ref ? 0 : count.below(items[i + 1]); below != 0)
      left_out->push_back(
          {key_text(pickle, items[i]).value_or("?"),
           fmt::format("{} tensors in addition to the weights. Pass --key to select other ones", below)});
}

TorchArchive open_torch_file(const os::ReadableFile& file) {
  return with_file("reading", file.path(), [&] { return TorchArchive::open(file); });
}

void add_torch_tensor(PartedTensors& tensors, std::uint32_t file, const TorchArchive& archive, const std::string& name,
                      Pickle::Ref ref) {
  try {
    const TorchTensor tensor = archive.tensor(ref);
    tensors.add_tensor(name, tensor.dtype, tensor.shape);
    const Shape extents = box_extents(tensor.shape);
    tensors.add_box(Shape(extents.size(), 0), extents, tensor.place_in(file));
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("tensor {}: {}", in_quotes(name), error.what()));
  }
}

bool is_torch_file(const std::string& path) {
  const formats::FileKind kind = formats::kind_of_file(os::ReadableFile::open(path));
  return kind == formats::FileKind::zip || kind == formats::FileKind::torch_legacy;
}

void add_torch_file(PartedTensors& tensors, const std::string& path, const Choice& choice,
                    const std::function<void(const std::string&)>& work,
                    const std::function<void(const TorchArchive&)>& check) {
  with_file("reading", path, [&] {
    const std::uint32_t file = tensors.add_file(path);
    const TorchArchive archive = open_torch_file(tensors.file(file));
    if (check) check(archive);
    const TensorWork add = [&](const std::string& name, Pickle::Ref ref) {
      work(name);
      add_torch_tensor(tensors, file, archive, name, ref);
    };
    Omissions left_out;
    for_each_tensor(archive, find_weights(archive, choice.key), add, &left_out);
    for (Omission& left : left_out) tensors.add_omission(std::move(left));
  });
}

std::shared_ptr<const PartedTensors> open_torch(const FoundCheckpoint& found, const Choice& choice) {
  auto tensors = std::make_shared<PartedTensors>();
  std::unordered_set<std::string> names;
  add_torch_file(*tensors, found.path, choice, [&](const std::string& name) {
    // A key with a dot may have the same name as a key in a nested dict.
    if (!names.insert(name).second)
      throw Error(ErrorKind::corrupt, fmt::format("tensor {}: the name is duplicated", in_quotes(name)));
  });
  tensors->finish();
  return tensors;
}

std::shared_ptr<const PartedTensors> open_torch_model(const FoundCheckpoint& found, const Choice& choice,
                                                      std::vector<std::string>& notes) {
  auto tensors = std::make_shared<PartedTensors>();
  ModelSurvey survey = choose_files(found.path, found.files, torch_naming);
  refuse_findings(survey.findings, found.path);
  os::allow_open_files(survey.names.size() + 256);
  TensorPlaces places;
  for (const std::string& name : survey.names) {
    places.files.insert(name);
    add_torch_file(*tensors, join_path(found.path, name), choice,
                   [&](const std::string& tensor) { places.add(survey, tensor, name, 0); });
    refuse_findings(survey.findings, found.path);
  }
  check_tensors(survey, places);
  refuse_findings(survey.findings, found.path);
  for (Omission& left : survey.left_out) tensors->add_omission(std::move(left));
  for (std::string& note : notes_of(survey.findings)) notes.push_back(std::move(note));
  tensors->finish();
  return tensors;
}

}  // namespace muster::thirdparty
