// SPDX-License-Identifier: Apache-2.0
// Compares the library's gather across hosts with MPI itself in one run: the same bytes from the same ranks into memory
// that has been touched. MPI uses one MPI_Isend and MPI_Irecv per rank, or MPI_Gatherv into one buffer. The program is
// started by mpiexec on two hosts. Every repetition runs all contenders, and each ratio is computed within one
// repetition.

#include <mpi.h>
#include <sys/mman.h>

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

#include "bench/harness/options.hpp"
#include "muster/gather.hpp"
#include "muster/mpi.hpp"

namespace {

struct Settings {
  std::uint64_t bytes = 256 << 20;
  std::uint64_t tensors = 10000;
  std::uint64_t tensor_bytes = 1024;
  int repetitions = 7;
  std::vector<std::string> cases = {"large", "small"};
  std::vector<std::string> routes = {"auto", "mpi"};
};

/// One method to bring the bytes of `senders` to rank 0. All ranks call it. It returns on rank 0 when the bytes have
/// arrived; senders may return earlier.
struct Contender {
  std::string name;
  std::function<void()> move;
  std::function<void()> finish;
};

/// The results of the library, which are kept until the end of the measurement.
struct Results {
  muster::GatheredConfigs configs;
  muster::GatheredTensors tensors;
};

/// Memory that has been touched, in huge pages if the kernel provides them. The library receives into such memory too,
/// and copies into small pages are slower.
class Touched {
 public:
  Touched() = default;
  Touched(std::uint64_t bytes, int value) {
    constexpr std::uint64_t huge_page = 2 << 20;
    const std::uint64_t size = (bytes + huge_page - 1) / huge_page * huge_page;
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(huge_page, size)));
    if (!data_) throw std::bad_alloc();
    ::madvise(data_.get(), size, MADV_HUGEPAGE);
    std::memset(data_.get(), value, bytes);
  }
  [[nodiscard]] std::byte* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
};

class Bench {
 public:
  Bench(const Settings& settings, muster::Group& group) : settings_(settings), group_(group) {}

  void run(const std::string& what, bool remote_only) {
    senders_.clear();
    for (int rank = 1; rank < group_.size(); ++rank)
      if (!remote_only || group_.host_of(rank) != group_.host_of(0)) senders_.push_back(rank);
    if (senders_.empty()) return;
    list_ = senders_;
    list_.insert(list_.begin(), 0);
    sends_ = std::ranges::find(senders_, group_.rank()) != senders_.end();
    const bool is_small = what == "small";
    bytes_ = is_small ? settings_.tensors * settings_.tensor_bytes : settings_.bytes;
    source_ = Touched(bytes_, group_.rank() + 1);
    if (group_.rank() == 0) target_ = Touched(bytes_ * static_cast<std::uint64_t>(group_.size()), 0);
    if (is_small) make_config();
    std::vector<Contender> contenders = {raw()};
    if (!is_small && !remote_only) contenders.push_back(gatherv());
    for (const std::string& route : settings_.routes) contenders.push_back(ours(is_small, route));
    measure(what + (remote_only ? ", senders of the other host" : ", all ranks send"), is_small, contenders);
  }

 private:
  void make_config() {
    layer_ = muster::Config::object();
    for (std::uint64_t i = 0; i < settings_.tensors; ++i) {
      const muster::Tensor tensor =
          muster::Tensor::allocate(muster::DType::u8, {static_cast<std::int64_t>(settings_.tensor_bytes)});
      std::memset(tensor.mutable_data(), group_.rank() + 1, tensor.nbytes());
      layer_["layers." + std::to_string(i) + ".weight"] = tensor;
    }
  }

  Contender raw() {
    return {"MPI_Isend, MPI_Irecv",
            [this] {
              std::vector<MPI_Request> requests;
              const int count = static_cast<int>(bytes_);
              if (group_.rank() == 0) {
                for (const int sender : senders_) {
                  requests.emplace_back();
                  MPI_Irecv(target_.data() + static_cast<std::uint64_t>(sender) * bytes_, count, MPI_BYTE, sender, 1,
                            MPI_COMM_WORLD, &requests.back());
                }
              } else if (sends_) {
                requests.emplace_back();
                MPI_Isend(source_.data(), count, MPI_BYTE, 0, 1, MPI_COMM_WORLD, &requests.back());
              }
              MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
            },
            {}};
  }

  Contender gatherv() {
    return {"MPI_Gatherv",
            [this] {
              const auto count = static_cast<std::size_t>(group_.size());
#if MPI_VERSION >= 4
              std::vector<MPI_Count> counts(count, static_cast<MPI_Count>(bytes_));
              std::vector<MPI_Aint> places(count);
              for (std::size_t i = 0; i < count; ++i) places[i] = static_cast<MPI_Aint>(i * bytes_);
              MPI_Gatherv_c(source_.data(), static_cast<MPI_Count>(bytes_), MPI_BYTE, target_.data(), counts.data(),
                            places.data(), MPI_BYTE, 0, MPI_COMM_WORLD);
#else
              std::vector<int> counts(count, static_cast<int>(bytes_));
              std::vector<int> places(count);
              for (std::size_t i = 0; i < count; ++i) places[i] = static_cast<int>(i * bytes_);
              MPI_Gatherv(source_.data(), static_cast<int>(bytes_), MPI_BYTE, target_.data(), counts.data(),
                          places.data(), MPI_BYTE, 0, MPI_COMM_WORLD);
#endif
            },
            {}};
  }

  Contender ours(bool is_small, const std::string& route) {
    muster::GatherOptions options;
    if (route == "mpi") options.route = muster::Route::mpi;
    const auto result = std::make_shared<Results>();
    return {"muster" + (route == "mpi" ? std::string(", MPI alone") : std::string()),
            [this, is_small, options, result] {
              if (is_small) {
                auto all = muster::get_configs_parallel(&layer_, list_, group_, options);
                check(all);
                explained_ = all.explain();
                result->configs = std::move(all);
              } else {
                const muster::TensorView view(muster::DType::u8, {static_cast<std::int64_t>(bytes_)}, source_.data());
                auto all = muster::get_tensors_parallel(view, list_, group_, options);
                check(all);
                explained_ = all.explain();
                result->tensors = std::move(all);
              }
            },
            [result] { *result = {}; }};
  }

  void check(const muster::GatheredTensors& all) const {
    for (const auto& [rank, tensor] : all.present())
      if (tensor.nbytes() != bytes_ || tensor.data()[bytes_ - 1] != static_cast<std::byte>(rank + 1))
        throw std::runtime_error("the library gave other bytes");
  }
  void check(const muster::GatheredConfigs& all) const {
    for (const auto& [rank, config] : all.present())
      if (config.size() != settings_.tensors) throw std::runtime_error("the library gave other tensors");
  }

  double time(const Contender& contender) {
    MPI_Barrier(MPI_COMM_WORLD);
    const auto begin = std::chrono::steady_clock::now();
    contender.move();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    MPI_Barrier(MPI_COMM_WORLD);
    if (contender.finish) contender.finish();
    return seconds.count();
  }

  void measure(const std::string& title, bool is_small, const std::vector<Contender>& contenders) {
    std::vector<std::vector<double>> seconds(contenders.size());
    std::vector<std::string> explained(contenders.size());
    constexpr int warm_up = 2;
    for (int i = 0; i < settings_.repetitions + warm_up; ++i) {
      for (std::size_t k = 0; k < contenders.size(); ++k) {
        // The contenders take turns in running first.
        const std::size_t c = (k + static_cast<std::size_t>(i)) % contenders.size();
        explained_.clear();
        const double one = time(contenders[c]);
        if (i >= warm_up) seconds[c].push_back(one);
        explained[c] = explained_;
      }
    }
    if (group_.rank() != 0) return;
    const double moved = static_cast<double>(bytes_) * static_cast<double>(senders_.size());
    fmt::print("{}: {} senders, {} bytes each, {} repetitions\n", title, senders_.size(), bytes_,
               settings_.repetitions);
    for (std::size_t c = 0; c < contenders.size(); ++c) {
      std::vector<double> ratios;
      for (std::size_t i = 0; i < seconds[c].size(); ++i) ratios.push_back(seconds[0][i] / seconds[c][i]);
      fmt::print("  {:<24} median {:9.3f} ms  best {:9.3f} ms  {:7.3f} GB/s  speed of the first {:.3f}\n",
                 contenders[c].name, median(seconds[c]) * 1e3, *std::ranges::min_element(seconds[c]) * 1e3,
                 moved / median(seconds[c]) / 1e9, median(ratios));
      if (is_small && c > 0) {
        const double tensors = static_cast<double>(settings_.tensors);
        fmt::print(
            "  {:<24} above 1.5 messages: {:.3f} us a tensor of one rank, {:.3f} of all\n", "",
            (median(seconds[c]) - 1.5 * median(seconds[0])) / tensors * 1e6,
            (median(seconds[c]) - 1.5 * median(seconds[0])) / tensors / static_cast<double>(senders_.size()) * 1e6);
      }
      if (!explained[c].empty()) fmt::print("    {}\n", explained[c]);
    }
    std::fflush(stdout);
  }

  static double median(std::vector<double> values) {
    std::ranges::sort(values);
    return values[values.size() / 2];
  }

  const Settings& settings_;
  muster::Group& group_;
  std::vector<int> senders_;
  std::vector<int> list_;
  bool sends_ = false;
  std::uint64_t bytes_ = 0;
  Touched source_;
  Touched target_;
  muster::Config layer_;
  std::string explained_;
};

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  bench::Options options("The library's gather beside MPI's own; start with mpiexec, over one host or several.");
  options.add("--bytes", settings.bytes, "Bytes of one rank's tensor",
              bench::Range{1, std::numeric_limits<int>::max()});
  options.add("--tensors", settings.tensors, "Of a rank, where they are small", bench::Range{});
  options.add("--tensor-bytes", settings.tensor_bytes, "Of each of those", bench::Range{});
  options.add("--repetitions", settings.repetitions, "Of each measurement", bench::Range{});
  options.add("--cases", settings.cases, "large: one tensor a rank; small: many", {"large", "small"});
  options.add("--routes", settings.routes, "auto; mpi: between ranks of one host, too", {"auto", "mpi"});
  options.parse(argc, argv);

  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  try {
    const std::shared_ptr<muster::Group> group = muster::mpi_group(MPI_COMM_WORLD);
    if (group->size() < 2) throw std::runtime_error("start me with mpiexec -n 2 or more");
    Bench bench(settings, *group);
    for (const std::string& what : settings.cases) {
      bench.run(what, false);
      const auto is_far = [&](int rank) { return group->host_of(rank) != group->host_of(0); };
      bool has_near = false;
      bool has_far = false;
      for (int rank = 1; rank < group->size(); ++rank) (is_far(rank) ? has_far : has_near) = true;
      if (has_near && has_far) bench.run(what, true);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi_gather: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  MPI_Finalize();
  return 0;
}
