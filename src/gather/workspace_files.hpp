// SPDX-License-Identifier: Apache-2.0
#pragma once
// Steps 2 to 4 of workspace_state.hpp: what transfers of any kind do with files.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/state.hpp"
#include "src/gather/workspace_state.hpp"

namespace muster::gather {

/// A member's own value as a file.
class SentFile {
 public:
  SentFile(const Call& call, WorkspaceRouteState& state) : call_(call), state_(state) {}
  /// Before round 1: what there is to write. Throws Error(argument) on a tree that cannot be.
  void offer(Record& record);
  /// Writes it and tells the first rank, where this rank is not the first. Throws Error(no_space | io | unsupported).
  void send();
  /// It has been read: it goes, unless it is to stay.
  void commit() noexcept;
  /// Of a part of a stream, after commit(): the first rank removes it.
  [[nodiscard]] std::unique_ptr<Obligation> obligation();

 private:
  void write(const std::string& path);

  const Call& call_;
  WorkspaceRouteState& state_;
  State value_;
  PassingFile file_;
};

/// What the first rank takes in.
class ReceivedFiles {
 public:
  ReceivedFiles(const Call& call, WorkspaceRouteState& state) : call_(call), state_(state) {}
  /// The values of all members that have one, by position; the first rank's own place stays empty. Throws what failed
  /// first, after all messages were taken.
  std::vector<std::optional<Config>> receive(std::span<const Record> records);

 private:
  [[nodiscard]] std::string take_name(int sender) const;
  [[nodiscard]] Config read(int sender, const std::string& name) const;

  const Call& call_;
  WorkspaceRouteState& state_;
};

}  // namespace muster::gather
