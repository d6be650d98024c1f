// SPDX-License-Identifier: Apache-2.0
#pragma once
// State files and workspaces as tensors to be looked at.

#include <memory>
#include <string>
#include <vector>

#include "muster/state_file.hpp"
#include "src/inspect/tensor_source.hpp"

namespace muster::inspect {

/// A complete state file, read in pieces.
class StateSource : public TensorSource {
 public:
  explicit StateSource(StateFile file);
  [[nodiscard]] const std::vector<TensorEntry>& tensors() const noexcept override { return entries_; }
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const noexcept override {
    return file_.find(name);
  }
  [[nodiscard]] std::unique_ptr<PieceBytes> read(std::size_t tensor, std::uint64_t offset,
                                                 std::uint64_t length) const override;
  [[nodiscard]] std::map<std::string, std::string> metadata() const override { return {}; }
  [[nodiscard]] std::string_view kind() const noexcept override { return "state"; }
  [[nodiscard]] std::vector<SourceFile> files() const override;
  [[nodiscard]] TensorDetail detail(std::size_t tensor) const override;
  [[nodiscard]] std::optional<std::string> config_text() const override { return file_.config_text(); }
  [[nodiscard]] std::vector<std::pair<std::string, Config>> facts() const override;

  [[nodiscard]] const StateFile& file() const noexcept { return file_; }

 private:
  StateFile file_;
  std::vector<TensorEntry> entries_;
};

/// The states of a workspace that the options mean, without a plan. Throws as choose_states and StateFile::open.
std::unique_ptr<TensorSource> open_states(const std::string& workspace, const StateChoice& choice);

}  // namespace muster::inspect
