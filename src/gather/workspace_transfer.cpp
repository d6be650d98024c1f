// SPDX-License-Identifier: Apache-2.0
// Configs and tensors through a workspace (workspace_state.hpp).

#include "src/gather/merge_transfer.hpp"
#include "src/gather/workspace_files.hpp"

namespace muster::gather {
namespace {

class WorkspaceTransfer final : public Transfer {
 public:
  explicit WorkspaceTransfer(const Call& call) : call_(call), state_(workspace_state_of(*call.group)) {
    if (call.value != nullptr && call.is_member()) own_.emplace(call, *state_);
  }

  void offer(Record& record) override {
    if (own_) own_->offer(record);
  }
  void move(std::span<const Record> records, ExchangeReport&) override {
    const bool writes = own_ && (call_.is_sender() || call_.options->keep_files);
    if (writes && call_.is_sender()) own_->send();
    if (!call_.is_first()) return;
    entries_ = ReceivedFiles(call_, *state_).receive(records);
    if (writes) own_->send();
  }
  void commit() noexcept override {
    if (own_) own_->commit();
  }
  std::vector<std::optional<Config>> deliver() override {
    if (entries_.empty()) entries_.resize(call_.list.size());
    return std::move(entries_);
  }
  std::vector<std::unique_ptr<Obligation>> obligations() override {
    std::vector<std::unique_ptr<Obligation>> all;
    if (own_ && call_.is_part && call_.is_sender()) all.push_back(own_->obligation());
    return all;
  }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override { return 0; }

 private:
  const Call& call_;
  std::shared_ptr<WorkspaceRouteState> state_;
  std::optional<SentFile> own_;
  std::vector<std::optional<Config>> entries_;
};

}  // namespace

std::unique_ptr<Transfer> make_workspace_transfer(const Call& call) {
  return std::make_unique<WorkspaceTransfer>(call);
}

}  // namespace muster::gather
