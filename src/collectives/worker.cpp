// SPDX-License-Identifier: Apache-2.0
#include "src/collectives/worker.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "src/merge/reduce.hpp"
#include "src/os/shared_memory.hpp"
#include "src/sync/failing.hpp"

namespace muster::collectives {

Config failure_answer(const Error& error) {
  return Config::array({static_cast<int>(error.kind()), error.what()});
}

Config checked_answer(const Config& answer, const RankInfo& worker) {
  if (answer.size() == 1) return answer.at(0);
  const Error error(static_cast<ErrorKind>(answer.at(0).as_int()), answer.at(1).as_string());
  throw sync::in_name_of(worker, error);
}

void Worker::serve() {
  for (;;) {
    const Config message = group_.recv_config(master_rank, request_tag, options_);
    const auto request = static_cast<Request>(message.at(0).as_int());
    const std::int64_t number = message.at(1).as_int();
    // What fails the group is thrown.
    const auto error = sync::attempt(group_.group(), [&] { carry_out(request, number, message); });
    if (error && !failed_) failed_ = error;
    if (request == Request::stop) tensors_.clear();
    if (request == Request::fetch || request == Request::wait || request == Request::stop) answer(request, number);
    if (request == Request::stop) return;
  }
}

void Worker::carry_out(Request request, std::int64_t number, const Config& message) {
  switch (request) {
    case Request::make: {
      Shape shape;
      for (const Config& extent : message.at(3).as_array()) shape.push_back(extent.as_int());
      return make(number, static_cast<DType>(message.at(2).as_int()), shape);
    }
    case Request::fill: {
      const Tensor& tensor = at(number);
      if (tensor.nbytes() == 0) return;
      std::byte* const data = tensor.mutable_data();
      copy_contiguous(message.at(2).as_tensor(), data);
      // Twice as much of it each time.
      for (std::size_t done = message.at(2).as_tensor().nbytes(); done < tensor.nbytes(); done *= 2)
        std::memcpy(data + done, data, std::min(done, tensor.nbytes() - done));
      return;
    }
    case Request::set:
      return copy_contiguous(message.at(2).as_tensor(), at(number).mutable_data());
    case Request::copy:
      return copy_contiguous(at(message.at(2).as_int()), at(number).mutable_data());
    case Request::add: {
      const Tensor& to = at(number);
      const std::array<const std::byte*, 2> both{to.data(), at(message.at(2).as_int()).data()};
      merge::check_reducible(merge::Combine::sum, to.dtype());
      if (to.nbytes() != 0)
        merge::reduce(merge::Combine::sum, to.dtype(), std::span(to.mutable_data(), to.nbytes()), both);
      return;
    }
    case Request::send:
      return send(number, message.at(2).as<int>());
    case Request::receive:
      return receive(number, message.at(2).as<int>());
    case Request::drop:
      tensors_.erase(number);
      return;
    case Request::fetch:
      (void)at(number);
      return;
    case Request::wait:
    case Request::stop:
      return;
  }
  throw Error(ErrorKind::corrupt, "the master asks for what this version cannot do");
}

void Worker::answer(Request request, std::int64_t number) {
  Config answer = Config::array({Config()});
  if (failed_)
    answer = failure_answer(*failed_);
  else if (request == Request::fetch)
    answer = Config::array({Config(at(number))});
  failed_.reset();
  group_.send_config(answer, master_rank, answer_tag, options_);
}

void Worker::make(std::int64_t number, DType dtype, const Shape& shape) {
  // More than a machine has may be given all the same, and the process ended when it writes there.
  constexpr std::size_t large = 64 << 20;
  const std::size_t bytes = byte_size(dtype, shape);
  if (bytes >= large)
    if (const std::uint64_t available = os::memory_headroom(os::Backing::anonymous).bytes; bytes > available)
      throw Error(ErrorKind::no_space, fmt::format("a tensor {} needs {} bytes, {} are available",
                                                   to_string(TensorSpec{dtype, shape}), bytes, available));
  const Tensor tensor = Tensor::allocate(dtype, shape);
  if (bytes != 0) std::memset(tensor.mutable_data(), 0, bytes);
  tensors_[number] = tensor;
}

// Whoever is to receive waits for a message, whether there is a tensor or not.

void Worker::send(std::int64_t number, int to) {
  const auto found = tensors_.find(number);
  const Config message = found == tensors_.end() ? Config() : Config(found->second);
  group_.send_config(message, to, tensor_tag, options_);
  (void)at(number);
}

void Worker::receive(std::int64_t number, int from) {
  const Config message = group_.recv_config(from, tensor_tag, options_);
  Tensor& tensor = at(number);
  if (!message.is_tensor())
    throw Error(ErrorKind::not_found, fmt::format("rank {} has no tensor to copy from", group_.global_rank(from)));
  tensor = message.as_tensor();
}

Tensor& Worker::at(std::int64_t number) {
  const auto found = tensors_.find(number);
  if (found == tensors_.end())
    throw Error(ErrorKind::not_found, fmt::format("there is no tensor {}: it could not be made, or is of a time before "
                                                  "shutdown()",
                                                  number));
  return found->second;
}

}  // namespace muster::collectives
