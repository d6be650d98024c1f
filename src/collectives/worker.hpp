// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a master and its workers say to each other, and the worker.
//
//  1. The master sends a request: an array of what to do, the number of the tensor (the master's choice), and what
//     belongs to it.
//  2. The worker does it. What fails is kept, the first time since it was last told.
//  3. To fetch, wait and stop it answers: what has failed, or the tensor that is fetched.
// Of a tensor that goes from worker to worker each of the two has a request. Requests of all workers are sent in the
// same order, so that of two that wait for each other's tensors one has come earlier, and is done by both.

#include <cstdint>
#include <map>
#include <optional>

#include "muster/config.hpp"
#include "muster/process_group.hpp"

namespace muster::collectives {

enum class Request : std::uint8_t {
  make,     // dtype, shape
  fill,     // a tensor of one element
  set,      // a tensor
  copy,     // the number of another one
  add,      // likewise
  send,     // the rank to send it to
  receive,  // the rank that it comes from
  drop,
  fetch,
  wait,
  stop,
};

inline constexpr int master_rank = 0;
inline constexpr int request_tag = 0;
inline constexpr int answer_tag = 1;
inline constexpr int tensor_tag = 2;  // from worker to worker

/// An answer of what has failed, and what it says.
Config failure_answer(const Error& error);
/// Throws what the answer of that rank tells; else gives the rest of it.
Config checked_answer(const Config& answer, const RankInfo& worker);

class Worker {
 public:
  Worker(ProcessGroup& group, const CollectiveOptions& options) : group_(group), options_(options) {}
  /// Until the master says stop.
  void serve();

 private:
  void carry_out(Request request, std::int64_t number, const Config& words);
  void answer(Request request, std::int64_t number);
  void make(std::int64_t number, DType dtype, const Shape& shape);
  void send(std::int64_t number, int to);
  void receive(std::int64_t number, int from);
  Tensor& at(std::int64_t number);

  ProcessGroup& group_;
  CollectiveOptions options_;
  std::map<std::int64_t, Tensor> tensors_;
  std::optional<Error> failed_;
};

}  // namespace muster::collectives
