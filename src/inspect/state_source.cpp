// SPDX-License-Identifier: Apache-2.0
#include "src/inspect/state_source.hpp"

#include <fmt/core.h>

#include <utility>

#include "src/workspace/names.hpp"

namespace muster::inspect {
namespace {

/// The states of several ranks, each tensor under "rankR/NAME".
class RanksSource : public TensorSource {
 public:
  explicit RanksSource(std::vector<StateFile> files) {
    for (StateFile& file : files) {
      const std::string before = fmt::format("rank{}/", file.info().rank);
      ranks_.emplace_back(std::move(file));
      const std::vector<TensorEntry>& tensors = ranks_.back().tensors();
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        TensorEntry& entry = entries_.emplace_back(tensors[i]);
        entry.name = before + entry.name;
        places_.emplace_back(ranks_.size() - 1, i);
      }
    }
    for (std::size_t i = 0; i < entries_.size(); ++i) index_.emplace(entries_[i].name, i);
  }
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return entries_; }
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const noexcept override {
    const auto found = index_.find(name);
    if (found == index_.end()) return std::nullopt;
    return found->second;
  }
  [[nodiscard]] std::unique_ptr<PieceBytes> read(std::size_t tensor, std::uint64_t offset,
                                                 std::uint64_t length) const override {
    return ranks_[places_[tensor].first].read(places_[tensor].second, offset, length);
  }
  [[nodiscard]] std::map<std::string, std::string> metadata() const override { return {}; }
  [[nodiscard]] std::string_view kind() const noexcept override { return "workspace"; }
  [[nodiscard]] std::vector<SourceFile> files() const override {
    std::vector<SourceFile> files;
    for (const StateSource& rank : ranks_)
      for (SourceFile& file : rank.files()) files.push_back(std::move(file));
    return files;
  }
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override {
    return ranks_[places_[tensor].first].detail(places_[tensor].second);
  }
  /// An object of all ranks' configs: {"rank0": ..., "rank1": ...}.
  [[nodiscard]] std::optional<std::string> config_text() const override {
    std::string out;
    for (const StateSource& rank : ranks_)
      out += fmt::format("{}\"rank{}\":{}", out.empty() ? "" : ",", rank.file().info().rank, rank.file().config_text());
    return "{" + out + "}";
  }
  [[nodiscard]] std::vector<std::pair<std::string, Config>> facts() const override {
    const StateFileInfo& info = ranks_.front().file().info();
    ConfigArray generations;
    for (const StateSource& rank : ranks_) generations.emplace_back(rank.file().info().generation);
    return {{"job", Config(workspace::job_text(info.job))},
            {"ranks", Config(std::uint64_t{ranks_.size()})},
            {"world_size", Config(info.world_size)},
            {"generations", Config(std::move(generations))}};
  }
  [[nodiscard]] std::vector<SourceIssue> reader_issues() const override {
    std::vector<SourceIssue> issues;
    const StateFileInfo& info = ranks_.front().file().info();
    if (static_cast<std::size_t>(info.world_size) != ranks_.size())
      issues.push_back(
          {"missing", "", fmt::format("complete states of {} of {} ranks are there", ranks_.size(), info.world_size)});
    for (const StateSource& rank : ranks_)
      if (rank.file().info().generation != info.generation)
        issues.push_back({"generation", "",
                          fmt::format("rank {} has generation {}, rank {} has {}", info.rank, info.generation,
                                      rank.file().info().rank, rank.file().info().generation)});
    return issues;
  }

 private:
  std::vector<StateSource> ranks_;
  std::vector<TensorEntry> entries_;
  std::vector<std::pair<std::size_t, std::size_t>> places_;  // rank's place, tensor's place
  std::unordered_map<std::string_view, std::size_t> index_;
};

}  // namespace

StateSource::StateSource(StateFile file) : file_(std::move(file)) {
  entries_.reserve(file_.tensors().size());
  for (const StateTensor& tensor : file_.tensors())
    entries_.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.offset, tensor.bytes});
}

std::unique_ptr<PieceBytes> StateSource::read(std::size_t tensor, std::uint64_t offset, std::uint64_t length) const {
  std::vector<std::byte> bytes(length);
  file_.read(tensor, offset, bytes);
  return std::make_unique<PieceBytes>(std::move(bytes));
}

std::vector<SourceFile> StateSource::files() const {
  SourceFile out{file_.path(), 0, entries_.size()};
  for (const TensorEntry& entry : entries_) out.bytes += entry.bytes;
  return {out};
}

TensorDetail StateSource::detail(std::size_t tensor) const {
  const StateTensor& entry = file_.tensors()[tensor];
  return {file_.path(), entry.stored_bytes, entry.compressed, entry.checksum};
}

std::vector<std::pair<std::string, Config>> StateSource::facts() const {
  const StateFileInfo& info = file_.info();
  return {{"job", Config(workspace::job_text(info.job))},
          {"generation", Config(info.generation)},
          {"rank", Config(info.rank)},
          {"world_size", Config(info.world_size)},
          {"format_version", Config(std::uint64_t{file_.format_version()})},
          {"file_bytes", Config(file_.file_bytes())}};
}

std::unique_ptr<TensorSource> open_states(const std::string& workspace, const StateChoice& choice) {
  const ChosenStates chosen = choose_states(workspace, choice);
  std::vector<StateFile> files;
  files.reserve(chosen.states.size());
  for (const ChosenState& state : chosen.states) files.push_back(StateFile::open(state.path));
  if (chosen.world_size == 1 || choice.rank) return std::make_unique<StateSource>(std::move(files.front()));
  return std::make_unique<RanksSource>(std::move(files));
}

}  // namespace muster::inspect
