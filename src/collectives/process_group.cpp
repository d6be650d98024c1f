// SPDX-License-Identifier: Apache-2.0
// The calls of a ProcessGroup, and how each uses the engine.

#include "muster/process_group.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "src/collectives/engine.hpp"
#include "src/collectives/packed_config.hpp"
#include "src/group/async_executor.hpp"
#include "src/group/error_propagation.hpp"
#include "src/os/clock.hpp"
#include "src/trace/span.hpp"

namespace muster {

ProcessGroup::ProcessGroup(std::shared_ptr<Group> group, const CollectiveOptions& options)
    : engine_(std::make_shared<collectives::Engine>(std::move(group), options)) {}

ProcessGroup::ProcessGroup(Group& group, const CollectiveOptions& options)
    : ProcessGroup(group.duplicate({.timeout = options.timeout, .stop = options.stop, .phase = "process group"}),
                   options) {}

ProcessGroup::ProcessGroup(ProcessGroup&&) noexcept = default;
ProcessGroup& ProcessGroup::operator=(ProcessGroup&& other) noexcept {
  // The former state ends as in the destructor: the thread ends before the objects that it uses.
  const ProcessGroup former(std::move(*this));
  engine_ = std::move(other.engine_);
  async_ = std::move(other.async_);
  runs_in_ = std::move(other.runs_in_);
  return *this;
}
ProcessGroup::~ProcessGroup() = default;

int ProcessGroup::rank() const noexcept {
  return engine_->rank();
}
int ProcessGroup::size() const noexcept {
  return engine_->size();
}
int ProcessGroup::global_rank(int rank) const {
  return group().info(rank).global_rank;
}
std::optional<int> ProcessGroup::group_rank(int global) const noexcept {
  for (int rank = 0; rank < size(); ++rank)
    if (group().info(rank).global_rank == global) return rank;
  return std::nullopt;
}
std::string_view ProcessGroup::backend() const noexcept {
  return engine_->backend().name();
}
Group& ProcessGroup::group() const noexcept {
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
  if (received.empty()) return config;
  return std::move(received.front());
}

std::vector<Config> ProcessGroup::all_gather_config(const Config& config, const CollectiveOptions& options) {
  return engine_->configs({"all_gather_config"}, config, false, false, options);
}

std::vector<Config> ProcessGroup::gather_config(const Config& config, int root, const CollectiveOptions& options) {
  return engine_->configs({"gather_config", {}, root}, config, false, true, options);
}

struct ProcessGroup::Async {
  explicit Async(Group& group) : lane(group) {
    own.reset(new ProcessGroup(lane.own(), {}));
    own->runs_in_ = lane.tasks();
    lane.keep(own);
  }
  std::shared_ptr<ProcessGroup> own;
  group::AsyncExecutor lane;
};

void ProcessGroup::add_task(std::function<void(ProcessGroup&)> task) {
  const group::GroupLock use(group());
  if (!async_) async_ = std::make_shared<Async>(group());
  async_->lane.add([task = std::move(task), own = async_->own] { task(*own); });
}

collectives::Engine& collectives::engine_of(ProcessGroup& group) noexcept {
  return *group.engine_;
}

void ProcessGroup::pass_on_failure() noexcept {
  if (const auto tasks = runs_in_.lock())
    group::AsyncExecutor::pass_on_failure(*static_cast<group::AsyncExecutor::Tasks*>(tasks.get()));
}

// The messages of a ProcessGroup between two ranks. Tensors and Configs are sent as mail. The label of a message is its
// descriptor. If the descriptor is too long, the Config is packed as a whole.

namespace collectives {
namespace {

using group::Envelope;
using group::Mail;
static_assert(Mail::any_rank == any_rank && Mail::any_tag == any_tag);

void check_tag(int tag) {
  if (tag < 0) throw Error(ErrorKind::invalid_argument, fmt::format("tag {} must not be negative", tag));
}

void check_other(const Engine& engine, int rank, const char* verb) {
  (void)engine.group().info(rank);
  if (rank == engine.rank())
    throw Error(ErrorKind::invalid_argument,
                fmt::format("rank {} cannot {} itself", engine.group().info(rank).global_rank, verb));
}

std::shared_ptr<Mail::OutgoingMail> begin_send(Engine& engine, const Config& config, int to, int tag) {
  check_tag(tag);
  check_other(engine, to, "send to");
  PackedConfig message = packed(config);
  // The receiver stores the label of a message that it has not received yet, so its length is limited.
  constexpr std::size_t longest_label = 4096;
  if (message.descriptor.size() > longest_label) message = {{}, packed_whole(config)};
  const auto body = std::make_shared<const Tensor>(std::move(message.tensors));
  return engine.mail().send({.to = to,
                             .tag = tag,
                             .label = std::move(message.descriptor),
                             .body = body->nbytes() == 0 ? Bytes{} : body->bytes(),
                             .keeper = body});
}

std::shared_ptr<Mail::IncomingMail> begin_receive(Engine& engine, int from, int tag, Mail::Place place) {
  if (tag != any_tag) check_tag(tag);
  if (from != any_rank) check_other(engine, from, "receive from");
  if (engine.size() == 1) throw Error(ErrorKind::invalid_argument, "receive: the group has no other rank");
  return engine.mail().receive({.from = from, .tag = tag, .place = std::move(place)});
}

/// Returns the sender of a completed receive.
int sender_of(const Mail::IncomingMail& receive) {
  if (receive.error) throw Error(*receive.error);
  return receive.envelope.from;
}

/// The memory of the tensors of a Config that is being received.
using Incoming = std::shared_ptr<Tensor>;

std::shared_ptr<Mail::IncomingMail> begin_receive_config(Engine& engine, int from, int tag, const Incoming& tensors) {
  return begin_receive(engine, from, tag, [tensors](const Envelope& envelope) -> Room {
    *tensors = Tensor::allocate(DType::u8, {static_cast<std::int64_t>(envelope.bytes)});
    return room_of(*tensors);
  });
}

ReceivedConfig received(const Mail::IncomingMail& receive, const Tensor& tensors) {
  const int from = sender_of(receive);
  const Envelope& envelope = receive.envelope;
  return {from, static_cast<int>(envelope.tag),
          envelope.label.empty() ? unpacked_whole(tensors, 0, tensors.nbytes()) : unpacked(envelope.label, tensors)};
}

std::shared_ptr<Mail::IncomingMail> begin_receive_tensor(Engine& engine, const Tensor& out, int from, int tag) {
  check_on_host(out, "recv");
  (void)room_of(out);
  return begin_receive(engine, from, tag, [out, group = &engine.group()](const Envelope& envelope) -> Room {
    const TensorSpec wanted{out.dtype(), out.shape()};
    const auto sent = envelope.label.empty() ? std::nullopt : tensor_of(envelope.label);
    const int rank = group->info(envelope.from).global_rank;
    if (sent != wanted)
      throw Error(ErrorKind::rank_mismatch,
                  fmt::format("message of rank {}: expected {}, received {}", rank, to_string(wanted),
                              sent ? to_string(*sent) : "a Config"),
                  {.rank = rank});
    return room_of(out);
  });
}

// For trace spans.

/// Returns the number of the other rank in the job; -1 for any rank or none.
int number_of(const group::BaseGroup& group, int rank) {
  return rank < 0 || rank >= group.size() ? -1 : group.info(rank).global_rank;
}
std::uint64_t bytes_of(const Mail::OutgoingMail& message) {
  return message.body.size();
}
std::uint64_t bytes_of(const Mail::IncomingMail& message) {
  return message.envelope.bytes;
}

/// A message in progress. `Kind` is Mail::Outgoing or Mail::Incoming. take(message) returns the result of a completed
/// message.
template <class Result, class Kind, class Take>
class PendingMessage final : public detail::Operation<Result> {
 public:
  PendingMessage(const std::shared_ptr<Engine>& engine, std::shared_ptr<Kind> message, int other, WaitOptions options,
                 Take take)
      : engine_(engine),
        message_(std::move(message)),
        other_(other),
        options_(std::move(options)),
        take_(std::move(take)) {}

  bool wait_for(std::chrono::milliseconds time) override {
    if (message_->is_done) return true;
    const auto end = os::Clock::now() + time;
    wait([&] { return message_->is_done || os::Clock::now() >= end; });
    return message_->is_done;
  }
  Result get() override {
    if (!message_->is_done) wait([&] { return message_->is_done.load(); });
    return take_(*message_);
  }
  [[nodiscard]] bool has_ended() const noexcept override {
    const auto engine = engine_.lock();
    return message_->is_done || !engine || group::inside(engine->group()).has_failure();
  }

 private:
  void wait(const std::function<bool()>& done) {
    const auto engine = engine_.lock();
    if (!engine) throw Error(ErrorKind::invalid_argument, "Work: its group has been destroyed");
    const Engine::DeviceEnd at_end(*engine);
    const group::GroupLock use(engine->group());
    group::BaseGroup& group = group::inside(engine->group());
    trace::Span span(trace::SpanKind::message, options_.phase, group.some_operation(), number_of(group, other_));
    // Even a test without a wait must move messages.
    (void)engine->mail().step();
    engine->mail().wait(done, other_, options_);
    if (message_->is_done) span.add_bytes(bytes_of(*message_));
  }

  std::weak_ptr<Engine> engine_;
  std::shared_ptr<Kind> message_;
  int other_;
  WaitOptions options_;
  Take take_;
};

template <class Result, class Kind, class Take>
Work<Result> work_of(const std::shared_ptr<Engine>& engine, std::shared_ptr<Kind> message, int other,
                     const CollectiveOptions& options, Take take) {
  const char* const phase = std::is_same_v<Kind, Mail::OutgoingMail> ? "isend" : "irecv";
  return Work<Result>(std::make_shared<PendingMessage<Result, Kind, Take>>(engine, std::move(message), other,
                                                                           waits(options, phase), std::move(take)));
}

/// begin() returns a message, for which this function waits.
template <class Begin>
auto finished(Engine& engine, int other, const CollectiveOptions& options, const char* phase, const Begin& begin) {
  const Engine::DeviceEnd at_end(engine);
  const group::GroupLock use(engine.group());
  group::BaseGroup& group = group::inside(engine.group());
  trace::Span span(trace::SpanKind::message, phase, group.some_operation(), number_of(group, other));
  auto message = begin();
  engine.mail().wait([&] { return message->is_done.load(); }, other, waits(options, phase));
  span.add_bytes(bytes_of(*message));
  return message;
}

}  // namespace
}  // namespace collectives

using namespace collectives;  // NOLINT(google-build-using-namespace): this is its public face

void ProcessGroup::send(const TensorView& tensor, int to, int tag, const CollectiveOptions& options) {
  check_on_host(tensor, "send");
  send_config(Config(Tensor::borrow(tensor)), to, tag, options);
}

void ProcessGroup::send_config(const Config& config, int to, int tag, const CollectiveOptions& options) {
  (void)finished(*engine_, to, options, "send", [&] { return begin_send(*engine_, config, to, tag); });
}

int ProcessGroup::recv(const Tensor& out, int from, int tag, const CollectiveOptions& options) {
  return sender_of(
      *finished(*engine_, from, options, "recv", [&] { return begin_receive_tensor(*engine_, out, from, tag); }));
}

ReceivedConfig ProcessGroup::recv_message(int from, int tag, const CollectiveOptions& options) {
  const auto tensors = std::make_shared<Tensor>();
  const auto message =
      finished(*engine_, from, options, "recv", [&] { return begin_receive_config(*engine_, from, tag, tensors); });
  return received(*message, *tensors);
}

Config ProcessGroup::recv_config(int from, int tag, const CollectiveOptions& options) {
  return recv_message(from, tag, options).config;
}

std::optional<MessageInfo> ProcessGroup::probe(int from, int tag) {
  const group::GroupLock use(group());
  if (from != any_rank) check_other(*engine_, from, "receive from");
  while (engine_->mail().step()) continue;
  const Envelope* const found = engine_->mail().find(from, tag);
  if (found == nullptr) return std::nullopt;
  return MessageInfo{found->from, static_cast<int>(found->tag), found->bytes};
}

Work<void> ProcessGroup::isend(Tensor tensor, int to, int tag, const CollectiveOptions& options) {
  check_on_host(tensor, "isend");
  return isend_config(Config(std::move(tensor)), to, tag, options);
}

Work<void> ProcessGroup::isend_config(const Config& config, int to, int tag, const CollectiveOptions& options) {
  const group::GroupLock use(group());
  return work_of<void>(engine_, begin_send(*engine_, config, to, tag), to, options, [](const Mail::OutgoingMail&) {});
}

Work<int> ProcessGroup::irecv(const Tensor& out, int from, int tag, const CollectiveOptions& options) {
  const group::GroupLock use(group());
  return work_of<int>(engine_, begin_receive_tensor(*engine_, out, from, tag), from, options, sender_of);
}

Work<ReceivedConfig> ProcessGroup::irecv_config(int from, int tag, const CollectiveOptions& options) {
  const group::GroupLock use(group());
  const auto tensors = std::make_shared<Tensor>();
  return work_of<ReceivedConfig>(engine_, begin_receive_config(*engine_, from, tag, tensors), from, options,
                                 [tensors](const Mail::IncomingMail& message) { return received(message, *tensors); });
}

}  // namespace muster
