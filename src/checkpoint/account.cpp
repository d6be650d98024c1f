// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/account.hpp"

#include <fmt/core.h>

#include <unordered_map>

#include "muster/error.hpp"
#include "src/core/quoted.hpp"

namespace muster {
namespace {

class Accounting {
 public:
  explicit Accounting(std::span<const RankTensors> ranks) : ranks_(ranks) {
    for (const RankTensors& rank : ranks) seen_.emplace_back(rank.tensors.size(), false);
  }

  void add(AccountedTensor& account, const SourceRef& ref) {
    const NamedSpec& tensor = ranks_[static_cast<std::size_t>(ref.rank)].tensors[ref.index];
    std::vector<bool>& seen = seen_[static_cast<std::size_t>(ref.rank)];
    if (seen[ref.index]) return;
    seen[ref.index] = true;
    account.sources.push_back({ref.rank, tensor.name, tensor.spec});
  }

  void check() const {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank)
      for (std::size_t i = 0; i < seen_[rank].size(); ++i)
        if (!seen_[rank][i])
          throw Error(ErrorKind::corrupt,
                      fmt::format("tensor {} of rank {} is in no file of the result; this is a defect of muster, and "
                                  "nothing is written",
                                  in_quotes(ranks_[rank].tensors[i].name), rank),
                      {.rank = static_cast<int>(rank)});
  }

 private:
  std::span<const RankTensors> ranks_;
  std::vector<std::vector<bool>> seen_;
};

}  // namespace

ExportAccount account_for(const MergePlan& plan, const ParallelLayout& layout, std::span<const RankTensors> ranks,
                          const Arrangement& arrangement, const ExportOutputs& outputs,
                          const std::optional<ParallelLayout>& to) {
  ExportAccount account{plan.name(), layout, to, {}, {}, 0, 0, 0, 0, outputs.files.size(), {}};
  for (const RankTensors& rank : ranks) {
    account.tensors_in += rank.tensors.size();
    for (const NamedSpec& tensor : rank.tensors) account.bytes_in += byte_size(tensor.spec.dtype, tensor.spec.shape);
  }
  std::unordered_map<std::string_view, std::string_view> files;
  for (const OutputFile& file : outputs.files) {
    account.tensors_out += file.tensors.size();
    for (const OutputTensor& tensor : file.tensors) {
      account.bytes_out += byte_size(tensor.layout.target.dtype, tensor.layout.target.shape);
      if (!to) files.emplace(tensor.name, file.name);
    }
  }
  Accounting accounting(ranks);
  for (const ArrangedTensor& tensor : arrangement.tensors) {
    AccountedTensor& item = account.tensors.emplace_back(AccountedTensor{to ? tensor.origin : tensor.name,
                                                                         tensor.origin,
                                                                         tensor.rule->number,
                                                                         std::string(action_name(tensor.rule->action)),
                                                                         tensor.layout.target,
                                                                         {},
                                                                         {}});
    if (const auto file = files.find(tensor.name); file != files.end()) item.file = file->second;
    for (const SourceRef& ref : tensor.sources) accounting.add(item, ref);
    for (const auto& set : tensor.equal)
      for (const SourceRef& ref : set) accounting.add(item, ref);
    for (const SourceRef& ref : tensor.unused) accounting.add(item, ref);
  }
  for (const DroppedTensor& tensor : arrangement.dropped) {
    AccountedTensor& item = account.dropped.emplace_back(AccountedTensor{
        {}, tensor.origin, tensor.rule->number, std::string(action_name(tensor.rule->action)), {}, {}, {}});
    for (const SourceRef& ref : tensor.sources) accounting.add(item, ref);
    if (!item.sources.empty()) item.spec = item.sources.front().spec;
  }
  accounting.check();
  return account;
}

}  // namespace muster
