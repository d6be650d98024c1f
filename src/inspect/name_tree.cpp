// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/name_tree.hpp"

#include <algorithm>
#include <unordered_map>

namespace muster::inspect {
namespace {

// Names from files may consist of dots: below this depth a label has all that is left.
constexpr int deepest = 32;

/// A node while it grows.
struct Growing {
  std::size_t begin = 0;  // of its label in the name of `owner`
  std::size_t end = 0;
  std::size_t owner = 0;  // place of the entry that it was first seen in
  std::optional<std::size_t> tensor = {};
  std::vector<std::size_t> children = {};
  std::unordered_map<std::string_view, std::size_t> by_label = {};
};

class Builder {
 public:
  Builder(const std::vector<TensorEntry>& entries, bool folds) : entries_(entries), folds_(folds) {
    nodes_.emplace_back();
  }

  void add(std::size_t place) {
    const std::string_view name = entries_[place].name;
    std::size_t node = 0;
    std::size_t begin = 0;
    for (int depth = 0;; ++depth) {
      const std::size_t end = depth == deepest ? name.size() : std::min(name.find_first_of("./", begin), name.size());
      node = child(node, place, begin, end);
      if (end == name.size()) break;
      begin = end + 1;
    }
    nodes_[node].tensor = place;
  }

  NameNode finish(std::size_t number = 0) {
    Growing& growing = nodes_[number];
    const std::size_t begin = growing.begin;
    // What does not branch is one label.
    std::size_t last = number;
    while (number != 0 && !nodes_[last].tensor && nodes_[last].children.size() == 1)
      last = nodes_[last].children.front();
    NameNode node;
    node.label = std::string_view(entries_[nodes_[last].owner].name).substr(begin, nodes_[last].end - begin);
    node.tensor = nodes_[last].tensor;
    for (const std::size_t child : nodes_[last].children) node.children.push_back(finish(child));
    if (node.tensor) {
      node.tensors = 1;
      node.bytes = entries_[*node.tensor].bytes;
    }
    for (const NameNode& child : node.children) {
      node.tensors += child.tensors;
      node.bytes += child.bytes;
    }
    if (folds_) fold(node.children);
    return node;
  }

 private:
  std::size_t child(std::size_t parent, std::size_t place, std::size_t begin, std::size_t end) {
    const std::string_view label = std::string_view(entries_[place].name).substr(begin, end - begin);
    const auto [found, is_new] = nodes_[parent].by_label.try_emplace(label, nodes_.size());
    const std::size_t number = found->second;
    if (is_new) {
      nodes_[parent].children.push_back(number);
      nodes_.push_back({begin, end, place});
    }
    return number;
  }

  [[nodiscard]] bool are_alike(const NameNode& a, const NameNode& b) const {
    if (a.tensors != b.tensors || a.bytes != b.bytes || a.children.size() != b.children.size() ||
        a.tensor.has_value() != b.tensor.has_value())
      return false;
    if (a.tensor) {
      const TensorEntry& x = entries_[*a.tensor];
      const TensorEntry& y = entries_[*b.tensor];
      if (x.dtype != y.dtype || x.shape != y.shape) return false;
    }
    for (std::size_t i = 0; i < a.children.size(); ++i)
      if (a.children[i].label != b.children[i].label || a.children[i].alike != b.children[i].alike ||
          !are_alike(a.children[i], b.children[i]))
        return false;
    return true;
  }

  /// "rank3.weight": what stands before the number that ends the first part, the number, and what follows.
  struct Numbered {
    std::string_view before;
    std::string_view number;
    std::string_view rest;
  };
  static Numbered numbered(std::string_view label) noexcept {
    const std::string_view part = label.substr(0, std::min(label.find_first_of("./"), label.size()));
    const std::size_t digits = part.find_last_not_of("0123456789") + 1;
    return {part.substr(0, digits), part.substr(digits), label.substr(part.size())};
  }

  void fold(std::vector<NameNode>& nodes) const {
    std::vector<NameNode> out;
    for (NameNode& node : nodes) {
      const Numbered mine = numbered(node.label);
      if (!out.empty() && !mine.number.empty()) {
        NameNode& first = out.back();
        const Numbered its = numbered(first.label);
        if (!its.number.empty() && its.before == mine.before && its.rest == mine.rest && are_alike(first, node)) {
          ++first.alike;
          first.last = mine.number;
          continue;
        }
      }
      out.push_back(std::move(node));
    }
    nodes = std::move(out);
  }

  const std::vector<TensorEntry>& entries_;
  bool folds_;
  std::vector<Growing> nodes_;
};

}  // namespace

NameNode name_tree(const std::vector<TensorEntry>& entries, const std::vector<std::size_t>& places, bool folds) {
  Builder builder(entries, folds);
  for (const std::size_t place : places) builder.add(place);
  return builder.finish();
}

}  // namespace muster::inspect
