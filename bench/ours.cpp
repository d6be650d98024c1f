// SPDX-License-Identifier: Apache-2.0
#include "bench/ours.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <numeric>
#include <utility>
#include <vector>

#include "bench/harness/copy_kernels.hpp"
#include "muster/gather.hpp"

namespace bench {

namespace {

struct Ours {
  std::shared_ptr<muster::Group> group;
  muster::GatheredTensors result;
  std::vector<int> ranks;
  muster::TensorView tensor;
};

std::shared_ptr<Ours> make_ours(const Meeting& meeting, std::span<std::byte> source) {
  auto ours = std::make_shared<Ours>();
  ours->ranks.resize(static_cast<std::size_t>(meeting.size()));
  std::iota(ours->ranks.begin(), ours->ranks.end(), 0);
  ours->tensor = muster::TensorView(muster::DType::u8, {static_cast<std::int64_t>(source.size())}, source.data());
  return ours;
}

Contender contender(std::string name, const std::shared_ptr<Ours>& ours, const std::shared_ptr<PhaseLog>& phases) {
  Contender made;
  made.name = std::move(name);
  made.move = [ours] { ours->result = muster::get_tensors_parallel(ours->tensor, ours->ranks, *ours->group); };
  made.read = [ours] {
    std::uint64_t sum = 0;
    for (const auto& [rank, tensor] : ours->result.present()) {
      sum += sum_words(tensor.bytes());
    }
    return sum;
  };
  made.finish = [ours, phases] {
    phases->add(ours->result.report());
    ours->result = {};
  };
  return made;
}

}  // namespace

std::shared_ptr<muster::Group> make_group(const Meeting& meeting) {
  static int made = 0;
  // The ranks are children of one process, whose pid distinguishes this run from others.
  return muster::local_group(
      {.key = fmt::format("muster-bench-{}-{}", getppid(), made++), .rank = meeting.rank(), .size = meeting.size()});
}

Contender pooled_contender(Meeting& meeting, std::span<std::byte> source, std::shared_ptr<PhaseLog> phases,
                           int exchanges, std::shared_ptr<muster::Group> group) {
  const auto ours = make_ours(meeting, source);
  ours->group = group ? std::move(group) : make_group(meeting);
  Contender made = contender("muster", ours, phases);
  for (int i = 0; i < exchanges; ++i) {
    made.move();
    ours->result = {};
    meeting.wait();
  }
  return made;
}

Contender first_contender(Meeting& meeting, std::span<std::byte> source, std::shared_ptr<PhaseLog> phases) {
  const auto ours = make_ours(meeting, source);
  Contender made = contender("muster-first", ours, phases);
  made.prepare = [ours, &meeting] { ours->group = make_group(meeting); };
  made.finish = [ours, phases, finish = made.finish] {
    finish();
    ours->group.reset();
  };
  return made;
}

}  // namespace bench
