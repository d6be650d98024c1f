// SPDX-License-Identifier: Apache-2.0
#include "tests/differential/rank_part.hpp"

#include <fcntl.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <thread>

#include "muster/export.hpp"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/merge_gather.hpp"
#include "muster/shared_arena.hpp"
#include "muster/state.hpp"
#include "muster/workspace.hpp"
#include "src/inspect/demo_model.hpp"
#include "tests/differential/draw.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/random_config.hpp"
#include "tests/support/reassembly.hpp"
#include "tests/support/temporary_directory.hpp"

namespace muster::test {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

std::string to_text(const std::vector<int>& ranks) {
  std::string text = "[";
  for (const int rank : ranks) text += (text.size() > 1 ? " " : "") + std::to_string(rank);
  return text + "]";
}

/// With MUSTER_TEST_WORDS=1 its words, too, for whoever looks into a difference.
std::string to_text(const Error& error) {
  static const bool with_words = std::getenv("MUSTER_TEST_WORDS") != nullptr;
  return std::string(to_string(error.kind())) + (error.rank() ? ", rank " + std::to_string(*error.rank()) : "") +
         (with_words ? std::string(": ") + error.what() : "");
}

/// Names and bytes of all files below a directory.
std::string digest_of_files(const std::string& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(directory))
    if (entry.is_regular_file()) files[fs::relative(entry.path(), directory)] = read_text(entry.path());
  Digest digest;
  for (const auto& [name, text] : files) {
    digest.text(name);
    digest.text(text);
  }
  return std::to_string(files.size()) + " files " + digest.digits();
}

Shape random_shape(Draw& draw) {
  Shape shape(static_cast<std::size_t>(draw.below(4)));
  const int most = draw.of({4, 40, 400});
  for (std::int64_t& extent : shape) extent = draw.one_in(12) ? 0 : 1 + draw.below(shape.size() == 3 ? 40 : most);
  return shape;
}

DType random_dtype(Draw& draw) {
  return all_dtypes()[static_cast<std::size_t>(draw.below(static_cast<int>(all_dtypes().size())))];
}

/// A tensor in ordinary memory: with gaps between its rows, with its dimensions the other way round, or without gaps.
Tensor ordinary(Draw& draw, DType dtype, const Shape& shape) {
  const std::uint64_t seed = draw.word();
  const int place = draw.below(5);
  if (is_packed(dtype) || shape.empty() || place > 1) return pattern(dtype, shape, seed);
  Shape larger = shape;
  if (place == 0) {
    larger.back() += 3;
    const Tensor base = pattern(dtype, larger, seed);
    return {base.view().slice(shape.size() - 1, 2, larger.back() - 1), base.owner()};
  }
  std::ranges::reverse(larger);
  const Tensor base = pattern(dtype, larger, seed);
  return {base.view().transposed(), base.owner()};
}

/// No NaN in any float, and booleans that are 0 or 1: sums and maxima have one right result.
void make_numbers(const Tensor& tensor) {
  const std::byte mask{tensor.dtype() == DType::boolean ? std::uint8_t{1} : std::uint8_t{0x3f}};
  for (std::size_t i = 0; i < tensor.nbytes(); ++i) tensor.mutable_data()[i] &= mask;
}

}  // namespace

struct RankPart::State {
  using Line = std::function<std::string()>;

  State(const Job& its_job, std::shared_ptr<SyncGroup> world) : job(its_job), groups{std::move(world)} {}

  Job job;
  std::vector<std::shared_ptr<SyncGroup>> groups;  // of all ranks; the later ones are duplicates
  std::optional<NFSWorkspace> workspace;
  SharedArena arena{std::uint64_t{32} << 20};
  std::uint64_t number = 0;  // of the step
  bool is_last = false;      // steps go on until the group fails
  std::string log;

  /// A result that stays while other exchanges go on, and what it was when it came.
  struct Held {
    std::function<std::string()> text;
    std::string expected;
  };
  std::deque<Held> held;

  [[nodiscard]] int rank() const { return groups.front()->rank(); }
  /// The same on all ranks of the job.
  [[nodiscard]] Draw shared(std::uint64_t what) const { return {job.seed, job.number, number, what}; }
  /// This rank's own.
  [[nodiscard]] Draw own(std::uint64_t what) const {
    return {job.seed, job.number, number, what, static_cast<std::uint64_t>(rank()) + 1};
  }

  void say(const std::string& words) { log += std::to_string(number) + " " + words + "\n"; }

  /// Says what a call brought, or whom it blames.
  void attempt(const std::string& name, const Line& call) {
    try {
      say(name + ": " + call());
    } catch (const Error& error) {
      say(name + ": " + to_text(error));
    }
  }

  void let_go(std::size_t most) {
    for (; held.size() > most; held.pop_front())
      if (held.front().text() != held.front().expected) say("a result that was held has changed");
  }

  // What the ranks of a step have in common.
  struct Lists {
    std::vector<std::vector<int>> all;
    std::vector<int> mine;  // what this rank passes: empty, or one without it, where it is in none
    std::size_t index = 0;  // of its list
    int culprit = 0;        // a member of some list, who makes the mistake where there is one
    bool is_first = false;
    bool has_culprit = false;
  };
  Lists draw_lists(Draw& draw) const {
    Lists lists;
    std::vector<int> ranks(static_cast<std::size_t>(job.ranks));
    std::iota(ranks.begin(), ranks.end(), 0);
    draw.shuffle(ranks);
    if (draw.one_in(4) && ranks.size() > 1) ranks.pop_back();
    lists.culprit = ranks[static_cast<std::size_t>(draw.below(static_cast<int>(ranks.size())))];
    if (draw.one_in(3) && ranks.size() > 1) {
      const auto cut = ranks.begin() + 1 + draw.below(static_cast<int>(ranks.size()) - 1);
      lists.all.emplace_back(cut, ranks.end());
      ranks.erase(cut, ranks.end());
    }
    lists.all.push_back(ranks);
    if (draw.one_in(2)) lists.mine = lists.all.front();
    for (std::size_t i = 0; i < lists.all.size(); ++i)
      if (std::ranges::find(lists.all[i], rank()) != lists.all[i].end()) {
        lists.mine = lists.all[i];
        lists.index = i;
        lists.is_first = lists.mine.front() == rank();
        lists.has_culprit = std::ranges::find(lists.mine, lists.culprit) != lists.mine.end();
      }
    return lists;
  }

  GatherOptions draw_options(Draw& draw) const {
    GatherOptions options;
    options.own = draw.of({Own::borrow, Own::copy});
    options.pipeline_depth = 1 + draw.below(3);
    options.debugging.check_leases = draw.one_in(4);
    if (draw.one_in(5)) {
      options.workspace.path = job.directory + "/exchange";
      options.workspace.keep_files = draw.one_in(3);
      if (draw.one_in(3)) options.workspace.zstd_level = 1;
    }
    if (draw.one_in(3)) options.pool_limit = 0;
    return options;
  }

  /// In the arena; where that is full, none.
  std::optional<Tensor> lent(Draw& draw, DType dtype, const Shape& shape) {
    const std::uint64_t seed = draw.word();
    try {
      Tensor tensor = arena.allocate(dtype, shape);
      fill(tensor.mutable_data(), tensor.nbytes(), seed);
      return tensor;
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  Config random_config(Draw& draw) {
    if (draw.one_in(8)) return {};
    Config tensors = Config::array();
    for (int i = draw.below(5); i > 0; --i) {
      const DType dtype = random_dtype(draw);
      const Shape shape = random_shape(draw);
      const std::optional<Tensor> shared_one = draw.one_in(4) ? lent(draw, dtype, shape) : std::nullopt;
      tensors.push_back(shared_one ? *shared_one : ordinary(draw, dtype, shape));
    }
    return Config::object({{"tree", RandomConfig(draw.word()).tree(3)}, {"tensors", tensors}});
  }

  template <class T>
  std::string gathered(Draw& draw, Gathered<T>&& result, const Config& source) {
    auto all = std::make_shared<Gathered<T>>(std::move(result));
    // The first rank's own tensors may be views of the source.
    const auto text = [all, source] {
      std::string words;
      for (std::size_t i = 0; i < all->size(); ++i)
        words +=
            (i == 0 ? "" : " ") + std::to_string(all->ranks()[i]) + "=" + ((*all)[i] ? digest_of(*(*all)[i]) : "none");
      return words.empty() ? std::string("nothing") : words;
    };
    std::string words = text();
    if (draw.one_in(2)) held.push_back({text, words});
    return words;
  }

  void configs(Draw& draw, SyncGroup& group) {
    Lists lists = draw_lists(draw);
    const GatherOptions options = draw_options(draw);
    Draw mine = own(1);
    Config config = random_config(mine);
    const int mistake = draw.below(12);
    const bool is_culprit = rank() == lists.culprit;
    if (mistake == 0 && is_culprit) lists.mine.push_back(lists.mine.front());
    if (mistake == 1 && is_culprit) lists.mine.push_back(job.ranks);
    if (mistake == 2 && is_culprit) std::ranges::reverse(lists.mine);
    if (mistake == 3 && is_culprit) {
      for (int depth = 0; depth <= max_config_depth; ++depth) config = Config::array({config});
    }
    attempt("configs " + to_text(lists.mine), [&] {
      return gathered(draw, get_configs_parallel(config.is_null() ? nullptr : &config, lists.mine, group, options),
                      config);
    });
  }

  void tensors(Draw& draw, SyncGroup& group) {
    Lists lists = draw_lists(draw);
    GatherOptions options = draw_options(draw);
    Draw mine = own(1);
    const int mistake = draw.below(12);
    const bool is_culprit = rank() == lists.culprit;
    // A list has one dtype and shape.
    Draw list = shared(100 + lists.index);
    DType dtype = random_dtype(list);
    Shape shape = random_shape(list);
    if (list.one_in(8)) shape = {list.of({1, 3, 5}), 200'000};
    if (mistake == 0 && is_culprit) shape.push_back(2);
    if (mistake == 1 && is_culprit) dtype = dtype == DType::u8 ? DType::i8 : DType::u8;
    // Files do not count against it.
    if (mistake == 2 && group.shares_memory((rank() + 1) % job.ranks)) {
      options.memory_budget = 4096;
      options.workspace.path.clear();
      shape = {300'000};
    }
    const std::optional<Tensor> shared_one = mine.one_in(4) ? lent(mine, dtype, shape) : std::nullopt;
    const Tensor tensor = shared_one ? *shared_one : ordinary(mine, dtype, shape);
    attempt("tensors " + to_text(lists.mine),
            [&] { return gathered(draw, get_tensors_parallel(tensor, lists.mine, group, options), tensor); });
    // A sender's ordinary memory is its own again.
    if (!lists.is_first && !shared_one && tensor.is_writable())
      std::fill_n(tensor.mutable_data(), tensor.nbytes(), std::byte{0xee});
  }

  void merge(Draw& draw, SyncGroup& group) {
    Lists lists = draw_lists(draw);
    const GatherOptions options = draw_options(draw);
    Draw list = shared(100 + lists.index);
    Draw mine = own(1);
    const DType dtype = random_dtype(list);
    Shape shape = list.one_in(2) ? random_shape(list) : Shape{12, 1 + list.below(300), 8};
    Merge kind = list.of({merge::concat(list.below(3)), merge::concat(-1), merge::concat_blocks(0, {2, 1, 1}),
                          merge::same(), merge::first(), merge::max(), merge::sum(), merge::stack()});
    if (std::holds_alternative<merge::Concat>(kind) && !shape.empty()) {
      const merge::Concat& concat = std::get<merge::Concat>(kind);
      const auto dims = static_cast<std::int64_t>(shape.size());
      const std::int64_t dim = concat.dim < 0 ? concat.dim + dims : concat.dim;
      if (dim < dims) shape[static_cast<std::size_t>(dim)] = concat.blocks.empty() ? mine.below(60) : 4 * mine.below(9);
    }
    const int mistake = draw.below(12);
    const bool is_culprit = rank() == lists.culprit;
    const Tensor tensor = pattern(dtype, shape, std::holds_alternative<merge::Same>(kind) ? list.word() : mine.word());
    make_numbers(tensor);
    if (mistake == 0 && is_culprit) kind = std::holds_alternative<merge::Sum>(kind) ? merge::max() : merge::sum();
    if (mistake == 1 && is_culprit && tensor.nbytes() > 0 && std::holds_alternative<merge::Same>(kind))
      tensor.mutable_data()[tensor.nbytes() - 1] ^= std::byte{1};
    if (mistake == 2 && is_culprit) kind = merge::concat(7);
    attempt(std::string("merge ").append(merge_name(kind)) + " " + to_text(lists.mine), [&]() -> std::string {
      auto merged = std::make_shared<Merged>(merge_tensor_parallel(tensor, kind, lists.mine, group, options));
      if (!merged->tensor()) return "nothing";
      // It may be a view of the first rank's own tensor.
      const auto text = [merged, tensor] { return digest_of(merged->tensor()->view()); };
      std::string words = text();
      if (draw.one_in(3)) held.push_back({text, words});
      return words;
    });
  }

  void stream(Draw& draw, SyncGroup& group) {
    Lists lists = draw_lists(draw);
    StreamOptions options;
    options.memory_budget = draw.of<std::uint64_t>({64_KiB, 512_KiB, 256_MiB});
    options.pipeline_depth = 1 + draw.below(3);
    options.debugging.check_leases = draw.one_in(4);
    if (draw.one_in(6)) options.workspace.path = job.directory + "/stream";
    const bool is_culprit = rank() == lists.culprit;
    const int mistake = draw.below(10);
    const auto failing_layer = static_cast<std::uint64_t>(draw.below(4));
    Draw list = shared(100 + lists.index);
    std::uint64_t layers = failing_layer + static_cast<std::uint64_t>(list.below(6));
    if (mistake < 4) ++layers;  // There is one to fail in.
    if (mistake == 2 && is_culprit) ++layers;
    std::uint64_t given = 0;
    const LayerSource source = [&]() -> std::optional<Config> {
      if (mistake == 0 && is_culprit && given == failing_layer) throw std::runtime_error("no layer");
      if (mistake == 1 && is_culprit && given == failing_layer)
        throw Error(ErrorKind::corrupt, "the layer is not what it should be");
      if (given == layers) return std::nullopt;
      Draw mine = own(1000 + given++);
      return random_config(mine);
    };
    Digest all;
    Reassembly whole;
    std::uint64_t taken = 0;
    // Of the part before this one, where senders may be two parts ahead.
    std::optional<std::pair<Tensor, std::string>> kept;
    const auto let_kept_go = [&] {
      if (kept && digest_of(kept->first) != kept->second) say("a tensor that was kept has changed");
      kept.reset();
    };
    const LayerConsumer consume = [&](LayerPart& part) {
      if (mistake == 3 && lists.has_culprit && part.layer == failing_layer)
        throw std::runtime_error("no room for the layer");
      let_kept_go();
      whole.add(part);
      if (options.pipeline_depth > 1)
        for (const auto& [rank, config] : part.present())
          if (const Config* tensors = config.is_object() ? config.as_object().find("tensors") : nullptr;
              tensors != nullptr && tensors->size() != 0 && tensors->at(0).is_tensor())
            kept.emplace(tensors->at(0).as_tensor(), digest_of(tensors->at(0).as_tensor()));
      if (!part.is_last()) return;
      for (const int rank : part.ranks) {
        const std::optional<Config> config = whole.layer(rank);
        all.text(config ? digest_of(*config) : "none");
      }
      whole = Reassembly();
      ++taken;
    };
    attempt("stream " + to_text(lists.mine), [&]() -> std::string {
      const StreamReport report = gather_each(source, lists.mine, group, consume, options);
      let_kept_go();
      return std::to_string(report.layers) + " given, " + std::to_string(taken) + " taken, " + all.digits();
    });
  }

  void states(Draw& draw, SyncGroup& group) {
    WorkspaceOptions options;
    if (draw.one_in(3)) options.zstd_level = 1;
    options.durable = false;
    if (!workspace) workspace.emplace(job.directory + "/states", groups.front(), options);
    const int reads = draw.below(job.ranks);
    const bool is_mistake = draw.one_in(6);
    Draw mine = own(1);
    std::uint64_t generation = 0;
    attempt("write a state", [&] {
      generation = workspace->write_configs_and_weights(random_config(mine));
      return std::to_string(generation);
    });
    group.barrier();
    attempt("read a state", [&]() -> std::string {
      const auto state = workspace->read_configs_and_weights_from_rank((rank() + reads) % job.ranks, generation);
      return state ? std::to_string(state->generation) + " " + digest_of(join(state->state)) : "none";
    });
    group.barrier();
    if (is_mistake)
      attempt("write an old state",
              [&] { return std::to_string(workspace->write_configs_and_weights(Config(1), {}, std::uint64_t{1})); });
  }

  void messages(Draw& draw, SyncGroup& group) {
    attempt("messages", [&] {
      Digest digest;
      std::vector<std::byte> all(static_cast<std::size_t>(job.ranks) * 64);
      std::vector<std::byte> mine(64, static_cast<std::byte>(number + static_cast<std::uint64_t>(rank())));
      group.all_gather(mine, all);
      digest.bytes(all);
      for (int i = draw.below(6); i > 0; --i) {
        const int from = draw.below(job.ranks);
        const int to = (from + 1 + draw.below(job.ranks - 1)) % job.ranks;
        std::vector<std::byte> message(static_cast<std::size_t>(draw.below(draw.of({2, 5000, 700'000}))));
        fill(message.data(), message.size(), draw.word());
        if (rank() == from) group.send(to, message);
        if (rank() != to) continue;
        message = group.receive(from, message.size());
        digest.bytes(message);
      }
      group.barrier();
      return digest.digits();
    });
  }

  /// The exit status of the program, which says nothing.
  int run(const std::string& arguments) const {
    const int status = std::system(("'" + job.program + "' " + arguments + " > /dev/null 2>&1").c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  void exports(Draw& draw, SyncGroup& group) {
    const std::string at = job.directory + "/export" + std::to_string(number);
    const int heads = draw.of({4, 6, 8});
    const inspect::LlamaSizes sizes{.hidden = heads * 8,
                                    .intermediate = 24 + draw.below(80),
                                    .layers = 1 + draw.below(4),
                                    .heads = heads,
                                    .key_value_heads = draw.of({1, 2, heads}),
                                    .vocabulary = 50 + draw.below(100),
                                    .biases = draw.one_in(2),
                                    .tied_head = draw.one_in(2)};
    const ParallelLayout layout{.tensor = draw.of({1, 2, 3, 4}), .pipeline = 1 + draw.below(2), .expert = 1};
    ExportOptions options;
    options.max_shard_size = static_cast<std::uint64_t>(draw.of({20'000, 60'000, 5'000'000}));
    options.memory_budget = std::uint64_t{64} << 20;
    options.writers = draw.of({Writers::first, Writers::owners});
    options.checksums = draw.one_in(2);
    if (draw.one_in(3)) options.to = ParallelLayout{.tensor = 1 + draw.below(3), .pipeline = 1, .expert = 1};
    // Not where somebody may be killed: the program's processes would outlive the rank.
    const bool by_program = !is_last && draw.one_in(3);
    const int mistake = draw.below(8);
    bool is_cut = true;
    if (rank() == 0)
      attempt("shard", [&] {
        is_cut = false;
        fs::create_directory(at);
        inspect::write_demo_model(inspect::llama_model(sizes), at + "/model", 1 << 30);
        int status = 0;
        if (by_program)
          status = run("shard '" + at + "/model' -n " + to_string(layout) + " --plan llama -o '" + at + "/shards'");
        else
          shard_model(at + "/model", at + "/shards", "llama", layout);
        is_cut = status == 0;
        return std::to_string(status) + " " + (is_cut ? digest_of_files(at + "/shards") : "");
      });
    const std::string shard =
        at + "/shards/rank-00000-of-" + std::to_string(100'000 + layout.ranks()).substr(1) + ".safetensors";
    if (rank() == 0 && is_cut) {
      if (mistake == 0) fs::resize_file(shard, fs::file_size(shard) - 7);
      if (mistake == 1) fs::remove(shard);
      if (mistake == 2) fs::create_directory(at + "/out");
      if (mistake == 3) write_text(at + "/out", "somebody's");
    }
    group.barrier();
    const std::string plan = mistake == 4 ? "no such plan" : "";
    if (by_program) {
      if (rank() == 0)
        say("export by the program: " +
            std::to_string(run("export '" + at + "/shards' -o '" + at + "/out' -j 2 --max-shard-size " +
                               std::to_string(options.max_shard_size) + (plan.empty() ? "" : " --plan nosuch"))));
      group.barrier();
    } else {
      attempt("export", [&] {
        export_model(at + "/shards", at + "/out", plan, group, options);
        return std::string("well");
      });
    }
    if (rank() != 0 || group.failure()) return;
    say("files: " + digest_of_files(at));
    fs::remove_all(at);
  }

  void step() {
    ++number;
    Draw draw = shared(0);
    let_go(static_cast<std::size_t>(draw.below(6)));
    try {
      if (draw.one_in(12) && groups.size() < 3) groups.push_back(groups.front()->duplicate());
      SyncGroup& group = *groups[static_cast<std::size_t>(draw.below(static_cast<int>(groups.size())))];
      if (draw.one_in(10)) trim(group);
      const int kind = draw.below(40);
      if (kind < 12) return configs(draw, group);
      if (kind < 20) return tensors(draw, group);
      if (kind < 27) return merge(draw, group);
      if (kind < 34) return stream(draw, group);
      if (kind < 36) return states(draw, group);
      if (kind < 38) return messages(draw, group);
      exports(draw, group);
    } catch (const Error& error) {
      say(to_text(error));
    }
  }

  [[nodiscard]] std::optional<Error> failure() const {
    for (const auto& group : groups)
      if (const auto failure = group->failure()) return failure;
    return std::nullopt;
  }
};

RankPart::RankPart(const Job& job, std::shared_ptr<SyncGroup> group)
    : state_(std::make_unique<State>(job, std::move(group))) {}

RankPart::~RankPart() = default;

bool RankPart::step() {
  state_->step();
  return !state_->failure();
}

void RankPart::barrier() {
  state_->groups.front()->barrier();
}

void RankPart::step_until_failure() {
  const std::string before = state_->log;
  state_->is_last = true;
  while (step()) continue;
  state_->log = before + "the group has failed: " + to_text(*state_->failure()) + "\n";
}

void RankPart::wait_for_absent(int absent, bool cancels) {
  SyncGroup& group = *state_->groups.front();
  if (group.rank() == absent) {
    while (!group.failure()) std::this_thread::sleep_for(1ms);
  } else {
    std::stop_source stop;
    // One of the others is told to stop.
    if (cancels && group.rank() == (absent + 1) % group.size()) stop.request_stop();
    std::vector<int> all(static_cast<std::size_t>(group.size()));
    std::iota(all.begin(), all.end(), 0);
    try {
      (void)get_tensors_parallel(pattern(DType::u8, {100}, 1), all, group,
                                 {.timeout = cancels ? 20s : 300ms, .stop = stop.get_token()});
    } catch (const Error&) {
    }
  }
  state_->log += "the group has failed: " + to_text(*group.failure()) + "\n";
}

void RankPart::end() {
  state_->let_go(0);
}

const std::string& RankPart::log() const {
  return state_->log;
}

}  // namespace muster::test
