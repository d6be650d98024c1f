// SPDX-License-Identifier: Apache-2.0
// Writers of a state file killed at random moments: `state_file_kill_campaign [COUNT] [SEED]`. Half of them create a
// file, half replace an earlier step; plain, compressed and in pieces. A reader opens the file repeatedly during
// the write, and once more after the kill. It must find the earlier state complete, the new one complete, or no file if
// there was none. A leftover file must have the name of a leftover, and no reader may accept it as a state unless it is
// complete.

#include <fmt/core.h>
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <random>

#include "muster/error.hpp"
#include "src/os/file.hpp"
#include "src/os/publish.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/state_files.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster;
using namespace muster::test;
namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;

enum class Way : std::uint8_t { plain, compressed, pieces };

/// Tensors that differ between steps.
std::vector<NamedTensor> state_of(std::uint64_t step) {
  return {{"weight", pattern(DType::bf16, {500, 1000}, step)},
          {"sparse", zeros({300, 500})},
          {"bias", pattern(DType::f32, {77}, step + 1)},
          {"normal", normal_weights({100, 300}, static_cast<unsigned>(step))},
          {"scale", pattern(DType::f32, {}, step + 2)}};
}

StateFileOptions options_of(std::uint64_t step, Way way) {
  StateFileOptions options{.info = {.step = step}, .chunk_bytes = 50'000};
  if (way == Way::compressed) options.zstd_level = 1;
  return options;
}

void write(const std::string& path, std::uint64_t step, Way way) {
  const std::vector<NamedTensor> tensors = state_of(step);
  const StateFileOptions options = options_of(step, way);
  const Config config = Config::object({{"generation", static_cast<std::int64_t>(step)}});
  if (way != Way::pieces) return write_state_file(path, config, tensors, options);
  StateFileWriter writer(path, config, entries_of(tensors), options);
  // Writes back to front, so that the checksums are computed from bytes read back.
  for (std::size_t i = tensors.size(); i-- > 0;) {
    const auto bytes = tensors[i].second.bytes();
    for (std::size_t end = bytes.size(); end > 0;) {
      const std::size_t begin = end > 100'000 ? end - 100'000 : 0;
      writer.write(i, begin, bytes.subspan(begin, end - begin));
      end = begin;
    }
  }
  writer.commit();
}

/// Returns the complete step that a reader finds; 0: no file. Throws on anything else.
std::uint64_t generation_at(const std::string& path) {
  std::optional<StateFile> file;
  try {
    file = StateFile::open(path);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::not_found) return 0;
    throw;
  }
  const std::uint64_t step = file->info().step;
  if (const auto problems = file->check(); !problems.empty())
    throw std::runtime_error(fmt::format("{}: {}", problems[0].tensor, problems[0].words));
  if (!holds(*file, state_of(step))) throw std::runtime_error("its tensors are not its step's");
  if (file->config().at("generation").as_int() != static_cast<std::int64_t>(step))
    throw std::runtime_error("its config is not its step's");
  return step;
}

struct Tally {
  int failures = 0;
  int kept = 0;      // kills after which the earlier state, or no file, remained
  int replaced = 0;  // kills after which the new state was in place
  int rests = 0;
  std::uint64_t looks = 0;
};

class Campaign {
 public:
  explicit Campaign(unsigned seed) : random_(seed) {}

  void kill_one(int number) {
    const Way way = static_cast<Way>(random_() % 3);
    const std::uint64_t before = random_() % 2 == 0 ? 0 : 2 * static_cast<std::uint64_t>(number) + 1;
    const std::uint64_t after = 2 * static_cast<std::uint64_t>(number) + 2;
    const std::string path = work_ / fmt::format("state-{}", number);
    if (before != 0)
      write_state_file(path, Config::object({{"generation", static_cast<std::int64_t>(before)}}), state_of(before),
                       {.info = {.step = before}, .durable = false});
    // Most delays fall into the write. The longest recent writer sets the range.
    const auto delay = std::chrono::microseconds(random_() % static_cast<std::uint64_t>(longest_.count()));
    const auto begin = Clock::now();
    Ranks writer(1, [&](int) { write(path, after, way); });
    while (Clock::now() - begin < delay) look(number, path, before, after);
    writer.signal(0, SIGKILL);
    const std::vector<Ended> ended = writer.wait();
    if (ended[0].signal != SIGKILL && !ended[0].ok()) fail(number, "the writer ended with: " + ended[0].words);
    const std::uint64_t found = look(number, path, before, after);
    ++(found == after ? tally_.replaced : tally_.kept);
    if (ended[0].ok() && found != after) fail(number, "the writer has finished, and its state does not exist");
    // Adapts the range: it shrinks when writers finish, and grows when they are killed.
    if (ended[0].ok()) longest_ = std::max(longest_ * 9 / 10, std::chrono::microseconds(10'000));
    if (!ended[0].ok()) longest_ = std::min(longest_ * 21 / 20, std::chrono::microseconds(500'000));
    sweep(number, path, after);
  }

  [[nodiscard]] const Tally& tally() const { return tally_; }

 private:
  void fail(int number, const std::string& words) {
    fmt::print("kill {}: {}\n", number, words);
    ++tally_.failures;
  }

  std::uint64_t look(int number, const std::string& path, std::uint64_t before, std::uint64_t after) {
    ++tally_.looks;
    try {
      const std::uint64_t found = generation_at(path);
      if (found != before && found != after) fail(number, fmt::format("generation {} is there", found));
      return found;
    } catch (const std::exception& error) {
      fail(number, error.what());
      return 0;
    }
  }

  void sweep(int number, const std::string& path, std::uint64_t after) {
    fs::remove(path);
    for (const auto& entry : fs::directory_iterator(work_.path())) {
      ++tally_.rests;
      if (!os::is_partial_name(entry.path().filename().string()))
        fail(number, "it left " + entry.path().filename().string());
      try {
        if (generation_at(entry.path().string()) != after) fail(number, "what it left is an earlier state");
      } catch (const Error&) {
        // Incomplete, and detected as such.
      } catch (const std::exception& error) {
        fail(number, fmt::format("what it left looks whole and is not: {}", error.what()));
      }
      fs::remove(entry.path());
    }
  }

  TemporaryDirectory work_;
  std::mt19937_64 random_;
  std::chrono::microseconds longest_{60'000};
  Tally tally_;
};

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 25;
  Campaign campaign(argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1);
  for (int i = 0; i < count; ++i) campaign.kill_one(i);
  const Tally& tally = campaign.tally();
  fmt::print("{} writers killed: {} failures; {} before their state was there, {} after; {} left a rest; {} looks\n",
             count, tally.failures, tally.kept, tally.replaced, tally.rests, tally.looks);
  return tally.failures == 0 ? 0 : 1;
}
