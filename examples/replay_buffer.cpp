// SPDX-License-Identifier: Apache-2.0
// Learning from a replay buffer. Training ranks walk through a grid and send their walks to a buffer manager, which
// sends back moves drawn from all walks. The gradients are averaged over the training ranks. A coordinator prints the
// number of moves per walk to the goal, which decreases.
//
//   build/tools/muster run -n 6 -- build/examples/replay_buffer

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "muster/compat/roles.hpp"

namespace {

namespace roles = muster::roles;
using muster::Tensor;

// The tags of the messages.
constexpr int walk_tag = 0;     // to the manager: the moves of a walk
constexpr int request_tag = 1;  // to the manager: a request for a batch
constexpr int end_tag = 2;      // to the manager: this rank has ended
constexpr int batch_tag = 3;    // from the manager: a batch of moves
constexpr int report_tag = 4;   // to the coordinator: a Report

constexpr int steps = 2000;
constexpr int steps_per_report = 200;

struct Move {
  std::int32_t state;
  std::int32_t action;
  std::int32_t next;
};
struct Report {
  float moves;  // per walk
  float error;  // mean error of a value
};

template <class T>
Tensor to_bytes(std::span<const T> elements) {
  const auto bytes = std::as_bytes(elements);
  return Tensor::take(std::vector<std::byte>(bytes.begin(), bytes.end()));
}
template <class T>
std::vector<T> from_bytes(const Tensor& bytes) {
  std::vector<T> elements(bytes.nbytes() / sizeof(T));
  if (!elements.empty()) std::memcpy(elements.data(), bytes.data(), elements.size() * sizeof(T));
  return elements;
}

// A grid in which each walk leads from one corner to the opposite one. Each move costs 1. A move against a wall has no
// effect.
constexpr int side = 8;
constexpr int goal = side * side - 1;
constexpr int actions = 4;
constexpr int longest_walk = 500;

int moved(int state, int action) {
  const int x = state % side + (action == 0 ? 1 : action == 1 ? -1 : 0);
  const int y = state / side + (action == 2 ? 1 : action == 3 ? -1 : 0);
  return x < 0 || x == side || y < 0 || y == side ? state : x + side * y;
}

/// Returns the learnt values of the actions in a state.
std::span<const float> values_of(std::span<const float> table, int state) {
  return table.subspan(static_cast<std::size_t>(state) * actions, actions);
}

/// Takes the best action most of the time, and otherwise a random one.
std::vector<Move> walk(std::span<const float> table, std::mt19937& random) {
  std::vector<Move> moves;
  for (int state = 0; state != goal && moves.size() < longest_walk;) {
    const auto values = values_of(table, state);
    int action = static_cast<int>(std::ranges::max_element(values) - values.begin());
    if (random() % 10 == 0) action = static_cast<int>(random() % actions);
    const int next = moved(state, action);
    moves.push_back({state, action, next});
    state = next;
  }
  return moves;
}

/// Adds the gradient of each move. Returns the mean error.
float learn(std::span<const float> table, std::span<const Move> batch, std::span<float> gradient) {
  float errors = 0;
  for (const Move& move : batch) {
    const float later = move.next == goal ? 0 : std::ranges::max(values_of(table, move.next));
    const std::size_t at = static_cast<std::size_t>(move.state) * actions + static_cast<std::size_t>(move.action);
    const float error = table[at] - (-1 + 0.95F * later);
    gradient[at] += error;
    errors += std::abs(error);
  }
  return errors / static_cast<float>(std::max<std::size_t>(batch.size(), 1));
}

void train(roles::DistributedContext& context) {
  const int manager = *context.assigned_buffer();
  const int coordinator = *context.coordinator_rank();
  std::mt19937 random(static_cast<unsigned>(context.my_rank()));
  const std::vector<roles::Parameter> model = {
      {"values", Tensor::take(std::vector<float>((goal + 1) * actions)),
       Tensor::take(std::vector<float>((goal + 1) * actions))},
  };
  const std::span<float> table = model[0].value.mutable_values<float>();
  const std::span<float> gradient = model[0].gradient->mutable_values<float>();

  Report report{};
  roles::AsyncSendHandle sent;
  for (int step = 1; step <= steps; ++step) {
    const std::vector<Move> moves = walk(table, random);
    sent.wait();  // the previous walk
    sent = context.isend(to_bytes(std::span(moves)), manager, walk_tag);

    context.send(Tensor::allocate(muster::DType::u8, {0}), manager, request_tag);
    const auto batch = from_bytes<Move>(context.recv(manager, batch_tag).data);
    std::ranges::fill(gradient, 0.0F);
    report.error += learn(table, batch, gradient) / steps_per_report;
    report.moves += static_cast<float>(moves.size()) / steps_per_report;
    roles::average_gradients(model, context.train_group());
    for (std::size_t i = 0; i < table.size(); ++i) table[i] -= 0.1F * gradient[i];

    if (step % steps_per_report != 0) continue;
    context.send(to_bytes(std::span<const Report>(&report, 1)), coordinator, report_tag);
    report = {};
  }
  sent.wait();
  context.send(Tensor::allocate(muster::DType::u8, {0}), manager, end_tag);
}

void manage_buffer(roles::DistributedContext& context) {
  constexpr std::size_t room = 20'000;
  std::mt19937 random(static_cast<unsigned>(context.my_rank()));
  std::vector<Move> stored;
  std::size_t oldest = 0;
  for (std::size_t ranks = context.assigned_training_ranks().size(); ranks != 0;) {
    const auto [source, tag, data] = context.recv({}, muster::any_tag);
    if (tag == end_tag) --ranks;
    if (tag == walk_tag) {
      for (const Move& move : from_bytes<Move>(data)) {
        if (stored.size() < room)
          stored.push_back(move);
        else
          stored[oldest++ % room] = move;
      }
    }
    if (tag == request_tag) {
      std::vector<Move> batch(64);
      for (Move& move : batch) move = stored[random() % stored.size()];
      context.send(to_bytes(std::span<const Move>(batch)), source, batch_tag);
    }
  }
}

void coordinate(roles::DistributedContext& context) {
  const auto count = static_cast<float>(context.num_training_ranks());
  for (int step = steps_per_report; step <= steps; step += steps_per_report) {
    Report mean{};
    for (const int rank : context.layout().training_ranks) {
      const Report report = from_bytes<Report>(context.recv(rank, report_tag).data).at(0);
      mean.moves += report.moves / count;
      mean.error += report.error / count;
    }
    std::printf("step %4d: %.1f moves to the goal, error %.3f, %d training ranks\n", step,
                static_cast<double>(mean.moves), static_cast<double>(mean.error), context.num_training_ranks());
  }
}

void run() {
  roles::DistributedContext context = roles::initialize_distributed_compute(
      roles::default_backend, {.num_remote_buffers = 1, .num_agent_groups = 1, .use_coordinator = true});
  if (context.is_training_rank()) train(context);
  if (context.is_buffer_rank()) manage_buffer(context);
  if (context.is_coordinator_rank()) coordinate(context);
  context.barrier();  // no rank leaves while another one waits for its messages
  context.cleanup();
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "replay_buffer: %s\n", error.what());
    return 2;
  }
  return 0;
}
