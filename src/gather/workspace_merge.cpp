// SPDX-License-Identifier: Apache-2.0
// Merges through a workspace: the first rank reads all members' files and merges them in its memory
// (workspace_state.hpp). The others' bytes are there once as files, so nothing is gained by writing straight into the
// result as over shared memory.

#include "src/gather/merge_record.hpp"
#include "src/gather/merge_transfer.hpp"
#include "src/gather/workspace_files.hpp"
#include "src/merge/reduce.hpp"

namespace muster::gather {
namespace {

class WorkspaceMerge final : public Transfer {
 public:
  explicit WorkspaceMerge(const Call& call)
      : call_(call), state_(workspace_state_of(*call.group)), own_(call, *state_) {}

  void offer(Record& record) override {
    own_.offer(record);
    const TensorView& own = call_.value->as_tensor().view();
    record.merge = merge_number(*call_.merge);
    record.payload_bytes = record.moving_bytes = own.nbytes();
    record.closes = true;
    record.facts[fact_extent] =
        static_cast<std::uint64_t>(merge_extent(*call_.merge, TensorSpec{own.dtype(), own.shape()}));
  }
  void move(std::span<const Record> records, ExchangeReport&) override {
    if (call_.is_sender()) own_.send();
    if (!call_.is_first()) return;
    const std::vector<std::optional<Config>> others = ReceivedFiles(call_, *state_).receive(records);
    if (call_.options->keep_files) own_.send();
    std::vector<TensorView> sources{call_.value->as_tensor().view()};
    for (std::size_t position = 1; position < others.size(); ++position) {
      // A sender that failed says why in its own status.
      if (!others[position]) return;
      sources.push_back(others[position]->as_tensor().view());
    }
    result_ = merge::merge_in_memory(*call_.merge, sources, call_.list, [&] { call_.group->progress(); });
  }
  void commit() noexcept override { own_.commit(); }
  std::vector<std::optional<Config>> deliver() override {
    std::vector<std::optional<Config>> entries(1);
    entries.front() = Config(std::move(result_));
    return entries;
  }
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept override { return 0; }

 private:
  const Call& call_;
  std::shared_ptr<WorkspaceRouteState> state_;
  SentFile own_;
  Tensor result_;
};

}  // namespace

std::unique_ptr<Transfer> make_workspace_merge(const Call& call) {
  if (call.list.size() == 1 || !merge_moves(merge_number(*call.merge))) return make_unmoved_merge(call);
  return std::make_unique<WorkspaceMerge>(call);
}

}  // namespace muster::gather
