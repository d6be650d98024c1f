// SPDX-License-Identifier: Apache-2.0
// Live exports beside what they replace: a model of Llama's pattern in BF16, with tensor parallelism over the ranks
// (rows, columns, norms on all ranks), becomes one file. Every method runs once per round, in random order. Prints one
// JSON line per method with all samples, and a table of medians (least to most). "stall" is how long the call kept the
// slowest rank; "copy" is how long the ranks need to copy their parts into warm memory together.

#include <fcntl.h>
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/harness/measure.hpp"
#include "bench/harness/options.hpp"
#include "bench/harness/ranks.hpp"
#include "bench/ours.hpp"
#include "muster/gather_each.hpp"
#include "muster/live_export.hpp"
#include "muster/safetensors.hpp"

namespace {

using muster::DType;
using muster::Tensor;

struct Settings {
  int ranks = 4;
  std::uint64_t mib = 1110;
  int rounds = 10;
  std::string folder = ".";
};

struct Piece {
  std::string name;
  muster::Shape whole;
  int dim = -1;  // -1: every rank has all of it
  Tensor mine;
  std::int64_t begin = 0;  // along `dim`
};

constexpr std::int64_t hidden = 2048;
constexpr std::int64_t inner = 5632;
constexpr std::int64_t vocabulary = 32000;

std::vector<Piece> model_of(std::uint64_t mib, int rank, int ranks) {
  std::vector<Piece> pieces;
  std::uint64_t bytes = 0;
  const auto add = [&](std::string name, muster::Shape whole, int dim) {
    Piece piece{std::move(name), whole, dim, {}, 0};
    if (dim >= 0) {
      std::int64_t& extent = whole[static_cast<std::size_t>(dim)];
      piece.begin = extent * rank / ranks;
      extent = extent * (rank + 1) / ranks - piece.begin;
    }
    bytes += muster::byte_size(DType::bf16, piece.whole);
    piece.mine = Tensor::allocate(DType::bf16, whole);
    std::mt19937_64 random(pieces.size() * 64 + (dim < 0 ? 0 : static_cast<unsigned>(rank)));
    std::byte* const data = piece.mine.mutable_data();
    for (std::size_t at = 0; at + 8 <= piece.mine.nbytes(); at += 8) {
      const std::uint64_t word = random();
      std::memcpy(data + at, &word, 8);
    }
    pieces.push_back(std::move(piece));
  };
  const std::uint64_t wanted = mib << 20;
  const std::int64_t rows = wanted > (512U << 20) ? vocabulary : vocabulary / 32;
  add("model.embed_tokens.weight", {rows, hidden}, 0);
  add("lm_head.weight", {rows, hidden}, 0);
  add("model.norm.weight", {hidden}, -1);
  for (int i = 0; bytes < wanted; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    add(layer + "input_layernorm.weight", {hidden}, -1);
    add(layer + "self_attn.q_proj.weight", {hidden, hidden}, 0);
    add(layer + "self_attn.k_proj.weight", {hidden / 4, hidden}, 0);
    add(layer + "self_attn.v_proj.weight", {hidden / 4, hidden}, 0);
    add(layer + "self_attn.o_proj.weight", {hidden, hidden}, 1);
    add(layer + "mlp.gate_proj.weight", {inner, hidden}, 0);
    add(layer + "mlp.up_proj.weight", {inner, hidden}, 0);
    add(layer + "mlp.down_proj.weight", {hidden, inner}, 1);
  }
  return pieces;
}

struct Times {
  double total = 0;
  double stall = 0;
};

class LiveBench {
 public:
  LiveBench(bench::Meeting& meeting, const Settings& settings)
      : meeting_(meeting),
        settings_(settings),
        model_(model_of(settings.mib, meeting.rank(), meeting.size())),
        group_(bench::make_group(meeting)),
        out_(settings.folder + "/live-export-bench") {
    for (const Piece& piece : model_) {
      muster::TensorPart part{piece.name, piece.mine};
      if (piece.dim >= 0) {
        part.whole = piece.whole;
        part.offset.assign(piece.whole.size(), 0);
        part.offset[static_cast<std::size_t>(piece.dim)] = piece.begin;
      }
      parts_.push_back(std::move(part));
      bytes_ += muster::byte_size(DType::bf16, piece.whole);
      mine_ += piece.mine.nbytes();
    }
  }

  void run() {
    using muster::Writers;
    const std::vector<std::pair<std::string, std::function<void(Times&)>>> methods = {
        {"plain", [&](Times&) { write_plainly(false); }},
        {"plain, reserved", [&](Times&) { write_plainly(true); }},
        {"gather_each", [&](Times&) { gather(); }},
        {"live, rank0", [&](Times&) { muster::export_model(parts_, out_, "", *group_, options(Writers::rank0)); }},
        {"live, all", [&](Times&) { muster::export_model(parts_, out_, "", *group_, options(Writers::all)); }},
        {"live, async",
         [&](Times& times) {
           const std::int64_t begin = bench::now_ns();
           auto work = muster::export_model_async(parts_, out_, "", *group_, options(Writers::all));
           times.stall = slowest(static_cast<double>(bench::now_ns() - begin) * 1e-9);
           (void)work.get();
         }},
        {"copy", [&](Times&) { copy(); }},
    };
    std::map<std::string, std::vector<Times>> samples;
    std::mt19937 random(1);  // the same order on all ranks
    for (int round = -1; round < settings_.rounds; ++round) {
      auto order = methods;
      std::ranges::shuffle(order, random);
      for (const auto& [name, method] : order) {
        if (meeting_.is_first()) std::filesystem::remove_all(out_);
        if (meeting_.is_first()) ::sync();
        const std::int64_t begin = meeting_.wait();
        Times times;
        method(times);
        times.total = slowest(static_cast<double>(bench::now_ns() - begin) * 1e-9);
        if (times.stall == 0) times.stall = times.total;
        // The first round allocates memory.
        if (round >= 0) samples[name].push_back(times);
      }
    }
    if (!meeting_.is_first()) return;
    std::filesystem::remove_all(out_);
    for (const auto& [name, method] : methods) print(name, samples[name]);
  }

 private:
  [[nodiscard]] static muster::ExportOptions options(muster::Writers writers) { return {.writers = writers}; }

  // Returns the largest value of all ranks.
  double slowest(double seconds) {
    meeting_.block().number[meeting_.rank()] = static_cast<std::int64_t>(seconds * 1e9);
    meeting_.wait();
    std::int64_t most = 0;
    for (int rank = 0; rank < meeting_.size(); ++rank) most = std::max(most, meeting_.block().number[rank]);
    meeting_.wait();
    return static_cast<double>(most) * 1e-9;
  }

  void write_plainly(bool reserves) const {
    if (!meeting_.is_first()) return;
    constexpr std::uint64_t block = 8 << 20;
    const Tensor data = Tensor::allocate(DType::u8, {block});
    std::memset(data.mutable_data(), 0x5a, block);
    std::filesystem::create_directory(out_);
    const int file = ::open((out_ + "/file").c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    bool good = file >= 0 && (!reserves || ::posix_fallocate(file, 0, static_cast<off_t>(bytes_)) == 0);
    for (std::uint64_t at = 0; good && at < bytes_; at += block) {
      const std::uint64_t now = std::min(block, bytes_ - at);
      good = ::pwrite(file, data.data(), now, static_cast<off_t>(at)) == static_cast<ssize_t>(now);
    }
    good = good && ::fsync(file) == 0 && ::close(file) == 0;
    if (!good) throw std::runtime_error("writing plainly failed");
  }

  // Rank 0 gathers pieces of at most 8 MiB per rank, and writes them.
  void gather() {
    struct Unit {
      const Piece* piece = nullptr;
      std::int64_t begin = 0;
      std::int64_t end = 0;
    };
    std::vector<Unit> units;
    for (const Piece& piece : model_) {
      const std::int64_t rows = piece.mine.shape()[0];
      const std::int64_t most = piece.dim == 0 ? std::max<std::int64_t>(1, (8 << 20) / (hidden * 2)) : rows;
      for (std::int64_t at = 0; at < rows; at += most) units.push_back({&piece, at, std::min(rows, at + most)});
    }
    std::unique_ptr<muster::SafetensorsWriter> writer;
    if (meeting_.is_first()) {
      std::filesystem::create_directory(out_);
      std::vector<muster::TensorEntry> entries;
      for (const Piece& piece : model_) entries.push_back({piece.name, DType::bf16, piece.whole});
      writer = std::make_unique<muster::SafetensorsWriter>(out_ + "/model.safetensors", entries);
    }
    std::size_t next = 0;
    const auto source = [&]() -> std::optional<muster::Config> {
      if (next == units.size()) return std::nullopt;
      const Unit& unit = units[next++];
      if (unit.piece->dim < 0 && !meeting_.is_first()) return muster::Config();
      return muster::Config(Tensor(unit.piece->mine.view().slice(0, unit.begin, unit.end), unit.piece->mine.owner()));
    };
    std::vector<std::byte> buffer;
    const auto consume = [&](muster::LayerPart& part) {
      if (part.num_parts != 1) throw std::runtime_error("gather_each has cut a unit");
      const Unit& unit = units[part.layer];
      const Piece& piece = *unit.piece;
      const auto extent = [&](int rank) {
        const std::int64_t size = piece.whole[static_cast<std::size_t>(std::max(piece.dim, 0))];
        return std::pair(size * rank / meeting_.size(), size * (rank + 1) / meeting_.size());
      };
      const std::uint64_t row = static_cast<std::uint64_t>(piece.whole.back()) * 2;
      if (piece.dim == 1) buffer.resize(static_cast<std::size_t>(piece.whole[0]) * row);
      for (const auto& [rank, config] : part.present()) {
        if (!config.is_tensor()) continue;
        const auto bytes = config.as_tensor().bytes();
        const auto [first, last] = extent(rank);
        if (piece.dim < 0) {
          writer->write(piece.name, 0, bytes);
        } else if (piece.dim == 0) {
          writer->write(piece.name, static_cast<std::uint64_t>(first + unit.begin) * row, bytes);
        } else {
          const std::uint64_t width = static_cast<std::uint64_t>(last - first) * 2;
          for (std::uint64_t i = 0; i * width < bytes.size(); ++i)
            std::memcpy(buffer.data() + i * row + static_cast<std::uint64_t>(first) * 2, bytes.data() + i * width,
                        width);
        }
      }
      if (piece.dim == 1) writer->write(piece.name, 0, buffer);
    };
    muster::gather_each(source, muster::all_ranks, *group_, consume, {.memory_budget = 256U << 20});
    if (writer) writer->commit();
  }

  void copy() {
    if (warm_.empty()) warm_.assign(mine_, std::byte{1});
    std::byte* to = warm_.data();
    for (const Piece& piece : model_) {
      std::memcpy(to, piece.mine.data(), piece.mine.nbytes());
      to += piece.mine.nbytes();
    }
  }

  void print(const std::string& name, std::vector<Times>& times) const {
    std::vector<double> totals;
    std::vector<double> stalls;
    for (const Times& each : times) {
      totals.push_back(each.total);
      stalls.push_back(each.stall);
    }
    fmt::print(R"({{"scenario":"live_export","method":"{}","ranks":{},"bytes":{},"total":[{:.4f}],"stall":[{:.4f}]}})"
               "\n",
               name, meeting_.size(), bytes_, fmt::join(totals, ","), fmt::join(stalls, ","));
    const auto text = [](std::vector<double> seconds) {
      const auto [least, most] = std::ranges::minmax(seconds);
      return fmt::format("{:.3f} s ({:.3f} to {:.3f})", bench::median(seconds), least, most);
    };
    fmt::print(stderr, "{:16} total {}, stall {}\n", name, text(totals), text(stalls));
  }

  bench::Meeting& meeting_;
  const Settings& settings_;
  std::vector<Piece> model_;
  std::shared_ptr<muster::Group> group_;
  std::string out_;
  std::vector<muster::TensorPart> parts_;
  std::uint64_t bytes_ = 0;
  std::uint64_t mine_ = 0;
  std::vector<std::byte> warm_;
};

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  bench::Options options("Exports from the memory of ranks beside plain writes and gather_each; prints JSON lines.");
  options.add("--ranks", settings.ranks, "Number of ranks", bench::Range{1, bench::max_ranks});
  options.add("--mib", settings.mib, "Size of the model in MiB", bench::Range{});
  options.add("--rounds", settings.rounds, "Runs of each method", bench::Range{});
  options.add("--folder", settings.folder, "Where the files are written");
  options.parse(argc, argv);
  const bool good =
      bench::run_ranks(settings.ranks, [&](bench::Meeting& meeting) { LiveBench(meeting, settings).run(); });
  return good ? 0 : 2;
}
