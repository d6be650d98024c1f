// SPDX-License-Identifier: Apache-2.0
#include "src/versions/old_version.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <unordered_map>
#include <utility>

#include "muster/error.hpp"
#include "muster/log.hpp"
#include "src/base/escaped.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/core/thread_pool.hpp"
#include "src/os/clock.hpp"
#include "src/workspace/discovery.hpp"

namespace muster::versions {

std::shared_ptr<const TensorSource> tensors_of_model(const std::string& directory) {
  return std::make_shared<FileTensors>(ModelDir::open(directory).files());
}

std::shared_ptr<const TensorSource> tensors_of_version(const OpenVersion& full) {
  return std::make_shared<FileTensors>(full.files);
}

/// Tensors in memory.
class OldVersion::Kept : public TensorSource {
 public:
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return entries_; }
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> target) const override {
    std::memcpy(target.data(), bytes_[tensor].get() + offset, target.size());
  }
  [[nodiscard]] std::optional<std::size_t> index_of(const std::string& name) const noexcept {
    const auto found = places_.find(name);
    if (found == places_.end()) return std::nullopt;
    return found->second;
  }
  /// Adds a tensor; its bytes are undefined.
  std::size_t add(const TensorEntry& entry) {
    entries_.push_back(entry);
    bytes_.push_back(std::make_unique_for_overwrite<std::byte[]>(entry.bytes));
    places_.emplace(entry.name, entries_.size() - 1);
    return entries_.size() - 1;
  }
  /// Frees all other tensors.
  void retain(const std::set<std::string>& names) {
    std::erase_if(places_, [&](const auto& place) {
      if (names.contains(place.first)) return false;
      bytes_[place.second].reset();
      return true;
    });
  }
  std::span<std::byte> bytes(std::size_t tensor) noexcept { return {bytes_[tensor].get(), entries_[tensor].bytes}; }

 private:
  std::vector<TensorEntry> entries_;
  std::vector<std::unique_ptr<std::byte[]>> bytes_;
  std::map<std::string, std::size_t> places_;
};

namespace {

std::unordered_map<std::string, std::size_t> places_in(const TensorSource& source) {
  std::unordered_map<std::string, std::size_t> places;
  const std::vector<TensorEntry>& entries = source.tensors();
  places.reserve(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) places.emplace(entries[i].name, i);
  return places;
}

/// Writes the tensor that `reader` reads to `target`. Each piece is read before it is overwritten.
void fold_into(FoldedReader& reader, std::span<std::byte> target, const std::function<void()>& check) {
  std::vector<std::byte> piece(std::min<std::uint64_t>(piece_bytes, target.size()));
  while (!target.empty()) {
    const auto now = std::span(piece).first(std::min(piece.size(), target.size()));
    reader.next(now);
    std::memcpy(target.data(), now.data(), now.size());
    if (check) check();
    target = target.subspan(now.size());
  }
  reader.end();
}

}  // namespace

OldVersion::OldVersion() = default;
OldVersion::~OldVersion() = default;

void OldVersion::forget() noexcept {
  version_.reset();
  specs_.clear();
  facts_.reset();
  newest_full_.reset();
  kept_.reset();
  begin_.reset();
  places_.clear();
  deltas_.clear();
}

void OldVersion::select(OldPlace place, std::uint64_t version) {
  if (version_ != version) forget();
  place_ = std::move(place);
  version_ = version;
}

void OldVersion::load() {
  if (begin_) return;
  const std::uint64_t version = version_.value();
  Chain chain = open_chain(
      place_.source, {.target = version, .has_base = !place_.base.empty(), .wait = place_.wait, .check = place_.check});
  if (const OpenVersion* const last = chain.last(); last != nullptr) facts_ = last->index.own;
  if (chain.full) newest_full_ = chain.full->number();
  std::shared_ptr<const TensorSource> begin;
  if (!place_.copy.empty()) {
    begin = tensors_of_model(place_.copy);
    chain.deltas.clear();
  } else {
    begin = chain.full ? tensors_of_version(*chain.full) : tensors_of_model(place_.base);
    (void)check_deltas(chain.deltas, begin->tensors());
  }
  specs_.clear();
  for (const TensorEntry& entry : begin->tensors()) specs_[entry.name] = {entry.dtype, entry.shape};
  deltas_ = std::move(chain.deltas);
  places_ = places_in(*begin);
  begin_ = std::move(begin);
}

void OldVersion::load_facts() noexcept {
  if (facts_ || version_.value_or(0) == 0) return;
  try {
    facts_ = open_version(place_.source, *version_).index.own;
  } catch (const std::exception& error) {
    log(LogLevel::info, fmt::format("version {} begins a new stream: {}", *version_ + 1, error.what()));
  }
}

const std::map<std::string, TensorSpec>& OldVersion::specs() {
  if (specs_.empty()) load();
  return specs_;
}

bool OldVersion::is_kept(const std::string& name) const noexcept {
  return kept_ && kept_->index_of(name);
}

void OldVersion::require(const std::vector<std::string>& names) {
  if (!std::ranges::all_of(names, [this](const std::string& name) { return is_kept(name); })) load();
}

std::unique_ptr<FoldedReader> OldVersion::reader(const std::string& name, bool is_summed) const {
  if (const auto kept = kept_ ? kept_->index_of(name) : std::nullopt)
    return std::make_unique<FoldedReader>(*kept_, *kept, std::span<const OpenVersion>(), is_summed);
  const auto place = places_.find(name);
  if (!begin_ || place == places_.end())
    throw Error(ErrorKind::not_found, fmt::format("the previous version has no tensor {}", in_quotes(name)));
  return std::make_unique<FoldedReader>(*begin_, place->second, deltas_, is_summed);
}

void OldVersion::advance(const std::vector<std::string>& names, std::map<std::string, TensorSpec> specs,
                         const OwnFacts& facts) {
  try {
    std::optional<OpenVersion> opened;
    workspace::patiently(join_path(place_.source, version_name(version_.value() + 1)),
                         {.deadline = os::Clock::now() + place_.wait, .check = place_.check},
                         [&] { opened.emplace(open_version(place_.source, version_.value() + 1)); });
    const OpenVersion& next = *opened;
    const bool is_full = next.index.kind == VersionKind::full;
    auto kept = std::make_unique<Kept>();
    // All tensors of a full version are read again: two copies in memory might be too many.
    if (is_full) kept_.reset();
    if (kept_) std::swap(kept, kept_);
    kept->retain({names.begin(), names.end()});
    // For tensors that are not in memory: where they begin, and the deltas after that.
    const std::shared_ptr<const TensorSource> from = is_full ? tensors_of_version(next) : begin_;
    if (is_full) places_ = places_in(*from);
    std::vector<OpenVersion> all;
    if (!is_full) {
      all = deltas_;
      all.push_back(next);
    }
    struct Task {
      std::size_t place = 0;
      bool is_new = true;
    };
    std::vector<Task> tasks;
    for (const std::string& name : names) {
      if (const auto place = kept->index_of(name)) {
        if (next.find(name) != nullptr) tasks.push_back({*place, false});
        continue;
      }
      tasks.push_back({kept->add(from->tensors()[places_.at(name)]), true});
    }
    parallel_for(tasks.size(), copy_workers(), [&](std::size_t number, std::size_t) {
      const Task& task = tasks[number];
      const std::string& name = kept->tensors()[task.place].name;
      FoldedReader reader(task.is_new ? *from : *kept, task.is_new ? places_.at(name) : task.place,
                          task.is_new ? std::span<const OpenVersion>(all) : std::span(&next, 1), false);
      fold_into(reader, kept->bytes(task.place), place_.check);
    });
    kept_ = std::move(kept);
    begin_.reset();
    places_.clear();
    deltas_.clear();
    specs_ = std::move(specs);
    facts_ = facts;
    ++version_.value();
    if (is_full) newest_full_ = version_;
  } catch (...) {
    forget();
    throw;
  }
}

}  // namespace muster::versions
