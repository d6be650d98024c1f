// SPDX-License-Identifier: Apache-2.0
// A ProcessGroup's messages from rank to rank: tensors and Configs as mail. A message's label is its descriptor; one
// with a longer descriptor than fits is packed as a whole.

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "muster/process_group.hpp"
#include "src/collectives/engine.hpp"
#include "src/collectives/packed_config.hpp"
#include "src/sync/failing.hpp"
#include "src/trace/span.hpp"

namespace muster {
namespace collectives {
namespace {

void check_tag(int tag) {
  if (tag < 0) throw Error(ErrorKind::argument, fmt::format("a message cannot have the tag {}: 0 or more", tag));
}

void check_other(const Engine& engine, int rank, const char* verb) {
  (void)engine.group().info(rank);
  if (rank == engine.rank())
    throw Error(ErrorKind::argument, fmt::format("rank {} cannot {} itself", engine.group().info(rank).rank, verb));
}

std::shared_ptr<Mail::Sending> begin_send(Engine& engine, const Config& config, int to, int tag) {
  check_tag(tag);
  check_other(engine, to, "send to");
  PackedConfig message = packed(config);
  // A label comes with the announcement, which is one packet.
  if (message.descriptor.size() > sync::inside(engine.group()).longest_packet()) message = {{}, packed_whole(config)};
  const auto body = std::make_shared<const Tensor>(std::move(message.tensors));
  return engine.mail().send({.to = to,
                             .tag = tag,
                             .label = std::move(message.descriptor),
                             .body = body->nbytes() == 0 ? Bytes{} : body->bytes(),
                             .keeper = body});
}

std::shared_ptr<Mail::Receiving> begin_receive(Engine& engine, int from, int tag, Mail::Place place) {
  if (tag != any_tag) check_tag(tag);
  if (from != any_rank) check_other(engine, from, "receive from");
  if (engine.size() == 1) throw Error(ErrorKind::argument, "there is no other rank to receive from");
  return engine.mail().receive({.from = from, .tag = tag, .place = std::move(place)});
}

/// Of a receive that is done: from whom.
int sender_of(const Mail::Receiving& receive) {
  if (receive.error) throw Error(*receive.error);
  return receive.envelope.from;
}

/// A Config on its way: its tensors' memory.
using Incoming = std::shared_ptr<Tensor>;

std::shared_ptr<Mail::Receiving> begin_receive_config(Engine& engine, int from, int tag, const Incoming& tensors) {
  return begin_receive(engine, from, tag, [tensors](const Envelope& envelope) -> Room {
    *tensors = Tensor::allocate(DType::u8, {static_cast<std::int64_t>(envelope.bytes)});
    return room_of(*tensors);
  });
}

ReceivedConfig received(const Mail::Receiving& receive, const Tensor& tensors) {
  const int from = sender_of(receive);
  const Envelope& envelope = receive.envelope;
  return {from, static_cast<int>(envelope.tag),
          envelope.label.empty() ? unpacked_whole(tensors, 0, tensors.nbytes()) : unpacked(envelope.label, tensors)};
}

std::shared_ptr<Mail::Receiving> begin_receive_tensor(Engine& engine, const Tensor& out, int from, int tag) {
  check_on_host(out, "recv");
  (void)room_of(out);
  return begin_receive(engine, from, tag, [out, group = &engine.group()](const Envelope& envelope) -> Room {
    const TensorSpec wanted{out.dtype(), out.shape()};
    const auto sent = envelope.label.empty() ? std::nullopt : tensor_of(envelope.label);
    const int rank = group->info(envelope.from).rank;
    if (sent != wanted)
      throw Error(ErrorKind::rank_mismatch,
                  fmt::format("rank {} has sent {} where {} was to be received", rank,
                              sent ? to_string(*sent) : "a Config", to_string(wanted)),
                  {.rank = rank});
    return room_of(out);
  });
}

// For spans.

/// What the job calls the other rank; -1: any, or none.
int number_of(const sync::Group& group, int rank) {
  return rank < 0 || rank >= group.size() ? -1 : group.info(rank).rank;
}
std::uint64_t bytes_of(const Mail::Sending& message) {
  return message.body.size();
}
std::uint64_t bytes_of(const Mail::Receiving& message) {
  return message.envelope.bytes;
}

/// A message under way: `Kind` is Mail::Sending or Mail::Receiving; take(message) gives the result of one that is done.
template <class Result, class Kind, class Take>
class Message final : public detail::Operation<Result> {
 public:
  Message(const std::shared_ptr<Engine>& engine, std::shared_ptr<Kind> message, int other, WaitOptions options,
          Take take)
      : engine_(engine),
        message_(std::move(message)),
        other_(other),
        options_(std::move(options)),
        take_(std::move(take)) {}

  bool wait_for(std::chrono::milliseconds time) override {
    if (message_->is_done) return true;
    const auto end = std::chrono::steady_clock::now() + time;
    wait([&] { return message_->is_done || std::chrono::steady_clock::now() >= end; });
    return message_->is_done;
  }
  Result get() override {
    if (!message_->is_done) wait([&] { return message_->is_done; });
    return take_(*message_);
  }

 private:
  void wait(const std::function<bool()>& done) {
    const auto engine = engine_.lock();
    if (!engine) throw Error(ErrorKind::argument, "the group of this Work has been destroyed");
    const Engine::DeviceEnd at_end(*engine);
    const sync::Use use(engine->group());
    sync::Group& group = sync::inside(engine->group());
    trace::Span span(trace::Kind::message, options_.phase, group.some_operation(), number_of(group, other_));
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
  const char* const phase = std::is_same_v<Kind, Mail::Sending> ? "isend" : "irecv";
  return Work<Result>(std::make_unique<Message<Result, Kind, Take>>(engine, std::move(message), other,
                                                                    waits(options, phase), std::move(take)));
}

/// begin() gives a message, which is waited for.
template <class Begin>
auto finished(Engine& engine, int other, const CollectiveOptions& options, const char* phase, const Begin& begin) {
  const Engine::DeviceEnd at_end(engine);
  const sync::Use use(engine.group());
  sync::Group& group = sync::inside(engine.group());
  trace::Span span(trace::Kind::message, phase, group.some_operation(), number_of(group, other));
  auto message = begin();
  engine.mail().wait([&] { return message->is_done; }, other, waits(options, phase));
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
  const sync::Use use(group());
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
  const sync::Use use(group());
  return work_of<void>(engine_, begin_send(*engine_, config, to, tag), to, options, [](const Mail::Sending&) {});
}

Work<int> ProcessGroup::irecv(const Tensor& out, int from, int tag, const CollectiveOptions& options) {
  const sync::Use use(group());
  return work_of<int>(engine_, begin_receive_tensor(*engine_, out, from, tag), from, options, sender_of);
}

Work<ReceivedConfig> ProcessGroup::irecv_config(int from, int tag, const CollectiveOptions& options) {
  const sync::Use use(group());
  const auto tensors = std::make_shared<Tensor>();
  return work_of<ReceivedConfig>(engine_, begin_receive_config(*engine_, from, tag, tensors), from, options,
                                 [tensors](const Mail::Receiving& message) { return received(message, *tensors); });
}

}  // namespace muster
