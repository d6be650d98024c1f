// SPDX-License-Identifier: Apache-2.0
// The calls of a ProcessGroup, and what each makes of the engine's.

#include "muster/process_group.hpp"

#include "src/collectives/engine.hpp"
#include "src/sync/lane.hpp"

namespace muster {

using collectives::What;

ProcessGroup::ProcessGroup(std::shared_ptr<SyncGroup> group, const CollectiveOptions& options)
    : engine_(std::make_shared<collectives::Engine>(std::move(group), options)) {}

ProcessGroup::ProcessGroup(SyncGroup& group, const CollectiveOptions& options)
    : ProcessGroup(group.duplicate({.timeout = options.timeout, .stop = options.stop, .phase = "process group"}),
                   options) {}

ProcessGroup::ProcessGroup(ProcessGroup&&) noexcept = default;
ProcessGroup& ProcessGroup::operator=(ProcessGroup&&) noexcept = default;
ProcessGroup::~ProcessGroup() = default;

int ProcessGroup::rank() const noexcept {
  return engine_->rank();
}
int ProcessGroup::size() const noexcept {
  return engine_->size();
}
int ProcessGroup::global_rank(int rank) const {
  return group().info(rank).rank;
}
std::optional<int> ProcessGroup::rank_of_global(int global) const noexcept {
  for (int rank = 0; rank < size(); ++rank)
    if (group().info(rank).rank == global) return rank;
  return std::nullopt;
}
std::string_view ProcessGroup::backend() const noexcept {
  return engine_->backend().name();
}
SyncGroup& ProcessGroup::group() const noexcept {
  return engine_->group();
}

std::unique_ptr<ProcessGroup> ProcessGroup::split(const RankList& ranks, const CollectiveOptions& options) {
  auto part = group().split(ranks, collectives::waits(options, "split"));
  if (!part) return nullptr;
  return std::unique_ptr<ProcessGroup>(new ProcessGroup(std::move(part), options));
}

void ProcessGroup::barrier(const CollectiveOptions& options) {
  engine_->barrier(options);
}

void ProcessGroup::wait_for_devices(const CollectiveOptions& options) {
  engine_->wait_for_devices(options);
}

void ProcessGroup::all_reduce(const Tensor& tensor, ReduceOp op, const CollectiveOptions& options) {
  (void)engine_->all_reduce({"all_reduce", op, {}, tensor.dtype(), &tensor.shape()}, &tensor, tensor.view(), options);
}

void ProcessGroup::all_reduce_into(const Tensor& out, const TensorView& tensor, ReduceOp op,
                                   const CollectiveOptions& options) {
  (void)engine_->all_reduce({"all_reduce", op, {}, tensor.dtype(), &tensor.shape()}, &out, tensor, options);
}

Tensor ProcessGroup::all_reduce_shared(const TensorView& tensor, ReduceOp op, const CollectiveOptions& options) {
  return engine_->all_reduce_shared({"all_reduce_shared", op, {}, tensor.dtype(), &tensor.shape()}, tensor, options);
}

Tensor ProcessGroup::all_gather_shared(const TensorView& tensor, const CollectiveOptions& options) {
  return engine_->all_gather_shared({"all_gather_shared"}, tensor, options);
}

void ProcessGroup::reduce(const Tensor& tensor, int root, ReduceOp op, const CollectiveOptions& options) {
  (void)engine_->all_reduce({"reduce", op, root, tensor.dtype(), &tensor.shape()}, &tensor, tensor.view(), options);
}

void ProcessGroup::broadcast(const Tensor& tensor, int root, const CollectiveOptions& options) {
  engine_->broadcast({"broadcast", {}, root, tensor.dtype(), &tensor.shape()}, tensor, options);
}

Tensor ProcessGroup::reduce_scatter(const TensorView& tensor, int dim, ReduceOp op, const CollectiveOptions& options) {
  return *engine_->reduce_scatter({"reduce_scatter", op}, tensor, {}, dim, options);
}

Tensor ProcessGroup::reduce_scatterv(const TensorView& tensor, std::span<const std::int64_t> sizes, int dim,
                                     ReduceOp op, const CollectiveOptions& options) {
  return *engine_->reduce_scatter({"reduce_scatterv", op}, tensor, sizes, dim, options);
}

void ProcessGroup::reduce_scatter_into(const Tensor& out, const TensorView& tensor, ReduceOp op,
                                       const CollectiveOptions& options) {
  (void)engine_->reduce_scatter({"reduce_scatter", op}, tensor, {}, 0, options, &out);
}

Tensor ProcessGroup::all_gather(const TensorView& tensor, int dim, const CollectiveOptions& options) {
  return *engine_->gather({"all_gather"}, tensor, dim, options);
}

void ProcessGroup::all_gather_into(const Tensor& out, const TensorView& tensor, const CollectiveOptions& options) {
  (void)engine_->gather({"all_gather"}, tensor, 0, options, &out);
}

void ProcessGroup::all_gather_into(std::span<const Tensor> outs, const TensorView& tensor,
                                   const CollectiveOptions& options) {
  engine_->gather_each({.name = "all_gather", .varies = true}, outs, tensor, options);
}

Tensor ProcessGroup::all_gatherv(const TensorView& tensor, int dim, std::span<const std::int64_t> sizes,
                                 const CollectiveOptions& options) {
  return *engine_->gather({.name = "all_gatherv", .varies = true, .slices = sizes}, tensor, dim, options);
}

std::optional<Tensor> ProcessGroup::gather(const TensorView& tensor, int root, int dim,
                                           const CollectiveOptions& options) {
  return engine_->gather({"gather", {}, root}, tensor, dim, options);
}

void ProcessGroup::gather_into(const Tensor& out, const TensorView& tensor, int root,
                               const CollectiveOptions& options) {
  (void)engine_->gather({"gather", {}, root}, tensor, 0, options, root == rank() ? &out : nullptr);
}

void ProcessGroup::gather_into(std::span<const Tensor> outs, const TensorView& tensor, int root,
                               const CollectiveOptions& options) {
  engine_->gather_each({.name = "gather", .root = root}, outs, tensor, options);
}

std::optional<Tensor> ProcessGroup::gatherv(const TensorView& tensor, int root, int dim,
                                            const CollectiveOptions& options) {
  return engine_->gather({.name = "gatherv", .root = root, .varies = true}, tensor, dim, options);
}

void ProcessGroup::scatter(const Tensor& out, std::span<const TensorView> parts, int root,
                           const CollectiveOptions& options) {
  engine_->scatter({"scatter", {}, root, out.dtype(), &out.shape()}, out, parts, options);
}

Tensor ProcessGroup::all_to_all(const TensorView& tensor, const CollectiveOptions& options) {
  return engine_->all_to_all(tensor, {}, nullptr, options);
}

void ProcessGroup::all_to_all_into(const Tensor& out, const TensorView& tensor, const CollectiveOptions& options) {
  (void)engine_->all_to_all(tensor, {}, nullptr, options, &out);
}

Tensor ProcessGroup::all_to_allv(const TensorView& tensor, std::span<const std::int64_t> rows,
                                 std::vector<std::int64_t>* received, const CollectiveOptions& options) {
  return engine_->all_to_all(tensor, rows, received, options);
}

Config ProcessGroup::broadcast_config(const Config& config, int root, const CollectiveOptions& options) {
  std::vector<Config> received = engine_->configs({"broadcast_config", {}, root}, config, true, false, options);
  return received.empty() ? config : std::move(received.front());
}

std::vector<Config> ProcessGroup::all_gather_config(const Config& config, const CollectiveOptions& options) {
  return engine_->configs({"all_gather_config"}, config, false, false, options);
}

std::vector<Config> ProcessGroup::gather_config(const Config& config, int root, const CollectiveOptions& options) {
  return engine_->configs({"gather_config", {}, root}, config, false, true, options);
}

struct ProcessGroup::Async {
  explicit Async(SyncGroup& group) : lane(group) {
    own.reset(new ProcessGroup(lane.own(), {}));
    own->runs_in_ = this;
  }
  std::unique_ptr<ProcessGroup> own;
  sync::Lane lane;  // ends before what its tasks use
};

void ProcessGroup::add_task(std::function<void(ProcessGroup&)> task) {
  const sync::Use use(group());
  if (!async_) async_ = std::make_shared<Async>(group());
  async_->lane.add([task = std::move(task), own = async_->own.get()] { task(*own); });
}

collectives::Engine& collectives::engine_of(ProcessGroup& group) noexcept {
  return *group.engine_;
}

void ProcessGroup::pass_on_failure() noexcept {
  runs_in_->lane.pass_on_failure();
}

}  // namespace muster
